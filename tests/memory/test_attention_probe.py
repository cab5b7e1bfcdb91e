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
SHAPE = ProbeShape(4, 2, 64, 64, 256, DType.F16, DType.F16)


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
    assert "one token flash" in caplog.text
    assert "does not run" not in caplog.text
    assert "inf ms" not in caplog.text


def test_quantised_values_leave_only_the_fused_path() -> None:
    shape = ProbeShape(4, 2, 64, 64, 256, DType.Q8_0, DType.Q8_0)
    assert faster_plan(cpu_device(), 1, shape) == AttentionPlan.of(FLASH)


@pytest.mark.parametrize("few", AttentionPath)
@pytest.mark.parametrize("many", AttentionPath)
def test_the_faster_ones_are_taken_and_remembered(
    few: AttentionPath, many: AttentionPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token decides the layout of V; a prompt then takes what is faster over that layout."""
    asked = []

    def seconds(self, path, v_trans, n_tokens, n_kv) -> float:
        asked.append((path, v_trans, n_tokens))
        return 1.0 if path is (few if n_tokens == 1 else many) else 2.0

    monkeypatch.setattr(attention_probe._Bench, "seconds", seconds)
    for _ in range(3):
        plan = faster_plan(cpu_device(), 1, SHAPE)
    assert plan == AttentionPlan(few, many, v_trans=few is GROUPED)
    assert [plan.path(n) for n in (1, MANY_TOKENS - 1, MANY_TOKENS)] == [few, few, many]
    layout = few is GROUPED
    assert asked == [(FLASH, False, 1), (GROUPED, True, 1)] + [(path, layout, MANY_TOKENS) for path in AttentionPath]


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
