"""Parity: equal devices are the same, and each fault is found where it was put. Right values are plain sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rewrite_gguf import rewrite
from support.tiny.model import TinyFile
from support.tiny.registry import BY_ARCH
from support.tiny_gguf import TinyModel

import pykv
from pykv.errors import ParamError
from pykv.ggml import DType
from pykv.parity import distances, side
from pykv.parity.distances import Distances
from pykv.parity.program import Decode, Verb, made_up
from pykv.parity.tolerance import limit

TINY = TinyModel(seed=61, n_layer=3, is_tied=False)
KINDS: dict[str, TinyFile] = {
    "plain": TINY,
    **{arch: next(iter(BY_ARCH[arch].values())) for arch in ("gemma3", "mamba2", "falcon-h1", "deepseek2", "lfm2")},
}
EXACT: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "attention": "matmul", "n_threads": 1}


def compare(path: Path, devices: tuple[str, ...] = ("CPU", "cpu"), **more: Any) -> pykv.parity.ParityReport:
    return pykv.parity.compare(path, devices, **{**EXACT, **more})


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_device_is_the_same_and_another_split_is_rounding(
    write_tiny: Callable[[TinyFile], Path], kind: str
) -> None:
    report = compare(write_tiny(KINDS[kind]))
    (same,) = report.sides
    assert report.agrees
    assert (same.verdict, same.first, same.flips) == ("same", None, ())
    assert all(one.nmse == 0 for layers in same.by_layer.values() for one in layers.values())
    assert report.split.verdict in ("same", "rounding")
    assert report.split.logits.nmse < 1e-9
    kinds = {"plain": {"K", "V", "attention"}, "mamba2": {"R", "S"}, "lfm2": {"K", "V", "attention", "R"}}
    assert set(same.by_layer) == kinds.get(kind, set(same.by_layer) - {"logits"}) | {"logits"}


def test_every_layer_is_seen(write_tiny: Callable[[TinyFile], Path]) -> None:
    (same,) = compare(write_tiny(TINY)).sides
    for kind in ("K", "V", "attention"):
        assert sorted(same.by_layer[kind]) == [0, 1, 2]
    assert same.n_rows == 135 + 3 + 2 * 2 + 1 + 70 + 2


@pytest.fixture
def other_file(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Let the device that is spelt "cpu" have another file."""
    real = pykv.Model.load

    def use(path: Path) -> None:
        def load(given: Any, devices: list[str], **more: Any) -> pykv.Model:
            return real(path if devices == ["cpu"] else given, devices, **more)

        monkeypatch.setattr(side.Model, "load", load)

    return use


FAULTS = {
    "token_embd": ("K", 0),
    "blk.1.attn_k": ("K", 1),
    "blk.1.attn_v": ("V", 1),
    "blk.1.attn_q": ("attention", 1),
    "blk.1.attn_output": ("K", 2),
    "blk.1.ffn_down": ("K", 2),
    "blk.2.ffn_down": ("logits", None),
    "output": ("logits", None),
}
"""Tensor that is wrong on one side → what shows it first."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_matrix_is_found_in_its_layer(tmp_path: Path, other_file: Callable[[Path], None], name: str) -> None:
    path, tensor = TINY.write(tmp_path / "right.gguf"), f"{name}.weight"
    wrong = np.ascontiguousarray(np.roll(TINY.weights()[tensor], 1, axis=0))
    other_file(rewrite(TINY, tmp_path / "wrong.gguf", {tensor: wrong}, {}))
    report = compare(path)
    (found,) = report.sides
    assert not report.agrees
    assert found.verdict == "differs"
    assert found.first is not None
    assert (found.first.kind, found.first.layer) == FAULTS[name]
    assert found.first.step == 1


def test_a_wrong_shift_is_found_in_the_keys_at_its_step(
    write_tiny: Callable[[TinyFile], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Verb.do

    def do(verb: Verb, context: pykv.Context) -> None:
        is_wrong = verb.name == "seq_add" and context.model.wrong  # type: ignore[attr-defined]
        real(Verb(verb.name, (*verb.args[:3], verb.args[3] - 1)) if is_wrong else verb, context)

    load = pykv.Model.load

    def loaded(path: Any, devices: list[str], **more: Any) -> pykv.Model:
        model = load(path, devices, **more)
        model.wrong = devices == ["cpu"]  # type: ignore[attr-defined]
        return model

    monkeypatch.setattr(side.Model, "load", loaded)
    monkeypatch.setattr(Verb, "do", do)
    (found,) = compare(write_tiny(TINY)).sides
    assert found.first is not None
    assert (found.first.kind, found.first.layer) == ("K", 0)
    assert found.first.did == "seq_add(0, 40, -1, -20)"


def test_distances_are_plain_sums() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(2, 3, 5)).astype(np.float32)
    squares = sum((float(x) - float(y)) ** 2 for x, y in zip(a.ravel(), b.ravel(), strict=True))
    nmse, most = distances.apart(a, b)
    assert nmse == pytest.approx(squares / sum(float(x) ** 2 for x in a.ravel()))
    assert most == pytest.approx(max(abs(float(x) - float(y)) for x, y in zip(a.ravel(), b.ravel(), strict=True)))
    for row, kl in zip(range(3), distances.divergence(a, b), strict=True):
        p, q = (np.exp(x[row].astype(float)) / np.exp(x[row].astype(float)).sum() for x in (a, b))
        assert kl == pytest.approx(sum(x * np.log(x / y) for x, y in zip(p, q, strict=True)))


def test_what_is_no_number_on_one_side_is_infinitely_far() -> None:
    a = np.ones((2, 2), np.float32)
    assert distances.apart(a, np.array([[1, np.nan], [1, 1]], np.float32)) == (np.inf, np.inf)
    assert distances.apart(a, np.ones((3, 2), np.float32)) == (np.inf, np.inf)
    both = np.array([[1, np.inf]], np.float32)
    assert distances.apart(both, both.copy()) == (0.0, 0.0)
    assert distances.apart(np.zeros((1, 2), np.float32), np.zeros((1, 2), np.float32)) == (0.0, 0.0)


def test_flips_tell_by_how_much_the_reference_prefers_its_own() -> None:
    found, a = Distances(), np.array([[1, 3, 2.5], [0, 1, 2]], np.float32)
    found.compare(4, "a step", {("logits", -1): a}, {("logits", -1): a[:, [0, 2, 1]]})
    (first, second) = found.flips
    assert (first.step, first.row, first.expected, first.found, first.gap) == (4, 0, 1, 2, 0.5)
    assert (second.row, second.gap) == (1, 1.0)


def test_what_another_split_makes_counts_as_rounding() -> None:
    one, ten, more = (np.array([[1, x]], np.float32) for x in (1.001, 1.002, 1.02))
    exact = np.ones((1, 2), np.float32)
    split, side_, far = Distances(), Distances(), Distances()
    for found, rows in ((split, one), (side_, ten), (far, more)):
        found.compare(1, "", {("K", 0): exact}, {("K", 0): rows})
    assert side_.report("a", "", 1e-9, split).verdict == "rounding"
    assert side_.report("a", "", 1e-9, Distances()).verdict == "differs"
    assert far.report("a", "", 1e-9, split).verdict == "differs"


def test_limits_follow_from_types() -> None:
    assert limit([DType.F32], DType.F32, DType.F32) == 1e-4
    assert limit([DType.F32, DType.Q4_1], DType.F32, DType.F32) == 1e-2
    assert limit([DType.F32], DType.F16, DType.Q4_0) == 1e-1


def test_the_program_goes_on_until_a_window_has_passed(write_tiny: Callable[[TinyFile], Path]) -> None:
    with pykv.Model.load(write_tiny(KINDS["gemma3"])) as model, model.context(n_ctx=256) as context:
        spec = context.memory.spec
    program = made_up(spec, True, 300)
    longest = max(len(step.tokens) for step in program if isinstance(step, Decode))
    assert longest > spec.window.n_swa
    assert {step.name for step in program if isinstance(step, Verb)} == {"seq_cp", "seq_rm", "seq_add"}


def test_given_tokens_are_said_over_and_over(write_tiny: Callable[[TinyFile], Path]) -> None:
    with pykv.Model.load(write_tiny(TINY)) as model, model.context(n_ctx=256) as context:
        program = made_up(context.memory.spec, True, 300, [7, 8, 9])
    assert isinstance(program[0], Decode)
    assert program[0].tokens[:5] == (7, 8, 9, 7, 8)


def test_a_recorded_trace(write_tiny: Callable[[TinyFile], Path], tmp_path: Path) -> None:
    path, trace = write_tiny(TINY), tmp_path / "a.jsonl"
    with pykv.Model.load(path) as model, model.context(n_ctx=256, n_seq_max=2) as context, context.trace(trace):
        context.decode(pykv.Batch([1, 2, 3, 4]))
        context.memory.seq_cp(0, 1)
        context.decode(pykv.Batch([5], seq_id=[1]))
    report = compare(path, trace=trace)
    assert report.n_steps == 3
    assert report.sides[0].n_rows == 5


def test_what_is_refused(write_tiny: Callable[[TinyFile], Path], tmp_path: Path) -> None:
    path = write_tiny(TINY)
    for devices, more, said in (
        (("CPU",), {}, "at least two"),
        ("CPU,CPU", {}, "must be a list of names"),
        (("CPU", "CUDA9"), {}, "no device 'CUDA9'"),
        (("CPU", "cpu"), {"tokens": []}, "at least one token"),
        (("CPU", "cpu"), {"tokens": [10**6]}, "no id below"),
        (("CPU", "cpu"), {"tolerance": -1}, "tolerance=-1"),
        (("CPU", "cpu"), {"tokens": [1], "trace": tmp_path}, "one of the two"),
        (("CPU", "cpu"), {"type_k": "q9"}, "type_k"),
    ):
        with pytest.raises(ParamError, match=said):
            compare(path, devices, **more)  # type: ignore[arg-type]


def test_steps_are_told(write_tiny: Callable[[TinyFile], Path]) -> None:
    seen: list[tuple[int, int]] = []
    report = compare(write_tiny(TINY), on_step=lambda n, of: seen.append((n, of)))
    assert seen == [(i, report.n_steps) for i in range(1, report.n_steps + 1)]


def test_an_isolated_device_shows_as_much(
    write_tiny: Callable[[TinyFile], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pykv.Model.load

    def load(path: Any, devices: list[str], **more: Any) -> pykv.Model:
        return real(path, devices, **more, isolate=devices == ["cpu"])

    monkeypatch.setattr(side.Model, "load", load)
    (apart,) = compare(write_tiny(KINDS["falcon-h1"])).sides
    assert set(apart.by_layer) == {"K", "V", "attention", "R", "S", "logits"}
    assert apart.verdict == "same"
