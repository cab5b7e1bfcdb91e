"""Hyperparameters out of a file's keys; every damage is told by the key's name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pykv.errors import GGUFError, UnknownArchitectureError
from pykv.gguf import GGUFFile
from pykv.models import HParams, Keys, find_architecture
from pykv.models.hparams import refuse_experts, refuse_headless_layers
from pykv.models.llama import Llama

KEYS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
N_TENSORS = 3
MISSING = object()

Write = Callable[..., HParams]


@pytest.fixture
def read(tmp_path: Path) -> Write:
    """Write a file of these keys and read it; a value of `MISSING` leaves a key out."""

    def read(changes: dict[str, Any] | None = None, embedding: bool = True) -> HParams:
        writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "ignored")
        writer.kv_data[0].clear()
        for key, value in (KEYS | (changes or {})).items():
            if value is not MISSING:
                _add(writer, key, value)
        names = ["token_embd.weight", "a", "b"] if embedding else ["a"]
        for name in names:
            writer.add_tensor(name, np.zeros((7, 64), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with GGUFFile(tmp_path / "a.gguf") as file:
            hparams, keys = HParams.from_gguf(file), Keys(file)
            refuse_experts(keys)  # as the llama family does
            refuse_headless_layers(keys, hparams)
            return hparams

    return read


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, int) and not isinstance(value, bool) and value < 0:
        writer.add_int32(key, value)
    elif isinstance(value, np.float64):
        writer.add_float64(key, float(value))
    else:
        kinds[type(value)](key, value)


def test_what_a_file_need_not_say(read: Write) -> None:
    hp = read()
    assert (hp.architecture, hp.n_layer, hp.n_embd, hp.n_ctx_train) == ("llama", 2, 64, 128)
    assert hp.n_vocab == 7  # rows of the embedding
    assert (hp.n_head_by_layer, hp.n_head_kv_by_layer, hp.n_ff_by_layer) == ((4, 4), (4, 4), (96, 96))
    assert (hp.n_embd_head_k, hp.n_embd_head_v, hp.n_rot) == (16, 16, 16)
    assert hp.rope_freq_base == 10000.0
    assert hp.kq_scale == 0.25
    scaling = hp.rope_scaling
    assert (scaling.kind, scaling.freq_scale, scaling.n_ctx_orig, scaling.ext_factor) == ("linear", 1.0, 0, -1.0)
    assert (scaling.attn_factor, scaling.yarn_attn_factor, scaling.log_multiplier) == (1.0, 1.0, 0.0)
    assert (scaling.beta_fast, scaling.beta_slow) == (32.0, 1.0)


def test_what_a_file_may_say(read: Write) -> None:
    hp = read(
        {
            "llama.attention.head_count_kv": 2,
            "llama.attention.key_length": 32,
            "llama.attention.value_length": 8,
            "llama.attention.scale": 0.5,
            "llama.rope.dimension_count": 12,
            "llama.rope.freq_base": 5e5,
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 32,
            "llama.rope.scaling.attn_factor": 1.5,
            "llama.rope.scaling.yarn_ext_factor": 0.5,
            "llama.rope.scaling.yarn_beta_fast": 16.0,
            "llama.rope.scaling.yarn_log_multiplier": 0.25,
            "llama.expert_count": 0,
        }
    )
    assert (hp.n_head, hp.n_head_kv, hp.n_embd_head_k, hp.n_embd_head_v, hp.n_rot) == (4, 2, 32, 8, 12)
    assert (hp.kq_scale, hp.rope_freq_base) == (0.5, 5e5)
    scaling = hp.rope_scaling
    assert (scaling.kind, scaling.freq_scale, scaling.n_ctx_orig) == ("yarn", 0.25, 32)
    assert (scaling.attn_factor, scaling.ext_factor, scaling.beta_fast, scaling.log_multiplier) == (1.5, 0.5, 16, 0.25)


def test_an_older_name_of_the_factor(read: Write) -> None:
    assert read({"llama.rope.scale_linear": 2.0}).rope_scaling.freq_scale == 0.5
    both = {"llama.rope.scale_linear": 2.0, "llama.rope.scaling.factor": 8.0}
    assert read(both).rope_scaling.freq_scale == 0.125


def test_counts_of_each_layer(read: Write) -> None:
    hp = read(
        {
            "llama.attention.head_count": [4, 8],
            "llama.attention.head_count_kv": [2, 1],
            "llama.feed_forward_length": [96, 64],
        }
    )
    assert (hp.n_head_by_layer, hp.n_head_kv_by_layer, hp.n_ff_by_layer) == ((4, 8), (2, 1), (96, 64))
    assert (hp.n_head, hp.n_head_kv) == (8, 2)
    assert hp.n_embd_head_k == 16


def test_an_integer_serves_as_a_float(read: Write) -> None:
    assert read({"llama.rope.freq_base": 20000}).rope_freq_base == 20000.0


@pytest.mark.parametrize("key", [key for key in KEYS if key != "general.architecture"])
def test_a_missing_key_is_named(read: Write, key: str) -> None:
    with pytest.raises(GGUFError, match=f"the key '{key}' is missing"):
        read({key: MISSING})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("context_length", "128", "holds str, expected int"),
        ("context_length", 128.0, "holds float, expected int"),
        ("context_length", True, "holds bool, expected int"),
        ("context_length", [1, 2], "holds ndarray, expected int"),
        ("context_length", 0, "context_length=0 must be at least 1"),
        ("embedding_length", -64, "embedding_length=-64 must be at least 1"),
        ("embedding_length", 2**31, "embedding_length=2147483648"),
        ("embedding_length", 2, "attention.key_length=0 must be at least 1"),
        ("block_count", 0, "block_count=0"),
        ("block_count", 2**31 - 1, "block_count=2147483647 layers cannot be made of 3 tensors"),
        ("attention.head_count", 0, "0 KV heads cannot serve 0 query heads"),
        ("attention.head_count", [4], "head_count must hold one count for each of the 2 layers"),
        ("attention.head_count", [4, -4], "head_count must hold one count for each"),
        ("attention.head_count", [4.0, 4.0], "head_count must hold one count for each"),
        ("attention.head_count", ["4", "4"], "head_count' holds list, expected int"),
        ("attention.head_count_kv", 3, "layer 0: 3 KV heads cannot serve 4 query heads"),
        ("attention.head_count_kv", 8, "layer 0: 8 KV heads cannot serve 4 query heads"),
        ("attention.head_count_kv", [2, 0], "layer 1: 0 KV heads cannot serve 4 query heads"),
        ("attention.layer_norm_rms_epsilon", "small", "holds str, expected float"),
        ("attention.layer_norm_rms_epsilon", -1.0, r"layer_norm_rms_epsilon=-1\.0 must be a positive number"),
        ("attention.scale", -1.0, r"attention.scale=-1\.0 must be a positive number"),
        ("rope.dimension_count", 15, "dimension_count=15 must be even and at most 16"),
        ("rope.dimension_count", 18, "dimension_count=18 must be even and at most 16"),
        ("rope.freq_base", 0.0, r"freq_base=0\.0 must be a positive number"),
        ("rope.freq_base", math.nan, "freq_base=nan must be a positive number"),
        ("rope.scaling.factor", -2.0, r"scaling.factor=-2\.0 must be a positive number"),
        ("rope.scaling.factor", math.inf, "scaling.factor=inf"),
        ("rope.scaling.type", "su", "scaling.type='su' is unknown"),
        ("rope.scaling.type", 1, "holds int, expected str"),
        ("expert_count", 8, "mixtures of experts are not supported"),
    ],
)
def test_values_that_cannot_be(read: Write, key: str, value: Any, message: str) -> None:
    with pytest.raises(GGUFError, match=message):
        read({f"llama.{key}": value})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.causal", False, r"llama\.attention\.causal=False: attention to later tokens is not supported"),
        ("attention.causal", 0, "holds int, expected bool"),
        ("pooling_type", 3, r"llama\.pooling_type=3: pooled embeddings are not supported; accepted: 0"),
        ("pooling_type", "mean", "holds str, expected int"),
    ],
)
def test_embedding_models_were_run_as_if_they_were_causal(read: Write, key: str, value: Any, message: str) -> None:
    with pytest.raises(GGUFError, match=message):
        read({f"llama.{key}": value})
    assert read({"llama.attention.causal": True, "llama.pooling_type": 0}) == read()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64(1e39)])
@pytest.mark.parametrize(
    "key",
    [
        "attention.layer_norm_rms_epsilon",
        "attention.scale",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.factor",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_log_multiplier",
    ],
)
def test_logits_were_nan_where_a_key_was_no_finite_number(read: Write, key: str, value: float) -> None:
    with pytest.raises(GGUFError, match=re.escape(f"llama.{key}={value}")):
        read({f"llama.{key}": value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.factor", 1e-44),
        ("rope.scaling.factor", 1e-10),
        ("rope.scaling.factor", 1e10),
        ("rope.scale_linear", 1e-44),
        ("rope.freq_base", 1e-44),
        ("rope.freq_base", 0.5),
        ("attention.layer_norm_rms_epsilon", np.float64(1e-50)),
        ("rope.scaling.yarn_beta_fast", -1.0),
        ("rope.scaling.yarn_beta_slow", -1.0),
    ],
)
def test_logits_were_nan_where_a_key_was_absurd(read: Write, key: str, value: float) -> None:
    """The reciprocal overflows, or positions times it do, or a logarithm of it is none."""
    with pytest.raises(GGUFError, match=rf"llama\.{key}=.* must be"):
        read({f"llama.{key}": value})


@pytest.mark.parametrize("value", [0, 2**31, 2**32 - 1])
def test_a_size_that_was_too_large_was_told_to_be_at_least_1(read: Write, value: int) -> None:
    with pytest.raises(GGUFError, match=f"context_length={value} must be at least 1 and at most 2147483647"):
        read({"llama.context_length": value})


def test_no_embedding_no_vocabulary(read: Write) -> None:
    with pytest.raises(GGUFError, match=r"the tensor 'token_embd\.weight' is missing"):
        read({"llama.block_count": 1}, embedding=False)


def test_unknown_families_are_refused_with_those_there_are() -> None:
    with pytest.raises(UnknownArchitectureError, match=r"'clip' is not supported; known: bloom, deepseek2, .*qwen3"):
        find_architecture("clip")
    assert find_architecture("llama") is Llama
