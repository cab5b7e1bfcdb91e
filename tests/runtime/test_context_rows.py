"""What `decode` answers: rows of logits, in every way that a batch can be put together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.naive_llama import NaiveLlama
from support.nmse import nmse
from support.tiny_gguf import TinyModel
from support.twin import EXACT, ORDER, ROUNDED, TOKENS, Twin

import pykv
from pykv.errors import ParamError

TINY = TinyModel(seed=80)

WAYS = {
    (flash, unified): {"flash_attn": flash, "kv_unified": unified, "n_threads": 1, "n_ctx": 1024, "n_seq_max": 4}
    for flash in (True, False)
    for unified in (True, False)
}


@pytest.fixture(scope="module")
def model(write_tiny: Callable[[TinyModel], Path]) -> Iterator[pykv.Model]:
    with pykv.Model.load(write_tiny(TINY)) as loaded:
        yield loaded


@pytest.mark.parametrize(
    "way", WAYS, ids=lambda way: f"{'flash' if way[0] else 'plain'}-{'one' if way[1] else 'streams'}"
)
def test_sequences_in_one_batch(model: pykv.Model, way: tuple[bool, bool]) -> None:
    """Sequences of different length, interleaved and one after the other, cut into small ubatches."""
    with model.context(n_ubatch=8, **WAYS[way]) as context:
        twin = Twin(context, TINY, ROUNDED)
        twin.decode(20, seq_id=2)
        twin.decode(23, pos=[*range(9), *range(20, 30), *range(4)], seq_id=[0] * 9 + [2] * 10 + [3] * 4)
        mixed = [(0, 9), (3, 4), (2, 30), (0, 10), (3, 5), (0, 11), (2, 31)]
        twin.decode(len(mixed), pos=[p for _, p in mixed], seq_id=[s for s, _ in mixed])
        for _ in range(3):
            twin.decode(3, seq_id=[0, 2, 3])  # positions are continued
        twin.decode(2, seq_id=[1, 1])
        assert [context.memory.pos_max(s) for s in range(4)] == [14, 1, 34, 8]


@pytest.mark.parametrize("flash", [True, False])
def test_tokens_of_several_sequences(model: pykv.Model, flash: bool) -> None:
    """A common beginning is stored once; afterwards each goes its own way."""
    with model.context(**WAYS[flash, True]) as context:
        twin = Twin(context, TINY, ROUNDED)
        twin.decode(10, seq_id=[(0, 1, 2)] * 10)
        assert context.memory.cells().n_used == 10
        twin.decode(5, pos=[10, 10, 10, 11, 11], seq_id=[0, 1, 2, 1, 0])
        assert context.memory.cells().n_used == 15


@pytest.mark.parametrize("n_ubatch", [1, 7, 64, 512])
def test_the_cut_into_ubatches_does_not_matter(model: pykv.Model, n_ubatch: int) -> None:
    with model.context(n_ctx=512, n_ubatch=n_ubatch, **EXACT) as context:
        Twin(context, TINY).decode(70)


def test_token_by_token_equals_one_batch(model: pykv.Model) -> None:
    with model.context(n_ctx=512, **EXACT) as whole, model.context(n_ctx=512, **EXACT) as single:
        whole.decode(pykv.Batch(TOKENS[:50], logits="all"))
        rows = []
        for token in TOKENS[:50]:
            single.decode(pykv.Batch([token]))
            rows.append(single.logits[0])
        assert nmse(rows, whole.logits) <= ORDER


# which rows


@pytest.mark.parametrize("unified", [True, False])
def test_rows_stand_in_the_order_of_the_batch(model: pykv.Model, unified: bool) -> None:
    """With streams the tokens of one sequence are computed together, whatever their order in the batch."""
    seqs = [0, 1, 0, 1, 2, 0, 2, 1, 0]
    wanted = np.array([1, 0, 1, 1, 0, 0, 1, 1, 1], bool)
    params = EXACT | {"kv_unified": unified, "n_seq_max": 3, "n_ctx": 768, "n_ubatch": 4}
    with model.context(**params) as context:
        context.decode(pykv.Batch(TOKENS[:9], seq_id=seqs, logits=wanted))
        expected = NaiveLlama(TINY).decode(TOKENS[:9], seq_ids=seqs)
        assert context.logits.shape == (6, TINY.n_vocab)
        assert nmse(context.logits, expected[wanted]) <= ORDER


@pytest.mark.parametrize(
    ("logits", "rows"),
    [
        ("last", [11]),
        ("all", list(range(12))),
        ("none", []),
        ([True] + [False] * 11, [0]),
        ([False] * 5 + [True, False, True] + [False] * 4, [5, 7]),
    ],
)
@pytest.mark.parametrize("n_ubatch", [4, 512])
def test_only_the_rows_that_were_asked_for(model: pykv.Model, logits: object, rows: list[int], n_ubatch: int) -> None:
    with model.context(n_ctx=256, n_ubatch=n_ubatch, **EXACT) as context:
        context.decode(pykv.Batch(TOKENS[:12], logits=logits))
        assert context.logits.shape == (len(rows), TINY.n_vocab)
        if rows:
            assert nmse(context.logits, NaiveLlama(TINY).decode(TOKENS[:12])[rows]) <= ORDER
        # what was stored does not depend on what was asked for
        context.decode(pykv.Batch(TOKENS[12:13]))
        assert nmse(context.logits, NaiveLlama(TINY).decode(TOKENS[:13])[-1:]) <= ORDER


def test_kept_rows_changed_with_the_next_decode(model: pykv.Model) -> None:
    with model.context(n_ctx=256, **EXACT) as context:
        context.decode(pykv.Batch(TOKENS[:5], logits="all"))
        kept, copy = context.logits, context.logits.copy()
        assert context.logits is kept
        with pytest.raises(ValueError, match="read-only"):
            kept[0, 0] = 1
        for i in range(5, 9):
            context.decode(pykv.Batch(TOKENS[i : i + 1]))
        context.memory.clear()
        context.decode(pykv.Batch(TOKENS[20:25], logits="all"))
        assert np.array_equal(kept, copy)
    assert np.array_equal(kept, copy)


def test_no_rows_before_the_first_decode(model: pykv.Model) -> None:
    with model.context(n_ctx=256, **EXACT) as context, pytest.raises(ParamError, match="nothing has been decoded"):
        _ = context.logits


# graphs


def test_a_graph_serves_until_the_cells_pass_a_multiple_of_256(model: pykv.Model) -> None:
    with model.context(n_ctx=1024, n_batch=1024, **EXACT) as context:
        context.decode(pykv.Batch(TOKENS[:250]))
        assert context.n_reused == 0
        built = []
        for i in range(250, 530):
            before = context.n_reused
            context.decode(pykv.Batch(TOKENS[i : i + 1]))
            if context.n_reused == before:
                built.append(i + 1)  # cells in use
        assert built == [251, 257, 513]
        assert context.n_reused == 280 - len(built)
        expected = NaiveLlama(TINY).decode(TOKENS[:530])[-1:]
        assert nmse(context.logits, expected) <= ORDER


def test_graphs_are_told_apart_by_what_they_compute(model: pykv.Model) -> None:
    """As many tokens, but other rows, or other streams."""

    def reuses(**batch) -> bool:
        before = context.n_reused
        context.decode(pykv.Batch(TOKENS[:2], **batch))
        return context.n_reused > before

    params = EXACT | {"n_ctx": 1024, "n_seq_max": 4, "kv_unified": False}
    with model.context(**params) as context:
        assert not reuses(seq_id=[0, 1], logits="all")
        assert reuses(seq_id=[0, 1], logits="all")
        assert not reuses(seq_id=[1, 2], logits="all")
        assert not reuses(seq_id=[1, 2], logits="last")
        assert reuses(seq_id=[1, 2], logits=[True, False])
        assert not reuses(seq_id=[1, 1], logits="last")
        assert not reuses(seq_id=[1, 1], logits="none")
        assert reuses(seq_id=[1, 1], logits="none")


def test_prompts_and_single_tokens_alternate(model: pykv.Model) -> None:
    """Long enough that a measured plan may take different attention paths for them."""
    with model.context(n_ctx=1024, n_ubatch=128, n_threads=1) as context:
        twin = Twin(context, TINY, ROUNDED)
        for n in (1, 130, 1, 64, 63, 1, 128, 2):
            twin.decode(n)


def test_the_answer_depended_on_which_cells_a_prompt_landed_in(model: pykv.Model) -> None:
    """Case A15, both orders, on both attention paths."""
    long, short = TOKENS[:34], TOKENS[100:105]
    for params, most in ((EXACT, ORDER), ({"flash_attn": True, "n_threads": 1}, ROUNDED)):
        answers = []
        for order in ((0, 1), (1, 0)):
            with model.context(n_ctx=256, n_seq_max=2, **params) as context:
                for s in order:
                    context.decode(pykv.Batch(short if s else long, seq_id=s, logits="all"))
                    if s:
                        answers.append(context.logits)
        assert nmse(answers[0], answers[1]) <= most
        assert nmse(answers[0], NaiveLlama(TINY).decode(short)) <= most
