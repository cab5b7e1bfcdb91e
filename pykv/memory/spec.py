"""MemorySpec: what a memory must know about a model, and nothing else of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pykv.cells import NO_WINDOW, Window
from pykv.errors import ParamError
from pykv.ggml import RopeParams, Tensor
from pykv.memory.rope_turn import magnitude
from pykv.memory.shift_support import ShiftSupport
from pykv.typing import as_bool, as_int, as_number

MAX_ROW = 2**31 - 1
"""Elements in the K or V row of one cell, at most: the kernels count them in 32 bits."""

MAX_LAYERS = 2**16
"""Layers that `MemorySpec.uniform` repeats, at most: far beyond every model, far below what fills the memory."""


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer.

    Attributes
    ----------
    n_head_kv : K and V heads; 0 for a layer without a cache.
    n_embd_head_k, n_embd_head_v : elements of one K and one V head.
    rope : how its keys are rotated, None where they are not.
    rope_factors : [n_rot/2] f32, divides the frequencies; None for 1.

    Raises
    ------
    ParamError : names the field, its value and the limit.
    """

    n_head_kv: int
    n_embd_head_k: int
    n_embd_head_v: int
    rope: RopeParams | None = None
    rope_factors: Tensor | None = None

    def __post_init__(self) -> None:
        for name, least in (("n_head_kv", 0), ("n_embd_head_k", 1), ("n_embd_head_v", 1)):
            value = as_int(getattr(self, name))
            if value is None or value < least:
                raise ParamError(f"{name}={getattr(self, name)!r} must be a whole number, at least {least}")
            object.__setattr__(self, name, value)
        for name in ("n_embd_head_k", "n_embd_head_v"):
            head = getattr(self, name)
            if max(1, self.n_head_kv) * head > MAX_ROW:
                raise ParamError(
                    f"n_head_kv={self.n_head_kv} x {name}={head} elements in a row must be at most {MAX_ROW}"
                )
        if self.rope is not None and not isinstance(self.rope, RopeParams):
            raise ParamError(f"rope={self.rope!r} must be RopeParams, or None")
        if self.rope_factors is not None and not isinstance(self.rope_factors, Tensor):
            raise ParamError(f"rope_factors={self.rope_factors!r} must be a Tensor, or None")
        if self.rope is not None and not 0 < magnitude(self.rope) < math.inf:
            raise ParamError(f"rope={self.rope!r} would multiply keys by {magnitude(self.rope)}, it must be positive")
        if self.rope is not None and self.rope.n_dims > self.n_embd_head_k:
            raise ParamError(f"rope.n_dims={self.rope.n_dims} is more than n_embd_head_k={self.n_embd_head_k}")

    def fits(self, other: LayerSpec) -> bool:
        """Tell whether this layer can read what the other one stores."""
        return (self.n_head_kv, self.n_embd_head_k, self.n_embd_head_v) == (
            other.n_head_kv,
            other.n_embd_head_k,
            other.n_embd_head_v,
        )

    @property
    def n_embd_k(self) -> int:
        """Elements of one cell's K row."""
        return self.n_head_kv * self.n_embd_head_k

    @property
    def n_embd_v(self) -> int:
        """Elements of one cell's V row."""
        return self.n_head_kv * self.n_embd_head_v


@dataclass(frozen=True)
class MemorySpec:
    """The layers of a model as its memory sees them.

    Attributes
    ----------
    layers : one per model layer, in order.
    window : which keys a query still sees.
    n_pos_per_embd : positions per token, 1 for text models, 4 for M-RoPE.
    absolute_positions : positions went into the tokens' embeddings, so that no key can be moved to another one.
    alibi_max_bias : slope limit of ALiBi, 0 where positions are not a bias.
    logit_softcap : scores pass through c·tanh(x/c); 0 turns it off.

    Raises
    ------
    ParamError : names the field, its value and the limit.
    """

    layers: tuple[LayerSpec, ...]
    window: Window = NO_WINDOW
    n_pos_per_embd: int = 1
    absolute_positions: bool = False
    alibi_max_bias: float = 0.0
    logit_softcap: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _layers(self.layers))
        if not isinstance(self.window, Window):
            raise ParamError(f"window={self.window!r} must be a Window")
        n_pos = as_int(self.n_pos_per_embd)
        if n_pos is None or not 1 <= n_pos <= 4:
            raise ParamError(f"n_pos_per_embd={self.n_pos_per_embd!r} must be a whole number in 1..4")
        object.__setattr__(self, "n_pos_per_embd", n_pos)
        absolute = as_bool(self.absolute_positions)
        if absolute is None:
            raise ParamError(f"absolute_positions={self.absolute_positions!r} must be True or False")
        object.__setattr__(self, "absolute_positions", absolute)
        for name in ("alibi_max_bias", "logit_softcap"):
            value = as_number(getattr(self, name))
            if value is None or not 0 <= value < math.inf:
                raise ParamError(f"{name}={getattr(self, name)!r} must be a number, not negative")
            object.__setattr__(self, name, value)

    @property
    def can_shift(self) -> ShiftSupport:
        """Whether stored positions can be moved."""
        if self.n_pos_per_embd > 1:
            return ShiftSupport("multi_dim_positions", f"each token has {self.n_pos_per_embd} positions")
        if self.absolute_positions:
            return ShiftSupport("absolute_positions", "positions went into the tokens' embeddings")
        return ShiftSupport()

    @classmethod
    def uniform(cls, n_layer: int, layer: LayerSpec, **settings: object) -> MemorySpec:
        """Return a spec of `n_layer` equal layers.

        Raises
        ------
        ParamError : names the argument, its value and the limit.
        """
        n = as_int(n_layer)
        if n is None or not 1 <= n <= MAX_LAYERS:
            raise ParamError(f"n_layer={n_layer!r} must be a whole number in 1..{MAX_LAYERS}")
        return cls(layers=(layer,) * n, **settings)  # type: ignore[arg-type]


def _layers(layers: object) -> tuple[LayerSpec, ...]:
    if not isinstance(layers, Sequence):
        raise ParamError(f"layers={layers!r} must be a sequence of LayerSpec")
    for il, layer in enumerate(layers):
        if not isinstance(layer, LayerSpec):
            raise ParamError(f"layers[{il}]={layer!r} must be a LayerSpec")
    if not layers:
        raise ParamError("layers=() must name at least one layer")
    return tuple(layers)
