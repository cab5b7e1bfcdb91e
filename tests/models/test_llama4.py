"""Llama 4: which layers have windows and RoPE, its temperature, and what of its files is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.changed_file import write_changed
from support.cpu_graph import Bench
from support.nmse import nmse
from support.tiny.llama4 import MODELS
from support.tiny.model import TinyFile

import pykv
from pykv.cells import SwaType, Window
from pykv.errors import GGUFError
from pykv.models.llama4 import TEMPERATURE

Write = Callable[[TinyFile], Path]

EXACT = {"type_k": "f32", "type_v": "f32", "flash_attn": False, "n_threads": 1, "n_ctx": 256, "n_ubatch": 32}
TOKENS = [int(t) for t in np.random.default_rng(9).integers(0, 256, 60)]


def test_windows_and_ropes_follow_patterns_of_their_own(write_tiny: Write) -> None:
    for name, is_swa in (
        ("llama4-4l", [True, True, True, False]),
        ("llama4-5l-wide-every2", [True, False, True, False, True]),
    ):
        with pykv.Model.load(write_tiny(MODELS[name])) as model, model.context(**EXACT) as context:
            spec = context.memory.spec
            assert spec.window == Window(8192, SwaType.CHUNKED)
            assert [layer.is_swa for layer in spec.layers] == is_swa
            assert [il for il, layer in enumerate(spec.layers) if layer.rope is None] == [3]
            assert {layer.rope.mode for layer in spec.layers if layer.rope} == {"norm"}


def test_queries_grow_once_every_8192_positions() -> None:
    """From position 8191 on, as the published code has it."""

    class Builder:
        def __init__(self) -> None:
            self.bench = Bench()
            self.arena = self.bench.nodes
            self.shape = self

        n_tokens = 5

        def input(self, dtype: Any, ne: tuple[int, ...], name: str, fill: Any) -> Any:
            class UBatch:
                pos = np.array([[0, 8190, 8191, 16383, 100000]], np.int32)

            values = np.zeros((1, *reversed(ne)), np.float32)
            fill(values, UBatch)
            return self.bench.put(values[0])

    b = Builder()
    out = TEMPERATURE.apply(b, b.bench.put(np.ones((5, 2, 4), np.float32)))
    with b.bench.computed(out):
        rows = out.numpy()[0]
    expected = 1 + 0.1 * np.log(1 + np.array([0, 0, 1, 2, 12]))
    assert np.allclose(rows, expected[:, None, None], rtol=1e-6)


def test_the_model_with_128_experts_has_no_norm_of_heads(write_tiny: Write) -> None:
    for n_expert in (4, 128):
        tiny = replace(MODELS["llama4-4l"], n_embd=128, n_expert=n_expert)
        with pykv.Model.load(write_tiny(tiny)) as model:
            assert model.architecture.has_qk_norm is (n_expert == 4)


@pytest.mark.parametrize("delta", [30, -8])
def test_a_conversation_that_was_moved_goes_on_as_if_it_had_not(write_tiny: Write, delta: int) -> None:
    """Keys without RoPE stay as they are."""
    with (
        pykv.Model.load(write_tiny(MODELS["llama4-5l-wide-every2"])) as model,
        model.context(swa_full=True, **EXACT) as context,
    ):
        rows = []
        for moved in (0, delta):
            context.memory.clear()
            context.decode(pykv.Batch(TOKENS[:20], pos=range(10, 30)))
            context.memory.seq_add(0, 0, -1, moved)
            context.decode(pykv.Batch(TOKENS[20:24], logits="all"))
            rows.append(np.array(context.logits))
        assert nmse(*rows) < 1e-9


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"{arch}.attention.sliding_window": 0}, r"sliding_window=0: not supported without a window"),
        ({"{arch}.expert_count": 0, "{arch}.expert_used_count": 0}, r"expert_count=0 must be at least 1"),
        ({"{arch}.rope.dimension_count": 8}, "heads of 16 and 16, 8 of them rotated"),
        ({"{arch}.interleave_moe_layer_step": None}, r"llama4\.interleave_moe_layer_step"),
        ({"{arch}.interleave_moe_layer_step": 1}, r"'blk\.0\.ffn_gate_shexp\.weight' \[32, 32\] is missing"),
        ({"{arch}.interleave_moe_layer_step": 0}, r"'blk\.1\.ffn_gate\.weight' \[32, 48\] is missing"),
    ],
)
def test_what_a_file_must_not_say(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    path = write_changed(MODELS["llama4-4l"], tmp_path / "a.gguf", keys)
    with pytest.raises(GGUFError, match=message):
        pykv.Model.load(path)
