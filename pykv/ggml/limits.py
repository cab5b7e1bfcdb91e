"""What backends cannot do, though they do not say so or end the process over it: one table, with the reasons.

What a backend says itself (`Device.supports_op`) is not repeated here. An operation that meets one of these limits goes
to the CPU, or where its data lies elsewhere it is refused before anything is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pykv._native import ffi, lib
from pykv.ggml.device import Device


@dataclass(frozen=True)
class Limit:
    """One thing that a backend cannot do.

    Attributes
    ----------
    backend : its name in ggml's registry.
    name : a word for it, which `UnsupportedOpError.limit` repeats.
    what : what it cannot.
    reason : why, and what becomes of it.
    """

    backend: str
    name: str
    what: str
    reason: str


# fmt: off
_ANY_ON_VULKAN = (
    "NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "CONT", "CPY", "DUP", "CONCAT", "PAD", "FILL", "SET_ROWS",
    "ADD", "SUB", "MUL", "DIV", "SCALE", "CLAMP", "SQR", "SQRT", "UNARY", "GLU", "NORM", "RMS_NORM", "L2_NORM",
    "SUM_ROWS", "MEAN", "OUT_PROD",
)
# fmt: on

ANY_OFFSET: dict[str, frozenset[str]] = {"Vulkan": frozenset(_ANY_ON_VULKAN)}
"""Operations that a backend computes right wherever its operands begin; all others want its alignment.

ggml's Vulkan ends the process over most of those, and turns wrong elements in RoPE.
"""

_CUSTOM = (
    "custom",
    "custom operations: fused attention, and the observation of attention",
    "they are functions of this process over host memory; the cache must lie in it (offload_kqv=False)",
)

LIMITS: tuple[Limit, ...] = (
    Limit(
        "Vulkan",
        "offsets",
        f"operands that begin between two multiples of the buffer's alignment, but in {len(_ANY_ON_VULKAN)} operations",
        "storage buffers are bound at multiples of minStorageBufferOffsetAlignment; such an operation runs on the CPU",
    ),
    Limit(
        "Vulkan",
        "products",
        "products of f32 matrices in more than 11 bits, with many columns or with strides",
        "operands are rounded to f16 where the device computes in f16: logits of f32 models are exact to an NMSE of "
        "3e-5, and to 7e-6 with GGML_VK_DISABLE_F16 set in the environment",
    ),
    Limit("Vulkan", *_CUSTOM),
    Limit("CUDA", *_CUSTOM),
    Limit("RPC", *_CUSTOM),
    Limit(
        "RPC",
        "views",
        "a view of one server's tensor in a part of a graph that another one computes",
        "the server would refuse it and the client end; views are kept where what they view lies",
    ),
    *(
        Limit(backend, "pieces", "parts of weights", "matrices are laid out anew as they arrive; they are sent whole")
        for backend in ("OpenCL", "CANN")
    ),
    Limit(
        "BLAS",
        "choice",
        "part in anything unless it is named (devices=['BLAS'])",
        "it has no memory of its own and helps the CPU with products of many columns; the contract suites pass on it",
    ),
    Limit("RPC", "loss", "outliving its server", "ggml's client ends the process; only another one can contain that"),
)
"""The table. Limits that a message names, and those that tests leave a test out for, are found here."""


def limits_of(backend: str) -> tuple[Limit, ...]:
    """Return what a backend cannot do, by its name in ggml's registry."""
    return tuple(one for one in LIMITS if one.backend == backend)


def takes_pieces(device: Device) -> bool:
    """Return whether a tensor may be filled piece by piece."""
    return all(one.name != "pieces" for one in limits_of(device.backend))


@cache
def _takes_any(backend: str) -> Any:
    """Return, for each of ggml's operations, whether it takes operands at any offset."""
    known = ANY_OFFSET[backend]
    names = [ffi.string(lib.ggml_op_name(op)).decode() for op in range(lib.GGML_OP_COUNT)]
    assert known <= set(names), f"operations that ggml has not: {known - set(names)}"
    return ffi.new("bool[]", [name in known for name in names])


@cache
def offsets_of(devices: tuple[Device, ...]) -> Any:
    """Return at which offsets each device takes operands, as C wants it."""
    told = ffi.new("struct pykv_offsets[]", max(1, len(devices)))
    for one, device in zip(told, devices, strict=False):
        if device.backend in ANY_OFFSET:
            one.multiple, one.takes_any = device.buffer_type.alignment, _takes_any(device.backend)
    return told


def limit_met(node: Any, devices: Sequence[Device]) -> tuple[str, str]:
    """Return the name of the limit that a node which none of the devices runs has met, and how; else two empty texts.

    Empty means that the backends say themselves what they cannot.
    """
    if ffi.string(lib.ggml_op_desc(node)) == b"CUSTOM":
        for device in devices:
            for one in limits_of(device.backend):
                if one.name == "custom":
                    return one.name, f": {device.name} has no {one.what}; {one.reason}"
    offsets = offsets_of(tuple(devices))
    for i, device in enumerate(devices):
        if device.supports_op(node) and not lib.pykv_takes_offsets(node, offsets + i):
            return "offsets", f": {device.name} takes operands at multiples of {device.buffer_type.alignment} bytes"
    return "", ""
