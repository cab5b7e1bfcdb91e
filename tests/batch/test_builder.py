"""Batches built entry by entry: each operation works whole or changes nothing (batch.md 1.1 and 9)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pykv.batch import BatchBuilder, BatchLimits, ValidBatch, validate
from pykv.errors import BatchError

LIMITS = BatchLimits(n_tokens_max=4, n_vocab=100, n_seq_max=4, n_embd_inp=2, n_embd_inp_enc=3)
MROPE = BatchLimits(n_tokens_max=4, n_vocab=100, n_seq_max=4, n_pos_per_embd=4, n_embd_inp=2)


def checked(builder: BatchBuilder) -> ValidBatch:
    return validate(builder, builder.limits, None)


def test_entries_get_what_they_are_given() -> None:
    builder = BatchBuilder(LIMITS)
    assert builder.add_token(0, 7) == 0
    assert builder.add_token(1, 8) == 1
    assert builder.add(2) == 2
    builder.set_token(2, 9)
    builder.add_seq(0, 3)
    builder.add_seq(0, 3)
    builder.set_pos(2, 5)
    builder.set_output(1)
    builder.set_output(2)
    builder.set_output(2, False)
    valid = checked(builder)
    assert valid.token is not None
    assert valid.token.tolist() == [7, 8, 9]
    assert valid.pos.tolist() == [[0, 0, 5]]
    assert valid.seq_ids == ((0, 3), (1,), (2,))
    assert valid.output.tolist() == [False, True, False]
    assert len(builder) == 3
    assert len(builder.build()) == 3


def test_mrope_positions_are_laid_out_by_section() -> None:
    builder = BatchBuilder(MROPE)
    for pos in ((10, 5, 7, 0), (11, 6, 8, 0)):
        builder.set_pos(builder.add_embd(0, [1.0, 2.0]), pos)
    assert checked(builder).pos.reshape(-1).tolist() == [10, 11, 5, 6, 7, 8, 0, 0]


def test_a_token_takes_one_position_for_all_sections() -> None:
    builder = BatchBuilder(MROPE)
    builder.set_pos(builder.add_token(0, 1), 3)
    late = builder.add(0)
    builder.set_pos(late, (4, 1, 2, 0))
    builder.set_token(late, 2)
    assert checked(builder).pos.tolist() == [[3, 4]] * 4


def test_positions_start_at_zero() -> None:
    builder = BatchBuilder(MROPE)
    builder.set_embd(builder.add(0), [1.0, 2.0])
    assert checked(builder).pos.tolist() == [[0]] * 4


def test_rows_belong_to_their_entries_whatever_the_order_of_calls() -> None:
    builder = BatchBuilder(LIMITS)
    first, second = builder.add(0), builder.add(1)
    builder.set_embd(second, [3.0, 4.0])
    builder.set_embd(first, np.array([[1.0], [2.0]]))  # the same total in another shape
    valid = checked(builder)
    assert valid.embd is not None
    assert valid.embd.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_a_batch_for_the_encoder_has_the_encoders_width() -> None:
    builder = BatchBuilder(LIMITS)
    builder.add_embd(0, [1.0, 2.0, 3.0])
    builder.add_embd(1, [4.0, 5.0, 6.0])
    assert checked(builder).embd.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]  # type: ignore[union-attr]
    with pytest.raises(BatchError, match="3 numbers"):
        builder.add_embd(2, [1.0, 2.0])
    builder.clear()
    assert builder.add_embd(2, [1.0, 2.0]) == 0


def test_tokens_and_embeddings_are_kept_together() -> None:
    builder = BatchBuilder(LIMITS)
    builder.set_embd(builder.add_token(0, 7), [1.0, 2.0])
    builder.set_token(builder.add_embd(1, [3.0, 4.0]), 8)
    valid = checked(builder)
    assert valid.token is not None
    assert valid.embd is not None
    assert valid.token.tolist() == [7, 8]
    assert valid.embd.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_entries_of_different_kinds_are_refused() -> None:
    builder = BatchBuilder(LIMITS)
    builder.add_token(0, 1)
    builder.add_embd(1, [1.0, 2.0])
    with pytest.raises(BatchError, match="entry 0 has token, entry 1 has embedding"):
        checked(builder)
    builder.set_token(1, 2)
    with pytest.raises(BatchError, match="entry 1 has token and embedding"):
        checked(builder)
    builder.set_embd(0, [1.0, 2.0])
    assert checked(builder).n_tokens == 2


def test_entries_without_content_are_refused() -> None:
    builder = BatchBuilder(LIMITS)
    builder.add(0)
    with pytest.raises(BatchError, match="neither"):
        builder.build()


def test_an_empty_builder_is_refused_at_decode() -> None:
    with pytest.raises(BatchError, match="empty"):
        checked(BatchBuilder(LIMITS))


def test_a_full_batch_takes_no_more() -> None:
    builder = BatchBuilder(LIMITS)
    for _ in range(4):
        builder.add_token(0, 1)
    for add in (
        lambda: builder.add(0),
        lambda: builder.add_token(0, 1),
        lambda: builder.add_embd(0, [1.0, 2.0]),
    ):
        with pytest.raises(BatchError, match="n_tokens_max = 4"):
            add()
    assert len(builder) == 4


REFUSED: list[Callable[[BatchBuilder], object]] = [
    lambda b: b.add(4),
    lambda b: b.add(-1),
    lambda b: b.add(True),
    lambda b: b.add(1.0),  # type: ignore[arg-type]
    lambda b: b.add_token(4, 1),
    lambda b: b.add_token(0, 100),
    lambda b: b.add_token(0, -1),
    lambda b: b.add_token(0, 2**40),
    lambda b: b.add_token(0, None),  # type: ignore[arg-type]
    lambda b: b.add_embd(4, [1.0, 2.0]),
    lambda b: b.add_embd(0, [1.0]),
    lambda b: b.add_embd(0, [1.0, 2.0, 3.0]),
    lambda b: b.add_embd(0, []),
    lambda b: b.add_embd(0, np.zeros((0, 2))),
    lambda b: b.add_embd(0, None),  # type: ignore[arg-type]
    lambda b: b.add_embd(0, [float("nan"), 1.0]),
    lambda b: b.add_seq(0, 4),
    lambda b: b.add_seq(0, -1),
    lambda b: b.add_seq(2, 0),
    lambda b: b.add_seq(-1, 0),
    lambda b: b.set_token(0, 100),
    lambda b: b.set_token(0, -1),
    lambda b: b.set_token(2, 0),
    lambda b: b.set_output(2),
    lambda b: b.set_output(0, 1),  # type: ignore[arg-type]
    lambda b: b.set_pos(2, 0),
    lambda b: b.set_pos(0, -1),
    lambda b: b.set_pos(0, [0, 1]),
    lambda b: b.set_pos(0, []),
    lambda b: b.set_pos(0, 1.0),  # type: ignore[arg-type]
    lambda b: b.set_pos(0, True),
    lambda b: b.set_pos(0, 2**31),
    lambda b: b.set_pos(0, None),  # type: ignore[arg-type]
    lambda b: b.set_embd(0, [5.0, 6.0]),
    lambda b: b.set_embd(2, [5.0, 6.0]),
]


@pytest.mark.parametrize("refused", REFUSED)
def test_a_refused_operation_leaves_no_trace(refused: Callable[[BatchBuilder], object]) -> None:
    builder = BatchBuilder(LIMITS)
    for seq in (0, 1):
        builder.set_embd(builder.add_token(seq, 7), [1.0, 2.0])
    before = checked(builder)
    with pytest.raises(BatchError):
        refused(builder)
    after = checked(builder)
    assert len(builder) == 2
    for name in ("token", "embd", "pos", "output"):
        assert getattr(after, name).tolist() == getattr(before, name).tolist()
    assert after.seq_ids == before.seq_ids


def test_a_refused_first_row_does_not_fix_the_width() -> None:
    builder = BatchBuilder(LIMITS)
    with pytest.raises(BatchError, match="2 or 3 numbers"):
        builder.add_embd(0, [1.0])
    assert builder.add_embd(0, [1.0, 2.0, 3.0]) == 0


def test_an_entry_without_token_needs_all_sections() -> None:
    builder = BatchBuilder(MROPE)
    index = builder.add(0)
    with pytest.raises(BatchError, match="takes 4"):
        builder.set_pos(index, 1)
