"""What the bytes of a saved state mean, in plain numpy: where rows lie, their numbers, and rotations undone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.state_bytes import StateBytes

DATA = Path(__file__).parents[1] / "data" / "state"
N_TOKENS, N_LAYER, WIDTH = 7, 30, 192
"""Of the saved states of SmolLM2."""


def payloads(data: bytes, row_bytes: int, *, n_stream: int = 1, by_channel: bool = False) -> list[bytes]:
    """Return K of all layers, then V, of one of SmolLM2's sequence files in the newest dialect, found by counting."""
    at = 12 + 4 * N_TOKENS + 4 + 4 + 12 * N_TOKENS + 16
    found = []
    for _ in range(2 * N_LAYER):
        at += 12
        found.append(data[at : at + N_TOKENS * row_bytes])
        at += N_TOKENS * row_bytes
    assert at + 4 * (n_stream - 1) == len(data)
    return found


def f16(raw: bytes, width: int) -> np.ndarray:
    """Return (n, width) float32."""
    return np.frombuffer(raw, "<f2").astype(np.float32).reshape(-1, width)


def q8_0(raw: bytes, width: int, rot: int = 0) -> np.ndarray:
    """Return (n, width) float32: blocks of a scale and 32 small numbers."""
    blocks = np.frombuffer(raw, np.dtype([("scale", "<f2"), ("numbers", "i1", 32)]))
    values = blocks["scale"].astype(np.float32)[:, None] * blocks["numbers"]
    return unrotated(values.reshape(-1, width), rot)


def unrotated(values: np.ndarray, rot: int) -> np.ndarray:
    """Return rows whose blocks of `rot` elements were multiplied by Hadamard's matrix as they were before."""
    if not rot:
        return values
    matrix = np.ones((1, 1))
    while len(matrix) < rot:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (values.reshape(-1, rot) @ matrix / np.sqrt(rot)).reshape(values.shape).astype(np.float32)


def sequence_file(tokens: list[int], version: int = 4, seed: int = 0) -> StateBytes:
    """Return the head of a sequence file, to which sections are added."""
    return StateBytes(seed=seed).file_head(b"qsgg", version, tokens)


def session_file(tokens: list[int], version: int = 11, seed: int = 0) -> StateBytes:
    """Return the head of a session file, to which sections are added."""
    return StateBytes(seed=seed).file_head(b"nsgg", version, tokens).arch("llama")


def plain(state: StateBytes, values: np.ndarray, dtype: str = "<f2") -> None:
    """Put numbers into the payloads of a state, one after another."""
    raw = values.astype(dtype).tobytes()
    for at, n in state.payloads:
        state.data[at : at + n], raw = raw[:n], raw[n:]
    assert not raw
