"""Apply, prepare and the sequence verbs of one cache: the rules and examples of kv_cache.md sections 3 to 6."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.cell_state import shifts, state
from support.ubatches import run, ubatch

from pykv.batch.ubatch import UBatch
from pykv.cells import CellStreams, SlotInfo, SwaType, Window
from pykv.errors import ParamError, SequenceError

MAX_POS = 2**31 - 2


def decode(streams: CellStreams, *ubatches: UBatch) -> None:
    slots = streams.prepare(ubatches)
    assert slots is not None
    for slot, ub in zip(slots, ubatches, strict=True):
        streams.apply(slot, ub)
    streams.check()


def two_sequences() -> CellStreams:
    """Sequence 0 at 0..3 in cells 0..3, sequence 1 at 0..1 in cells 4 and 5."""
    streams = CellStreams(8)
    decode(streams, run(0, 0, 4), run(1, 0, 2))
    return streams


def test_reuse_purges_what_lies_before_the_lost_position() -> None:
    streams = CellStreams(4, window=Window(2, SwaType.STANDARD))
    streams.cells[0].pos_set(np.arange(4), np.array([2, 0, 1, 3], np.int32))
    streams.cells[0].seq_add(np.arange(4), 0)
    decode(streams, run(0, 4, 5))
    assert streams.dump() == "0:4{0} 1:. 2:. 3:3{0}"
    assert streams.heads == [1]


@pytest.mark.parametrize(
    ("ub", "always", "ext"),
    [
        (ubatch([(0, 5)], tokens=[42]), False, (0, 0, 42)),
        (ubatch([(0, 5)], tokens=[42], xy=[(2, 3)]), False, (2, 3, 42)),
        (ubatch([(0, 5)], embd=True, xy=[(2, 3)]), False, (2, 3, -1)),
        (ubatch([(0, 5)], embd=True), False, (7, 8, 9)),
        (ubatch([(0, 5)], embd=True), True, (0, 0, 50)),
        (ubatch([(0, 5)], tokens=[42]), True, (0, 0, 42)),
    ],
)
def test_what_a_cell_notes_beside_its_position(ub: UBatch, always: bool, ext: tuple[int, int, int]) -> None:
    streams = CellStreams(4)
    cells = streams.cells[0]
    cells.ext_set(0, 7, 8, 9)
    slot = streams.find_slot(ub)
    assert slot is not None
    streams.apply(slot, ub, ext_always=always, embd_tok=50 if always else -1)
    assert (cells.ext_x[0], cells.ext_y[0], cells.ext_tok[0]) == ext


def test_a_token_of_several_sequences_takes_one_cell() -> None:
    streams = CellStreams(4)
    decode(streams, ubatch([((0, 2), 0), (2, 1), ((0, 1, 2), 2)]))
    assert streams.dump() == "0:0{0,2} 1:1{2} 2:2{0,1,2}"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s.seq_cp(0, 1, 0, 1),
        lambda s: (s.clear(), s.cells[0].pos_set(0, 3)),
    ],
)
def test_a_slot_over_shared_or_ownerless_cells_is_refused(spoil: Callable[[CellStreams], Any]) -> None:
    streams = CellStreams(4, window=Window(2, SwaType.STANDARD))
    decode(streams, run(0, 0, 4))
    ub = run(0, 4, 6)
    slot = streams.find_slot(ub)
    assert slot is not None
    spoil(streams)
    before = state(streams)
    with pytest.raises(ParamError, match="slot"):
        streams.apply(slot, ub)
    assert state(streams) == before


@pytest.mark.parametrize("ub", [run(0, 0, 3), ubatch([(0, -1), (0, 0)]), ubatch([(0, 1), (0, 2**31 - 1)])])
def test_a_ubatch_that_cannot_be_stored_changes_nothing(ub: UBatch) -> None:
    streams = CellStreams(4)
    before = state(streams)
    with pytest.raises(ParamError):
        streams.apply(SlotInfo(0, 0, (0,), np.array([[0, 1]])), ub)
    assert state(streams) == before


def test_prepare_places_each_ubatch_behind_the_one_before() -> None:
    streams = CellStreams(8)
    slots = streams.prepare([run(0, 0, 3), run(1, 0, 2), run(0, 3, 5)])
    assert slots is not None
    assert [s.idxs.tolist() for s in slots] == [[[0, 1, 2]], [[3, 4]], [[5, 6]]]
    assert streams.prepare([]) == []


def test_prepare_gives_back_cells_that_a_later_ubatch_would_purge() -> None:
    streams = CellStreams(4, window=Window(2, SwaType.STANDARD))
    streams.cells[0].pos_set(np.arange(4), np.array([2, 0, 1, 3], np.int32))
    streams.cells[0].seq_add(np.arange(4), 0)
    streams.seq_add(0, 0, -1, 1)
    before = state(streams)
    assert streams.prepare([run(0, 5, 6), run(0, 6, 7)]) is not None
    assert state(streams) == before
    assert streams.prepare([run(0, 5, 6), run(1, 0, 5)]) is None
    assert state(streams) == before
    streams.check()


def test_prepare_restores_the_heads_of_streams_that_do_not_begin_at_zero() -> None:
    streams = CellStreams(8, n_seq_max=3, unified=False)
    decode(streams, ubatch([(0, 0), (1, 0), (2, 0)], equal=True), ubatch([(2, 1), (2, 2)], equal=True))
    assert streams.heads == [1, 1, 3]
    pair = ubatch([(1, 1), (2, 3)], equal=True)
    assert streams.prepare([pair, ubatch([(1, p) for p in range(2, 12)], equal=True)]) is None
    assert streams.heads == [1, 1, 3]
    assert streams.prepare([pair, ubatch([(1, 2), (2, 4)], equal=True)]) is not None
    assert streams.heads == [1, 1, 3]


def test_prepare_leaves_no_trace_of_an_error_either() -> None:
    streams = CellStreams(8, n_seq_max=2, unified=False)
    before = state(streams)
    with pytest.raises(SequenceError):
        streams.prepare([run(0, 0, 2), run(2, 0, 1), run(0, 2, 3)])
    assert state(streams) == before


def test_the_next_search_starts_at_the_first_cell_freed() -> None:
    streams = two_sequences()
    streams.seq_cp(0, 2, 0, 2)
    assert streams.heads == [6]
    streams.seq_rm(0, 0, 3)
    assert streams.dump() == "0:0{2} 1:1{2} 2:. 3:3{0} 4:0{1} 5:1{1}"
    assert streams.heads == [2], "cells 0 and 1 stay occupied"
    streams.seq_rm(1)
    assert streams.heads == [2], "cell 4 lies behind"


def test_removing_nothing_leaves_the_head() -> None:
    streams = two_sequences()
    assert streams.seq_rm(0, 4, -1)
    assert streams.seq_rm(0, 3, 3)
    assert streams.seq_rm(0, 3, 1)
    assert streams.seq_rm(7)
    assert streams.seq_rm(-1, 4)
    assert (streams.heads, streams.cells[0].n_used) == ([6], 6)


def test_any_sequence_means_every_stream() -> None:
    streams = CellStreams(4, n_seq_max=2, unified=False)
    decode(streams, ubatch([(0, 0), (0, 1), (1, 0), (1, 1)], equal=True))
    assert streams.seq_rm(-1, 1)
    assert [streams.dump(i) for i in range(2)] == ["0:0{0}", "0:0{1}"]
    assert streams.heads == [1, 1]


def test_keeping_one_sequence_empties_the_others() -> None:
    streams = two_sequences()
    streams.seq_cp(0, 1, 2, -1)
    streams.seq_keep(1)
    assert streams.dump() == "0:. 1:. 2:2{1} 3:3{1} 4:0{1} 5:1{1}"
    assert streams.heads == [0]


def test_keeping_one_sequence_leaves_other_streams_alone() -> None:
    streams = CellStreams(4, n_seq_max=2, unified=False)
    decode(streams, ubatch([(0, 0), (1, 0)], equal=True))
    streams.seq_keep(1)
    assert (streams.pos_max(0), streams.pos_max(1)) == (0, 0)


def test_copying_onto_a_sequence_that_shares_cells_already() -> None:
    streams = two_sequences()
    streams.seq_cp(0, 1, 0, 2)
    streams.seq_cp(0, 1)
    assert streams.dump() == "0:0{0,1} 1:1{0,1} 2:2{0,1} 3:3{0,1} 4:0{1} 5:1{1}"
    before = state(streams)
    streams.seq_cp(1, 1)
    assert state(streams) == before
    streams.check()


def test_a_shift_restarts_the_search_at_what_it_emptied() -> None:
    streams = two_sequences()
    streams.seq_add(0, 2, -1, -3)
    assert streams.dump() == "0:0{0} 1:1{0} 2:. 3:0{0} 4:0{1} 5:1{1}"
    assert (streams.heads, shifts(streams)) == ([2], [0, 0, 0, -3, 0, 0, 0, 0])
    streams.seq_add(0, 0, 1, 5)
    assert streams.heads == [0]
    assert streams.has_shift
    streams.reset_shift()
    assert not streams.has_shift
    assert not any(shifts(streams))


@pytest.mark.parametrize(("p0", "p1", "delta"), [(0, -1, 0), (2, 2, 4), (-1, 0, 4)])
def test_a_shift_of_nothing_leaves_everything(p0: int, p1: int, delta: int) -> None:
    streams = two_sequences()
    streams.seq_add(0, p0, p1, delta)
    assert (streams.heads, streams.has_shift) == ([6], False)


def test_a_shift_that_meets_no_cell_restarts_the_search() -> None:
    streams = two_sequences()
    streams.seq_add(0, 9, 12, 1)
    assert (streams.heads, streams.has_shift) == ([0], False)


def test_division_halves_positions_and_leaves_the_head() -> None:
    streams = two_sequences()
    streams.seq_div(0, 1, -1, 2)
    assert streams.cells[0].pos.tolist() == [0, 0, 1, 1, 0, 1, -1, -1]
    assert shifts(streams) == [0, -1, -1, -2, 0, 0, 0, 0]
    assert streams.heads == [6]
    streams.seq_div(0, 0, -1, 1)
    streams.seq_div(0, 1, 1, 2)
    assert streams.cells[0].pos.tolist() == [0, 0, 1, 1, 0, 1, -1, -1]


def test_a_position_may_reach_the_last_one_but_not_pass_it() -> None:
    streams = two_sequences()
    streams.seq_add(0, 3, 4, MAX_POS - 3)
    assert streams.pos_max(0) == MAX_POS
    before = state(streams)
    with pytest.raises(ParamError, match=f"delta = 1: position {MAX_POS + 1} would pass the limit {MAX_POS}"):
        streams.seq_add(0, 0, -1, 1)
    assert state(streams) == before
    streams.seq_add(0, 0, -1, -MAX_POS)
    assert streams.dump() == "0:. 1:. 2:. 3:0{0} 4:0{1} 5:1{1}"


@pytest.mark.parametrize("delta", [2**31, -(2**31), 2**70])
def test_a_shift_beyond_all_positions_is_refused(delta: int) -> None:
    streams = two_sequences()
    with pytest.raises(ParamError, match="delta"):
        streams.seq_add(0, 0, -1, delta)


@pytest.mark.parametrize("d", [0, -1])
def test_division_by_zero_or_less_is_refused(d: int) -> None:
    streams = two_sequences()
    before = state(streams)
    with pytest.raises(ParamError, match=f"d = {d}"):
        streams.seq_div(0, 0, -1, d)
    assert state(streams) == before


def verbs(s: int) -> list[Callable[[CellStreams], Any]]:
    return [
        lambda c: c.seq_rm(s),
        lambda c: c.seq_cp(s, 0),
        lambda c: c.seq_cp(0, s),
        lambda c: c.seq_cp(s, s),
        lambda c: c.seq_keep(s),
        lambda c: c.seq_add(s, 0, -1, 1),
        lambda c: c.seq_add(s, 0, -1, 0),
        lambda c: c.seq_div(s, 0, -1, 2),
        lambda c: c.pos_min(s),
        lambda c: c.pos_max(s),
        lambda c: c.stream_of(s),
    ]


@pytest.mark.parametrize(("unified", "s"), [(True, -2), (True, 256), (False, -2), (False, 2), (True, -1), (False, -1)])
def test_sequences_outside_the_map_are_refused_by_every_verb(unified: bool, s: int) -> None:
    streams = CellStreams(8, n_seq_max=2, unified=unified)
    decode(streams, run(0, 0, 3))
    before = state(streams)
    for verb in verbs(s)[1 if s == -1 else 0 :]:
        with pytest.raises(SequenceError, match=rf"^(seq_id|src|dst) = {s}: this cache holds sequences 0 to "):
            verb(streams)
    assert state(streams) == before


NO_INTEGERS = [1.5, 0.0, True, np.True_, None, "0", [0], math.nan, math.inf, np.float32(1), np.array([0])]
"""What was taken for an integer, or failed far from the argument's name."""


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("bad", [*NO_INTEGERS, 10**30])
def test_sequences_that_are_no_integers_were_taken_for_some(bad: Any, unified: bool) -> None:
    streams = CellStreams(8, n_seq_max=2, unified=unified)
    decode(streams, run(0, 0, 3), run(1, 0, 2))
    before = state(streams)
    complaint = rf"^(seq_id|src|dst) = {re.escape(repr(bad))}: this cache holds sequences 0 to "
    for verb in verbs(bad):
        with pytest.raises(SequenceError, match=complaint):
            verb(streams)
    with pytest.raises(SequenceError, match=r"^dst"):
        streams.seq_cp(0, bad)
    with pytest.raises(SequenceError, match=r"^src"):
        streams.seq_cp(bad, 0)
    assert state(streams) == before


def test_minus_one_as_a_float_emptied_every_sequence() -> None:
    streams = two_sequences()
    before = state(streams)
    with pytest.raises(SequenceError, match=r"^seq_id = -1\.0"):
        streams.seq_rm(-1.0)  # type: ignore[arg-type]
    assert state(streams) == before


@pytest.mark.parametrize("bad", NO_INTEGERS)
def test_positions_that_are_no_integers_moved_and_deleted_tokens(bad: Any) -> None:
    streams = two_sequences()
    before = state(streams)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("p0", lambda: streams.seq_rm(0, bad, -1)),
        ("p1", lambda: streams.seq_rm(0, 1, bad)),
        ("p0", lambda: streams.seq_rm(-1, bad, -1)),
        ("p0", lambda: streams.seq_cp(0, 1, bad, -1)),
        ("p1", lambda: streams.seq_cp(0, 1, 0, bad)),
        ("p1", lambda: streams.seq_cp(0, 0, 0, bad)),
        ("p0", lambda: streams.seq_add(0, bad, -1, 1)),
        ("p1", lambda: streams.seq_add(0, 0, bad, 0)),
        ("delta", lambda: streams.seq_add(0, 0, -1, bad)),
        ("p0", lambda: streams.seq_div(0, bad, -1, 2)),
        ("p1", lambda: streams.seq_div(0, 0, bad, 1)),
        ("d", lambda: streams.seq_div(0, 0, -1, bad)),
    ]
    for name, call in calls:
        with pytest.raises(ParamError, match=rf"^{name} = {re.escape(repr(bad))}: must be an integer"):
            call()
    assert state(streams) == before


def test_positions_that_are_no_integers_are_refused_across_streams_too() -> None:
    streams = streams_of_two()
    before = state(streams)
    for name, bounds in (("p0", (math.nan, -1)), ("p0", (False, -1)), ("p1", (0, None))):
        with pytest.raises(ParamError, match=f"^{name} = {bounds[name == 'p1']!r}: must be an integer"):
            streams.seq_cp(0, 1, *bounds)  # type: ignore[arg-type]
    assert state(streams) == before


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
def test_integers_of_numpy_are_kept_as_pythons(kind: type) -> None:
    streams = two_sequences()
    streams.seq_cp(kind(0), kind(2), kind(1), kind(3))
    assert streams.dump() == "0:0{0} 1:1{0,2} 2:2{0,2} 3:3{0} 4:0{1} 5:1{1}"
    streams.seq_add(kind(1), kind(0), kind(9), kind(3))
    streams.seq_div(kind(1), kind(0), kind(9), kind(2))
    streams.seq_rm(kind(0), kind(3), kind(9))
    assert streams.dump() == "0:0{0} 1:1{0,2} 2:2{0,2} 3:. 4:1{1} 5:2{1}"
    assert (streams.pos_min(kind(2)), streams.pos_max(kind(2)), streams.stream_of(kind(2))) == (1, 2, 0)
    streams.seq_keep(kind(2))
    assert streams.dump() == "0:. 1:1{2} 2:2{2}"
    streams.check()


@pytest.mark.parametrize("far", [2**31, 2**63, 10**30])
def test_an_end_beyond_all_positions_is_the_end(far: int) -> None:
    streams = two_sequences()
    streams.seq_rm(0, far, -1)
    streams.seq_rm(0, 2, far)
    streams.seq_rm(1, -far, 1)
    assert streams.dump() == "0:0{0} 1:1{0} 2:. 3:. 4:. 5:1{1}"


@pytest.mark.parametrize("d", [2**31, 2**63, 10**30])
def test_a_divisor_beyond_all_positions_overflowed(d: int) -> None:
    streams = two_sequences()
    before = state(streams)
    with pytest.raises(ParamError, match=f"^d = {d}: must be an integer from 1 to {2**31 - 1}$"):
        streams.seq_div(0, 0, -1, d)
    assert state(streams) == before


def test_a_unified_cache_takes_sequences_beyond_its_share() -> None:
    streams = CellStreams(4, n_seq_max=1)
    decode(streams, run(255, 0, 2))
    assert (streams.pos_max(255), streams.n_stream, streams.stream_of(255)) == (1, 1, 0)


def test_a_cache_of_one_stream_is_unified_whatever_was_asked() -> None:
    streams = CellStreams(4, n_seq_max=1, unified=False)
    assert (streams.n_stream, streams.stream_of(200)) == (1, 0)


@pytest.mark.parametrize("n_seq_max", [0, 257])
def test_a_number_of_sequences_that_cannot_be_is_refused(n_seq_max: int) -> None:
    with pytest.raises(ParamError, match="n_seq_max"):
        CellStreams(4, n_seq_max=n_seq_max)


def streams_of_two() -> CellStreams:
    """Sequence 0 at 0..3 and sequence 1 at 0..5, a stream of 8 cells each."""
    streams = CellStreams(8, n_seq_max=2, unified=False)
    decode(streams, run(0, 0, 4), run(1, 0, 6))
    return streams


def test_clearing_forgets_cells_heads_and_what_is_pending() -> None:
    streams = streams_of_two()
    streams.seq_cp(0, 1)
    streams.seq_add(1, 0, -1, 1)
    streams.clear()
    assert state(streams) == state(CellStreams(8, n_seq_max=2, unified=False))


def test_a_dump_ends_at_the_last_used_cell() -> None:
    streams = two_sequences()
    assert streams.dump() == "0:0{0} 1:1{0} 2:2{0} 3:3{0} 4:0{1} 5:1{1}"
    streams.seq_rm(1, 1)
    streams.seq_rm(0, 0, 2)
    assert streams.dump() == "0:. 1:. 2:2{0} 3:3{0} 4:0{1}"
    streams.clear()
    assert streams.dump() == ""


def test_check_notices_a_head_outside_and_a_stranger() -> None:
    streams = streams_of_two()
    streams.heads[0] = 9
    with pytest.raises(AssertionError, match="head 9"):
        streams.check()
    streams.heads[0] = 0
    streams.cells[0].seq_add(0, 1)
    with pytest.raises(AssertionError, match="other streams"):
        streams.check()
