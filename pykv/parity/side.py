"""Side: a model on one device that runs a program, and shows after each step what it made and what it holds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from pykv.memory import MemorySpec
from pykv.parity.distances import LOGITS, Seen
from pykv.parity.program import Decode, Verb
from pykv.runtime import Context, Model
from pykv.typing import F32Array


class Side:
    """One device.

    Attributes
    ----------
    name : as it is reported.
    model, context : what runs there; in a process of its own where the device is another machine's.
    """

    def __init__(
        self,
        name: str,
        path: str | bytes | os.PathLike[str],
        devices: str | Sequence[str],
        params: dict[str, Any],
    ) -> None:
        self.name = name
        with ExitStack() as stack:
            self.model: Model = stack.enter_context(Model.load(path, devices, repack=False))
            self.context: Context = stack.enter_context(self.model.context(**params))
            self._open = stack.pop_all()

    @property
    def spec(self) -> MemorySpec:
        """The layers of its memory."""
        return self.context.memory.spec

    @property
    def attention(self) -> str:
        """Which way attention took for tokens and for prompts."""
        path = self.context.attention_path
        return path.generation if path.generation == path.prompts else f"{path.generation}, prompts {path.prompts}"

    def do(self, step: Decode | Verb) -> Seen:
        """Run a step, and return what there is to compare, in the order in which a fault spreads."""
        if isinstance(step, Verb):
            step.do(self.context)
            return self._stored(range(self.context.params.n_seq_max))
        tapped = self.context.decode_tapped(step.batch())
        stored = self._stored(step.touched)
        seen: dict[tuple[str, int], F32Array] = {}
        for il in range(len(self.spec.layers)):
            for kind in ("K", "V", "R", "S"):
                if kind == "R" and il in tapped:
                    seen["attention", il] = tapped[il]
                if (kind, il) in stored:
                    seen[kind, il] = stored[kind, il]
        seen["logits", LOGITS] = np.array(self.context.logits)
        return seen

    def close(self) -> None:
        """Let go of context and model."""
        self._open.close()

    def _stored(self, seqs: Sequence[int]) -> dict[tuple[str, int], F32Array]:
        """Return K, V and states of some sequences, by position and never by cell."""
        memory: Any = self.context.memory
        full = [seq for seq in seqs if memory.pos_max(seq) >= 0]
        seen: dict[tuple[str, int], F32Array] = {}
        for il, layer in enumerate(self.spec.layers):
            if layer.n_head_kv:
                for kind, read in (("K", memory.k), ("V", memory.v)):
                    rows = [self._visible(read(il, seq), seq, il) for seq in full]
                    if rows:
                        seen[kind, il] = np.concatenate(rows)
            if layer.state is not None:
                for kind, n, read in (("R", layer.state.n_embd_r, memory.r), ("S", layer.state.n_embd_s, memory.s)):
                    if n and full:
                        seen[kind, il] = np.stack([read(il, seq) for seq in full])
        return seen

    def _visible(self, rows: F32Array, seq: int, il: int) -> F32Array:
        """Return the rows that a next token may look at: how many more a window has kept depends on the layout."""
        n = len(self.context.memory.seen(seq, il)[0])
        return rows.reshape(len(rows), -1)[len(rows) - n :]
