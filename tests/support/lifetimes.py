"""One small computation whose owners are let go in a given order, by `close` or by the collector.

Run as a program: a line of JSON (a list of [name, how]) in, "ok" or a traceback out; a crash ends it.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from pathlib import Path
from typing import Any

NAMES = ("backend", "sched", "weights", "buffer", "arena", "graph", "input", "array", "x", "view", "out")
HOW = ("close", "drop", "use", "compute", "collect")


def build() -> dict[str, Any]:
    """Return everything that takes part, by name."""
    import numpy as np

    from pykv.ggml import Arena, Backend, Buffer, CancelFlag, DType, Graph, GraphInput, Sched, cpu_device, ops

    weights, arena = Arena(2), Arena(8, 8)
    x = weights.tensor(DType.F32, (64, 64))
    view = ops.view(arena, x, (64, 32, 1, 1), (x.nb[1], x.nb[2], x.nb[3]))
    one = GraphInput(arena.tensor(DType.F32, (64,)))
    out = ops.mul_mat(arena, view, one.tensor).as_output()
    graph = Graph(arena)
    graph.expand(out)
    buffer = Buffer.allocate(weights, cpu_device().buffer_type, "test")
    buffer.adopt(x).set(np.ones((64, 64), np.float32))
    backend = Backend(cpu_device(), 2, CancelFlag())
    sched = Sched([backend], 8)
    sched.allocate(graph)
    one.bind()
    one.array.fill(1)
    sched.compute(graph)
    assert (out.numpy() == 64).all()
    scope = {"backend": backend, "sched": sched, "weights": weights, "buffer": buffer, "arena": arena, "graph": graph}
    return scope | {"input": one, "array": one.array, "x": x, "view": view, "out": out}


def use(name: str, thing: Any) -> None:
    """Touch the data behind a thing; may raise what pykv raises."""
    match name:
        case "backend":
            thing.synchronize()
        case "sched":
            _ = thing.nbytes
        case "weights" | "arena":
            _ = thing.ptr
        case "buffer":
            thing.clear()
        case "graph":
            _ = thing.n_nodes
        case "input":
            thing.array[...] = 2
        case "array":
            thing[...] = 3
        case "x" | "view" | "out":
            thing.raw_bytes()


def play(steps: list[list[str]]) -> None:
    """Let go of things, and use what is left, in the order given."""
    from pykv.errors import PykvError

    scope = build()
    for name, how in steps:
        try:
            if how == "drop":
                scope.pop(name, None)
            elif how == "close" and hasattr(scope.get(name), "close"):
                scope[name].close()
            elif how == "use" and name in scope:
                use(name, scope[name])
            elif how == "compute" and {"sched", "graph"} <= scope.keys():
                scope["sched"].compute(scope["graph"])
            elif how == "collect":
                gc.collect()
        except PykvError:
            pass
    scope.clear()


def _serve() -> None:
    for line in sys.stdin:
        try:
            play(json.loads(line))
            answer = "ok"
        except BaseException:
            answer = traceback.format_exc()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    _serve()
