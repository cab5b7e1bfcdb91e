"""The tiny files that tests of all architectures share: small, repeatable, and varied enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.tiny.model import TinyFile
from support.tiny.registry import BY_ARCH, BY_NAME
from support.tiny.routing import route_by_token
from support.tiny.values import draw
from support.tiny_gguf import TinyModel

N_BYTES_MOST = {"gemma3n": 10_000_000}
"""Sizes that llama.cpp fixes make this one larger than the others."""


@pytest.mark.parametrize("arch", list(BY_ARCH))
def test_each_architecture_varies_layers_and_shapes(arch: str) -> None:
    models = BY_ARCH[arch].values()
    assert {model.arch for model in models} == {arch}
    assert len({model.n_layer for model in models}) >= 2
    assert len({_first_layer(model) for model in models}) >= 2
    assert {model.matrices for model in models} == {"f32", "f16"}


def _first_layer(model: TinyFile) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, shape) for name, shape in model.tensors().items() if name.startswith("blk.0."))


@pytest.mark.parametrize("arch", list(BY_ARCH))
def test_file_holds_the_weights_in_their_types(arch: str, tmp_path: Path) -> None:
    for name, model in BY_ARCH[arch].items():
        if model.matrices != "f16":
            continue
        path = model.write(tmp_path / f"{name}.gguf")
        assert path.stat().st_size < N_BYTES_MOST.get(arch, 2_000_000)
        reader, weights = gguf.GGUFReader(str(path)), model.weights()
        assert reader.fields["general.architecture"].contents() == arch
        assert {tensor.name for tensor in reader.tensors} == set(weights)
        for tensor in reader.tensors:
            expected = weights[tensor.name]
            assert tensor.data.dtype == expected.dtype
            assert np.array_equal(tensor.data.reshape(expected.shape), expected)
            if expected.ndim == 1 or "norm" in tensor.name:
                assert tensor.data.dtype == np.float32


def test_files_are_small() -> None:
    for name, model in BY_NAME.items():
        n_bytes = sum(values.nbytes for values in model.weights().values())
        assert n_bytes < N_BYTES_MOST.get(model.arch, 2_000_000), name


def test_values_depend_on_seed_name_and_shape_only() -> None:
    small, deep = TinyModel(seed=7).weights(), TinyModel(seed=7, n_layer=3, has_bias=True).weights()
    assert all(np.array_equal(values, deep[name]) for name, values in small.items())
    assert not np.array_equal(draw(7, "token_embd.weight", (4, 8)), draw(8, "token_embd.weight", (4, 8)))


def test_f16_is_the_same_model_rounded() -> None:
    model = BY_NAME["gemma3-4l-w16-every2"]
    exact, rounded = model.weights(), replace(model, matrices="f16").weights()
    assert all(np.array_equal(values.astype(rounded[name].dtype), rounded[name]) for name, values in exact.items())


def test_decays_cover_short_and_long_memories() -> None:
    weights = BY_NAME["mamba2-4l"].weights()
    step = np.log1p(np.exp(weights["blk.0.ssm_dt.bias"]))
    assert step.min() == pytest.approx(0.01, rel=1e-4)
    assert step.max() == pytest.approx(0.3, rel=1e-4)
    rates = weights["blk.0.ssm_a"]
    assert rates.min() == pytest.approx(-4.0)
    assert rates.max() == pytest.approx(-0.2)


@pytest.mark.parametrize(("n_expert", "n_used"), [(4, 1), (4, 2), (8, 3)])
def test_router_is_decided_by_the_token(n_expert: int, n_used: int) -> None:
    shapes = {
        "token_embd.weight": (40, 64),
        "blk.3.ffn_gate_inp.weight": (n_expert, 64),
        "blk.3.ffn_down.weight": (64, 16),
    }
    weights = {name: draw(1, name, shape) for name, shape in shapes.items()}
    route_by_token(weights, n_expert, n_used)
    added = 4.0 * np.random.default_rng(1).standard_normal((40, 16)) @ weights["blk.3.ffn_down.weight"].T
    logits = (weights["token_embd.weight"] + added) @ weights["blk.3.ffn_gate_inp.weight"].T
    best = np.sort(logits, axis=1)[:, ::-1]
    assert (best[:, n_used - 1] - best[:, n_used]).min() > 1.0
    chosen = logits.argsort(axis=1)[:, -n_used:]
    assert len({tuple(sorted(row)) for row in chosen}) == n_expert
