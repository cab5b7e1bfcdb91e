"""The worked examples of the specification (batch.md 8), and what a ubatch holds."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from support.batch_notation import LIMITS, splitter, written

from pykv.batch import Batch, BatchLimits, Splitter, UBatch, reserve_ubatch, validate
from pykv.errors import ParamError


def all_of(cut) -> list[UBatch]:
    ubatches = []
    while (ubatch := cut()) is not None:
        ubatches.append(ubatch)
    return ubatches


def indices(ubatches: list[UBatch]) -> list[list[int]]:
    return [ubatch.batch_idxs.tolist() for ubatch in ubatches]


# simple


def test_simple_s1_cuts_a_prompt_into_pieces() -> None:
    split = splitter("0@0 0@1 0@2 0@3 0@4!")
    ubatches = all_of(lambda: split.simple(2))
    assert indices(ubatches) == [[0, 1], [2, 3], [4]]
    assert split.out_ids == [4]
    assert split.n_used == 5
    assert [(u.n_tokens, u.n_seqs, u.n_seq_tokens, u.equal_seqs) for u in ubatches] == [
        (2, 2, 1, False),
        (2, 2, 1, False),
        (1, 1, 1, False),
    ]


def test_simple_s2_names_only_the_sequences_of_each_piece() -> None:
    split = splitter("0@0 1@0 0@1! 1@1!")
    ubatches = all_of(lambda: split.simple(3))
    assert indices(ubatches) == [[0, 1, 2], [3]]
    assert [u.seq_id_unq for u in ubatches] == [(0, 1), (1,)]
    assert split.out_ids == [2, 3]


def test_simple_s3_takes_coupled_tokens_as_they_come() -> None:
    split = splitter("{0,1}@0 {0,1}@1 0@2! 1@2!")
    ubatches = all_of(lambda: split.simple(3))
    assert indices(ubatches) == [[0, 1, 2], [3]]
    assert (ubatches[0].n_seqs, ubatches[0].n_seqs_unq) == (3, 2)
    assert ubatches[0].seq_ids == ((0, 1), (0, 1), (0,))
    assert ubatches[0].seq_first.tolist() == [0, 0, 0]
    assert ubatches[1].seq_id_unq == (1,)
    assert split.out_ids == [2, 3]


def test_simple_s4_returns_none_when_nothing_is_left() -> None:
    split = splitter("0@0 0@1 0@2")
    assert indices(all_of(lambda: split.simple(10))) == [[0, 1, 2]]
    assert split.simple(10) is None


# equal: (name, batch, (m, sequential), [(indices, n_seqs, n_seq_tokens, ids)], out_ids)

EQUAL = [
    (
        "E1",
        "0@0 0@1 0@2 0@3! 1@0 1@1!",
        (8, False),
        [([0, 1, 4, 5], 2, 2, (0, 1)), ([2, 3], 1, 2, (0,))],
        [5, 3],
    ),
    (
        "E2",
        "0@0 0@1! 2@0 2@1! 3@0 3@1!",
        (8, True),
        [([0, 1], 1, 2, (0,)), ([2, 3, 4, 5], 2, 2, (2, 3))],
        [1, 3, 5],
    ),
    ("E2'", "0@0 0@1! 2@0 2@1! 3@0 3@1!", (8, False), [([0, 1, 2, 3, 4, 5], 3, 2, (0, 2, 3))], [1, 3, 5]),
    (
        "E3",
        "0@0 1@0 2@0 0@1 1@1 2@1 0@2! 1@2! 2@2!",
        (4, True),
        [([0, 1, 2], 3, 1, (0, 1, 2)), ([3, 4, 5], 3, 1, (0, 1, 2)), ([6, 7, 8], 3, 1, (0, 1, 2))],
        [6, 7, 8],
    ),
    (
        "E4",
        "{0,1}@0 {0,1}@1 0@2! 1@2! 2@0 2@1!",
        (4, False),
        [([0, 1, 4, 5], 2, 2, (0, 1, 2)), ([2, 3], 2, 1, (0, 1))],
        [5, 2, 3],
    ),
    ("E5", "1@0 1@1! 0@0 0@1!", (8, True), [([0, 1], 1, 2, (1,)), ([2, 3], 1, 2, (0,))], [1, 3]),
    (
        "E6 stops at m sets",
        "0@0! 1@0! 2@0! 3@0!",
        (2, False),
        [([0, 1], 2, 1, (0, 1)), ([2, 3], 2, 1, (2, 3))],
        [0, 1, 2, 3],
    ),
]


@pytest.mark.parametrize(("text", "args", "expected", "out_ids"), [row[1:] for row in EQUAL], ids=[r[0] for r in EQUAL])
def test_equal(text: str, args: tuple[int, bool], expected: list, out_ids: list[int]) -> None:
    split = splitter(text)
    ubatches = all_of(lambda: split.equal(args[0], sequential=args[1]))
    assert [(u.batch_idxs.tolist(), u.n_seqs, u.n_seq_tokens, u.seq_id_unq) for u in ubatches] == expected
    assert all(u.equal_seqs for u in ubatches)
    assert split.out_ids == out_ids
    assert split.n_used == split.valid.n_tokens


def test_equal_e4_sequential_refuses_coupled_sequences(caplog: pytest.LogCaptureFixture) -> None:
    split = splitter("{0,1}@0 {0,1}@1 0@2! 1@2! 2@0 2@1!")
    with caplog.at_level(logging.ERROR, "pykv"):
        assert split.equal(4, sequential=True) is None
    assert split.n_used == 0
    assert "coupled" in caplog.text


def test_sequential_accepts_a_sequence_that_comes_again_after_its_predecessor() -> None:
    # seq 2 is passed over first, then seen again behind seq 1; it still starts with its first unused token
    split = splitter("0@0 2@0 1@0 2@1")
    ubatches = all_of(lambda: split.equal(8, sequential=True))
    assert indices(ubatches) == [[0, 2, 1], [3]]


TAILS = [
    ("K1", (3, 3), (4, False, 2), [[0, 1, 2], [3, 4, 5]]),
    ("K2", (5,), (4, False, 2), [[0, 1, 2], [3, 4]]),
    ("K3", (2, 3), (4, True, 2), [[0, 1], [2, 3, 4]]),
    (
        "K4",
        (10, 10),
        (8, True, 4),
        [[0, 1, 2, 3, 10, 11, 12, 13], [4, 5, 6, 7, 8, 9], [14, 15, 16, 17, 18, 19]],
    ),
    ("K5", (6,), (4, False, 2), [[0, 1, 2, 3], [4, 5]]),
]


@pytest.mark.parametrize(("lengths", "args", "expected"), [row[1:] for row in TAILS], ids=[row[0] for row in TAILS])
def test_equal_keeps_tails(lengths: tuple[int, ...], args: tuple[int, bool, int], expected: list[list[int]]) -> None:
    split = splitter(" ".join(f"{seq}@{pos}" for seq, n in enumerate(lengths) for pos in range(n)))
    m, sequential, keep_tail = args
    ubatches = all_of(lambda: split.equal(m, sequential=sequential, keep_tail=keep_tail))
    assert indices(ubatches) == expected


SEQ = [
    ("Q1", "0@0 0@1! 1@0 1@1! 0@2 0@3!", 8, [[0, 1, 4, 5], [2, 3]], [1, 5, 3]),
    ("Q2", "{0,1}@0 0@1 0@2! 1@1 1@2!", 8, [[0, 1, 2], [3, 4]], [2, 4]),
    ("Q3", "0@0 0@1 0@2! 1@0 1@1 1@2!", 2, [[0, 1], [2], [3, 4], [5]], [2, 5]),
    ("Q4", "{0,1,2}@0 {0,1}@1 2@1 0@2 1@2", 8, [[0, 1, 3], [2], [4]], []),
]


@pytest.mark.parametrize(("text", "m", "expected", "out_ids"), [row[1:] for row in SEQ], ids=[row[0] for row in SEQ])
def test_seq(text: str, m: int, expected: list[list[int]], out_ids: list[int]) -> None:
    split = splitter(text)
    ubatches = all_of(lambda: split.seq(m))
    assert indices(ubatches) == expected
    assert split.out_ids == out_ids
    assert all((u.n_seqs, u.n_seq_tokens, u.equal_seqs) == (1, u.n_tokens, True) for u in ubatches)


def test_seq_keeps_to_one_set_if_told() -> None:
    split = splitter("{0,1}@0 0@1 0@2! 1@1 1@2!")
    assert indices(all_of(lambda: split.seq(8, narrow=False))) == [[0], [1, 2], [3, 4]]
    assert split.out_ids == [2, 4]


def test_seq_names_every_sequence_of_its_tokens() -> None:
    ubatch = splitter("{0,1,2}@0 {0,1}@1 2@1 0@2 1@2").seq(8)
    assert ubatch is not None
    assert ubatch.seq_id_unq == (0, 1, 2)
    assert ubatch.seq_ids == ((0, 1, 2), (0, 1), (0,))


# content


def test_a_ubatch_carries_the_tokens_it_names() -> None:
    ubatch = splitter("0@0 0@1 0@2 0@3! 1@0 1@1!").equal(8, sequential=False)
    assert ubatch is not None
    assert ubatch.token is not None
    assert ubatch.embd is None
    assert ubatch.token.tolist() == [100, 101, 104, 105]
    assert ubatch.pos.tolist() == [[0, 1, 0, 1]]
    assert ubatch.seq_ids == ((0,), (0,), (1,), (1,))
    assert ubatch.seq_first.tolist() == [0, 0, 1, 1]
    assert ubatch.output.tolist() == [False, False, False, True]
    assert ubatch.token.dtype == ubatch.pos.dtype == ubatch.batch_idxs.dtype == np.int32


@pytest.mark.parametrize("cut", ["simple", "equal", "seq"])
def test_embeddings_and_all_position_sections_go_along(cut: str) -> None:
    limits = BatchLimits(64, 0, 8, n_pos_per_embd=4, n_embd_inp=2)
    pos = np.arange(16).reshape(4, 4) + np.array([[0], [40], [80], [120]])
    batch = Batch(None, pos, [0, 1, 0, 1], embd=np.arange(8.0).reshape(4, 2))
    split = Splitter(validate(batch, limits, None))
    ubatch = split.equal(4, sequential=False) if cut == "equal" else getattr(split, cut)(4)
    order = {"simple": [0, 1, 2, 3], "equal": [0, 2, 1, 3], "seq": [0, 2]}[cut]
    assert ubatch.token is None
    assert ubatch.embd.tolist() == [[2.0 * i, 2.0 * i + 1] for i in order]
    assert ubatch.pos.tolist() == [[int(pos[j, i]) for i in order] for j in range(4)]
    assert ubatch.pos.flags.c_contiguous
    assert ubatch.is_pos_2d


def test_pieces_of_sections_are_contiguous() -> None:
    batch = Batch([1, 2, 3, 4], [0, 1, 2, 3])
    split = Splitter(validate(batch, BatchLimits(8, 10, 1, n_pos_per_embd=4), None))
    ubatch = split.simple(3)
    assert ubatch is not None
    assert ubatch.pos.tolist() == [[0, 1, 2]] * 4
    assert ubatch.pos.flags.c_contiguous


def test_reset_lets_the_batch_be_split_again_in_another_way() -> None:
    split = splitter("0@0 0@1! 1@0 1@1!")
    first = split.simple(3)
    assert first is not None
    split.reset()
    assert (split.n_used, split.out_ids) == (0, [])
    assert indices(all_of(lambda: split.equal(2, sequential=False))) == [[0, 2], [1, 3]]
    assert split.out_ids == [1, 3]
    split.reset()
    assert indices(all_of(lambda: split.simple(8))) == [[0, 1, 2, 3]]


def test_a_simple_cut_after_another_kind_takes_nothing_twice() -> None:
    split = splitter("0@0 1@0 0@1 1@1 0@2")
    assert indices([split.seq(2)]) == [[0, 2]]  # type: ignore[list-item]
    assert indices(all_of(lambda: split.simple(2))) == [[1, 3], [4]]


def test_splits_do_not_change_the_batch() -> None:
    split = splitter("0@0 1@0 0@1 1@1")
    ubatch = split.simple(2)
    assert ubatch is not None
    with pytest.raises(ValueError, match="read-only"):
        ubatch.pos[0, 0] = 9
    assert written("0@0 1@0").pos.tolist() == [[0, 0]]  # type: ignore[union-attr]


@pytest.mark.parametrize("m", [0, -1])
def test_a_ubatch_of_no_tokens_is_refused(m: int) -> None:
    split = splitter("0@0 0@1")
    for cut in (lambda: split.simple(m), lambda: split.seq(m), lambda: split.equal(m, sequential=False)):
        with pytest.raises(ParamError, match="m, the most tokens"):
            cut()
    assert split.n_used == 0


@pytest.mark.parametrize("keep_tail", [4, 5, -1])
def test_a_tail_as_long_as_the_ubatch_is_refused(keep_tail: int) -> None:
    split = splitter("0@0 0@1")
    with pytest.raises(ParamError, match="keep_tail"):
        split.equal(4, sequential=False, keep_tail=keep_tail)
    assert split.n_used == 0


def test_a_single_token_goes_through() -> None:
    split = Splitter(validate(Batch([7]), LIMITS, None))
    ubatch = split.simple(512)
    assert ubatch is not None
    assert ubatch.token is not None
    assert (ubatch.token.tolist(), ubatch.pos.tolist(), ubatch.seq_ids) == ([7], [[0]], ((0,),))
    assert split.out_ids == [0]
    assert split.simple(512) is None


# reserve


def test_reserve_ubatch_has_the_shape_and_no_content() -> None:
    ubatch = reserve_ubatch(4, 3, n_pos=4)
    assert (ubatch.n_tokens, ubatch.n_seq_tokens, ubatch.n_seqs, ubatch.n_seqs_unq) == (12, 4, 3, 3)
    assert ubatch.token is not None
    assert ubatch.token.tolist() == [0] * 12
    assert ubatch.embd is None
    assert ubatch.pos.tolist() == [[0] * 12] * 4
    assert ubatch.equal_seqs
    assert ubatch.seq_id_unq == (0, 1, 2)
    assert [len(ids) for ids in ubatch.seq_ids] == [0] * 12
    assert ubatch.seq_first.tolist() == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize("args", [(0, 1), (1, 0), (1, 1, 0)])
def test_reserve_ubatch_of_nothing_is_refused(args: tuple[int, ...]) -> None:
    with pytest.raises(ParamError, match="at least 1"):
        reserve_ubatch(*args)
