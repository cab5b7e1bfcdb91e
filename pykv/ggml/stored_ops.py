"""Operations of a graph on tensors of a memory: attention to them, and writes of their rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pykv._native import ffi, lib
from pykv.ggml.device import Device, device_at
from pykv.ggml.graph import Graph
from pykv.ggml.types import DType


@dataclass(frozen=True)
class StoredOp:
    """One such node, of a tensor that lies on another device than the CPU.

    Attributes
    ----------
    node : the C tensor.
    name : ggml's name of the operation, such as "flash_attn_ext".
    stored, dtype, device : the stored tensor's name and type, and where it lies.
    """

    node: Any
    name: str
    stored: str
    dtype: DType
    device: Device


@dataclass(frozen=True)
class MisplacedOp:
    """An operation on a stored tensor, and the device on which it runs although the tensor lies elsewhere."""

    name: str
    stored: str
    dtype: DType
    device: Device
    runs_on: Device


def home_of(buffer: Any) -> Device | None:
    """Return the device whose memory a C buffer is, None for host memory that is no device's."""
    ptr = lib.ggml_backend_buft_get_device(lib.ggml_backend_buffer_get_type(buffer))
    return None if ptr == ffi.NULL else device_at(ptr)


def stored_ops(graph: Graph) -> list[StoredOp]:
    """Return the operations on stored tensors that lie elsewhere than in host memory."""
    nodes, stored = (ffi.new("struct ggml_tensor *[]", graph.n_nodes) for _ in range(2))
    found = []
    for i in range(lib.pykv_graph_stored_ops(graph.ptr, nodes, stored)):
        device = home_of(stored[i].buffer)
        if device is not None and device.kind != "cpu":
            name = ffi.string(lib.ggml_op_desc(nodes[i])).decode().lower()
            label = ffi.string(lib.ggml_get_name(stored[i])).decode(errors="replace")
            found.append(StoredOp(nodes[i], name, label, DType(stored[i].type), device))
    return found
