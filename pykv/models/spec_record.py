"""A MemorySpec as plain numbers, as JSON takes them, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any

import numpy as np

from pykv.cells import SwaType, Window
from pykv.errors import ParamError
from pykv.ggml import RopeParams, Tensor
from pykv.memory import LayerSpec, MemorySpec, StateSpec
from pykv.typing import F32Array, as_int, as_number


def spec_record(spec: MemorySpec) -> dict[str, Any]:
    """Return all of a spec; layers that share rope factors name the same entry of ``rope_factors``."""
    factors: dict[Tensor, int] = {}
    layers = []
    for layer in spec.layers:
        record = {f.name: getattr(layer, f.name) for f in fields(layer)}
        record["rope"] = None if layer.rope is None else asdict(layer.rope)
        record["state"] = None if layer.state is None else asdict(layer.state)
        if layer.rope_factors is not None:
            record["rope_factors"] = factors.setdefault(layer.rope_factors, len(factors))
        layers.append(record)
    return {f.name: getattr(spec, f.name) for f in fields(spec)} | {
        "layers": layers,
        "reuse": [list(pair) for pair in spec.reuse.items()],
        "window": {"n_swa": spec.window.n_swa, "type": spec.window.type.name},
        "rope_factors": [tensor.numpy().reshape(-1).tolist() for tensor in factors],
    }


def spec_factors(record: Mapping[str, Any]) -> list[F32Array]:
    """Return the sets of rope factors of a record, each (n_rot/2,)."""
    return [np.array(one, np.float32).reshape(-1) for one in record["rope_factors"]]


def spec_of(record: Mapping[str, Any], factors: Sequence[Tensor] | None = None) -> MemorySpec:
    """Return the spec of a record.

    Parameters
    ----------
    factors : the tensors that hold its ``rope_factors``; None leaves them out.

    Raises
    ------
    ParamError : the record describes no spec.
    """
    record = _checked("memory", record, MemorySpec, "rope_factors", "window")
    for name in ("layers", "rope_factors"):
        if not isinstance(record[name], (list, tuple)):
            raise ParamError(f"spec: {name}={record[name]!r} must be a list")
    own = {
        "layers": tuple(_layer(one, len(record["rope_factors"]), factors) for one in record["layers"]),
        "reuse": _reuse(record.get("reuse", [])),
        "window": _window(_checked("window", record["window"], Window, "n_swa", "type")),
    }
    return MemorySpec(**{name: value for name, value in record.items() if name != "rope_factors"} | own)


def _checked(name: str, record: Any, kind: type, *needed: str) -> Mapping[str, Any]:
    """Return the record of a dataclass, if it lacks no field without a default, none of `needed`, and has no others."""
    if not isinstance(record, Mapping):
        raise ParamError(f"spec: {name}={record!r} must be an object")
    known = {f.name: f.default is MISSING for f in fields(kind)} | dict.fromkeys(needed, True)
    wrong = [one for one in {**known, **record} if one not in known or (known[one] and one not in record)]
    if wrong:
        raise ParamError(f"spec: {name}: missing or unknown: {', '.join(wrong)}")
    return record


def _reuse(pairs: Any) -> dict[Any, Any]:
    if not isinstance(pairs, (list, tuple)) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs
    ):
        raise ParamError(f"spec: reuse={pairs!r} must be a list of pairs of layers")
    return dict(pairs)


def _window(record: Mapping[str, Any]) -> Window:
    if record["type"] not in list(SwaType.__members__):
        raise ParamError(f"spec: window type={record['type']!r} must be one of {', '.join(SwaType.__members__)}")
    return Window(record["n_swa"], SwaType[record["type"]])


def _layer(record: Any, n_factors: int, factors: Sequence[Tensor] | None) -> LayerSpec:
    rest = dict(_checked("layer", record, LayerSpec, "rope", "rope_factors"))
    rope, given, state = rest.pop("rope"), rest.pop("rope_factors"), rest.pop("state", None)
    index = as_int(given)
    if given is not None and (index is None or not 0 <= index < n_factors):
        raise ParamError(f"spec: rope_factors={given!r} must name one of {n_factors} sets")
    return LayerSpec(
        **rest,
        state=None if state is None else StateSpec(**_checked("state", state, StateSpec)),
        rope=None if rope is None else _rope(_checked("rope", rope, RopeParams)),
        rope_factors=None if index is None or factors is None else factors[index],
    )


def _rope(record: Mapping[str, Any]) -> RopeParams:
    sections = record.get("sections", (0, 0, 0, 0))
    if not isinstance(sections, (list, tuple)) or len(sections) != 4 or any(as_int(n) is None for n in sections):
        raise ParamError(f"spec: rope sections={sections!r} must be four numbers")
    for name, value in record.items():
        is_whole = name in ("n_dims", "n_ctx_orig")
        if name not in ("mode", "sections") and (as_int(value) if is_whole else as_number(value)) is None:
            raise ParamError(f"spec: rope {name}={value!r} must be a number")
    return RopeParams(**{**record, "sections": tuple(sections)})
