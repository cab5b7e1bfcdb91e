"""Contexts over stand-ins, for tests of traces and of what they are replayed on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pykv
from pykv.ggml import RopeParams, cpu_device
from pykv.memory import LayerSpec, MemorySpec
from pykv.models.spec_record import spec_record
from pykv.models.stand_in import StandIn, StandInShape
from pykv.runtime import Context, ContextParams

LAYER = LayerSpec(n_head_kv=1, n_embd_head_k=64, n_embd_head_v=64, rope=RopeParams(64))
SPEC = MemorySpec(layers=(LAYER, replace(LAYER, rope=RopeParams(32, "neox", freq_base=1000.0))))
SHAPE = StandInShape(n_head_by_layer=(2, 2), n_ctx_train=4096, spec=spec_record(SPEC))


def open_stand_in(shape: StandInShape = SHAPE, **params: Any) -> Context:
    """Return a context over a stand-in of its own; one thread, 256 cells, fused attention unless told otherwise."""
    given: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "flash_attn": True} | params
    return Context(cast("pykv.Model", StandIn(shape, cpu_device())), ContextParams(**given))
