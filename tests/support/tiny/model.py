"""What every tiny model has: sizes as a frozen dataclass, its weights as a dictionary, and a file of both.

The weights exist twice: as the file that a runtime loads and as the dictionary that a naive forward pass computes
with. Both come from the same seed, so a test needs no reader to know what is in the file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import Keys
from support.tiny.routing import route_by_token
from support.tiny.values import Rules, Shape, draw
from support.tiny.writer import stored, write_model

Hparams = dict[str, Any]
Shapes = dict[str, Shape]


@dataclass(frozen=True, kw_only=True)
class TinyFile(ABC):
    """A model that can be written. An architecture states `arch`, `hparams` and `tensors`, and rules if it must.

    matrices : the type of the file's matrices, "f32" or "f16"; norms, biases and the like are always f32.
    """

    n_vocab: int = 320
    seed: int = 1
    matrices: str = "f32"

    @property
    def pre(self) -> str:
        """Name of the rule that splits text into words."""
        return "smollm"

    @property
    def routing(self) -> tuple[int, int]:
        """Experts of a layer, and how many of them a token meets; (0, 0) where there are none."""
        return 0, 0

    @abstractmethod
    def hparams(self) -> Hparams:
        """Return the metadata of the architecture; keys may hold {arch}."""

    @abstractmethod
    def tensors(self) -> Shapes:
        """Return every tensor's shape by its GGUF name, in numpy order (rows are outputs)."""

    def rules(self) -> Rules:
        """Return recipes that go before `values.RULES`."""
        return ()

    def weights(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return every tensor by its GGUF name, as it is in the file."""
        drawn = {name: draw(self.seed, name, shape, self.rules()) for name, shape in self.tensors().items()}
        n_expert, n_used = self.routing
        if n_expert:
            route_by_token(drawn, n_expert, n_used)
        return {name: stored(name, values, self.matrices) for name, values in drawn.items()}

    def write(self, path: Path) -> Path:
        """Write the model as GGUF version 3 and return `path`."""
        types = gguf.LlamaFileType
        general = {
            Keys.General.NAME: f"tiny-{self.arch}-{self.seed}",
            Keys.General.FILE_TYPE: int(types.ALL_F32 if self.matrices == "f32" else types.MOSTLY_F16),
        }
        return write_model(path, self.arch, general | self.hparams(), self.weights(), self.n_vocab, self.pre)


@dataclass(frozen=True, kw_only=True)
class TinyTransformer(TinyFile):
    """Sizes that most architectures share; what one of them does not need, it does not write."""

    n_layer: int = 4
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 32
    n_ff: int = 96
    n_ctx_train: int = 2048
    rms_eps: float = 1e-6
    rope_base: float = 10000.0

    def basics(self) -> Hparams:
        """Return the keys that every file has."""
        return {
            Keys.LLM.VOCAB_SIZE: self.n_vocab,
            Keys.LLM.CONTEXT_LENGTH: self.n_ctx_train,
            Keys.LLM.EMBEDDING_LENGTH: self.n_embd,
            Keys.LLM.BLOCK_COUNT: self.n_layer,
            Keys.LLM.FEED_FORWARD_LENGTH: self.n_ff,
        }

    def heads(self) -> Hparams:
        """Return the keys of attention with RMS norms and heads of one size."""
        return {
            Keys.Attention.HEAD_COUNT: self.n_head,
            Keys.Attention.HEAD_COUNT_KV: self.n_head_kv,
            Keys.Attention.KEY_LENGTH: self.head_dim,
            Keys.Attention.VALUE_LENGTH: self.head_dim,
            Keys.Attention.LAYERNORM_RMS_EPS: self.rms_eps,
        }

    def rope(self) -> Hparams:
        """Return the keys of RoPE over whole heads."""
        return {Keys.Rope.DIMENSION_COUNT: self.head_dim, Keys.Rope.FREQ_BASE: self.rope_base}
