"""Which calls a program leaves out, because pykv and llama.cpp are known and meant to differ there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    unified : one stream for all sequences in pykv.
    their_unified : in llama.cpp, None = likewise. A fork shares cells in one stream and has its own in another: each
        shows whether the other is right.
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
    their_unified: bool | None = None
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
        return Room(self.n_seqs, N_BATCH, NARROW.n_vocab, not self.in_their_streams)

    @property
    def in_their_streams(self) -> bool:
        """Whether llama.cpp gives each sequence a stream of its own."""
        return not (self.unified if self.their_unified is None else self.their_unified)

    @property
    def is_mixed(self) -> bool:
        """Whether one side shares cells and the other does not."""
        return self.unified == self.in_their_streams

    @property
    def our_params(self) -> dict[str, Any]:
        """Parameters of pykv's context."""
        rope = RopeRequest(freq_base=self.freq_base, freq_scale=self.freq_scale)
        return {**self._params(self.unified), "rope": rope, "reference_moves": self.reference_moves}

    @property
    def their_params(self) -> dict[str, Any]:
        """Parameters of llama.cpp's context."""
        rope = {"rope_freq_base": self.freq_base, "rope_freq_scale": self.freq_scale}
        return {**self._params(not self.in_their_streams), **rope}

    def _params(self, unified: bool) -> dict[str, Any]:
        return {
            "n_ctx": self.n_cells if unified else self.n_cells * self.n_seqs,
            "n_batch": N_BATCH,
            "n_ubatch": self.n_ubatch,
            "n_seq_max": self.n_seqs,
            "kv_unified": unified,
            "type_k": self.type_k,
            "type_v": self.type_v,
            "flash_attn": self.flash,
            "n_threads": 1,
        }


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
    if at.call["do"] != "seq_cp" or at.setting.unified or not at.setting.in_their_streams:
        return False
    src, dst, p0, p1 = at.call["args"]
    return src != dst and not (p0 <= 0 and p1 < 0)


def coupled_in_streams(at: Situation) -> bool:
    """To llama.cpp there is no room for the batch; pykv says that no smaller one could be taken either."""
    in_streams = at.setting.in_their_streams or not at.setting.unified
    return in_streams and at.call["do"] == "decode" and any(len(ids) > 1 for ids in at.call["seq"])


def yarn_moves(at: Situation) -> bool:
    """llama.cpp multiplies all stored keys by YaRN's magnitude at every shift; pykv turns the moved ones only."""
    rope = at.memory.spec.layers[0].rope
    return at.is_move and rope is not None and abs(magnitude(rope) - 1) > 1e-6


def shared_moves(at: Situation) -> bool:
    """llama.cpp moves a shared cell for all its sequences; pykv first gives the mover one of its own."""
    return not at.setting.reference_moves and not at.setting.in_their_streams and at.is_shared_move


def moves_of_copies(at: Situation) -> bool:
    """What pykv has copied across streams, llama.cpp shares, and would move for all."""
    return at.is_move and not at.setting.unified and not at.setting.in_their_streams


def copies_beside_others(at: Situation) -> bool:
    """In one stream a copy comes to what is there already, or is a part; across llama.cpp's streams it is all."""
    if at.call["do"] != "seq_cp" or not at.setting.unified or not at.setting.in_their_streams:
        return False
    src, dst, p0, p1 = at.call["args"]
    return src != dst and not (p0 <= 0 and p1 < 0 and at.memory.pos_max(dst) < 0)


def keeps_of_one_stream(at: Situation) -> bool:
    """In one stream all other sequences go, with a stream for each all stay."""
    return at.setting.is_mixed and at.call["do"] == "seq_keep"


def room_for_one(at: Situation) -> bool:
    """One stream is full at another time than several."""
    return at.setting.is_mixed and at.call["do"] == "decode" and len(at.call["pos"]) > 16


def twins(at: Situation) -> bool:
    """Tokens at one position see each other if they are computed at once, and streams split batches otherwise."""
    if not at.setting.is_mixed or at.call["do"] != "decode":
        return False
    places = [(tuple(ids), p) for ids, p in zip(at.call["seq"], at.call["pos"], strict=True)]
    return len(set(places)) < len(places)


EXCLUDED: tuple[Callable[[Situation], bool], ...] = (
    part_across_streams,
    coupled_in_streams,
    yarn_moves,
    shared_moves,
    moves_of_copies,
    copies_beside_others,
    keeps_of_one_stream,
    room_for_one,
    twins,
)
"""Calls that a program leaves out because the two sides are meant to differ; each docstring is the reason."""


def for_llama_cpp(call: Call, setting: Setting, ends: Sequence[int]) -> list[Call]:
    """Return what llama.cpp must be told to do the same; `ends` are pos_min and pos_max of each sequence in turn."""
    if call["do"] == "seq_div" and not setting.reference_moves:
        return _as_additions(call, ends)
    if call["do"] == "seq_cp" and not setting.unified and not setting.in_their_streams:
        src, dst, p0, p1 = call["args"]
        return [] if src == dst else [{"do": "seq_rm", "args": [dst, p0, p1]}, call]
    return [call]


def _as_additions(call: Call, ends: Sequence[int]) -> list[Call]:
    """Return the moves that a division comes to: llama.cpp's own turns keys the wrong way."""
    seq_id, p0, p1, d = call["args"]
    last = ends[2 * seq_id + 1]
    # upwards: what has moved lies below what is still to move
    moved = range(max(p0, 0), (last if p1 < 0 else min(p1 - 1, last)) + 1)
    return [{"do": "seq_add", "args": [seq_id, p, p + 1, p // d - p]} for p in moved if p // d != p]
