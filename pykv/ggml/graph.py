"""Graph: the nodes to compute, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pykv._native import ffi, lib
from pykv.errors import TensorError, UnsupportedOpError, UseAfterCloseError
from pykv.ggml.arena import Arena
from pykv.ggml.device import Device
from pykv.ggml.limits import limit_met, offsets_of
from pykv.ggml.tensor import Tensor


class Graph:
    """One graph in an arena that was made with room for it."""

    def __init__(self, arena: Arena) -> None:
        if not arena.graph_size:
            raise TensorError("the arena was made without room for a graph")
        if arena.has_graph:
            raise TensorError("the arena holds a graph already; there is room for one")
        self.arena, self._epoch = arena, arena.epoch
        self._raw = lib.ggml_new_graph_custom(arena.ptr, arena.graph_size, False)
        arena.has_graph = True

    @property
    def ptr(self) -> Any:
        """The C pointer; raises `UseAfterCloseError` when the arena is closed or was reset."""
        _ = self.arena.ptr
        if self._epoch != self.arena.epoch:
            raise UseAfterCloseError("the graph is gone: its arena was reset")
        return self._raw

    @property
    def n_nodes(self) -> int:
        return int(lib.ggml_graph_n_nodes(self.ptr))

    def expand(self, tensor: Tensor) -> None:
        """Add everything that `tensor` depends on, and itself, behind what is there already.

        Raises
        ------
        TensorError : the graph could overflow, has been allocated, or `tensor` is computed in another arena.
        """
        arena, pointers = self.arena, (self.ptr, tensor.ptr)
        if arena.grant is not None:
            raise TensorError("the graph has been allocated and cannot grow")
        if tensor.arena is not arena:
            arena.borrow(tensor)
        # note: ggml ends the process on overflow; it counts nodes and leaves apart
        n_leaves = arena.n_leaves + arena.n_borrowed
        if max(arena.n_used - arena.n_leaves, n_leaves) > arena.graph_size:
            raise TensorError(f"the graph's budget of {arena.graph_size} nodes is used up")
        lib.ggml_build_forward_expand(*pointers)

    def nodes(self) -> Iterator[Any]:
        """Yield the nodes as C tensors, in the order of computation."""
        raw = self.ptr
        for i in range(self.n_nodes):
            yield lib.ggml_graph_node(raw, i)

    def check_supported(self, devices: tuple[Device, ...]) -> None:
        """Raise unless every node can run on one of the devices, where the data of its operands lies.

        Raises
        ------
        UnsupportedOpError : names the operation, the operands' types, stored tensors by their names, and the devices.
        """
        pointers = ffi.new("ggml_backend_dev_t[]", [device.ptr for device in devices])
        node = lib.pykv_graph_misfit(self.ptr, pointers, offsets_of(devices), len(devices))
        if node != ffi.NULL:
            what = ffi.string(lib.ggml_op_desc(node)).decode()
            name = ffi.string(lib.ggml_get_name(node)).decode(errors="replace")
            where = ", ".join(device.name for device in devices)
            if what == "NONE":  # no operation, but memory that one would read
                raise UnsupportedOpError(
                    f"{name!r} is one tensor of {lib.ggml_nbytes(node)} bytes, more than can be read at once on {where}"
                )
            limit, how = limit_met(node, devices)
            raise UnsupportedOpError(
                f"{what} of {_types(node)} (node {name!r}) cannot run on {where}{how}", limit=limit or None
            )


def _types(node: Any) -> str:
    """Return the types of a node's operands and its own; of stored tensors the names, which tell the layer."""
    operands = []
    for one in (operand for operand in node.src if operand != ffi.NULL):
        home = one.view_src if one.view_src != ffi.NULL else one
        name = ffi.string(lib.ggml_get_name(home)).decode(errors="replace")
        told = f" ({name})" if home.buffer != ffi.NULL and name else ""
        operands.append(ffi.string(lib.ggml_type_name(one.type)).decode() + told)
    return f"{', '.join(operands) or 'nothing'} into {ffi.string(lib.ggml_type_name(node.type)).decode()}"
