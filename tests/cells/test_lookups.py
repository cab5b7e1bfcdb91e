"""Relative position buckets and previous tokens (kv_cache.md sections 11 and 12)."""

from __future__ import annotations

import numpy as np
import pytest
from support.naive_cells import naive_bucket
from support.ubatches import run, ubatch

from pykv.batch.ubatch import UBatch
from pykv.cells import (
    CellStreams,
    SlotInfo,
    encoder_position_buckets,
    position_buckets,
    previous_tokens,
    relative_bucket,
)
from pykv.errors import BatchError, ParamError


def stored(streams: CellStreams, ub: UBatch) -> SlotInfo:
    slot = streams.find_slot(ub)
    assert slot is not None
    streams.apply(slot, ub)
    return slot


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("n_buckets", [8, 32, 64])
def test_every_distance_falls_into_its_bucket(n_buckets: int, bidirectional: bool) -> None:
    p1 = 300
    got = relative_bucket(np.arange(-1, 601), p1, n_buckets, bidirectional=bidirectional)
    assert got.tolist() == [naive_bucket(p0, p1, n_buckets, bidirectional) for p0 in range(-1, 601)]


@pytest.mark.parametrize(
    ("distance", "bucket"), [(0, 0), (15, 15), (16, 16), (17, 16), (19, 17), (127, 31), (128, 31), (5000, 31), (-3, 0)]
)
def test_buckets_of_a_decoder(distance: int, bucket: int) -> None:
    """Worked out by hand for 32 buckets: 16 exact ones, then 16 + ln(r / 16) * 16 / ln(8)."""
    assert relative_bucket(6000 - distance, 6000, 32, bidirectional=False) == bucket


@pytest.mark.parametrize(
    ("distance", "bucket"), [(7, 7), (8, 8), (16, 10), (32, 12), (64, 14), (63, 13), (128, 15), (-1, 17), (-64, 30)]
)
def test_buckets_of_an_encoder(distance: int, bucket: int) -> None:
    """Worked out by hand for 32 buckets: 8 exact ones a side, then two for each doubling."""
    assert relative_bucket(1000 - distance, 1000, 32, bidirectional=True) == bucket


def test_empty_cells_lie_one_before_the_beginning() -> None:
    streams = CellStreams(4)
    ub = ubatch([(0, 0), (0, 1)])
    stored(streams, ub)
    buckets = position_buckets(streams, ub, 3, 32)
    assert buckets.dtype == np.int32
    assert buckets.tolist() == [[0, 0, 1], [1, 0, 2]]


def test_buckets_between_the_tokens_of_an_encoder() -> None:
    assert encoder_position_buckets(run(0, 0, 3), 32).tolist() == [[0, 17, 18], [1, 0, 17], [2, 1, 0]]


def test_buckets_need_one_stream_and_the_simple_split() -> None:
    with pytest.raises(ParamError, match="unified"):
        position_buckets(CellStreams(4, n_seq_max=2, unified=False), run(0, 0, 1), 4, 32)
    with pytest.raises(BatchError, match="simple"):
        position_buckets(CellStreams(4), ubatch([(0, 0)], equal=True), 4, 32)


def test_tokens_before_each_token_the_nearest_last() -> None:
    streams = CellStreams(8)
    stored(streams, ubatch([(0, 0), (0, 1), (0, 2)], tokens=[10, 11, 12]))
    ub = ubatch([(0, 3), (1, 0), (0, 4), (1, 1)], tokens=[13, 20, 14, 21])
    slot = stored(streams, ub)
    assert previous_tokens(streams, slot, ub, 2).tolist() == [[11, 12], [-1, -1], [12, 13], [-1, 20]]


def test_a_missing_position_falls_back_to_the_one_before() -> None:
    streams = CellStreams(8)
    stored(streams, ubatch([(0, 0), (0, 3)], tokens=[10, 13]))
    ub = ubatch([(0, 5)], tokens=[15])
    slot = stored(streams, ub)
    assert previous_tokens(streams, slot, ub, 5).tolist() == [[10, 10, 10, 13, 13]]


def test_embeddings_count_predecessors_by_order() -> None:
    streams = CellStreams(8)
    stored(streams, ubatch([(0, 0), (0, 1)], tokens=[10, 11]))
    ub = ubatch([(0, 2), (0, 2), (0, 2)], embd=True, xy=[(0, 0), (1, 0), (0, 1)])
    slot = streams.find_slot(ub)
    assert slot is not None
    streams.apply(slot, ub, embd_tok=99)
    assert previous_tokens(streams, slot, ub, 3).tolist() == [[-1, 10, 11], [10, 11, 99], [11, 99, 99]]


def test_previous_tokens_of_several_streams() -> None:
    streams = CellStreams(8, n_seq_max=2, unified=False)
    ub = ubatch([(0, 0), (0, 1), (1, 0), (1, 1)], tokens=[10, 11, 20, 21], equal=True)
    slot = stored(streams, ub)
    assert previous_tokens(streams, slot, ub, 1).tolist() == [[-1], [10], [-1], [20]]
