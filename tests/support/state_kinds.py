"""Memories of every kind with something in them, and all that they hold as values to compare."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.cell_state import state
from support.iswa_memory import FULL, LAYERS, SWA
from support.kv_scene import plan_batch, run
from support.twin_scene import make_twin

from pykv.cells import SwaType, Window
from pykv.ggml import RopeParams, Tensor
from pykv.memory import KVCache, KVSettings, LayerSpec, Memory, MemorySettings, MemorySpec, StateSpec, make_memory

STATE = LayerSpec.recurrent(StateSpec(4, 6))
RECENT = LayerSpec.recurrent(StateSpec(4))
WINDOW = Window(4, SwaType.STANDARD)
LATENT = LayerSpec(1, 12, 8, RopeParams(4), rope_at=8, k_only=True)
SPECS = {
    "kv": MemorySpec((FULL, FULL)),
    "unlike widths": MemorySpec((FULL, LayerSpec(2, 8, 8), LayerSpec(1, 8, 2))),
    "keys alone": MemorySpec((LATENT, LATENT)),
    "window everywhere": MemorySpec((FULL, FULL), WINDOW),
    "iswa": MemorySpec(LAYERS, WINDOW),
    "recurrent": MemorySpec((STATE, STATE)),
    "recent inputs alone": MemorySpec((RECENT, STATE)),
    "hybrid": MemorySpec((FULL, STATE)),
    "hybrid iswa": MemorySpec((FULL, STATE, SWA), WINDOW),
}
KINDS = [(kind, unified) for kind in (*SPECS, "twin") for unified in (True, False)]
N_UBATCH, N_SEQ = 8, 3


def make(kind: str, unified: bool = True, n_cells: int = 64, n_seq: int = N_SEQ, **settings: Any) -> Memory:
    """Return an empty memory. Of its settings, `place` says where its layers lie, and `n_rs_seq` goes to states."""
    n_rs_seq, place = settings.pop("n_rs_seq", 0), settings.pop("place", None)
    if kind == "twin":
        return make_twin(n_cells, place=place, n_seq_max=n_seq, unified=unified, **settings)
    kv = KVSettings(n_cells, n_seq_max=n_seq, unified=unified, **settings)
    return make_memory(SPECS[kind], MemorySettings(kv, N_UBATCH, n_rs_seq=n_rs_seq), place, n_threads=1)


def leaves(memory: Any) -> list[Any]:
    """Return the memories that do the work."""
    parts = getattr(memory, "parts", None)
    return [memory] if parts is None else [leaf for part in parts for leaf in leaves(part)]


def is_kv(leaf: Any) -> bool:
    return isinstance(leaf, KVCache)


def tensors(memory: Any) -> list[Tensor]:
    """Return all tensors of a memory."""
    found: list[Tensor | None] = []
    for leaf in leaves(memory):
        if is_kv(leaf):
            found += [one for _, *pair in leaf.store.own_tensors() for one in pair]
        else:
            found += [one for layer in leaf.plan.layers for one in leaf.tensors(layer.il)]
    return [one for one in found if one is not None]


def scribble(memory: Any, seed: int = 0) -> None:
    """Fill all tensors with random bytes."""
    rng = np.random.default_rng(seed)
    for tensor in tensors(memory):
        tensor.set(rng.integers(0, 256, tensor.nbytes, np.uint8))


def data(memory: Any) -> list[bytes]:
    """Return the bytes of all tensors."""
    return [tensor.raw_bytes().tobytes() for tensor in tensors(memory)]


def bookkeeping(memory: Any) -> list[Any]:
    """Return what all parts know of their cells."""
    found: list[Any] = []
    for leaf in leaves(memory):
        found.append(state(leaf.streams) if is_kv(leaf) else dict(vars(leaf.states.table.copy())))
    return found


def decode(memory: Any, seq_id: int, n: int) -> None:
    """Write the bookkeeping of tokens behind a sequence."""
    first = memory.pos_max(seq_id) + 1
    plan = plan_batch(memory, run(seq_id, range(first, first + n)), N_UBATCH)
    assert plan is not None, f"no room: {memory.used}"
    for i in range(len(plan.ubatches)):
        plan.apply(i)


def fill(memory: Any, seed: int = 0) -> None:
    """Two conversations that alternate, longer than the windows; a fork that goes on; random rows everywhere."""
    for _ in range(4):
        decode(memory, 0, 5)
        decode(memory, 1, 2)
    memory.seq_cp(0, 2)
    memory.update()
    decode(memory, 2, 2)
    decode(memory, 0, 1)
    scribble(memory, seed)
