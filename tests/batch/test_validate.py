"""What a context refuses, in words and fields that name the culprit (batch.md 2 and 9)."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from support.batch_notation import LIMITS, Stored, written

from pykv.batch import Batch, BatchLimits, Splitter, ValidBatch, validate
from pykv.errors import BatchError, ParamError, PykvError

FOUR = BatchLimits(n_tokens_max=16, n_vocab=100, n_seq_max=4)
UP_TO_9 = Stored({0: (0, 9)})


def refusal(batch: Batch, limits: BatchLimits = LIMITS, memory: Stored | None = None) -> BatchError:
    with pytest.raises(BatchError) as caught:
        validate(batch, limits, memory)
    return caught.value


def fields(error: BatchError) -> tuple[int | None, int | None, int | None]:
    return error.seq_id, error.last, error.first


# what is filled in


def test_a_plain_batch_comes_out_whole() -> None:
    valid = validate(Batch([5, 6, 7]), FOUR, None)
    assert isinstance(valid, ValidBatch)
    assert valid.token is not None
    assert valid.token.tolist() == [5, 6, 7]
    assert valid.pos.tolist() == [[0, 1, 2]]
    assert valid.seq_ids == ((0,), (0,), (0,))
    assert valid.seq_first.tolist() == [0, 0, 0]
    assert valid.seq_id_unq == (0,)
    assert valid.output.tolist() == [False, False, True]
    assert (valid.n_tokens, valid.n_outputs, valid.has_coupled) == (3, 1, False)
    assert valid.pos.dtype == valid.seq_first.dtype == np.int32


def test_given_positions_are_kept() -> None:
    assert validate(Batch([1, 2], pos=[10, 11]), FOUR, UP_TO_9).pos.tolist() == [[10, 11]]


def test_each_sequence_continues_after_its_last_stored_position() -> None:
    memory = Stored({0: (0, 3), 2: (5, 7)})
    valid = validate(Batch([1] * 6, seq_id=[2, 0, 1, 2, 1, 0]), FOUR, memory)
    assert valid.pos.tolist() == [[8, 4, 0, 9, 1, 5]]
    assert validate(Batch([1, 1], seq_id=2), FOUR, memory).pos.tolist() == [[8, 9]]


def test_a_shared_token_without_position_continues_the_sequence_listed_first() -> None:
    # token 1 counts for sequence 1 alone, so token 2 of sequence 0 comes at the same position
    valid = validate(Batch([1, 1, 1], seq_id=[(1, 0), (1, 0), 1]), FOUR, None)
    assert valid.pos.tolist() == [[0, 1, 2]]
    assert valid.seq_ids == ((0, 1), (0, 1), (1,))
    assert valid.seq_first.tolist() == [0, 0, 1]
    error = refusal(Batch([1, 1, 1, 1], seq_id=[1, 1, (1, 0), 0]), FOUR)
    assert error.seq_id == 0  # at 2 with sequence 1, then back at 0 on its own


def test_positions_of_tokens_fill_all_sections() -> None:
    limits = replace(FOUR, n_pos_per_embd=4)
    assert validate(Batch([1, 2], pos=[3, 4]), limits, None).pos.tolist() == [[3, 4]] * 4
    assert validate(Batch([1, 2]), limits, None).pos.tolist() == [[0, 1]] * 4


def test_positions_filled_in_for_embeddings_are_sequential_only() -> None:
    limits = replace(FOUR, n_pos_per_embd=4, n_embd_inp=2)
    valid = validate(Batch(None, embd=np.zeros((2, 2))), limits, UP_TO_9)
    assert valid.pos.tolist() == [[10, 11], [0, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize("pos", [[10, 11, 5, 6, 7, 8, 0, 0], [[10, 11], [5, 6], [7, 8], [0, 0]]])
def test_positions_of_embeddings_are_section_major(pos: list) -> None:
    limits = replace(FOUR, n_pos_per_embd=4, n_embd_inp=2)
    valid = validate(Batch(None, pos, embd=np.zeros((2, 2))), limits, None)
    assert valid.pos.reshape(-1).tolist() == [10, 11, 5, 6, 7, 8, 0, 0]
    assert valid.token is None


def test_embeddings_with_too_few_sections_are_refused() -> None:
    limits = replace(FOUR, n_pos_per_embd=4, n_embd_inp=2)
    assert "section" in str(refusal(Batch(None, [0, 1], embd=np.zeros((2, 2))), limits))
    plain = replace(FOUR, n_embd_inp=2)
    assert "section" in str(refusal(Batch(None, [[0, 1], [0, 1]], embd=np.zeros((2, 2))), plain))


def test_tokens_and_embeddings_are_kept_together() -> None:
    limits = replace(FOUR, n_pos_per_embd=4, n_embd_inp=2)
    valid = validate(Batch([1, 2], [4, 5], embd=[[0.0, 1.0], [2.0, 3.0]]), limits, None)
    assert valid.token is not None
    assert valid.embd is not None
    assert valid.token.tolist() == [1, 2]
    assert valid.embd.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert valid.pos.tolist() == [[4, 5]] * 4


def test_output_all_marks_every_token_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    batch = Batch([1, 2, 3])
    with caplog.at_level(logging.WARNING, "pykv"):
        assert validate(batch, FOUR, None, output_all=True).output.tolist() == [True] * 3
        assert "2 were not marked" in caplog.text
        caplog.clear()
        assert validate(Batch([1, 2], logits="all"), FOUR, None, output_all=True).n_outputs == 2
        assert not caplog.text
    assert batch.output.tolist() == [False, False, True]


# sizes and ids


def test_an_empty_batch_is_refused_at_decode() -> None:
    assert "empty" in str(refusal(Batch([])))


def test_more_tokens_than_n_batch_are_refused() -> None:
    assert validate(Batch([1] * 16), FOUR, None).n_tokens == 16
    assert "17" in str(refusal(Batch([1] * 17), FOUR))


def test_n_seq_max_beyond_256_is_refused() -> None:
    assert validate(Batch([1], seq_id=255), replace(FOUR, n_seq_max=256), None).seq_id_unq == (255,)
    with pytest.raises(ParamError, match=r"n_seq_max=257 must be a whole number in 1\.\.256"):
        replace(FOUR, n_seq_max=257)


@pytest.mark.parametrize("token", [100, -1, 2**31 - 1, -(2**31)])
def test_token_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    for tokens in ([token], [1, token, 2]):
        error = refusal(Batch(tokens), FOUR)
        assert str(token) in str(error)
        assert f"index {tokens.index(token)}" in str(error)


@pytest.mark.parametrize("seq", [4, -1, 2**40])
def test_sequence_ids_outside_n_seq_max_are_refused_before_anything_is_indexed(seq: int) -> None:
    assert refusal(Batch([1], seq_id=seq), FOUR, UP_TO_9).seq_id == seq
    if abs(seq) < 2**31:
        assert refusal(Batch([1, 1, 1], seq_id=[0, seq, 1]), FOUR, UP_TO_9).seq_id == seq
    assert refusal(Batch([1, 1], seq_id=[0, (0, seq)]), FOUR, UP_TO_9).seq_id == seq


def test_a_token_of_no_sequence_is_refused() -> None:
    assert "token 1" in str(refusal(Batch([1, 1], seq_id=[(0,), ()]), FOUR))


def test_embeddings_of_another_width_are_refused() -> None:
    limits = replace(FOUR, n_embd_inp=4, n_embd_inp_enc=6)
    for width in (4, 6):
        assert validate(Batch(None, embd=np.zeros((2, width))), limits, None).embd.shape == (2, width)  # type: ignore[union-attr]
    assert "4 or 6" in str(refusal(Batch(None, embd=np.zeros((2, 5))), limits))
    assert "no embeddings" in str(refusal(Batch(None, embd=np.zeros((2, 4))), FOUR))
    assert "0 wide" in str(refusal(Batch(None, embd=np.zeros((2, 0))), limits))


# positions


def test_negative_positions_are_refused() -> None:
    assert "-1" in str(refusal(Batch([1, 2], pos=[-1, 0])))
    limits = replace(FOUR, n_pos_per_embd=4, n_embd_inp=1)
    assert "-5" in str(refusal(Batch(None, [[0], [-5], [0], [0]], embd=[[1.0]]), limits))


def test_positions_at_the_end_of_int32_do_not_wrap() -> None:
    top = 2**31 - 2
    assert validate(Batch([1], pos=[top]), FOUR, None).pos.tolist() == [[top]]
    assert "2147483647" in str(refusal(Batch([1], pos=[top + 1])))
    assert validate(Batch([1]), FOUR, Stored({0: (0, top - 1)})).pos.tolist() == [[top]]
    assert fields(refusal(Batch([1, 2]), FOUR, Stored({0: (0, top - 1)}))) == (0, top - 1, top)
    assert refusal(Batch([1, 2], [0, top])).seq_id == 0


@pytest.mark.parametrize(("start", "fine"), [(10, True), (11, False), (9, False)])
def test_a_sequence_goes_on_right_after_its_last_stored_position(start: int, fine: bool) -> None:
    batch = Batch([1, 2], pos=[start, start + 1])
    if fine:
        assert validate(batch, FOUR, UP_TO_9).pos.tolist() == [[start, start + 1]]
    else:
        error = refusal(batch, FOUR, UP_TO_9)
        assert fields(error) == (0, 9, start)
        assert all(word in str(error) for word in ("sequence 0", "9", str(start), "needs 10"))


def test_an_empty_sequence_may_start_anywhere() -> None:
    assert validate(Batch([1, 2], pos=[50, 51]), FOUR, Stored()).pos.tolist() == [[50, 51]]


def test_gaps_are_refused_and_repeats_are_fine() -> None:
    assert "needs 2" in str(refusal(written("0@0 0@1 0@3")))
    assert validate(written("0@0 0@0 0@1"), LIMITS, None).pos.tolist() == [[0, 0, 1]]
    assert fields(refusal(written("0@10 0@12"), LIMITS, UP_TO_9)) == (0, 9, 10)


def test_a_sequence_that_runs_backwards_is_refused() -> None:
    error = refusal(written("0@4 0@5 1@0 0@6 1@2 0@3"))
    assert error.seq_id == 1  # its gap 0, 2 is found before the order is looked at
    error = refusal(written("0@4 0@5 1@0 0@6 1@1 0@3"))
    assert error.seq_id == 0
    assert "token 5 at position 3 follows position 6" in str(error)


def test_several_positions_go_backwards_and_the_first_in_the_batch_is_named() -> None:
    assert refusal(written("1@1 0@1 1@0 0@0")).seq_id == 1
    assert refusal(written("{0,1}@1 2@4 2@3 {0,1}@0")).seq_id == 2


MROPE = replace(LIMITS, n_pos_per_embd=4, n_embd_inp=1)


@pytest.mark.parametrize(("start", "fine"), [(15, True), (9, True), (8, False)])
def test_mrope_embeddings_may_share_the_last_stored_position(start: int, fine: bool) -> None:
    batch = Batch(None, [[start], [0], [0], [0]], embd=[[1.0]])
    if fine:
        assert validate(batch, MROPE, UP_TO_9).pos[0].tolist() == [start]
    else:
        assert fields(refusal(batch, MROPE, UP_TO_9)) == (0, 9, 8)


@pytest.mark.parametrize(("start", "fine"), [(15, True), (10, True), (9, False)])
@pytest.mark.parametrize("embd", [None, [[1.0]]])
def test_mrope_tokens_come_after_the_last_stored_position(start: int, fine: bool, embd: object) -> None:
    batch = Batch([1], [start], embd=embd)  # type: ignore[arg-type]
    if fine:
        assert validate(batch, MROPE, UP_TO_9).pos.tolist() == [[start]] * 4
    else:
        assert fields(refusal(batch, MROPE, UP_TO_9)) == (0, 9, 9)


def test_mrope_allows_gaps_but_not_going_back() -> None:
    assert validate(written("0@0 0@5 0@5 0@7"), MROPE, None).pos[0].tolist() == [0, 5, 5, 7]
    assert "decrease" in str(refusal(written("0@0 0@5 0@4"), MROPE))


def test_coupled_sequences_that_store_different_ranges_are_refused() -> None:
    batch = written("{0,1}@10")
    assert validate(batch, LIMITS, Stored({0: (0, 9), 1: (0, 9)})).has_coupled
    error = refusal(batch, LIMITS, Stored({0: (0, 9), 1: (2, 9)}))
    assert error.seq_id == 1
    assert "diverged" in str(error)
    assert validate(written("{0,1}@0"), LIMITS, Stored()).has_coupled
    assert validate(written("{0,1}@5"), LIMITS, None).has_coupled


def test_coupled_sequences_each_keep_their_order() -> None:
    assert validate(written("{0,1}@0 0@1 1@1 {0,1}@2"), LIMITS, None).pos.tolist() == [[0, 1, 1, 2]]
    assert refusal(written("{0,1}@0 0@1 {0,1}@2")).seq_id == 1  # a gap for sequence 1 alone


# case A14


def test_one_sequence_with_a_gap_is_named_and_the_others_go_on_without_it() -> None:
    limits = BatchLimits(16, 100, 3)
    memory = Stored({0: (0, 3), 1: (0, 5), 2: (0, 2)})
    before = dict(memory.ranges)
    error = refusal(Batch([1, 2, 3], pos=[4, 6, 5], seq_id=[0, 1, 2]), limits, memory)
    assert isinstance(error, PykvError)
    assert isinstance(error, ValueError)
    assert fields(error) == (2, 2, 5)
    assert all(word in str(error) for word in ("sequence 2", " 2,", "5", "needs 3"))
    assert memory.ranges == before

    valid = validate(Batch([1, 2], pos=[4, 6], seq_id=[0, 1]), limits, memory)
    assert valid.pos.tolist() == [[4, 6]]
    ubatch = Splitter(valid).simple(8)
    assert ubatch is not None
    assert ubatch.seq_ids == ((0,), (1,))


@pytest.mark.parametrize(
    ("pos", "last", "first"),
    [([4, 6], 3, 4), ([3], 3, 3), ([6, 5], 3, 5), ([5, 4], 3, 4)],
    ids=["a hole inside the batch", "going back", "late and decreasing", "decreasing"],
)
def test_holes_and_steps_back_are_refused(pos: list[int], last: int, first: int) -> None:
    batch = Batch([1] * len(pos), pos)
    assert fields(refusal(batch, FOUR, Stored({0: (0, 3)}))) == (0, last, first)
