"""MemorySpec: what a memory must know about a model, and nothing else of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
class StateSpec:
    """The recurrent state of one layer and sequence: two rows of f32.

    Attributes
    ----------
    n_embd_r : elements of the row of recent inputs: a convolution's, or a token shift's; 0 for none.
    n_embd_s : elements of the state proper; 0 for none.

    Raises
    ------
    ParamError : names the field, its value and the limit.
    """

    n_embd_r: int
    n_embd_s: int = 0

    def __post_init__(self) -> None:
        for name in ("n_embd_r", "n_embd_s"):
            value = as_int(getattr(self, name))
            if value is None or not 0 <= value <= MAX_ROW:
                raise ParamError(f"{name}={getattr(self, name)!r} must be a whole number in 0..{MAX_ROW}")
            object.__setattr__(self, name, value)
        if self.n_embd_r + self.n_embd_s == 0:
            raise ParamError("n_embd_r=0 and n_embd_s=0: a state holds something, or there is none")

    @property
    def nbytes(self) -> int:
        """Bytes of both rows."""
        return 4 * (self.n_embd_r + self.n_embd_s)


@dataclass(frozen=True)
class LayerSpec:
    """What one layer remembers: K and V of each token, a recurrent state, or both.

    Attributes
    ----------
    n_head_kv : K and V heads; 0 for a layer without a cache.
    n_embd_head_k, n_embd_head_v : elements of one K and one V head.
    rope : how its keys are rotated, None where they are not.
    rope_factors : [n_rot/2] f32, divides the frequencies; None for 1.
    rope_at : the first element of a head that is rotated.
    is_swa : whether the memory's window holds for this layer, where some layers have one and some have none.
    k_only : V is the front of each K head and not stored again.
    state : the recurrent state, None where there is none.

    Raises
    ------
    ParamError : names the field, its value and the limit.
    """

    n_head_kv: int
    n_embd_head_k: int
    n_embd_head_v: int
    rope: RopeParams | None = None
    rope_factors: Tensor | None = None
    rope_at: int = 0
    is_swa: bool = False
    k_only: bool = False
    state: StateSpec | None = None

    @classmethod
    def recurrent(cls, state: StateSpec) -> LayerSpec:
        """Return a layer that remembers nothing but a state."""
        return cls(0, 1, 1, state=state)

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
        self._take_flags()
        rope_at = as_int(self.rope_at)
        if rope_at is None or rope_at < 0:
            raise ParamError(f"rope_at={self.rope_at!r} must be a whole number, not negative")
        object.__setattr__(self, "rope_at", rope_at)
        if self.rope is not None and rope_at + self.rope.n_dims > self.n_embd_head_k:
            at = f" from rope_at={rope_at} on" if rope_at else ""
            raise ParamError(f"rope.n_dims={self.rope.n_dims}{at} is more than n_embd_head_k={self.n_embd_head_k}")
        if self.k_only and self.n_embd_head_v > self.n_embd_head_k:
            raise ParamError(f"n_embd_head_v={self.n_embd_head_v} is no part of n_embd_head_k={self.n_embd_head_k}")
        if self.k_only and self.rope is not None and rope_at < self.n_embd_head_v:
            raise ParamError(f"rope_at={rope_at} would turn V, the first {self.n_embd_head_v} elements of each key")

    def _take_flags(self) -> None:
        for name in ("is_swa", "k_only"):
            flag = as_bool(getattr(self, name))
            if flag is None:
                raise ParamError(f"{name}={getattr(self, name)!r} must be True or False")
            object.__setattr__(self, name, flag)
        if self.state is not None and not isinstance(self.state, StateSpec):
            raise ParamError(f"state={self.state!r} must be a StateSpec, or None")

    def fits(self, other: LayerSpec) -> bool:
        """Tell whether this layer can read what the other one stores."""
        mine, theirs = ((one.n_head_kv, one.n_embd_head_k, one.n_embd_head_v, one.k_only) for one in (self, other))
        return mine == theirs

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
    window : which keys a query still sees: in the layers with `is_swa`, or in all if none has it.
    reuse : layer → earlier layer whose K and V it reads instead of its own.
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
    reuse: Mapping[int, int] = field(default_factory=dict, hash=False)
    n_pos_per_embd: int = 1
    absolute_positions: bool = False
    alibi_max_bias: float = 0.0
    logit_softcap: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _layers(self.layers))
        if not isinstance(self.window, Window):
            raise ParamError(f"window={self.window!r} must be a Window")
        object.__setattr__(self, "reuse", layer_map("reuse", self.reuse))
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


def layer_map(name: str, borrowed: object) -> dict[int, int]:
    """Return a map of layers to layers, checked.

    Raises
    ------
    ParamError : it is none; the message names it.
    """
    if not isinstance(borrowed, Mapping):
        raise ParamError(f"{name}={borrowed!r} must map layers to the layers whose K and V they read")
    return {layer_index(name, il): layer_index(name, source) for il, source in borrowed.items()}


def layer_index(name: str, il: object) -> int:
    """Return the number of a layer as Python's int; raises ParamError, naming `name`, if it is none."""
    index = as_int(il)
    if index is None:
        raise ParamError(f"{name}: {il!r} is no layer")
    return index


def _layers(layers: object) -> tuple[LayerSpec, ...]:
    if not isinstance(layers, Sequence):
        raise ParamError(f"layers={layers!r} must be a sequence of LayerSpec")
    for il, layer in enumerate(layers):
        if not isinstance(layer, LayerSpec):
            raise ParamError(f"layers[{il}]={layer!r} must be a LayerSpec")
    if not layers:
        raise ParamError("layers=() must name at least one layer")
    return tuple(layers)
