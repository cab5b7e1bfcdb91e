"""Which attention path a context takes where it may choose."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from pykv.errors import AllocError
from pykv.ggml import DType, cpu_device
from pykv.memory import AttentionPath, AttentionPlan, attention_probe
from pykv.memory.attention import MANY_TOKENS
from pykv.memory.attention_probe import NEVER, ProbeShape, faster_plan

FLASH, GROUPED = AttentionPath.FLASH, AttentionPath.GROUPED
SHAPE = ProbeShape(4, 2, 64, 64, 1024, DType.F16, DType.F16)


@pytest.fixture(autouse=True)
def _nothing_measured_yet() -> Iterator[None]:
    faster_plan.cache_clear()
    yield
    faster_plan.cache_clear()


@pytest.mark.parametrize("type_v", [DType.F16, DType.F32, DType.BF16])
@pytest.mark.parametrize("type_k", [DType.F16, DType.F32, DType.Q8_0, DType.Q4_0])
def test_both_paths_are_measured(type_k: DType, type_v: DType, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pykv"):
        faster_plan(cpu_device(), 1, ProbeShape(4, 2, 64, 64, 256, type_k, type_v))
    assert "one token over 256 cells: flash" in caplog.text
    assert "does not run" not in caplog.text
    assert "inf ms" not in caplog.text


def test_quantised_values_leave_only_the_fused_path() -> None:
    shape = ProbeShape(4, 2, 64, 64, 2048, DType.Q8_0, DType.Q8_0)
    assert faster_plan(cpu_device(), 1, shape) == AttentionPlan.of(FLASH)


def pretend(monkeypatch: pytest.MonkeyPatch, many: AttentionPath, grouped_from: int) -> list[tuple[object, ...]]:
    """Let one token be faster over transposed V from a depth on; returns the list of what will be asked."""
    asked: list[tuple[object, ...]] = []

    def seconds(self, path, v_trans, n_tokens, n_kv) -> float:
        asked.append((path, v_trans, n_tokens, n_kv))
        if n_tokens > 1:
            return 1.0 if path is many else 2.0
        return 1.0 if (path is GROUPED) == (n_kv >= grouped_from) else 2.0

    monkeypatch.setattr(attention_probe._Bench, "seconds", seconds)
    return asked


@pytest.mark.parametrize("many", AttentionPath)
@pytest.mark.parametrize(
    ("grouped_from", "n_cells", "transpose_from"),
    [(0, 8192, 1024), (1024, 8192, 1024), (2000, 8192, 4096), (2000, 4095, None), (9999, 8192, None), (0, 300, None)],
)
def test_the_faster_paths_are_taken_and_remembered(
    many: AttentionPath, grouped_from: int, n_cells: int, transpose_from: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = pretend(monkeypatch, many, grouped_from)
    shape = ProbeShape(4, 2, 64, 64, n_cells, DType.F16, DType.F16)
    assert faster_plan(cpu_device(), 1, shape) == AttentionPlan(many, transpose_from)
    n_asked = len(asked)
    faster_plan(cpu_device(), 1, shape)
    assert len(asked) == n_asked


def test_each_path_is_timed_over_the_layout_that_it_will_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend(monkeypatch, FLASH, 0)
    faster_plan(cpu_device(), 1, ProbeShape(4, 2, 64, 64, 8192, DType.F16, DType.F16))
    assert {(path, v_trans) for path, v_trans, n_tokens, _ in asked if n_tokens == 1} == {
        (FLASH, False),
        (GROUPED, True),
    }
    assert {v_trans for _, v_trans, n_tokens, _ in asked if n_tokens > 1} == {False}


def test_a_plan_names_the_path_of_every_ubatch() -> None:
    plan = AttentionPlan(FLASH, 1000)
    few = [plan.path(n, v_trans) for v_trans in (False, True) for n in (1, MANY_TOKENS - 1)]
    assert few == [FLASH, FLASH, GROUPED, GROUPED]
    assert [plan.path(MANY_TOKENS, v_trans) for v_trans in (False, True)] == [FLASH, FLASH]


@pytest.mark.parametrize(
    ("transpose_from", "n_used", "v_trans", "wanted"),
    [
        (1000, 999, False, False),
        (1000, 1000, False, True),
        (1000, 500, True, True),
        (1000, 499, True, False),
        (0, 0, True, True),
        (0, 0, False, True),
        (None, 10**6, False, False),
    ],
)
def test_values_are_turned_at_a_depth_and_back_at_half_of_it(
    transpose_from: int | None, n_used: int, v_trans: bool, wanted: bool
) -> None:
    assert AttentionPlan(FLASH, transpose_from).wants_transposed(n_used, v_trans) is wanted


def test_a_path_that_fails_is_not_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    measured = attention_probe._Bench._run

    def fail_flash(self, path, *size) -> float:
        if path is FLASH:
            raise AllocError("no memory for it")
        return measured(self, path, *size)

    monkeypatch.setattr(attention_probe._Bench, "_run", fail_flash)
    with caplog.at_level(logging.INFO, "pykv"):
        assert faster_plan(cpu_device(), 1, SHAPE) == AttentionPlan.of(GROUPED)
    assert "flash does not run on CPU: no memory for it" in caplog.text


def test_nothing_is_measured_deeper_than_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    depths = []
    monkeypatch.setattr(
        attention_probe._Bench, "_run", lambda self, path, v_trans, n, n_kv: depths.append(n_kv) or NEVER
    )
    faster_plan(cpu_device(), 1, ProbeShape(4, 2, 64, 64, 300, DType.F16, DType.F16))
    assert set(depths) == {300}
