"""Seeded values of tensors, chosen so that what a model does shows in its logits.

A recipe turns standard normal noise of the tensor's shape into the tensor. `RULES` gives one for every name that
GGUF files use; a model may put rules of its own before them.

* Attention is sharp (scores spread over several units), so a wrong mask, window or position changes the result.
* Recurrent states forget at rates that are spread evenly, on a log scale, from a few tokens to about a hundred: none
  is gone at once, none stays for ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

F32Array = NDArray[np.float32]
F64Array = NDArray[np.float64]
Shape = tuple[int, ...]
Recipe = Callable[[F64Array], F64Array]
Rules = tuple[tuple[str, Recipe], ...]


def around(mean: float, spread: float = 0.1) -> Recipe:
    """Return normal values with this mean and this standard deviation."""
    return lambda noise: mean + spread * noise


def mixing(gain: float = 1.0) -> Recipe:
    """Return rows that take an input of unit size per element to outputs of size `gain`."""
    return lambda noise: gain * noise / np.sqrt(noise.shape[-1])


def evenly(low: float, high: float) -> Recipe:
    """Return values from low to high at even distances, in random order: short tensors cover the range too."""
    return lambda noise: np.linspace(low, high, noise.size)[noise.ravel().argsort().argsort()].reshape(noise.shape)


def decay(slowest: float, fastest: float) -> Recipe:
    """Return negative rates, evenly spread on a log scale: `-exp(A_log)` as converters store it."""
    return lambda noise: -np.exp(evenly(np.log(slowest), np.log(fastest))(noise))


def step_bias(shortest: float, longest: float) -> Recipe:
    """Return biases whose softplus, a time step, is evenly spread on a log scale."""
    return lambda noise: np.log(np.expm1(np.exp(evenly(np.log(shortest), np.log(longest))(noise))))


def sharpened(n_rows: int, gain: float = 2.0) -> Recipe:
    """Return a matrix whose first rows are larger by `gain`: queries and keys of a fused projection."""
    return lambda noise: mixing()(noise) * np.where(np.arange(len(noise)) < n_rows, gain, 1.0)[:, None]


def _stretch(noise: F64Array) -> F64Array:
    return 1.0 + 7.0 * np.linspace(0.0, 1.0, len(noise)) ** 2


RULES: Rules = (
    ("rope_freqs.weight", _stretch),
    ("*ssm_dt.bias", step_bias(0.01, 0.3)),
    ("*.bias", around(0.0, 0.2)),
    ("*norm*", around(1.0)),
    ("*attn_q.weight", mixing(2.0)),  # sharp attention, so a wrong mask or position shows
    ("*attn_k.weight", mixing(2.0)),
    ("token_embd.weight", around(0.0, 0.5)),
    ("position_embd.weight", around(0.0, 0.5)),
    ("*ssm_a", decay(0.2, 4.0)),
    ("*ssm_d", around(0.5)),
    ("*ssm_conv1d.weight", mixing()),
    ("*attn_sinks.weight", around(2.0, 1.0)),
    ("*", mixing()),
)
"""The first pattern that fits a tensor's name gives its recipe."""


def draw(seed: int, name: str, shape: Shape, rules: Rules = ()) -> F32Array:
    """Draw one tensor; it depends on seed, name and shape only, so options do not disturb one another."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
    noise = np.random.default_rng(key).standard_normal(shape)
    return recipe_for(name, (*rules, *RULES))(noise).astype(np.float32)


def recipe_for(name: str, rules: Iterable[tuple[str, Recipe]]) -> Recipe:
    """Return the recipe of the first pattern that fits."""
    return next(recipe for pattern, recipe in rules if fnmatchcase(name, pattern))
