"""What a device says that its attention takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pykv._native import ffi, lib
from pykv.errors import UnsupportedOpError
from pykv.ggml import Graph, cpu_device
from pykv.memory import KV_TYPES, device_support
from pykv.memory.device_support import HEADS


def test_each_type_is_asked_for_each_head_that_it_can_store() -> None:
    asked = {(one.dtype.label, one.head_k, one.head_v) for one in device_support(cpu_device())}
    for dtype in KV_TYPES:
        blocks = 32 if dtype.label not in ("f32", "f16", "bf16") else 1
        expected = {heads for heads in HEADS if heads[0] % blocks == heads[1] % blocks == 0}
        assert {(k, v) for label, k, v in asked if label == dtype.label} == expected
    assert ("f16", 32, 32) in asked
    assert ("q8_0", 576, 512) in asked
    assert ("q8_0", 80, 80) not in asked


def test_the_cpu_takes_everything() -> None:
    """As tests/memory/test_kv_graph.py computes it."""
    for one in device_support(cpu_device()):
        assert (one.flash, one.matmul, one.set_rows, one.shift) == (True,) * 4, one


@pytest.mark.parametrize(
    ("missing", "lost"),
    [
        ("FLASH_ATTN_EXT", {"flash"}),
        ("SOFT_MAX", {"matmul"}),
        ("SET_ROWS", {"set_rows", "shift"}),
        ("ROPE", {"shift"}),
        ("GET_ROWS", {"shift"}),
    ],
)
def test_what_lacks_an_operation_is_not_taken(missing: str, lost: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that refuses one kind of node loses what needs that node, and nothing else."""

    def refuse(graph: Graph, devices: object) -> None:
        if any(ffi.string(lib.ggml_op_desc(node)).decode() == missing for node in graph.nodes()):
            raise UnsupportedOpError(missing)

    monkeypatch.setattr(Graph, "check_supported", refuse)
    for one in device_support(replace(cpu_device(), name=f"without {missing}")):
        assert {what for what in ("flash", "matmul", "set_rows", "shift") if not getattr(one, what)} == lost
