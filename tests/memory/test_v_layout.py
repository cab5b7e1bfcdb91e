"""V lies in rows or transposed; turning it moves the values and loses none."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.errors import ParamError
from pykv.memory import KVCache, KVSettings, LayerSpec, MemorySpec

WIDTH, N_CELLS = 2 * 32, 16


def cache(layers: tuple[LayerSpec, ...] | None = None, reuse: dict[int, int] | None = None, **settings) -> KVCache:
    spec = MemorySpec(layers or (LayerSpec(2, 32, 32),) * 3, reuse=reuse or {})
    return KVCache(spec, KVSettings(N_CELLS, **settings))


def use_cells(cache: KVCache, n: int) -> None:
    """Occupy the first cells of every stream."""
    for seq_id, cells in enumerate(cache.streams.cells):
        cells.pos_set(np.arange(n), np.arange(n, dtype=np.int32))
        cells.seq_add(np.arange(n), seq_id)


@pytest.mark.parametrize("type_v", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("unified", [True, False])
def test_turning_moves_each_value_to_its_channel_and_back(type_v: str, unified: bool) -> None:
    with cache(n_seq_max=2, unified=unified, type_v=type_v) as memory:
        use_cells(memory, 10)
        word = np.uint32 if type_v == "f32" else np.uint16
        shape = (memory.n_stream, N_CELLS, WIDTH)
        values = np.random.default_rng(5).integers(1, 2**15, (3, *shape)).astype(word)
        values[:, :, 10:] = 0  # cells that nobody uses hold nothing
        for il in range(3):
            memory.tensors(il)[1].set(values[il])
        memory.store_v(transposed=True)
        assert memory.store.v_trans
        for il in range(3):
            stored = memory.tensors(il)[1].raw_bytes().view(word)
            for stream in range(memory.n_stream):
                for cell in (0, 3, 9, 15):
                    for channel in (0, 1, 63):  # spec: element s*N*E + j*N + c
                        at = stream * N_CELLS * WIDTH + channel * N_CELLS + cell
                        assert stored[at] == values[il, stream, cell, channel]
        memory.store_v(transposed=False)
        for il in range(3):
            assert np.array_equal(memory.tensors(il)[1].raw_bytes().view(word).reshape(shape), values[il])


def test_layers_that_read_another_layers_values_are_turned_once() -> None:
    with cache(reuse={2: 0}) as memory:
        use_cells(memory, N_CELLS)
        values = np.arange(N_CELLS * WIDTH, dtype=np.uint16).reshape(N_CELLS, WIDTH)
        memory.tensors(0)[1].set(values)
        memory.store_v(transposed=True)
        assert np.array_equal(memory.tensors(2)[1].raw_bytes().view(np.uint16).reshape(WIDTH, N_CELLS), values.T)


@pytest.mark.parametrize(
    ("layers", "settings"),
    [
        (None, {"type_v": "q8_0"}),
        ((LayerSpec(2, 32, 32), LayerSpec(1, 32, 32)), {}),
    ],
)
def test_blocks_and_uneven_layers_stay_as_they_were_made(layers, settings) -> None:
    with cache(layers, **settings) as memory:
        assert not memory.store.can_turn_v
        with pytest.raises(ParamError, match="transposed=True"):
            memory.store_v(transposed=True)
        assert not memory.store.v_trans
