"""Write one ubatch into the cells of a slot, and take such writes back.

Source: spec kv_cache.md sections 3 and 4; follows llama.cpp's ``llama_kv_cache::apply_ubatch``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pykv.batch.arrays import ends
from pykv.batch.ubatch import UBatch
from pykv.cells.cell_table import NO_TOKEN
from pykv.cells.kv_cells import CellSnapshot, KVCells
from pykv.cells.picked import Cells, Picked, pick
from pykv.cells.slot import usable
from pykv.cells.window import Window
from pykv.errors import ParamError
from pykv.typing import NO_POS, POS_INF, I32Array, I64Array


class Journal:
    """Copies of the cells that a trial overwrites, to be put back in reverse order."""

    def __init__(self) -> None:
        self._entries: list[tuple[KVCells, Cells, CellSnapshot]] = []

    def note(self, cells: KVCells, idxs: Cells) -> None:
        """Copy cells that are about to change."""
        self._entries.append((cells, idxs, cells.snapshot(idxs)))

    def undo(self) -> None:
        """Put every copied cell back as it was."""
        while self._entries:
            cells, idxs, snap = self._entries.pop()
            cells.restore(idxs, snap)


@dataclass(frozen=True, eq=False)
class Part:
    """The run of tokens of one ubatch that goes into one stream.

    Attributes
    ----------
    tokens : the run.
    with_ext : whether column, row and token are recorded.
    embd_tok : token recorded for embeddings.
    """

    ubatch: UBatch
    tokens: slice
    with_ext: bool
    embd_tok: int = NO_TOKEN

    def ext(self) -> tuple[int | I32Array, int | I32Array, int | I32Array]:
        """Return column, row and token: (k,) each, or one for all."""
        ub = self.ubatch
        x, y = (ub.pos[2, self.tokens], ub.pos[1, self.tokens]) if ub.is_pos_2d else (0, 0)
        return x, y, self.embd_tok if ub.token is None else ub.token[self.tokens]


def check_positions(ubatch: UBatch) -> None:
    """Refuse positions that no cell can hold; raises ParamError."""
    lo, hi = ends(ubatch.pos[0])
    if lo < 0 or hi >= POS_INF:
        raise ParamError(f"ubatch: has position {lo if lo < 0 else hi}, the limits are 0 and {POS_INF - 1}")


def check_writable(cells: KVCells, chosen: Picked, window: Window) -> None:
    """Refuse to overwrite a cell that none owns, or that several sequences share and one of them still sees.

    Raises
    ------
    ParamError
        Naming the cells; a slot from a current search never holds any.
    """
    held = cells.pos[chosen.at]
    if ends(held)[1] == NO_POS:
        return
    kept = (held != NO_POS) & (cells.n_owners[chosen.at] != 1)
    if np.count_nonzero(kept):
        kept &= ~usable(cells, 0, cells.n, window)[chosen.at]
        if np.count_nonzero(kept):
            raise ParamError(f"slot: cells {chosen.idxs[kept]} are occupied, and have no owner or one who sees them")


def place(cells: KVCells, chosen: Picked, part: Part, journal: Journal | None) -> None:
    """Let tokens take their cells, throwing out what those held.

    Afterwards older leftovers of a sequence that lost a cell are purged too, so that no position is missing
    between its smallest and its largest.
    """
    if journal:
        journal.note(cells, chosen)
    lost = _evict(cells, chosen)
    cells.store(chosen, part.ubatch.pos[0, part.tokens], part.ubatch.seq_ids[part.tokens])
    if part.with_ext:
        cells.ext_set(chosen, *part.ext())
    for s, last in lost.items():
        _purge(cells, s, last, journal)


def vacate(cells: KVCells, idxs: I64Array) -> None:
    """Empty those of the cells that are occupied, and purge what `place` would."""
    for s, last in _evict(cells, pick(idxs, cells.n)).items():
        _purge(cells, s, last, None)


def _evict(cells: KVCells, chosen: Picked) -> dict[int, int]:
    """Empty those of the cells that are occupied. Returns, per sequence that lost any, the largest position."""
    held = cells.pos[chosen.at]
    if chosen.n == 0 or ends(held)[1] == NO_POS:
        return {}
    idxs = chosen.idxs[held != NO_POS]
    lost = {}
    for s in cells.sequences():
        mine = cells.pos[idxs[cells.member(s)[idxs]]]
        if mine.size:
            lost[s] = ends(mine)[1]
    cells.rm(idxs)
    return lost


def _purge(cells: KVCells, s: int, last: int, journal: Journal | None) -> None:
    old = cells.find(s, 0, last + 1)
    if old.size == 0:
        return
    if journal:
        journal.note(cells, old)
    cells.seq_rm(old, s)
