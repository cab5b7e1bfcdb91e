"""TraceHeader: the first line of a trace, which says what ran and with which settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import pykv
from pykv.memory import AttentionPath, AttentionPlan
from pykv.models import RopeRequest
from pykv.models.spec_record import spec_record
from pykv.models.stand_in import StandInShape
from pykv.runtime.params import ContextParams
from pykv.runtime.trace.fields import ints, of_kind, taken

if TYPE_CHECKING:
    from pykv.runtime.context import Context

T = TypeVar("T")

VERSION = 1
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
    """

    version: str
    has_tokens: bool
    params: ContextParams
    attention: AttentionPlan
    devices: tuple[str, ...]
    model: ModelNote

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
                "fuse_from": self.attention.fuse_from,
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
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> TraceHeader:
        """Return the header of a JSON line.

        Raises
        ------
        ValueError, PykvError : it is none; names the field.
        """
        if record["pykv_trace"] != VERSION:
            raise ValueError(f"pykv_trace={record['pykv_trace']!r}: this pykv reads version {VERSION}")
        return cls(
            version=taken(record, "pykv", str),
            has_tokens=taken(record, "tokens", bool),
            params=_params(taken(record, "params", dict)),
            attention=_attention(taken(record, "attention", dict)),
            devices=tuple(of_kind("devices", name, str) for name in taken(record, "devices", list)),
            model=_model(taken(record, "model", dict)),
        )


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


def _params(record: Mapping[str, Any]) -> ContextParams:
    for name in ("type_k", "type_v"):
        taken(record, name, str)
    rope = _made(RopeRequest, "rope", taken(record, "rope", dict))
    return _made(ContextParams, "params", {**record, "rope": rope})


def _made(kind: type[T], name: str, values: Mapping[str, Any]) -> T:
    """Return a dataclass of values by name."""
    unknown = values.keys() - {f.name for f in fields(kind)}  # type: ignore[arg-type]
    if unknown:
        raise ValueError(f"{name}: {', '.join(sorted(unknown))} is unknown")
    return kind(**values)


def _attention(record: Mapping[str, Any]) -> AttentionPlan:
    many, few = _path(record, "many"), AttentionPath.FLASH  # what traces without it were recorded with
    few = _path(record, "few") if "few" in record else few
    return AttentionPlan(many, _depth(record, "transpose_from"), few, _depth(record, "fuse_from"))


def _depth(record: Mapping[str, Any], name: str) -> int | None:
    depth = record.get(name)
    if depth is None or (type(depth) is int and depth >= 0):
        return depth
    raise ValueError(f"{name}={depth!r} must be a number of cells, or null")


def _path(record: Mapping[str, Any], name: str) -> AttentionPath:
    value, known = taken(record, name, str), [path.value for path in AttentionPath]
    value = "matmul" if value == "grouped" else value  # as it was called at first
    if value not in known:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(known)}")
    return AttentionPath(value)


def _model(record: Mapping[str, Any]) -> ModelNote:
    heads = ints("n_head_by_layer", taken(record, "n_head_by_layer", list))
    return ModelNote(
        architecture=taken(record, "architecture", str),
        name=taken(record, "name", str),
        file=taken(record, "file", str),
        n_vocab=taken(record, "n_vocab", int),
        shape=StandInShape(heads, taken(record, "n_ctx_train", int), taken(record, "memory", dict)),
    )
