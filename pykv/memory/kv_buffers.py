"""Give a KV plan its memory: one buffer per buffer type, after a look whether there is room."""

from __future__ import annotations

from pykv.errors import AllocError
from pykv.ggml import Buffer, Tensor, devices
from pykv.memory.kv_plan import KVPlan


def allocate(plan: KVPlan) -> tuple[list[Buffer], dict[int, tuple[Tensor, Tensor]]]:
    """Return zeroed buffers, and the K and V tensor of each layer that owns some.

    Raises
    ------
    AllocError : a device lacks the memory; nothing stays allocated.
    """
    _check_room(plan)
    buffers: list[Buffer] = []
    tensors: dict[int, tuple[Tensor, Tensor]] = {}
    try:
        for kind, layers in plan.by_buffer_type:
            arena, pairs = plan.make_tensors(layers)
            buffer = Buffer.allocate(arena, kind, f"KV cache of {_size(plan)}")
            buffers.append(buffer)
            for layer, (k, v) in zip(layers, pairs, strict=True):
                tensors[layer.il] = (buffer.adopt(k), buffer.adopt(v))
    except BaseException:
        for buffer in buffers:
            buffer.close()
        raise
    return buffers, tensors


def _check_room(plan: KVPlan) -> None:
    """Refuse what the devices lack before anything is touched."""
    # differs from llama.cpp: asked first, because a host that overcommits would grant it and end the process later
    needs, free = plan.nbytes_per_buffer_type, dict[str, int]()
    for device in devices():
        name = device.buffer_type.name
        # helpers of the CPU share its buffer type and report nothing; a server without a part in this is not asked
        if name in needs and device.memory_total:
            free[name] = max(free.get(name, 0), device.memory_free)
    for name, need in needs.items():
        if need > free.get(name, need):
            raise AllocError(
                f"{_size(plan)} needs {need} bytes of KV cache in {name}, which has {free[name]} bytes free"
            )


def _size(plan: KVPlan) -> str:
    return f"n_ctx={plan.settings.n_cells} x {plan.settings.n_stream} streams"
