"""Which attention path a context takes, what it says about it, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.nmse import nmse
from support.stand_in import open_stand_in
from support.tiny.registry import BY_NAME
from support.tiny_gguf import TinyModel
from support.twin import ROUNDED, TOKENS, Twin

import pykv
from pykv.cells import NO_WINDOW, SwaType, Window
from pykv.errors import ParamError
from pykv.ggml import RopeParams
from pykv.memory import AttentionPath, AttentionPlan, LayerSpec, MemorySpec
from pykv.memory.attention_choice import AttentionChoice
from pykv.memory.attention_probe import ProbeShape
from pykv.memory.kv_graph import KVGraph
from pykv.models.spec_record import spec_record
from pykv.models.stand_in import StandInShape
from pykv.runtime import context as context_module
from pykv.runtime import memory_layout

Write = Callable[[TinyModel], Path]
TINY, ODD = TinyModel(seed=90), TinyModel(seed=91, head_dim=24, n_head=2, n_head_kv=1)
SMALL = {"n_ctx": 256, "n_threads": 1}


@pytest.mark.parametrize(
    ("asked", "generation", "prompts", "reason"),
    [
        ({"attention": "fused"}, "fused", "fused", "fused was asked for"),
        ({"attention": "flash"}, "flash", "flash", "flash was asked for"),
        ({"flash_attn": True}, "flash", "flash", "flash was asked for"),
        ({"attention": "matmul"}, "matmul", "matmul", "matmul was asked for"),
        ({"flash_attn": False}, "matmul", "matmul", "matmul was asked for"),
        ({"type_k": "q8_0", "type_v": "q8_0", "attention": "fused"}, "fused", "fused", "fused was asked for"),
    ],
    ids=str,
)
def test_a_context_says_how_it_attends_and_why(
    write_tiny: Write, asked: dict, generation: str | None, prompts: str | None, reason: str
) -> None:
    with pykv.Model.load(write_tiny(TINY)) as model, model.context(**SMALL, **asked) as context:
        path = context.attention_path
        assert generation in (None, path.generation)
        assert prompts in (None, path.prompts)
        assert {path.generation, path.prompts} <= {"fused", "flash", "matmul"}
        assert reason in path.reason


def test_what_was_measured_decides_and_is_told(write_tiny: Write) -> None:
    with pykv.Model.load(write_tiny(TINY)) as model, model.context(**SMALL) as context:
        path = context.attention_path
        found = re.match(r"measured at 256 cells: (.*); \S+ tokens over 256 cells: (.*)$", path.reason)
        assert found, path.reason
        single, many = (dict(re.findall(r"(\w+) ([\d.]+) ms", times)) for times in found.groups())
        assert list(many) == ["fused", "flash", "matmul"]
        assert set(single) <= {"fused", "flash", "matmul"}
        assert path.generation in single  # matmul only over V that was turned, of which a new context has none
        assert float(many[path.prompts]) <= min(map(float, many.values())) / 0.85  # what it must be worth, as printed


def test_the_path_of_the_present_depth_is_told(write_tiny: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = AttentionPlan(AttentionPath.FLASH, 20, AttentionPath.FUSED)
    monkeypatch.setattr(context_module, "attention_choice", lambda *_: AttentionChoice(plan, "told"))
    with pykv.Model.load(write_tiny(TINY)) as model, model.context(**SMALL) as context:
        context.decode(pykv.Batch(TOKENS[:10]))
        assert context.attention_path.generation == "fused"
        context.decode(pykv.Batch(TOKENS[10:30]))
        assert context.attention_path.generation == "matmul"


def paths_taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return a list that grows by each part of a graph that is built: its kind of layer, and the path it takes."""
    taken: list[tuple[str, str]] = []
    made = KVGraph.__init__

    def heard(self: KVGraph, graph: Any, cache: Any, shape: Any, path: AttentionPath, **rest: Any) -> None:
        taken.append((cache.spec.window.kind, path.value))
        made(self, graph, cache, shape, path, **rest)

    monkeypatch.setattr(KVGraph, "__init__", heard)
    return taken


def test_layers_with_a_window_take_another_path_than_was_told(
    write_tiny: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They never look at so many cells that V is turned, or a prompt fused: told was what the other layers do."""
    plan = AttentionPlan(AttentionPath.GROUPED, 400, AttentionPath.FUSED, 512)
    monkeypatch.setattr(context_module, "attention_choice", lambda *_: AttentionChoice(plan, "told"))
    params = {"n_ctx": 1024, "n_ubatch": 64, "n_batch": 64, "n_threads": 1}
    with (
        pykv.Model.load(write_tiny(BY_NAME["gemma3-4l-w16-every2"])) as model,
        model.context(**params) as context,
    ):
        taken = paths_taken(monkeypatch)
        seen = set()
        for _ in range(8):
            for n in (64, 1):
                told = context.attention_path
                taken.clear()
                context.decode(pykv.Batch(TOKENS[:n]))
                does = {kind: paths[n == 64] for kind, paths in told.kinds.items()}
                assert not taken or dict(taken) == does
                assert (told.generation, told.prompts) == told.kinds["full"]
                seen.add((n, does["full"], does["standard"]))
    assert {(1, "matmul", "fused"), (64, "fused", "matmul")} < seen


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gemma3-7l-w32", ["full", "standard"]),
        ("gemma3-2l-no-window", ["full"]),
        ("llama4-4l", ["full", "chunked"]),
        ("lfm2-4l-w16", ["standard"]),
        ("falcon-h1-3l", ["full"]),
        ("deepseek2-3l", ["full"]),
    ],
)
def test_every_kind_of_layer_has_its_paths(write_tiny: Write, name: str, kinds: list[str]) -> None:
    with pykv.Model.load(write_tiny(BY_NAME[name])) as model, model.context(**SMALL, attention="fused") as context:
        told = context.attention_path
        assert {kind: tuple(paths) for kind, paths in told.kinds.items()} == dict.fromkeys(kinds, ("fused", "fused"))
        assert told.kinds.keys() <= context.memory.visible(0, 0).keys()


def test_a_model_without_attention_said_flash(write_tiny: Write) -> None:
    with pykv.Model.load(write_tiny(BY_NAME["mamba2-4l"])) as model, model.context(**SMALL) as context:
        told = context.attention_path
        assert (told.generation, told.prompts, told.kinds) == ("none", "none", {})
        assert told.reason == "the model has no attention"


def mixed(*heads: int, windowed: tuple[int, ...] = ()) -> StandInShape:
    """Return a stand-in with heads of these widths, of which some layers have a window."""
    layers = tuple(
        LayerSpec(1, width, width, rope=RopeParams(width), is_swa=il in windowed) for il, width in enumerate(heads)
    )
    spec = MemorySpec(layers, Window(64, SwaType.STANDARD) if windowed else NO_WINDOW)
    return StandInShape((2,) * len(heads), 4096, spec_record(spec))


@pytest.mark.parametrize(
    ("shape", "measured", "remark"),
    [
        (mixed(64, 32, 32), 32, "; layer 1 was measured, other heads have layer 0"),
        (mixed(64, 32, 64, windowed=(0, 2)), 32, "; layer 1 was measured, other heads have layers 0, 2"),
        (mixed(64, 64), 64, ""),
    ],
    ids=["most common", "without a window", "all alike"],
)
def test_what_was_measured_stands_for_most_layers(
    shape: StandInShape, measured: int, remark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was the first layer, though the others have other heads, and nothing said so."""
    probed: list[ProbeShape] = []

    def choose(device: object, n_threads: int, shape: ProbeShape, may_fuse: bool) -> AttentionChoice:
        probed.append(shape)
        return AttentionChoice(AttentionPlan.of(AttentionPath.FLASH), "measured")

    monkeypatch.setattr(memory_layout, "measured_choice", choose)
    with open_stand_in(shape, flash_attn="auto") as context:
        assert [one.n_embd_head_k for one in probed] == [measured]
        assert context.attention_path.reason == f"measured{remark}"


def test_layers_that_are_not_covered_are_named() -> None:
    with open_stand_in(mixed(64, 24, 64, 24), flash_attn="auto") as context:
        told = context.attention_path
        assert told.generation in ("flash", "matmul")
        assert told.reason.endswith("multiple of 16, or of 32 when quantised in layers 1, 3")


def test_heads_that_are_not_covered_take_ggmls_path(write_tiny: Write) -> None:
    with pykv.Model.load(write_tiny(ODD)) as model:
        with model.context(**SMALL) as context:
            path = context.attention_path
            assert path.generation in ("flash", "matmul")
            assert "the fused kernel does not cover heads that are not a multiple of 16" in path.reason
            twin = Twin(context, ODD, ROUNDED)
            twin.decode(20)
            twin.decode(1)
        for make in (model.context, model.memory_plan):
            with pytest.raises(ParamError, match="attention='fused': the fused kernel does not cover heads that are"):
                make(**SMALL, attention="fused")


def test_keys_on_another_device_take_ggmls_path(write_tiny: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = "K and V of layer 1 lie on RPC0, where the fused kernel does not run"
    monkeypatch.setattr(memory_layout, "fused_refusal", lambda *_: refusal)
    with pykv.Model.load(write_tiny(TINY)) as model:
        with model.context(**SMALL) as context:
            assert context.attention_path.generation in ("flash", "matmul")
            assert context.attention_path.reason.endswith(refusal)
        with pytest.raises(ParamError, match=f"attention='fused': {refusal}"):
            model.context(**SMALL, attention="fused")


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize("types", [("f32", "f32"), ("f16", "f16"), ("q8_0", "q8_0"), ("f16", "q8_0")], ids="-".join)
def test_every_size_of_ubatch_gives_the_same_rows(write_tiny: Write, types: tuple[str, str], unified: bool) -> None:
    """One token, sixteen, seventeen, 63, a prompt: blocks of rows, or another path, over the same cells."""
    type_k, type_v = types
    most = {"f32": 1e-5, "f16": 2e-5, "q8_0": 4e-3}[max(types)]
    params = {"n_ctx": 1024, "n_seq_max": 2, "kv_unified": unified, "type_k": type_k, "type_v": type_v}
    with (
        pykv.Model.load(write_tiny(TINY)) as model,
        model.context(**params, n_threads=1, attention="fused") as context,
    ):
        twin = Twin(context, TINY, most)
        for n in (1, 16, 17, 64, 2, 1, 1, 63):
            twin.decode(n)
        twin.decode(8, seq_id=1)
        twin.decode(4, pos=[165, 8, 166, 9], seq_id=[0, 1, 0, 1])
        twin.edit("seq_rm", 0, 20, 60)
        twin.decode(1, pos=[167])


def test_exact_numbers_stay_exact(write_tiny: Write) -> None:
    """Over K and V in f32, only the order of sums is left to differ."""
    with pykv.Model.load(write_tiny(TINY)) as model:
        rows = []
        for attention in ("fused", "matmul"):
            params = SMALL | {"type_k": "f32", "type_v": "f32", "attention": attention}
            with model.context(**params) as context:
                for token in TOKENS[:40]:
                    context.decode(pykv.Batch([token]))
                rows.append(np.array(context.logits))
        assert nmse(*rows) <= 1e-9


def test_the_number_of_threads_changes_no_logit(write_tiny: Write) -> None:
    with pykv.Model.load(write_tiny(TINY)) as model:
        rows = []
        for n_threads in (1, 3):
            with model.context(n_ctx=512, n_threads=n_threads, attention="fused") as context:
                context.decode(pykv.Batch(TOKENS[:300]))
                context.decode(pykv.Batch(TOKENS[300:301]))
                rows.append(np.array(context.logits))
        assert np.array_equal(*rows)


def test_compute_memory_is_had_at_the_start(write_tiny: Write) -> None:
    """The partial sums of sixteen rows over every stream take more than a short prompt."""
    params = {"n_ctx": 4096, "n_ubatch": 64, "n_batch": 64, "n_seq_max": 4, "kv_unified": False, "n_threads": 1}
    with pykv.Model.load(write_tiny(TINY)) as model, model.context(**params, attention="fused") as context:
        before = context.compute_nbytes
        for n in (1, 16, 64):
            tokens = TOKENS[: 4 * n]
            for first in range(0, 4 * n, 64):
                part = tokens[first : first + 64]
                context.decode(pykv.Batch(part, seq_id=[i % 4 for i in range(len(part))]))
        assert context.compute_nbytes == before


@pytest.mark.parametrize("n_ubatch", [16, 64])
def test_compute_memory_grew_before_the_cache_was_full(write_tiny: Write, n_ubatch: int) -> None:
    """4096 cells are cut into more pieces than 4352 are."""
    params = {"n_ctx": 4352, "n_ubatch": n_ubatch, "n_threads": 1, "attention": "fused"}
    with (
        pykv.Model.load(write_tiny(TinyModel(seed=90, n_ctx_train=4352, n_layer=1))) as model,
        model.context(**params) as context,
    ):
        before = context.compute_nbytes
        for n in (2048, 1920, 16, 63, 64, 16, 200):
            context.decode(pykv.Batch((TOKENS + TOKENS)[:n], logits="none" if n > 64 else "all"))
            context.decode(pykv.Batch(TOKENS[:1]))
            assert context.compute_nbytes == before


def test_compute_memory_serves_prompts_on_both_sides_of_a_depth(
    write_tiny: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By matmul, prompts below it take more than by the fused path over all cells."""
    plan = AttentionPlan(AttentionPath.GROUPED, None, AttentionPath.FUSED, 1024)
    monkeypatch.setattr(context_module, "attention_choice", lambda *_: AttentionChoice(plan, "told"))
    params = {"n_ctx": 2048, "n_ubatch": 256, "n_batch": 256, "n_threads": 1}
    with (
        pykv.Model.load(write_tiny(TinyModel(seed=90, n_ctx_train=2048, n_layer=1))) as model,
        model.context(**params) as context,
    ):
        before, told = context.compute_nbytes, []
        for _ in range(6):
            told.append(context.attention_path.prompts)
            context.decode(pykv.Batch(TOKENS[:256]))
            assert context.compute_nbytes == before
        assert told == ["matmul"] * 3 + ["fused"] * 3


@pytest.mark.parametrize(("n", "path"), [(1, "fused"), (16, "fused"), (17, "fused"), (63, "fused"), (64, "fused")])
def test_seventeen_tokens_took_longer_than_a_prompt(n: int, path: str) -> None:
    plan = AttentionPlan.of(AttentionPath.FUSED)
    assert plan.path(n, v_trans=False, n_kv=0).value == path
    assert plan.path(n, v_trans=True, n_kv=0).value == ("matmul" if n < 64 else "fused")
