"""What a cut costs: held against plain numpy, and against models for which the answer is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.naive_llama import NaiveLlama
from support.tiny.model import TinyFile
from support.tiny.registry import BY_ARCH
from support.tiny_gguf import TinyModel

import pykv
from pykv.errors import ContextLengthExceeded, ParamError, ShiftUnsupported
from pykv.quality import Agreement, Cut, chunk_cut, measure, shift_cut
from pykv.quality.repair import deviating_runs, first_run

EXACT: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "attention": "matmul", "n_threads": 1}
TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 300, 90)]
ROUNDING = 1e-9
"""Nats between sound computations in f32; measured at most 4e-12."""


def tiny(**more: Any) -> TinyModel:
    return TinyModel(**{"seed": 31, "n_layer": 3, **more})


def test_divergence_and_agreement_are_those_of_plain_sums() -> None:
    rng = np.random.default_rng(1)
    cold, warm = rng.normal(0, 3, (2, 4, 9)).astype(np.float32)
    found = Agreement.of(cold, warm, (3, 1, 4, 1))
    for i in range(4):
        p = np.exp(cold[i].astype(float)) / sum(np.exp(float(x)) for x in cold[i])
        q = np.exp(warm[i].astype(float)) / sum(np.exp(float(x)) for x in warm[i])
        assert found.kl[i] == pytest.approx(sum(a * np.log(a / b) for a, b in zip(p, q, strict=True)))
        assert found.same_top[i] == (max(range(9), key=p.__getitem__) == max(range(9), key=q.__getitem__))
        if i < 3:
            token = (1, 4, 1)[i]
            assert found.surprise[i] == pytest.approx(np.log(p[token]) - np.log(q[token]))
    assert found.perplexity_ratio == pytest.approx(np.exp(found.surprise.mean()))


def test_the_cut_of_a_shift_is_that_of_the_policy() -> None:
    cut = shift_cut(TOKENS[:30], 10, n_keep=4)
    assert (cut.start, cut.end) == (4, 12)  # half of the 16 that are not kept
    assert cut.kept + cut.moved + cut.after == tuple(TOKENS[:4] + TOKENS[12:30])
    assert cut.n_left == 12


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: chunk_cut(TOKENS, 10, 5, 5), ParamError, "start=5, end=5"),
        (lambda: chunk_cut(TOKENS, 10, 5, 80), ParamError, "something moves"),
        (lambda: chunk_cut(TOKENS, 0, 5, 8), ParamError, "n_after"),
        (lambda: shift_cut(TOKENS[:8], 6), ParamError, "too few to cut"),
        (lambda: shift_cut(TOKENS[:20], 4, n_keep=16), ContextLengthExceeded, "cannot shift"),
        (lambda: Cut((1, 2, 3), 0, 1, ()), ParamError, "after"),
    ],
)
def test_cuts_that_are_none(make: Callable[[], Cut], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()


def test_runs_of_tokens_to_compute_again() -> None:
    assert first_run(10, 20, 0.25) == [(10, 15)]
    assert first_run(10, 20, 0.0) == []
    fresh = np.zeros((6, 1, 2), np.float32)
    stale = fresh.copy()
    stale[[1, 2, 4], 0, 0] = [3, 2, 5]
    assert deviating_runs(10, stale, fresh, 0.5) == [(11, 13), (14, 15)]
    assert deviating_runs(10, stale, fresh, 1 / 6) == [(14, 15)]
    assert deviating_runs(10, stale, fresh, 1.0) == [(10, 16)]
    assert deviating_runs(10, stale, fresh, 0.0) == []


@pytest.mark.parametrize("choose", ["first", "deviation"])
def test_all_tokens_computed_again_are_those_of_a_cold_run(write_tiny: Callable[[TinyFile], Path], choose: Any) -> None:
    with pykv.Model.load(write_tiny(tiny())) as model:
        report = measure(model, shift_cut(TOKENS, 20, n_keep=4), (0.0, 1.0), choose, **EXACT)
    rounding, uncut, moved, repaired = report.runs
    assert [run.name for run in report.runs] == ["rounding", "uncut", "moved", "repaired"]
    assert rounding.agreement.mean_kl < ROUNDING
    assert repaired.agreement.mean_kl < ROUNDING
    assert repaired.agreement.top_1 == 1.0
    assert repaired.n_recomputed == len(report.cut.moved)
    assert moved.n_recomputed == 0
    assert moved.agreement.mean_kl > 1e-4  # what is gone is still felt
    assert uncut.agreement.mean_kl > 1e-4
    assert (repaired.choosing_seconds > 0) == (choose == "deviation")
    assert min(report.cold_seconds, moved.seconds) > 0


def test_nothing_is_lost_in_a_model_of_one_layer(write_tiny: Callable[[TinyFile], Path]) -> None:
    """Its keys and values come from the tokens alone, so that moving them is exact."""
    with pykv.Model.load(write_tiny(tiny(n_layer=1))) as model:
        (*_, moved) = measure(model, shift_cut(TOKENS, 20, n_keep=4), **EXACT).runs
    assert moved.agreement.mean_kl < ROUNDING


def test_the_cold_run_and_the_uncut_one_are_those_of_the_naive_model(write_tiny: Callable[[TinyFile], Path]) -> None:
    spec, cut = tiny(), chunk_cut(TOKENS, 20, 10, 30)
    with pykv.Model.load(write_tiny(spec)) as model:
        _, uncut, _ = measure(model, cut, **EXACT).runs
    cold = NaiveLlama(spec).decode([*cut.kept, *cut.moved, *cut.after])[-20:]
    whole = NaiveLlama(spec).decode([*cut.stored, *cut.after])[-20:]
    np.testing.assert_allclose(uncut.agreement.kl, Agreement.of(cold, whole, cut.after).kl, rtol=1e-3, atol=1e-7)


def test_tokens_computed_again_bring_the_distributions_nearer(write_tiny: Callable[[TinyFile], Path]) -> None:
    with pykv.Model.load(write_tiny(tiny())) as model:
        report = measure(model, shift_cut(TOKENS, 20, n_keep=4), (0.0, 0.5, 1.0), "deviation", **EXACT)
    kl = [run.agreement.mean_kl for run in report.runs[2:]]
    assert kl == sorted(kl, reverse=True)


@pytest.mark.parametrize("arch", ["gemma3", "deepseek2"])
def test_kinds_of_memory_that_can_be_cut(write_tiny: Callable[[TinyFile], Path], arch: str) -> None:
    with pykv.Model.load(write_tiny(next(iter(BY_ARCH[arch].values())))) as model:
        report = measure(model, shift_cut(TOKENS, 10, n_keep=4), (0.0, 1.0), **EXACT)
    assert report.runs[-1].agreement.mean_kl < ROUNDING < report.runs[-2].agreement.mean_kl


@pytest.mark.parametrize(("arch", "reason"), [("mamba2", "recurrent_state"), ("qwen2vl", "multi_dim_positions")])
def test_kinds_that_cannot(write_tiny: Callable[[TinyFile], Path], arch: str, reason: str) -> None:
    with (
        pykv.Model.load(write_tiny(next(iter(BY_ARCH[arch].values())))) as model,
        pytest.raises(ShiftUnsupported) as refused,
    ):
        measure(model, shift_cut(TOKENS, 10))
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"repair": ()}, "repair="),
        ({"repair": (1.5,)}, "repair="),
        ({"repair": "0.5"}, "repair="),
        ({"choose": "best"}, "choose='best'"),
        ({"n_ctx": 4}, "n_ctx=4: follows from the text"),
    ],
)
def test_arguments_that_are_none(tiny_llama_path: Path, more: dict[str, Any], said: str) -> None:
    with pykv.Model.load(tiny_llama_path) as model, pytest.raises(ParamError, match=said):
        measure(model, shift_cut(TOKENS, 10), **more)


def test_steps_are_told(tiny_llama_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with pykv.Model.load(tiny_llama_path) as model:
        measure(model, shift_cut(TOKENS, 4), (0.0, 0.5), on_step=lambda n, of: seen.append((n, of)), **EXACT)
    assert seen == [(i, 5) for i in range(1, 6)]
