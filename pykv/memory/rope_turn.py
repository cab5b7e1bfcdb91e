"""Turning keys that are stored already: rotations that leave a key's length, or undo all that RoPE did to it.

Source: spec session.md section 2.5.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pykv.ggml import RopeParams


def turn(rope: RopeParams) -> RopeParams:
    """Return how stored keys are moved by a number of positions: as `rope`, with magnitude 1.

    YaRN multiplies a magnitude into keys when they are stored; once is enough.
    """
    # differs from llama.cpp: there every shift multiplies all keys by that magnitude again, moved or not
    return replace(rope, attn_factor=_factor_for(1.0, rope))


def unturn(rope: RopeParams) -> RopeParams:
    """Return how, by minus their positions, stored keys become what they were before RoPE."""
    return replace(rope, attn_factor=_factor_for(1.0 / magnitude(rope), rope))


def magnitude(rope: RopeParams) -> float:
    """Return by what RoPE multiplies a key's length."""
    return rope.attn_factor * float(_yarn(rope))


def _factor_for(wanted: float, rope: RopeParams) -> float:
    """Return the `attn_factor` that makes the kernel, which counts in float32, multiply by `wanted`."""
    own, target = _yarn(rope), np.float32(wanted)
    guess = np.float32(target / own)
    near = (guess, np.nextafter(guess, np.float32(0)), np.nextafter(guess, np.float32(np.inf)))
    return float(min(near, key=lambda factor: abs(np.float32(factor * own) - target)))


def _yarn(rope: RopeParams) -> np.float32:
    """Return the part of the magnitude that the kernel adds by itself."""
    if rope.ext_factor == 0:
        return np.float32(1)
    return np.float32(1 + np.float32(0.1) * np.log(np.float32(1) / np.float32(rope.freq_scale)))
