"""llama.cpp's side of a benchmark, through its low-level API. Needs llama-cpp-python, not pykv."""

from __future__ import annotations

import ctypes
import os
import struct
import time
from typing import Any

import llama_cpp.llama_cpp as lc
import numpy as np
from peer import serve, timed, tokens


@lc.llama_log_callback
def _quiet(_level: int, _text: bytes, _data: ctypes.c_void_p) -> None:
    pass


class LlamaSide:
    """One model and one context; every time is in milliseconds."""

    def __init__(self) -> None:
        lc.llama_backend_init()
        lc.llama_log_set(_quiet, ctypes.c_void_p(0))
        self._model: Any = None
        self._ctx: Any = None
        self._depth = 0
        self._tokens = (lc.llama_token * 512)()
        self._pos = (lc.llama_pos * 512)()
        self._flags = (ctypes.c_int8 * 512)()
        ids = (lc.llama_seq_id * 1)(0)
        self._n_ids = (ctypes.c_int32 * 512)(*[1] * 512)
        self._ids = (ctypes.POINTER(lc.llama_seq_id) * 512)(*[ctypes.cast(ids, ctypes.POINTER(lc.llama_seq_id))] * 512)
        self._keep = ids

    def about(self) -> dict[str, str]:
        return {
            "version": lc.llama_version().decode(),
            "kernels": lc.llama_print_system_info().decode().replace(" = 1", "").strip(" |"),
        }

    def load(self, path: str) -> float:
        """Load the model, replacing the one before."""
        self.unload()
        params = lc.llama_model_default_params()
        params.n_gpu_layers = 0
        begin = time.perf_counter()
        self._model = lc.llama_model_load_from_file(path.encode(), params)
        elapsed = time.perf_counter() - begin
        if not self._model:
            raise RuntimeError(f"llama.cpp did not load {path}")
        return elapsed * 1e3

    def unload(self) -> None:
        if self._ctx:
            lc.llama_free(self._ctx)
        if self._model:
            lc.llama_model_free(self._model)
        self._ctx = self._model = None

    def context(self, n_ctx: int, n_threads: int, flash: str = "auto", n_ubatch: int = 512) -> None:
        if self._ctx:
            lc.llama_free(self._ctx)
        params = lc.llama_context_default_params()
        params.n_ubatch = n_ubatch
        params.n_ctx, params.n_seq_max, params.kv_unified = n_ctx, 4, True
        params.swa_full = False  # as pykv has it: the window is all that is ever read
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = {"auto": -1, "off": 0, "on": 1}[flash]
        params.no_perf = True
        self._ctx = lc.llama_init_from_model(self._model, params)
        if not self._ctx:
            raise RuntimeError("llama.cpp made no context")
        self._n_vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self._model))

    def clear(self) -> None:
        lc.llama_memory_clear(self._memory, False)
        self._depth = 0

    def fill(self, depth: int) -> None:
        """Decode ordinary tokens, 512 at a time, until the sequence is `depth` tokens long."""
        while self._depth < depth:
            n = min(512, depth - self._depth)
            self._decode(tokens(n, self._depth), self._depth)
            self._depth += n

    def prompt(self, n: int) -> float:
        """Time n tokens at once into an empty memory, up to the last token's logits."""
        self.clear()
        return self._decode(tokens(n), 0)

    def steps(self, n: int) -> list[float]:
        """Time n single tokens, each at the present depth: what was added is removed before the next."""
        times = []
        for i in range(n):
            times.append(self._decode([200 + i], self._depth))
            lc.llama_memory_seq_rm(self._memory, 0, self._depth, -1)
        return times

    # saved states of sequence 0

    def state_get(self, is_new: bool = True) -> float:
        """Time getting the state into memory that is new to the process; without `is_new`, that is there already."""
        n = lc.llama_state_seq_get_size(self._ctx, 0)
        kept = np.zeros(0 if is_new else n, np.uint8)
        kept.fill(1)

        def get() -> None:
            room = np.empty(n, np.uint8) if is_new else kept
            data = room.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            assert lc.llama_state_seq_get_data(self._ctx, data, n, 0) == n

        return timed(get)

    def state_set(self) -> float:
        n = lc.llama_state_seq_get_size(self._ctx, 0)
        room = np.empty(n, np.uint8)
        data = room.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        assert lc.llama_state_seq_get_data(self._ctx, data, n, 0) == n

        def put() -> None:
            assert lc.llama_state_seq_set_data(self._ctx, data, n, 0) == n

        return timed(put)

    def state_save(self, path: str, sync: bool = False) -> float:
        """Time saving into a file; with `sync`, until it is on the disk."""

        def save() -> None:
            assert lc.llama_state_seq_save_file(self._ctx, path.encode(), 0, self._tokens, 0)
            if sync:
                with open(path, "rb+") as file:
                    os.fsync(file.fileno())

        return timed(save)

    def state_load(self, path: str) -> float:
        count = ctypes.c_size_t()

        def load() -> None:
            assert lc.llama_state_seq_load_file(self._ctx, path.encode(), 0, self._tokens, 512, ctypes.byref(count))

        return timed(load)

    # memory verbs; each leaves the memory as `book` left it

    def book(self, depth: int) -> None:
        """Fill sequence 0 without computing: restore the state of `depth` cells whose K and V are zeros.

        Needs flash attention on (V not transposed) and f16 K and V.
        """
        self.clear()
        n_embd, n_head = lc.llama_model_n_embd(self._model), lc.llama_model_n_head(self._model)
        row_nbytes = n_embd // n_head * lc.llama_model_n_head_kv(self._model) * 2
        state = sequence_state(depth, lc.llama_model_n_layer(self._model), row_nbytes)
        data = (ctypes.c_uint8 * len(state)).from_buffer(state)
        if lc.llama_state_seq_set_data(self._ctx, data, len(state), 0) != len(state):
            raise RuntimeError(f"llama.cpp did not take a state of {depth} cells")
        self._depth = depth

    def call_overhead(self, n: int) -> float:
        """Time an empty call through ctypes."""
        return sorted(timed(lambda: lc.llama_memory_can_shift(self._memory)) for _ in range(n))[n // 2]

    def seq_cp(self, n: int) -> list[float]:
        times = []
        for _ in range(n):
            times.append(timed(lambda: lc.llama_memory_seq_cp(self._memory, 0, 1, -1, -1)))
            lc.llama_memory_seq_rm(self._memory, 1, -1, -1)
        return times

    def seq_rm(self, n: int) -> list[float]:
        times = []
        for _ in range(n):
            lc.llama_memory_seq_cp(self._memory, 0, 1, -1, -1)
            times.append(timed(lambda: lc.llama_memory_seq_rm(self._memory, 1, -1, -1)))
        return times

    def seq_keep(self, n: int, n_foreign: int = 16) -> list[float]:
        """Time seq_keep where another sequence shares half the cells and a third one has a few of its own."""
        times = []
        for _ in range(n):
            lc.llama_memory_seq_cp(self._memory, 0, 1, 0, self._depth // 2)
            self._decode(tokens(n_foreign), 0, seq_id=2)
            times.append(timed(lambda: lc.llama_memory_seq_keep(self._memory, 0)))
        return times

    def seq_add(self, n: int, delta: int = 7) -> list[float]:
        """Time a shift of the later half; there and back in turns."""
        half, times = self._depth // 2, []
        for i in range(2 * n):
            shift = (0, half, -1, delta) if i % 2 == 0 else (0, half + delta, -1, -delta)
            times.append(timed(lambda shift=shift: lc.llama_memory_seq_add(self._memory, *shift)))  # type: ignore[misc]
        return times

    def tail_rm(self, n: int) -> list[float]:
        """Time the removal of the last token of a sequence, decoded just before."""
        times = []
        for i in range(n):
            self._decode([200 + i], self._depth)
            times.append(timed(lambda: lc.llama_memory_seq_rm(self._memory, 0, self._depth, -1)))
        return times

    def k_shift(self, n: int, delta: int = 7) -> list[float]:
        """Time the K-shift of the later half: the next decode applies it, so that is timed with and without one.

        Returns n differences.
        """
        half, times = self._depth // 2, []
        for i in range(2 * n):
            plain = self.steps(1)[0]
            shift = (half, -1, delta) if i % 2 == 0 else (half + delta, -1, -delta)
            lc.llama_memory_seq_add(self._memory, 0, *shift)
            self._depth += shift[2]
            times.append(self.steps(1)[0] - plain)
        return times

    @property
    def _memory(self) -> Any:
        return lc.llama_get_memory(self._ctx)

    def _decode(self, ids: list[int], start: int, seq_id: int = 0) -> float:
        n = len(ids)
        self._keep[0] = seq_id
        self._tokens[:n], self._pos[:n] = ids, range(start, start + n)
        self._flags[:n] = [0] * (n - 1) + [1]
        batch = lc.llama_batch()
        batch.n_tokens, batch.token, batch.embd, batch.pos = n, self._tokens, None, self._pos
        batch.n_seq_id, batch.seq_id, batch.logits = self._n_ids, self._ids, self._flags
        begin = time.perf_counter()
        if lc.llama_decode(self._ctx, batch) != 0:
            raise RuntimeError(f"llama_decode failed at position {start}")
        row = np.ctypeslib.as_array(lc.llama_get_logits_ith(self._ctx, -1), (self._n_vocab,))
        elapsed = time.perf_counter() - begin
        assert np.isfinite(row[0])
        return elapsed * 1e3


def sequence_state(depth: int, n_layer: int, row_nbytes: int) -> bytearray:
    """Return the state of a sequence at positions 0 to `depth` - 1 as llama.cpp lays it out; K and V are f16 zeros."""
    one_stream, f16, not_transposed = 1, 1, 0
    meta = np.zeros((depth, 3), np.int32)  # position, number of sequences, the sequence
    meta[:, 0], meta[:, 1] = np.arange(depth), 1
    layer = struct.pack("<iQ", f16, row_nbytes) + bytes(depth * row_nbytes)
    head = struct.pack("<IiII", 0xAF143CD8, 0, one_stream, depth)
    return bytearray().join([head, meta.tobytes(), struct.pack("<II", not_transposed, n_layer), *[layer] * 2 * n_layer])


if __name__ == "__main__":
    serve(LlamaSide())
