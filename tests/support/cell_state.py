"""Everything that a cache's bookkeeping holds, as one value to compare."""

from __future__ import annotations

from typing import Any

from support.naive_cells import NaiveStreams

from pykv.cells import CellStreams


def state(streams: CellStreams) -> dict[str, Any]:
    """Return all figures of all cells, also of empty ones, and what is queued."""
    return {
        "pos": [c.pos.tolist() for c in streams.cells],
        "shift": [c.shift.tolist() for c in streams.cells],
        "ext": [list(zip(*(a.tolist() for a in (c.ext_x, c.ext_y, c.ext_tok)), strict=True)) for c in streams.cells],
        "owners": [[set(c.owners(i)) for i in range(c.n)] for c in streams.cells],
        "has_shift": [c.has_shift for c in streams.cells],
        "n_used": [c.n_used for c in streams.cells],
        "heads": list(streams.heads),
        "copies": queued(streams),
    }


def queued(streams: CellStreams) -> list[tuple[int, int, list[int], list[int]]]:
    """Return the queued copies as (source stream, destination stream, source cells, destination cells)."""
    return [(c.src_stream, c.dst_stream, c.src.tolist(), c.dst.tolist()) for c in streams.pending_copies]


def shifts(streams: CellStreams) -> list[int]:
    """Return the pending shift of every cell, stream after stream."""
    return [int(shift) for cells in streams.cells for shift in cells.shift]


def naive_state(streams: NaiveStreams) -> dict[str, Any]:
    """Return the same of the plain-Python model, which queues nothing."""
    return {
        "pos": [c.pos for c in streams.cells],
        "shift": [c.shift for c in streams.cells],
        "ext": [c.ext for c in streams.cells],
        "owners": [c.seq for c in streams.cells],
        "has_shift": [c.has_shift for c in streams.cells],
        "n_used": [len(c.used()) for c in streams.cells],
        "heads": streams.heads,
    }
