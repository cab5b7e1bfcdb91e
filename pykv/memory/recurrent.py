"""RecurrentMemory: one state for each sequence and layer, which stands for all its tokens.

Follows llama.cpp's ``llama_memory_recurrent``. Source: spec iswa_recurrent_hybrid.md section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, Self

import numpy as np

from pykv.batch import UBatch, ValidBatch
from pykv.cells import RecurrentCells, RecurrentSlot, RecurrentView, Undo
from pykv.cells.arguments import boolean, integer
from pykv.errors import BatchError, ParamError, UseAfterCloseError
from pykv.ggml import BufferType, Graph, Tensor
from pykv.ggml.owner import Owner
from pykv.memory import splits
from pykv.memory.attention import AttentionPlan
from pykv.memory.attention_choice import PathsInUse
from pykv.memory.attention_mass import MassWatch
from pykv.memory.base import UpdateStatus
from pykv.memory.guard import Guard
from pykv.memory.memory_buffers import allocate
from pykv.memory.recurrent_context import RecurrentContext
from pykv.memory.recurrent_graph import RecurrentGraph, StateShape
from pykv.memory.resumable import Resumable
from pykv.memory.shift_support import ShiftSupport
from pykv.memory.snapshot import Piece, Snapshots
from pykv.memory.spec import MemorySpec
from pykv.memory.state_files import StateFiles
from pykv.memory.state_part import StatePart
from pykv.memory.state_plan import StatePlan
from pykv.memory.state_recurrent import RecurrentState
from pykv.memory.state_snapshot import StatePiece, layout
from pykv.memory.verb import Listener, read, verb
from pykv.typing import POS_INF, F32Array, I32Array, I64Array


class RecurrentMemory(Snapshots, StateFiles):
    """States of several sequences.

    Attributes
    ----------
    states : the bookkeeping.
    plan : what was allocated.
    listeners : told of every verb.

    Parameters
    ----------
    spec : the layers; those with a state count.
    n_seq_max : sequences.
    n_rs_seq : states that are kept of each beside the latest: by so many tokens it can be taken back.
    place : layer → the buffer type it goes to; None = host memory.
    guard : the guard of the memory that this one is a part of; None = its own.

    Raises
    ------
    ParamError : names the argument, its value and the limit.
    AllocError : more bytes than the device has; nothing stays allocated.
    """

    def __init__(
        self,
        spec: MemorySpec,
        n_seq_max: int = 1,
        n_rs_seq: int = 0,
        *,
        place: Callable[[int], BufferType] | None = None,
        guard: Guard | None = None,
        reference_moves: bool = False,
    ) -> None:
        self.plan = StatePlan(spec, n_seq_max, n_rs_seq, place)
        self.spec, self.guard = spec, guard or Guard()
        self.listeners: list[Listener] = []
        self.states = RecurrentCells(n_seq_max, n_seq_max, n_rs_seq, reference_moves=reference_moves)
        self._buffers, self._tensors = allocate(self.plan)
        self._closed = False

    @property
    def n_cells(self) -> int:
        """Rows of states, not counting snapshots."""
        return self.states.n_cells

    @property
    def n_rs_seq(self) -> int:
        """States that are kept of each sequence beside the latest."""
        return self.states.n_rs_seq

    @property
    def n_stream(self) -> int:
        return 1

    @property
    def n_seq_max(self) -> int:
        """Sequences."""
        return self.states.n_seq_max

    def paths(self, attention: AttentionPlan) -> dict[str, PathsInUse]:
        """Return nothing: no layer attends."""
        return {}

    @property
    def used(self) -> str:
        """How full it is, in words."""
        return f"{self.states.view().n_used} of {self.n_cells} states used"

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        self.require_open()
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def owners(self) -> tuple[Owner, ...]:
        """What a graph that reads these states stands on."""
        return tuple(self._buffers)

    # batches

    def init_batch(self, batch: ValidBatch, n_ubatch: int) -> RecurrentContext | None:
        """Split a batch and find cells for all of it; None if it cannot be split so. Changes nothing.

        Raises
        ------
        BatchError : see `check_coupled`.
        """
        self.require_open()
        self.check_coupled(batch)
        keep_tail = self.n_rs_seq + 1 if self.n_rs_seq else 0
        # differs from llama.cpp: a token of several sequences is taken too (there: refused, for no need of the states)
        ubatches = splits.equal(batch, n_ubatch, sequential=not batch.has_coupled, keep_tail=keep_tail)
        return None if ubatches is None else self.prepare(ubatches)

    def check_coupled(self, batch: ValidBatch) -> None:
        """Refuse a token of sequences that share no state then; raises `BatchError`."""
        # differs from llama.cpp: there the state of the smallest id becomes that of all, and the others' are lost
        if not batch.has_coupled:
            return
        state: dict[int, object] = {s: self.states.row(s) for s in batch.seq_id_unq}
        for token, ids in enumerate(batch.seq_ids):
            if len({state[s] for s in ids}) > 1:
                raise BatchError(
                    f"token {token} is of sequences {list(ids)}, which have states of their own there: copy one to the "
                    "others with seq_cp, or decode the token once for each",
                    seq_id=ids[-1],
                )
            state |= dict.fromkeys(ids, ("behind", token))

    def prepare(self, ubatches: Sequence[UBatch]) -> RecurrentContext:
        """Find cells for ubatches that are computed one after the other."""
        return RecurrentContext(self, ubatches, self.states.prepare(ubatches))

    def bookmark(self) -> Undo:
        """Return what puts the bookkeeping back to what it is now."""
        return self.states.bookmark()

    @read
    def update(self) -> UpdateStatus:
        """Do nothing: states follow no verb."""
        return UpdateStatus.NO_UPDATE

    # graphs

    def full_shapes(self, n_tokens: int, attention: AttentionPlan) -> list[StateShape]:
        """Return the shape of the largest graph over so many tokens, the same number for each set."""
        n_seqs = self.n_seq_max
        return [StateShape(-(-n_tokens // n_seqs) * n_seqs, n_seqs, self.n_cells - n_seqs, has_fresh=True)]

    def graph(
        self, graph: Graph, shape: StateShape, attention: AttentionPlan, watches: Sequence[MassWatch] = ()
    ) -> RecurrentGraph:
        """Return this memory's part of a graph."""
        return RecurrentGraph(graph, self, shape)

    def lay_out(self, attention: AttentionPlan, n_tokens: int) -> bool:
        """Do nothing: states lie in one way only."""
        return False

    # sequences

    @verb
    def clear(self, data: bool = True) -> None:
        """Empty all cells; with `data`, also zero the buffers."""
        with_data = boolean("data", data)
        self.states.clear()
        if with_data:
            for buffer in self._buffers:
                buffer.clear()

    @verb
    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove a range of a sequence, or of all with -1; False if no snapshot is left to go back to.

        A range without the newest token changes nothing: what is in a state stays there.
        """
        return self.states.seq_rm(seq_id, p0, p1)

    @verb
    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` become what `src` is at `p1`; they share the state until one of them gets a token.

        Raises
        ------
        ParamError : `src` has no snapshot of its state at `p1`; nothing has changed.
        """
        self.states.seq_cp(src, dst, p0, p1)

    @verb
    def seq_keep(self, seq_id: int) -> None:
        """Remove all other sequences."""
        self.states.seq_keep(seq_id)

    @verb
    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Count the positions of a sequence otherwise, if it ends in the range; the state stays as it is."""
        self.states.seq_add(seq_id, p0, p1, delta)

    @verb
    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the position of a sequence by `d`, if it ends in the range; the state stays as it is."""
        self.states.seq_div(seq_id, p0, p1, d)

    def pos_min(self, seq_id: int) -> int:
        """Return the position of a sequence's last token, -1 if it is empty: a state has no other."""
        self.require_open()
        return self.states.pos_min(seq_id)

    def pos_max(self, seq_id: int) -> int:
        """Return the position of a sequence's last token, -1 if it is empty."""
        self.require_open()
        return self.states.pos_max(seq_id)

    def can_shift(self) -> ShiftSupport:
        """Return that positions can be moved: no state knows its own."""
        return ShiftSupport()

    # going on

    @read
    def resumable(self, seq_id: int, p: int) -> Resumable:
        """Return whether decoding may go on at `p`, once all from there on is removed; if not, why."""
        why = self.states.why_not_resumable(seq_id, integer("p", p, 0, POS_INF - 1))
        if why is None:
            return Resumable(int(p))
        end = self.states.pos_max(seq_id) + 1
        detail = {
            "missing": f"the state of sequence {seq_id} ends before position {end}",
            "state_gone": f"the state is at position {end}, and none is kept of position {p}",
            "rollback_pending": f"the state was taken back to position {end} and cannot be once more before a decode",
        }
        return Resumable(why[1], why[0], detail[why[0]])

    @read
    def resume_points(self, seq_id: int, p: int) -> I64Array:
        """Return at which positions up to `p` decoding may go on; see `StoredKV.resume_points`."""
        return self.states.resume_points(seq_id, p)

    # snapshots

    @property
    def snapshot_layout(self) -> object:
        """See `Snapshots.snapshot_layout`."""
        return layout(self)

    def take(self, seq_id: int, position: int, on: str) -> Piece:
        """See `Snapshots.take`."""
        return StatePiece(self, seq_id, position, on)

    # states

    def state_parts(self, partial: bool) -> tuple[StatePart, ...]:
        """See `StateFiles.state_parts`."""
        return (RecurrentState(self),)

    # data and inspection

    def tensors(self, il: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the R and the S tensor of a layer, [n_embd, n_seq_max * (1 + n_rs_seq)] f32; None where there is none.

        Raises
        ------
        ParamError : the layer has no state.
        """
        self.require_open()
        il = integer("il", il)
        if il not in self._tensors:
            raise ParamError(f"il={il}: this memory holds no state for it; it has {sorted(self._tensors)}")
        return self._tensors[il]

    def r(self, il: int, seq_id: int) -> F32Array:
        """Return the row of recent inputs of a sequence, (n_embd_r,)."""
        return self._row(il, 0, seq_id)

    def s(self, il: int, seq_id: int) -> F32Array:
        """Return the state of a sequence, (n_embd_s,)."""
        return self._row(il, 1, seq_id)

    def cells(self, stream: int = 0) -> RecurrentView:
        """Return the cells as they are from now on, read-only."""
        self.require_open()
        integer("stream", stream, 0, 0)
        return self.states.view()

    def seen(self, seq_id: int, il: int | None = None) -> tuple[I32Array, I32Array]:
        """Return the position and the token of a sequence's state, (1,) each, (0,) if it is empty."""
        pos = self.pos_max(seq_id)
        found = np.array([] if pos < 0 else [pos], np.int32)
        return found, np.full_like(found, -1)

    def k(self, il: int, seq_id: int, derotate: bool = False) -> NoReturn:
        """Raise `ParamError`: a state has no keys."""
        raise ParamError(f"il={il!r}: this memory holds states, and no keys; see r() and s()")

    def v(self, il: int, seq_id: int) -> NoReturn:
        """Raise `ParamError`: a state has no values."""
        raise ParamError(f"il={il!r}: this memory holds states, and no values; see r() and s()")

    def kv_of(self, il: int, slot: RecurrentSlot) -> NoReturn:
        """Raise `ParamError`: a state has no keys."""
        raise ParamError(f"il={il!r}: this memory holds states, and no keys and values")

    def visible(self, seq_id: int, pos: int) -> dict[str, I32Array]:
        """Return nothing: a state shows no positions."""
        self.require_open()
        return {}

    @read
    def check(self) -> None:
        """Verify every invariant; raises AssertionError naming what is wrong."""
        self.states.check()

    @read
    def dump(self, stream: int = 0) -> str:
        """Return the cells up to the last used one: ``2:5{0,1}`` is a state of sequences 0 and 1 behind position 5."""
        return " ".join(self.cells(stream).words())

    def require_open(self) -> None:
        """Raise `UseAfterCloseError` if it is closed."""
        if self._closed:
            raise UseAfterCloseError("the memory is closed")

    def close(self) -> None:
        """Free the buffers. Graphs that still stand on them keep them until they go."""
        self.guard.require_whole("close")
        with self.guard:
            self.release()

    def follow(self) -> None:
        """Do what `update` does, nothing. For who has entered the guard."""
        self.require_open()

    def release(self) -> None:
        """Do what `close` does. For who has entered the guard."""
        self._closed = True
        for buffer in self._buffers:
            buffer.close()

    def __enter__(self) -> Self:
        self.require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @read
    def _row(self, il: int, which: int, seq_id: int) -> F32Array:
        row, tensor = self.states.row(seq_id), self.tensors(il)[which]
        if tensor is None:
            raise ParamError(f"il={il}: this layer has no {'rs'[which]} state")
        if row is None:
            raise ParamError(f"seq_id={seq_id}: the sequence is empty")
        out = np.empty(tensor.ne[0], np.float32)
        tensor.get_into(out, row * out.nbytes)
        return out
