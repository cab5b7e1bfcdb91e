"""The form of a batch: what is taken, what is copied, what is refused and in which words."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest

from pykv.batch import Batch
from pykv.errors import BatchError

NAN = float("nan")


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], np.uint8),
        [np.int64(1), 2, 3],
    ],
)
def test_any_sequence_of_integers_is_taken(tokens: object) -> None:
    batch = Batch(tokens)  # type: ignore[arg-type]
    assert batch.token is not None
    assert batch.token.tolist() == [1, 2, 3]
    assert batch.token.dtype == np.int32
    assert len(batch) == 3
    assert repr(batch) == "Batch(3 x token, 1 outputs)"


def test_the_last_token_of_sequence_0_is_the_only_output_by_default() -> None:
    batch = Batch([1, 2, 3])
    assert batch.output.tolist() == [False, False, True]
    assert batch.seq_id == 0
    assert batch.pos is None
    assert batch.embd is None


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ("last", [False, True]),
        ("all", [True, True]),
        ("none", [False, False]),
        ([True, False], [True, False]),
        (np.array([False, True]), [False, True]),
    ],
)
def test_outputs_are_chosen_by_word_or_mask(logits: object, expected: list[bool]) -> None:
    assert Batch([1, 2], logits=logits).output.tolist() == expected  # type: ignore[arg-type]


def test_changing_the_callers_arrays_does_not_change_the_batch() -> None:
    tokens, pos, ids = (np.arange(3, dtype=np.int32) for _ in range(3))
    mask, rows = np.zeros(3, np.bool_), np.zeros((3, 2), np.float32)
    batch = Batch(tokens, pos, ids, mask, embd=rows)
    for array in (tokens, pos, ids, mask, rows):
        array[:] = 1
    copies = (batch.token, batch.pos, batch.seq_id, batch.output, batch.embd)
    assert [np.max(copy) for copy in copies] == [2, 2, 2, False, 0.0]  # type: ignore[arg-type]
    assert not any(copy.flags.writeable for copy in copies)  # type: ignore[union-attr]
    assert tokens.flags.writeable


def test_shared_tokens_keep_the_order_in_which_their_sequences_are_listed() -> None:
    assert Batch([1, 2, 3], seq_id=[(2, 0), 1, [1, 1, 0]]).seq_id == ((2, 0), (1,), (1, 0))
    assert Batch([1], seq_id=[{3, 1}]).seq_id == ((1, 3),)


def test_one_sequence_a_token_is_the_same_however_it_is_written() -> None:
    for ids in ([0, 1], (0, 1), np.array([0, 1]), [(0,), (1,)], [0, {1}]):
        seq_id = Batch([1, 2], seq_id=ids).seq_id  # type: ignore[arg-type]
        assert isinstance(seq_id, np.ndarray)
        assert seq_id.tolist() == [0, 1]
    assert Batch([1, 2], seq_id=np.int64(3)).seq_id == 3  # type: ignore[arg-type]


def test_embedding_positions_may_be_flat_or_by_section() -> None:
    rows = np.zeros((2, 3))
    for pos in ([[1, 2], [3, 4]], [1, 2, 3, 4], np.array([[1, 2], [3, 4]], order="F")):
        batch = Batch(None, pos, embd=rows)  # type: ignore[arg-type]
        assert batch.pos is not None
        assert batch.pos.tolist() == [[1, 2], [3, 4]]
        assert batch.pos.flags.c_contiguous


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([1.0, 2.0], "integers"),
        ([1, NAN], "integers"),
        ([True, False], "bool"),
        ([1, True], "bool"),
        ([np.True_, 2], "bool"),
        (np.array([True]), "bool"),
        ([1, None], "integers"),
        (["1"], "integers"),
        ("abc", "integers"),
        ([2**31], "2147483648"),
        ([1, -(2**31) - 1], "-2147483649"),
        ([2**70], "int32"),
        (np.array([2**40]), str(2**40)),
        (np.array([2**64 - 1], np.uint64), str(2**64 - 1)),
        ([[1, 2]], r"shape \(n,\)"),
        (5, r"shape \(n,\)"),
        ([[1], [2, 3]], "rectangular"),
        (iter([1, 2]), "integers"),
        ({1, 2}, "integers"),
    ],
)
def test_tokens_that_are_no_int32_row_are_refused(tokens: object, words: str) -> None:
    with pytest.raises(BatchError, match=words) as caught:
        Batch(tokens)  # type: ignore[arg-type]
    assert "tokens" in str(caught.value)


@pytest.mark.parametrize("pos", [[0], [0, 1, 2], [[0, 1], [0, 1]], [0.0, 1.0], [False, True], 0, [0, 2**31], "01"])
def test_positions_of_another_form_are_refused(pos: object) -> None:
    with pytest.raises(BatchError, match="pos"):
        Batch([1, 2], pos)  # type: ignore[arg-type]


@pytest.mark.parametrize("pos", [[0], [0, 1, 2], [[0, 1, 2]], [[[0, 1]]], [], 0, [[True, False], [0, 1]]])
def test_embedding_positions_of_another_form_are_refused(pos: object) -> None:
    with pytest.raises(BatchError, match="pos"):
        Batch(None, pos, embd=np.zeros((2, 3)))  # type: ignore[arg-type]


@pytest.mark.parametrize("seq_id", [True, 1.0, None, "0", np.True_, {0, 1}])
def test_a_sequence_id_that_is_no_integer_is_refused(seq_id: object) -> None:
    with pytest.raises(BatchError, match="seq_id"):
        Batch([1, 2], seq_id=seq_id)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "seq_id",
    [
        "01",
        [0],
        [0, 1, 2],
        [0.0, 1.0],
        [True, 0],
        [0, None],
        [0, 2**31],
        np.zeros((2, 1), int),
        np.array([NAN, 0]),
        [(0, 1)],
        [(0, True), 0],
        [(0.5,), 0],
        [0, ("a",)],
        [(2**31,), 0],
    ],
)
def test_sequence_ids_of_another_form_are_refused(seq_id: object) -> None:
    with pytest.raises(BatchError, match="seq_id"):
        Batch([1, 2], seq_id=seq_id)  # type: ignore[arg-type]


@pytest.mark.parametrize("logits", ["first", "", [1, 0], [True], [[True, False]], True, None, np.array([1.0, 0.0])])
def test_output_masks_of_another_form_are_refused(logits: object) -> None:
    with pytest.raises(BatchError, match="logits"):
        Batch([1, 2], logits=logits)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "embd",
    [
        [[NAN]],
        [[float("inf")]],
        [[1e39]],
        [[True]],
        [1.0],
        1.0,
        [["a"]],
        [[1.0], [1.0, 2.0]],
        [[1j]],
        np.zeros((1, 1, 1)),
    ],
)
def test_embeddings_that_are_no_finite_matrix_are_refused(embd: object) -> None:
    with pytest.raises(BatchError, match="embd"):
        Batch(None, embd=embd)  # type: ignore[arg-type]


def test_a_batch_of_nothing_to_compute_is_refused() -> None:
    with pytest.raises(BatchError, match="neither"):
        Batch(None)
    with pytest.raises(BatchError, match="2 rows for 1 tokens"):
        Batch([1], embd=np.zeros((2, 3)))


def test_an_empty_batch_can_be_made() -> None:
    for batch in (Batch([]), Batch(np.array([])), Batch(None, embd=np.zeros((0, 4))), Batch([], [], [], [])):
        assert len(batch) == 0


@pytest.mark.parametrize("name", ["token", "embd", "pos", "seq_id", "output", "tokens"])
@pytest.mark.parametrize("value", [None, [5, 6], 0])
def test_a_batch_could_be_changed_behind_its_checks(name: str, value: object) -> None:
    batch = Batch([1, 2], seq_id=3)
    with pytest.raises(AttributeError, match=f"batch.{name} cannot be set to .*: a batch never changes"):
        setattr(batch, name, value)
    with pytest.raises(AttributeError, match=f"batch.{name} cannot be deleted"):
        delattr(batch, name)
    assert batch.token is not None
    assert (batch.token.tolist(), batch.seq_id, batch.output.tolist()) == ([1, 2], 3, [False, True])


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch))])
def test_a_copy_is_as_read_only_as_the_batch(twin: Callable[[Batch], Batch]) -> None:
    batch = twin(Batch([1, 2], pos=[4, 5], seq_id=[(0, 1), 1], embd=np.ones((2, 3))))
    arrays = (batch.token, batch.embd, batch.pos, batch.output)
    assert [a.tolist() for a in arrays if a is not None] == [[1, 2], [[1.0] * 3] * 2, [[4, 5]], [False, True]]
    assert not any(a.flags.writeable for a in arrays if a is not None)
    assert batch.seq_id == ((0, 1), (1,))
