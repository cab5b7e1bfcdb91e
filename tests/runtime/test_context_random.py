"""Random histories of decodes and verbs: every row equals what the naive forward makes of the same history."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_gguf import TinyModel
from support.twin import EXACT, TOKENS, Twin

import pykv
from pykv.runtime import Context

TINY = TinyModel(seed=84, n_embd=64, n_head=2, n_head_kv=1, n_ff=64)
N_SEQ = 3
SEQS = st.integers(0, N_SEQ - 1)
BOUND = st.integers(-1, 14)

STEPS = st.one_of(
    st.tuples(st.just("decode"), st.lists(SEQS, min_size=1, max_size=12)),
    st.tuples(st.just("couple"), st.lists(SEQS, min_size=2, max_size=3, unique=True)),
    st.tuples(st.just("seq_rm"), st.integers(-1, N_SEQ - 1), BOUND, BOUND),
    st.tuples(st.just("seq_cp"), SEQS, SEQS, BOUND, BOUND),
    st.tuples(st.just("seq_keep"), SEQS),
    st.tuples(st.just("clear")),
)


@pytest.fixture(scope="module")
def model(write_tiny: Callable[[TinyModel], Path]) -> Iterator[pykv.Model]:
    with pykv.Model.load(write_tiny(TINY)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def context(model: pykv.Model) -> Iterator[Context]:
    with model.context(n_ctx=256, n_seq_max=N_SEQ, n_ubatch=5, **EXACT) as opened:
        yield opened


@pytest.fixture(scope="module")
def fused(model: pykv.Model) -> Iterator[Context]:
    with model.context(n_ctx=256, n_seq_max=N_SEQ, n_ubatch=5, flash_attn=True, n_threads=1) as opened:
        yield opened


def walk(twin: Twin, steps: list[tuple]) -> None:
    memory = twin.context.memory
    memory.clear()
    for step in steps:
        match step:
            case ("decode", seqs):
                if memory.cells().n_used + len(seqs) > 200:
                    continue
                twin.decode(_tokens(seqs), seq_id=seqs)
            case ("couple", seqs):
                # a common token needs sequences that end alike; forks of one do
                for other in seqs[1:]:
                    twin.edit("seq_rm", other, -1, -1)
                    twin.edit("seq_cp", seqs[0], other, -1, -1)
                twin.decode([7], seq_id=[tuple(sorted(seqs))])
            case ("seq_cp", src, dst, p0, p1):
                # positions must stay without repetition, or the next decode of `dst` would be refused
                twin.edit("seq_rm", dst, -1, -1) if src != dst else None
                twin.edit("seq_cp", src, dst, p0, p1)
            case (verb, *args):
                twin.edit(verb, *args)
        memory.check()
        for s in range(N_SEQ):
            mine = [int(p) for p, ids in zip(twin.naive.pos, twin.naive.seqs, strict=True) if s in ids]
            assert memory.pos_max(s) == max(mine, default=-1)
            assert memory.pos_min(s) == min(mine, default=-1)


def _tokens(seqs: list[int]) -> list[int]:
    """Return tokens that depend on what stands around them, so that mixed-up rows show."""
    return [TOKENS[(31 * i + 7 * s + 5 * len(seqs)) % 1000] for i, s in enumerate(seqs)]


@settings(max_examples=40, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=14))
def test_any_history_answers_like_the_naive_forward(context: Context, steps: list[tuple]) -> None:
    walk(Twin(context, TINY), steps)


@settings(max_examples=15, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=14))
def test_any_history_on_the_fused_path(fused: Context, steps: list[tuple]) -> None:
    walk(Twin(fused, TINY, most=1e-4), steps)
