"""Faults that users of such systems reported, as far as bookkeeping shows them; tests are named after symptoms."""

from __future__ import annotations

import numpy as np
import pytest
from support.cell_state import queued, shifts, state
from support.stored_rows import StoredRows
from support.ubatches import run, ubatch

from pykv.batch.ubatch import UBatch
from pykv.cells import CellStreams, MaskRule, SlotInfo, SwaType, Window, fill_mask, visible
from pykv.errors import NoSlotError, SequenceError

CAUSAL = MaskRule()


def decode(streams: CellStreams, *ubatches: UBatch) -> bool:
    """Store ubatches if all of them fit."""
    slots = streams.prepare(ubatches)
    for slot, ub in zip(slots or [], ubatches, strict=False):
        streams.apply(slot, ub)
    streams.check()
    return slots is not None


def store(streams: CellStreams, *ubatches: UBatch) -> StoredRows:
    """Store ubatches with rows beside them; the tokens are 1, 2, ..."""
    stored = StoredRows(streams)
    for ub in ubatches:
        slot = streams.find_slot(ub)
        assert slot is not None
        streams.apply(slot, ub)
        stored.write(slot, ub, stored.fresh(ub.n_tokens))
    return stored


def occupied(streams: CellStreams) -> str:
    return " ".join(cell for cell in streams.dump().split() if not cell.endswith("."))


def shown_cells(streams: CellStreams, ub: UBatch, n_kv: int, rule: MaskRule = CAUSAL) -> list[list[int]]:
    """Return, per token of an applied ubatch, the cells it sees in a mask over `n_kv` cells."""
    slot = streams.find_slot(ub) or SlotInfo(0, 0, (0,), np.zeros((1, 1), np.int64))
    out = np.full((1, ub.n_tokens, n_kv), np.nan, np.float16)
    fill_mask(out, streams, slot, ub, rule)
    assert (np.isneginf(out) | (out == 0)).all()
    return [np.flatnonzero(row == 0).tolist() for row in out[0]]


# case A01, ggml-org/llama.cpp#3825


def test_of_two_shifts_before_an_update_only_the_last_reached_the_keys() -> None:
    streams = CellStreams(8)
    stored = store(streams, run(0, 0, 6))
    streams.seq_rm(0, 0, 2)
    streams.seq_add(0, 2, 6, -2)
    streams.seq_add(0, 1, 4, +3)
    assert occupied(streams) == "2:0{0} 3:4{0} 4:5{0} 5:6{0}"
    assert shifts(streams) == [0, 0, -2, 1, 1, 1, 0, 0]
    rows, deltas = streams.moved_rows()
    assert (rows.tolist(), deltas.tolist()) == ([2, 3, 4, 5], [-2, 1, 1, 1])
    stored.update()
    assert stored.rows[0, 2:6, 1].tolist() == [0, 4, 5, 6]
    after = stored.rows.copy()
    assert not streams.has_shift
    stored.update()
    assert stored.rows.tolist() == after.tolist()


# case A02, ggml-org/llama.cpp#13983


def test_removing_from_any_sequence_stopped_working() -> None:
    streams = CellStreams(8, n_seq_max=2)
    decode(streams, run(0, 0, 3))
    decode(streams, run(1, 0, 2))
    assert streams.seq_rm(-1, 1, -1)
    assert occupied(streams) == "0:0{0} 3:0{1}"
    assert streams.cells[0].n_used == 2
    assert streams.heads == [1]
    assert (streams.pos_max(0), streams.pos_max(1)) == (0, 0)
    for s in (-2, 256):
        with pytest.raises(SequenceError):
            streams.seq_rm(s, 0, -1)
    assert occupied(streams) == "0:0{0} 3:0{1}"
    assert streams.seq_rm(-1, -1, -1)
    assert (occupied(streams), streams.cells[0].n_used) == ("", 0)
    streams.check()


# case A03, ggml-org/llama.cpp#12160


def test_the_second_cut_of_a_chunk_reuse_removed_cells_that_were_wanted() -> None:
    streams = CellStreams(16)
    stored = store(streams, run(0, 0, 9))
    for dst, src, n in ((2, 4, 2), (4, 7, 2)):
        streams.seq_rm(0, dst, src)
        streams.seq_add(0, src, src + n, dst - src)
    streams.seq_rm(0, 6)
    assert occupied(streams) == "0:0{0} 1:1{0} 4:2{0} 5:3{0} 7:4{0} 8:5{0}"
    tokens = dict(enumerate("abcdefghj", 1))
    assert "".join(tokens[token] for _, token, _ in stored.of_sequence(0)) == "abefhj"
    assert [angle for _, _, angle in stored.of_sequence(0)] == list(range(6))


# case A04, ggml-org/llama.cpp PR #5622


def test_a_context_shift_lost_one_token_too_many() -> None:
    streams = CellStreams(16)
    decode(streams, ubatch([(0, p) for p in range(16)], tokens=range(16)))
    streams.seq_rm(0, 4, 10)
    streams.seq_add(0, 10, 16, -6)
    assert streams.cells[0].pos.tolist() == [0, 1, 2, 3] + [-1] * 6 + [4, 5, 6, 7, 8, 9]
    assert streams.cells[0].n_used == 10
    assert streams.pos_max(0) + 1 == 10
    assert [streams.cells[0].seq_pos_tok_le(0, p) for p in range(10)] == [0, 1, 2, 3, 10, 11, 12, 13, 14, 15]
    assert shifts(streams) == [0] * 10 + [-6] * 6
    streams.check()


# case A08, ggml-org/llama.cpp PR #14119


def test_window_reuse_left_a_hole_in_the_sequence() -> None:
    streams = CellStreams(5, n_seq_max=2, window=Window(2, SwaType.STANDARD))
    decode(streams, run(0, 0, 1))
    decode(streams, run(1, 0, 2))
    decode(streams, run(0, 1, 3))
    streams.seq_rm(1, -1, -1)
    decode(streams, run(0, 3, 5))
    assert streams.dump() == "0:0{0} 1:3{0} 2:4{0} 3:1{0} 4:2{0}"
    decode(streams, run(0, 5, 6))
    assert streams.dump() == "0:. 1:3{0} 2:4{0} 3:5{0} 4:2{0}"
    assert (streams.cells[0].n_used, streams.pos_min(0), streams.pos_max(0)) == (4, 2, 5)
    rule = MaskRule(window=streams.window)
    assert visible(streams.cells[0], 0, 5, rule).tolist() == [4, 5]


def test_positions_stay_without_a_hole_while_a_small_window_cache_turns_over() -> None:
    streams = CellStreams(6, window=Window(3, SwaType.STANDARD))
    for p in range(40):
        assert decode(streams, run(0, p, p + 1))
        present = sorted(streams.cells[0].pos[streams.cells[0].member(0)].tolist())
        assert present == list(range(streams.pos_min(0), p + 1))
        assert visible(streams.cells[0], 0, p, MaskRule(window=streams.window)).tolist() == present[-3:]


# case A09, ml-explore/mlx-lm PR #390


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (SwaType.STANDARD, {3: [0, 1, 2, 3], 4: [1, 2, 3, 4], 9: [6, 7, 8, 9]}),
        (SwaType.CHUNKED, {3: [0, 1, 2, 3], 4: [4], 7: [4, 5, 6, 7], 8: [8], 9: [8, 9]}),
    ],
)
def test_a_window_showed_one_key_too_many(kind: SwaType, expected: dict[int, list[int]]) -> None:
    rule = MaskRule(window=Window(4, kind))
    whole = CellStreams(16)
    decode(whole, run(0, 0, 10))
    at_once = shown_cells(whole, run(0, 0, 10), 16, rule)
    assert {p: at_once[p] for p in expected} == expected
    assert max(map(len, at_once)) == 4

    stepwise = CellStreams(16)
    for p in range(10):
        decode(stepwise, run(0, p, p + 1))
        assert shown_cells(stepwise, run(0, p, p + 1), 16, rule) == [at_once[p]]


# case A12, ggml-org/llama.cpp PR #12695


def test_a_batch_that_did_not_fit_left_half_of_itself_behind() -> None:
    streams = CellStreams(8)
    decode(streams, run(0, 0, 5))
    before = state(streams)
    assert streams.prepare([run(0, 5, 7), run(0, 7, 9)]) is None
    assert state(streams) == before
    assert decode(streams, run(0, 5, 7), run(0, 7, 8))
    assert occupied(streams) == " ".join(f"{i}:{i}{{0}}" for i in range(8))


def test_halving_a_batch_that_does_not_fit_comes_to_an_end() -> None:
    streams = CellStreams(8)
    decode(streams, run(0, 0, 5))
    tried, size, at = [], 4, 5
    while size:
        parts = [run(0, p, min(p + 2, at + size)) for p in range(at, at + size, 2)]
        fits = decode(streams, *parts)
        tried.append((size, fits))
        if fits:
            at += size
        else:
            size //= 2
    assert tried == [(4, False), (2, True), (2, False), (1, True), (1, False)]
    assert (streams.cells[0].n_used, streams.pos_max(0)) == (8, 7)


# case A13, gravitee-io/llamaj.cpp#119 and ggml-org/llama.cpp PR #14363


def two_streams() -> tuple[CellStreams, StoredRows]:
    streams = CellStreams(8, n_seq_max=2, unified=False)
    return streams, store(streams, run(0, 0, 4), run(1, 0, 6))


def test_copying_a_part_to_another_stream_ended_the_process() -> None:
    streams, stored = two_streams()
    streams.seq_cp(0, 1, 0, 2)
    assert [streams.dump(s) for s in range(2)] == [
        "0:0{0} 1:1{0} 2:2{0} 3:3{0}",
        "0:0{1} 1:1{1} 2:2{1} 3:3{1} 4:4{1} 5:5{1}",
    ]
    assert [row[:2] for row in stored.of_sequence(1)] == [(0, 1), (1, 2), (2, 7), (3, 8), (4, 9), (5, 10)]


def test_a_whole_copy_to_another_stream_replaces_it() -> None:
    streams, stored = two_streams()
    streams.seq_cp(0, 1)
    assert streams.dump(1) == "0:0{1} 1:1{1} 2:2{1} 3:3{1}"
    assert streams.heads == [4, 4]
    assert queued(streams) == [(0, 1, [0, 1, 2, 3], [0, 1, 2, 3])]
    stored.update()
    streams.seq_rm(0)
    assert [row[:2] for row in stored.of_sequence(1)] == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_a_part_that_another_stream_has_no_room_for_is_a_normal_error() -> None:
    streams, _ = two_streams()
    assert decode(streams, run(1, 6, 8))
    streams.seq_add(1, 0, -1, 10)
    before = state(streams)
    with pytest.raises(NoSlotError, match="2 cells of sequence 0, and stream 1 has room for 0"):
        streams.seq_cp(0, 1, 0, 2)
    assert state(streams) == before


def test_in_one_stream_a_part_is_shared() -> None:
    streams = CellStreams(8)
    store(streams, run(0, 0, 4))
    streams.seq_cp(0, 1, 0, 2)
    assert streams.dump() == "0:0{0,1} 1:1{0,1} 2:2{0} 3:3{0}"
    assert queued(streams) == []


# case A14, ggml-org/llama.cpp#17316


def test_a_batch_without_the_sequence_at_fault_succeeds() -> None:
    streams = CellStreams(16, n_seq_max=3)
    decode(streams, run(0, 0, 4))
    decode(streams, run(1, 0, 6))
    decode(streams, run(2, 0, 3))
    assert streams.cells[0].n_used == 13
    assert decode(streams, ubatch([(0, 4), (1, 6)]))
    assert streams.dump().split()[13:] == ["13:4{0}", "14:6{1}"]
    assert [streams.pos_max(s) for s in range(3)] == [4, 6, 2]


# case A15, ggml-org/llama.cpp#4113


@pytest.mark.parametrize(("first", "cells"), [(0, range(34, 39)), (1, range(5))])
@pytest.mark.parametrize("padded", [39, 64, 256])
def test_the_answer_depended_on_the_cells_a_prompt_landed_in(first: int, cells: range, padded: int) -> None:
    streams = CellStreams(256)
    prompts = [run(0, 0, 34), run(1, 0, 5)]
    decode(streams, prompts[first])
    decode(streams, prompts[1 - first])
    shown = shown_cells(streams, prompts[1], padded)
    assert shown == [list(cells[: p + 1]) for p in range(5)]
    assert visible(streams.cells[0], 1, 4, MaskRule()).tolist() == [0, 1, 2, 3, 4]


def test_parallel_sequences_saw_each_other_in_a_mixed_batch() -> None:
    streams = CellStreams(64)
    mixed = ubatch([(s, p) for p in range(4) for s in (0, 1, 2)])
    decode(streams, mixed)
    expected = [[3 * k + s for k in range(p + 1)] for p in range(4) for s in (0, 1, 2)]
    assert shown_cells(streams, mixed, 64) == expected
