"""A MemorySpec as plain numbers, as JSON takes them, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from pykv.cells import SwaType, Window
from pykv.errors import ParamError
from pykv.ggml import RopeParams, Tensor
from pykv.memory import LayerSpec, MemorySpec
from pykv.typing import F32Array, as_int, as_number


def spec_record(spec: MemorySpec) -> dict[str, Any]:
    """Return all of a spec; layers that share rope factors name the same entry of ``rope_factors``."""
    factors: dict[Tensor, int] = {}
    layers = []
    for layer in spec.layers:
        record = {f.name: getattr(layer, f.name) for f in fields(layer)}
        record["rope"] = None if layer.rope is None else asdict(layer.rope)
        if layer.rope_factors is not None:
            record["rope_factors"] = factors.setdefault(layer.rope_factors, len(factors))
        layers.append(record)
    return {f.name: getattr(spec, f.name) for f in fields(spec)} | {
        "layers": layers,
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
    try:
        rest = {name: value for name, value in record.items() if name not in ("layers", "window", "rope_factors")}
        window = Window(record["window"]["n_swa"], SwaType[record["window"]["type"]])
        n_factors = len(record["rope_factors"])
        layers = tuple(_layer(one, n_factors, factors) for one in record["layers"])
        return MemorySpec(layers=layers, window=window, **rest)
    except (KeyError, TypeError, AttributeError) as error:
        raise ParamError(f"spec: {type(error).__name__}: {error}") from None


def _layer(record: Mapping[str, Any], n_factors: int, factors: Sequence[Tensor] | None) -> LayerSpec:
    rest = {name: value for name, value in record.items() if name not in ("rope", "rope_factors")}
    index = as_int(record["rope_factors"])
    if record["rope_factors"] is not None and (index is None or not 0 <= index < n_factors):
        raise ParamError(f"spec: rope_factors={record['rope_factors']!r} must name one of {n_factors} sets")
    return LayerSpec(
        **rest,
        rope=None if record["rope"] is None else _rope(record["rope"]),
        rope_factors=None if index is None or factors is None else factors[index],
    )


def _rope(record: Mapping[str, Any]) -> RopeParams:
    for name, value in record.items():
        is_whole = name in ("n_dims", "n_ctx_orig")
        if name != "mode" and (as_int(value) if is_whole else as_number(value)) is None:
            raise ParamError(f"spec: rope {name}={value!r} must be a number")
    return RopeParams(**record)
