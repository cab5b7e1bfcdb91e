"""What a program runs on: a model and a context; and what a call is about to meet there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from support.tiny.model import TinyFile
from support.tiny.registry import BY_NAME
from support.tiny_gguf import SHIFT_MODELS
from support.verb_program import Call, Room

from pykv.cells import RecurrentCells
from pykv.memory import KVCache, Memory
from pykv.models import RopeRequest

MODELS: dict[str, TinyFile] = {**SHIFT_MODELS, **BY_NAME}

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
    swa_full : layers with a window keep all tokens.
    n_rs_seq : states kept of each sequence beside the latest.
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
    swa_full: bool = False
    n_rs_seq: int = 0

    @property
    def tolerance(self) -> float:
        """Most NMSE of a row: it follows the coarser of K and V, since the weights are f32."""
        return max(TOLERANCES[self.type_k], TOLERANCES[self.type_v])

    @property
    def room(self) -> Room:
        return Room(self.n_seqs, N_BATCH, MODELS[self.model].n_vocab, not self.in_their_streams)

    @property
    def in_their_streams(self) -> bool:
        """Whether llama.cpp gives each sequence a stream of its own."""
        return not (self.unified if self.their_unified is None else self.their_unified)

    @property
    def is_mixed(self) -> bool:
        """Whether one side shares cells and the other does not."""
        return self.unified == self.in_their_streams

    @property
    def has_states(self) -> bool:
        """Whether some layers have a state."""
        return any("ssm" in key or "wkv" in key or "shortconv" in key for key in MODELS[self.model].hparams())

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
            "swa_full": self.swa_full,
            "n_rs_seq": self.n_rs_seq,
        }


@dataclass(frozen=True)
class Situation:
    """A call that is about to be made."""

    call: Call
    setting: Setting
    memory: Memory

    @property
    def do(self) -> str:
        return str(self.call["do"])

    @property
    def parts(self) -> list[Any]:
        """What the memory is made of."""
        return list(parts_of(self.memory))

    @property
    def caches(self) -> list[KVCache]:
        """The parts that hold K and V."""
        return [part for part in self.parts if isinstance(part, KVCache)]

    @property
    def states(self) -> RecurrentCells | None:
        """The bookkeeping of the part that holds states."""
        return next((part.states for part in self.parts if not isinstance(part, KVCache)), None)

    @property
    def decoded(self) -> dict[int, int]:
        """The sequences of a batch, and the smallest position of each there."""
        first: dict[int, int] = {}
        for ids, p in zip(self.call["seq"], self.call["pos"], strict=True):
            first |= {s: min(p, first.get(s, p)) for s in ids}
        return first

    @property
    def is_coupled(self) -> bool:
        """Whether this is a batch with tokens of several sequences."""
        return self.do == "decode" and any(len(ids) > 1 for ids in self.call["seq"])

    @property
    def is_move(self) -> bool:
        return self.call["do"] in MOVES

    @property
    def moving(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions, and the numbers of owners, of the cells in a move's range."""
        seq_id, p0, p1, _ = self.call["args"]
        cells = self.memory.cells(seq_id if self.memory.n_stream > 1 else 0)
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


def parts_of(memory: Any) -> Iterator[Any]:
    """Yield what a memory is made of: caches with all tokens, with a window, states."""
    parts = getattr(memory, "parts", None)
    if parts is None:
        yield memory
    for part in parts or ():
        yield from parts_of(part)
