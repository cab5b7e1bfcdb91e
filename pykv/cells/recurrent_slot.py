"""Choose the cells of recurrent states for one ubatch, and say which rows its graph reads.

A state is one row: the sequences of a ubatch get neighbouring cells, whatever else lies between them moves behind.
Never changes the table it is given. Source: spec iswa_recurrent_hybrid.md 2.4 and 2.5; follows llama.cpp's
``llama_memory_recurrent::find_slot``.

    cells     0    1    2          ubatch of sequences 0 and 2       0    1    2
    before   {0}  {1}  {2}                    after                 {0}  {2}  {1}      s_copy = 0 2 1
                                                                    ubatch    extra
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pykv.batch.ubatch import UBatch
from pykv.cells.placing import check_positions
from pykv.cells.recurrent_table import NO_CELL, NO_SOURCE, RecurrentTable, in_order
from pykv.errors import BatchError, SequenceError
from pykv.typing import I32Array, I64Array


@dataclass(frozen=True, eq=False)
class RecurrentSlot:
    """What a graph needs to read and write the states of one ubatch.

    Before the computation row `rs_z` is zeroed. Then rows ``s_copy[:n_seqs]`` are read for the ubatch, and rows
    ``s_copy[n_seqs:]``, the extra ones, go unchanged to rows ``head + n_seqs`` and up. The new states go to rows
    ``head`` to ``head + n_seqs - 1``, and the state d tokens earlier to the same rows of plane d, for each
    ``d < n_planes``.

    Attributes
    ----------
    head : first cell of the run.
    n : cells of the run, `n_seqs` or more.
    n_seqs : sequence sets of the ubatch.
    rs_z : the row to zero, -1 if none has to be.
    s_copy : (n,) the row that the state of each cell is read from, ``plane * n_cells + cell``.
    n_planes : planes that get a state: 1, and more with snapshots.
    before, after, n_changes : for `RecurrentCells` alone: its table without and with the ubatch, and the state of its
        change counter in which the slot fits.
    """

    head: int
    n: int
    n_seqs: int
    rs_z: int
    s_copy: I32Array
    n_planes: int
    before: RecurrentTable = field(repr=False)
    after: RecurrentTable = field(repr=False)
    n_changes: int = field(repr=False)

    def spares(self, cell: int, plane: int) -> bool:
        """Tell whether the computation leaves a row as it is, however far it gets."""
        i = cell - self.head
        if not 0 <= i < self.n:
            return True
        if i < self.n_seqs:
            return False  # in no plane: a model may write all of them, however few tokens there are
        return plane > 0 or (cell != self.rs_z and int(self.s_copy[i]) == cell)

    def rows_moved(self) -> tuple[int, ...]:
        """Return the rows of states that the computation only moves out of the way, where they are before it."""
        if self.n == self.n_seqs:
            return ()
        taking = {s for ids in self.after.owners[self.head : self.head + self.n_seqs] for s in ids}
        table = self.before
        rows = {
            table.plane[s] * table.n + c
            for s, c in enumerate(table.tail)
            if c != NO_CELL and s not in taking and not self.spares(c, table.plane[s])
        }
        return tuple(sorted(rows))

    def rows_at_risk(self, n_cells: int, n_rs_seq: int) -> I64Array:
        """Return (k,) the rows that the computation may write, ascending, those of every plane.

        A caller that keeps copies of them, and puts them back, can undo a computation.
        """
        cells = range(self.head, self.head + self.n)
        planes = range(n_rs_seq + 1)
        return np.array([d * n_cells + c for d in planes for c in cells if not self.spares(c, d)], np.int64)


def find_recurrent_slot(table: RecurrentTable, ubatch: UBatch, n_rs_seq: int, n_changes: int) -> RecurrentSlot:
    """Find the cells for a ubatch; it always fits. Does not modify `table`.

    Raises
    ------
    BatchError
        If the ubatch is not laid out set by set, with as many tokens in each and disjoint sets.
    SequenceError
        If there is no such sequence.
    """
    sets = sets_of(ubatch, len(table.tail))
    after = table.copy()
    firsts = [ids[0] for ids in sets]
    _choose(after, sets)
    lo, hi = _disagreeing_apart(after, *_range(after, firsts))
    for i, s in enumerate(firsts):
        if after.tail[s] != lo + i:
            after.swap(after.tail[s], lo + i)
    rs_z, s_copy = _sources(after, lo, hi)
    n_planes = min(ubatch.n_seq_tokens, n_rs_seq + 1)
    for i, cell in enumerate(range(lo + len(sets), hi + 1), len(sets)):
        if s_copy[i] != cell:
            _row_copied(after, cell)
    _advance(after, sets, lo, ubatch, n_planes)
    after.src[lo : hi + 1] = range(lo, hi + 1)
    after.head = lo
    return RecurrentSlot(
        head=lo,
        n=hi - lo + 1,
        n_seqs=len(sets),
        rs_z=rs_z,
        s_copy=np.array(s_copy, np.int32),
        n_planes=n_planes,
        before=table,
        after=after,
        n_changes=n_changes,
    )


def sets_of(ubatch: UBatch, n_ids: int) -> list[tuple[int, ...]]:
    """Return the sequences of each set of a ubatch, after checking that states can follow it."""
    n, seq_ids = ubatch.n_seq_tokens, ubatch.seq_ids
    if not ubatch.equal_seqs or n * ubatch.n_seqs != len(seq_ids):
        raise BatchError(f"ubatch: {len(seq_ids)} tokens are not {ubatch.n_seqs} runs of one sequence set each")
    check_positions(ubatch)
    sets = list(seq_ids[::n])
    seen: set[int] = set()
    for i, ids in enumerate(sets):
        # differs from llama.cpp: sets that shrink on the way are refused, because those who leave would get a state
        # with tokens that are not theirs
        if seq_ids[i * n : (i + 1) * n].count(ids) != n or not ids:
            raise BatchError(f"ubatch: the tokens of set {i} have not all the sequence ids {ids}, at least one")
        if not seen.isdisjoint(ids):
            raise BatchError(f"ubatch: sequences {sorted(seen.intersection(ids))} are in several sets")
        seen.update(ids)
        if ids[0] < 0 or ids[-1] >= n_ids:
            culprit = ids[0] if ids[0] < 0 else ids[-1]
            raise SequenceError(f"ubatch: has sequence {culprit}, this memory holds sequences 0 to {n_ids - 1}")
    return sets


def _choose(table: RecurrentTable, sets: list[tuple[int, ...]]) -> None:
    """Give the first sequence of each set a cell of its own; the others lose theirs, and will share that one."""
    if table.head > table.used + 2 * len(sets):
        table.head = 0  # many holes behind: better filled than passed over
    for ids in sets:
        for s in ids[1:]:
            table.drop(s)
    for ids in sets:
        cell = table.tail[ids[0]]
        if cell == NO_CELL or len(table.owners[cell]) > 1:
            table.part(ids[0], table.free_cell(table.head))


def _range(table: RecurrentTable, seqs: list[int]) -> tuple[int, int]:
    tails = [table.tail[s] for s in seqs]
    return min(tails), max(tails)


def _disagreeing_apart(table: RecurrentTable, lo: int, hi: int) -> tuple[int, int]:
    """Give sequences that share a cell but not a plane cells of their own, before one row is moved for all of them.

    Returns the first and the last cell of the run, which may have grown.
    """
    # differs from llama.cpp: there the plane of the smallest id counts for all, so the others get a wrong state
    while any(table.plane):
        apart = next((c for c in range(lo, hi + 1) if len({table.plane[s] for s in table.owners[c]}) > 1), None)
        if apart is None:
            break
        ids = table.owners[apart]
        plane = max(table.plane[s] for s in ids)
        leaving = [s for s in ids if table.plane[s] == plane]
        free = table.free_cell(lo)
        table.part(leaving[0], free)
        for s in leaving[1:]:
            table.owners[apart] = tuple(o for o in table.owners[apart] if o != s)
            table.join(s, free)
        lo, hi = min(lo, free), max(hi, free)
    return lo, hi


def _sources(table: RecurrentTable, lo: int, hi: int) -> tuple[int, list[int]]:
    """Return the row to be zeroed, -1 if none can be, and the row that each cell of the run is read from."""
    run = table.src[lo : hi + 1]
    taken = set(run)  # cells outside the run are their own source
    rs_z = next((c for c in range(lo, hi + 1) if c not in taken), -1)
    rows = []
    for cell, src in enumerate(run, lo):
        ids = table.owners[cell]
        plane = table.plane[ids[0]] if ids else 0
        rows.append(plane * table.n + (rs_z if src == NO_SOURCE else src))
    return rs_z, rows


def _row_copied(table: RecurrentTable, cell: int) -> None:
    """Record that a row of plane 0 alone has come to a cell: nothing older is to be had there."""
    for s in table.owners[cell]:
        table.plane[s], table.trail[s] = 0, table.trail[s][:1]


def _advance(table: RecurrentTable, sets: list[tuple[int, ...]], lo: int, ubatch: UBatch, n_planes: int) -> None:
    """Record that the sequences of each set are behind its last token."""
    newest_first = ubatch.pos[0].reshape(len(sets), -1)[:, ::-1]
    for cell, (ids, trail) in enumerate(zip(sets, newest_first[:, :n_planes].tolist(), strict=True), lo):
        table.owners[cell] = ids
        reachable = in_order(trail)
        for s in ids:
            table.tail[s], table.plane[s], table.trail[s] = cell, 0, reachable
