"""Saves and loads states of memories on an RPC server, in a process of its own: see `rpc_worker`.

Each scene compares with the same memory in host memory, and raises where they differ.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

STATES = (-1, 0, 1, 2)
"""All sequences, and each alone."""


def connect(endpoint: str) -> list[str]:
    """Connect; tell which devices came."""
    from pykv.ggml import connect_rpc

    return [device.name for device in connect_rpc(endpoint, 5.0)]


def kind(name: str, unified: bool, n_rs_seq: int = 0) -> int:
    """Take the states of a kind of memory there and back; returns the bytes of the largest."""
    from support.state_kinds import decode, fill, scribble

    with _pair(name, unified, n_rs_seq) as (near, far), _pair(name, unified, n_rs_seq) as (here, there):
        for one in (near, far):
            fill(one)
            if n_rs_seq:
                decode(one, 0, n_rs_seq)
                scribble(one)
                assert one.seq_rm(0, one.pos_max(0) - 1), "it cannot be taken back"
        return _exchange(near, far, here, there)


def rows(dtype: str, v_trans: bool, unified: bool) -> int:
    """As `kind`, with rows of a type in a cache with holes."""
    with ExitStack() as stack:
        how = {"type_k": dtype, "type_v": dtype, "v_trans": v_trans, "unified": unified}
        near, far, here, there = (stack.enter_context(_cache(far, how)) for far in (False, True, False, True))
        for one in (near, far):
            _scatter(one)
        return _exchange(near, far, here, there)


def converted(unified: bool, v_trans: bool, dtype: str) -> bool:
    """Load into other streams, with the other order of V, from and to the server."""
    from support.state_io import load, saved

    mine = {"unified": unified, "v_trans": v_trans}
    theirs = {"unified": not unified, "v_trans": dtype == "f16" and not v_trans, "type_k": dtype, "type_v": dtype}
    with ExitStack() as stack:
        near, far = (stack.enter_context(_cache(there, mine)) for there in (False, True))
        expected, here, there = (stack.enter_context(_cache(there, theirs)) for there in (False, False, True))
        for one in (near, far):
            _scatter(one)
        for which in (-1, 0):
            done = [load(target, saved(source, which), which, convert=True) for source, target in
                    ((near, expected), (near, there), (far, here))]  # fmt: skip
            assert done[0] == done[1] == done[2]
            assert done[0].is_lossless == (dtype == "f16")
            for one in (here, there):
                one.check()
                assert [saved(one, s) for s in STATES] == [saved(expected, s) for s in STATES]
        return True


def interrupted(name: str, unified: bool, seq_id: int, n: int) -> str:
    """Load while the `n`-th write to the server fails; returns what was raised."""
    from support.state_io import load, saved
    from support.state_kinds import bookkeeping, data, decode, fill, make

    from pykv.ggml import Tensor

    with make(name, unified, place=_there) as memory:
        fill(memory)
        blob, others = saved(memory, seq_id), {s: saved(memory, s) for s in range(3) if seq_id not in (-1, s)}
        if others:
            memory.seq_rm(seq_id)
            decode(memory, seq_id, 3)
        before, message = (bookkeeping(memory), data(memory)), ""
        with _failing(Tensor, "get_into", n):
            try:
                saved(memory, seq_id)
            except OSError as error:
                message = str(error)
        assert (bookkeeping(memory), data(memory)) == before
        with _failing(Tensor, "set", n):
            try:
                load(memory, blob, seq_id)
            except OSError as error:
                message += f", {error}"
        memory.check()
        assert {memory.pos_max(s) for s in range(3) if s not in others} == {-1}
        assert {s: saved(memory, s) for s in others} == others
        load(memory, blob, seq_id)
        assert saved(memory, seq_id) == blob
        return message


def refused(name: str, unified: bool) -> bool:
    """Load what does not fit; not a byte on the server changes."""
    from support.state_io import load, saved
    from support.state_kinds import bookkeeping, data, decode, fill, make, scribble

    from pykv.errors import NoSlotError, StateError

    with make(name, unified, place=_there) as memory, make(name, unified, 200) as large:
        fill(memory)
        for _ in range(11):
            decode(large, 0, 8)
        scribble(large, 4)
        before, blob = (bookkeeping(memory), data(memory)), saved(memory, 0)
        for which, bad in ((-1, saved(large)), (0, saved(large, 0)), (0, blob[:-1]), (0, b"\x09" + blob[1:])):
            try:
                load(memory, bad, which)
            except (NoSlotError, StateError):
                assert (bookkeeping(memory), data(memory)) == before
            else:
                raise AssertionError(f"a state of {len(bad)} bytes was loaded")
        return True


def _there(il: int) -> Any:
    """Return where a layer goes."""
    from pykv.ggml import find_device

    return find_device("RPC0").buffer_type


@contextmanager
def _pair(name: str, unified: bool, n_rs_seq: int) -> Iterator[tuple[Any, Any]]:
    """Make the same memory here and there."""
    from support.state_kinds import make

    with make(name, unified, n_rs_seq=n_rs_seq) as near, make(name, unified, n_rs_seq=n_rs_seq, place=_there) as far:
        yield near, far


def _cache(far: bool, settings: dict[str, Any]) -> Any:
    from pykv.memory import KVCache, LayerSpec, MemorySpec

    spec = MemorySpec((LayerSpec(2, 64, 64), LayerSpec(2, 64, 32)))
    return KVCache(spec, n_cells=40, n_seq_max=3, n_threads=1, place=_there if far else None, **settings)


def _scatter(cache: Any) -> None:
    """Two sequences that alternate, with holes, and random numbers in all rows."""
    from support.kv_scene import store_positions
    from support.state_kinds import tensors

    for i in range(14):
        store_positions(cache, [(0, i), (1, i)])
    cache.seq_rm(0, 3, 6)
    cache.seq_rm(1, 8, 9)
    rng = np.random.default_rng(3)
    for tensor in tensors(cache):
        tensor.set(_numbers(tensor, rng))


def _numbers(tensor: Any, rng: np.random.Generator) -> Any:
    """Return random numbers in a tensor's type."""
    from pykv.ggml import from_float

    n = tensor.nbytes // tensor.dtype.type_size * tensor.dtype.block_size
    return from_float(tensor.dtype, rng.standard_normal(n).astype(np.float32))


def _exchange(near: Any, far: Any, here: Any, there: Any) -> int:
    """Compare what both sides save, and load that into the other side's."""
    from support.naive_state import naive_state
    from support.state_io import load, saved
    from support.state_kinds import data, tensors

    assert all(not one.owner.is_host for one in tensors(far))
    blobs = {s: saved(near, s) for s in STATES}
    for s in STATES:
        assert saved(far, s) == blobs[s] == naive_state(near, s), f"state {s} differs"
    for target in (here, there):
        for s in (-1, 2, 1, 0):
            load(target, blobs[s], s)
            target.check()
            assert saved(target, s) == blobs[s], f"state {s} is not what was loaded"
        assert [saved(target, s) for s in STATES[1:]] == [blobs[s] for s in STATES[1:]]
    assert data(here) == data(there)
    return max(map(len, blobs.values()))


@contextmanager
def _failing(owner: type, name: str, n: int) -> Iterator[None]:
    """Let the `n`-th call of a method fail."""
    whole, left = getattr(owner, name), iter(range(n))

    def fails(*given: Any) -> Any:
        if next(left, None) is None:
            raise OSError(f"no answer to {name}")
        return whole(*given)

    setattr(owner, name, fails)
    try:
        yield
    finally:
        setattr(owner, name, whole)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.rpc_worker import serve

    serve(connect, kind, rows, converted, interrupted, refused)
