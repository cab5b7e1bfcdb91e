"""Trace: write down every batch and verb of a context, so that somebody else can run them again.

Never changes what a context does: a trace that cannot be written warns once and ends.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pykv.errors import TraceError
from pykv.runtime.trace.file import TraceHeader, ranges
from pykv.runtime.trace.heard_batch import HeardBatch
from pykv.runtime.trace.step import Outcome, VerbStep
from pykv.typing import F32Array

if TYPE_CHECKING:
    from pykv.runtime.context import Context


class Trace:
    """A recording in progress. Made by `Context.trace`; close it, or use it in ``with``.

    One JSON object a line, on disk as soon as the step is done: after a crash the file holds all that came before.
    What is no batch or verb is not seen: other contexts, data written from outside, and reads such as `KVCache.k`,
    which carry out pending moves earlier than the next batch would.

    Attributes
    ----------
    path : the file.
    n_steps : steps written so far.
    """

    def __init__(self, context: Context, path: str | os.PathLike[str], *, tokens: bool) -> None:
        self.path = Path(path)
        self.n_steps = 0
        self._context, self._has_tokens = context, tokens
        self._lock = threading.Lock()
        header = TraceHeader.of(context, tokens).record()
        try:
            self._file = self.path.open("wb", buffering=0)
        except OSError as error:
            raise TraceError(f"{self.path}: cannot be written: {error.strerror}") from None
        self._write(header)
        context.memory.listeners.append(self._hear_verb)
        context.traces.append(self)

    def hear_decode(self, heard: HeardBatch, result: object, logits: F32Array | None) -> None:
        """Write down a decode: the batch, "ok" or the exception, and the logits if there are any."""
        step = heard.step(Outcome.of(result), ranges(self._context), logits)
        self._write_step((replace(step, outside=()) if self._has_tokens else replace(step, tokens=None)).record())

    def close(self) -> None:
        """Stop recording. Safe to call twice; the context closes its traces with itself."""
        if self in self._context.traces:
            self._context.traces.remove(self)
            self._context.memory.listeners.remove(self._hear_verb)
        self._file.close()

    @property
    def closed(self) -> bool:
        """Whether nothing is recorded any more."""
        return self._file.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hear_verb(self, name: str, args: tuple[object, ...], result: object) -> None:
        try:
            record = VerbStep.of(name, args, result, ranges(self._context)).record()
        except Exception as error:  # what a caller passed is of no kind that can be written down
            self._give_up(f"{name}: {type(error).__name__}")
            return
        self._write_step(record)

    def _write_step(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            if not self.closed and self._write(record):
                self.n_steps += 1

    def _write(self, record: Mapping[str, Any]) -> bool:
        line = memoryview(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        try:
            while line:  # a disk that fills up takes a part
                line = line[self._file.write(line) or 0 :]
        except OSError as error:
            self._give_up(error.strerror or str(error))
            return False
        return True

    def _give_up(self, why: str) -> None:
        """Warn and stop, but fail nobody: the step itself is done."""
        self._file.close()
        with suppress(RuntimeWarning):  # where warnings are errors
            warnings.warn(f"{self.path}: the trace ends here: {why}", RuntimeWarning, stacklevel=2)
