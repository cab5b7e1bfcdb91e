"""KVCache: attention memory for several sequences.

Never looks at a model: a `MemorySpec` says what the layers are. Follows llama.cpp's ``llama_kv_cache``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pykv.batch import UBatch, ValidBatch
from pykv.cells import SlotInfo
from pykv.cells.arguments import boolean
from pykv.errors import BatchError, ContextLengthExceeded, ShiftUnsupported
from pykv.ggml import BufferType
from pykv.memory.kv_context import KVContext, split
from pykv.memory.kv_plan import KVPlan
from pykv.memory.kv_settings import KVSettings
from pykv.memory.shift_support import ShiftSupport
from pykv.memory.spec import MemorySpec
from pykv.memory.stored_kv import StoredKV
from pykv.memory.verb import verb
from pykv.typing import as_int


class KVCache(StoredKV):
    """K and V of past tokens: room for batches, and the verbs over sequences.

    A verb changes the bookkeeping at once and notes which stored rows have to follow. Parameters and errors as in
    `StoredKV`.
    """

    @staticmethod
    def plan(spec: MemorySpec, settings: KVSettings, *, place: Callable[[int], BufferType] | None = None) -> KVPlan:
        """Return what a cache of these settings takes, without allocating it."""
        return KVPlan(spec, settings, place)

    # batches

    def init_batch(self, batch: ValidBatch, n_ubatch: int) -> KVContext | None:
        """Carry out what is queued, split a batch, and find cells for all of it. Takes no cells yet.

        Returns
        -------
        The plan, or None if there is no room for the whole batch.

        Raises
        ------
        BatchError : a token of several sequences, where each has a stream of its own.
        ContextLengthExceeded : a sequence brings more tokens than a stream has cells.
        """
        self.follow()
        if self.n_stream > 1 and batch.has_coupled:
            # differs from llama.cpp: not "no slot", because no smaller batch could help
            raise BatchError("seq_id: tokens of several sequences at once need kv_unified=True, shared cells")
        ubatches = split(batch, self.n_stream, n_ubatch)
        if sum(ubatch.n_tokens for ubatch in ubatches) < batch.n_tokens:
            return None
        slots = self.streams.prepare(ubatches)
        if slots is None:
            self._check_share(batch)
            return None
        return KVContext(self, ubatches, slots)

    def apply(self, slot: SlotInfo, ubatch: UBatch) -> None:
        """Write a ubatch's bookkeeping into its slot. A cache that shares its cells leaves them alone."""
        self.follow()
        if self.other is None:
            self.streams.apply(slot, ubatch)

    # sequences

    @verb
    def clear(self, data: bool = True) -> None:
        """Empty all cells and forget queued work; with `data`, also zero the buffers."""
        # differs from llama.cpp: a cache that shares another's cells does not reset them
        with_data = boolean("data", data)
        if self.other is None:
            self.streams.clear()
        if with_data:
            self.store.clear()

    @verb
    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove a range of a sequence, or of all sequences with -1. Always True."""
        if as_int(seq_id) != -1:
            self._check_ids(seq_id)
        return self.streams.seq_rm(seq_id, p0, p1) if self.other is None else True

    @verb
    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` hold a range of `src` too. In one stream, cells are shared. Across streams, `dst` becomes in that
        range what `src` is; the rows are copied at the next update.

        Raises
        ------
        NoSlotError : the stream of `dst` lacks cells.
        """
        self._check_ids(src, dst)
        if self.other is None:
            self.streams.seq_cp(src, dst, p0, p1)

    @verb
    def seq_keep(self, seq_id: int) -> None:
        """Remove all other sequences from the stream of this one."""
        self._check_ids(seq_id)
        if self.other is None:
            self.streams.seq_keep(seq_id)

    @verb
    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move the positions of a range by `delta`; what falls below 0 is removed.

        Cells shared with other sequences are copied first: those keep their positions, to the bit.

        Raises
        ------
        ShiftUnsupported : see `can_shift`; or shared cells, and too few free ones.
        """
        self._check_shift(seq_id)
        if self.other is None:
            self.streams.seq_add(seq_id, p0, p1, delta)

    @verb
    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions of a range by `d`, rounding down. Shared cells and errors as in `seq_add`."""
        self._check_shift(seq_id)
        if self.other is None:
            self.streams.seq_div(seq_id, p0, p1, d)

    def can_shift(self) -> ShiftSupport:
        """Return whether positions can be moved, and if not, why."""
        return replace(self.spec.can_shift, is_lossy=self.store.plan.type_k.is_quantized)

    # mechanism

    def _check_share(self, batch: ValidBatch) -> None:
        """Refuse a sequence that could not be stored in an empty cache either."""
        counts = np.bincount(batch.seq_first)
        longest = int(counts.argmax())
        if counts[longest] > self.n_cells:
            raise ContextLengthExceeded(
                f"sequence {longest} brings {counts[longest]} tokens; its share of the context is {self.n_cells} cells"
            )

    def _check_shift(self, seq_id: int) -> None:
        self._check_ids(seq_id)
        support = self.can_shift()
        if support.reason is not None:
            raise ShiftUnsupported(support.reason, support.detail)
