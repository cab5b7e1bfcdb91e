"""MPT and BLOOM: what their memory is told, and what of their files is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.changed_file import write_changed
from support.tiny import bloom, mpt
from support.tiny.model import TinyFile

import pykv
from pykv.errors import BatchError, GGUFError, ShiftUnsupported
from pykv.memory import MemorySpec

Write = Callable[[TinyFile], Path]


def spec_of(path: Path) -> MemorySpec:
    with pykv.Model.load(path) as model, model.context(n_ctx=256, n_threads=1) as context:
        return context.memory.spec


@pytest.mark.parametrize(
    ("model", "bias", "absolute"),
    [
        (mpt.MODELS["mpt-3l-4heads"], 8.0, False),
        (mpt.MODELS["mpt-2l-wide-6heads-clamp"], 4.0, False),
        (mpt.MODELS["mpt-2l-positions"], 0.0, True),
        (bloom.MODELS["bloom-3l-4heads"], 8.0, False),
    ],
    ids=["mpt", "mpt-6heads", "mpt-positions", "bloom"],
)
def test_positions_are_slopes_or_learned(write_tiny: Write, model: TinyFile, bias: float, absolute: bool) -> None:
    spec = spec_of(write_tiny(model))
    assert (spec.alibi_max_bias, spec.absolute_positions) == (bias, absolute)
    assert all(layer.rope is None for layer in spec.layers)
    assert bool(spec.can_shift) is not absolute


def test_learned_positions_end_where_the_table_ends(write_tiny: Write) -> None:
    """A token behind the last row of the table would end the process inside ggml."""
    model = replace(mpt.MODELS["mpt-2l-positions"], n_ctx_train=40)
    with pykv.Model.load(write_tiny(model)) as loaded, loaded.context(n_ctx=256, n_threads=1) as context:
        with pytest.raises(BatchError, match=r"pos must lie in \[0, 40\), got 40"):
            context.decode(pykv.Batch([1], pos=[40]))
        context.decode(pykv.Batch([1] * 39))
        with pytest.raises(BatchError, match="would pass the largest position 39"):
            context.decode(pykv.Batch([1, 2]))
        assert context.memory.pos_max(0) == 38
        context.decode(pykv.Batch([1]))
        with pytest.raises(ShiftUnsupported, match="embeddings"):
            context.memory.seq_add(0, 0, -1, -1)
        assert (context.memory.pos_min(0), context.memory.pos_max(0)) == (0, 39)


class WithMore(mpt.Mpt):
    """A file with a tensor of a variant of the family."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        return super().tensors() | {"blk.1.attn_q_norm.weight": (self.n_embd,)}


def test_norms_of_queries_are_refused_by_name(write_tiny: Write) -> None:
    with pytest.raises(GGUFError, match="attn_q_norm"):
        pykv.Model.load(write_tiny(WithMore(seed=3)))


@pytest.mark.parametrize("model", [mpt.MODELS["mpt-3l-4heads"], bloom.MODELS["bloom-3l-4heads"]], ids=["mpt", "bloom"])
@pytest.mark.parametrize("key", ["expert_count", "nextn_predict_layers"])
def test_experts_were_left_out(tmp_path: Path, model: TinyFile, key: str) -> None:
    path = write_changed(model, tmp_path / "a.gguf", {f"{{arch}}.{key}": 4})
    with pytest.raises(GGUFError, match=f"{model.arch}.{key}: .* not supported"):
        pykv.Model.load(path)


def test_slopes_of_zero_made_nan_of_what_is_masked(write_tiny: Write) -> None:
    with pytest.raises(GGUFError, match=r"mpt\.attention\.max_alibi_bias=.* must be at most 126"):
        pykv.Model.load(write_tiny(replace(mpt.MODELS["mpt-3l-4heads"], max_bias=1e38)))
    for model in (mpt.MODELS["mpt-3l-4heads"], mpt.MODELS["mpt-2l-wide-6heads-clamp"]):
        for attention in ("fused", "flash", "matmul"):
            with (
                pykv.Model.load(write_tiny(replace(model, max_bias=126.0))) as loaded,
                loaded.context(n_ctx=256, n_threads=1, attention=attention) as context,
            ):
                context.decode(pykv.Batch(range(40), logits="all"))
                assert np.isfinite(context.logits).all()


def test_slopes_hold_after_a_shift(write_tiny: Write) -> None:
    """Distances count, not positions: the same tokens elsewhere give the same logits."""
    rows = []
    with pykv.Model.load(write_tiny(bloom.MODELS["bloom-2l-wide-6heads"])) as model:
        for start in (0, 100):
            with model.context(n_ctx=256, n_threads=1, flash_attn=False, type_k="f32", type_v="f32") as context:
                context.decode(pykv.Batch(range(20), pos=range(start, start + 20)))
                context.memory.seq_add(0, 0, -1, 7)
                context.decode(pykv.Batch([3]))
                assert context.memory.pos_max(0) == start + 27
                rows.append(context.logits.copy())
    assert np.array_equal(*rows)
