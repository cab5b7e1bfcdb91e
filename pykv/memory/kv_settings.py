"""KVSettings: how much a KV cache stores, and how."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from pykv.errors import ParamError
from pykv.ggml import DType
from pykv.memory.spec import layer_index
from pykv.typing import MAX_SEQ, POS_INF, as_bool, as_int

KV_TYPES = (
    DType.F32,
    DType.F16,
    DType.BF16,
    DType.Q8_0,
    DType.Q5_1,
    DType.Q5_0,
    DType.Q4_1,
    DType.Q4_0,
    DType.IQ4_NL,
)
"""Element types that K and V can be stored in."""


@dataclass(frozen=True)
class KVSettings:
    """How much to store, and how. Numbers and bools may be numpy's; Python's are stored.

    Attributes
    ----------
    n_cells : tokens per stream.
    n_seq_max : sequences.
    unified : one stream that all sequences share, or one for each.
    type_k, type_v : element types, named as in ``"q8_0"``.
    v_trans : store V transposed, so that a channel's cells are contiguous; not for quantised V.
    v_trans_in_states : whether states hold V so, whatever it is in memory; None = as `v_trans` says.
    layers : the layers that are cached; None = all that have K and V.
    reference_moves : `seq_add` and `seq_div` as llama.cpp has them: they move shared cells for all their owners, and
        `seq_div` turns keys the wrong way.
    tag : goes into the tensors' names.

    Raises
    ------
    ParamError : no such setting whatever the layers are; the message names it.
    """

    n_cells: int
    n_seq_max: int = 1
    unified: bool = True
    type_k: str | DType = "f16"
    type_v: str | DType = "f16"
    v_trans: bool = False
    v_trans_in_states: bool | None = None
    reference_moves: bool = False
    layers: frozenset[int] | None = None
    tag: str = ""

    def __post_init__(self) -> None:
        for name, most in (("n_cells", POS_INF), ("n_seq_max", MAX_SEQ)):
            self._take_size(name, most)
        for name in ("unified", "v_trans", "reference_moves"):
            flag = as_bool(getattr(self, name))
            if flag is None:
                raise ParamError(f"{name}={getattr(self, name)!r} must be True or False")
            object.__setattr__(self, name, flag)
        in_states = as_bool(self.v_trans_in_states)
        if self.v_trans_in_states is not None and in_states is None:
            raise ParamError(f"v_trans_in_states={self.v_trans_in_states!r} must be True, False or None")
        object.__setattr__(self, "v_trans_in_states", in_states)
        if self.layers is not None:
            object.__setattr__(self, "layers", _layer_set(self.layers))
        _check_tag(self.tag)

    def _take_size(self, name: str, most: int) -> None:
        size = as_int(getattr(self, name))
        if size is None or not 1 <= size <= most:
            raise ParamError(f"{name}={getattr(self, name)!r} must be a whole number in 1..{most}")
        object.__setattr__(self, name, size)

    @property
    def v_by_channel_in_states(self) -> bool:
        """Whether states hold V by channel."""
        return self.v_trans if self.v_trans_in_states is None else self.v_trans_in_states

    @classmethod
    def of(cls, **keywords: Any) -> KVSettings:
        """Return settings from keywords.

        Raises
        ------
        ParamError : there is no such setting, or `n_cells` is missing.
        """
        known = cls.__dataclass_fields__
        for name in keywords:
            if name not in known:
                raise ParamError(f"{name}: no such setting of a KV cache; known: {', '.join(known)}")
        if "n_cells" not in keywords:
            raise ParamError("n_cells is missing: how many tokens shall a stream hold?")
        return cls(**keywords)

    @property
    def n_stream(self) -> int:
        return 1 if self.unified else self.n_seq_max


def kv_type(name: str | DType, argument: str) -> DType:
    """Return the element type of that name, if K and V can be stored in it.

    Raises
    ------
    ParamError : they cannot, or there is none; the message names `argument`.
    """
    dtype = DType.parse(name, argument)
    if dtype not in KV_TYPES:
        known = ", ".join(kind.label for kind in KV_TYPES)
        raise ParamError(f"{argument}={dtype.label!r} cannot store K or V; known: {known}")
    return dtype


def _layer_set(layers: object) -> frozenset[int]:
    if not isinstance(layers, Set):
        raise ParamError(f"layers={layers!r} must be a set of layers, or None for all")
    return frozenset(layer_index("layers", il) for il in layers)


def _check_tag(tag: object) -> None:
    """Names of tensors are UTF-8 that ends at a zero byte."""
    if not isinstance(tag, str):
        raise ParamError(f"tag={tag!r} must be a str")
    if "\0" in tag or any("\ud800" <= letter <= "\udfff" for letter in tag):
        raise ParamError(f"tag={tag!r} must be text that UTF-8 can hold, without a zero byte")
