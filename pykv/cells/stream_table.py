"""Streams of cells, where the search in each begins, and the ubatches that go into them.

`CellStreams` adds what is done to sequences. Source: spec kv_cache.md sections 2 to 5.

    unified            one stream for all sequences; forks share cells
    not unified        one stream per sequence, ``stream_of(s) == s``
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pykv.batch.ubatch import UBatch
from pykv.cells.arguments import sequence_id
from pykv.cells.cell_table import NO_TOKEN
from pykv.cells.cells_view import CellsView
from pykv.cells.kv_cells import KVCells
from pykv.cells.picked import pick
from pykv.cells.placing import Journal, Part, check_positions, check_writable, place
from pykv.cells.row_copy import RowCopy
from pykv.cells.slot import SlotInfo, find_slot
from pykv.cells.window import NO_WINDOW, Window
from pykv.errors import ParamError
from pykv.typing import MAX_SEQ, I64Array

Undo = Callable[[], None]
"""Puts bookkeeping back to what it was."""


class StreamTable:
    """The cells of one KV cache.

    Attributes
    ----------
    cells : bookkeeping of each stream.
    heads : per stream, the cell where the next search starts; `n_cells` means past the last one.
    n_cells : cells of one stream.
    n_seq_max : sequences with a stream of their own, if not unified.
    window : the cells it hides from every later token may be reused.
    n_changes : goes up with every change, so that a plan can tell whether it is still good.
    pending_copies : rows that are still to be copied, in order.

    Parameters
    ----------
    reference_moves : move positions as llama.cpp does: shared cells for all their owners, and with its sign of the
        shift in `seq_div`.
    """

    def __init__(
        self,
        n_cells: int,
        *,
        n_seq_max: int = 1,
        unified: bool = True,
        window: Window = NO_WINDOW,
        reference_moves: bool = False,
    ) -> None:
        if not 1 <= n_seq_max <= MAX_SEQ:
            raise ParamError(f"n_seq_max = {n_seq_max}: must be 1 to {MAX_SEQ}")
        n_stream = 1 if unified else n_seq_max
        self.cells = tuple(KVCells(n_cells, reference_div_sign=reference_moves) for _ in range(n_stream))
        self.heads = [0] * n_stream
        self.n_cells = n_cells
        self.n_seq_max = n_seq_max
        self.window = window
        self.n_changes = 0
        self.pending_copies: list[RowCopy] = []
        self._reference_moves = reference_moves
        self._n_ids = MAX_SEQ if n_stream == 1 else n_stream

    @property
    def n_stream(self) -> int:
        return len(self.cells)

    def stream_of(self, seq_id: int) -> int:
        """Return the stream that holds a sequence.

        Raises
        ------
        SequenceError
            If there is no such sequence.
        """
        if type(seq_id) is not int or not 0 <= seq_id < self._n_ids:  # spares the decode path a call
            seq_id = sequence_id("seq_id", seq_id, self._n_ids)
        return 0 if len(self.cells) == 1 else seq_id

    # slots

    def find_slot(self, ubatch: UBatch, cont: bool = False) -> SlotInfo | None:
        """Find cells for a ubatch; None if they do not fit. Does not modify the cells."""
        return find_slot(self, ubatch, cont)

    def apply(self, slot: SlotInfo, ubatch: UBatch, ext_always: bool = False, embd_tok: int = NO_TOKEN) -> None:
        """Store a ubatch's bookkeeping in its slot and move the heads behind it.

        Parameters
        ----------
        slot, ubatch
            What a search found, and for what.
        ext_always
            Record column, row and token for embeddings too (models with n-gram embeddings).
        embd_tok
            The token that is recorded for embeddings.

        Raises
        ------
        ParamError
            If the slot does not fit; nothing has changed then.
        """
        self._apply(slot, ubatch, ext_always, embd_tok)
        self.n_changes += 1

    def retract(self, slot: SlotInfo) -> None:
        """Empty the cells of a slot that was applied, because their rows could not be computed."""
        self.n_changes += 1
        for stream, idxs in zip(slot.streams, slot.idxs, strict=True):
            self.cells[stream].rm(idxs)
            self._freed(stream, np.sort(idxs))

    def prepare(self, ubatches: Sequence[UBatch]) -> list[SlotInfo] | None:
        """Find slots for ubatches that will be applied one after the other; None if they do not all fit.

        Leaves everything as it was, also the heads and cells that a later ubatch would purge.
        """
        # differs from llama.cpp: purged cells and all heads come back, because refusal must leave no trace
        slots: list[SlotInfo] = []
        heads, journal = self.heads.copy(), Journal()
        try:
            for i, ubatch in enumerate(ubatches):
                slot = self.find_slot(ubatch)
                if slot is None:
                    return None
                slots.append(slot)
                if i + 1 < len(ubatches):  # nobody looks behind the last one
                    self._apply(slot, ubatch, journal=journal)
            return slots
        finally:
            journal.undo()
            self.heads[:] = heads

    def bookmark(self) -> Undo:
        """Return what puts cells, heads and pending copies back to what they are now."""
        journal, heads, copies = Journal(), self.heads.copy(), self.pending_copies.copy()
        shifting = [cells.has_shift for cells in self.cells]
        for cells in self.cells:
            journal.note(cells, np.arange(cells.n))

        def undo() -> None:
            self.n_changes += 1
            journal.undo()
            for cells, has_shift in zip(self.cells, shifting, strict=True):
                cells.has_shift = has_shift
            self.heads[:], self.pending_copies[:] = heads, copies

        return undo

    def n_kv(self, slot: SlotInfo, n_pad: int = 1) -> int:
        """Return how many cells a graph must look at: all used ones of the slot's streams, rounded up."""
        return self.n_kv_of(max(self.cells[s].used_max_p1 for s in slot.streams), n_pad)

    def n_kv_of(self, n_used: int, n_pad: int = 1) -> int:
        """Return how many cells a graph must look at where the first `n_used` of a stream may be in use."""
        pad = max(n_pad, 256)
        return min(self.n_cells, max(pad, -(-n_used // pad) * pad))

    # questions

    def pos_min(self, seq_id: int) -> int:
        """Return the smallest position of a sequence, -1 if it is empty."""
        return self.cells[self.stream_of(seq_id)].pos_min(int(seq_id))

    def pos_max(self, seq_id: int) -> int:
        """Return the largest position of a sequence, -1 if it is empty."""
        return self.cells[self.stream_of(seq_id)].pos_max(int(seq_id))

    def check(self) -> None:
        """Verify every invariant from scratch; raises AssertionError."""
        for stream, cells in enumerate(self.cells):
            cells.check()
            head = self.heads[stream]
            assert 0 <= head <= self.n_cells, f"stream {stream}: head {head} is outside 0 to {self.n_cells}"
            strangers = [s for s in cells.sequences() if self.stream_of(s) != stream]
            assert not strangers, f"stream {stream} holds sequences {strangers} of other streams"

    def dump(self, stream: int = 0) -> str:
        """Return the cells of a stream up to the last used one, as `CellsView.words` has them."""
        return " ".join(CellsView(self.cells[stream]).words())

    # mechanism

    def _apply(
        self,
        slot: SlotInfo,
        ubatch: UBatch,
        ext_always: bool = False,
        embd_tok: int = NO_TOKEN,
        journal: Journal | None = None,
    ) -> None:
        n_streams, n = slot.idxs.shape
        if slot.n_tokens != ubatch.n_tokens or n_streams != len(slot.streams):
            raise ParamError(f"slot: has cells for {slot.n_tokens} tokens, the ubatch has {ubatch.n_tokens}")
        check_positions(ubatch)
        for s in ubatch.seq_id_unq:
            self.stream_of(s)
        chosen = [pick(idxs, self.n_cells) for idxs in slot.idxs]
        for stream, one in zip(slot.streams, chosen, strict=True):
            check_writable(self.cells[stream], one, self.window)
        with_ext = ext_always or ubatch.is_pos_2d or ubatch.token is not None
        part = Part(ubatch, slice(0, n), with_ext, embd_tok)
        for k, stream in enumerate(slot.streams):
            if k:
                part = replace(part, tokens=slice(k * n, (k + 1) * n))
            place(self.cells[stream], chosen[k], part, journal)
            self.heads[stream] = int(slot.idxs[k, -1]) + 1

    def _freed(self, stream: int, idxs: I64Array) -> None:
        """Let the next search start at the first of the cells that became empty."""
        if idxs.size:
            self.heads[stream] = min(self.heads[stream], int(idxs[0]))
