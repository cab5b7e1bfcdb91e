"""TraceFile: a recorded trace, read and checked.

    {"pykv_trace": 1, "pykv": "0.1.0", "tokens": true, "params": {...}, "model": {...}, ...}
    {"do": "decode", "tokens": [5], "pos": [0], "seq": [[0]], "out": [0], "outcome": "ok", "seen": {"0": [0, 0]}, ...}
    {"do": "seq_rm", "args": [0, 1, -1], "outcome": true, "seen": {"0": [0, 0]}}

``seen`` are the smallest and largest positions of all sequences afterwards, ``rows`` fingerprints of the logits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pykv
from pykv.errors import PykvError, TraceError
from pykv.memory import AttentionPath, AttentionPlan
from pykv.models import RopeRequest
from pykv.models.spec_record import spec_record
from pykv.models.stand_in import StandInShape
from pykv.runtime.params import ContextParams
from pykv.runtime.trace.step import Ranges, Step, step_from_record

if TYPE_CHECKING:
    from pykv.runtime.context import Context

VERSION = 1
_OPENING = b'{"pykv_trace"'
_NOT_RECORDED = ("n_threads",)


@dataclass(frozen=True)
class ModelNote:
    """Which model ran, and what a stand-in for it needs.

    Attributes
    ----------
    shape : its heads and its memory.
    """

    architecture: str
    name: str
    file: str
    n_vocab: int
    shape: StandInShape


@dataclass(frozen=True)
class TraceHeader:
    """The first line.

    Attributes
    ----------
    version : of pykv.
    has_tokens : whether token ids were recorded.
    params : what the context was made with, sizes as they were resolved.
    attention : how it computed attention.
    devices : of the layers, each once.
    start : sequences that the memory held when recording began.
    """

    version: str
    has_tokens: bool
    params: ContextParams
    attention: AttentionPlan
    devices: tuple[str, ...]
    model: ModelNote
    start: Ranges

    @classmethod
    def of(cls, context: Context, has_tokens: bool) -> TraceHeader:
        """Return the header for what a context does from now on."""
        model, asked, resolved = context.model, context.asked, context.params
        params = {f.name: getattr(resolved, f.name, getattr(asked, f.name)) for f in fields(asked)}
        types = {"type_k": resolved.type_k.label, "type_v": resolved.type_v.label}
        return cls(
            version=pykv.__version__,
            has_tokens=has_tokens,
            params=ContextParams(**(params | types | {"rope": asked.rope})),
            attention=context.attention,
            devices=tuple(dict.fromkeys(device.name for device in model.placement.layers)),
            model=_note(context),
            start=ranges(context),
        )

    def record(self) -> dict[str, Any]:
        """Return it for JSON."""
        params, shape = asdict(self.params), self.model.shape
        return {
            "pykv_trace": VERSION,
            "pykv": self.version,
            "tokens": self.has_tokens,
            "params": {name: value for name, value in params.items() if name not in _NOT_RECORDED},
            "attention": {
                "many": self.attention.many.value,
                "transpose_from": self.attention.transpose_from,
                "few": self.attention.few.value,
            },
            "devices": self.devices,
            "model": {
                "architecture": self.model.architecture,
                "name": self.model.name,
                "file": self.model.file,
                "n_vocab": self.model.n_vocab,
                "n_ctx_train": shape.n_ctx_train,
                "n_head_by_layer": shape.n_head_by_layer,
                "memory": shape.spec,
            },
            "start": {str(seq): ends for seq, ends in self.start.items()},
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> TraceHeader:
        """Return the header of a JSON line.

        Raises
        ------
        ValueError, KeyError, TypeError, PykvError : it is none.
        """
        if record["pykv_trace"] != VERSION:
            raise ValueError(f"pykv_trace={record['pykv_trace']!r}: this pykv reads version {VERSION}")
        model, params, attention = record["model"], dict(record["params"]), record["attention"]
        depth = attention["transpose_from"]
        if not (depth is None or (type(depth) is int and depth >= 0)):
            raise ValueError(f"transpose_from={depth!r} must be a number of cells, or null")
        return cls(
            version=str(record["pykv"]),
            has_tokens=bool(record["tokens"]),
            params=ContextParams(**(params | {"rope": RopeRequest(**params["rope"])})),
            attention=AttentionPlan(_path(attention["many"]), depth, _path(attention.get("few", "flash"))),
            devices=tuple(map(str, record["devices"])),
            model=ModelNote(
                architecture=str(model["architecture"]),
                name=str(model["name"]),
                file=str(model["file"]),
                n_vocab=int(model["n_vocab"]),
                shape=StandInShape(tuple(model["n_head_by_layer"]), int(model["n_ctx_train"]), model["memory"]),
            ),
            start={int(seq): (int(first), int(last)) for seq, (first, last) in record["start"].items()},
        )


def _path(name: str) -> AttentionPath:
    return AttentionPath({"grouped": "matmul"}.get(name, name))  # what traces called it at first


@dataclass(frozen=True)
class TraceFile:
    """A whole trace.

    Attributes
    ----------
    is_cut : the last line was written only in part, as after a crash; it is left out of `steps`.
    """

    path: Path
    header: TraceHeader
    steps: tuple[Step, ...]
    is_cut: bool


def read_trace(path: str | os.PathLike[str]) -> TraceFile:
    """Read and check a trace.

    Raises
    ------
    TraceError : not a trace, one of a newer pykv, or damaged; the message names the line and what is wrong.
    """
    path = Path(path)
    try:
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
    for line, record in records:
        with _naming(path, line):
            steps.append(step_from_record(record, line))
    return TraceFile(path, header, tuple(steps), records.is_cut)


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
        if isinstance(error, KeyError):
            raise TraceError(f"{self._where}: {error} is missing or unknown") from None
        if isinstance(error, (ValueError, TypeError, AttributeError, OverflowError, IndexError, PykvError)):
            raise TraceError(f"{self._where}: {error}") from None


def ranges(context: Context) -> Ranges:
    """Return the smallest and largest position of every sequence that holds something."""
    memory = context.memory
    ends = {seq: (memory.pos_min(seq), memory.pos_max(seq)) for seq in range(context.params.n_seq_max)}
    return {seq: (first, last) for seq, (first, last) in ends.items() if last >= 0}


def _note(context: Context) -> ModelNote:
    model, hp = context.model, context.model.hparams
    metadata, path = getattr(model, "metadata", None), getattr(model, "path", None)  # a stand-in has none
    return ModelNote(
        architecture=hp.architecture,
        name="" if metadata is None else metadata.typed("general.name", str, ""),
        file="" if path is None else path.name,
        n_vocab=hp.n_vocab,
        shape=StandInShape(hp.n_head_by_layer, hp.n_ctx_train, spec_record(context.memory.spec)),
    )
