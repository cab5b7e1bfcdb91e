"""Rotary positions as the papers write them, in float64. Nothing here is taken from a kernel.

Su et al. 2021 (RoPE); Peng et al. 2023 (YaRN, "NTK-by-parts" and the attention temperature).
"""

from __future__ import annotations

import numpy as np


def yarn_ramp(n_dims: int, n_ctx_orig: int, base: float, beta_fast: float, beta_slow: float) -> np.ndarray:
    """Return for each pair how much of its own frequency it keeps: 1 for pairs that turn fast, 0 for slow ones.

    A pair that turns `beta` times within the original context is number
    ``n_dims * ln(n_ctx_orig / (2π beta)) / (2 ln base)``; the bounds are rounded outwards and clamped.
    """

    def pair(beta: float) -> float:
        return n_dims * np.log(n_ctx_orig / (2 * np.pi * beta)) / (2 * np.log(base))

    low, high = max(0.0, np.floor(pair(beta_fast))), min(n_dims - 1.0, np.ceil(pair(beta_slow)))
    return 1 - np.clip((np.arange(n_dims // 2) - low) / max(0.001, high - low), 0, 1)


def axis_of_pairs(mode: str, n_pairs: int, sections: tuple[int, int, int, int]) -> list[int]:
    """Return which axis of the position each pair turns by.

    In M-RoPE (Qwen2-VL) each axis has a run of pairs, and the runs begin anew after the last. In its interleaved form
    (Qwen3-VL) the first three axes take turns, for as long as all before them have had theirs; the fourth gets what is
    left.
    """
    if mode == "mrope":
        runs = [axis for axis, n in enumerate(sections) for _ in range(n)]
        return [runs[pair % len(runs)] for pair in range(n_pairs)]
    axes = []
    for pair in range(n_pairs):
        turn, axis = divmod(pair % sum(sections), 3)
        axes.append(axis if turn < sections[axis] else 3)
    return axes


def naive_rope(
    x: np.ndarray,
    pos: np.ndarray,
    *,
    n_dims: int,
    mode: str = "norm",
    n_ctx_orig: int = 0,
    freq_base: float = 10000.0,
    freq_scale: float = 1.0,
    ext_factor: float = 0.0,
    attn_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    sections: tuple[int, int, int, int] = (0, 0, 0, 0),
    factors: np.ndarray | None = None,
) -> np.ndarray:
    """Return x (n_tokens, n_head, head) rotated by pos (n_tokens,), or (4, n_tokens) where there are sections."""
    pairs = np.arange(n_dims // 2)
    freq = freq_base ** (-2.0 * pairs / n_dims)
    if factors is not None:
        freq = freq / factors[: n_dims // 2]
    scale = attn_factor
    keep = np.zeros(n_dims // 2)
    if ext_factor:
        keep = yarn_ramp(n_dims, n_ctx_orig, freq_base, beta_fast, beta_slow) * ext_factor
        scale = attn_factor * (1 + 0.1 * np.log(1 / freq_scale))
    if any(sections):
        pos = pos[axis_of_pairs(mode, n_dims // 2, sections)].T  # (n_tokens, pairs)
    else:
        pos = pos[:, None]
    angle = pos * freq * (freq_scale * (1 - keep) + keep)
    cos, sin = scale * np.cos(angle)[:, None], scale * np.sin(angle)[:, None]
    first, second = (2 * pairs, 2 * pairs + 1) if mode == "norm" else (pairs, pairs + n_dims // 2)
    out = x.astype(np.float64).copy()
    a, b = x[..., first].astype(np.float64), x[..., second].astype(np.float64)
    out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
    return out
