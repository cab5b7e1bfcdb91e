"""Operands that begin anywhere, on Vulkan: the CPU's values, where ggml would end or turn the wrong elements."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.child import run_python
from support.cpu_graph import Bench
from support.nmse import nmse

from pykv.errors import UnsupportedOpError
from pykv.ggml import Arena, DType, Graph, RopeParams, Tensor, cpu_device, find_device, limits, ops, sched

pytestmark = pytest.mark.backend

ROUNDED = 2e-6
"""NMSE against the CPU: f16 products, and another series for gelu; measured at most 3.2e-7."""


class Shifted:
    """Random operands on a device, each one element behind a multiple of its alignment."""

    def __init__(self, device: str) -> None:
        self.bench, self._rng = Bench(find_device(device)), np.random.default_rng(7)
        self.arena = self.bench.nodes

    def __call__(self, *shape: int, kind: type = np.float32, below: int = 0) -> Tensor:
        values = self._rng.integers(0, below, shape) if below else self._rng.standard_normal(shape)
        home = self.bench.put(np.concatenate([np.zeros(1), values.ravel(), np.zeros(15)]).astype(kind))
        ne, size = (*reversed(shape), *(1,) * (4 - len(shape))), home.dtype.type_size
        strides = tuple(size * int(np.prod(ne[:i])) for i in (1, 2, 3))
        return ops.view(self.arena, home, ne, strides, size)


Case = Callable[[Shifted], Tensor]
PAIRS = {one.__name__: one for one in (ops.add, ops.sub, ops.mul, ops.div, ops.swiglu, ops.geglu, ops.out_prod)}
SINGLE = {
    one.__name__: one
    for one in (ops.silu, ops.exp, ops.sqr, ops.tanh, ops.gelu, ops.neg, ops.softplus, ops.sum_rows, ops.mean, ops.cont)
}
CASES: dict[str, Case] = {
    **{name: lambda x, op=op: op(x.arena, x(3, 8), x(3, 8)) for name, op in PAIRS.items()},
    **{name: lambda x, op=op: op(x.arena, x(3, 8)) for name, op in SINGLE.items()},
    "scale": lambda x: ops.scale(x.arena, x(3, 8), 2.0),
    "clamp": lambda x: ops.clamp(x.arena, x(3, 8), -1, 1),
    "fill": lambda x: ops.fill(x.arena, x(3, 8), 2.0),
    "norm": lambda x: ops.norm(x.arena, x(3, 8), 1e-5),
    "rms_norm": lambda x: ops.rms_norm(x.arena, x(3, 8), 1e-5),
    "l2_norm": lambda x: ops.l2_norm(x.arena, x(3, 8), 1e-5),
    "soft_max": lambda x: ops.soft_max(x.arena, x(2, 3, 8), None, 1.0),
    "column_max": lambda x: ops.column_max(x.arena, x(3, 8)),
    "rope": lambda x: ops.rope(x.arena, x(3, 2, 8), x(3, kind=np.int32, below=9), RopeParams(8)),
    "get_rows": lambda x: ops.get_rows(x.arena, x(5, 8), x(3, kind=np.int32, below=5)),
    "set_rows": lambda x: ops.set_rows(x.arena, x(5, 8), x(1, 8), x(1, kind=np.int64, below=5)),
    "cpy": lambda x: ops.cpy(x.arena, x(5, 8), x(5, 8)),
    "cast": lambda x: ops.cast(x.arena, x(5, 8), DType.F16),
    "cast to blocks": lambda x: ops.cast(x.arena, x(5, 32), DType.Q8_0),
    "concat": lambda x: ops.concat(x.arena, x(5, 8), x(5, 8), 0),
    "pad": lambda x: ops.pad(x.arena, x(3, 8), 2),
    "one column": lambda x: ops.mul_mat(x.arena, x(5, 8), x(1, 8)),
    "few columns": lambda x: ops.mul_mat(x.arena, x(5, 8), x(4, 8)),
    "many columns": lambda x: ops.mul_mat(x.arena, x(32, 64), x(40, 64)),
    "f16 rows": lambda x: ops.mul_mat(x.arena, x(32, 64, kind=np.float16), x(1, 64)),
    "experts": lambda x: ops.mul_mat_id(x.arena, x(4, 5, 8), x(3, 1, 8), x(3, 2, kind=np.int32, below=4)),
    "biases of experts": lambda x: ops.add_id(x.arena, x(3, 2, 8), x(4, 8), x(3, 2, kind=np.int32, below=4)),
    "convolution": lambda x: ops.ssm_conv(x.arena, x(1, 8, 6), x(8, 4)),
}


def computed(device: str, case: str) -> np.ndarray:
    x = Shifted(device)
    out = CASES[case](x)
    with x.bench.computed(out):
        return out.numpy() if out.dtype.numpy_dtype is not None else out.to_f32()


@pytest.mark.parametrize("case", CASES)
def test_operands_may_begin_anywhere(case: str) -> None:
    assert nmse(computed("Vulkan0", case), computed("CPU", case)) <= ROUNDED


def test_without_the_table_rope_turns_other_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = limits.offsets_of((cpu_device(),) * 2)
    monkeypatch.setattr(sched, "offsets_of", lambda devices: nothing)
    assert nmse(computed("Vulkan0", "rope"), computed("CPU", "rope")) > 0.1


@pytest.mark.abort
def test_without_the_table_a_softmax_ends_the_process() -> None:
    done = run_python(
        """
        import sys
        sys.path.insert(0, "tests/backend")
        import test_offsets as t
        nothing = t.limits.offsets_of((t.cpu_device(),) * 2)
        t.sched.offsets_of = lambda devices: nothing
        t.computed("Vulkan0", "soft_max")
        """
    )
    assert done.returncode < 0
    assert "get_misalign_bytes" in done.stderr


def test_where_no_cpu_may_help_it_is_refused() -> None:
    arena = Arena(8, 8)
    row = ops.view(arena, arena.tensor(DType.F32, (16,), "scores"), (8, 1, 1, 1), (32, 32, 32), 4)
    graph = Graph(arena)
    graph.expand(ops.soft_max(arena, row, None, 1.0))
    graph.check_supported((find_device("Vulkan0"), cpu_device()))
    told = r"SOFT_MAX of f32 into f32 .* cannot run on Vulkan0: Vulkan0 takes operands at multiples of \d+ bytes"
    with pytest.raises(UnsupportedOpError, match=told):
        graph.check_supported((find_device("Vulkan0"),))
