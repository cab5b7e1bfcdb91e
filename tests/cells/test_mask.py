"""Masks: the examples of kv_cache.md section 9, and every rule against the element-by-element loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.naive_cells import NaiveCells, mask_value
from support.ubatches import run, ubatch

from pykv.batch.ubatch import UBatch
from pykv.cells import CellStreams, MaskRule, NonCausal, SlotInfo, SwaType, Window, fill_mask, visible
from pykv.errors import TensorError

INF = np.inf
SLOT = SlotInfo(0, 0, (0,), np.array([[2]]))


def example() -> CellStreams:
    """Positions 0, 1, 2 of sequence 0, an empty cell, and position 2 of sequence 1."""
    streams = CellStreams(5)
    streams.cells[0].pos_set([0, 1, 2, 4], np.array([0, 1, 2, 2], np.int32))
    streams.cells[0].seq_add([0, 1, 2], 0)
    streams.cells[0].seq_add(4, 1)
    return streams


def mask(streams: CellStreams, slot: SlotInfo, ub: UBatch, rule: MaskRule, dtype: type = np.float32) -> NDArray:
    out = np.full((len(slot.streams), ub.n_tokens // len(slot.streams), streams.n_cells), 7, dtype)
    fill_mask(out, streams, slot, ub, rule)
    return out


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(
    ("pos", "rule", "row"),
    [
        (2, MaskRule(), [0, 0, 0, -INF, -INF]),
        (1, MaskRule(), [0, 0, -INF, -INF, -INF]),
        (1, MaskRule(causal=False), [0, 0, 0, -INF, -INF]),
        (2, MaskRule(window=Window(2, SwaType.STANDARD)), [-INF, 0, 0, -INF, -INF]),
        (2, MaskRule(alibi=True), [-2, -1, 0, -INF, -INF]),
        (3, MaskRule(window=Window(2, SwaType.CHUNKED)), [-INF, -INF, 0, -INF, -INF]),
        (1, MaskRule(causal=False, window=Window(2, SwaType.SYMMETRIC)), [0, 0, 0, -INF, -INF]),
        (1, MaskRule(causal=False, non_causal=NonCausal.SWA_ONLY), [0, 0, -INF, -INF, -INF]),
    ],
)
def test_one_row(pos: int, rule: MaskRule, row: list[float], dtype: type) -> None:
    assert mask(example(), SLOT, run(0, pos, pos + 1), rule, dtype)[0, 0].tolist() == row


def test_a_token_sees_through_its_first_sequence_only() -> None:
    row = mask(example(), SLOT, ubatch([((0, 1), 2)]), MaskRule())[0, 0]
    assert row.tolist() == [0, 0, 0, -INF, -INF]


def test_only_the_cells_asked_for_are_written() -> None:
    streams, out = example(), np.full((1, 1, 2), 7, np.float16)
    fill_mask(out, streams, SLOT, run(0, 2, 3), MaskRule())
    assert out.tolist() == [[[0, 0]]]


def test_a_distance_beyond_float16_is_infinite() -> None:
    streams = CellStreams(2)
    streams.cells[0].pos_set([0, 1], np.array([0, 70000], np.int32))
    streams.cells[0].seq_add([0, 1], 0)
    ub = run(0, 70000, 70001)
    assert mask(streams, SLOT, ub, MaskRule(alibi=True), np.float16)[0, 0].tolist() == [-INF, 0]
    assert mask(streams, SLOT, ub, MaskRule(alibi=True))[0, 0].tolist() == [-70000, 0]


def test_tokens_of_one_image_hide_each_other_in_reading_order() -> None:
    streams = CellStreams(6)
    xy = [(0, 0), (1, 0), (0, 1), (1, 1)]
    ub = ubatch([(0, 5)] * 4, embd=True, xy=xy)
    slot = streams.find_slot(ub)
    assert slot is not None
    streams.apply(slot, ub)
    out = mask(streams, slot, ub, MaskRule())[0]
    assert (out[:, :4] == 0).tolist() == [[True] * (i + 1) + [False] * (3 - i) for i in range(4)]
    assert np.isneginf(out[:, 4:]).all()
    assert (mask(streams, slot, ub, MaskRule(causal=False))[0, :, :4] == 0).all()


def test_each_stream_has_rows_of_its_own() -> None:
    streams = CellStreams(4, n_seq_max=3, unified=False)
    ub = ubatch([(0, 0), (0, 1), (2, 0), (2, 1)], equal=True)
    slot = streams.find_slot(ub)
    assert slot is not None
    streams.apply(slot, ub)
    shown = mask(streams, slot, ub, MaskRule(), np.float16) == 0
    assert shown.shape == (2, 2, 4)
    assert shown.tolist() == [[[True, False, False, False], [True, True, False, False]]] * 2


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((1, 2, 5), np.float32),
        np.zeros((2, 1, 5), np.float32),
        np.zeros((1, 1, 6), np.float32),
        np.zeros((1, 1, 0), np.float32),
        np.zeros((1, 5), np.float32),
        np.zeros((1, 1, 5), np.float64),
        np.zeros((1, 1, 10), np.float32)[:, :, ::2],
    ],
)
def test_an_array_of_another_shape_or_type_is_refused(out: NDArray) -> None:
    with pytest.raises(TensorError, match="out"):
        fill_mask(out, example(), SLOT, run(0, 2, 3), MaskRule())


@st.composite
def scenes(draw: st.DrawFn) -> tuple[CellStreams, NaiveCells, UBatch]:
    """Draw cells in any state and tokens that need not be among them; positions are 2-D in half of the scenes."""
    n = draw(st.integers(1, 24))
    streams, naive = CellStreams(n), NaiveCells(n)
    cells = streams.cells[0]
    spots = st.tuples(st.integers(0, 12), st.integers(0, 2), st.integers(0, 2), st.sets(st.integers(0, 2)))
    for i in range(n):
        p, x, y, ids = draw(spots)
        if draw(st.booleans()):
            for target in (cells, naive):
                target.pos_set(i, p)
                for s in ids:
                    target.seq_add(i, s)
            cells.ext_set(i, x, y, -1)
            naive.ext_set(i, (x, y, -1))
    ids = st.sets(st.integers(0, 2), min_size=1)
    entries = draw(st.lists(st.tuples(ids, st.integers(0, 14)), min_size=1, max_size=8))
    xy = [draw(st.tuples(st.integers(0, 2), st.integers(0, 2))) for _ in entries]
    ub = ubatch([(tuple(sorted(s)), p) for s, p in entries], xy=xy if draw(st.booleans()) else None)
    return streams, naive, ub


@given(
    scene=scenes(),
    causal=st.booleans(),
    alibi=st.booleans(),
    mode=st.sampled_from(list(NonCausal)),
    window=st.sampled_from(list(SwaType)).flatmap(lambda t: st.builds(Window, st.integers(1, 8), st.just(t))),
    dtype=st.sampled_from([np.float16, np.float32]),
)
def test_every_rule_gives_what_the_element_by_element_loop_gives(
    *,
    scene: tuple[CellStreams, NaiveCells, UBatch],
    causal: bool,
    alibi: bool,
    mode: NonCausal,
    window: Window,
    dtype: type,
) -> None:
    streams, naive, ub = scene
    slot = SlotInfo(0, 0, (0,), np.zeros((1, ub.n_tokens), np.int64))
    out = mask(streams, slot, ub, MaskRule(causal, window, alibi, mode), dtype)[0]
    how = {"causal": causal, "non_causal": mode.value, "alibi": alibi}
    size = {"n_swa": window.n_swa, "kind": window.type.name}
    for i in range(ub.n_tokens):
        assert out[i].tolist() == [mask_value(naive, j, ub, i, **how, **size) for j in range(naive.n)]


def test_visible_positions_follow_the_same_rule() -> None:
    cells = example().cells[0]
    assert visible(cells, 0, 2, MaskRule()).tolist() == [0, 1, 2]
    assert visible(cells, 0, 1, MaskRule(), n_kv=1).tolist() == [0]
    assert visible(cells, 1, 2, MaskRule()).tolist() == [2]
    assert visible(cells, 7, 2, MaskRule()).tolist() == []
    whole = MaskRule(causal=False, window=Window(1, SwaType.STANDARD), non_causal=NonCausal.SWA_FULL)
    assert visible(cells, 0, 2, whole).tolist() == [2]
    assert visible(cells, 0, 2, whole, first=1).tolist() == [1, 2]


def test_filling_leaves_the_cells_alone() -> None:
    streams = example()
    before = streams.dump()
    mask(streams, SLOT, run(0, 2, 3), MaskRule(alibi=True))
    assert streams.dump() == before
    streams.check()
