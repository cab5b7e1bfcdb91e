"""Qwen2: llama with biases on Q, K and V, and rotation of the two halves of a head."""

from __future__ import annotations

from pykv.models.llama import Llama


class Qwen2(Llama):
    """A decoder of the Qwen2 family; the biases are in the file."""

    rope_mode = "neox"
