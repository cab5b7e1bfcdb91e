"""Which device holds which layer and which tensor: what callers ask for, and what it comes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny.model import TinyFile
from support.tiny.registry import BY_NAME
from support.tiny_gguf import TinyModel
from support.twin import EXACT, TOKENS

import pykv
from pykv.errors import ParamError
from pykv.ggml import Device, cpu_device
from pykv.runtime import placing as placing_module
from pykv.runtime.placing import PlacementWish

TINY = TinyModel(seed=71, n_layer=4, is_tied=False)
NAMES = ("token_embd.weight", "blk.0.ffn_up.weight", "blk.1.ffn_up.weight", "output.weight")


@pytest.fixture
def path(write_tiny: Callable[[TinyModel], Path]) -> Path:
    return write_tiny(TINY)


def gpu(i: int) -> Device:
    return replace(cpu_device(), name=f"GPU{i}", kind="gpu")


def copying(name: str) -> Device:
    """Return the CPU under another name, as a device to which weights are uploaded."""
    return replace(cpu_device(), name=name, can_wrap_host_memory=False)


def homes(n_layer: int, *asked: Any, **more: Any) -> str:
    """Return where each layer and at last the output go: the digit of a GPU, or c."""
    place = PlacementWish.of(*asked, **more).over(NAMES, n_layer)
    assert place.input == cpu_device()
    return "".join("c" if d.kind == "cpu" else d.name[-1] for d in (*place.layers, place.output))


# devices and numbers of layers


@pytest.mark.parametrize(
    ("n_devices", "n_layer", "n_gpu_layers", "expected"),
    [
        (1, 4, -1, "00000"),
        (1, 4, 0, "ccccc"),
        (1, 4, 1, "cccc0"),
        (1, 4, 3, "cc000"),
        (1, 4, 4, "c0000"),
        (1, 4, 5, "00000"),
        (1, 4, 99, "00000"),
        (2, 5, -1, "000111"),
        (2, 4, -1, "00011"),
        (2, 4, 2, "ccc01"),
        (3, 5, -1, "001122"),
        (3, 1, -1, "01"),
    ],
)
def test_the_last_layers_go_to_the_devices(n_devices: int, n_layer: int, n_gpu_layers: int, expected: str) -> None:
    assert homes(n_layer, [gpu(i) for i in range(n_devices)], n_gpu_layers) == expected


def test_on_the_cpu_everything_is_on_the_cpu() -> None:
    assert homes(3, [cpu_device()], -1) == homes(3, [cpu_device()], 2) == "cccc"


def test_devices_by_name_and_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = cpu_device()
    for asked in (cpu.name.lower(), cpu, [cpu.name], [cpu]):
        assert PlacementWish.of(asked).devices == (cpu,)
    monkeypatch.setattr(placing_module, "devices", lambda: (gpu(0), replace(cpu, kind="accel"), gpu(1), cpu))
    assert [device.name for device in PlacementWish.of().devices] == ["GPU0", "GPU1"]
    monkeypatch.setattr(placing_module, "devices", lambda: (cpu,))
    assert PlacementWish.of().devices == (cpu,)


def test_devices_that_are_not_here(path: Path) -> None:
    with pytest.raises(ParamError, match=r"devices: no device 'CUDA7'; here are .*CPU"):
        pykv.Model.load(path, devices=["CUDA7"])
    with pytest.raises(ParamError, match=r"devices=\[\] must name at least one"):
        pykv.Model.load(path, devices=[])


@pytest.mark.parametrize("given", [3, True, [3], [None], [b"CPU"], {"CPU": None}.values()])
def test_devices_without_a_name_ended_in_a_bare_type_error(path: Path, given: object) -> None:
    with pytest.raises(ParamError, match=r"devices.* must be the name of a device"):
        pykv.Model.load(path, devices=given)


@pytest.mark.parametrize("n", [-2, 1.5, True, "3", "x", None, np.True_])
def test_numbers_of_layers_that_mean_nothing(path: Path, n: object) -> None:
    with pytest.raises(ParamError, match="n_gpu_layers="):
        pykv.Model.load(path, n_gpu_layers=n)


# shares


@pytest.mark.parametrize(
    ("n_layer", "n_gpu_layers", "shares", "expected"),
    [
        (7, -1, [1, 1], "00001111"),
        (7, -1, [3, 1], "00000011"),
        (7, -1, [1, 3], "00111111"),
        (7, 4, [3, 1], "cccc0001"),
        (7, -1, [0, 1], "11111111"),
        (7, -1, [1, 0], "00000000"),
        (7, -1, [1, 0, 1], "00002222"),
        (8, -1, [1, 1, 1], "000111222"),
        (2, -1, [0.1, 0.1, 0.1], "012"),
        (2, -1, [1e300, 1e300, 1e300], "012"),
        (5, -1, np.array([3, 1, 2]), "000122"),
        (3, 0, [1, 2], "cccc"),
    ],
)
def test_devices_take_their_shares_of_the_layers(n_layer: int, n_gpu_layers: int, shares: Any, expected: str) -> None:
    """A part begins where that share of the layers is behind it, the output counting as one."""
    assert homes(n_layer, [gpu(i) for i in range(len(shares))], n_gpu_layers, shares) == expected


@pytest.mark.parametrize("shares", [3, "11", b"11", [1, "1"], [-1, 2], [float("nan"), 1], [float("inf"), 1], [True, 1]])
def test_shares_that_mean_nothing(shares: object) -> None:
    with pytest.raises(ParamError, match=r"tensor_split=.* must be numbers that are not negative"):
        PlacementWish.of([gpu(0), gpu(1)], tensor_split=shares)


@pytest.mark.parametrize("shares", [[], [1], [1, 1, 1], [0, 0]])
def test_a_share_for_each_device(shares: list[float]) -> None:
    with pytest.raises(ParamError, match=r"tensor_split=\[.* must have a number for each of 2 devices, not all 0"):
        PlacementWish.of([gpu(0), gpu(1)], tensor_split=shares)


# overrides


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, "00000"),
        ({1: "CPU"}, "0c000"),
        ({np.int32(3): gpu(7)}, "00070"),
        ({range(2): "cpu"}, "cc000"),
        ({range(3, -1, -2): "CPU"}, "0c0c0"),
        ({0: gpu(1), range(3): gpu(2)}, "12200"),
        ({range(3): gpu(2), 0: gpu(1)}, "22200"),
    ],
)
def test_layers_go_where_they_are_told(overrides: Any, expected: str) -> None:
    """Of two that name a layer the first decides."""
    assert homes(4, gpu(0), overrides=overrides) == expected


def test_the_first_pattern_that_fits_decides() -> None:
    rules = {r"blk\.1\..*up": gpu(1), r"ffn_up": gpu(2)}
    place = PlacementWish.of(gpu(0), overrides=rules).over(NAMES, 2)
    found = [place.home(name, gpu(0)).name for name in NAMES]
    assert found == ["GPU0", "GPU2", "GPU1", "GPU0"]
    assert [device.name for device in place.devices] == ["GPU0", "CPU", "GPU1", "GPU2"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([("x", "CPU")], r"overrides=\[.*\] must map layers or patterns to devices"),
        ({"(": "CPU"}, r"overrides: '\(' is no regular expression: "),
        ({0: "CUDA7"}, r"overrides: no device 'CUDA7'; here are"),
        ({0: None}, r"overrides: None must be the name of a device"),
        ({None: "CPU"}, r"overrides: None must be a layer, a range of layers, or a pattern"),
        ({True: "CPU"}, r"overrides: True must be a layer"),
        ({1.0: "CPU"}, r"overrides: 1.0 must be a layer"),
        ({-1: "CPU"}, r"overrides: -1 must name layers, from 0 on"),
        ({range(0): "CPU"}, r"overrides: range\(0, 0\) must name layers"),
        ({4: "CPU"}, r"overrides: layer 4 must lie in 0\.\.3, the model's layers"),
        ({range(3, 6): "CPU"}, r"overrides: layers 3 to 5 must lie in 0\.\.3"),
        ({"ffn_.*_exps": "CPU"}, r"overrides: no tensor's name matches 'ffn_\.\*_exps'; they are like '\w+\.weight', "),
    ],
)
def test_overrides_that_mean_nothing(path: Path, overrides: Any, message: str) -> None:
    with pytest.raises(ParamError, match=message):
        pykv.Model.load(path, overrides=overrides)


# what is computed


def logits(path: Path, **placement: Any) -> np.ndarray:
    with pykv.Model.load(path, **placement) as model, model.context(n_ctx=256, **EXACT) as context:
        context.decode(pykv.Batch(TOKENS[:20], logits="all"))
        return context.logits


@pytest.mark.parametrize(
    "placement",
    [
        {"tensor_split": [1, 2]},
        {"n_gpu_layers": 3, "tensor_split": [2, 1]},
        {"overrides": {range(1, 3): "CPU"}},
        {"overrides": {"ffn_": "CPU", r"attn_[qk]\.": copying("C")}},
        {"overrides": {"token_embd": copying("C"), r"^output": "CPU", "norm": copying("B")}},
    ],
)
def test_where_tensors_lie_changes_no_bit(path: Path, placement: dict[str, Any]) -> None:
    """Devices with the CPU's kernels: what differed would have been read from the wrong place."""
    devices = [copying("A"), copying("B")]
    assert np.array_equal(logits(path, devices=devices, **placement), logits(path, repack=False))


def test_an_isolated_model_is_placed_alike(path: Path) -> None:
    asked: dict[str, Any] = {
        "devices": ["CPU", "CPU"],
        "tensor_split": np.array([1, 2]),
        "overrides": {range(1, 3): "CPU", "ffn_": "cpu", 0: cpu_device()},
    }
    with pykv.Model.load(path, **asked, isolate=True) as there, pykv.Model.load(path, **asked, isolate=False) as here:
        found, expected = there.placement, here.placement
        assert [device.name for device in found.devices] == [device.name for device in expected.devices]
        assert [(rule.pattern, rule.device.name) for rule in found.rules] == [("ffn_", "CPU")]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"overrides": {"exps": "CPU"}}, "overrides: no tensor's name matches 'exps'"),
        ({"overrides": {0: "CUDA7"}}, "overrides: no device 'CUDA7'"),
        ({"overrides": 3}, "overrides=3 must map layers or patterns to devices"),
        ({"overrides": {0: 3}}, "overrides: 3 must be the name of a device"),
        ({"tensor_split": [1, 1]}, "tensor_split=.* must have a number for each of 1 devices"),
        ({"n_gpu_layers": -2}, "n_gpu_layers=-2 must be"),
    ],
)
def test_an_isolated_model_refuses_the_same(path: Path, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamError, match=message):
        pykv.Model.load(path, "CPU", isolate=True, **asked)


def test_experts_alone_lie_elsewhere(write_tiny: Callable[[TinyFile], Path]) -> None:
    path = write_tiny(BY_NAME["gpt-oss-4l-w32"])
    rows = logits(path, devices=copying("A"), overrides={r"ffn_.*_exps\.": "CPU"})
    assert np.array_equal(rows, logits(path, repack=False))
