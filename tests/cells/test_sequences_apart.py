"""Sequences share cells, yet each is as if it had a store of its own.

The oracle knows no cells: a sequence is a set of (position, token). Whatever is done to one of them, the others keep
what they hold, and each stored key is turned to the position where its sequence holds it.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from support.cell_state import state
from support.stored_rows import StoredRows
from support.ubatches import ubatch

from pykv.cells import CellStreams
from pykv.errors import NoSlotError, ShiftUnsupported

N_SEQ = 4
INF = 2**31 - 1
Held = set[tuple[int, int]]
Step = tuple[str | int, ...]

SEQS = st.integers(0, N_SEQ - 1)
ENDS = st.integers(-1, 7)
RANGES = st.one_of(st.just((-1, -1)), st.tuples(ENDS, st.just(-1)), st.tuples(ENDS, ENDS))
STEPS = st.one_of(
    st.tuples(st.just("decode"), st.sets(SEQS, min_size=1).map(sorted).map(tuple), st.integers(1, 4)),
    st.builds(lambda s, span: ("seq_rm", s, *span), SEQS, RANGES),
    st.builds(lambda src, dst, span: ("seq_cp", src, dst, *span), SEQS, SEQS, RANGES),
    st.tuples(st.just("seq_keep"), SEQS),
    st.builds(lambda s, span, d: ("seq_add", s, *span, d), SEQS, RANGES, st.integers(-5, 5)),
    st.builds(lambda s, span, d: ("seq_div", s, *span, d), SEQS, RANGES, st.integers(1, 3)),
    st.tuples(st.just("update"), st.none() | st.integers(1, 5)),
)


class Apart:
    """What each sequence holds, with the verbs as a caller understands them."""

    def __init__(self, unified: bool) -> None:
        self.unified = unified
        self.held: list[Held] = [set() for _ in range(N_SEQ)]

    def change(self, s: int, p0: int, p1: int, to: Callable[[int], int]) -> None:
        moved = {(to(p) if max(p0, 0) <= p < (INF if p1 < 0 else p1) else p, token) for p, token in self.held[s]}
        self.held[s] = {(p, token) for p, token in moved if p >= 0}

    def seq_rm(self, s: int, p0: int, p1: int) -> None:
        self.change(s, p0, p1, lambda _: -1)

    def seq_add(self, s: int, p0: int, p1: int, d: int) -> None:
        self.change(s, p0, p1, lambda p: p + d)

    def seq_div(self, s: int, p0: int, p1: int, d: int) -> None:
        self.change(s, p0, p1, lambda p: p // d)

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        if src != dst and not self.unified:
            self.seq_rm(dst, p0, p1)
        end = INF if p1 < 0 else p1
        self.held[dst] |= {(p, token) for p, token in self.held[src] if max(p0, 0) <= p < end}

    def seq_keep(self, s: int) -> None:
        if self.unified:
            self.held = [held if i == s else set() for i, held in enumerate(self.held)]


def decode(streams: CellStreams, stored: StoredRows, apart: Apart, ids: tuple[int, ...], n: int) -> None:
    """Store tokens behind all of the sequences: shared by them in one stream, some for each in several."""
    first = max(streams.pos_max(s) for s in ids) + 1
    positions = range(first, first + n)
    if streams.n_stream == 1:
        ub = ubatch([(ids, p) for p in positions])
    else:
        ub = ubatch([(s, p) for s in ids for p in positions], equal=True)
    stored.update()
    slot = streams.find_slot(ub)
    if slot is None:
        return
    tokens = stored.fresh(ub.n_tokens)
    streams.apply(slot, ub)
    stored.write(slot, ub, tokens)
    for token, p, owners in zip(tokens, ub.pos[0].tolist(), ub.seq_ids, strict=True):
        for s in owners:
            apart.held[s].add((p, token))


def take(step: Step, streams: CellStreams, stored: StoredRows, apart: Apart) -> None:
    """Do one step to both; one that is refused must change nothing."""
    verb, *args = step
    if verb == "decode":
        decode(streams, stored, apart, *args)  # type: ignore[arg-type]
    elif verb == "update":
        stored.update(*args)  # type: ignore[arg-type]
    else:
        before = state(streams)
        try:
            getattr(streams, str(verb))(*args)
        except (NoSlotError, ShiftUnsupported):
            assert state(streams) == before
        else:
            getattr(apart, str(verb))(*args)


@given(unified=st.booleans(), n_cells=st.integers(4, 16), steps=st.lists(STEPS, max_size=20))
@example(
    unified=True,
    n_cells=8,
    steps=[("decode", (0, 1), 3), ("seq_add", 0, 1, -1, 2), ("seq_cp", 0, 2, -1, -1), ("seq_add", 2, 0, -1, -1)],
)
@settings(max_examples=200, deadline=None)
def test_each_sequence_is_as_if_it_had_a_store_of_its_own(unified: bool, n_cells: int, steps: list[Step]) -> None:
    streams = CellStreams(n_cells, n_seq_max=N_SEQ, unified=unified)
    stored, apart = StoredRows(streams), Apart(unified)
    for step in steps:
        take(step, streams, stored, apart)
        streams.check()
        for s in range(N_SEQ):
            found = stored.of_sequence(s)
            assert {(p, token) for p, token, _ in found} == apart.held[s]
            assert [angle for _, _, angle in found] == [p for p, _, _ in found]


@given(
    n=st.integers(1, 8),
    fork=RANGES,
    verb=st.sampled_from([("seq_add", -3), ("seq_add", 4), ("seq_div", 2), ("seq_div", 3)]),
    moved=RANGES,
)
@settings(max_examples=150, deadline=None)
def test_moving_a_fork_gives_what_moving_a_separate_copy_gives(
    n: int, fork: tuple[int, int], verb: tuple[str, int], moved: tuple[int, int]
) -> None:
    name, by = verb
    results = []
    for unified in (True, False):
        streams = CellStreams(16, n_seq_max=2, unified=unified)
        stored = StoredRows(streams)
        decode(streams, stored, Apart(unified), (0,), n)
        streams.seq_cp(0, 1, *fork)
        getattr(streams, name)(1, *moved, by)
        results.append((stored.of_sequence(0), stored.of_sequence(1)))
        stored.update()
        results.append((stored.of_sequence(0), stored.of_sequence(1)))
    assert results[0] == results[1] == results[2] == results[3]


@given(n=st.integers(1, 5), n_cells=st.integers(5, 12), move=st.sampled_from(["seq_add", "seq_div"]))
@settings(deadline=None)
def test_rows_of_siblings_stay_where_and_as_they_are(n: int, n_cells: int, move: str) -> None:
    streams = CellStreams(n_cells, n_seq_max=2)
    stored = StoredRows(streams)
    decode(streams, stored, Apart(True), (0, 1), n)
    assume(n > 1 or move == "seq_add")
    cells, before = streams.cells[0].member(1).tolist(), stored.of_sequence(1)
    n_movers = n if move == "seq_add" else n - 1  # position 0 stays where it is
    try:
        getattr(streams, move)(0, 0, -1, 2)
    except ShiftUnsupported:
        assert n_cells < n + n_movers
    else:
        assert n_cells >= n + n_movers
    rows, moved = stored.rows.copy(), streams.moved_rows()[0]
    stored.update()
    assert (streams.cells[0].member(1).tolist(), stored.of_sequence(1)) == (cells, before)
    assert not set(moved.tolist()) & set(range(n)), "no sibling's row is turned"
    assert stored.rows[0, :n].tolist() == rows[0, :n].tolist(), "nor written"
