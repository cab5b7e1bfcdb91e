"""Memories made of parts: each verb is done by all of them or by none.

The parts share one guard, so that a change is whole in all of them before another thread or Ctrl-C comes in. A part may
be read, but changed only by the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from typing import Any, Protocol, Self

from pykv.batch import UBatch
from pykv.cells import Undo, common_runs
from pykv.ggml.owner import Owner
from pykv.memory.attention import AttentionPlan
from pykv.memory.base import Memory, MemoryContext, UpdateStatus
from pykv.memory.guard import Guard
from pykv.memory.memory_graph import MemoryShape
from pykv.memory.resumable import Resumable
from pykv.memory.snapshot import PartsPiece, Piece, Snapshots
from pykv.memory.spec import MemorySpec
from pykv.memory.state_files import StateFiles
from pykv.memory.state_part import StatePart
from pykv.memory.verb import Listener, read, step, verb
from pykv.typing import I64Array


class Part(Memory, Protocol):
    """A memory that can stand in another one."""

    def prepare(self, ubatches: Sequence[UBatch]) -> MemoryContext | None:
        """Find room for ubatches that are computed one after the other; None if there is none. Changes nothing."""
        ...

    def bookmark(self) -> Undo:
        """Return what puts the bookkeeping back to what it is now."""
        ...

    @property
    def snapshot_layout(self) -> object:
        """What must be equal for a snapshot to fit."""
        ...

    def take(self, seq_id: int, position: int, on: str) -> Piece:
        """Copy what a token at `position`, the end of a sequence, could not be given by a cut."""
        ...

    def state_parts(self, partial: bool) -> tuple[StatePart, ...]:
        """Return what a state is made of, in order."""
        ...

    def ends_misfit(self) -> str | None:
        """Say which parts end where they may not beside each other. For who has entered the guard."""
        ...

    def note_cut(self, seq_id: int) -> None:
        """Note that a sequence, or with -1 each, may lack tokens that a window shows. For who has entered the guard."""
        ...


@dataclass(frozen=True)
class PartsShape:
    """The shape of each part."""

    parts: tuple[Any, ...]

    @property
    def n_tokens(self) -> int:
        """Tokens of the ubatch."""
        n: int = self.parts[0].n_tokens
        return n


class PartsContext:
    """The plan for one batch in each part.

    Attributes
    ----------
    ubatches : in order, the same for all parts.
    slots : per ubatch, where it goes in each part.
    """

    def __init__(self, plans: tuple[MemoryContext, ...]) -> None:
        self._plans = plans
        self.ubatches: Sequence[UBatch] = plans[0].ubatches
        self.slots = list(zip(*(plan.slots for plan in plans), strict=True))

    def apply(self, i: int) -> PartsShape:
        """Write the bookkeeping of ubatch `i` into every part, or into none."""
        done: list[MemoryContext] = []
        shapes: list[MemoryShape] = []
        try:
            for plan in self._plans:
                shapes.append(plan.apply(i))
                done.append(plan)
        except BaseException:
            for plan in done:
                plan.retract(i, touched=False)
            raise
        return PartsShape(tuple(shapes))

    def retract(self, i: int, *, touched: bool = True) -> None:
        """Take ubatch `i`, applied last, out of all parts again. See `MemoryContext.retract`."""
        for plan in self._plans:
            plan.retract(i, touched=touched)


class MemoryParts(Snapshots, StateFiles):
    """What is the same for all memories made of parts.

    Attributes
    ----------
    spec : the layers.
    parts : the memories that do the work, in the order in which verbs reach them.
    listeners : told of every verb, once.
    """

    def __init__(self, spec: MemorySpec, parts: tuple[Part, ...], guard: Guard) -> None:
        self.spec, self.parts, self.guard = spec, parts, guard
        for part in parts:
            part.guard = guard.inner()
        self.listeners: list[Listener] = []

    def prepare(self, ubatches: Sequence[UBatch]) -> PartsContext | None:
        """Find room in every part; None if one has none. Changes nothing."""
        plans: list[MemoryContext] = []
        for part in self.parts:
            plan = part.prepare(ubatches)
            if plan is None:
                return None
            plans.append(plan)
        return PartsContext(tuple(plans))

    def full_shapes(self, n_tokens: int, attention: AttentionPlan) -> list[PartsShape]:
        """Return shapes of which one has the largest graph over at least so many tokens."""
        return [
            PartsShape(shapes) for shapes in product(*(part.full_shapes(n_tokens, attention) for part in self.parts))
        ]

    def lay_out(self, attention: AttentionPlan, n_tokens: int) -> bool:
        """Let what is stored lie as it will be read; True if graphs at hand are stale."""
        return True in [part.lay_out(attention, n_tokens) for part in self.parts]

    @read
    def update(self) -> UpdateStatus:
        """Carry out queued changes of stored data in every part."""
        found = [step(part.update)() for part in self.parts]
        return UpdateStatus.SUCCESS if UpdateStatus.SUCCESS in found else UpdateStatus.NO_UPDATE

    # verbs

    @verb
    def clear(self, data: bool = True) -> None:
        """Empty all parts; with `data`, also zero the buffers."""
        for part in self.parts:
            step(part.clear)(data)

    @verb
    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` hold a range of `src` too, in every part or in none.

        Raises
        ------
        NoSlotError : a part lacks cells; nothing has changed.
        """
        self._all_or_none(lambda part: step(part.seq_cp)(src, dst, p0, p1))

    @verb
    def seq_keep(self, seq_id: int) -> None:
        """Remove all other sequences from the stream of this one."""
        # differs from llama.cpp: states of sequences in other streams stay, as their K and V do
        for part in self.parts:
            if part.n_stream == self.parts[0].n_stream:
                step(part.seq_keep)(seq_id)

    @verb
    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move the positions of a range by `delta`, in every part or in none.

        Raises
        ------
        ShiftUnsupported : a part cannot; nothing has changed.
        """
        self._all_or_none(lambda part: step(part.seq_add)(seq_id, p0, p1, delta))

    @verb
    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions of a range by `d`, in every part or in none. Errors as in `seq_add`."""
        self._all_or_none(lambda part: step(part.seq_div)(seq_id, p0, p1, d))

    # going on

    @read
    def resumable(self, seq_id: int, p: int) -> Resumable:
        """Return whether decoding may go on at `p`, once all from there on is removed; if not, the first part's why."""
        answers = [step(part.resumable)(seq_id, p) for part in self.parts]
        bad = next((answer for answer in answers if not answer), None)
        if bad is None:
            return answers[0]
        return replace(bad, largest=int(step(self.resume_points)(seq_id, p)[-1, 1]))

    @read
    def resume_points(self, seq_id: int, p: int) -> I64Array:
        """Return at which positions up to `p` decoding may go on; see `StoredKV.resume_points`."""
        return reduce(common_runs, (step(part.resume_points)(seq_id, p) for part in self.parts))

    # snapshots

    @property
    def snapshot_layout(self) -> object:
        """See `Snapshots.snapshot_layout`."""
        return tuple(part.snapshot_layout for part in self.parts)

    def take(self, seq_id: int, position: int, on: str) -> Piece:
        """See `Snapshots.take`."""
        return PartsPiece(self.parts, seq_id, position, on)

    # states

    def state_parts(self, partial: bool) -> tuple[StatePart, ...]:
        """See `StateFiles.state_parts`."""
        return tuple(one for part in self.parts for one in part.state_parts(partial))

    def note_cut(self, seq_id: int) -> None:
        """See `StateFiles.note_cut`."""
        for part in self.parts:
            part.note_cut(seq_id)

    # inspection

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of all parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def owners(self) -> tuple[Owner, ...]:
        """What a graph that reads this memory stands on."""
        return tuple(owner for part in self.parts for owner in part.owners)

    @property
    def used(self) -> str:
        """How full each part is, in words."""
        return "; ".join(part.used for part in self.parts)

    @read
    def check(self) -> None:
        """Verify every invariant of every part, and that they fit; raises AssertionError naming what is wrong."""
        for part in self.parts:
            step(part.check)()
        misfit = self.ends_misfit()
        assert misfit is None, misfit

    def ends_misfit(self) -> str | None:
        """Say which parts end where they may not beside each other. For who has entered the guard."""
        return next((why for why in (part.ends_misfit() for part in self.parts) if why is not None), None)

    def bookmark(self) -> Undo:
        """Return what puts the bookkeeping of all parts back to what it is now."""
        undos = [part.bookmark() for part in self.parts]

        def undo() -> None:
            for each in undos:
                each()

        return undo

    def require_open(self) -> None:
        """Raise `UseAfterCloseError` if a part is closed."""
        for part in self.parts:
            part.require_open()

    def close(self) -> None:
        """Free the buffers of all parts. Safe to call twice."""
        self.guard.require_whole("close")
        with self.guard:
            self.release()

    def follow(self) -> None:
        """Do what `update` does. For who has entered the guard."""
        for part in self.parts:
            part.follow()

    def release(self) -> None:
        """Do what `close` does. For who has entered the guard."""
        for part in self.parts:
            part.release()

    def __enter__(self) -> Self:
        self.require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # mechanism

    def _all_or_none(self, act: Callable[[Part], None]) -> None:
        undo = self.bookmark()
        try:
            for part in self.parts:
                act(part)
        except BaseException:
            undo()
            raise
