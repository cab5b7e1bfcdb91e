"""Talk to real llama.cpp, which lives in a child process of another interpreter.

Two ggml copies must not share a process, so nothing here imports llama-cpp-python; `PYKV_ORACLE_PYTHON`
names the interpreter that can.
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

F32Array = np.ndarray[Any, np.dtype[np.float32]]

WORKER = Path(__file__).with_name("oracle_worker.py")
PYTHON_VARIABLE = "PYKV_ORACLE_PYTHON"


class OracleError(AssertionError):
    """llama.cpp refused something that the test takes for granted."""


@dataclass(frozen=True)
class OracleBatch:
    """One call of llama_decode, everything explicit: positions, ids per token, which rows come back.

    embd : (n, n_embd) rows in place of the tokens; `pos` then holds all positions of the first axis, then of the next.
    """

    tokens: list[int]
    pos: list[int]
    seq_ids: list[tuple[int, ...]]
    logits: list[bool] = field(default_factory=list)
    embd: F32Array | None = None

    @classmethod
    def of(
        cls,
        tokens: Sequence[int],
        start: int = 0,
        seq_id: int | Sequence[int] = 0,
        logits: str | Sequence[bool] = "last",
    ) -> OracleBatch:
        """Return the run of tokens at positions start, start + 1, ... of one sequence or of coupled ones."""
        n, ids = len(tokens), (seq_id,) if isinstance(seq_id, int) else tuple(seq_id)
        flags = {"last": [False] * (n - 1) + [True], "all": [True] * n, "none": [False] * n}
        wanted = flags[logits] if isinstance(logits, str) else list(logits)
        return cls(list(tokens), list(range(start, start + n)), [ids] * n, wanted)

    @classmethod
    def of_embeddings(cls, embd: F32Array, pos: Sequence[Sequence[int]], seq_id: int = 0) -> OracleBatch:
        """Return rows at positions `pos`, one list for each axis; every row's logits are wanted."""
        n = len(embd)
        return cls([], [p for axis in pos for p in axis], [(seq_id,)] * n, [True] * n, embd)

    def message(self) -> dict[str, Any]:
        """Return the form that the child reads."""
        plain = [int(t) for t in self.tokens], [int(p) for p in self.pos], [bool(f) for f in self.logits]
        return {"tokens": plain[0], "pos": plain[1], "seq_ids": self.seq_ids, "logits": plain[2], "embd": self.embd}


class Oracle:
    """A llama.cpp process. Close it, or use it in a `with` statement; a lost child fails the next call."""

    def __init__(self, python: str) -> None:
        self._posted, self._n_unread = "", 0
        self._child = subprocess.Popen(
            [python, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # passive: threads that wait must not spin on the cores that pykv computes with
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_WAIT_POLICY": "passive"},
        )

    @classmethod
    def from_environment(cls) -> Oracle:
        """Start the interpreter that `PYKV_ORACLE_PYTHON` names."""
        python = os.environ.get(PYTHON_VARIABLE)
        if not python:
            raise OracleError(f"set {PYTHON_VARIABLE} to a Python that has llama-cpp-python 0.3.36 installed")
        return cls(python)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run one method of the worker and return its result."""
        return self.timed(method, *args, **kwargs)[0]

    def timed(self, method: str, *args: Any, **kwargs: Any) -> tuple[Any, float]:
        """Return the result and how long it took inside the child, in seconds."""
        self.post(method, *args, **kwargs)
        return self._reply()

    def post(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Start one method of the worker; it runs beside what the caller does until `collect`."""
        assert self._child.stdin is not None
        assert not self._posted, f"{self._posted} has not been collected"
        data = pickle.dumps((method, args, kwargs), protocol=5)
        self._posted = f"{method}{args!r:.200}"
        self._n_unread += 1
        with suppress(BrokenPipeError):  # the reply, which is missing then, tells
            self._child.stdin.write(struct.pack("<Q", len(data)) + data)
            self._child.stdin.flush()

    def collect(self) -> Any:
        """Return the result of the method that was posted."""
        return self._reply()[0]

    def _reply(self) -> tuple[Any, float]:
        assert self._child.stdout is not None
        posted, self._posted = self._posted, ""
        while self._n_unread:  # the reply to a call that ran out of time comes first
            header = self._child.stdout.read(8)
            if len(header) < 8:
                raise OracleError(f"llama.cpp's process ended with {self._child.wait()} in {posted}")
            ok, result, seconds = pickle.loads(self._child.stdout.read(struct.unpack("<Q", header)[0]))
            self._n_unread -= 1
        if not ok:
            raise OracleError(f"{posted}: {result}")
        return result, seconds

    def info(self) -> dict[str, str]:
        """Return llama.cpp's version, the kernels it was built with, and the child's Python."""
        return dict(self.call("info"))

    def tokenize(self, path: Path, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Return llama.cpp's tokens for a text."""
        return list(self.call("tokenize", str(path), text, add_special, parse_special))

    def detokenize(self, path: Path, tokens: Sequence[int], *, unparse_special: bool = True) -> bytes:
        """Return the bytes of some tokens; control tokens are left out unless `unparse_special`."""
        return bytes(self.call("detokenize", str(path), [int(t) for t in tokens], False, unparse_special))

    def pieces(self, path: Path, tokens: Sequence[int], *, special: bool = True) -> list[bytes]:
        """Return the bytes of each token on its own."""
        return list(self.call("pieces", str(path), [int(t) for t in tokens], special))

    def vocab_info(self, path: Path) -> dict[str, Any]:
        """Return n_vocab, bos, eos, eot, add_bos, add_eos and the list eog of a model."""
        return dict(self.call("vocab_info", str(path)))

    def context(self, path: Path, **params: Any) -> OracleContext:
        """Create a context; `params` are llama_context_params' names, types as in pykv."""
        return OracleContext(self, self.call("context", str(path), **params))

    @property
    def is_running(self) -> bool:
        """Whether the child still is there."""
        return self._child.poll() is None

    def close(self) -> None:
        """End the child: first by closing its stdin, then, if it hangs, by its own id."""
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # what a dead child never read
            self._child.stdin.close()
        if self.is_running:
            try:
                self._child.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class OracleContext:
    """A llama.cpp context: decode batches, edit its memory, ask its sizes."""

    def __init__(self, oracle: Oracle, created: dict[str, int]) -> None:
        self._oracle = oracle
        self._id = created["id"]
        self.n_ctx, self.n_ctx_seq = created["n_ctx"], created["n_ctx_seq"]
        self.n_batch, self.n_ubatch = created["n_batch"], created["n_ubatch"]
        self.n_vocab = created["n_vocab"]

    def decode(self, *batches: OracleBatch) -> list[F32Array]:
        """Decode batches in order; return the wanted rows of each, (n_outputs, n_vocab)."""
        replies = self._oracle.call("decode", self._id, [batch.message() for batch in batches])
        if bad := [code for code, _ in replies if code]:
            raise OracleError(f"llama_decode returned {bad[0]}")
        return [rows for _, rows in replies]

    def decode_code(self, batch: OracleBatch) -> int:
        """Decode one batch and return llama_decode's code, whatever it is."""
        return int(self._oracle.call("decode", self._id, [batch.message()])[0][0])

    def greedy(self, prompt: OracleBatch, n_steps: int) -> tuple[list[int], F32Array]:
        """Return n_steps tokens, each the largest logit, and the rows (n_steps, n_vocab) they came from."""
        tokens, rows = self._oracle.call("greedy", self._id, prompt.message(), n_steps)
        return tokens, rows

    def memory(self, verb: str, *args: int) -> Any:
        """Call llama_memory_<verb>: seq_rm, seq_cp, seq_keep, seq_add, seq_div, seq_pos_min, clear, ..."""
        return self._oracle.call("memory", self._id, verb, *args)

    def post_run(self, n_seqs: int, steps: list[dict[str, Any]]) -> None:
        """Start a program of steps, which look as in a trace; it runs beside the caller until `collect_run`."""
        self._oracle.post("run", self._id, n_seqs, steps)

    def collect_run(self) -> list[tuple[Any, list[int], F32Array | None]]:
        """Return per step its result; pos_min and pos_max of each sequence in turn, by part; and a decode's rows."""
        return list(self._oracle.collect())

    def kv_nbytes(self) -> list[dict[str, int]]:
        """Return per cache (iSWA: base, swa) total, k and v in bytes, and n_cells of one stream."""
        return list(self._oracle.call("kv_nbytes", self._id))

    def state_nbytes(self) -> dict[str, int]:
        """Return total, r and s in bytes: recurrent states with their buffers, recent inputs, states proper."""
        return dict(self._oracle.call("state_nbytes", self._id))

    def state_seq_data(self, seq_id: int) -> bytes:
        """Return llama.cpp's saved state of one sequence."""
        return bytes(self._oracle.call("state_seq_data", self._id, seq_id))

    def state_seq_set(self, data: bytes, seq_id: int) -> int:
        """Restore a state into a sequence; return the bytes read, 0 = refused."""
        return int(self._oracle.call("state_seq_set", self._id, data, seq_id))

    def state_data(self, seq_id: int = -1, *, partial: bool = False) -> bytes:
        """Return llama.cpp's state of one sequence, or of all; `partial`: without what a cut can bring back."""
        if seq_id == -1:
            return bytes(self._oracle.call("state_data", self._id))
        return bytes(self._oracle.call("state_seq_data_ext", self._id, seq_id, int(partial)))

    def state_set(self, data: bytes, seq_id: int = -1, *, partial: bool = False) -> int:
        """Restore a state into a sequence, or into the context; return the bytes read, 0 = refused."""
        if seq_id == -1:
            return int(self._oracle.call("state_set", self._id, data))
        return int(self._oracle.call("state_seq_set_ext", self._id, data, seq_id, int(partial)))

    def save_file(self, path: Path, tokens: Sequence[int], seq_id: int = -1) -> None:
        """Write a sequence file, or with -1 a session file."""
        if seq_id == -1:
            written = self._oracle.call("state_save_file", self._id, str(path), list(tokens))
        else:
            written = self._oracle.call("state_seq_save_file", self._id, str(path), seq_id, list(tokens))
        if not written:
            raise OracleError(f"llama.cpp did not write {path}")

    def load_file(self, path: Path, seq_id: int = -1) -> tuple[int, list[int]]:
        """Load a sequence file, or with -1 a session file; return the bytes read or True, 0 = refused; its tokens."""
        if seq_id == -1:
            done, tokens = self._oracle.call("state_load_file", self._id, str(path))
        else:
            done, tokens = self._oracle.call("state_seq_load_file", self._id, str(path), seq_id)
        return int(done), list(tokens)

    def close(self) -> None:
        """Free the context; its model stays loaded."""
        if self._oracle.is_running:
            self._oracle.call("free", self._id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
