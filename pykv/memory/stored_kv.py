"""StoredKV: what a KV cache holds. Its cells and its tensors, kept in step, and open to be looked at.

bookkeeping   `CellStreams`: changes at once
tensors       `KVStore`: follow at `update`, which comes before every read and write of data
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np

from pykv.cells import (
    CellStreams,
    CellsView,
    KVCells,
    MaskRule,
    SlotInfo,
    SwaType,
    loose_resume_points,
    missing_before,
    resume_points,
    visible,
)
from pykv.cells.arguments import boolean, integer, sequence_id
from pykv.errors import ParamError, UseAfterCloseError
from pykv.ggml import BufferType, Tensor, usable_cores
from pykv.ggml.owner import Owner
from pykv.memory.base import UpdateStatus
from pykv.memory.guard import Guard
from pykv.memory.kv_plan import KVPlan
from pykv.memory.kv_settings import KVSettings
from pykv.memory.kv_store import KVStore
from pykv.memory.resumable import Resumable
from pykv.memory.row_follower import RowFollower
from pykv.memory.row_mover import RowMover
from pykv.memory.spec import MemorySpec
from pykv.memory.verb import Listener, read, step
from pykv.typing import POS_INF, F32Array, I32Array, I64Array


class StoredKV:
    """K and V of past tokens, for several sequences; `KVCache` adds what changes them.

    Attributes
    ----------
    streams : the bookkeeping.
    store : the tensors.
    listeners : told of every verb.
    beside : the cache that holds all tokens, where this one has only to hold those in a window; None = this one.

    Parameters
    ----------
    spec : the layers.
    settings : sizes, types and layout; or give its fields as keywords.
    place : layer → the buffer type it goes to; None = host memory.
    other, share : a cache whose cells this one sees, and layer → the layer of it whose tensors are read.
        All verbs but `clear` then leave the cells alone: they belong to `other`.
    n_threads : CPU threads that copy and turn rows; None = all cores this process may use.
    guard : the guard of the memory that this cache is a part of; None = its own.

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
        other: StoredKV | None = None,
        share: Mapping[int, int] | None = None,
        n_threads: int | None = None,
        guard: Guard | None = None,
        **keywords: Any,
    ) -> None:
        if settings is None:
            settings = KVSettings.of(**keywords)
        elif keywords:
            raise ParamError(f"{', '.join(keywords)}: given beside settings; put them into one of the two")
        plan = KVPlan(spec, settings, place, share or {})
        self.spec, self.settings, self.other = spec, settings, other
        self.store: KVStore = KVStore(plan, other.store if other is not None else None)
        self.streams: CellStreams = _streams(spec, settings) if other is None else other.streams
        self.guard: Guard = guard or (Guard() if other is None else other.guard)
        self.listeners: list[Listener] = []
        self.beside: StoredKV | None = None
        self._mover = RowMover(self.store, usable_cores() if n_threads is None else n_threads)
        self._follower: RowFollower = RowFollower(self.streams, self.guard.flag) if other is None else other._follower
        self._follower.join(self._mover)
        self._moved: dict[int, int] = {}  # sequence → `streams.n_changes` when its positions were last moved
        self._closed = False

    @property
    def n_cells(self) -> int:
        """Cells per stream."""
        return self.settings.n_cells

    @property
    def n_stream(self) -> int:
        return self.settings.n_stream

    @property
    def n_seq_max(self) -> int:
        """Sequences."""
        return self.settings.n_seq_max

    @property
    def v_trans(self) -> bool:
        """Whether V is stored transposed now."""
        return self.store.v_trans

    @property
    def used(self) -> str:
        """How full it is, in words."""
        return ", ".join(f"{one.n_used} of {one.n} cells used" for one in self.streams.cells)

    @property
    def used_max_p1(self) -> int:
        """The last cell in use, over all streams, plus one."""
        return max(cells.used_max_p1 for cells in self.streams.cells)

    # data

    @property
    def nbytes(self) -> int:
        """Bytes of the K and V buffers of this cache."""
        self.require_open()
        return self.store.nbytes

    @property
    def stores(self) -> tuple[KVStore, ...]:
        """The tensors of this cache and of all others that stand on the same cells."""
        return self._follower.stores

    @property
    def owners(self) -> tuple[Owner, ...]:
        """What a graph that reads this cache stands on."""
        return self.store.owners

    def tensors(self, il: int) -> tuple[Tensor, Tensor | None]:
        """Return the K and V tensors that a layer reads, with all queued changes made; no V where K's heads hold it.

        Raises
        ------
        ParamError : the layer has none here.
        """
        self.require_open()
        if self._follower.has_work:
            self.update()
        return self.store.tensors(integer("il", il))

    @read
    def store_v(self, transposed: bool) -> None:
        """Lay out the stored V of all layers the other way; the same values in the same bytes. Mutates the data.

        Raises
        ------
        ParamError : V is quantised, layers differ in width, or another cache shares cells or layers with this one.
        """
        self.lay_out_v(transposed)

    @read
    def update(self) -> UpdateStatus:
        """Let stored rows follow the verbs: carry out queued copies, then turn the keys of what has moved.

        The rows of all caches that stand on these cells follow.

        Raises
        ------
        UnsupportedOpError, AllocError, ComputeError : a device cannot; what is left stays queued. Only a device that
            fails amid a computation leaves some layers of those rows turned and others not.
        ComputeCancelled, KeyboardInterrupt : Ctrl-C; what is left stays queued.
        """
        if not self._follower.has_work:
            return UpdateStatus.NO_UPDATE
        self._follower.run()
        return UpdateStatus.SUCCESS

    def pos_min(self, seq_id: int) -> int:
        """Return the smallest position of a sequence, -1 if it is empty."""
        self.require_open()
        self._check_ids(seq_id)
        return self.streams.pos_min(seq_id)

    def pos_max(self, seq_id: int) -> int:
        """Return the largest position of a sequence, -1 if it is empty."""
        self.require_open()
        self._check_ids(seq_id)
        return self.streams.pos_max(seq_id)

    # going on

    @read
    def resumable(self, seq_id: int, p: int) -> Resumable:
        """Return whether decoding may go on at `p`, with all that the token there sees stored; if not, why.

        Raises
        ------
        ParamError : `p` is no position.
        """
        points = step(self.resume_points)(seq_id, p)
        largest = int(points[-1, 1])
        if largest == p:
            return Resumable(largest)
        window = self.spec.window
        gaps = missing_before(self._cells_of(seq_id), int(seq_id), p, window)
        if gaps is None:  # one of several tokens at a position is gone
            gaps = max(0, int(window.span(p)[0])), p - 1
        why, what = (
            ("missing", "token") if window.type is SwaType.NONE else ("window_gone", f"window of {window.n_swa}")
        )
        return Resumable(
            largest, why, f"a {what} at {p} needs positions {gaps[0]} to {gaps[1]}, which are not all stored"
        )

    @read
    def resume_points(self, seq_id: int, p: int) -> I64Array:
        """Return at which positions up to `p` decoding may go on: (k, 2), the first and the last of each run of them.

        The runs ascend, and the first one starts at 0.
        """
        self._check_ids(seq_id)
        p = integer("p", p, 0, POS_INF - 1)
        whole = self if self.beside is None else self.beside
        is_loose = self.spec.n_pos_per_embd > 1  # pictures: many tokens at one position, and positions without any
        points = loose_resume_points if is_loose else resume_points
        return points(whole._cells_of(seq_id), self._cells_of(seq_id), int(seq_id), p, self.spec.window)

    # inspection

    def kv_of(self, il: int, slot: SlotInfo) -> tuple[StoredKV, SlotInfo]:
        """Return the cache that a layer reads, and its slot of a plan's."""
        return self, slot

    def seen(self, seq_id: int, il: int | None = None) -> tuple[I32Array, I32Array]:
        """Return positions and tokens of the cells of a sequence that a next token may look at, (n,) each.

        `il` names the layer, for memories whose layers see different cells.
        """
        self.require_open()
        self._check_ids(seq_id)
        cells, window = self._cells_of(seq_id), self.spec.window
        idxs = cells.find(int(seq_id), 0, POS_INF)
        pos = cells.pos[idxs]
        if window.type is not SwaType.NONE and len(pos):
            idxs = idxs[~window.masked(pos, int(pos.max()) + 1)]
            pos = cells.pos[idxs]
        return pos, cells.ext_tok[idxs]

    def cells(self, stream: int = 0) -> CellsView:
        """Return the cells of one stream as they are from now on: `pos`, `shift`, `token`, `owners`, read-only."""
        self.require_open()
        return CellsView(self.streams.cells[integer("stream", stream, 0, self.n_stream - 1)])

    @read
    def k(self, il: int, seq_id: int, derotate: bool = False) -> F32Array:
        """Return the keys of a sequence, (n_tokens, n_head_kv, n_embd_head_k) in the order of positions.

        Parameters
        ----------
        derotate : as they were before RoPE, the same at every position.
        """
        il, is_raw = integer("il", il), boolean("derotate", derotate)
        rows = self._rows_of(il, seq_id)
        pos = self._cells_of(seq_id).pos[rows % self.n_cells]
        return self._mover.read_k(il, rows, pos if is_raw else None)

    @read
    def v(self, il: int, seq_id: int) -> F32Array:
        """Return the values of a sequence, (n_tokens, n_head_kv, n_embd_head_v) in the order of positions."""
        il = integer("il", il)
        return self._mover.read_v(il, self._rows_of(il, seq_id))

    @read
    def visible(self, seq_id: int, pos: int) -> dict[str, I32Array]:
        """Return the positions that a query at `pos` attends to, ascending, by kind of layer: "full" or a window's."""
        self._check_ids(seq_id)
        pos, rule = integer("pos", pos, 0, POS_INF - 1), MaskRule(window=self.spec.window)
        return {self.spec.window.kind: visible(self._cells_of(seq_id), int(seq_id), pos, rule)}

    @read
    def check(self) -> None:
        """Verify every invariant; raises AssertionError naming what is wrong."""
        self.streams.check()
        self.store.check()

    @read
    def dump(self, stream: int = 0) -> str:
        """Return the cells up to the last used one: ``2:5{0,1}`` is position 5 of sequences 0 and 1, ``3:.`` empty."""
        return " ".join(self.cells(stream).words())

    def close(self) -> None:
        """Free the buffers. Graphs that still stand on them keep them until they go."""
        self.guard.require_whole("close")
        with self.guard:
            self.release()

    def __enter__(self) -> Self:
        self.require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def require_open(self) -> None:
        """Raise `UseAfterCloseError` if this cache or the one whose cells it sees is closed."""
        if self._closed:
            raise UseAfterCloseError("the KV cache is closed")
        if self.other is not None:
            self.other.require_open()

    # for who has entered the guard

    def follow(self) -> None:
        """Do what `update` does."""
        self.require_open()
        if self._follower.has_work:
            with self.guard.entered():
                self._follower.run()

    def lay_out_v(self, transposed: bool) -> None:
        """Do what `store_v` does."""
        self.follow()
        if transposed != self.store.v_trans:
            self.store.turn_v(self.used_max_p1, transposed)

    def release(self) -> None:
        """Do what `close` does."""
        self._closed = True
        self._follower.leave(self._mover)
        self._mover.close()
        self.store.close()

    # mechanism

    def _cells_of(self, seq_id: int) -> KVCells:
        """Return the stream that holds a sequence."""
        return self.streams.cells[self.streams.stream_of(seq_id)]

    def _rows_of(self, il: int, seq_id: int) -> I64Array:
        """Return the rows of a sequence in the order of positions, with all queued changes made."""
        self._check_ids(seq_id)
        self.follow()
        self.store.tensors(il)
        stream = self.streams.stream_of(seq_id)
        cells = self.streams.cells[stream]
        idxs = cells.find(int(seq_id), 0, POS_INF)
        return idxs[np.argsort(cells.pos[idxs], kind="stable")] + stream * self.n_cells

    def _check_ids(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            # differs from llama.cpp: one stream for all takes no ids up to 255 either, because no batch could ever
            # continue them, and the cells that they own would be lost
            sequence_id("seq_id", seq_id, self.settings.n_seq_max)


def _streams(spec: MemorySpec, settings: KVSettings) -> CellStreams:
    return CellStreams(
        settings.n_cells,
        n_seq_max=settings.n_seq_max,
        unified=settings.unified,
        window=spec.window,
        reference_moves=settings.reference_moves,
    )
