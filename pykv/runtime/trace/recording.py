"""Trace: write down every batch and verb of a context, so that somebody else can run them again.

Never changes what a context does: a trace that cannot be written warns once and ends.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakValueDictionary

from pykv.cells.arguments import boolean
from pykv.errors import TraceError
from pykv.runtime.trace.header import TraceHeader
from pykv.runtime.trace.heard_batch import HeardBatch
from pykv.runtime.trace.held import held, ranges
from pykv.runtime.trace.step import ENDED, DecodeStep, Step, VerbStep
from pykv.runtime.trace.trace_path import require_regular, trace_path
from pykv.typing import F32Array

if TYPE_CHECKING:
    from pykv.runtime.context import Context

_OPEN: WeakValueDictionary[str, Trace] = WeakValueDictionary()
"""The traces of this process by the file that they write."""

_BRINGS_ROWS = {"restore": "a snapshot was put back", "load_state": "a state was loaded"}
"""Verbs after which the memory holds what no step of a trace tells."""


class Trace:
    """A recording in progress. Made by `Context.trace`; close it, or use it in ``with``.

    One JSON object a line, on disk as soon as the step is done: after a crash the file holds all that came before.
    What is no batch or verb is not seen: other contexts, data written from outside, and reads such as `KVCache.k`,
    which carry out pending moves earlier than the next batch would. Restoring a snapshot or loading a state ends it;
    the last line of the file then says why.

    Attributes
    ----------
    path : the file.
    n_steps : steps written so far.

    Raises
    ------
    TraceError : the memory holds something already, or the file cannot be written, or another trace writes it.
    ConcurrentUseError : another thread is decoding, or using the memory.
    """

    def __init__(self, context: Context, path: str | bytes | os.PathLike[Any], *, tokens: bool) -> None:
        self.path, self._has_tokens = trace_path(path), boolean("tokens", tokens)
        self.n_steps = 0
        self._context, self._memory = context, context.memory
        with self._memory.guard:
            self._require_empty()
            header = TraceHeader.of(context, self._has_tokens).record()
            self._file = self._opened()
            self._write(header)
            self._memory.listeners.append(self._hear_verb)
            context.traces.append(self)

    def hear_decode(self, heard: HeardBatch, result: object, logits: F32Array | None) -> None:
        """Write down a decode: the batch, "ok" or the exception, and the logits if there are any."""

        def step() -> DecodeStep:
            whole = heard.step(result, ranges(self._memory), logits if self._has_tokens else None)
            return replace(whole, outside=()) if self._has_tokens else whole.private()

        self._write_step("decode", step)

    def close(self) -> None:
        """Stop recording. Safe to call twice; the context closes its traces with itself.

        Raises
        ------
        ConcurrentUseError : another thread is decoding, or using the memory, and that is still to be recorded; the
            trace goes on.
        """
        with self._memory.guard:
            self.end()

    def end(self) -> None:
        """Do what `close` does, for who has entered the guard."""
        if self in self._context.traces:
            self._context.traces.remove(self)
            self._memory.listeners.remove(self._hear_verb)
        self._file.close()

    @property
    def closed(self) -> bool:
        """Whether nothing is recorded any more."""
        return self._file.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_empty(self) -> None:
        found = ranges(self._memory)
        if found:
            where = ", ".join(f"sequence {seq} at {first}..{last}" for seq, (first, last) in found.items())
            raise TraceError(
                f"{self.path}: the memory holds {where}, which a replay could not restore; start the trace before the "
                "first decode, or clear() the memory first"
            )

    def _opened(self) -> FileIO:
        name = os.path.realpath(self.path)
        other = _OPEN.get(name)
        if other is not None and not other.closed:
            raise TraceError(f"{self.path}: another trace is being written there; close it first")
        try:
            if self.path.exists():
                require_regular(self.path)
            file = self.path.open("wb", buffering=0)
        except OSError as error:
            raise TraceError(f"{self.path}: cannot be written: {error.strerror}") from None
        _OPEN[name] = self
        return file

    def _hear_verb(self, name: str, args: tuple[object, ...], result: object) -> None:
        if name in _BRINGS_ROWS:
            if not isinstance(result, Exception):  # one that was refused has changed nothing
                self._end_early(f"{name}: {_BRINGS_ROWS[name]}, whose rows a trace does not hold")
            return
        self._write_step(name, lambda: VerbStep.of(name, args, result, ranges(self._memory)))

    def _write_step(self, name: str, make: Callable[[], Step]) -> None:
        if self.closed:
            return
        try:
            step = make()
            record = replace(step, held=held(self._memory, step.seqs, self._has_tokens)).record()
        except Exception as error:  # what a caller passed is of no kind that can be written down
            self._end_early(f"{name}: {type(error).__name__}")
            return
        if self._write(record):
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

    def _end_early(self, why: str) -> None:
        """Leave a mark in the file, so that a replay does not take it for all there was, and stop."""
        if not self.closed and self._write({ENDED: why}):
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        """Warn and stop, but fail nobody: the step itself is done."""
        self._file.close()
        with suppress(RuntimeWarning):  # where warnings are errors
            warnings.warn(f"{self.path}: the trace ends here: {why}", RuntimeWarning, stacklevel=2)
