"""KVCache: attention memory. Bookkeeping in `CellStreams`, one K and one V tensor per layer in ggml buffers.

Never looks at a model: a `MemorySpec` says what the layers are. Follows llama.cpp's ``llama_kv_cache``.

    K  [n_embd_k, n_cells, n_stream]          a cell is a row
    V  [n_embd_v, n_cells, n_stream]          likewise, or transposed: a channel's cells are contiguous
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from pykv.batch import Splitter, UBatch, ValidBatch, whole
from pykv.cells import CellStreams, CellsView, SlotInfo
from pykv.cells.arguments import sequence_id
from pykv.errors import BatchError, ParamError, PendingUpdateError, UseAfterCloseError
from pykv.ggml import BufferType, Tensor
from pykv.ggml.owner import Owner
from pykv.memory.base import UpdateStatus
from pykv.memory.guard import Guard
from pykv.memory.kv_buffers import allocate
from pykv.memory.kv_context import KVContext
from pykv.memory.kv_plan import KVPlan, KVSettings
from pykv.memory.kv_sharing import shared_rotation, shared_tensors
from pykv.memory.spec import MemorySpec
from pykv.memory.v_layout import turn_v


class KVCache:
    """K and V of past tokens, for several sequences.

    Parameters
    ----------
    spec : the layers.
    settings : sizes, types and layout; or give its fields as keywords.
    place : layer → the buffer type it goes to; None = host memory.
    other, share : a cache whose cells this one sees, and layer → the layer of it whose tensors are read.
        All verbs but `clear` then leave the cells alone: they belong to `other`.

    Raises
    ------
    ParamError : settings that the layers cannot honour.
    AllocError : more bytes than the device has; nothing stays allocated.
    """

    def __init__(
        self,
        spec: MemorySpec,
        settings: KVSettings | None = None,
        *,
        place: Callable[[int], BufferType] | None = None,
        other: KVCache | None = None,
        share: Mapping[int, int] | None = None,
        **keywords: Any,
    ) -> None:
        if settings is None:
            settings = KVSettings.of(**keywords)
        elif keywords:
            raise ParamError(f"{', '.join(keywords)}: given beside settings; put them into one of the two")
        self._plan = KVPlan(spec, settings, place, share or {})
        self.spec, self.settings, self.other = spec, settings, other
        self._tensors = shared_tensors(self._plan, other)
        self.rot_k, self.rot_v = shared_rotation(self._plan, other)
        self._buffers, own = allocate(self._plan)
        self._tensors.update(own)
        self._tensors.update({il: self._tensors[source] for il, source in self._plan.reused.items()})
        self.streams: CellStreams = (
            other.streams
            if other is not None
            else CellStreams(
                settings.n_cells,
                n_seq_max=settings.n_seq_max,
                unified=settings.unified,
                window=spec.window,
                n_pos_per_embd=spec.n_pos_per_embd,
            )
        )
        self._v_trans = settings.v_trans
        self.guard: Guard = other.guard if other is not None else Guard()
        self._is_read_by_others = self._closed = False
        if other is not None and self._plan.shared:
            other._is_read_by_others = True

    @staticmethod
    def plan(spec: MemorySpec, settings: KVSettings, *, place: Callable[[int], BufferType] | None = None) -> KVPlan:
        """Return what a cache of these settings takes, without allocating it."""
        return KVPlan(spec, settings, place)

    # data

    @property
    def n_cells(self) -> int:
        """Cells per stream."""
        return self.settings.n_cells

    @property
    def n_stream(self) -> int:
        return self.settings.n_stream

    @property
    def n_embd_v_max(self) -> int:
        """Elements of the widest V row; the scatter indices of transposed V are made for it."""
        return max((v.ne[0] for _, v in self._tensors.values()), default=0)

    @property
    def v_trans(self) -> bool:
        """Whether V is stored transposed now."""
        return self._v_trans

    @property
    def nbytes(self) -> int:
        """Bytes of the K and V buffers of this cache."""
        self._require_open()
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def owners(self) -> tuple[Owner, ...]:
        """What a graph that reads this cache stands on."""
        own: tuple[Owner, ...] = tuple(self._buffers)
        return own + (self.other.owners if self.other is not None else ())

    def tensors(self, il: int) -> tuple[Tensor, Tensor]:
        """Return the K and V tensors that a layer reads.

        Raises
        ------
        ParamError : the layer has none here.
        """
        self._require_open()
        if il not in self._tensors:
            raise ParamError(f"il={il}: this cache holds no K and V for it; it has {sorted(self._tensors)}")
        return self._tensors[il]

    def store_v(self, transposed: bool) -> None:
        """Lay out the stored V of all layers the other way; the same values in the same bytes. Mutates the data.

        Raises
        ------
        ParamError : V is quantised, layers differ in width, or another cache shares cells or layers with this one.
        """
        if transposed == self.v_trans:
            return
        if not self.can_turn_v:
            raise ParamError(f"transposed={transposed}: the V of this cache can only lie as it was made")
        with self._changing():
            turn_v([self._tensors[layer.il][1] for layer in self._plan.layers], self.n_used, transposed)
            self._v_trans = transposed

    @property
    def can_turn_v(self) -> bool:
        """Whether `store_v` can change the layout."""
        widths = {layer.n_embd_v for layer in self._plan.layers}
        is_alone = self.other is None and not self._is_read_by_others
        return is_alone and len(widths) == 1 and not self._plan.type_v.is_quantized

    @property
    def n_used(self) -> int:
        """Cells up to the last one in use, over all streams."""
        return max(cells.used_max_p1 for cells in self.streams.cells)

    def cells(self, stream: int = 0) -> CellsView:
        """Return what the cells of one stream hold now: `pos`, `shift`, `owners`."""
        self._require_open()
        if type(stream) is not int or not 0 <= stream < self.n_stream:
            raise ParamError(f"stream={stream!r} must lie in 0..{self.n_stream - 1}")
        return CellsView(self.streams.cells[stream])

    # batches

    def init_batch(self, batch: ValidBatch, n_ubatch: int) -> KVContext | None:
        """Split a batch and find cells for all of it. Does not modify the cache.

        Returns
        -------
        The plan, or None if there is no room for the whole batch.

        Raises
        ------
        BatchError : a token of several sequences, where each has a stream of its own.
        """
        self._require_open()
        if self.n_stream > 1 and batch.has_coupled:
            # differs from llama.cpp: not "no slot", because no smaller batch could help
            raise BatchError("seq_id: tokens of several sequences at once need kv_unified=True, shared cells")
        ubatches = self._split(batch, n_ubatch)
        if sum(ubatch.n_tokens for ubatch in ubatches) < batch.n_tokens:
            return None
        slots = self.streams.prepare(ubatches)
        return None if slots is None else KVContext(self, ubatches, slots)

    def apply(self, slot: SlotInfo, ubatch: UBatch) -> None:
        """Write a ubatch's bookkeeping into its slot. A cache that shares its cells leaves them alone."""
        if self.other is None:
            self.streams.apply(slot, ubatch)

    def update(self) -> UpdateStatus:
        """Carry out queued changes of stored data: stream copies and K-shifts.

        Raises
        ------
        PendingUpdateError : there are some; this version has no graphs for them. The queue stays.
        """
        self._require_open()
        if self.other is not None:
            return UpdateStatus.NO_UPDATE  # the other cache's update moves its keys, and ends what is pending
        self.streams.drop_useless_copies()
        if self.streams.pending_copies:
            raise PendingUpdateError(
                f"seq_cp queued copies between streams {self.streams.pending_copies}, whose rows cannot be copied "
                "yet; clear() drops them, kv_unified=True shares cells instead"
            )
        if not self.streams.has_shift:
            return UpdateStatus.NO_UPDATE
        if self.streams.shifts().any() and any(layer.rope is not None for layer in self.spec.layers):
            raise PendingUpdateError(
                "seq_add or seq_div moved positions, and the stored keys cannot be rotated yet; remove the moved "
                "range, or clear()"
            )
        self.streams.reset_shift()  # what moved is gone or back in place, or its keys are not rotated
        return UpdateStatus.SUCCESS

    # sequences

    def clear(self, data: bool = True) -> None:
        """Empty all cells and forget queued work; with `data`, also zero the buffers."""
        with self._changing():
            # differs from llama.cpp: a cache that shares another's cells does not reset them, and queued copies go too,
            # because what they would copy is gone
            if self.other is None:
                self.streams.clear()
                self.streams.pending_copies.clear()
            if data:
                for buffer in self._buffers:
                    buffer.clear()

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove a range of a sequence, or of all sequences with -1. Always True."""
        with self._changing(0 if seq_id == -1 else seq_id):
            return self.streams.seq_rm(seq_id, p0, p1) if self.other is None else True

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` share the cells of a range of `src`; across streams, queue a copy of the whole stream."""
        with self._changing(src, dst):
            if self.other is None:
                self.streams.seq_cp(src, dst, p0, p1)

    def seq_keep(self, seq_id: int) -> None:
        """Remove all other sequences from the stream of this one."""
        with self._changing(seq_id):
            if self.other is None:
                self.streams.seq_keep(seq_id)

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move the positions of a range by `delta`, for all sequences that share its cells."""
        with self._changing(seq_id):
            if self.other is None:
                self.streams.seq_add(seq_id, p0, p1, delta)

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions of a range by `d`, for all sequences that share its cells."""
        with self._changing(seq_id):
            if self.other is None:
                self.streams.seq_div(seq_id, p0, p1, d)

    def pos_min(self, seq_id: int) -> int:
        """Return the smallest position of a sequence, -1 if it is empty."""
        self._require_open()
        return self.streams.pos_min(seq_id)

    def pos_max(self, seq_id: int) -> int:
        """Return the largest position of a sequence, -1 if it is empty."""
        self._require_open()
        return self.streams.pos_max(seq_id)

    def can_shift(self) -> bool:
        """Return whether positions can be moved."""
        return self.spec.n_pos_per_embd == 1

    def check(self) -> None:
        """Verify every invariant of the bookkeeping; raises AssertionError."""
        self.streams.check()

    def close(self) -> None:
        """Free the buffers. Graphs that still stand on them keep them until they go."""
        with self.guard:
            self._closed = True
            for buffer in self._buffers:
                buffer.close()

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # mechanism

    def _split(self, batch: ValidBatch, n_ubatch: int) -> list[UBatch]:
        if self.n_stream == 1 and batch.n_tokens <= n_ubatch:
            return [whole(batch, batch.n_tokens, equal_seqs=False)]  # generation: nothing to split
        splitter, ubatches = Splitter(batch), []
        while splitter.n_used < batch.n_tokens:
            if self.n_stream == 1:
                ubatch = splitter.simple(n_ubatch)
            else:
                ubatch = splitter.equal(n_ubatch, sequential=True)
            if ubatch is None:
                break
            ubatches.append(ubatch)
        return ubatches

    def _changing(self, *seq_ids: int) -> Guard:
        """Return what to enter around a change of some sequences, if the cache is open and has them."""
        self._require_open()
        for seq_id in seq_ids:
            # differs from llama.cpp: one stream for all takes no ids up to 255 either, because no batch could ever
            # continue them, and the cells that they own would be lost
            sequence_id("seq_id", seq_id, self.settings.n_seq_max)
        return self.guard

    def _require_open(self) -> None:
        if self._closed:
            raise UseAfterCloseError("the KV cache is closed")
        if self.other is not None:
            self.other._require_open()
