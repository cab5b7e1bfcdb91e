"""The child process that runs real llama.cpp for the tests.

Run by an interpreter that has llama-cpp-python; imports nothing of pykv. Requests and replies are pickles
behind an 8-byte length, requests on stdin, replies on the stdout that the process was started with.
llama.cpp's own output is kept as log lines and shown when a call fails.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import struct
import sys
import time
from collections import deque
from typing import Any, BinaryIO

import llama_cpp.llama_cpp as lc
import numpy as np

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
FLASH = {"auto": -1, False: 0, True: 1}

MAX_TOKENS = 4096
"""Tokens that a state file may name."""

log_lines: deque[str] = deque(maxlen=400)


@lc.llama_log_callback
def _keep_log(_level: int, text: bytes, _data: ctypes.c_void_p) -> None:
    log_lines.extend(text.decode("utf-8", "replace").splitlines())


class Worker:
    """Models by path, contexts by number; each public method is one request."""

    def __init__(self) -> None:
        self._models: dict[tuple[str, bool], Any] = {}
        self._contexts: dict[int, Any] = {}
        self._paths: dict[int, str] = {}
        self._next_id = 0

    def info(self) -> dict[str, str]:
        return {
            "version": lc.llama_version().decode(),
            "system": lc.llama_print_system_info().decode(),
            "python": sys.version.split()[0],
        }

    def logs(self) -> list[str]:
        return list(log_lines)

    # models and text

    def load(self, path: str, extra_buffers: bool = True) -> None:
        self._model(path, extra_buffers)

    def unload(self, path: str) -> None:
        for key in [k for k in self._models if k[0] == path]:
            lc.llama_model_free(self._models.pop(key))

    def tokenize(self, path: str, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        vocab, data = lc.llama_model_get_vocab(self._model(path)), text.encode("utf-8")
        room = len(data) + 8
        tokens = (lc.llama_token * room)()
        n = lc.llama_tokenize(vocab, data, len(data), tokens, room, add_special, parse_special)
        if n < 0:
            raise RuntimeError(f"tokenize wants {-n} tokens, had room for {room}")
        return list(tokens[:n])

    def detokenize(
        self, path: str, tokens: list[int], remove_special: bool = False, unparse_special: bool = True
    ) -> bytes:
        vocab, ids = lc.llama_model_get_vocab(self._model(path)), (lc.llama_token * len(tokens))(*tokens)
        n = 64 + 16 * len(tokens)
        while True:
            room = ctypes.create_string_buffer(n)
            got = lc.llama_detokenize(vocab, ids, len(tokens), room, n, remove_special, unparse_special)
            if got >= 0:
                return room.raw[:got]
            n = -got

    def pieces(self, path: str, tokens: list[int], special: bool = True) -> list[bytes]:
        vocab, room = lc.llama_model_get_vocab(self._model(path)), ctypes.create_string_buffer(1024)
        return [room.raw[: lc.llama_token_to_piece(vocab, t, room, 1024, 0, special)] for t in tokens]

    def vocab_info(self, path: str) -> dict[str, Any]:
        vocab = lc.llama_model_get_vocab(self._model(path))
        n = lc.llama_vocab_n_tokens(vocab)
        return {
            "n_vocab": n,
            "bos": lc.llama_vocab_bos(vocab),
            "eos": lc.llama_vocab_eos(vocab),
            "eot": lc.llama_vocab_eot(vocab),
            "add_bos": lc.llama_vocab_get_add_bos(vocab),
            "add_eos": lc.llama_vocab_get_add_eos(vocab),
            "eog": [t for t in range(n) if lc.llama_vocab_is_eog(vocab, t)],
        }

    # contexts

    def context(self, path: str, extra_buffers: bool = True, **wanted: Any) -> dict[str, int]:
        params = lc.llama_context_default_params()
        params.offload_kqv = params.op_offload = False
        params.no_perf = True
        params.swa_full = False
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = wanted.pop("n_threads", None) or os.cpu_count() or 1
        params.flash_attn_type = FLASH[wanted.pop("flash_attn", "auto")]
        for name in ("type_k", "type_v"):
            setattr(params, name, TYPES[wanted.pop(name, "f16")])
        for name, value in wanted.items():
            if name not in dict(params._fields_):
                raise ValueError(f"llama_context_params has no {name!r}")
            setattr(params, name, value)
        ctx = lc.llama_init_from_model(self._model(path, extra_buffers), params)
        if not ctx:
            raise RuntimeError(f"llama.cpp made no context for {path}")
        self._next_id += 1
        self._contexts[self._next_id], self._paths[self._next_id] = ctx, path
        return {
            "id": self._next_id,
            "n_ctx": lc.llama_n_ctx(ctx),
            "n_ctx_seq": lc.llama_n_ctx_seq(ctx),
            "n_batch": lc.llama_n_batch(ctx),
            "n_ubatch": lc.llama_n_ubatch(ctx),
            "n_vocab": lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(lc.llama_get_model(ctx))),
        }

    def free(self, ctx_id: int) -> None:
        lc.llama_free(self._contexts.pop(ctx_id))

    def decode(self, ctx_id: int, batches: list[dict[str, Any]]) -> list[tuple[int, np.ndarray]]:
        return [self._decode_one(self._contexts[ctx_id], batch) for batch in batches]

    def greedy(self, ctx_id: int, batch: dict[str, Any], n_steps: int) -> tuple[list[int], np.ndarray]:
        """Follow the largest logit from `batch` on; return the tokens and the row that each came from."""
        ctx, tokens, rows = self._contexts[ctx_id], [], []
        pos, seqs = batch["pos"][-1], batch["seq_ids"][-1]
        for _ in range(n_steps):
            code, out = self._decode_one(ctx, batch)
            if code:
                raise RuntimeError(f"llama_decode returned {code} after {len(tokens)} tokens")
            rows.append(out[-1])
            tokens.append(int(out[-1].argmax()))
            pos += 1
            batch = {"tokens": tokens[-1:], "pos": [pos], "seq_ids": [seqs], "logits": [True]}
        return tokens, np.stack(rows)

    def memory(self, ctx_id: int, verb: str, *args: int) -> int | bool | None:
        mem = lc.llama_get_memory(self._contexts[ctx_id])
        result = getattr(lc, f"llama_memory_{verb}")(mem, *args)
        return result if isinstance(result, (bool, int)) else None

    def run(
        self, ctx_id: int, n_seqs: int, steps: list[dict[str, Any]]
    ) -> list[tuple[Any, list[int], np.ndarray | None]]:
        """Carry out a program in one request.

        Returns per step: what it returned; pos_min and pos_max of each sequence in turn, for each part of the memory;
        and a decode's rows.
        """
        parts = _parts(lc.llama_get_memory(self._contexts[ctx_id]))
        return [self._run_one(ctx_id, parts, n_seqs, step) for step in steps]

    def kv_nbytes(self, ctx_id: int) -> list[dict[str, int]]:
        """Return per attention cache the bytes of its buffers, of K, of V, and its cells per stream."""
        return [
            {
                "total": _size_method("llama_kv_cache", "total_size", ctypes.c_size_t)(cache),
                "k": _size_method("llama_kv_cache", "size_k_bytes", ctypes.c_size_t)(cache),
                "v": _size_method("llama_kv_cache", "size_v_bytes", ctypes.c_size_t)(cache),
                "n_cells": _size_method("llama_kv_cache", "get_size", ctypes.c_uint32)(cache),
            }
            for cls, cache in _parts(lc.llama_get_memory(self._contexts[ctx_id]))
            if cls == "llama_kv_cache"
        ]

    def state_nbytes(self, ctx_id: int) -> dict[str, int]:
        """Return the bytes of recurrent states: of their buffers, of recent inputs, of the states proper."""
        (found,) = [part for part in _parts(lc.llama_get_memory(self._contexts[ctx_id])) if "recurrent" in part[0]]
        names = {"total": "total_size", "r": "size_r_bytes", "s": "size_s_bytes"}
        return {key: _size_method(found[0], name, ctypes.c_size_t)(found[1]) for key, name in names.items()}

    def state_seq_nbytes(self, ctx_id: int, seq_id: int) -> int:
        return int(lc.llama_state_seq_get_size(self._contexts[ctx_id], seq_id))

    def state_seq_data(self, ctx_id: int, seq_id: int) -> bytes:
        n = self.state_seq_nbytes(ctx_id, seq_id)
        room = (ctypes.c_uint8 * n)()
        written = lc.llama_state_seq_get_data(self._contexts[ctx_id], room, n, seq_id)
        return bytes(room)[:written]

    def state_seq_set(self, ctx_id: int, data: bytes, seq_id: int) -> int:
        room = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        return int(lc.llama_state_seq_set_data(self._contexts[ctx_id], room, len(data), seq_id))

    def state_seq_data_ext(self, ctx_id: int, seq_id: int, flags: int) -> bytes:
        n = int(lc.llama_state_seq_get_size_ext(self._contexts[ctx_id], seq_id, flags))
        room = (ctypes.c_uint8 * n)()
        written = lc.llama_state_seq_get_data_ext(self._contexts[ctx_id], room, n, seq_id, flags)
        return bytes(room)[:written]

    def state_seq_set_ext(self, ctx_id: int, data: bytes, seq_id: int, flags: int) -> int:
        room = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        return int(lc.llama_state_seq_set_data_ext(self._contexts[ctx_id], room, len(data), seq_id, flags))

    def state_data(self, ctx_id: int) -> bytes:
        n = int(lc.llama_state_get_size(self._contexts[ctx_id]))
        room = (ctypes.c_uint8 * n)()
        written = lc.llama_state_get_data(self._contexts[ctx_id], room, n)
        return bytes(room)[:written]

    def state_set(self, ctx_id: int, data: bytes) -> int:
        room = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        return int(lc.llama_state_set_data(self._contexts[ctx_id], room, len(data)))

    def state_save_file(self, ctx_id: int, path: str, tokens: list[int]) -> bool:
        room = (lc.llama_token * len(tokens))(*tokens)
        return bool(lc.llama_state_save_file(self._contexts[ctx_id], path.encode(), room, len(tokens)))

    def state_load_file(self, ctx_id: int, path: str) -> tuple[bool, list[int]]:
        room, n = (lc.llama_token * MAX_TOKENS)(), ctypes.c_size_t()
        ctx = self._contexts[ctx_id]
        ok = lc.llama_state_load_file(ctx, path.encode(), room, MAX_TOKENS, ctypes.byref(n))
        return bool(ok), list(room[: n.value])

    def state_seq_save_file(self, ctx_id: int, path: str, seq_id: int, tokens: list[int]) -> int:
        room = (lc.llama_token * len(tokens))(*tokens)
        return int(lc.llama_state_seq_save_file(self._contexts[ctx_id], path.encode(), seq_id, room, len(tokens)))

    def state_seq_load_file(self, ctx_id: int, path: str, seq_id: int) -> tuple[int, list[int]]:
        room, n = (lc.llama_token * MAX_TOKENS)(), ctypes.c_size_t()
        ctx = self._contexts[ctx_id]
        nbytes = lc.llama_state_seq_load_file(ctx, path.encode(), seq_id, room, MAX_TOKENS, ctypes.byref(n))
        return int(nbytes), list(room[: n.value])

    # pieces

    def _model(self, path: str, extra_buffers: bool = True) -> Any:
        key = (path, extra_buffers)
        if key not in self._models:
            params = lc.llama_model_default_params()
            params.n_gpu_layers = 0
            params.use_extra_bufts = extra_buffers
            model = lc.llama_model_load_from_file(path.encode(), params)
            if not model:
                raise RuntimeError(f"llama.cpp did not load {path}")
            self._models[key] = model
        return self._models[key]

    def _run_one(
        self, ctx_id: int, parts: list[tuple[str, int]], n_seqs: int, step: dict[str, Any]
    ) -> tuple[Any, list[int], np.ndarray | None]:
        if step["do"] == "decode":
            # a token attends as its first id; llama.cpp keeps ids in a hash set, which gives the last one put in first
            ids = [sorted(seqs, reverse=True) for seqs in step["seq"]]
            batch = {"tokens": step["tokens"], "pos": step["pos"], "seq_ids": ids, "logits": step["out"]}
            result, rows = self._decode_one(self._contexts[ctx_id], batch)
        else:
            result, rows = self.memory(ctx_id, step["do"], *step["args"]), None
        return result, [end for part in parts for end in _ends(*part, n_seqs)], rows

    def _decode_one(self, ctx: Any, wanted: dict[str, Any]) -> tuple[int, np.ndarray]:
        batch, _keep = _batch(wanted)
        n_vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(lc.llama_get_model(ctx)))
        code = lc.llama_decode(ctx, batch)
        if code != 0:
            return code, np.empty((0, n_vocab), dtype=np.float32)
        n_rows = sum(map(bool, wanted["logits"]))
        if n_rows == 0:
            lc.llama_synchronize(ctx)
            return code, np.empty((0, n_vocab), dtype=np.float32)
        return code, np.ctypeslib.as_array(lc.llama_get_logits(ctx), (n_rows, n_vocab)).copy()


def _batch(wanted: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Return a llama_batch and the arrays that it points into."""
    n, rows = len(wanted["seq_ids"]), wanted.get("embd")
    tokens = None if rows is not None else (lc.llama_token * n)(*wanted["tokens"])
    embd = None if rows is None else (ctypes.c_float * rows.size)(*rows.ravel().tolist())
    pos = (lc.llama_pos * len(wanted["pos"]))(*wanted["pos"])
    ids = [(lc.llama_seq_id * len(seqs))(*seqs) for seqs in wanted["seq_ids"]]
    n_ids = (ctypes.c_int32 * n)(*map(len, ids))
    pointers = (ctypes.POINTER(lc.llama_seq_id) * n)(*(ctypes.cast(a, ctypes.POINTER(lc.llama_seq_id)) for a in ids))
    flags = (ctypes.c_int8 * n)(*map(bool, wanted["logits"]))
    batch = lc.llama_batch()
    batch.n_tokens, batch.token, batch.embd = n, tokens, embd
    batch.pos, batch.n_seq_id, batch.seq_id, batch.logits = pos, n_ids, pointers, flags
    return batch, [tokens, embd, pos, ids, n_ids, pointers, flags]


# llama.cpp's C interface tells no KV sizes, its log rounds to 0.01 MiB, and of a memory made of parts it tells only
# what the whole says; but the C++ methods are exported


def _size_method(cls: str, method: str, result: Any) -> Any:
    function = lc._lib[f"_ZNK{len(cls)}{cls}{len(method)}{method}Ev"]
    function.restype, function.argtypes = result, [ctypes.c_void_p]
    return function


def _is_a(cls: str, pointer: int) -> bool:
    vtable = ctypes.addressof(ctypes.c_char.in_dll(lc._lib, f"_ZTV{len(cls)}{cls}"))
    return ctypes.cast(pointer, ctypes.POINTER(ctypes.c_size_t))[0] == vtable + 2 * ctypes.sizeof(ctypes.c_void_p)


def _attention_caches(memory: int) -> list[int]:
    if _is_a("llama_kv_cache", memory):
        return [memory]
    if _is_a("llama_kv_cache_iswa", memory):
        return [_size_method("llama_kv_cache_iswa", half, ctypes.c_void_p)(memory) for half in ("get_base", "get_swa")]
    raise RuntimeError("neither llama_kv_cache nor llama_kv_cache_iswa")


def _parts(memory: int) -> list[tuple[str, int]]:
    """Return class and address of what a memory is made of: caches with all tokens, with a window, states."""
    for hybrid in ("llama_memory_hybrid", "llama_memory_hybrid_iswa"):
        if _is_a(hybrid, memory):
            part = [_size_method(hybrid, f"get_mem_{name}", ctypes.c_void_p)(memory) for name in ("attn", "recr")]
            return [*_parts(part[0]), *_parts(part[1])]
    if _is_a("llama_memory_recurrent", memory):
        return [("llama_memory_recurrent", memory)]
    return [("llama_kv_cache", cache) for cache in _attention_caches(memory)]


def _ends(cls: str, part: int, n_seqs: int) -> list[int]:
    ends = []
    for name in ("seq_pos_min", "seq_pos_max"):
        end = lc._lib[f"_ZNK{len(cls)}{cls}{len(name)}{name}Ei"]
        end.restype, end.argtypes = ctypes.c_int32, [ctypes.c_void_p, ctypes.c_int32]
        ends.append([end(part, seq_id) for seq_id in range(n_seqs)])
    return [one for pair in zip(*ends, strict=True) for one in pair]


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests `(method, args, kwargs)` with `(ok, result or message, seconds)` until stdin ends."""
    worker = Worker()
    while header := requests.read(8):
        method, args, kwargs = pickle.loads(requests.read(struct.unpack("<Q", header)[0]))
        begin = time.perf_counter()
        try:
            reply = (True, getattr(worker, method)(*args, **kwargs))
        except Exception as error:
            reply = (False, "\n".join([f"{type(error).__name__}: {error}", *list(log_lines)[-12:]]))
        data = pickle.dumps((*reply, time.perf_counter() - begin), protocol=5)
        replies.write(struct.pack("<Q", len(data)) + data)
        replies.flush()


def main() -> None:
    """Serve on the original stdout, and send whatever the libraries print to stderr instead."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    lc.llama_backend_init()
    lc.llama_log_set(_keep_log, ctypes.c_void_p(0))
    serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
