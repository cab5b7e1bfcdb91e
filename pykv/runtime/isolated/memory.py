"""IsolatedMemory: the verbs and reads of a memory in another process."""

from __future__ import annotations

import threading
from typing import Any, NoReturn, Self

from pykv.errors import ConcurrentUseError
from pykv.isolation import Link, Ref
from pykv.memory import UpdateStatus
from pykv.memory.resumable import Resumable
from pykv.memory.shift_support import ShiftSupport
from pykv.runtime.isolated import absent
from pykv.runtime.isolated.cells import IsolatedCells
from pykv.runtime.isolated.given import IsolatedSnapshot
from pykv.runtime.isolated.messages import ContextFacts
from pykv.runtime.isolated.remote import RemoteObject
from pykv.typing import F32Array, I32Array, I64Array


class Use:
    """Entered around every decode and change of a memory; nobody else gets in meanwhile.

    Raises
    ------
    ConcurrentUseError : another thread, or what this call interrupts, is inside.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ConcurrentUseError("the memory is in use by another call, which decodes or changes it")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class IsolatedMemory(RemoteObject):
    """Offers what `Memory` does, but for what `absent.MEMORY` lists. Each call asks the process of the model.

    Attributes
    ----------
    spec : what it knows of the model.
    n_cells : tokens that one stream can hold.
    n_stream : separate runs of cells.
    n_seq_max : sequences.
    """

    def __init__(self, link: Link, context: Ref, facts: ContextFacts) -> None:
        self.home, self.ref = link, context  # it lives as long as the context, which lets go of both
        self.spec = facts.spec
        self.n_cells, self.n_stream, self.n_seq_max = facts.n_cells, facts.n_stream, facts.n_seq_max
        self._use = Use()

    def entered(self) -> Use:
        """Return what is entered around every decode and change."""
        return self._use

    # verbs

    def clear(self, data: bool = True) -> None:
        """Empty all cells; with `data`, also zero the buffers."""
        self._inside("clear", data)

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove a range of a sequence, or of all with -1; False if this memory cannot, with nothing changed."""
        return bool(self._inside("seq_rm", seq_id, p0, p1))

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` share or copy a range of `src`."""
        self._inside("seq_cp", src, dst, p0, p1)

    def seq_keep(self, seq_id: int) -> None:
        """Remove all other sequences of the same stream."""
        self._inside("seq_keep", seq_id)

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move a range of positions by `delta`."""
        self._inside("seq_add", seq_id, p0, p1, delta)

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide a range of positions by `d`."""
        self._inside("seq_div", seq_id, p0, p1, d)

    def update(self) -> UpdateStatus:
        """Carry out queued changes of stored data."""
        status: UpdateStatus = self._inside("update")
        return status

    def store_v(self, transposed: bool) -> None:
        """Lay out the stored V of all layers the other way, where one cache holds all of it."""
        self._inside("store_v", transposed)

    def snapshot(self, seq_id: int, *, on: str = "host") -> IsolatedSnapshot:
        """Keep what a cut could not bring back of a sequence as it is now, on the "host" or the "device"."""
        return IsolatedSnapshot(self.home, self._inside("snapshot", seq_id, on=on), on)

    def restore(self, seq_id: int, snapshot: IsolatedSnapshot) -> None:
        """Let a sequence end where a snapshot was taken, of it or of another one that began with the same tokens."""
        self._inside("restore", seq_id, snapshot)

    # reads

    def pos_min(self, seq_id: int) -> int:
        """Return the smallest stored position, -1 if the sequence is empty."""
        return int(self._call("memory.pos_min", seq_id))

    def pos_max(self, seq_id: int) -> int:
        """Return the largest stored position, -1 if the sequence is empty."""
        return int(self._call("memory.pos_max", seq_id))

    def can_shift(self) -> ShiftSupport:
        """Return whether positions can be moved, and if not, why."""
        support: ShiftSupport = self._call("memory.can_shift")
        return support

    def resumable(self, seq_id: int, p: int) -> Resumable:
        """Return whether decoding may go on at `p`; if not, why, and where else."""
        answer: Resumable = self._inside("resumable", seq_id, p)
        return answer

    def resume_points(self, seq_id: int, p: int) -> I64Array:
        """Return at which positions up to `p` decoding may go on: (k, 2), the first and the last of each run."""
        points: I64Array = self._inside("resume_points", seq_id, p)
        return points

    def cells(self, stream: int = 0) -> IsolatedCells:
        """Return the cells of one stream as they are from now on."""
        return IsolatedCells(self.home, self._call("memory.cells", stream))

    def seen(self, seq_id: int, il: int | None = None) -> tuple[I32Array, I32Array]:
        """Return positions and tokens of the cells of a sequence that a next token may look at."""
        pos, tokens = self._call("memory.seen", seq_id, il)
        return pos, tokens

    def k(self, il: int, seq_id: int, derotate: bool = False) -> F32Array:
        """Return the stored keys of a sequence, (n_tokens, n_head_kv, n_embd_head_k)."""
        return self._rows("k", il, seq_id, derotate)

    def v(self, il: int, seq_id: int) -> F32Array:
        """Return the stored values of a sequence, (n_tokens, n_head_kv, n_embd_head_v)."""
        return self._rows("v", il, seq_id)

    def r(self, il: int, seq_id: int) -> F32Array:
        """Return the recent inputs in the state of a sequence, in memories with states."""
        return self._rows("r", il, seq_id)

    def s(self, il: int, seq_id: int) -> F32Array:
        """Return the state proper of a sequence, in memories with states."""
        return self._rows("s", il, seq_id)

    def visible(self, seq_id: int, pos: int) -> dict[str, I32Array]:
        """Return the positions that a query at `pos` attends to, by kind of layer."""
        return dict(self._inside("visible", seq_id, pos))

    def check(self) -> None:
        """Verify every invariant; raises AssertionError."""
        self._inside("check")

    def dump(self, stream: int = 0) -> str:
        """Return the cells of one stream, as text."""
        return str(self._inside("dump", stream))

    @property
    def used(self) -> str:
        """How full it is, in words."""
        return str(self._get("memory.used"))

    @property
    def used_max_p1(self) -> int:
        """The last cell in use, over all streams, plus one, where one cache holds all."""
        return int(self._get("memory.used_max_p1"))

    @property
    def v_trans(self) -> bool:
        """Whether V is stored transposed now, where one cache holds all of it."""
        return bool(self._get("memory.v_trans"))

    @property
    def n_rs_seq(self) -> int:
        """States kept of each sequence beside the latest, in memories with states."""
        return int(self._get("memory.n_rs_seq"))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return int(self._get("memory.nbytes"))

    def require_open(self) -> None:
        """Raise `UseAfterCloseError` if it is closed."""
        self._call("memory.require_open")

    def close(self) -> None:
        """Free the buffers. Safe to call twice."""
        if not self.home.closed:
            self._inside("close")

    def __enter__(self) -> Self:
        self.require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> NoReturn:
        absent.refuse(self, name, absent.MEMORY)

    # for the context

    def inside(self, name: str, *args: Any, **more: Any) -> Any:
        """Call a method of the context, and let nobody else decode or change anything meanwhile."""
        with self.entered():
            return self._call(name, *args, **more)

    def call_on_files(self, name: str, *args: Any, **more: Any) -> Any:
        """Do what `inside` does, of a method that takes a path."""
        with self.entered():
            return self._call_on_files(name, *args, **more)

    def _inside(self, name: str, *args: Any, **more: Any) -> Any:
        return self.inside(f"memory.{name}", *args, **more)

    def _rows(self, name: str, *args: Any) -> F32Array:
        rows: F32Array = self._inside(name, *args)
        return rows
