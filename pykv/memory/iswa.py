"""ISWACache: layers that see everything and layers with a sliding window, each kind in a cache of its own size.

Follows llama.cpp's ``llama_kv_cache_iswa``. Source: spec iswa_recurrent_hybrid.md section 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pykv.batch import ValidBatch
from pykv.cells import NO_WINDOW, CellsView, SlotInfo, SwaType, last_kept
from pykv.cells.arguments import integer
from pykv.errors import BatchError, NoSlotError, ParamError, ShiftUnsupported
from pykv.ggml import BufferType, Graph, Tensor
from pykv.memory import splits
from pykv.memory.attention import AttentionPlan
from pykv.memory.attention_choice import PathsInUse
from pykv.memory.attention_mass import MassWatch
from pykv.memory.guard import Guard
from pykv.memory.iswa_graph import ISWAGraph
from pykv.memory.kv_cache import KVCache
from pykv.memory.kv_plan import KVPlan
from pykv.memory.kv_settings import KVSettings
from pykv.memory.parts import MemoryParts, Part, PartsContext, PartsShape
from pykv.memory.shift_support import ShiftSupport
from pykv.memory.snapshot import Piece
from pykv.memory.spec import MemorySpec
from pykv.memory.state_part import StatePart
from pykv.memory.stored_kv import StoredKV
from pykv.memory.verb import read, step, verb
from pykv.typing import F32Array, I32Array

PAD = 256
"""A window cache holds a multiple of this many cells."""


class ISWACache(MemoryParts):
    """K and V of past tokens; layers with a window forget what nobody will see again.

    Positions are those of the whole: what the layers without a window hold. After a cut the window may lack tokens that
    were overwritten long ago: `resumable` tells, and decoding there is refused.

    Attributes
    ----------
    base : the layers without a window.
    swa : the layers with one.

    Parameters
    ----------
    spec : the layers; some have `is_swa`, and there is a window.
    settings : of `base`; `swa` has fewer cells.
    n_ubatch : tokens that are computed at once, at most: the window cache has room for so many beside the window.
    swa_full : keep all tokens in the window cache too.
    place, n_threads, guard : as in `StoredKV`.
    """

    def __init__(
        self,
        spec: MemorySpec,
        settings: KVSettings,
        *,
        n_ubatch: int,
        swa_full: bool = False,
        place: Callable[[int], BufferType] | None = None,
        n_threads: int | None = None,
        guard: Guard | None = None,
    ) -> None:
        guard = guard or Guard()
        base, swa = self.plan(spec, settings, n_ubatch=n_ubatch, swa_full=swa_full, place=place)
        self.base = KVCache(base.spec, base.settings, place=place, n_threads=n_threads, guard=guard)
        try:
            self.swa = KVCache(swa.spec, swa.settings, place=place, n_threads=n_threads, guard=guard)
        except BaseException:
            self.base.close()
            raise
        if swa_full:
            # differs from llama.cpp: there cells outside the window are overwritten even so, once there are holes
            self.swa.streams.window = NO_WINDOW
        self.swa.beside = self.base
        super().__init__(spec, (self.base, self.swa), guard)
        self.settings = settings
        self._cut: set[int] = set()  # sequences whose window may lack tokens

    @staticmethod
    def plan(
        spec: MemorySpec,
        settings: KVSettings,
        *,
        n_ubatch: int,
        swa_full: bool = False,
        place: Callable[[int], BufferType] | None = None,
    ) -> tuple[KVPlan, KVPlan]:
        """Return what both caches take, without allocating them.

        Raises
        ------
        ParamError : no window, or no layer that has it.
        """
        if spec.window.type is SwaType.NONE or not any(layer.is_swa for layer in spec.layers):
            raise ParamError(f"spec: window={spec.window} and is_swa of some layers make a window cache")
        wanted = frozenset(range(len(spec.layers))) if settings.layers is None else settings.layers
        windowed = frozenset(il for il in wanted if spec.layers[il].is_swa)
        n_swa = settings.n_cells if swa_full else window_cells(spec, settings, n_ubatch)
        return (
            KVPlan(replace(spec, window=NO_WINDOW), replace(settings, layers=wanted - windowed), place),
            KVPlan(spec, replace(settings, layers=windowed, n_cells=n_swa), place),
        )

    @property
    def n_cells(self) -> int:
        """Tokens that one stream can hold."""
        return self.base.n_cells

    @property
    def n_stream(self) -> int:
        return self.base.n_stream

    @property
    def n_seq_max(self) -> int:
        """Sequences."""
        return self.base.n_seq_max

    def paths(self, attention: AttentionPlan) -> dict[str, PathsInUse]:
        """Return how the next tokens are attended to, by kind of layer, named as in `visible`."""
        return self.base.paths(attention) | self.swa.paths(attention)

    # batches

    def init_batch(self, batch: ValidBatch, n_ubatch: int) -> PartsContext | None:
        """Carry out what is queued, split a batch, and find cells for all of it in both caches.

        Raises
        ------
        BatchError : a cut has brought tokens into sight that were overwritten; the message tells from where to decode
            again. Or as in `KVCache.init_batch`.
        ContextLengthExceeded : as there.
        """
        self.begin_batch(batch)
        unified = self.n_stream == 1
        for cut in (splits.simple if unified else None, lambda b, n: splits.equal(b, n, sequential=not unified)):
            ubatches = None if cut is None else cut(batch, n_ubatch)
            plan = None if ubatches is None else self.prepare(ubatches)
            if plan is not None:
                return plan
        self.check_share(batch)
        return None

    def begin_batch(self, batch: ValidBatch) -> None:
        """Carry out what is queued, and refuse a batch that no room would help; raises `BatchError`."""
        self.base.begin_batch(batch)
        self.swa.follow()
        self._check_windows(batch)

    def check_share(self, batch: ValidBatch) -> None:
        """See `KVCache.check_share`."""
        self.base.check_share(batch)

    def graph(
        self, graph: Graph, shape: PartsShape, attention: AttentionPlan, watches: Sequence[MassWatch] = ()
    ) -> ISWAGraph:
        """Return this memory's part of a graph."""
        base, swa = shape.parts
        return ISWAGraph(
            self.spec, self.base.graph(graph, base, attention, watches), self.swa.graph(graph, swa, attention, watches)
        )

    # sequences

    @verb
    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove a range of a sequence, or of all sequences with -1. Always True."""
        for part in self.parts:
            step(part.seq_rm)(seq_id, p0, p1)
        self._suspect(seq_id)
        return True

    @verb
    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` hold a range of `src` too, in both caches or in none; errors as in `KVCache.seq_cp`."""
        self._all_or_none(lambda part: self._with_room(part, lambda: step(part.seq_cp)(src, dst, p0, p1)))
        self._suspect(dst)

    @verb
    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move the positions of a range by `delta`, in both caches or in none; errors as in `KVCache.seq_add`."""
        self._all_or_none(lambda part: self._with_room(part, lambda: step(part.seq_add)(seq_id, p0, p1, delta)))
        self._suspect(seq_id)

    @verb
    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions of a range by `d`, in both caches or in none; errors as in `KVCache.seq_add`."""
        self._all_or_none(lambda part: self._with_room(part, lambda: step(part.seq_div)(seq_id, p0, p1, d)))
        self._suspect(seq_id)

    def pos_min(self, seq_id: int) -> int:
        """Return the smallest position of a sequence, -1 if it is empty."""
        # differs from llama.cpp: there both ends are the window cache's, so that a sequence whose window was cut away
        # counts as empty, and its tokens are stored a second time
        return self.base.pos_min(seq_id)

    def pos_max(self, seq_id: int) -> int:
        """Return the largest position of a sequence, -1 if it is empty."""
        return self.base.pos_max(seq_id)

    def can_shift(self) -> ShiftSupport:
        """Return whether positions can be moved, and if not, why."""
        # differs from llama.cpp: caches of unlike sizes can too, since a window moves with the tokens that it ends at;
        # where a shift brings other tokens into it, decoding is refused
        return self.base.can_shift()

    def take(self, seq_id: int, position: int, on: str) -> Piece:
        """See `Snapshots.take`; raises `BatchError` where a token at `position` would miss what was overwritten."""
        self._check_window(seq_id, position)
        return super().take(seq_id, position, on)

    def state_parts(self, partial: bool) -> tuple[StatePart, ...]:
        """See `StateFiles.state_parts`."""
        kept = (self.swa,) if partial else (self.base, self.swa)
        return tuple(one for half in kept for one in half.state_parts(partial))

    def cut_rest(self, seq_id: int) -> None:
        """See `StateFiles.cut_rest`."""
        # differs from llama.cpp: there tokens stay behind those of the window, until the caller removes them
        end = self.swa.pos_max(seq_id) + 1
        if end:  # else all of the window was cut away, of which `resumable` tells
            step(self.base.seq_rm)(seq_id, end, -1)

    def note_cut(self, seq_id: int) -> None:
        """See `StateFiles.note_cut`."""
        self._suspect(seq_id)

    # inspection

    @property
    def used(self) -> str:
        """How full both caches are, in words."""
        return f"without a window {self.base.used}; with one {self.swa.used}"

    def half(self, il: int) -> KVCache:
        """Return the cache that holds a layer's K and V.

        Raises
        ------
        ParamError : there is no such layer.
        """
        il = integer("il", il, 0, len(self.spec.layers) - 1)
        return self.swa if self.spec.layers[il].is_swa else self.base

    def kv_of(self, il: int, slot: tuple[SlotInfo, SlotInfo]) -> tuple[StoredKV, SlotInfo]:
        """Return the cache that a layer reads, and its slot of a plan's."""
        half = self.half(il)
        return half, slot[self.parts.index(half)]

    def tensors(self, il: int) -> tuple[Tensor, Tensor | None]:
        """See `StoredKV.tensors`."""
        return self.half(il).tensors(il)

    def k(self, il: int, seq_id: int, derotate: bool = False) -> F32Array:
        """Return the stored keys of a sequence; in layers with a window, those that are left. See `StoredKV.k`."""
        return self.half(il).k(il, seq_id, derotate)

    def v(self, il: int, seq_id: int) -> F32Array:
        """Return the stored values of a sequence; in layers with a window, those that are left. See `StoredKV.v`."""
        return self.half(il).v(il, seq_id)

    def seen(self, seq_id: int, il: int | None = None) -> tuple[I32Array, I32Array]:
        """See `StoredKV.seen`; without a layer, of those that see everything."""
        return (self.base if il is None else self.half(il)).seen(seq_id, il)

    def cells(self, stream: int = 0) -> CellsView:
        """Return the cells of one stream of `base`; those of the window are ``swa.cells()``."""
        return self.base.cells(stream)

    @read
    def visible(self, seq_id: int, pos: int) -> dict[str, I32Array]:
        """Return the positions that a query at `pos` attends to, ascending, by kind of layer."""
        return step(self.base.visible)(seq_id, pos) | step(self.swa.visible)(seq_id, pos)

    @read
    def dump(self, stream: int = 0) -> str:
        """Return the cells of both caches, a line each; see `StoredKV.dump`."""
        return f"base {step(self.base.dump)(stream)}\nswa  {step(self.swa.dump)(stream)}"

    def ends_misfit(self) -> str | None:
        """Say where the window cache holds something of a sequence outside what `base` holds."""
        if self.settings.reference_moves:  # a move of a shared cell goes by owners, which the window may have forgotten
            return None
        for seq_id in range(self.n_seq_max):
            ends = self.base.pos_min(seq_id), self.base.pos_max(seq_id)
            own = self.swa.pos_min(seq_id), self.swa.pos_max(seq_id)
            if own[1] >= 0 and not ends[0] <= own[0] <= own[1] <= ends[1]:
                return f"sequence {seq_id}: base holds {ends}, swa {own}"
        return None

    # mechanism

    def _with_room(self, part: Part, act: Callable[[], None]) -> None:
        """Do something that needs free cells; where the window cache has none, it first forgets what nobody sees."""
        try:
            act()
        except (NoSlotError, ShiftUnsupported):
            if part is not self.swa or not self._forget_unseen():
                raise
            act()

    def _forget_unseen(self) -> bool:
        """Take from each sequence the cells that the window hides from its next token; False if none became empty."""
        streams, window = self.swa.streams, self.spec.window
        n_used = sum(cells.n_used for cells in streams.cells)
        for seq_id in range(self.n_seq_max):
            first = int(window.span(streams.pos_max(seq_id) + 1)[0])
            if first > 0:
                streams.seq_rm(seq_id, 0, first)
        return sum(cells.n_used for cells in streams.cells) < n_used

    def _suspect(self, seq_id: int) -> None:
        seqs = range(self.settings.n_seq_max) if seq_id == -1 else (int(seq_id),)
        self._cut.update(seqs)

    def _check_windows(self, batch: ValidBatch) -> None:
        """Refuse tokens whose window lacks what had been overwritten before a cut brought it back into sight.

        What was removed from both caches may be missing: whoever removed it does not want it seen.
        """
        for seq_id in self._cut.intersection(batch.seq_id_unq):
            mine = [seq_id in ids for ids in batch.seq_ids] if batch.has_coupled else batch.seq_first == seq_id
            self._check_window(seq_id, int(batch.pos[0][mine].min()))
            self._cut.discard(seq_id)

    def _check_window(self, seq_id: int, p: int) -> None:
        first = max(0, int(self.spec.window.span(p)[0]))
        base, swa = (part.streams.cells[part.streams.stream_of(seq_id)] for part in (self.base, self.swa))
        n_lost = base.find(seq_id, first, p).size - swa.find(seq_id, first, p).size
        if n_lost:
            largest = last_kept(base, swa, seq_id, p, self.spec.window)
            raise BatchError(
                f"sequence {seq_id} cannot go on at {p}: {n_lost} of the tokens at positions {first} to {p - 1}, which "
                f"a window of {self.spec.window.n_swa} shows, were overwritten; remove it from {largest} on and decode "
                "the tokens from there again"
            )


def window_cells(spec: MemorySpec, settings: KVSettings, n_ubatch: int) -> int:
    """Return the cells that a window cache needs in each stream."""
    n_windows = settings.n_seq_max if settings.unified else 1
    need = min(settings.n_cells, spec.window.n_swa * n_windows + n_ubatch)
    return -(-need // PAD) * PAD
