"""States of every kind of memory, as pykv and real llama.cpp write and read them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import state_pairs
from support.oracle import OracleBatch
from support.paired import Pair
from support.state_io import load, parsed, saved, without_rows
from support.state_pairs import TOKENS, Setting, greedy, lived
from support.verb_setting import MODELS

from pykv.state_format import Dialect
from pykv.state_format.containers import context_head, sequence_bytes_head

N_NEXT = 20
THEIRS = Dialect.S10
"""What the llama.cpp of the tests writes."""


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


pytestmark = [pytest.mark.oracle, pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)]
contexts = state_pairs.contexts


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
    assert greedy(other.ours, 7, p, 1, N_NEXT) == expected
    assert greedy(first.ours, 7, p, 0, N_NEXT) == expected


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
        assert greedy(other.ours, 9, p, seq_id, N_NEXT) == expected
