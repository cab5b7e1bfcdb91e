"""Which cells each query may attend to, and the mask that says so.

Every rule shows a query one run of positions ``[lo, hi]`` of its own sequence. So a row of the mask is
membership and two comparisons, and the rows of one sequence differ only where those runs begin and end: one
row is evaluated over all cells, the others are copies in which those few columns are looked at again.

Source: spec kv_cache.md section 9; follows llama.cpp's ``set_input_kq_mask``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from pykv.batch.arrays import ends
from pykv.batch.ubatch import UBatch
from pykv.cells.kv_cells import KVCells
from pykv.cells.slot import SlotInfo
from pykv.cells.streams import CellStreams
from pykv.cells.window import NO_WINDOW, SwaType, Window
from pykv.errors import TensorError
from pykv.typing import POS_INF, AnyArray, BoolArray, I32Array, I64Array

Rows = slice | I64Array

_NEG_INF: dict[np.dtype[Any], np.unsignedinteger[Any]] = {
    np.dtype(np.float16): np.uint16(0xFC00),
    np.dtype(np.float32): np.uint32(0xFF800000),
}
"""Bit pattern of -inf per mask type: masks are written as integers, numpy's own float16 being slow."""


class NonCausal(Enum):
    """What a model means by attention that is not causal.

    ALL drops the causal test and keeps the window. SWA_ONLY does so only where there is a window; other
    caches stay causal. SWA_FULL also shows the sequence's whole ubatch, whatever the window.
    """

    ALL = "all"
    SWA_ONLY = "swa_only"
    SWA_FULL = "swa_full"


@dataclass(frozen=True)
class MaskRule:
    """How one cache limits attention.

    Attributes
    ----------
    causal : hide later positions.
    window : hide distant positions.
    alibi : give visible cells minus their distance instead of 0.
    non_causal : what ``causal=False`` means.
    """

    causal: bool = True
    window: Window = NO_WINDOW
    alibi: bool = False
    non_causal: NonCausal = NonCausal.ALL

    @property
    def hides_later(self) -> bool:
        """Whether the causal test applies in the end."""
        no_window = self.window.type is SwaType.NONE
        return self.causal or (self.non_causal is NonCausal.SWA_ONLY and no_window)

    def span(self, p1: I64Array, first: int) -> tuple[I64Array, I64Array]:
        """Return (k,) first and (k,) last position that queries may see.

        `p1` holds (k,) positions of the queries, `first` is the smallest one of their sequence in the ubatch.
        """
        lo, hi = self.window.span(p1)
        if self.hides_later:
            hi = np.minimum(hi, p1)
        elif self.non_causal is NonCausal.SWA_FULL:
            # the window's run reaches p1 >= first: joined with the ubatch it is still one run
            lo, hi = np.minimum(lo, first), POS_INF
        zero = np.zeros(p1.shape, np.int64)  # lo or hi may be one number for all
        return np.maximum(lo, zero), np.minimum(hi, zero + POS_INF)


def visible(
    cells: KVCells, seq_id: int, p1: int, rule: MaskRule, *, first: int | None = None, n_kv: int | None = None
) -> I32Array:
    """Return the positions that a query sees, ascending, by the rule that `fill_mask` follows.

    Leaves out the order within a 2-D position.

    Parameters
    ----------
    cells
        The stream of the query.
    seq_id, p1
        Sequence and position of the query.
    rule
        What limits its view.
    first
        Smallest position of the sequence in the query's ubatch; `p1` if left out.
    n_kv
        Look at the first cells only.
    """
    lo, hi = rule.span(np.array([p1], np.int64), p1 if first is None else first)
    row = _visible_row(cells, seq_id, n_kv or cells.n, int(lo[0]), int(hi[0]))
    return np.sort(cells.pos[: row.size][row])


def fill_mask(out: AnyArray, streams: CellStreams, slot: SlotInfo, ubatch: UBatch, rule: MaskRule) -> None:
    """Fill `out` with 0 (or minus the distance) where a token may look, and -inf elsewhere.

    Takes the cells as they are after `apply`. Does not modify the streams.

    Parameters
    ----------
    out
        (S, n_tokens / S, n_kv) float16 or float32, C-contiguous; S = streams of the slot, in ubatch order.
    streams, slot, ubatch
        The cells, where the ubatch was stored among them, and the ubatch itself.
    rule
        What limits attention.

    Raises
    ------
    TensorError
        If `out` has another shape, type or layout.
    """
    _check_out(out, streams, slot, ubatch)
    neg_inf = _NEG_INF[out.dtype]
    bits = out.view(neg_inf.dtype)
    n = out.shape[1]
    if ubatch.n_tokens == 1 and _sees_all(streams.cells[slot.streams[0]], ubatch, rule):
        member = streams.cells[slot.streams[0]].member(ubatch.seq_ids[0][0])[: out.shape[2]]
        np.multiply((~member).view(np.uint8), neg_inf, out=bits[0, 0])
        return
    for k, stream in enumerate(slot.streams):
        cells = streams.cells[stream]
        for queries in _by_sequence(ubatch, slice(k * n, (k + 1) * n), rule):
            queries.fill(bits[k], cells, neg_inf)
            if rule.alibi:
                queries.subtract_distance(out[k], cells)


@dataclass(frozen=True, eq=False)
class _Queries:
    """The tokens of one stream that look through the same sequence.

    Attributes
    ----------
    rows : their rows within the stream's block of the mask.
    p1, lo, hi : (k,) position, first and last position to see.
    xy : (2, k) column and row where tokens of one position hide each other in 2-D order, else None.
    """

    seq_id: int
    rows: Rows
    p1: I64Array
    lo: I64Array
    hi: I64Array
    xy: I64Array | None

    def fill(self, bits: AnyArray, cells: KVCells, neg_inf: np.unsignedinteger[Any]) -> None:
        """Write the rows: the first one whole, then copies of it, then the columns that may differ."""
        first, others = _split(self.rows)
        n_kv = bits.shape[1]
        row = _visible_row(cells, self.seq_id, n_kv, int(self.lo[0]), int(self.hi[0]))
        np.multiply((~row).view(np.uint8), neg_inf, out=bits[first])
        bits[others] = bits[first]
        cols = self._differing(cells, n_kv)
        if cols.size:
            bits[_cross(self.rows, cols)] = ~self._visible_block(cells, cols) * neg_inf

    def subtract_distance(self, out: AnyArray, cells: KVCells) -> None:
        """Turn 0 into minus the distance, row by row."""
        pos = cells.pos[: out.shape[1]]
        rows = range(out.shape[0])[self.rows] if isinstance(self.rows, slice) else self.rows
        with np.errstate(over="ignore"):  # beyond float16 a distance is infinite, as in llama.cpp
            for i, p1 in zip(rows, self.p1.tolist(), strict=True):
                out[i] -= np.abs(pos - np.int64(p1)).astype(np.float32)

    def _differing(self, cells: KVCells, n_kv: int) -> I64Array:
        """Return the cells of the sequence that some of the rows may see and others not."""
        if self.p1.size == 1 and self.xy is None:
            return np.empty(0, np.int64)
        (lo0, lo1), (hi0, hi1) = ends(self.lo), ends(self.hi)
        edges = [(lo0, lo1 - 1), (hi0 + 1, hi1)]
        if self.xy is not None:
            edges.append(ends(self.p1))
        pos, near = cells.pos[:n_kv], np.zeros(0, np.bool_)
        for a, b in edges:
            if a <= b:
                edge = (pos >= a) & (pos <= b)
                near = near | edge if near.size else edge
        return np.flatnonzero(near & cells.member(self.seq_id)[:n_kv]) if near.size else np.empty(0, np.int64)

    def _visible_block(self, cells: KVCells, cols: I64Array) -> BoolArray:
        pos = cells.pos[cols]
        seen: BoolArray = pos <= _column(self.hi)
        if self.lo.any():
            seen &= pos >= _column(self.lo)
        if self.xy is not None:
            x, y = cells.ext_x[cols], cells.ext_y[cols]
            x1, y1 = map(_column, self.xy)
            seen &= ~((pos == _column(self.p1)) & ((y > y1) | ((y == y1) & (x > x1))))
        return seen


def _sees_all(cells: KVCells, ubatch: UBatch, rule: MaskRule) -> bool:
    """Whether a single token sees every cell of its sequence: the usual case of generation, worth a short way."""
    plain = rule.window.type is SwaType.NONE and not rule.alibi and not ubatch.is_pos_2d
    return plain and (not rule.hides_later or int(ubatch.pos[0, 0]) >= cells.pos_max(ubatch.seq_ids[0][0]))


def _by_sequence(ubatch: UBatch, block: slice, rule: MaskRule) -> Iterator[_Queries]:
    """Group tokens by the sequence they look through, their first one."""
    seqs, pos = ubatch.seq_first[block], ubatch.pos[:, block].astype(np.int64)
    single = ubatch.n_seqs_unq == 1 or seqs.size == 1
    for s in seqs[:1] if single else np.unique(seqs):
        rows: Rows = slice(0, seqs.size) if single else _tight(np.flatnonzero(seqs == s))
        p1 = pos[0, rows]
        lo, hi = rule.span(p1, ends(p1)[0])
        xy = pos[2:0:-1, rows] if rule.hides_later and ubatch.is_pos_2d else None
        yield _Queries(int(s), rows, p1, lo, hi, xy)


def _visible_row(cells: KVCells, seq_id: int, n_kv: int, lo: int, hi: int) -> BoolArray:
    """Return (n_kv,) whether a cell is the sequence's and lies in ``[lo, hi]``; perhaps a read-only view."""
    row, pos = cells.member(seq_id)[:n_kv], cells.pos[:n_kv]
    if lo > cells.pos_min(seq_id):
        row = row & (pos >= lo)
    if hi < cells.pos_max(seq_id):  # at the end of a sequence nothing is later: no pass over the positions
        row = row & (pos <= hi)
    return row


def _check_out(out: AnyArray, streams: CellStreams, slot: SlotInfo, ubatch: UBatch) -> None:
    n_streams = len(slot.streams)
    want = (n_streams, ubatch.n_tokens // n_streams)
    if out.ndim != 3 or out.shape[:2] != want or not 0 < out.shape[2] <= streams.n_cells:
        raise TensorError(f"out: shape {out.shape}, expected {want} and 1 to {streams.n_cells} cells")
    if out.dtype not in _NEG_INF or not out.flags.c_contiguous:
        raise TensorError(f"out: {out.dtype} of strides {out.strides}, must be contiguous float16 or float32")


def _tight(idxs: I64Array) -> Rows:
    """Return ascending indices as a slice if they leave no gap: numpy copies slices much faster."""
    first, last = int(idxs[0]), int(idxs[-1])
    return slice(first, last + 1) if last - first + 1 == idxs.size else idxs


def _split(rows: Rows) -> tuple[int, Rows]:
    """Return the first row and the others."""
    if isinstance(rows, slice):
        return rows.start, slice(rows.start + 1, rows.stop)
    return int(rows[0]), rows[1:]


def _cross(rows: Rows, cols: I64Array) -> tuple[Rows, Rows]:
    """Return an index of every given row at every given column."""
    tight = _tight(cols)
    if isinstance(rows, slice) or isinstance(tight, slice):
        return rows, tight
    return rows[:, None], tight


def _column(values: I64Array) -> I32Array:
    """Return (k, 1) of the cells' own type, so that comparing them needs no conversion."""
    return values.astype(np.int32)[:, None]
