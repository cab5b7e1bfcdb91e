"""Gemma 2, 3 and 3n: logits against numpy, what their memory is told, and what of their files is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.naive_gemma import Model, naive_gemma
from support.nmse import nmse
from support.tiny import gemma2, gemma3, gemma3n
from support.tiny.model import TinyFile
from support.twin import EXACT

import pykv
from pykv.cells import NO_WINDOW, SwaType, Window
from pykv.errors import GGUFError
from pykv.memory import MemorySpec
from pykv.models import RopeRequest

Write = Callable[[TinyFile], Path]

F32 = {
    name: model
    for models in (gemma2.MODELS, gemma3.MODELS, gemma3n.MODELS)
    for name, model in models.items()
    if model.matrices == "f32"
} | {
    "gemma3-all-windowed": gemma3.Gemma3(seed=4, n_layer=2, n_swa=16, pattern=0),
    "gemma3-none-windowed": gemma3.Gemma3(seed=4, n_layer=2, n_swa=16, pattern=1),
}

TOKENS = [int(t) for t in np.random.default_rng(31).integers(0, 256, 120)]

TOLERANCE = 5e-6
"""NMSE in f32. ggml looks gelu up in a table of f16, which numpy does not; measured at most 1.1e-6."""


def spec_of(path: Path, **params: Any) -> MemorySpec:
    with pykv.Model.load(path) as model, model.context(n_ctx=256, n_threads=1, **params) as context:
        return context.memory.spec


@pytest.mark.parametrize("name", list(F32))
def test_rows_are_those_of_the_naive_forward(write_tiny: Write, name: str) -> None:
    """A prompt longer than the window, in pieces, then token by token."""
    model: Model = F32[name]
    expected = naive_gemma(model, TOKENS)
    with pykv.Model.load(write_tiny(model)) as loaded, loaded.context(n_ctx=256, n_ubatch=32, **EXACT) as context:
        context.decode(pykv.Batch(TOKENS[:115], logits="all"))
        rows = [np.array(context.logits)]
        for token in TOKENS[115:]:
            context.decode(pykv.Batch([token]))
            rows.append(np.array(context.logits))
        context.memory.check()
    assert nmse(np.concatenate(rows), expected) <= TOLERANCE


@pytest.mark.parametrize(
    ("model", "dense"),
    [
        (gemma2.MODELS["gemma2-4l-w32"], {1, 3}),
        (gemma3.MODELS["gemma3-7l-w32"], {5}),
        (gemma3.MODELS["gemma3-4l-w16-every2"], {1, 3}),
        (gemma3.MODELS["gemma3-6l-wide-w64-list"], {2, 5}),
        (gemma3n.MODELS["gemma3n-22l-w32-f32"], {4, 9, 14, 19}),
    ],
    ids=["gemma2", "gemma3", "gemma3-every2", "gemma3-list", "gemma3n"],
)
def test_all_layers_but_these_have_the_window(write_tiny: Write, model: Any, dense: set[int]) -> None:
    spec = spec_of(write_tiny(model))
    assert {il for il, layer in enumerate(spec.layers) if not layer.is_swa} == dense
    assert spec.window == Window(model.n_swa, SwaType.STANDARD)


def test_a_file_without_a_window_has_one_kind_of_layer(write_tiny: Write) -> None:
    spec = spec_of(write_tiny(gemma3.MODELS["gemma3-2l-no-window"]))
    assert spec.window == NO_WINDOW
    assert not any(layer.is_swa for layer in spec.layers)


@pytest.mark.parametrize("every", [0, 1], ids=["all", "none"])
def test_a_pattern_may_leave_one_kind_of_layer(write_tiny: Write, every: int) -> None:
    """Where none has the window, none must be given it."""
    model = gemma3.Gemma3(seed=4, n_layer=2, n_swa=16, pattern=every)
    spec = spec_of(write_tiny(model))
    assert [layer.is_swa for layer in spec.layers] == [every == 0] * 2
    assert spec.window == (Window(16, SwaType.STANDARD) if every == 0 else NO_WINDOW)


def test_a_caller_turns_only_layers_without_a_window(write_tiny: Write) -> None:
    path = write_tiny(gemma3.MODELS["gemma3-3l-w16-linear"])

    def turns(**params: Any) -> list[tuple[float, float]]:
        ropes = [layer.rope for layer in spec_of(path, **params).layers]
        return [(rope.freq_base, rope.freq_scale) for rope in ropes if rope is not None]

    assert turns() == [(10000.0, 1.0)] * 2 + [(1e6, 1 / 8)]
    assert turns(rope=RopeRequest(freq_base=5e5, freq_scale=0.5)) == [(10000.0, 1.0)] * 2 + [(5e5, 0.5)]


def test_last_layers_read_the_last_of_their_kind(write_tiny: Write) -> None:
    spec = spec_of(write_tiny(gemma3n.MODELS["gemma3n-25l-wide-w16"]))
    assert spec.reuse == {20: 18, 21: 18, 22: 18, 23: 18, 24: 19}


def test_a_prompt_without_outputs_stores_all_that_later_tokens_read(write_tiny: Write) -> None:
    rows = []
    with pykv.Model.load(write_tiny(gemma3n.MODELS["gemma3n-22l-w32-f32"])) as model:
        for wanted in (True, False):
            with model.context(n_ctx=256, n_ubatch=32, **EXACT) as context:
                context.decode(pykv.Batch(TOKENS[:70], logits=[wanted] * 70))
                context.decode(pykv.Batch(TOKENS[70:72], logits="all"))
                rows.append(np.array(context.logits))
    assert np.array_equal(*rows)


def test_a_layer_that_stores_nothing_is_observed_without_outputs(write_tiny: Write) -> None:
    with (
        pykv.Model.load(write_tiny(gemma3n.MODELS["gemma3n-22l-w32-f32"])) as model,
        model.context(n_ctx=256, n_threads=1) as context,
        context.observe([21]) as observer,
    ):
        context.decode(pykv.Batch(TOKENS[:20], logits=[False] * 20))
        assert len(list(observer)) == 1


def test_cells_know_the_tokens_whose_embeddings_each_layer_takes(write_tiny: Write) -> None:
    """So that what a layer was told of a cell can be looked up again; rows that are no tokens have none."""
    model = gemma3n.MODELS["gemma3n-22l-w32-f32"]
    rows = np.random.default_rng(2).standard_normal((3, model.n_embd)).astype(np.float32)
    with pykv.Model.load(write_tiny(model)) as loaded, loaded.context(n_ctx=256, n_threads=1) as context:
        context.decode(pykv.Batch(TOKENS[:20]))
        context.decode(pykv.Batch(None, pos=[20, 21, 22], embd=rows))
        for half in context.memory.parts:
            assert half.cells().token[:23].tolist() == TOKENS[:20] + [-1] * 3


@pytest.mark.parametrize(("kind", "n_layer"), [(gemma2.Gemma2, 46), (gemma3.Gemma3, 62)])
def test_queries_of_the_largest_are_scaled_by_the_width_of_the_model(
    write_tiny: Write, kind: type[Model], n_layer: int
) -> None:
    small = {"n_embd": 32, "n_head": 2, "n_head_kv": 1, "head_dim": 4, "n_ff": 16}
    for layers, scale in ((n_layer, (32 // 2) ** -0.5), (2, 4**-0.5)):
        with pykv.Model.load(write_tiny(kind(seed=9, n_layer=layers, **small))) as model:
            assert model.architecture.attention_scale == pytest.approx(scale)  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class OtherGemma3(gemma3.Gemma3):
    """A file with other keys."""

    key: str = ""
    value: Any = None

    def hparams(self) -> dict[str, Any]:
        return super().hparams() | {f"gemma3.{self.key}": self.value}


@dataclass(frozen=True, kw_only=True)
class OtherGemma3n(gemma3n.Gemma3n):
    """A file with other keys."""

    key: str = ""
    value: Any = None

    def hparams(self) -> dict[str, Any]:
        return super().hparams() | {f"gemma3n.{self.key}": self.value}


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("attention.key_length_swa", 16, "key_length_swa=16"),
        ("rope.freq_base_swa", 0.5, "freq_base_swa=0.5 must be at least 1"),
        ("final_logit_softcapping", -1.0, "final_logit_softcapping=-1"),
        ("expert_count", 4, "expert_count"),
    ],
)
def test_keys_that_ask_for_more_are_refused_by_name(write_tiny: Write, key: str, value: Any, told: str) -> None:
    with pytest.raises(GGUFError, match=told):
        pykv.Model.load(write_tiny(OtherGemma3(seed=5, n_layer=2, key=key, value=value)))


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("altup.active_idx", 1, r"altup\.active_idx=1 must be 0"),
        ("attention.shared_kv_layers", 21, "shared_kv_layers=21 must be at most 20"),
        ("attention.shared_kv_layers", 4, "layer 19 cannot read layer 17: only one of them has a window"),
        ("altup.num_inputs", 3, "altup_proj"),
    ],
)
def test_what_gemma3n_does_not_have_is_refused_by_name(write_tiny: Write, key: str, value: Any, told: str) -> None:
    with pytest.raises(GGUFError, match=told):
        pykv.Model.load(write_tiny(OtherGemma3n(seed=5, n_layer=22, key=key, value=value)))


def test_a_missing_tensor_is_named(write_tiny: Write) -> None:
    class WithoutNorm(gemma3.Gemma3):
        def tensors(self) -> dict[str, tuple[int, ...]]:
            return {name: ne for name, ne in super().tensors().items() if name != "blk.1.attn_k_norm.weight"}

    with pytest.raises(GGUFError, match=r"blk\.1\.attn_k_norm\.weight"):
        pykv.Model.load(write_tiny(WithoutNorm(seed=6, n_layer=2)))


def test_a_pattern_of_another_length_is_refused(write_tiny: Write) -> None:
    class Short(gemma3.Gemma3):
        @property
        def windowed(self) -> list[bool]:
            return [True, False]

    with pytest.raises(GGUFError, match="sliding_window_pattern must hold one flag for each of the 3 layers"):
        pykv.Model.load(write_tiny(Short(seed=7, n_layer=3, has_layer_list=True)))


def test_a_tied_output_may_be_a_matrix_of_its_own(write_tiny: Write) -> None:
    class WithOutput(gemma3.Gemma3):
        def tensors(self) -> dict[str, tuple[int, ...]]:
            return super().tensors() | {"output.weight": (self.n_vocab, self.n_embd)}

    shape: dict[str, Any] = {"seed": 8, "n_layer": 2, "n_swa": 16, "pattern": 2}
    rows = []
    for model in (gemma3.Gemma3(**shape), WithOutput(**shape)):
        with pykv.Model.load(write_tiny(model)) as loaded, loaded.context(n_ctx=256, n_threads=1) as context:
            context.decode(pykv.Batch(TOKENS[:5]))
            rows.append(np.array(context.logits))
    assert nmse(rows[1], rows[0]) > 0.1
