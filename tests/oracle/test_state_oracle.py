"""States of every kind of memory, as pykv and real llama.cpp write and read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.oracle import Oracle, OracleBatch
from support.paired import Pair, pykv_batch
from support.state_io import load, parsed, saved, without_rows
from support.tiny.model import TinyFile
from support.verb_setting import MODELS

import pykv
from pykv.memory import HybridMemory, RecurrentMemory
from pykv.state_format import Dialect
from pykv.state_format.containers import context_head, sequence_bytes_head

pytestmark = pytest.mark.oracle

TOKENS = np.random.default_rng(3).integers(0, 256, 400).tolist()
N_NEXT = 20
THEIRS = Dialect.S10
"""What the llama.cpp of the tests writes."""


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
        """Whether both compute the same bits: not sums of f32 without flash attention, nor turns by several axes."""
        return (self.flash or self.type_v != "f32") and not self.model.startswith("qwen2vl")

    @property
    def name(self) -> str:
        words = [self.model, self.type_k, self.type_v, "flash" if self.flash else "plain"]
        words += ["unified" if self.unified else "streams"] + ["rollback"] * bool(self.n_rs_seq)
        return "-".join(words + ["full"] * self.swa_full)


def varied(model: str) -> list[Setting]:
    """Return a model with every way of storing."""
    found = [Setting(model, unified=u) for u in (True, False)]
    found += [Setting(model, "f32", "f32", flash=f, unified=u) for f, u in ((False, True), (True, False))]
    return [*found, Setting(model, "f16", "f16", flash=False, unified=False)]


SETTINGS = [
    *varied("wide"),
    *(
        Setting("wide", k, v, unified=u)
        for k, v, u in (("q8_0", "q8_0", True), ("q8_0", "q4_0", False), ("q4_0", "f16", True), ("bf16", "bf16", True))
    ),
    Setting("wide", "q8_0", "f16", flash=False),
    *varied("gemma3-4l-w16-every2"),
    Setting("gemma3-4l-w16-every2", swa_full=True),
    Setting("gemma2-3l-wide-w16", "q8_0", "q8_0"),
    Setting("gpt-oss-4l-w32"),
    Setting("gemma3n-22l-w32-f32", "f32", "f32", flash=False),
    Setting("mamba2-4l"),
    Setting("rwkv7-3l"),
    *varied("falcon-h1-3l"),
    Setting("lfm2-4l"),
    Setting("lfm2-4l", n_rs_seq=4),
    Setting("lfm2-4l-w16"),
    Setting("lfm2-4l-w16", "f32", "f32", flash=False, unified=False, n_rs_seq=3),
    Setting("deepseek2-3l"),
    Setting("deepseek2-3l", "f32", "f32", flash=False, unified=False),
    Setting("bloom-3l-4heads"),
    *varied("qwen2vl-3l"),
]


@pytest.fixture(params=SETTINGS, ids=lambda setting: setting.name)
def setting(request: pytest.FixtureRequest) -> Setting:
    return request.param


@pytest.fixture
def contexts(setting: Setting, oracle: Oracle, write_tiny: Callable[[TinyFile], Path]) -> Iterator[Callable[..., Pair]]:
    path = write_tiny(MODELS[setting.model])
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


def head_of(setting: Setting, seq_id: int) -> bytes:
    return context_head(MODELS[setting.model].arch) if seq_id == -1 else sequence_bytes_head(seq_id)


def check_same(pair: Pair, setting: Setting, seq_id: int, *, partial: bool = False) -> None:
    """Compare a state of both sides, and the rows in it where both compute the same bits."""
    memory, theirs = pair.ours.memory, pair.theirs.state_data(seq_id, partial=partial)
    head = head_of(setting, seq_id)
    assert theirs.startswith(head)
    ours = saved(memory, seq_id, partial=partial, dialect=THEIRS)
    both = {"ours": ours, "theirs": theirs[len(head) :]}
    sections = {
        side: parsed(memory, one, whole=seq_id == -1, partial=partial, dialect=THEIRS) for side, one in both.items()
    }
    assert without_rows(both["ours"], sections["ours"]) == without_rows(both["theirs"], sections["theirs"])
    if setting.has_same_bits:
        assert both["ours"] == both["theirs"]


def test_equal_histories_give_equal_bytes(contexts: Callable[..., Pair], setting: Setting) -> None:
    pair = contexts()
    lived(pair, setting)
    for seq_id in (-1, 0, 1, 2):
        check_same(pair, setting, seq_id)
    for seq_id in (0, 1):
        check_same(pair, setting, seq_id, partial=True)
    pair.clear()
    for seq_id in (-1, 0):
        check_same(pair, setting, seq_id)


def greedy(context: pykv.Context, token: int, pos: int, seq_id: int) -> list[int]:
    tokens = [token]
    for i in range(N_NEXT):
        context.decode(pykv_batch(OracleBatch.of(tokens[-1:], pos + i, seq_id)))
        tokens.append(int(np.array(context.logits)[-1].argmax()))
    return tokens[1:]


def test_each_side_goes_on_with_what_the_other_wrote(contexts: Callable[..., Pair], setting: Setting) -> None:
    """One sequence, into another number of cells, of which others hold some, with holes between them."""
    first, other = contexts(), contexts(1536)
    lived(first, setting)
    for i in range(0, 40, 4):
        other.decode(OracleBatch.of(TOKENS[100 + i : 104 + i], i, 0))
        other.decode(OracleBatch.of(TOKENS[200 + i : 203 + i], i // 4 * 3, 2))
    other.edit("seq_rm", 2, -1, -1)
    ours = head_of(setting, 0) + saved(first.ours.memory, 0, dialect=THEIRS)
    theirs = first.theirs.state_data(0)
    assert other.theirs.state_set(ours, 1) == len(ours)
    load(other.ours.memory, theirs[8:], 1, dialect=THEIRS)
    other.ours.memory.check()
    if setting.has_same_bits:
        check_same(other, setting, 1)
    p = first.ours.memory.pos_max(0) + 1
    expected, _ = first.theirs.greedy(OracleBatch.of([7], p, 0), N_NEXT)
    assert other.theirs.greedy(OracleBatch.of([7], p, 1), N_NEXT)[0] == expected
    assert greedy(other.ours, 7, p, 1) == expected
    assert greedy(first.ours, 7, p, 0) == expected


def test_each_side_goes_on_with_all_that_the_other_wrote(contexts: Callable[..., Pair], setting: Setting) -> None:
    first, other = contexts(), contexts(1536)
    lived(first, setting)
    other.decode(OracleBatch.of(TOKENS[:30], 0, 1))
    ours = head_of(setting, -1) + saved(first.ours.memory, -1, dialect=THEIRS)
    theirs = first.theirs.state_data()
    assert other.theirs.state_set(ours) == len(ours)
    load(other.ours.memory, theirs[len(head_of(setting, -1)) :], dialect=THEIRS)
    other.ours.memory.check()
    other.check_positions(3)
    if setting.has_same_bits:
        check_same(other, setting, -1)
    for seq_id in (2, 0):
        p = first.ours.memory.pos_max(seq_id) + 1
        expected, _ = first.theirs.greedy(OracleBatch.of([9], p, seq_id), N_NEXT)
        assert other.theirs.greedy(OracleBatch.of([9], p, seq_id), N_NEXT)[0] == expected
        assert greedy(other.ours, 9, p, seq_id) == expected
