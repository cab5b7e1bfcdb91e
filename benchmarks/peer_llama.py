"""llama.cpp's side of a benchmark, through its low-level API. Needs llama-cpp-python, not pykv."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import llama_cpp.llama_cpp as lc
import numpy as np
from peer import serve, tokens


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

    def context(self, n_ctx: int, n_threads: int, flash: str = "auto") -> None:
        params = lc.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = n_ctx, 4, True
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = {"auto": -1, "off": 0, "on": 1}[flash]
        params.no_perf = True
        self._ctx = lc.llama_init_from_model(self._model, params)
        if not self._ctx:
            raise RuntimeError("llama.cpp made no context")
        self._n_vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self._model))

    def clear(self) -> None:
        lc.llama_memory_clear(lc.llama_get_memory(self._ctx), False)
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
        mem, times = lc.llama_get_memory(self._ctx), []
        for i in range(n):
            times.append(self._decode([200 + i], self._depth))
            lc.llama_memory_seq_rm(mem, 0, self._depth, -1)
        return times

    def _decode(self, ids: list[int], start: int) -> float:
        n = len(ids)
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


if __name__ == "__main__":
    serve(LlamaSide())
