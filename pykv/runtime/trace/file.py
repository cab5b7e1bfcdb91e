"""TraceFile: a recorded trace, read and checked.

    {"pykv_trace": 1, "pykv": "0.1.0", "tokens": true, "params": {...}, "model": {...}, ...}
    {"do": "decode", "tokens": [5], "pos": [0], "seq": [[0]], "out": [0], "outcome": "ok", "seen": {"0": [0, 0]},
     "cells": {"0": [1, 3001264721, 2254720147]}, ...}
    {"do": "seq_rm", "args": [0, 1, -1], "outcome": true, "seen": {"0": [0, 0]}}
    {"ended": "restore: ..."}

``seen`` are the smallest and largest positions of all sequences afterwards; ``cells``, for those that the step touched,
how many there are and hashes of what is in them, see `Held`; ``rows`` fingerprints of the logits. ``ended`` is the last
line of a trace that stopped while its context went on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pykv.errors import PykvError, TraceError
from pykv.runtime.trace.fields import taken
from pykv.runtime.trace.header import TraceHeader
from pykv.runtime.trace.step import ENDED, Step, step_from_record
from pykv.runtime.trace.trace_path import require_regular, trace_path

_OPENING = b'{"pykv_trace"'


@dataclass(frozen=True)
class TraceFile:
    """A whole trace.

    Attributes
    ----------
    is_cut : the last line was written only in part, as after a crash; it is left out of `steps`.
    ended : why recording stopped while the context went on; None = it was closed, or broke off.
    """

    path: Path
    header: TraceHeader
    steps: tuple[Step, ...]
    is_cut: bool
    ended: str | None = None


def read_trace(path: str | bytes | os.PathLike[Any]) -> TraceFile:
    """Read and check a trace.

    Raises
    ------
    ParamError : no path.
    TraceError : no regular file, not a trace, one of another version, or damaged; names the line and what is wrong.
    """
    path = trace_path(path)
    try:
        require_regular(path)
        with path.open("rb") as file:
            if file.read(len(_OPENING)) != _OPENING:
                raise TraceError(f"{path}: not a trace of pykv: it does not begin with {_OPENING.decode()}")
            file.seek(0)
            return _read(path, file)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None


def _read(path: Path, lines: Iterable[bytes]) -> TraceFile:
    records = _Records(path, lines)
    line, first = next(iter(records), (1, None))
    if first is None:
        raise TraceError(f"{path}, line 1: the header is cut off")
    with _naming(path, line):
        header = TraceHeader.from_record(first)
    steps: list[Step] = []
    ended: str | None = None
    for line, record in records:
        with _naming(path, line):
            if ended is not None:
                raise ValueError(f"the trace ended before it: {ended}")
            if ENDED in record:
                ended = taken(record, ENDED, str)
            else:
                steps.append(step_from_record(record, line))
    return TraceFile(path, header, tuple(steps), records.is_cut, ended)


class _Records:
    """The JSON objects of a file, with the numbers of their lines; each is taken once."""

    def __init__(self, path: Path, lines: Iterable[bytes]) -> None:
        self._path, self._lines = path, enumerate(lines, start=1)
        self.is_cut = False

    def __iter__(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        for number, line in self._lines:
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError("a JSON object is needed")
            except ValueError as error:  # bytes that are no UTF-8, too
                self.is_cut = not line.endswith(b"\n")
                if self.is_cut:
                    return
                raise TraceError(f"{self._path}, line {number}: damaged: {error}") from None
            except RecursionError:
                raise TraceError(f"{self._path}, line {number}: damaged: nested too deeply") from None
            yield number, record


class _naming:  # noqa: N801
    """Turn errors inside into one that names the line."""

    def __init__(self, path: Path, line: int) -> None:
        self._where = f"{path}, line {line}"

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: object) -> None:
        if isinstance(error, (ValueError, OverflowError, PykvError)):
            raise TraceError(f"{self._where}: {error}") from None
