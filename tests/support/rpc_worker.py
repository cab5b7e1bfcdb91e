"""A client of an RPC server, in a process of its own: ggml ends a client whose server dies.

One line of JSON in, ``[scene, arguments by name]``, and one out: ``{"returned": ...}`` or ``{"raised": message}``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Step = Sequence[Any]
"""``("decode", tokens, positions or None, sequences)``, or a verb of the memory with its arguments."""


def play(steps: Sequence[Step], decode: Any, memory: Any) -> list[np.ndarray]:
    """Do the steps; returns the rows of each decode."""
    rows = []
    for verb, *arguments in steps:
        if verb == "decode":
            rows.append(np.array(decode(*arguments)))
        else:
            getattr(memory, verb)(*arguments)
    return rows


def logits(
    path: str, devices: Sequence[str] | None, steps: Sequence[Step], context: dict[str, Any], n_gpu_layers: int = -1
) -> dict[str, Any]:
    """Return what the steps give on the devices, and where everything lies."""
    import pykv

    context = {"n_ctx": 256, "n_threads": 1, **context}
    told: list[tuple[int, int]] = []
    with (
        pykv.Model.load(path, devices, n_gpu_layers, progress=lambda *done: told.append(done), isolate=False) as model,
        model.context(**context) as ctx,
    ):

        def decode(tokens: Sequence[int], pos: Any = None, seq_id: Any = 0) -> Any:
            ctx.decode(pykv.Batch(tokens, pos=pos, seq_id=seq_id, logits="all"))
            ctx.memory.check()
            return ctx.logits

        rows = play(steps, decode, ctx.memory)
        planned = model.memory_plan(**context)
        homes = [ctx.memory.tensors(il)[0].owner for il in range(model.hparams.n_layer)]
        place = model.placement
        return {
            "rows": [one.tolist() for one in rows],
            "told": told,
            "layers": [device.name for device in place.layers],
            "ends": [place.input.name, place.output.name],
            "planned": planned.nbytes_per_buffer_type,
            "nbytes": ctx.memory.nbytes,
            "is_host": [home is not None and home.is_host for home in homes],
            "n_reused": ctx.n_reused,
        }


def connect(endpoint: str, timeout: float = 5.0) -> dict[str, Any]:
    """Connect; tell which devices there were before and which came."""
    from pykv.ggml import connect_rpc, devices

    before = [device.name for device in devices()]
    new = connect_rpc(endpoint, timeout)
    return {
        "before": before,
        "now": [device.name for device in devices()],
        "new": [
            {
                "name": device.name,
                "kind": device.kind,
                "backend": device.backend,
                "description": device.description,
                "memory_total": device.memory_total,
                "memory_free": device.memory_free,
                "can_wrap_host_memory": device.can_wrap_host_memory,
                "is_host": device.buffer_type.is_host,
                "buffer_type": device.buffer_type.name,
            }
            for device in new
        ],
        "again": [device.name for device in connect_rpc(endpoint, timeout)],
    }


def op(name: str, device: str, operands: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return what an operation makes of arrays given as (numpy type, lists), and where it lies."""
    from support.cpu_graph import Bench

    from pykv._native import lib
    from pykv.ggml import RopeParams, find_device, ops

    named = {
        "get_rows": ops.get_rows,
        "set_rows": ops.set_rows,
        "mul_mat": ops.mul_mat,
        "rope": lambda arena, x, pos: ops.rope(arena, x, pos, RopeParams(x.ne[0])),
    }
    bench = Bench(find_device(device))
    out = named[name](bench.nodes, *[bench.put(np.array(values, kind)) for kind, values in operands])
    with bench.computed(out):
        is_host = lib.ggml_backend_buffer_is_host(out.ptr.buffer)
        return {"values": out.numpy().tolist(), "is_host": is_host}


def staged(device: str, values: Sequence[float]) -> dict[str, Any]:
    """Fill a graph input that lies on the device; tell what the device has before and after it is handed over."""
    from pykv.ggml import Arena, Buffer, DType, GraphInput, find_device

    arena = Arena(1)
    one = GraphInput(arena.tensor(DType.F32, (len(values),), "x"))
    with Buffer.allocate(arena, find_device(device).buffer_type, "an input") as buffer:
        buffer.adopt(one.tensor)
        one.bind()
        one.array[...] = values
        before = one.tensor.numpy().ravel().tolist()
        one.commit()
        return {"before": before, "after": one.tensor.numpy().ravel().tolist()}


def round_trip(device: str, n_bytes: int) -> bool:
    """Tell whether bytes that went to the device come back the same, whole and in part."""
    from pykv.ggml import Arena, Buffer, DType, find_device

    sent = np.random.default_rng(5).integers(0, 2**31, n_bytes // 4, np.int32)
    arena = Arena(1)
    tensor = arena.tensor(DType.I32, sent.shape)
    with Buffer.allocate(arena, find_device(device).buffer_type, "many bytes") as buffer:
        buffer.adopt(tensor)
        is_zeroed = not tensor.numpy().any()
        tensor.set(sent)
        part = np.empty(100, np.int32)
        tensor.get_into(part, offset=4 * 500)
        return is_zeroed and np.array_equal(tensor.numpy().ravel(), sent) and np.array_equal(part, sent[500:600])


def turn_v(path: str, device: str, tokens: Sequence[int]) -> dict[str, Any]:
    """Return the stored V of the last layer: in rows, turned, and turned back."""
    import pykv

    with pykv.Model.load(path, [device], isolate=False) as model, model.context(n_ctx=256, flash_attn=True) as ctx:
        ctx.decode(pykv.Batch(tokens))
        v = ctx.memory.tensors(model.hparams.n_layer - 1)[1]
        told = {"rows": v.numpy().ravel().tolist()}
        ctx.memory.store_v(True)
        told["channels"] = v.numpy().ravel().tolist()
        ctx.memory.store_v(False)
        return {**told, "again": v.numpy().ravel().tolist()}


def in_turns(path: str, device: str, tokens: Sequence[int]) -> dict[str, Any]:
    """Feed the tokens to one context forwards and to another one backwards, token by token in turns."""
    import pykv

    with pykv.Model.load(path, [device], isolate=False) as model:
        contexts = [model.context(n_ctx=256, flash_attn=True) for _ in range(2)]
        rows: list[list[Any]] = [[], []]
        for pair in zip(tokens, reversed(tokens), strict=True):
            for ctx, token, said in zip(contexts, pair, rows, strict=True):
                ctx.decode(pykv.Batch([token]))
                said.append(ctx.logits.tolist())
        n_reused = [ctx.n_reused for ctx in contexts]
        for ctx in contexts:
            ctx.close()
        return {"rows": rows, "n_reused": n_reused}


def restored(path: str, device: str, tokens: Sequence[int], on: str, context: dict[str, Any]) -> dict[str, Any]:
    """Go on twice from a snapshot; tell what was said and the bytes of the snapshot."""
    import pykv

    with pykv.Model.load(path, [device], isolate=False) as model, model.context(n_threads=1, **context) as ctx:

        def say() -> list[str]:
            rows = []
            for token in tokens[30:]:
                ctx.decode(pykv.Batch([token]))
                rows.append(ctx.logits.tobytes().hex())
            return rows

        ctx.decode(pykv.Batch(tokens[:29]))
        ctx.decode(pykv.Batch(tokens[29:30]))
        kept = ctx.memory.snapshot(0, on=on)
        first = say()
        ctx.memory.restore(0, kept)
        return {"first": first, "again": say(), "nbytes": kept.nbytes}


def refused(device: str) -> dict[str, str]:
    """Return what asking for memory that cannot be had raises."""
    from pykv.ggml import Arena, Buffer, DType, find_device

    here = find_device(device)
    small, huge = Arena(1), Arena(1)
    tensor = small.tensor(DType.F32, (4,))
    huge.tensor(DType.I8, (2**60,))
    with Buffer.allocate(small, here.buffer_type, "small") as buffer:
        buffer.adopt(tensor)
        return {
            "too much": _message(lambda: Buffer.allocate(huge, here.buffer_type, "far too much")),
            "wrapped": _message(lambda: Buffer.wrap(Arena(1), here, np.zeros(4096, np.uint8), 64)),
            "viewed": _message(lambda: buffer.host_view(tensor)),
        }


def _message(attempt: Callable[[], object]) -> str:
    try:
        return repr(attempt())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def lose_server(path: str, device: str, server_pid: int) -> None:
    """Decode on a device whose server has just died."""
    import pykv

    with pykv.Model.load(path, [device], isolate=False) as model, model.context(n_ctx=256, flash_attn=True) as ctx:
        ctx.decode(pykv.Batch([1, 2, 3]))
        os.kill(server_pid, signal.SIGKILL)
        for token in range(10):  # the first may still fit into the socket
            ctx.decode(pykv.Batch([token]))


def serve(*scenes: Callable[..., Any]) -> None:
    """Play the scenes that are asked for, each by its function's name."""
    known = {one.__name__: one for one in scenes}
    for line in sys.stdin:
        scene, arguments = json.loads(line)
        try:
            answer = {"returned": known[scene](**arguments)}
        except Exception as error:
            answer = {"raised": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    serve(connect, logits, op, staged, round_trip, turn_v, in_turns, restored, refused, lose_server)
