"""What a state holds of one KV cache: its cells, and their K and V as they are stored.

Source: spec state_format.md sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pykv.cells import KVCells, SwaType
from pykv.cells.loaded_cells import LoadedCells, put_all, put_sequence
from pykv.errors import StateError
from pykv.ggml import Tensor
from pykv.ggml.types import BY_NUMBER
from pykv.memory.hadamard import rotation_sizes
from pykv.memory.state_arrange import Arranged, into_streams, without_hidden
from pykv.memory.state_cells import CellsOf
from pykv.memory.state_convert import Form, fill
from pykv.memory.state_part import ALL, Fill, Loading, Payload, Piece
from pykv.memory.state_runs import Sink
from pykv.state_format import (
    CellRecords,
    Dialect,
    KVLayout,
    KVSection,
    RowsLayout,
    RowsRecord,
    StreamRecords,
    kv_section_head,
    kv_stream_heads,
)
from pykv.typing import POS_INF, AnyArray, I64Array

if TYPE_CHECKING:
    from pykv.memory.kv_cache import KVCache


class Stored(NamedTuple):
    """A tensor, and the elements of a cell's row in a state."""

    tensor: Tensor
    width: int
    is_v: bool


class Placed(NamedTuple):
    """Where the cells of one stream of a section are now.

    Attributes
    ----------
    stream : of the cache.
    source : which stream of the section they were.
    cells : (k,) of the stream, ascending.
    picked : (k,) which rows of the section they get; None = all.
    """

    stream: int
    source: int
    cells: I64Array
    picked: I64Array | None


class KVState:
    """One KV cache, as states see it.

    Parameters
    ----------
    cache : whose tensors; its cells may be those of another one.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    @property
    def version(self) -> int:
        """See `StatePart.version`."""
        return self._cache.streams.n_changes

    @property
    def layout(self) -> KVLayout:
        """What it stores; the order of V is that in which states have it, whatever it is in memory now."""
        cache, settings = self._cache, self._cache.settings
        rows = [(_rows_of(one), one.is_v) for one in self._stored()]
        return KVLayout(
            n_stream=cache.n_stream,
            n_cells=cache.n_cells,
            n_seq_max=cache.n_seq_max,
            k=tuple(row for row, is_v in rows if not is_v),
            v=tuple(row for row, is_v in rows if is_v),
            v_trans=settings.v_by_channel_in_states,
            rot=(cache.store.rot_k, cache.store.rot_v),
            has_ext=cache.spec.n_pos_per_embd > 1,
        )

    # writing

    def pieces(self, seq_id: int, dialect: Dialect) -> list[Piece]:
        """See `StatePart.pieces`."""
        layout = self.layout
        found: list[Piece] = [kv_section_head(layout.n_stream)]
        for stream, cells in enumerate(self._cache.streams.cells):
            idxs = self._selected(cells, seq_id, stream)
            heads = kv_stream_heads(_records(cells, idxs, seq_id, layout), layout, dialect)
            found.append(heads.first)
            for head, stored in zip(heads.rows, self._stored() if idxs.size else (), strict=True):
                found += [head, self._payload(stored, stream, idxs, layout)]
        return found

    def _selected(self, cells: KVCells, seq_id: int, stream: int) -> I64Array:
        """Return the cells of a stream that are written, ascending."""
        if seq_id == ALL:
            return cells.find(None, 0, POS_INF)
        if self._cache.streams.stream_of(seq_id) != stream:
            return np.empty(0, np.int64)
        idxs, window = cells.find(seq_id, 0, POS_INF), self._cache.spec.window
        if window.type is SwaType.NONE or not idxs.size:
            return idxs
        return idxs[~window.masked(cells.pos[idxs], cells.pos_max(seq_id))]

    def _payload(self, stored: Stored, stream: int, idxs: I64Array, layout: KVLayout) -> Payload:
        by_channel = stored.is_v and layout.v_trans

        def send(sink: Sink) -> None:
            self._cells_of(stored, stream, idxs).send(sink, by_channel)

        return Payload(stored.tensor.dtype.row_size(stored.width) * idxs.size, send)

    # reading

    def place(self, section: KVSection, loading: Loading) -> list[Fill]:
        """See `StatePart.place`."""
        before = loading.placed.get(id(self._cache.streams))
        if before is None:
            placed = self._put_all(section, loading) if loading.is_whole else self._put_one(section, loading)
            loading.placed[id(self._cache.streams)] = section, placed
            self._cache.note_loaded(loading.seq_id)
        else:
            _check_same_cells(before[0], section)
            placed = before[1]
        return [one for each in placed if each.cells.size for one in self._fills(section, each, loading)]

    def _put_one(self, section: KVSection, loading: Loading) -> list[Placed]:
        streams = self._cache.streams
        source = next((s for s, one in enumerate(section.streams) if one.cells.n), 0)
        at = put_sequence(streams, loading.seq_id, _loaded(section.streams[source].cells))
        return [Placed(streams.stream_of(loading.seq_id), source, at, None)]

    def _put_all(self, section: KVSection, loading: Loading) -> list[Placed]:
        if len(section.streams) != self._cache.n_stream:
            loading.note(f"{len(section.streams)} streams → {self._cache.n_stream}")
        arranged = self._arranged([one.cells for one in section.streams], loading)
        put_all(self._cache.streams, [_loaded(one.cells) for one in arranged])
        return [placed for stream, one in enumerate(arranged) for placed in _placed(stream, one)]

    def _arranged(self, sources: list[CellRecords], loading: Loading) -> list[Arranged]:
        """Return what goes into each stream; of windows that lack room, only what is seen."""
        cache, found = self._cache, into_streams(sources, self._cache.n_stream)
        if cache.n_stream not in (1, len(sources)):
            loading.leave_out(sum(int((cells.n_ids == 0).sum()) for cells in sources), "of no sequence")
        is_tight = any(one.cells.n > cache.n_cells for one in found)
        if not loading.convert or not is_tight or cache.spec.window.type is SwaType.NONE:
            return found
        seen = [without_hidden(one, cache.spec.window) for one in found]
        n_hidden = sum(one.cells.n for one in found) - sum(one.cells.n for one in seen)
        loading.leave_out(n_hidden, "that a window hides")
        return seen

    def _fills(self, section: KVSection, placed: Placed, loading: Loading) -> Iterator[Fill]:
        records, by_channel = section.streams[placed.source], self._cache.settings.v_by_channel_in_states
        if records.v and records.v_trans != by_channel:
            loading.note(f"V {_order(not by_channel)} → {_order(by_channel)}")
        rot = records.rot or self._rotation_of(records)
        pairs = zip(self._stored(), _in_order(self._stored(), records), strict=True)
        for stored, record in pairs:
            name = "KV"[stored.is_v]
            have = Form(BY_NUMBER[record.dtype], rot[stored.is_v])
            want = Form(stored.tensor.dtype, (self._cache.store.rot_k, self._cache.store.rot_v)[stored.is_v])
            if have.dtype != want.dtype:
                loading.note(f"{name} {have.dtype.label} → {want.dtype.label}")
            elif have.rot != want.rot:
                loading.note(f"{name} rotated by {have.rot} → {want.rot}")
            target = self._cells_of(stored, placed.stream, placed.cells)
            yield partial(_fill, target, record, (have, want), placed.picked, loading, int(stored.is_v))

    def _rotation_of(self, records: StreamRecords) -> tuple[int, int]:
        """Return by which widths K and V are rotated in a state that does not say so: as a cache of its types does."""
        plan = self._cache.store.plan
        if not records.k:  # all layers are another part's
            return 0, 0
        type_k = BY_NUMBER[records.k[0].dtype]
        type_v = BY_NUMBER[records.v[0].dtype] if records.v else type_k
        if (type_k, type_v) == (plan.type_k, plan.type_v):
            return self._cache.store.rot_k, self._cache.store.rot_v
        settings = replace(plan.settings, type_k=type_k, type_v=type_v, v_trans=False)
        return rotation_sizes(plan.spec, replace(plan, settings=settings))

    # mechanism

    def _stored(self) -> tuple[Stored, ...]:
        """Return the tensors of its own: K of all layers, then V of those that have it."""
        layers, own = self._cache.spec.layers, self._cache.store.own_tensors()
        keys = [Stored(k, layers[il].n_embd_k, False) for il, k, _ in own]
        return (*keys, *(Stored(v, layers[il].n_embd_v, True) for il, _, v in own if v is not None))

    def _cells_of(self, stored: Stored, stream: int, idxs: I64Array) -> CellsOf:
        return CellsOf(stored.tensor, idxs, stored.width, stream, stored.is_v and self._cache.store.v_trans)


def _fill(
    target: CellsOf,
    record: RowsRecord,
    forms: tuple[Form, Form],
    picked: I64Array | None,
    loading: Loading,
    which: int,
) -> None:
    error = fill(target, record, loading.data, forms, picked)
    loading.errors[which] = max(loading.errors[which], error)


def _rows_of(stored: Stored) -> RowsLayout:
    dtype = stored.tensor.dtype
    by_element = stored.is_v and dtype.block_size == 1
    return RowsLayout(int(dtype), dtype.row_size(stored.width), dtype.type_size if by_element else 0)


def _in_order(stored: tuple[Stored, ...], records: StreamRecords) -> Iterator[RowsRecord]:
    k, v = iter(records.k), iter(records.v)
    return (next(v if one.is_v else k) for one in stored)


def _records(cells: KVCells, idxs: I64Array, seq_id: int, layout: KVLayout) -> CellRecords:
    """Return cells as a state lists them."""
    ext = None
    if layout.has_ext:
        ext = np.stack([column[idxs] for column in (cells.ext_x, cells.ext_y, cells.ext_tok)], axis=1)
    if seq_id != ALL:
        ones = np.ones(idxs.size, np.int32)
        return CellRecords(cells.pos[idxs], ones, ones * np.int32(seq_id), ext)
    known = np.array([s for s in cells.sequences() if s < layout.n_seq_max], np.int32)
    owned = np.array([cells.member(s)[idxs] for s in known.tolist()], np.bool_).reshape(known.size, idxs.size)
    ids = known[np.nonzero(owned.T)[1]]
    return CellRecords(cells.pos[idxs], owned.sum(axis=0, dtype=np.int32), ids, ext)


def _loaded(cells: CellRecords) -> LoadedCells:
    return LoadedCells(cells.pos, cells.ext, cells.n_ids, cells.ids)


def _placed(stream: int, arranged: Arranged) -> Iterator[Placed]:
    """Yield where the cells of each share are in a stream that holds them from its first cell on."""
    first = 0
    for source, picked, n in arranged.shares:
        yield Placed(stream, source, np.arange(first, first + n), picked)
        first += n


def _check_same_cells(theirs: KVSection, mine: KVSection) -> None:
    """Refuse a section that lists other cells than one that another cache has put there already."""
    pairs = zip(theirs.streams, mine.streams, strict=False)
    if len(theirs.streams) != len(mine.streams) or not all(_same_cells(a.cells, b.cells) for a, b in pairs):
        raise StateError("two caches over one set of cells: the cells differ", offset=mine.span.start)


def _same_cells(a: CellRecords, b: CellRecords) -> bool:
    pairs: list[tuple[AnyArray, AnyArray]] = [(a.pos, b.pos), (a.n_ids, b.n_ids), (a.ids, b.ids)]
    return all(np.array_equal(mine, theirs) for mine, theirs in pairs)


def _order(by_channel: bool) -> str:
    return "by channel" if by_channel else "by cell"
