"""Verbs of the memory between decodes, and decodes that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiny_gguf import TinyModel
from support.twin import EXACT, TOKENS, Twin, snapshot

import pykv
from pykv.errors import BatchError, NoSlotError, ParamError, SequenceError, ShiftUnsupported

TINY = TinyModel(seed=81)


@pytest.fixture(scope="module")
def model(write_tiny: Callable[[TinyModel], Path]) -> Iterator[pykv.Model]:
    with pykv.Model.load(write_tiny(TINY)) as loaded:
        yield loaded


def open_twin(model: pykv.Model, **params) -> Twin:
    return Twin(model.context(**(EXACT | {"n_ctx": 256} | params)), TINY)


# verbs


def test_trim_and_go_on(model: pykv.Model) -> None:
    twin = open_twin(model)
    with twin.context:
        twin.decode(30)
        twin.edit("seq_rm", 0, 20, -1)
        twin.decode(15)
        twin.edit("seq_rm", 0, 34, -1)
        twin.decode(1)
        twin.edit("seq_rm", 0, -1, -1)
        twin.decode(5)
        assert twin.context.memory.cells().n_used == 5


def test_a_hole_in_the_middle_stays_a_hole(model: pykv.Model) -> None:
    """The positions behind it do not move; queries see what is left."""
    twin = open_twin(model)
    with twin.context:
        twin.decode(30)
        twin.edit("seq_rm", 0, 5, 12)
        twin.decode(3)


def test_fork_and_continue(model: pykv.Model) -> None:
    twin = open_twin(model, n_seq_max=4)
    with twin.context:
        twin.decode(20)
        twin.edit("seq_cp", 0, 1)
        twin.edit("seq_cp", 0, 2, 0, 12)  # a part
        twin.edit("seq_cp", 1, 1)
        assert twin.context.memory.cells().n_used == 20
        twin.decode(4, seq_id=1)
        twin.decode(4, seq_id=2)
        twin.decode(4, seq_id=0)
        twin.edit("seq_rm", 0, 3, -1)
        for s in (0, 1, 2):
            twin.decode(1, seq_id=s)
        twin.edit("seq_keep", 1)
        twin.decode(2, seq_id=1)
        assert [twin.context.memory.pos_max(s) for s in range(4)] == [-1, 26, -1, -1]


@pytest.mark.parametrize("unified", [True, False])
def test_removal_everywhere_and_keep(model: pykv.Model, unified: bool) -> None:
    """In streams of their own, the sequences that are not kept live elsewhere and stay."""
    twin = open_twin(model, n_ctx=768, n_seq_max=3, kv_unified=unified)
    with twin.context:
        twin.decode(30, seq_id=[0, 1, 2] * 10)
        twin.edit("seq_rm", -1, 6, -1)
        assert [twin.context.memory.pos_max(s) for s in range(3)] == [5, 5, 5]
        twin.decode(3, seq_id=[0, 1, 2])
        twin.context.memory.seq_keep(1)
        assert [twin.context.memory.pos_max(s) for s in range(3)] == ([-1, 6, -1] if unified else [6, 6, 6])
        if unified:
            twin.naive.seq_keep(1)
        twin.decode(2, seq_id=1)


def test_clear_forgets_everything(model: pykv.Model) -> None:
    twin = open_twin(model, n_seq_max=2)
    with twin.context:
        twin.decode(20, seq_id=[0, 1] * 10)
        twin.edit("clear")
        state, data = snapshot(twin.context)
        assert state["n_used"] == [0]
        assert not any(map(any, data))
        twin.decode(6, seq_id=[1, 0] * 3)


def test_a_sequence_that_ends_frees_room_for_another(model: pykv.Model) -> None:
    """The cache is full of holes, and each is used."""
    twin = open_twin(model, n_seq_max=3, n_batch=256)
    with twin.context:
        twin.decode(240, seq_id=[0, 1] * 120)
        twin.edit("seq_rm", 0, -1, -1)
        twin.decode(130, seq_id=2)
        assert twin.context.memory.cells().n_used == 250
        twin.decode(3, seq_id=1)


# moved and copied


def test_context_shift_and_go_on(model: pykv.Model) -> None:
    """Case A04: keep 4, drop 4, slide; the naive pass rotates every key anew."""
    twin = open_twin(model)
    with twin.context:
        twin.decode(20)
        twin.edit("seq_rm", 0, 4, 8)
        twin.edit("seq_add", 0, 8, -1, -4)
        twin.decode(1)
        twin.edit("seq_add", 0, 10, -1, 30)
        twin.edit("seq_add", 0, 0, 4, 2)
        twin.decode(9)
        twin.edit("seq_div", 0, 0, -1, 3)
        twin.decode(5)
        assert twin.context.memory.pos_max(0) == 23


def test_a_copied_stream_and_a_part_of_one(model: pykv.Model) -> None:
    twin = open_twin(model, n_ctx=768, n_seq_max=3, kv_unified=False)
    with twin.context:
        twin.decode(20)
        twin.edit("seq_add", 0, 10, -1, 7)  # still pending when the rows are copied
        twin.edit("seq_cp", 0, 1)
        twin.edit("seq_cp", 0, 2, 0, 12)
        twin.decode(3, seq_id=[1, 2, 0])
        twin.edit("seq_rm", 1, 15, -1)
        twin.edit("seq_cp", 0, 1, 15, -1)
        twin.decode(6, seq_id=[0, 1, 2] * 2)
        assert [twin.context.memory.pos_max(s) for s in range(3)] == [29, 29, 12]


def test_a_fork_that_slides_leaves_the_others_where_they_are(model: pykv.Model) -> None:
    """The reference moves every owner of a shared cell."""
    twin = open_twin(model, n_seq_max=3)
    with twin.context:
        tokens = twin.take(20)
        twin.decode(tokens)
        twin.context.memory.seq_cp(0, 1)
        twin.context.memory.seq_rm(1, 4, 8)
        twin.context.memory.seq_add(1, 8, -1, -4)
        # in numpy: the fork's own copies
        twin.naive.decode(tokens, list(range(20)), 1)
        twin.naive.seq_rm(1, 4, 8)
        twin.naive.seq_add(1, 8, -1, -4)
        twin.decode(4, seq_id=[1, 0, 1, 0])
        assert [twin.context.memory.pos_max(s) for s in range(2)] == [21, 17]
        assert twin.context.memory.cells().n_used == 20 + 12 + 4


def test_a_fork_that_slides_without_room_is_refused_and_all_goes_on(model: pykv.Model) -> None:
    twin = open_twin(model, n_seq_max=2, n_batch=256)
    with twin.context:
        twin.decode(200)
        twin.edit("seq_cp", 0, 1)
        before = snapshot(twin.context)
        with pytest.raises(ShiftUnsupported, match="shares 200 cells") as caught:
            twin.context.memory.seq_add(1, 0, -1, 1)
        assert caught.value.reason == "shared_cells"
        assert snapshot(twin.context) == before
        twin.decode(2, seq_id=[0, 1])


def test_reference_moves_move_every_owner(model: pykv.Model) -> None:
    """On request, as llama.cpp does: a shared cell has one position."""
    twin = open_twin(model, n_seq_max=3, reference_moves=True)
    with twin.context:
        twin.decode(20)
        twin.edit("seq_cp", 0, 1)
        twin.edit("seq_add", 1, 8, -1, 5)
        twin.decode(4, seq_id=[1, 0, 1, 0])
        assert [twin.context.memory.pos_max(s) for s in range(2)] == [26, 26]
        assert twin.context.memory.cells().n_used == 24


# a full cache


@pytest.mark.parametrize("unified", [True, False])
def test_a_batch_that_did_not_fit_left_the_cache_half_changed(model: pykv.Model, unified: bool) -> None:
    """Case A12: not a cell and not a byte differs, and a caller's halving of the batch comes to an end."""
    twin = open_twin(model, n_ctx=512 if not unified else 256, n_seq_max=2, kv_unified=unified, n_ubatch=8)
    with twin.context:
        rows = twin.decode(245)
        before = snapshot(twin.context)
        with pytest.raises(NoSlotError, match="245 of 256 cells used"):
            twin.context.decode(pykv.Batch(TOKENS[:12]))
        assert snapshot(twin.context) == before
        assert twin.context.logits is rows
        assert list(_halving(twin, 16)) == [8, 2, 1]
        assert twin.context.memory.pos_max(0) == 255


def _halving(twin: Twin, n: int) -> Iterator[int]:
    """Yield the sizes that went through; what did not leaves no trace."""
    while n:
        tokens, before = twin.take(n), snapshot(twin.context)
        try:
            twin.decode(tokens)
        except NoSlotError:
            changed = snapshot(twin.context) != before
            if changed:
                pytest.fail("a refused batch changed the memory")
            n //= 2
        else:
            yield n


# what is wrong with a batch


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"tokens": []}, BatchError, "the batch is empty"),
    ({"tokens": [320]}, BatchError, r"token ids must lie in \[0, n_vocab = 320\), got 320"),
    ({"tokens": [1, -1]}, BatchError, "got -1 at index 1"),
    ({"tokens": [1], "seq_id": 3}, BatchError, "n_seq_max = 3"),
    ({"tokens": [1], "seq_id": -1}, BatchError, "got -1"),
    ({"tokens": [1, 2], "seq_id": [0, 3]}, BatchError, "n_seq_max = 3"),
    ({"tokens": [1] * 65}, BatchError, "65 tokens, more than n_tokens_max .* = 64"),
    ({"tokens": [1], "pos": [3]}, BatchError, "sequence 0.* 3"),
    ({"tokens": [1], "pos": [5]}, BatchError, "sequence 0.* 5"),
    ({"tokens": [1, 1], "pos": [4, 6]}, BatchError, "sequence 0.*from position 4 to 6"),
    ({"tokens": [1, 1], "pos": [5, 4]}, BatchError, "sequence 0.*must not decrease"),
    ({"tokens": [1], "pos": [-1]}, BatchError, "got -1"),
    ({"tokens": [1], "seq_id": [(0, 1)]}, BatchError, "sequence 1.* 4; needs 6"),
    ({"tokens": [1] * 9, "logits": "all"}, ParamError, "9 rows asked for, n_outputs_max=8"),
    ({"tokens": None, "embd": [[0.0] * 127]}, BatchError, "127 wide, accepted: 128"),
]


@pytest.mark.parametrize(("batch", "error", "message"), REFUSED)
def test_a_bad_batch_changes_nothing(
    model: pykv.Model, batch: dict[str, Any], error: type[Exception], message: str
) -> None:
    params = {"n_seq_max": 3, "n_batch": 64, "n_outputs_max": 8}
    twin = open_twin(model, **params)
    with twin.context:
        rows = twin.decode(4)
        twin.decode(6, seq_id=1)
        before = snapshot(twin.context)
        with pytest.raises(error, match=message):
            twin.context.decode(pykv.Batch(**batch))
        assert snapshot(twin.context) == before
        assert twin.context.logits.shape == (6, 320)
        assert rows.shape == (4, 320)
        twin.decode(2, seq_id=[0, 1])


@pytest.mark.parametrize("batch", [None, [1, 2], "hello", 3])
def test_what_is_no_batch(model: pykv.Model, batch: object) -> None:
    with model.context(n_ctx=256, **EXACT) as context, pytest.raises(ParamError, match=r"must be a pykv\.Batch"):
        context.decode(batch)


def test_one_sequence_out_of_step_failed_all_of_them(model: pykv.Model) -> None:
    """Case A14: the error names the culprit; without it the same batch goes through."""
    twin = open_twin(model, n_seq_max=3)
    with twin.context:
        for s, n in ((0, 4), (1, 6), (2, 3)):
            twin.decode(n, seq_id=s)
        before = snapshot(twin.context)
        with pytest.raises(BatchError) as caught:
            twin.context.decode(pykv.Batch(TOKENS[:3], pos=[4, 6, 5], seq_id=[0, 1, 2]))
        assert (caught.value.seq_id, caught.value.last, caught.value.first) == (2, 2, 5)
        assert "sequence 2" in str(caught.value)
        assert snapshot(twin.context) == before
        assert [twin.context.memory.pos_max(s) for s in range(3)] == [3, 5, 2]
        twin.decode(2, pos=[4, 6], seq_id=[0, 1])
        cells = twin.context.memory.cells()
        assert [(int(cells.pos[i]), cells.owners_of(i)) for i in (13, 14)] == [(4, (0,)), (6, (1,))]


def test_sequences_that_no_cache_has(model: pykv.Model) -> None:
    twin = open_twin(model)
    with twin.context:
        twin.decode(4)
        before = snapshot(twin.context)
        for verb, args in (("seq_rm", (-2,)), ("seq_rm", (256,)), ("seq_cp", (0, 256)), ("seq_keep", (-1,))):
            with pytest.raises(SequenceError):
                getattr(twin.context.memory, verb)(*args)
        assert snapshot(twin.context) == before


@pytest.mark.parametrize("unified", [True, False])
def test_coupled_tokens_need_shared_cells(model: pykv.Model, unified: bool) -> None:
    twin = open_twin(model, n_ctx=512, n_seq_max=2, kv_unified=unified)
    with twin.context:
        if unified:
            twin.decode(4, seq_id=[(0, 1)] * 4)
            return
        with pytest.raises(BatchError, match="kv_unified=True"):
            twin.context.decode(pykv.Batch([1], seq_id=[(0, 1)]))
        twin.decode(4, seq_id=[0, 1, 0, 1])
