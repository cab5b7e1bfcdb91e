"""Graph: the nodes to compute, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pykv._native import ffi, lib
from pykv.errors import TensorError, UnsupportedOpError
from pykv.ggml.arena import Arena
from pykv.ggml.device import Device
from pykv.ggml.tensor import Tensor


class Graph:
    """One graph in an arena that was made with room for it."""

    def __init__(self, arena: Arena) -> None:
        if not arena.graph_size:
            raise TensorError("the arena was made without room for a graph")
        self.arena = arena
        self._raw = lib.ggml_new_graph_custom(arena.ptr, arena.graph_size, False)

    @property
    def ptr(self) -> Any:
        _ = self.arena.ptr
        return self._raw

    @property
    def n_nodes(self) -> int:
        return int(lib.ggml_graph_n_nodes(self.ptr))

    def expand(self, tensor: Tensor) -> None:
        """Add everything that `tensor` depends on, and itself, behind what is there already.

        Raises
        ------
        TensorError : the graph could overflow.
        """
        # note: ggml ends the process on overflow; each tensor of the arena is at most one node or leaf
        if self.arena.n_used > self.arena.graph_size:
            raise TensorError(f"the graph's budget of {self.arena.graph_size} nodes is used up")
        lib.ggml_build_forward_expand(self.ptr, tensor.ptr)

    def nodes(self) -> Iterator[Any]:
        """Yield the nodes as C tensors, in the order of computation."""
        raw = self.ptr
        for i in range(self.n_nodes):
            yield lib.ggml_graph_node(raw, i)

    def check_supported(self, devices: tuple[Device, ...]) -> None:
        """Raise unless every node can run on one of the devices.

        Raises
        ------
        UnsupportedOpError : names the operation and the operands' types.
        """
        for node in self.nodes():
            if not any(device.supports_op(node) for device in devices):
                what = ffi.string(lib.ggml_op_desc(node)).decode()
                name = ffi.string(lib.ggml_get_name(node)).decode()
                where = ", ".join(device.name for device in devices)
                raise UnsupportedOpError(f"{what} (node {name!r}) cannot run on {where}")
