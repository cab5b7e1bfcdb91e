"""Where a context may choose, V is turned on the way; the answers stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.tiny_gguf import TinyModel
from support.twin import ROUNDED, Twin

import pykv
from pykv.memory import AttentionPath, AttentionPlan
from pykv.memory.attention_choice import AttentionChoice
from pykv.runtime import context as context_module

TINY = TinyModel(seed=81)
TURN_AT = 80


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("few", [AttentionPath.FUSED, AttentionPath.FLASH])
@pytest.mark.parametrize("many", [AttentionPath.FLASH, AttentionPath.GROUPED])
def test_values_turn_with_the_depth_and_nothing_is_lost(
    write_tiny: Callable[[TinyModel], Path],
    monkeypatch: pytest.MonkeyPatch,
    many: AttentionPath,
    few: AttentionPath,
    unified: bool,
) -> None:
    choice = AttentionChoice(AttentionPlan(many, TURN_AT, few), "told")
    monkeypatch.setattr(context_module, "attention_choice", lambda *_: choice)
    with (
        pykv.Model.load(write_tiny(TINY)) as model,
        model.context(n_ctx=512, n_seq_max=2, kv_unified=unified, n_threads=1) as context,
    ):
        twin, memory = Twin(context, TINY, ROUNDED), context.memory
        twin.decode(70)
        assert not memory.store.v_trans
        for _ in range(9):
            twin.decode(1)
        assert not memory.store.v_trans
        twin.decode(1)
        assert memory.store.v_trans
        twin.decode(70)  # a prompt over turned values
        twin.decode(5, seq_id=1)
        assert memory.store.v_trans
        twin.edit("seq_rm", 1, -1, -1)
        twin.edit("seq_rm", 0, 30, -1)
        twin.decode(1)
        assert not memory.store.v_trans
        twin.decode(64)
        assert not memory.store.v_trans, "a prompt leaves them in rows"
        twin.decode(1)
        assert memory.store.v_trans
