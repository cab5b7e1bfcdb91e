"""Qwen3: Qwen2 without biases, with a norm on each head of Q and K."""

from __future__ import annotations

from pykv.models.llama import Llama


class Qwen3(Llama):
    """A dense decoder of the Qwen3 family."""

    rope_mode = "neox"
    has_qk_norm = True
