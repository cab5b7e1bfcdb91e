"""What a program and the process of its model tell each other beside plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pykv.batch import Batch
from pykv.memory import AttentionPlan, MemorySpec
from pykv.runtime.params import ResolvedParams


@dataclass(frozen=True)
class DeviceName:
    """A device of an RPC server, which has another number in each process: it is the server's n-th."""

    endpoint: str
    index: int


@dataclass(frozen=True)
class PlannedPart:
    """What a part of a memory takes.

    Attributes
    ----------
    nbytes : bytes that allocation takes.
    nbytes_per_buffer_type : the same in each buffer type.
    nbytes_per_layer : bytes of each layer over all streams, without alignment.
    """

    nbytes: int
    nbytes_per_buffer_type: dict[str, int]
    nbytes_per_layer: dict[int, int]


@dataclass(frozen=True)
class ContextFacts:
    """What does not change of a context.

    Attributes
    ----------
    spec : what its memory knows of the model; factors of rotations stay where the model is.
    """

    params: ResolvedParams
    attention: AttentionPlan
    spec: MemorySpec
    n_cells: int
    n_stream: int
    n_seq_max: int


class WireBatch(NamedTuple):
    """A batch as bytes, short enough for a token's."""

    token: bytes | None
    pos: bytes | None
    n_pos: int
    seq_id: Any
    output: bytes
    embd: Any

    @classmethod
    def of(cls, batch: Batch) -> WireBatch:
        """Return a batch as bytes."""
        token, pos, seq_id = batch.token, batch.pos, batch.seq_id
        return cls(
            None if token is None else token.tobytes(),
            None if pos is None else pos.tobytes(),
            0 if pos is None else len(pos),
            seq_id,
            batch.output.tobytes(),
            batch.embd,
        )

    def batch(self) -> Batch:
        """Return the batch, which has been checked where it was made."""
        batch = Batch.__new__(Batch)
        pos = None if self.pos is None else np.frombuffer(self.pos, np.int32).reshape(self.n_pos, -1)
        batch.__setstate__(
            (
                None,
                {
                    "token": None if self.token is None else np.frombuffer(self.token, np.int32),
                    "pos": pos,
                    "seq_id": self.seq_id,
                    "output": np.frombuffer(self.output, np.bool_),
                    "embd": self.embd,
                },
            )
        )
        return batch
