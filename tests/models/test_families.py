"""Every family and option of tiny models against the naive forward pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.naive_llama import NaiveLlama
from support.nmse import nmse
from support.rewrite_gguf import rewrite
from support.tiny_gguf import TINY_MODELS, RopeScaling, TinyModel
from support.twin import EXACT, ORDER, ROUNDED, TOKENS, Twin

import pykv

MODELS = TINY_MODELS | {
    "llama-half-rotated": TinyModel(seed=40, rope_dim=16),
    "qwen2-half-rotated": TinyModel("qwen2", seed=41, has_bias=True, rope_dim=8),
    "one-layer": TinyModel(seed=42, n_layer=1),
    "factors-yarn": TinyModel(seed=43, has_rope_factors=True, rope_scaling=RopeScaling("yarn", 4.0, orig_ctx=128)),
}

SOME = ("llama-wide-heads", "llama-yarn-attn", "qwen2", "qwen3", "one-layer")

WAYS = {
    "exact": (EXACT, ORDER),
    "flash": ({"flash_attn": True, "n_threads": 1}, ROUNDED),
    "fused": ({"attention": "fused", "n_threads": 1}, ROUNDED),
    "grouped-f16": ({"flash_attn": False, "n_threads": 1}, ROUNDED),
    "streams": (EXACT | {"n_seq_max": 2, "kv_unified": False}, ORDER),
}


CASES = [(name, way) for way in WAYS for name in MODELS if way in ("exact", "flash", "fused") or name in SOME]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_rows_are_those_of_the_naive_forward(write_tiny: Callable[[TinyModel], Path], name: str, way: str) -> None:
    """A prompt in pieces, then token by token."""
    settings, most = WAYS[way]
    with (
        pykv.Model.load(write_tiny(MODELS[name])) as model,
        model.context(n_ctx=512, n_ubatch=16, **settings) as context,
    ):
        twin = Twin(context, MODELS[name], most)
        twin.decode(40)
        for _ in range(4):
            twin.decode(1)


class NaivePerLayer(NaiveLlama):
    """Repeats the KV heads of each layer until they are as many as the widest layer has."""

    def __init__(self, model: TinyModel, n_head_kv: list[int]) -> None:
        super().__init__(model)
        for il, n in enumerate(n_head_kv):
            for name in ("attn_k", "attn_v"):
                heads = self.weights[f"blk.{il}.{name}.weight"].reshape(model.n_head_kv, model.head_dim, -1)
                same = np.repeat(heads[:n], model.n_head_kv // n, axis=0)
                self.weights[f"blk.{il}.{name}.weight"] = same.reshape(-1, heads.shape[2])


@pytest.mark.parametrize("attention", ["fused", "flash", "matmul"])
def test_layers_may_have_different_numbers_of_kv_heads(tmp_path: Path, attention: str) -> None:
    """Where V is transposed, its rows are padded to the widest layer."""
    tiny, n_head_kv = TinyModel(seed=44, n_head_kv=4, n_layer=3), [1, 4, 2]
    fewer = {
        name: np.ascontiguousarray(values[: n_head_kv[int(name.split(".")[1])] * tiny.head_dim])
        for name, values in tiny.weights().items()
        if name.endswith(("attn_k.weight", "attn_v.weight"))
    }
    path = rewrite(tiny, tmp_path / "a.gguf", fewer, {"llama.attention.head_count_kv": n_head_kv})
    with pykv.Model.load(path) as model:
        assert model.hparams.n_head_kv_by_layer == (1, 4, 2)
        assert (model.hparams.n_head_kv, model.hparams.n_head) == (4, 4)
        told = {"attention": attention}
        for params in (told, told | {"n_seq_max": 2, "kv_unified": False}, {}):
            with model.context(n_ctx=512, n_ubatch=16, n_threads=1, **params) as context:
                assert context.memory.nbytes == model.memory_plan(n_ctx=512, n_ubatch=16, n_threads=1, **params).nbytes
                naive = NaivePerLayer(tiny, n_head_kv)
                for at, n in ((0, 30), (30, 1), (31, 1)):
                    context.decode(pykv.Batch(TOKENS[at : at + n], logits="all"))
                    assert nmse(context.logits, naive.decode(TOKENS[at : at + n])) <= ROUNDED


def test_a_one_layer_model_ended_the_process_when_no_rows_were_wanted(
    write_tiny: Callable[[TinyModel], Path],
) -> None:
    """Its graph stores and reads nothing, so no mask was ever given memory."""
    tiny = MODELS["one-layer"]
    with pykv.Model.load(write_tiny(tiny)) as model, model.context(n_ctx=256, **EXACT) as context:
        context.decode(pykv.Batch(TOKENS[:5], logits="none"))
        assert context.logits.shape == (0, tiny.n_vocab)
        context.decode(pykv.Batch(TOKENS[5:6]))
        assert nmse(context.logits, NaiveLlama(tiny).decode(TOKENS[:6])[-1:]) <= ORDER


@pytest.mark.parametrize(("n_ctx", "kind"), [(256, "short"), (512, "long")])
def test_factors_are_chosen_by_the_length_of_the_context(tmp_path: Path, n_ctx: int, kind: str) -> None:
    """As Phi-3 has them: one set up to the context of the first training, another one beyond."""
    tiny = TinyModel(seed=45, rope_scaling=RopeScaling("longrope", 1.0, orig_ctx=256), rope_base=5e5)
    factors = {
        "short": np.linspace(1, 2, tiny.n_rot // 2).astype(np.float32),
        "long": np.linspace(1, 9, tiny.n_rot // 2).astype(np.float32),
    }
    path = rewrite(tiny, tmp_path / "a.gguf", {f"rope_factors_{name}.weight": x for name, x in factors.items()})
    with pykv.Model.load(path) as model, model.context(n_ctx=n_ctx, **EXACT) as context:
        twin = Twin(context, tiny)
        twin.naive.weights["rope_freqs.weight"] = factors[kind].astype(np.float64)
        twin.decode(60)
        twin.decode(1)
