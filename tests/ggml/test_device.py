"""Devices and what the system says of its memory."""

from __future__ import annotations

import pytest

from pykv.errors import ParamError
from pykv.ggml import cpu_device, devices, find_device
from pykv.ggml import device as device_module


def test_the_cpu_is_always_there():
    cpu = cpu_device()
    assert cpu in devices()
    assert cpu.kind == "cpu"
    assert not cpu.is_gpu
    assert cpu.can_wrap_host_memory
    assert 0 < cpu.memory_free <= cpu.memory_total
    assert cpu.description
    assert "ptr" not in repr(cpu)


def test_devices_are_found_by_name_in_any_case():
    for device in devices():
        assert find_device(device.name.lower()) is find_device(device.name.upper()) is device


@pytest.mark.parametrize("name", ["", "CUDA99", None])
def test_an_unknown_device_lists_those_there_are(name):
    with pytest.raises(ParamError, match=rf"no device {name!r}; here are .*CPU"):
        find_device(name)


def test_a_container_that_grants_less_counts(monkeypatch):
    whole = device_module.host_memory_available()
    monkeypatch.setattr(device_module, "_cgroup_limit", lambda: 12345)
    assert device_module.host_memory_available() == 12345 < whole
    assert cpu_device().memory_free == 12345
