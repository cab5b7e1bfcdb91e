"""A memory's state written field by field, one cell after the other, straight from the tables of the format."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from support.state_kinds import is_kv, leaves

from pykv.cells import SwaType
from pykv.ggml import DType, Tensor
from pykv.memory.twin import TwinCache


def naive_state(memory: Any, seq_id: int, *, partial: bool = False, says_rotation: bool = True) -> bytes:
    """Return the state of a sequence, or of all with -1."""
    parts = leaves(memory)
    if partial and not isinstance(memory, TwinCache):
        # of several parts, a cut brings back those caches without a window
        parts = [one for one in parts if len(parts) == 1 or not is_kv(one) or one.spec.window.type is not SwaType.NONE]
    return b"".join(
        kv_section(one, seq_id, says_rotation) if is_kv(one) else states_section(one, seq_id) for one in parts
    )


def kv_section(cache: Any, seq_id: int, says_rotation: bool) -> bytes:
    out = struct.pack("<I", cache.n_stream)
    for stream, cells in enumerate(cache.streams.cells):
        chosen = [i for i in range(cells.n) if _is_chosen(cache, cells, i, seq_id)]
        out += struct.pack("<I", len(chosen))
        if not chosen:
            continue
        for i in chosen:
            ids = sorted(cells.owners(i)) if seq_id == -1 else [seq_id]
            out += struct.pack("<iI", cells.pos[i], len(ids))
            if cache.spec.n_pos_per_embd > 1:
                out += struct.pack("<iii", cells.ext_x[i], cells.ext_y[i], cells.ext_tok[i])
            out += struct.pack(f"<{len(ids)}i", *ids)
        own, by_channel = cache.store.own_tensors(), (cache.other or cache).settings.v_trans
        out += struct.pack("<II", by_channel, len(own))
        if says_rotation:
            out += struct.pack("<II", cache.store.rot_k, cache.store.rot_v)
        for il, k, _ in own:
            width = cache.spec.layers[il].n_embd_k
            out += struct.pack("<iQ", k.dtype, k.dtype.row_size(width)) + b"".join(
                _rows(cache, k, stream, chosen, width)
            )
        for il, _, v in own:
            if v is None:
                continue
            width = cache.spec.layers[il].n_embd_v
            rows = _rows(cache, v, stream, chosen, width, cache.store.v_trans)
            if not by_channel:
                out += struct.pack("<iQ", v.dtype, v.dtype.row_size(width)) + b"".join(rows)
                continue
            size = v.dtype.type_size
            out += struct.pack("<iII", v.dtype, size, width)
            out += b"".join(row[j * size : (j + 1) * size] for j in range(width) for row in rows)
    return out


def states_section(memory: Any, seq_id: int) -> bytes:
    table = memory.states.table
    states: list[tuple[int, int, list[int]]] = []
    for i, owners in enumerate(table.owners):
        for s in owners if seq_id == -1 else [seq_id] * (seq_id in owners):
            mine = table.pos(s), i + table.n * table.plane[s]
            shared = [ids for *state, ids in states if tuple(state) == mine]
            if shared:  # at another position than others of the cell, it has a state of its own
                shared[0].append(s)
            else:
                states.append((*mine, [s]))
    out = struct.pack("<I", len(states))
    for pos, _, ids in states:
        named = ids if seq_id == -1 else []
        out += struct.pack(f"<iI{len(named)}i", pos, len(named), *named)
    out += struct.pack("<II", 0, len(memory.spec.layers))
    for which in (0, 1):
        for layer in memory.plan.layers:
            tensor = memory.tensors(layer.il)[which]
            size = 0 if tensor is None else 4 * tensor.ne[0]
            out += struct.pack("<iQ", DType.F32, size)
            for _, row, _ in states if tensor is not None else ():
                out += tensor.raw_bytes().tobytes()[row * size : (row + 1) * size]
    return out


def stored_rows(cache: Any, stream: int, cells: list[int]) -> list[list[bytes]]:
    """Return the rows of some cells, tensor by tensor: K and V of each layer of the cache's own."""
    layers, found = cache.spec.layers, []
    for il, k, v in cache.store.own_tensors():
        found.append(_rows(cache, k, stream, cells, layers[il].n_embd_k))
        if v is not None:
            found.append(_rows(cache, v, stream, cells, layers[il].n_embd_v, cache.store.v_trans))
    return found


def _is_chosen(cache: Any, cells: Any, i: int, seq_id: int) -> bool:
    if cells.pos[i] < 0 or seq_id == -1:
        return bool(cells.pos[i] >= 0)
    return seq_id in cells.owners(i) and not cache.spec.window.masked(cells.pos[i], cells.pos_max(seq_id))


def _rows(
    cache: Any, tensor: Tensor, stream: int, cells: list[int], width: int, by_channel: bool = False
) -> list[bytes]:
    """Return the row of each cell."""
    raw = tensor.raw_bytes().reshape(cache.n_stream, -1)[stream]
    if by_channel:
        table = raw.reshape(tensor.ne[0], cache.n_cells, tensor.dtype.type_size)
        return [np.ascontiguousarray(table[:width, i]).tobytes() for i in cells]
    return [raw.reshape(cache.n_cells, -1)[i, : tensor.dtype.row_size(width)].tobytes() for i in cells]
