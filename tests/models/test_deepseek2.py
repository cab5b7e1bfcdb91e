"""DeepSeek 2: what is stored, files of both kinds, and what of them is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.changed_file import write_changed
from support.nmse import nmse
from support.tiny.deepseek2 import MODELS, DeepSeek2
from support.tiny.model import TinyFile

import pykv
from pykv.errors import GGUFError
from pykv.ggml import RopeParams
from pykv.memory import LayerSpec

Write = Callable[[TinyFile], Path]

EXACT = {"type_k": "f32", "type_v": "f32", "flash_attn": False, "n_threads": 1, "n_ctx": 256, "n_ubatch": 32}
TOKENS = [int(t) for t in np.random.default_rng(9).integers(0, 256, 200)]


def rows_of(path: Path, n: int = 60, **params: Any) -> np.ndarray:
    """Return the logits of a prompt."""
    with pykv.Model.load(path) as model, model.context(**(EXACT | params)) as context:
        context.decode(pykv.Batch(TOKENS[:n], logits="all"))
        return np.array(context.logits)


def test_one_short_key_per_token_is_stored(write_tiny: Write) -> None:
    """32 + 16 elements in each of 3 layers."""
    with pykv.Model.load(write_tiny(MODELS["deepseek2-3l"])) as model:
        with model.context(**EXACT) as context:
            rope = RopeParams(16, "norm", n_ctx_orig=2048)
            assert context.memory.spec.layers == (LayerSpec(1, 48, 32, rope, rope_at=32, k_only=True),) * 3
            assert context.memory.nbytes == model.memory_plan(**EXACT).nbytes == 3 * 256 * 48 * 4
        assert model.memory_plan(**(EXACT | {"type_k": "f16", "type_v": "f16"})).nbytes == 3 * 256 * 48 * 2


def unabsorbed(model: DeepSeek2) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any] | None]]:
    """Return the keys and tensors by which older files say the same."""
    tensors: dict[str, np.ndarray[Any, Any] | None] = {}
    for name, values in model.weights().items():
        if name.endswith("attn_k_b.weight"):
            both = [np.swapaxes(values, 1, 2), model.weights()[name.replace("_k_b", "_v_b")]]
            tensors[name.replace("_k_b", "_kv_b")] = np.concatenate(both, axis=1).reshape(-1, model.kv_rank)
            tensors[name] = tensors[name.replace("_k_b", "_v_b")] = None
    head = {"key_length": model.nope_dim + model.rope_dim, "value_length": model.v_dim, "head_count_kv": model.n_head}
    keys = {f"{{arch}}.attention.{name}": value for name, value in head.items()}
    return keys | dict.fromkeys(("{arch}.attention.key_length_mla", "{arch}.attention.value_length_mla")), tensors


@pytest.mark.parametrize("name", ["deepseek2-4l-qrank", "deepseek2-3l-yarn"])
def test_older_files_mean_the_same(write_tiny: Write, tmp_path: Path, name: str) -> None:
    """K and V of every head are stored there."""
    model = MODELS[name]
    older = write_changed(model, tmp_path / "older.gguf", *unabsorbed(model))
    assert nmse(rows_of(older), rows_of(write_tiny(model))) < 1e-10
    with pykv.Model.load(older) as loaded, loaded.context(**EXACT) as context:
        layer = context.memory.spec.layers[0]
        assert (layer.n_head_kv, layer.n_embd_head_k, layer.n_embd_head_v, layer.rope_at) == (4, 32, 24, 16)
        assert not layer.k_only


@pytest.mark.parametrize("way", ["exact", "flash", "fused", "q8_0", "unabsorbed"])
@pytest.mark.parametrize("delta", [25, -7])
def test_a_conversation_that_was_moved_goes_on_as_if_it_had_not(write_tiny: Write, way: str, delta: int) -> None:
    """Distances are what counts, and they are the same."""
    name = {"unabsorbed": "deepseek2-3l-unabsorbed", "q8_0": "deepseek2-2l-wide-v3"}.get(way, "deepseek2-3l-yarn")
    params = {
        "flash": {"flash_attn": True, "type_k": "f16", "type_v": "f16"},
        "fused": {"attention": "fused", "flash_attn": "auto", "type_k": "f16", "type_v": "f16"},
        "q8_0": {"flash_attn": True, "type_k": "q8_0", "type_v": "q8_0"},
    }.get(way, {})
    most = {"exact": 1e-9, "unabsorbed": 1e-3, "q8_0": 5e-3}.get(way, 1e-4)
    with pykv.Model.load(write_tiny(MODELS[name])) as model, model.context(**(EXACT | params)) as context:
        start = 10 if way != "unabsorbed" else 55  # its queries grow at every 50th position
        rows = []
        for moved in (0, delta if way != "unabsorbed" else 20 if delta > 0 else -5):
            context.memory.clear()
            context.decode(pykv.Batch(TOKENS[:20], pos=range(start, start + 20)))
            context.memory.seq_add(0, 0, -1, moved)
            context.decode(pykv.Batch(TOKENS[20:24], logits="all"))
            assert context.memory.pos_max(0) == start + moved + 23
            rows.append(np.array(context.logits))
        assert nmse(*reversed(rows)) <= most
        context.memory.check()


@pytest.mark.parametrize("attention", ["matmul", "flash", "fused"])
def test_all_attention_is_seen_where_it_is_observed(write_tiny: Write, attention: str) -> None:
    """Each head of each query gives 1 in all; also in the last layer, where no row is wanted."""
    params = EXACT | {"attention": attention, "flash_attn": "auto", "type_k": "f16", "type_v": "f16"}
    with (
        pykv.Model.load(write_tiny(MODELS["deepseek2-3l"])) as model,
        model.context(**params) as context,
        context.observe() as observer,
    ):
        for tokens, logits in ((TOKENS[:20], "none"), (TOKENS[20:21], "last")):
            context.decode(pykv.Batch(tokens, logits=logits))
            (seen,) = observer
            assert list(seen.mass) == [0, 1, 2]
            assert all(mass.sum() == pytest.approx(4 * len(tokens), rel=1e-3) for mass in seen.mass.values())


NEXTN = "{arch}.nextn_predict_layers"
MLA = "{arch}.attention.key_length_mla"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({NEXTN: 1}, r"deepseek2\.nextn_predict_layers"),
        (
            {MLA: None},
            r"deepseek2\.attention\.key_length_mla=0 and deepseek2\.attention\.value_length_mla=24 go together",
        ),
        ({MLA: 16}, "heads of 16 must be longer than 16 rotated elements"),
        (
            {"{arch}.attention.key_length": 64},
            r"layer 0: KV heads, K and V elements \(1, 64, 32\) must be \(1, 48, 32\)",
        ),
        ({"{arch}.attention.q_lora_rank": None}, r"deepseek2\.attention\.q_lora_rank"),
        ({"{arch}.attention.kv_lora_rank": 16}, r"must be \(1, 32, 16\)"),
        ({"{arch}.attention.kv_lora_rank": 2**31 - 1}, r"a\.gguf: .*kv_lora_rank=2147483647 must be at most the 48 el"),
        ({"{arch}.expert_gating_func": 4}, r"expert_gating_func=4 must be one of \[1, 2, 3\]"),
        ({"{arch}.expert_used_count": 5}, "expert_used_count=5 must be at most the 4 experts"),
        ({"{arch}.expert_group_count": 3}, "expert_group_count=3 must be equal parts of 4 experts"),
        (
            {"{arch}.expert_group_count": 4},
            "expert_group_count=4 must be equal parts of 4 experts, two or more in each",
        ),
        (
            {"{arch}.expert_group_count": 2, "{arch}.expert_group_used_count": 2},
            "expert_group_used_count=2 must be fewer than the 2 groups",
        ),
        (
            {"{arch}.expert_shared_count": 2},
            r"'blk\.1\.ffn_gate_shexp\.weight' is \[64, 32, 1, 1\], expected \[64, 64\]",
        ),
        ({"{arch}.attention.temperature_scale": 0.1}, r"deepseek2\.attention\.temperature_length"),
    ],
)
def test_what_a_file_must_not_say(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    path = write_changed(MODELS["deepseek2-3l"], tmp_path / "a.gguf", keys)
    with pytest.raises(GGUFError, match=message):
        pykv.Model.load(path)


def test_small_models_need_not_tell_of_the_bottleneck(write_tiny: Write) -> None:
    """Nor is it looked for: 27 layers have none."""
    assert np.isfinite(rows_of(write_tiny(MODELS["deepseek2-27l-lite"]), 5)).all()


def test_files_that_do_not_name_the_gating_mean_softmax(write_tiny: Write, tmp_path: Path) -> None:
    model = MODELS["deepseek2-3l"]
    silent = write_changed(model, tmp_path / "a.gguf", {"{arch}.expert_gating_func": None})
    assert np.array_equal(rows_of(silent), rows_of(write_tiny(model)))


def test_groups_limit_the_choice(tmp_path: Path, write_tiny: Write) -> None:
    model = MODELS["deepseek2-3l-groups-merged"]
    free = write_changed(model, tmp_path / "a.gguf", {"{arch}.expert_group_count": None})
    assert nmse(rows_of(free), rows_of(write_tiny(model))) > 1e-4
