"""Which calls a program leaves out, because pykv and llama.cpp are known and meant to differ there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from support.tiny_gguf import NARROW
from support.verb_program import Call, Room

import pykv
from pykv.memory.rope_turn import magnitude
from pykv.models import RopeRequest

N_BATCH = 256
"""Tokens of a batch, at most; also the fewest cells that a stream can have, so that one batch can fill it."""

TOLERANCES = {"f32": 1e-6, "f16": 1e-5, "q8_0": 1e-3}

MOVES = ("seq_add", "seq_div")


@dataclass(frozen=True)
class Setting:
    """A model and a context to run programs on.

    Attributes
    ----------
    reference_moves : pykv moves shared cells, and turns keys in seq_div, as llama.cpp does.
    n_cells : of a stream.
    freq_base, freq_scale : of RoPE, if not the model's own.
    """

    model: str
    n_seqs: int
    unified: bool
    type_k: str
    type_v: str
    flash: bool
    reference_moves: bool = True
    n_ubatch: int = 64
    n_cells: int = N_BATCH
    freq_base: float = 0.0
    freq_scale: float = 0.0

    @property
    def tolerance(self) -> float:
        """Most NMSE of a row: it follows the coarser of K and V, since the weights are f32."""
        return max(TOLERANCES[self.type_k], TOLERANCES[self.type_v])

    @property
    def room(self) -> Room:
        return Room(self.n_seqs, N_BATCH, NARROW.n_vocab, self.unified)

    @property
    def params(self) -> dict[str, Any]:
        """Context parameters that both sides know."""
        return {
            "n_ctx": self.n_cells if self.unified else self.n_cells * self.n_seqs,
            "n_batch": N_BATCH,
            "n_ubatch": self.n_ubatch,
            "n_seq_max": self.n_seqs,
            "kv_unified": self.unified,
            "type_k": self.type_k,
            "type_v": self.type_v,
            "flash_attn": self.flash,
            "n_threads": 1,
        }

    @property
    def our_params(self) -> dict[str, Any]:
        """Parameters that have other names in pykv, or are its own."""
        rope = RopeRequest(freq_base=self.freq_base, freq_scale=self.freq_scale)
        return {"rope": rope, "reference_moves": self.reference_moves}

    @property
    def their_params(self) -> dict[str, Any]:
        """Parameters that have other names in llama.cpp."""
        return {"rope_freq_base": self.freq_base, "rope_freq_scale": self.freq_scale}


@dataclass(frozen=True)
class Situation:
    """A call that is about to be made."""

    call: Call
    setting: Setting
    memory: pykv.KVCache

    @property
    def is_move(self) -> bool:
        return self.call["do"] in MOVES

    @property
    def moving(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions, and the numbers of owners, of the cells in a move's range."""
        seq_id, p0, p1, _ = self.call["args"]
        cells = self.memory.cells(0 if self.setting.unified else seq_id)
        inside = cells.member(seq_id) & (cells.pos >= p0) & ((cells.pos < p1) | (p1 < 0))
        return cells.pos[inside], cells.n_owners[inside]

    @property
    def is_shared_move(self) -> bool:
        """Whether a move meets a cell of several sequences, and would change it."""
        return (
            self.is_move
            and self.call["args"][3] != (0 if self.call["do"] == "seq_add" else 1)
            and bool((self.moving[1] > 1).any())
        )


def part_across_streams(at: Situation) -> bool:
    """llama.cpp ends its process, or takes a part for the whole."""
    if at.call["do"] != "seq_cp" or at.setting.unified:
        return False
    src, dst, p0, p1 = at.call["args"]
    return src != dst and not (p0 <= 0 and p1 < 0)


def coupled_in_streams(at: Situation) -> bool:
    """To llama.cpp there is no room for the batch; pykv says that no smaller one could be taken either."""
    return not at.setting.unified and at.call["do"] == "decode" and any(len(ids) > 1 for ids in at.call["seq"])


def yarn_moves(at: Situation) -> bool:
    """llama.cpp multiplies all stored keys by YaRN's magnitude at every shift; pykv turns the moved ones only."""
    rope = at.memory.spec.layers[0].rope
    return at.is_move and rope is not None and abs(magnitude(rope) - 1) > 1e-6


def shared_moves(at: Situation) -> bool:
    """llama.cpp moves a shared cell for all its sequences; pykv first gives the mover one of its own."""
    return not at.setting.reference_moves and at.is_shared_move


def moving_divisions(at: Situation) -> bool:
    """llama.cpp turns the keys of divided positions the wrong way."""
    if at.setting.reference_moves or at.call["do"] != "seq_div":
        return False
    pos, _ = at.moving
    return bool((pos // at.call["args"][3] != pos).any())


EXCLUDED: tuple[Callable[[Situation], bool], ...] = (
    part_across_streams,
    coupled_in_streams,
    yarn_moves,
    shared_moves,
    moving_divisions,
)
"""Calls that a program leaves out because the two sides are meant to differ; each docstring is the reason."""
