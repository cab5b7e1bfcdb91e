"""Which attention path a context takes where it may choose."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from pykv.errors import AllocError, ParamError
from pykv.ggml import DType, cpu_device
from pykv.memory import AttentionPath, AttentionPlan, attention_probe
from pykv.memory.attention import MANY_TOKENS
from pykv.memory.attention_choice import AttentionChoice, AttentionInUse, PathsInUse
from pykv.memory.attention_probe import NEVER, ProbeShape, measured_choice

FUSED, FLASH, GROUPED = AttentionPath.FUSED, AttentionPath.FLASH, AttentionPath.GROUPED
SHAPE = ProbeShape(4, 2, 64, 64, 1024, DType.F16, DType.F16)


def shape_of(n_cells: int) -> ProbeShape:
    return ProbeShape(4, 2, 64, 64, n_cells, DType.F16, DType.F16)


@pytest.fixture(autouse=True)
def _nothing_measured_yet() -> Iterator[None]:
    measured_choice.cache_clear()
    yield
    measured_choice.cache_clear()


@pytest.mark.parametrize("may_fuse", [True, False])
@pytest.mark.parametrize("type_v", [DType.F16, DType.F32, DType.BF16])
@pytest.mark.parametrize("type_k", [DType.F16, DType.F32, DType.Q8_0, DType.Q4_0])
def test_every_path_is_measured(type_k: DType, type_v: DType, may_fuse: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pykv"):
        choice = measured_choice(cpu_device(), 1, ProbeShape(4, 2, 64, 64, 256, type_k, type_v), may_fuse)
    for text in (caplog.text, choice.reason):
        assert ("256 cells: fused" if may_fuse else "256 cells: flash") in text
        assert text.index("flash") < text.index("matmul")
    assert "does not run" not in caplog.text
    assert "inf ms" not in caplog.text


@pytest.mark.parametrize("may_fuse", [True, False])
def test_quantised_values_cannot_be_turned(may_fuse: bool) -> None:
    choice = measured_choice(cpu_device(), 1, ProbeShape(4, 2, 64, 64, 2048, DType.Q8_0, DType.Q8_0), may_fuse)
    assert choice.plan.many is FLASH
    assert choice.plan.transpose_from is None
    assert may_fuse or choice.plan.few is FLASH
    assert "matmul" not in choice.reason


Asked = list[tuple[AttentionPath, bool, int, int]]
Times = tuple[float, float, float]


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    many: AttentionPath,
    turning: int,
    times: Times = (2, 2, 1),
    prompt: Times | None = None,
) -> Asked:
    """Let one token take so long by the fused path, by flash, and over transposed V, there 9 up to a depth.

    A prompt takes `prompt`, or 1 by the path `many` and 2 by others.

    Returns the list of what will be asked.
    """
    asked: Asked = []

    def seconds(self, path: AttentionPath, v_trans: bool, n_tokens: int, n_kv: int) -> float:
        asked.append((path, v_trans, n_tokens, n_kv))
        if n_tokens > 1:
            return dict(zip(AttentionPath, prompt, strict=True))[path] if prompt else 1.0 if path is many else 2.0
        if path is GROUPED and n_kv < turning:
            return 2.5
        return dict(zip(AttentionPath, times, strict=True))[path]

    monkeypatch.setattr(attention_probe._Bench, "seconds", seconds)
    return asked


@pytest.mark.parametrize("many", [FLASH, GROUPED])
@pytest.mark.parametrize("may_fuse", [True, False])
@pytest.mark.parametrize(
    ("turning", "n_cells", "transpose_from"),
    [(0, 8192, 1024), (1024, 8192, 1024), (2000, 8192, 4096), (2000, 4095, None), (99999, 32768, None), (0, 300, None)],
)
def test_the_faster_paths_are_taken_and_remembered(
    many: AttentionPath,
    may_fuse: bool,
    turning: int,
    n_cells: int,
    transpose_from: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = pretend(monkeypatch, many, turning)
    plan = measured_choice(cpu_device(), 1, shape_of(n_cells), may_fuse).plan
    assert plan == AttentionPlan(many, transpose_from, FUSED if may_fuse else FLASH)
    n_asked = len(asked)
    measured_choice(cpu_device(), 1, shape_of(n_cells), may_fuse)
    assert len(asked) == n_asked


@pytest.mark.parametrize(
    ("times", "few", "transpose_from"),
    [
        ((1.0, 1.0, 1.0), FUSED, None),
        ((1.0, 0.95, 0.95), FUSED, None),
        ((1.0, 0.8, 0.79), FLASH, None),
        ((1.0, 1.2, 0.8), FUSED, 1024),
        ((NEVER, 1.0, 2.0), FLASH, None),
        ((NEVER, 1.0, 0.8), FLASH, 1024),
        ((NEVER, NEVER, 1.0), FLASH, 0),
        ((1.0, NEVER, 2.0), FUSED, None),
        ((NEVER, NEVER, NEVER), FLASH, None),
    ],
)
def test_turning_values_must_be_worth_it_and_noise_decides_nothing(
    times: tuple[float, float, float], few: AttentionPath, transpose_from: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, FLASH, 0, times)
    choice = measured_choice(cpu_device(), 1, shape_of(8192), True)
    assert (choice.plan.few, choice.plan.transpose_from) == (few, transpose_from)
    assert ("flash does not run on CPU" in choice.reason) is (times[1] == NEVER)


def test_each_path_is_timed_over_the_layout_that_it_will_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend(monkeypatch, FLASH, 0)
    measured_choice(cpu_device(), 1, shape_of(8192), True)
    single = {(path, v_trans) for path, v_trans, n_tokens, _ in asked if n_tokens == 1}
    assert single == {(FUSED, False), (FLASH, False), (GROUPED, True)}
    assert {(path, v_trans) for path, v_trans, n, _ in asked if n > 1} == {(path, False) for path in AttentionPath}


def test_a_path_without_hope_is_not_tried_deeper(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend(monkeypatch, FLASH, 0, (1, 5, 2))
    measured_choice(cpu_device(), 1, shape_of(32768), True)
    assert [n_kv for path, _, n, n_kv in asked if n == 1 and path is FLASH] == [1024]
    assert [n_kv for path, _, n, n_kv in asked if n == 1 and path is GROUPED] == [1024, 4096, 16384]
    asked.clear()
    pretend(monkeypatch, FLASH, 0, (1, 5, 5))
    choice = measured_choice(cpu_device(), 2, shape_of(32768), True)
    assert choice.plan == AttentionPlan(FLASH, None, FUSED)
    assert choice.reason.startswith("measured at 1024 cells: fused 1000.00 ms, flash 5000.00 ms, matmul 5000.00 ms; ")


@pytest.mark.parametrize(
    ("times", "fuse_from", "depths"),
    [
        ((1.0, 2.0, 3.0), 0, {512}),
        ((1.0, 3.0, 2.0), 0, {512}),
        ((0.95, 1.0, 1.1), None, {512, 2048}),
        ((4.0, 1.0, 2.0), None, {512}),
        ((NEVER, 1.0, 2.0), None, {512}),
        ((1.0, NEVER, NEVER), 0, {512}),
    ],
    ids=str,
)
def test_prompts_are_fused_where_that_is_clearly_faster(
    times: tuple[float, float, float], fuse_from: int | None, depths: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = pretend(monkeypatch, FLASH, 0, prompt=times)
    choice = measured_choice(cpu_device(), 1, shape_of(8192), True)
    assert choice.plan.fuse_from == fuse_from
    assert choice.plan.many is (GROUPED if times[2] < times[1] else FLASH)
    assert {n_kv for path, _, n, n_kv in asked if n > 1 and path is FUSED} == depths
    assert choice.plan.path(MANY_TOKENS, False, 256).value == ("fused" if fuse_from == 0 else choice.plan.many.value)


@pytest.mark.parametrize(("n_cells", "fuse_from"), [(8192, 2048), (2048, 2048), (2047, None)])
def test_prompts_are_fused_from_a_depth_on(
    n_cells: int, fuse_from: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(self, path: AttentionPath, v_trans: bool, n_tokens: int, n_kv: int) -> float:
        return 0.5 if path is FUSED and n_kv >= 2048 else 1.0

    monkeypatch.setattr(attention_probe._Bench, "seconds", seconds)
    choice = measured_choice(cpu_device(), 1, shape_of(n_cells), True)
    assert choice.plan.fuse_from == fuse_from
    assert f"64 tokens over {2048 if fuse_from else 512} cells: fused" in choice.reason


def test_a_plan_names_the_path_of_every_ubatch() -> None:
    plan = AttentionPlan(FLASH, 1000)
    few = [plan.path(n, v_trans, 64) for v_trans in (False, True) for n in (1, MANY_TOKENS - 1)]
    assert few == [FLASH, FLASH, GROUPED, GROUPED]
    assert [plan.path(MANY_TOKENS, v_trans, 64) for v_trans in (False, True)] == [FLASH, FLASH]
    assert plan.names == ("flash",)
    plan = AttentionPlan(GROUPED, None, FUSED)
    assert [plan.path(n, False, 99999) for n in (1, 16, 17, MANY_TOKENS)] == [FUSED, FUSED, FUSED, GROUPED]
    assert plan.names == ("fused", "matmul")
    plan = AttentionPlan(FLASH, 0, FLASH, 2048)
    assert [plan.path(MANY_TOKENS, True, n_kv) for n_kv in (2047, 2048)] == [FLASH, FUSED]
    assert plan.names == ("matmul", "flash", "fused")
    assert AttentionPlan.of(FUSED).names == ("fused",)


def test_a_plan_takes_no_path_where_that_does_not_serve() -> None:
    for many, few in ((FUSED, FLASH), (FLASH, GROUPED)):
        with pytest.raises(ParamError, match=f"few={few.value}.*many={many.value}"):
            AttentionPlan(many, None, few)


def test_a_choice_tells_the_paths_in_use() -> None:
    choice = AttentionChoice(AttentionPlan(FLASH, 1000, FUSED), "why")
    full, window = PathsInUse("matmul", "fused"), PathsInUse("fused", "flash")
    kinds = {"full": full, "standard": window}
    assert choice.in_use(kinds) == AttentionInUse("matmul", "fused", "why", kinds)
    assert choice.in_use({"standard": window}) == AttentionInUse("fused", "flash", "why", {"standard": window})
    assert choice.in_use({}) == AttentionInUse("none", "none", "why", {})


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


@pytest.mark.parametrize("failing", [{FLASH}, {FUSED}, {FUSED, FLASH}], ids=str)
def test_a_path_that_fails_is_not_taken(
    failing: set[AttentionPath], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured = attention_probe._Bench._run

    def fail(self, path, *size) -> float:
        if path in failing:
            raise AllocError("no memory for it")
        return measured(self, path, *size)

    monkeypatch.setattr(attention_probe._Bench, "_run", fail)
    with caplog.at_level(logging.INFO, "pykv"):
        plan = measured_choice(cpu_device(), 1, SHAPE, True).plan
    for path in failing:
        assert f"{path.value} does not run on CPU: no memory for it" in caplog.text
        assert path not in (plan.many, plan.few) or failing == {FUSED, FLASH}
    assert (plan == AttentionPlan.of(GROUPED)) == (failing == {FUSED, FLASH})


def test_nothing_is_measured_deeper_than_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    depths = []
    monkeypatch.setattr(
        attention_probe._Bench, "_run", lambda self, path, v_trans, n, n_kv: depths.append(n_kv) or NEVER
    )
    measured_choice(cpu_device(), 1, shape_of(300), True)
    assert set(depths) == {300}
