"""gpt-oss: what its memory is told, that sinks take part, and what of its files is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.changed_file import write_changed
from support.nmse import nmse
from support.tiny.gpt_oss import MODELS
from support.tiny.model import TinyFile

import pykv
from pykv.cells import SwaType, Window
from pykv.errors import GGUFError
from pykv.models import RopeRequest

Write = Callable[[TinyFile], Path]

EXACT = {"type_k": "f32", "type_v": "f32", "n_threads": 1, "n_ctx": 256, "n_ubatch": 32}
TOKENS = [int(t) for t in np.random.default_rng(9).integers(0, 256, 120)]
MODEL = MODELS["gpt-oss-4l-w32"]
UP_BIAS = "blk.1.ffn_up_exps.bias"


def rows_of(path: Path, **params: Any) -> np.ndarray:
    with pykv.Model.load(path) as model, model.context(**(EXACT | params)) as context:
        for at, n in ((0, 90), (90, 1), (91, 2)):
            context.decode(pykv.Batch(TOKENS[at : at + n], logits="all"))
        return np.array(context.logits)


def test_every_other_layer_has_the_window(write_tiny: Write) -> None:
    with pykv.Model.load(write_tiny(MODEL)) as model, model.context(**EXACT) as context:
        spec = context.memory.spec
        assert spec.window == Window(32, SwaType.STANDARD)
        assert [layer.is_swa for layer in spec.layers] == [True, False, True, False]
        assert {layer.rope.mode for layer in spec.layers} == {"neox"}


def test_a_caller_changes_the_frequencies_of_layers_without_a_window_alone(write_tiny: Write) -> None:
    rope = RopeRequest(freq_base=5000.0)
    with pykv.Model.load(write_tiny(MODEL)) as model, model.context(rope=rope, **EXACT) as context:
        assert [layer.rope.freq_base for layer in context.memory.spec.layers] == [150000.0, 5000.0] * 2


def test_paths_agree_on_sinks(write_tiny: Write, tmp_path: Path) -> None:
    """And without them, or with others, each head attends otherwise."""
    path = write_tiny(MODEL)
    base = rows_of(path, attention="matmul")
    assert nmse(rows_of(path, attention="flash"), base) < 1e-5
    assert nmse(rows_of(path, attention="fused"), base) < 5e-5
    name = "blk.1.attn_sinks.weight"
    others = write_changed(MODEL, tmp_path / "a.gguf", tensors={name: MODEL.weights()[name][::-1].copy()})
    assert nmse(rows_of(others, attention="matmul"), base) > 1e-4


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ({"{arch}.attention.sliding_window": None}, {}, r"gpt-oss\.attention\.sliding_window"),
        ({"{arch}.attention.sliding_window": 0}, {}, r"sliding_window=0 must be at least 1"),
        ({"{arch}.attention.value_length": 16}, {}, "heads of 32 and 16, 32 of them rotated"),
        ({"{arch}.rope.dimension_count": 16}, {}, "heads of 32 and 32, 16 of them rotated"),
        ({"{arch}.attention.key_length_swa": 16}, {}, "key_length_swa=16"),
        ({"{arch}.attention.sliding_window_pattern": [1, 0]}, {}, "must hold one flag for each of the 4 layers"),
        ({"{arch}.expert_count": None}, {}, r"expert_used_count=2 must be at most the 0 experts"),
        ({"{arch}.expert_used_count": 0}, {}, r"expert_used_count=0 must be at least 1"),
        ({}, {"blk.2.attn_sinks.weight": None}, r"'blk\.2\.attn_sinks\.weight' \[4\] is missing"),
        ({}, {"blk.0.ffn_up_exps.weight": None}, r"'blk\.0\.ffn_up_exps\.weight' \[64, 48, 4\] is missing"),
        ({}, {"output.weight": None}, r"'output\.weight'"),
        (
            {},
            {UP_BIAS: MODEL.weights()[UP_BIAS].astype(np.float16)},
            r"'blk\.1\.ffn_up_exps\.bias' is f16, expected f32",
        ),
    ],
)
def test_what_a_file_must_not_say(tmp_path: Path, keys: Any, tensors: Any, message: str) -> None:
    path = write_changed(MODEL, tmp_path / "a.gguf", keys, tensors)
    with pytest.raises(GGUFError, match=message):
        pykv.Model.load(path)
