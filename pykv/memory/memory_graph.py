"""MemoryGraph: the part of a model's graph that belongs to its memory.

A model's graph reaches stored K and V through `kv` and recurrent states through `states`; what a memory does not hold,
it cannot give.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pykv.batch import UBatch
from pykv.errors import ParamError
from pykv.ggml import GraphInput, Tensor
from pykv.typing import BoolArray

Scan = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes stored states [n_embd_s, n_rows] and which of them to read [n_seqs] i32; returns results and new states."""


class MemoryShape(Protocol):
    """What a graph is built for, as its memory sees it; hashable, and equal where one graph serves both."""

    @property
    def n_tokens(self) -> int:
        """Tokens of the ubatch."""
        ...


class AttentionGraph(Protocol):
    """Stores K and V of a ubatch's tokens and attends to what is stored."""

    def store(self, il: int, k: Tensor, v: Tensor | None = None) -> None:
        """Add nodes that write `k` [Dk, Hk, n_tokens] and `v` [Dv, Hk, n_tokens] to the ubatch's cells."""
        ...

    def attend(self, il: int, q: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """Return attention outputs [Dv, H, n_tokens] of queries `q` [Dk, H, n_tokens] over the stored cells."""
        ...

    def observes(self, il: int) -> bool:
        """Whether a layer's attention is observed."""
        ...


class StateGraph(Protocol):
    """Reads the recurrent states of a ubatch's sequences and writes what they become.

    A ubatch is `n_seqs` runs of `n_seq_tokens` tokens, one run for each set of sequences.
    """

    @property
    def n_seqs(self) -> int:
        """Sequence sets of the ubatch."""
        ...

    @property
    def n_seq_tokens(self) -> int:
        """Tokens of each set."""
        ...

    @property
    def n_planes(self) -> int:
        """How many states of each sequence are kept: the latest, and those so many tokens earlier."""
        ...

    def read_r(self, il: int) -> Tensor:
        """Return the rows of recent inputs before the ubatch, [n_embd_r, n_seqs] f32."""
        ...

    def read_s(self, il: int) -> Tensor:
        """Return the states before the ubatch, [n_embd_s, n_seqs] f32."""
        ...

    def scan_s(self, il: int, scan: Scan) -> tuple[Tensor, Tensor]:
        """Return what `scan` makes of the states, which it reads where they are stored."""
        ...

    def write_r(self, il: int, planes: Sequence[Tensor]) -> None:
        """Add nodes that store the rows after the ubatch, and before its last, its last two tokens and so on.

        One tensor for each plane, n_embd_r elements of a sequence behind those of another, in up to three dims.
        """
        ...

    def write_s(self, il: int, states: Tensor) -> None:
        """Add nodes that store the states [n_embd_s, n_seqs, n_planes], plane by plane as in `write_r`."""
        ...


class MemoryGraph(ABC):
    """Nodes and inputs of one memory in one graph."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[GraphInput, ...]:
        """The inputs that `fill` writes, each once."""

    @abstractmethod
    def fill(self, slot: Any, ubatch: UBatch, chosen: Sequence[BoolArray] | None = None) -> None:
        """Write the inputs for a ubatch whose bookkeeping has been applied.

        Parameters
        ----------
        slot : where it went, as the memory's plan has it.
        chosen : for each watch (n_tokens,) which tokens its masses count; None = as it has it for this ubatch alone.
        """

    @property
    def masses(self) -> tuple[Mapping[int, Tensor], ...]:
        """For each watch, layer → the attention that each cell received, [n_kv, n_head_kv or 1, n_stream] f32."""
        return ()

    @property
    def kv(self) -> AttentionGraph:
        """The part that stores K and V.

        Raises
        ------
        ParamError : the memory holds none.
        """
        raise ParamError("kv: this memory holds no keys and values")

    @property
    def states(self) -> StateGraph:
        """The part that reads and writes recurrent states.

        Raises
        ------
        ParamError : the memory holds none.
        """
        raise ParamError("states: this memory holds no recurrent states")
