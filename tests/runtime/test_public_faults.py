"""Faults that users of such systems reported, seen from the answers of a model; tests are named after symptoms.

A model of one layer computes keys and values from a token and its position alone: what was moved must answer like
what was never anywhere else. Deeper models are held against the naive pass, which moves its rows likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.apply_plans import apply_reuse, apply_step
from support.naive_llama import NaiveLlama
from support.nmse import nmse
from support.tiny_gguf import NARROW, SHIFT_MODELS, WIDE, TinyModel
from support.twin import EXACT, ORDER, TOKENS, Twin, snapshot

import pykv
from pykv.errors import BatchError, ContextLengthExceeded, NoSlotError
from pykv.policies import plan_reuse, plan_shift

N_VOCAB = 320
SHALLOW = replace(NARROW, n_layer=1, n_vocab=N_VOCAB, seed=60)


@pytest.fixture(scope="module")
def shallow(write_tiny: Callable[[TinyModel], Path]) -> Iterator[pykv.Model]:
    with pykv.Model.load(write_tiny(SHALLOW)) as loaded:
        yield loaded


def open_context(model: pykv.Model, **params) -> pykv.Context:
    return model.context(**(EXACT | {"n_ctx": 256} | params))


def decode(context: pykv.Context, tokens: list[int]) -> np.ndarray:
    """Return the logits after the last token."""
    context.decode(pykv.Batch(tokens))
    return context.logits[-1].copy()


def greedy(context: pykv.Context, row: np.ndarray, n: int) -> tuple[list[int], np.ndarray]:
    """Return the n most likely tokens, one after the other, and all rows on the way."""
    tokens, rows = [], [row]
    for _ in range(n):
        tokens.append(int(rows[-1].argmax()))
        rows.append(decode(context, tokens[-1:]))
    return tokens, np.array(rows)


# case A01, ggml-org/llama.cpp#3825


@pytest.mark.parametrize("name", SHIFT_MODELS)
def test_text_went_bad_after_the_second_of_two_queued_shifts(
    name: str, write_tiny: Callable[[TinyModel], Path]
) -> None:
    """Under every way of rotating keys."""
    tiny = replace(SHIFT_MODELS[name], n_vocab=N_VOCAB)
    with pykv.Model.load(write_tiny(tiny)) as model, open_context(model) as context:
        twin = Twin(context, tiny)
        twin.decode(12)
        twin.edit("seq_rm", 0, 0, 2)
        twin.edit("seq_add", 0, 2, 12, -2)
        twin.edit("seq_add", 0, 1, 4, 9)
        twin.decode(2)
        twin.edit("seq_div", 0, 5, -1, 2)
        twin.edit("seq_add", 0, 3, -1, 20)
        twin.decode(3)


# case A03, ggml-org/llama.cpp#12160


@pytest.mark.parametrize("min_chunk", [2, 5])
def test_reused_chunks_answer_like_a_cold_run(shallow: pykv.Model, min_chunk: int) -> None:
    cached = TOKENS[:60]
    prompt = cached[:10] + cached[14:31] + cached[33:38] + cached[50:]
    reuse = plan_reuse(cached, prompt, min_chunk)
    assert (reuse.n_prefix, len(reuse.moves), reuse.n_usable) == (10, 3, len(prompt) - 1)
    with open_context(shallow) as warm, open_context(shallow) as cold:
        decode(warm, cached)
        apply_reuse(warm.memory, reuse)
        warm.memory.seq_rm(0, reuse.n_usable, -1)
        ours = greedy(warm, decode(warm, prompt[reuse.n_usable :]), 12)
        theirs = greedy(cold, decode(cold, prompt), 12)
        assert ours[0] == theirs[0]
        assert nmse(ours[1], theirs[1]) <= ORDER
        assert warm.memory.cells().n_used == cold.memory.cells().n_used == len(prompt) + 12


# case A04, ggml-org/llama.cpp PR #5622


@pytest.mark.parametrize("n_keep", [0, 1, 4, 30])
def test_after_a_context_shift_it_answers_like_the_tokens_that_are_left(shallow: pykv.Model, n_keep: int) -> None:
    """With a start token, which the caller counts, or without one."""
    with open_context(shallow) as context, open_context(shallow) as cold:
        decode(context, TOKENS[:256])
        shift = plan_shift(256, 256, n_keep)
        apply_step(context.memory, shift)
        left = TOKENS[:n_keep] + TOKENS[n_keep + shift.n_discard : 256]
        decode(cold, left)
        ours, theirs = (greedy(one, decode(one, TOKENS[300:301]), 8) for one in (context, cold))
        assert ours[0] == theirs[0]
        assert nmse(ours[1], theirs[1]) <= ORDER


# case A05, ggml-org/llama.cpp#3969


def test_a_prompt_longer_than_its_share_was_shifted_for_ever(shallow: pykv.Model) -> None:
    with open_context(shallow, n_ctx=1024, n_seq_max=4, kv_unified=False) as context:
        assert context.n_ctx_seq == 256
        twin = Twin(context, SHALLOW)
        twin.decode(5, seq_id=1)
        before = snapshot(context)
        for seq_id in (0, [0] * 257 + [1] * 43):
            with pytest.raises(ContextLengthExceeded, match=r"sequence 0 brings .* its share of the context is 256"):
                context.decode(pykv.Batch(TOKENS[:300], seq_id=seq_id))
            assert snapshot(context) == before
        twin.decode(1, seq_id=1)
        twin.decode(256)


def test_a_share_is_rounded_up(shallow: pykv.Model) -> None:
    """Each of four sequences in a context of 40 can hold a prompt of 15: shares are multiples of 256."""
    with open_context(shallow, n_ctx=40, n_seq_max=4, kv_unified=False) as context:
        assert (context.n_ctx, context.n_ctx_seq, context.n_batch) == (1024, 256, 40)
        twin = Twin(context, SHALLOW)
        for s in range(4):
            twin.decode(15, seq_id=s)
        with pytest.raises(BatchError, match="41 tokens, more than n_tokens_max"):
            context.decode(pykv.Batch([1] * 41))


def test_generation_without_limit_shifted_for_ever(write_tiny: Callable[[TinyModel], Path]) -> None:
    """Two layers: what is left remembers what is gone, and the naive pass knows how."""
    tiny = replace(SHIFT_MODELS["neox-linear"], n_vocab=N_VOCAB)
    with pykv.Model.load(write_tiny(tiny)) as model, open_context(model) as context:
        twin = Twin(context, tiny)
        twin.decode(250)
        past, shifts = 250, []
        for i in range(300):
            if past == context.n_ctx_seq:
                with pytest.raises(NoSlotError):
                    context.decode(pykv.Batch([1]))
                shift = plan_shift(past, context.n_ctx_seq, 4)
                apply_step(context.memory, shift)
                apply_step(twin.naive, shift)
                past = shift.n_left
                shifts.append(i)
            twin.decode(1)
            past += 1
        assert shifts == [6, 132, 258]
        assert context.memory.pos_max(0) == past - 1 == 171


# case A06, ggml-org/llama.cpp#5652


@pytest.mark.parametrize("dtype", ["f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"])
@pytest.mark.parametrize("tiny", [NARROW, WIDE], ids=["plain", "hadamard"])
def test_a_context_shift_of_quantised_keys_gave_rubbish(
    tiny: TinyModel, dtype: str, write_tiny: Callable[[TinyModel], Path]
) -> None:
    """Keys that were rounded three times are off by what three roundings cost, and no more."""
    tiny = replace(tiny, n_layer=1, n_vocab=N_VOCAB, seed=61)
    settings = {"type_k": dtype, "type_v": "f16", "flash_attn": True}
    with pykv.Model.load(write_tiny(tiny)) as model:
        with open_context(model, **settings) as context:
            decode(context, TOKENS[:60])
            for n in (10, 7):
                apply_step(context.memory, plan_shift(context.memory.pos_max(0) + 1, 256, 4, n))
                context.memory.update()
            left, more = TOKENS[:4] + TOKENS[21:60], TOKENS[60:100]
            context.decode(pykv.Batch(more, logits="all"))
            moved = context.logits.copy()
        with open_context(model, **settings) as cold:
            decode(cold, left)
            cold.decode(pykv.Batch(more, logits="all"))
            rounded_once = cold.logits.copy()
    exact = NaiveLlama(tiny).decode(left + more)[len(left) :]
    assert nmse(moved, exact) <= 4 * nmse(rounded_once, exact)
