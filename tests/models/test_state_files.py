"""Files of families with states that ask for what cannot be, or lack what they need, are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny import falcon_h1, jamba, lfm2, mamba, mamba2, qwen3next, rwkv7
from support.tiny.model import TinyFile
from support.tiny.writer import write_model

import pykv
from pykv.errors import GGUFError


@dataclass(frozen=True)
class Bad:
    """A tiny model with keys (without the architecture) and tensors replaced or, by None, removed."""

    model: TinyFile
    says: str
    keys: Mapping[str, Any] | None = None
    tensors: Mapping[str, np.ndarray | None] | None = None

    def write(self, path: Path) -> Path:
        hparams = {key.format(arch=self.model.arch): value for key, value in self.model.hparams().items()}
        hparams |= {f"{self.model.arch}.{key}": value for key, value in (self.keys or {}).items()}
        tensors = {k: v for k, v in (self.model.weights() | dict(self.tensors or {})).items() if v is not None}
        present = {key: value for key, value in hparams.items() if value is not None}
        return write_model(path, self.model.arch, present, tensors, self.model.n_vocab, self.model.pre)


def half(model: TinyFile, name: str) -> dict[str, np.ndarray]:
    return {name: model.weights()[name].astype(np.float16)}


MAMBA, MAMBA2, LFM2 = mamba.Mamba(n_layer=1), mamba2.Mamba2(n_layer=1), lfm2.Lfm2(n_layer=2, attention_layers=(1,))
QWEN, RWKV = qwen3next.Qwen3Next(n_layer=4), rwkv7.Rwkv7(n_layer=2)
JAMBA, FALCON = jamba.Jamba(n_layer=2), falcon_h1.FalconH1(n_layer=1)
NORMED = falcon_h1.FalconH1(n_layer=1, has_scan_norm=True)
EXTRA = np.zeros(4, np.float32)

BAD = {
    "no conv size": Bad(MAMBA, "mamba.ssm.conv_kernel", {"ssm.conv_kernel": None}),
    "conv of one": Bad(MAMBA, "mamba.ssm.conv_kernel=1 must be at least 2", {"ssm.conv_kernel": 1}),
    "decays in f16": Bad(MAMBA, "'blk.0.ssm_a' is f16, expected f32", tensors=half(MAMBA, "blk.0.ssm_a")),
    "kernel in f16": Bad(MAMBA2, "'blk.0.ssm_conv1d.weight' is f16", tensors=half(MAMBA2, "blk.0.ssm_conv1d.weight")),
    "no norm": Bad(MAMBA2, "'blk.0.ssm_norm.weight' .* is missing", tensors={"blk.0.ssm_norm.weight": None}),
    "heads of nothing": Bad(MAMBA2, "time_step_rank=5 must be a divisor of 128", {"ssm.time_step_rank": 5}),
    "groups of unequal size": Bad(MAMBA2, "group_count=3 must be a divisor of 4 heads", {"ssm.group_count": 3}),
    "other sizes": Bad(MAMBA2, r"'blk.0.ssm_in.weight' is \[64, 292, 1, 1\], expected", {"ssm.state_size": 8}),
    "short cache": Bad(LFM2, "shortconv.l_cache=1 must be at least 2", {"shortconv.l_cache": 1}),
    "another output": Bad(LFM2, "'dense_2.weight' is of a variant", tensors={"dense_2.weight": EXTRA}),
    "experts of lfm2moe": Bad(LFM2, "lfm2.expert_count: mixtures", {"expert_count": 4}),
    "no mixer norm": Bad(JAMBA, "'blk.0.ssm_b_norm.weight' .* is missing", tensors={"blk.0.ssm_b_norm.weight": None}),
    "no heads": Bad(FALCON, "layer 0: 0 KV heads", {"attention.head_count_kv": 0}),
    "heads of half a step": Bad(RWKV, "wkv.head_size=32 must be a multiple of 64", {"wkv.head_size": 32}),
    "shift of one": Bad(RWKV, "token_shift_count must be 2", {"token_shift_count": 1}),
    "no lerp": Bad(
        RWKV, "'blk.1.time_mix_lerp_fused.weight' .* is missing", tensors={"blk.1.time_mix_lerp_fused.weight": None}
    ),
    "experts of mamba": Bad(MAMBA, "mamba.expert_count: mixtures", {"expert_count": 4}),
    "experts of mamba2": Bad(MAMBA2, "mamba2.expert_count: mixtures", {"expert_count": 4}),
    "experts of rwkv7": Bad(RWKV, "rwkv7.expert_count: mixtures", {"expert_count": 4}),
    "experts of falcon-h1": Bad(FALCON, "falcon-h1.expert_count: mixtures", {"expert_count": 4}),
    "drafts of mamba": Bad(MAMBA, "mamba.nextn_predict_layers: such layers", {"nextn_predict_layers": 1}),
    "drafts of jamba": Bad(JAMBA, "jamba.nextn_predict_layers: such layers", {"nextn_predict_layers": 1}),
    "norm in f16": Bad(
        MAMBA2, "'blk.0.ssm_norm.weight' is f16, expected f32", tensors=half(MAMBA2, "blk.0.ssm_norm.weight")
    ),
    "norm of falcon-h1 in f16": Bad(
        NORMED, "'blk.0.ssm_norm.weight' is f16, expected f32", tensors=half(NORMED, "blk.0.ssm_norm.weight")
    ),
    "drafting layers": Bad(QWEN, "nextn_predict_layers: such layers are not supported", {"nextn_predict_layers": 1}),
    "older delta nets": Bad(QWEN, "'blk.0.ssm_in.weight' is of a variant", tensors={"blk.0.ssm_in.weight": EXTRA}),
    "keys without values": Bad(QWEN, "ssm.group_count=3 must be a divisor of 4", {"ssm.group_count": 3}),
    "values of another size": Bad(QWEN, "ssm.inner_size=60 must be 4 heads of 16", {"ssm.inner_size": 60}),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(GGUFError, match=BAD[name].says):
        pykv.Model.load(BAD[name].write(tmp_path / "bad.gguf")).close()


def test_layers_of_qwen3next_are_what_the_file_says(tmp_path: Path) -> None:
    """Without a list of layers every fourth one attends, or every so many as the file has it."""
    flags = Bad(QWEN, "", {"attention.recurrent_layers": [True, True, True, False]}).write(tmp_path / "flags.gguf")
    plain = QWEN.write(tmp_path / "plain.gguf")
    with pykv.Model.load(flags) as one, pykv.Model.load(plain) as other:
        specs = [model.architecture.is_delta for model in (one, other)]  # type: ignore[attr-defined]
    assert specs == [(True, True, True, False)] * 2
    wrong = Bad(QWEN, "", {"attention.recurrent_layers": [True, True]}).write(tmp_path / "wrong.gguf")
    with pytest.raises(GGUFError, match=r"attention\.recurrent_layers must hold one count for each of the 4 layers"):
        pykv.Model.load(wrong).close()
