"""Which layers of a model have its sliding window, and how their heads are rotated.

Follows llama.cpp's ``load_swa_pattern``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from pykv.errors import GGUFError
from pykv.models.hparams import HParams
from pykv.models.keys import Keys
from pykv.models.rope import ContextRope


def windowed_layers(keys: Keys, n_layer: int, every: int, *, dense_first: bool = False) -> tuple[bool, ...]:
    """Tell for each layer whether it has the window.

    Parameters
    ----------
    every : one layer of so many sees everything, where the file does not say otherwise; 0 = none does.
    dense_first : that one is the first of them, else the last.

    Raises
    ------
    GGUFError : the file's pattern is neither a number nor a list of one flag per layer.
    """
    name = "attention.sliding_window_pattern"
    key = keys.key(name)
    if key in keys.meta and isinstance(keys.meta[key], (list, np.ndarray)):
        flags = np.asarray(keys.meta[key])
        if flags.dtype.kind not in "bui" or flags.shape != (n_layer,):
            raise GGUFError(f"{keys.path}: {key} must hold one flag for each of the {n_layer} layers")
        return tuple(bool(flag) for flag in flags)
    every = keys.size(name, every, least=0)
    if every == 0:
        return (True,) * n_layer
    dense = 0 if dense_first else every - 1
    return tuple(il % every != dense for il in range(n_layer))


@dataclass(frozen=True)
class WindowedRope:
    """How fast heads turn in layers with a window: as the model says, whatever a caller asks of the others."""

    freq_base: float
    freq_scale: float

    @classmethod
    def read(cls, keys: Keys, freq_base: float, freq_scale: float) -> Self:
        """Return the model's; `freq_base` holds where the file has no other."""
        base = keys.positive("rope.freq_base_swa", freq_base)
        if base < 1:  # frequencies would grow from one pair of dims to the next
            raise keys.refusal("rope.freq_base_swa", base, "at least 1")
        return cls(base, freq_scale)

    def of(self, rope: ContextRope) -> ContextRope:
        """Return a context's settings for these layers."""
        return replace(rope, freq_base=self.freq_base, freq_scale=self.freq_scale)


def refuse_other_windowed_heads(keys: Keys, hparams: HParams) -> None:
    """Raise `GGUFError` if layers with a window have heads of another size than the rest."""
    for name, size in (
        ("attention.key_length_swa", hparams.n_embd_head_k),
        ("attention.value_length_swa", hparams.n_embd_head_v),
        ("rope.dimension_count_swa", hparams.n_rot),
    ):
        found = keys.size(name, size)
        if found != size:
            raise GGUFError(f"{keys.path}: {keys.key(name)}={found}: other heads than the rest's {size} not supported")
