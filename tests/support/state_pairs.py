"""The same context in pykv and in llama.cpp with the same history: where tests of saved states begin.

A test module is parametrised by `setting`, and gives the fixture its name: contexts = state_pairs.contexts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.oracle import Oracle, OracleBatch
from support.paired import Pair, pykv_batch
from support.tiny.model import TinyFile
from support.verb_setting import MODELS

import pykv
from pykv.memory import HybridMemory, RecurrentMemory

TOKENS: list[int] = np.random.default_rng(3).integers(0, 256, 400).tolist()


@dataclass(frozen=True)
class Setting:
    """A context on both sides."""

    model: str
    type_k: str = "f16"
    type_v: str = "f16"
    flash: bool = True
    unified: bool = True
    n_rs_seq: int = 0
    swa_full: bool = False

    @property
    def has_same_bits(self) -> bool:
        """Whether both compute the same bits.

        Not where ggml sums f32 without flash attention, as it also does for values that are read out of keys, nor with
        turns by several axes.
        """
        sums_f32 = self.type_v == "f32" or self.model.startswith("deepseek2")
        return (self.flash or not sums_f32) and not self.model.startswith("qwen2vl")

    @property
    def name(self) -> str:
        words = [self.model, self.type_k, self.type_v, "flash" if self.flash else "plain"]
        words += ["unified" if self.unified else "streams"] + ["rollback"] * bool(self.n_rs_seq)
        return "-".join(words + ["full"] * self.swa_full)


@contextmanager
def pairs_of(setting: Setting, oracle: Oracle, path: Path) -> Iterator[Callable[..., Pair]]:
    """Return what makes the two contexts, given how many cells; all are closed in the end."""
    made: list[Pair] = []

    def make(n_ctx: int = 1024) -> Pair:
        made.append(
            Pair(
                oracle,
                model,
                path,
                n_ctx=n_ctx,
                n_seq_max=3,
                n_ubatch=32,
                n_threads=1,
                type_k=setting.type_k,
                type_v=setting.type_v,
                flash_attn=setting.flash,
                kv_unified=setting.unified,
                swa_full=setting.swa_full,
                n_rs_seq=setting.n_rs_seq,
            )
        )
        return made[-1]

    with pykv.Model.load(str(path)) as model:
        try:
            yield make
        finally:
            for one in made:
                one.close()


@pytest.fixture
def contexts(setting: Setting, oracle: Oracle, write_tiny: Callable[[TinyFile], Path]) -> Iterator[Callable[..., Pair]]:
    """Make pairs of contexts of one setting, see `pairs_of`."""
    with pairs_of(setting, oracle, write_tiny(MODELS[setting.model])) as make:
        yield make


def has_states(pair: Pair) -> bool:
    return isinstance(pair.ours.memory, (RecurrentMemory, HybridMemory))


def lived(pair: Pair, setting: Setting) -> None:
    """Give both sides the same history: two conversations that alternate, a fork, cuts, and holes."""

    def decode(seq_id: int, n: int) -> None:
        start = pair.ours.memory.pos_max(seq_id) + 1
        pair.decode(OracleBatch.of(TOKENS[start : start + n], start, seq_id))

    decode(0, 24)
    for _ in range(5):
        decode(1, 3)
        decode(0, 2)
    pair.edit("seq_cp", 0, 2, -1, -1)
    decode(2, 7)
    if not has_states(pair):
        pair.edit("seq_rm", 1, 9, -1)
    decode(0, 30)
    decode(1, 4)
    if setting.n_rs_seq:
        pair.edit("seq_rm", 0, 62, -1)


def greedy(context: pykv.Context, token: int, pos: int, seq_id: int, n: int) -> list[int]:
    """Return the n tokens that pykv says behind a token, each the largest logit."""
    tokens = [token]
    for i in range(n):
        context.decode(pykv_batch(OracleBatch.of(tokens[-1:], pos + i, seq_id)))
        tokens.append(int(np.array(context.logits)[-1].argmax()))
    return tokens[1:]
