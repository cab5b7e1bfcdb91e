"""MemorySpec: what a memory must know about a model, and nothing else of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pykv.cells import NO_WINDOW, Window
from pykv.errors import ParamError
from pykv.ggml import RopeParams, Tensor
from pykv.typing import is_whole


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer.

    Attributes
    ----------
    n_head_kv : K and V heads; 0 for a layer without a cache.
    n_embd_head_k, n_embd_head_v : elements of one K and one V head.
    rope : how its keys are rotated, None where they are not.
    rope_factors : [n_rot/2] f32, divides the frequencies; None for 1.
    """

    n_head_kv: int
    n_embd_head_k: int
    n_embd_head_v: int
    rope: RopeParams | None = None
    rope_factors: Tensor | None = None

    def __post_init__(self) -> None:
        for name, least in (("n_head_kv", 0), ("n_embd_head_k", 1), ("n_embd_head_v", 1)):
            value = getattr(self, name)
            if not is_whole(value) or value < least:
                raise ParamError(f"{name}={value!r} must be a whole number, at least {least}")
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
    alibi_max_bias : slope limit of ALiBi, 0 where positions are not a bias.
    logit_softcap : scores pass through c·tanh(x/c); 0 turns it off.
    """

    layers: tuple[LayerSpec, ...]
    window: Window = NO_WINDOW
    n_pos_per_embd: int = 1
    alibi_max_bias: float = 0.0
    logit_softcap: float = 0.0

    def __post_init__(self) -> None:
        if not self.layers:
            raise ParamError("layers=() must name at least one layer")
        if not is_whole(self.n_pos_per_embd) or not 1 <= self.n_pos_per_embd <= 4:
            raise ParamError(f"n_pos_per_embd={self.n_pos_per_embd!r} must be a whole number in 1..4")
        for name in ("alibi_max_bias", "logit_softcap"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ParamError(f"{name}={value!r} must be a number, not negative")

    @classmethod
    def uniform(cls, n_layer: int, layer: LayerSpec, **settings: object) -> MemorySpec:
        """Return a spec of `n_layer` equal layers."""
        return cls(layers=(layer,) * n_layer, **settings)  # type: ignore[arg-type]
