"""What a state holds of one recurrent memory: a row of R and one of S for each sequence, or for several that share it.

Source: spec state_format.md section 6.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pykv.errors import StateError
from pykv.ggml import DType, Tensor
from pykv.memory.state_cells import CellsOf
from pykv.memory.state_convert import Form, fill
from pykv.memory.state_part import ALL, Fill, Loading, Payload, Piece
from pykv.state_format import CellRecords, Dialect, RowsLayout, StatesLayout, StatesSection, states_heads
from pykv.typing import I64Array

if TYPE_CHECKING:
    from pykv.memory.recurrent import RecurrentMemory

_FORM = Form(DType.F32)


class RecurrentState:
    """One recurrent memory, as states see it."""

    def __init__(self, memory: RecurrentMemory) -> None:
        self._memory = memory

    @property
    def version(self) -> int:
        """See `StatePart.version`."""
        return self._memory.states.n_changes

    @property
    def layout(self) -> StatesLayout:
        """What it stores. A layer that lacks one of the two has rows of no bytes there."""
        states = [layer.state for layer in self._memory.plan.layers]
        return StatesLayout(
            n_cells=self._memory.n_cells,
            n_seq_max=self._memory.n_seq_max,
            n_layer=len(self._memory.spec.layers),
            r=tuple(_rows_of(state.n_embd_r) for state in states),
            s=tuple(_rows_of(state.n_embd_s) for state in states),
        )

    def pieces(self, seq_id: int, dialect: Dialect) -> list[Piece]:
        """See `StatePart.pieces`. Both dialects are the same here."""
        states = self._states_of(seq_id)
        counts = [0 if seq_id != ALL else len(ids) for _, ids, _ in states]
        ids = [s for _, owners, _ in states if seq_id == ALL for s in owners]
        pos, n_ids = np.array([p for p, _, _ in states], np.int32), np.array(counts, np.int32)
        heads = states_heads(CellRecords(pos, n_ids, np.array(ids, np.int32)), self.layout)
        rows = np.array([row for _, _, row in states], np.int64)
        found: list[Piece] = [heads.first]
        for head, tensor in zip(heads.rows, self._tensors(), strict=True):
            found.append(head)
            if tensor is not None and rows.size:
                some = CellsOf(tensor, rows, tensor.ne[0])
                found.append(Payload(some.nbytes, partial(some.send, by_channel=False)))
        return found

    def place(self, section: StatesSection, loading: Loading) -> list[Fill]:
        """See `StatePart.place`."""
        rows = self._put_all(section) if loading.is_whole else self._put_one(section, loading)
        if not rows.size:
            return []
        return [
            partial(fill, CellsOf(tensor, rows, tensor.ne[0]), record, loading.data, (_FORM, _FORM))
            for tensor, record in zip(self._tensors(), section.r + section.s, strict=True)
            if tensor is not None
        ]

    def _put_one(self, section: StatesSection, loading: Loading) -> I64Array:
        cells, states = section.cells, self._memory.states
        if cells.n > 1:
            raise StateError(f"a sequence has one state, this one has {cells.n}", offset=section.span.start)
        if cells.n == 0:
            states.seq_rm(loading.seq_id)
            return np.empty(0, np.int64)
        return np.array([states.place(loading.seq_id, int(cells.pos[0]))])

    def _put_all(self, section: StatesSection) -> I64Array:
        cells = section.cells
        if np.unique(cells.ids).size != cells.ids.size or not cells.n_ids.all():
            raise StateError("a sequence with two states, or a state of no sequence", offset=section.span.start)
        owners = np.split(cells.ids, np.cumsum(cells.n_ids)[:-1]) if cells.n else []
        self._memory.states.place_all(
            [(int(pos), tuple(ids.tolist())) for pos, ids in zip(cells.pos, owners, strict=True)]
        )
        return np.arange(cells.n)

    def _states_of(self, seq_id: int) -> list[tuple[int, tuple[int, ...], int]]:
        """Return position, sequences and row of each state that is written, by cells."""
        table = self._memory.states.table
        if seq_id != ALL:
            row = self._memory.states.row(seq_id)
            return [] if row is None else [(table.pos(seq_id), (seq_id,), row)]
        found = []
        for cell, owners in enumerate(table.owners):
            apart: dict[tuple[int, int], tuple[int, ...]] = {}
            for s in owners:
                key = table.pos(s), table.plane[s] * table.n + cell
                apart[key] = (*apart.get(key, ()), s)
            # differs from llama.cpp: sequences that share a cell, and one of which has gone back, are written as two
            # states (there: the process ends)
            found += [(pos, ids, row) for (pos, row), ids in apart.items()]
        return found

    def _tensors(self) -> list[Tensor | None]:
        """Return R of all layers, then S."""
        pairs = [self._memory.tensors(layer.il) for layer in self._memory.plan.layers]
        return [r for r, _ in pairs] + [s for _, s in pairs]


def _rows_of(width: int) -> RowsLayout:
    return RowsLayout(int(DType.F32), DType.F32.row_size(width))
