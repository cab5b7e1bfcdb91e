"""A cache over two RPC servers: what is stored, moved, copied and read back is what a cache in host memory holds."""

from __future__ import annotations

import pytest
from support.child import run_cleanly
from support.rpc import rpc_server

pytestmark = pytest.mark.backend

PROGRAM = """
import numpy as np
from support import on_device
from support.key_scene import KeyScene
from support.memory_kinds import N_SEQ
from pykv.ggml import RopeParams, connect_rpc
from pykv.memory import KVCache, LayerSpec, MemorySpec

for endpoint in {endpoints}:
    connect_rpc(endpoint)
spec = MemorySpec((LayerSpec(2, 8, 8, RopeParams(8)),) * 4)

def play():
    scene = KeyScene(KVCache(spec, n_cells=64, n_seq_max=N_SEQ, unified={unified}, n_threads=1))
    with scene.cache as cache:
        homes = [cache.tensors(il)[0].owner.is_host for il in range(4)]
        scene.store(0, range(20))
        cache.seq_cp(0, 1)
        cache.seq_rm(0, 2, 6)
        cache.seq_add(0, 6, -1, -4)
        scene.store(1, range(20, 24))
        pairs = [(il, s) for il in range(4) for s in (0, 1)]
        return homes, [cache.k(*one) for one in pairs], [cache.v(*one) for one in pairs]

here = play()
with on_device.running_on(["RPC0", "RPC1"]):
    there = play()
print(any(there[0]), all(np.array_equal(a, b) for i in (1, 2) for a, b in zip(here[i], there[i], strict=True)))
"""


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
def test_layers_by_turns_on_two_servers(unified: bool) -> None:
    with rpc_server(1) as one, rpc_server(1) as other:
        program = PROGRAM.format(endpoints=[one.endpoint, other.endpoint], unified=unified)
        assert run_cleanly(program) == "False True\n"
