"""Devices: what ggml can compute on here, and how much memory each has."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pykv._native import ffi, lib
from pykv.errors import ParamError
from pykv.ggml.buffer import BufferType

_KINDS = {
    lib.GGML_BACKEND_DEVICE_TYPE_CPU: "cpu",
    lib.GGML_BACKEND_DEVICE_TYPE_GPU: "gpu",
    lib.GGML_BACKEND_DEVICE_TYPE_IGPU: "igpu",
    lib.GGML_BACKEND_DEVICE_TYPE_ACCEL: "accel",
}


@dataclass(frozen=True)
class Device:
    """One device of ggml's registry.

    Attributes
    ----------
    name, description : as the backend gives them, such as "CUDA0".
    kind : "cpu", "gpu", "igpu" (shares host memory), "accel" (helps the CPU) or "other".
    backend : name of the backend, such as "Vulkan".
    memory_total : bytes.
    can_wrap_host_memory : whether weights mapped from a file can be used in place.
    """

    name: str
    description: str
    kind: str
    backend: str
    memory_total: int
    can_wrap_host_memory: bool
    ptr: Any = field(repr=False, compare=False)

    @property
    def is_gpu(self) -> bool:
        return self.kind in ("gpu", "igpu")

    @property
    def memory_free(self) -> int:
        """Bytes that can still be allocated now, as far as the system tells."""
        if self.kind == "cpu":
            return min(host_memory_available(), self.memory_total)
        return int(_props(self.ptr).memory_free)

    @property
    def buffer_type(self) -> BufferType:
        return BufferType(lib.ggml_backend_dev_buffer_type(self.ptr))

    @property
    def host_buffer_type(self) -> BufferType | None:
        """Memory of the host from and to which the device copies fastest, None where it has none of its own."""
        ptr = lib.ggml_backend_dev_host_buffer_type(self.ptr)
        return None if ptr == ffi.NULL else BufferType(ptr)

    @property
    def repack_type(self) -> BufferType | None:
        """Memory that lays matrices out anew for faster products, None where the device has none."""
        ptr = lib.pykv_repack_type(self.ptr)
        return None if ptr == ffi.NULL else BufferType(ptr)

    def supports_op(self, node: Any) -> bool:
        """Whether the device can run a graph node (a C tensor)."""
        return bool(lib.ggml_backend_dev_supports_op(self.ptr, node))


def _props(ptr: Any) -> Any:
    props = ffi.new("struct ggml_backend_dev_props *")
    lib.ggml_backend_dev_get_props(ptr, props)
    return props


@cache
def device_at(ptr: Any) -> Device:
    """Return the device of a C pointer."""
    props = _props(ptr)
    registry = lib.ggml_backend_reg_name(lib.ggml_backend_dev_backend_reg(ptr))
    return Device(
        name=ffi.string(props.name).decode(),
        description=ffi.string(props.description).decode().strip(),
        kind=_KINDS.get(props.type, "other"),
        backend=ffi.string(registry).decode(),
        memory_total=int(props.memory_total),
        can_wrap_host_memory=bool(props.caps.buffer_from_host_ptr),
        ptr=ptr,
    )


def host_memory_available() -> int:
    """Return the bytes of host memory that a new allocation may use without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) * 1024, _cgroup_limit())
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2**63 - 1


def _cgroup_limit() -> int:
    """Return what a container still grants, or a number without meaning where there is none."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return 2**63 - 1
    return 2**63 - 1 if limit == "max" else max(0, int(limit) - used)


def devices() -> tuple[Device, ...]:
    """Return all devices, in the order of ggml's registry. `connect_rpc` adds to them."""
    if lib.ggml_backend_dev_count() == 0:  # a ggml whose backends are plug-ins
        lib.ggml_backend_load_all_from_path(ffi.NULL)
    return tuple(device_at(lib.ggml_backend_dev_get(i)) for i in range(lib.ggml_backend_dev_count()))


def find_device(name: str, argument: str = "devices") -> Device:
    """Return the device of that name, upper or lower case. `argument` is whose value it is.

    Raises
    ------
    ParamError : there is none; the message lists those there are.
    """
    for device in devices():
        if device.name.lower() == str(name).lower():
            return device
    raise ParamError(f"{argument}: no device {name!r}; here are {', '.join(d.name for d in devices())}")


def cpu_device() -> Device:
    """Return the CPU, which every ggml has."""
    return next(device for device in devices() if device.kind == "cpu")
