"""The contract of a memory: what every kind can do, so that a context need not know which one it has.

Mechanism lives beside it, one kind a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from pykv.batch import UBatch, ValidBatch
from pykv.cells import SlotInfo
from pykv.ggml import Graph
from pykv.ggml.owner import Owner
from pykv.memory.attention import AttentionPlan
from pykv.memory.attention_choice import PathsInUse
from pykv.memory.attention_mass import MassWatch
from pykv.memory.guard import Guard
from pykv.memory.memory_graph import MemoryGraph, MemoryShape
from pykv.memory.resumable import Resumable
from pykv.memory.shift_support import ShiftSupport
from pykv.memory.spec import MemorySpec
from pykv.memory.state_part import Converted
from pykv.memory.verb import Listener
from pykv.state_format import NEWEST, Dialect, Section, SectionLayout
from pykv.typing import F32Array, I32Array, I64Array

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pykv.memory.snapshot import Snapshot
    from pykv.memory.state_files import StateImage


class UpdateStatus(Enum):
    """What `Memory.update` found to do."""

    NO_UPDATE = "no_update"
    SUCCESS = "success"


class MemoryContext(Protocol):
    """The plan for one batch: its ubatches and where each goes. Only `apply` changes the memory."""

    @property
    def ubatches(self) -> Sequence[UBatch]:
        """The ubatches in order."""
        ...

    @property
    def slots(self) -> Sequence[Any]:
        """Where each ubatch goes; for the memory's own graph."""
        ...

    def apply(self, i: int) -> MemoryShape:
        """Write the bookkeeping of ubatch `i`; returns what a graph must look like to read the memory then."""
        ...

    def retract(self, i: int, *, touched: bool = True) -> object:
        """Take ubatch `i`, applied last, out again; without `touched`, nothing stored can have been written since."""
        ...


class Memory(Protocol):
    """Verbs over sequences. A negative `p0` means 0, a negative `p1` the end; ranges are half open.

    Attributes
    ----------
    spec : what it knows of the model.
    guard : entered around every change.
    listeners : told of every verb.
    """

    spec: MemorySpec
    guard: Guard
    listeners: list[Listener]

    @property
    def n_cells(self) -> int:
        """Tokens that one stream can hold."""
        ...

    @property
    def n_stream(self) -> int:
        """Separate runs of cells."""
        ...

    @property
    def n_seq_max(self) -> int:
        """Sequences."""
        ...

    @property
    def used(self) -> str:
        """How full it is, in words."""
        ...

    @property
    def owners(self) -> tuple[Owner, ...]:
        """What a graph that reads this memory stands on."""
        ...

    def full_shapes(self, n_tokens: int, attention: AttentionPlan) -> Sequence[MemoryShape]:
        """Return shapes of which one has the largest graph over at least so many tokens."""
        ...

    def graph(
        self, graph: Graph, shape: Any, attention: AttentionPlan, watches: Sequence[MassWatch] = ()
    ) -> MemoryGraph:
        """Return this memory's part of a graph of that shape."""
        ...

    def lay_out(self, attention: AttentionPlan, n_tokens: int) -> bool:
        """Let what is stored lie as it will be read, before `n_tokens` more come; True if graphs at hand are stale."""
        ...

    def paths(self, attention: AttentionPlan) -> Mapping[str, PathsInUse]:
        """How the next tokens are attended to, by kind of layer, named as in `visible`; empty where none attends."""
        ...

    def init_batch(self, batch: ValidBatch, n_ubatch: int) -> MemoryContext | None:
        """Split a batch and find room for all of it; None if there is none. Changes nothing."""
        ...

    def update(self) -> UpdateStatus:
        """Carry out queued changes of stored data."""
        ...

    def clear(self, data: bool = True) -> None:
        """Empty all cells; with `data`, also zero the buffers."""
        ...

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove a range of a sequence, or of all with -1; False if this memory cannot, with nothing changed."""
        ...

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` share or copy a range of `src`."""
        ...

    def seq_keep(self, seq_id: int) -> None:
        """Remove all other sequences of the same stream."""
        ...

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move a range of positions by `delta`."""
        ...

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide a range of positions by `d`."""
        ...

    def pos_min(self, seq_id: int) -> int:
        """Smallest stored position, -1 if the sequence is empty."""
        ...

    def pos_max(self, seq_id: int) -> int:
        """Largest stored position, -1 if the sequence is empty."""
        ...

    def can_shift(self) -> ShiftSupport:
        """Whether positions can be moved, and if not, why."""
        ...

    def resumable(self, seq_id: int, p: int) -> Resumable:
        """Whether decoding may go on at `p`; if not, why, and where else."""
        ...

    def resume_points(self, seq_id: int, p: int) -> I64Array:
        """At which positions up to `p` decoding may go on: (k, 2), the first and the last of each run of them."""
        ...

    def snapshot(self, seq_id: int, *, on: str = "host") -> Snapshot:
        """Keep what a cut could not bring back of a sequence as it is now, on the "host" or the "device"."""
        ...

    def restore(self, seq_id: int, snapshot: Snapshot) -> None:
        """Let a sequence end where a snapshot was taken, of it or of another one that began with the same tokens."""
        ...

    def state_layouts(self, partial: bool = False) -> tuple[SectionLayout, ...]:
        """What each part stores, in the order of a state's sections."""
        ...

    def state_image(self, seq_id: int, partial: bool = False, dialect: Dialect = NEWEST) -> StateImage:
        """Return a sequence, or with -1 all, as bytes of a state that are still to be written."""
        ...

    def load_state(
        self, seq_id: int, sections: Sequence[Section], source: Buffer, partial: bool = False, convert: bool = False
    ) -> Converted:
        """Let a sequence, or with -1 the memory, hold what a parsed state holds; all of it or nothing."""
        ...

    def cells(self, stream: int = 0) -> Any:
        """What the cells of one stream hold now: a `CellsView`, or a `RecurrentView`, which has the same arrays."""
        ...

    def seen(self, seq_id: int, il: int | None = None) -> tuple[I32Array, I32Array]:
        """Positions and tokens of the cells of a sequence that a next token may look at."""
        ...

    def k(self, il: int, seq_id: int, derotate: bool = False) -> F32Array:
        """Stored keys of a sequence, (n_tokens, n_head_kv, n_embd_head_k)."""
        ...

    def v(self, il: int, seq_id: int) -> F32Array:
        """Stored values of a sequence, (n_tokens, n_head_kv, n_embd_head_v)."""
        ...

    def kv_of(self, il: int, slot: Any) -> tuple[Any, SlotInfo]:
        """The cache that holds a layer's K and V, and its slot of a plan's."""
        ...

    def visible(self, seq_id: int, pos: int) -> dict[str, I32Array]:
        """The positions that a query at `pos` attends to, by kind of layer."""
        ...

    def check(self) -> None:
        """Verify every invariant; raises AssertionError."""
        ...

    def dump(self, stream: int = 0) -> str:
        """The cells of one stream, as text."""
        ...

    def require_open(self) -> None:
        """Raise `UseAfterCloseError` if it is closed."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the K and V buffers."""
        ...

    def follow(self) -> None:
        """Do what `update` does. For who has entered the guard."""
        ...

    def release(self) -> None:
        """Do what `close` does. For who has entered the guard."""
        ...

    def close(self) -> None:
        """Free the buffers."""
        ...
