"""Qwen2-VL, the text part: Qwen2 whose pairs of dims turn by time, row or column (M-RoPE).

A text token has one position on all axes; embeddings of a picture come with four each.
"""

from __future__ import annotations

from dataclasses import replace

from pykv.errors import GGUFError
from pykv.memory import MemorySpec
from pykv.models.hparams import HParams, refuse_tensors
from pykv.models.keys import Keys
from pykv.models.qwen2 import Qwen2
from pykv.models.rope import ContextRope
from pykv.models.weights import Weights

N_AXES = 4
"""Time, row, column, and one that is not used."""


class Qwen2VL(Qwen2):
    """A decoder of the Qwen2-VL family."""

    rope_mode = "mrope"

    def __init__(self, hparams: HParams, weights: Weights, keys: Keys) -> None:
        refuse_tensors(keys, "output.bias")
        if hparams.n_rot != hparams.n_embd_head_k:
            raise keys.refusal("rope.dimension_count", hparams.n_rot, f"the whole head, {hparams.n_embd_head_k}")
        self._sections = _sections(keys, hparams.n_rot // 2)
        super().__init__(hparams, weights, keys)

    def memory_spec(self, rope: ContextRope) -> MemorySpec:
        """Return what the memory must know, for a context with these rotary settings."""
        spec = super().memory_spec(rope)
        turned = replace(rope.params(self.hparams.n_rot, self.rope_mode), sections=self._sections)
        return replace(spec, layers=tuple(replace(one, rope=turned) for one in spec.layers), n_pos_per_embd=N_AXES)


def _sections(keys: Keys, n_pairs: int) -> tuple[int, int, int, int]:
    """Return how many pairs of dims turn by each axis."""
    found = keys.per_layer("rope.dimension_sections", N_AXES)
    if not any(found[:3]) or sum(found) > n_pairs:
        raise GGUFError(
            f"{keys.path}: {keys.key('rope.dimension_sections')}={list(found)} must name some of the {n_pairs} pairs "
            "of a head's dims"
        )
    return found[0], found[1], found[2], found[3]
