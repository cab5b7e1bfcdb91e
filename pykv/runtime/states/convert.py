"""Saved states into other forms of saved states, file to file: no model, no memory, little of it in memory at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal, TypeVar

from pykv.errors import ParamError
from pykv.ggml import DType
from pykv.ggml.types import BY_NUMBER
from pykv.models import ARCHITECTURES
from pykv.runtime.states.conversion_plan import Change, ConversionPlan, Wanted
from pykv.runtime.states.converted_state import plan_conversion
from pykv.runtime.states.read_state import ReadState, Rotation, checked_widths, read_state
from pykv.runtime.states.saved_file import naming
from pykv.runtime.states.section_sums import SectionSums
from pykv.runtime.states.side_notes import is_side_car, side_car_pieces
from pykv.state_format import (
    ELEMENTS,
    Dialect,
    Kind,
    Notes,
    SectionSum,
    new_contents,
    plain_path,
    side_car,
    trailer_pieces,
    write_durably,
)
from pykv.typing import MAX_SEQ, AnyArray, as_int

if TYPE_CHECKING:
    from typing_extensions import Buffer

KINDS = {
    "session": Kind.SESSION_FILE,
    "sequence": Kind.SEQUENCE_FILE,
    "context-state": Kind.CONTEXT_BYTES,
    "sequence-state": Kind.SEQUENCE_BYTES,
}
"""Kinds of states by the names that callers give them."""

V_LAYOUTS = {"cell": False, "channel": True}

T = TypeVar("T")

OnProgress = Callable[[int, int], object]
"""Takes the bytes that are done, and all."""


@dataclass(frozen=True)
class Conversion:
    """What was written.

    Attributes
    ----------
    nbytes : bytes of the file.
    changes : what is not as it was, each lossless or not.
    has_notes : whether pykv's notes went along, with checksums made anew.
    """

    kind: Kind
    dialect: Dialect
    nbytes: int
    changes: tuple[Change, ...]
    has_notes: bool

    @property
    def is_lossless(self) -> bool:
        """Whether all that the source held is there to the bit."""
        return all(change.is_lossless for change in self.changes)


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: Literal["session", "sequence", "context-state", "sequence-state"] | None = None,
    seq_id: int | None = None,
    dialect: str | Dialect | None = None,
    type_k: str | DType | None = None,
    type_v: str | DType | None = None,
    v_layout: Literal["cell", "channel"] | None = None,
    n_stream: int | None = None,
    rotation: Rotation | None = None,
    arch: str | None = None,
    on_progress: OnProgress | None = None,
) -> Conversion:
    """Write a saved state once more, in another form. What is not asked for stays as it is.

    Rows pass through in pieces of a few MiB. A crash leaves the old target or the new one. Notes of pykv's are carried
    along, but for kinds that have no place for them.

    Parameters
    ----------
    to : kind of the result.
    seq_id : which sequence is taken out of a state of all; of one sequence's state, the number that it gets.
    dialect : versions of session and sequence files, "11/4" or "10/3".
    type_k, type_v : element types.
    v_layout : V cell by cell, or channel by channel as llama.cpp has it without flash attention.
    n_stream : 1 = all sequences in one stream of cells (unified); else one for each sequence.
    rotation : widths by which quantised K and V are rotated: in the result, and in a source that does not say so.
    arch : architecture of the model, one that pykv builds, where a state of all is made of one that does not name it.

    Raises
    ------
    ParamError : it cannot be, or something must be said for it; nothing was written.
    StateError : the source is damaged; nothing was written.
    OSError : a file cannot be read or written; the target is as it was.
    """
    wanted = Wanted(
        kind=_chosen("to", to, KINDS),
        seq_id=_whole("seq_id", seq_id, 0, MAX_SEQ - 1),
        dialect=dialect if isinstance(dialect, Dialect) else _chosen("dialect", dialect, {str(d): d for d in Dialect}),
        types=(_dtype("type_k", type_k), _dtype("type_v", type_v)),
        by_channel=_chosen("v_layout", v_layout, V_LAYOUTS),
        n_stream=_whole("n_stream", n_stream, 1, MAX_SEQ),
        rotation=checked_widths(rotation),
        arch=_architecture(arch),
    )
    target = plain_path(target, "target")
    with read_state(plain_path(source, "source")) as state:
        with _about(source):
            state.saved.verify()
            plan = plan_conversion(state, wanted)
        notes = _notes(state, plan, wanted)
        _check_target(target, has_notes=notes is not None and plan.kind is Kind.SESSION_FILE)
        nbytes = _write(target, plan, notes, state.saved.attachments, on_progress or _ignore)
    return Conversion(plan.kind, plan.dialect, nbytes, plan.all_changes(), notes is not None)


def _notes(state: ReadState, plan: ConversionPlan, wanted: Wanted) -> Notes | None:
    """Return the notes that go along, without checksums; None where there are none, or no place for them."""
    notes, kept = state.saved.notes, list(state.saved.attachments)
    if notes is None:
        return None
    if plan.kind not in (Kind.SESSION_FILE, Kind.SEQUENCE_FILE):
        plan.note(f"notes left out: a {plan.kind.value} has no place for them", is_lossless=False)
        return None
    if kept and plan.moved:
        plan.note(f"attachments {', '.join(kept)} stay as they were")
    types = {name: dtype.label for name, dtype in zip("kv", wanted.types, strict=True) if dtype is not None}
    return replace(notes, types=dict(notes.types) | types, sections=())


def _check_target(target: str, *, has_notes: bool) -> None:
    """Refuse to replace notes on a session by a state, and what is none of ours by notes beside a session."""
    beside = side_car(target)
    if is_side_car(target):
        raise ParamError(f"{target}: holds the notes on a session, and would be replaced; take another name")
    if has_notes and beside.exists() and not is_side_car(beside):
        raise ParamError(f"{beside}: holds no notes on a session, and would be replaced by such; take another name")


def _write(
    target: str,
    plan: ConversionPlan,
    notes: Notes | None,
    attachments: Mapping[str, Buffer],
    on_progress: OnProgress,
) -> int:
    stream = _Stream(plan, on_progress)
    if plan.kind is not Kind.SESSION_FILE:
        return write_durably(target, stream.pieces(notes, attachments))
    beside = side_car(target)
    if notes is None and not is_side_car(beside):
        return write_durably(target, stream.pieces())
    # notes go with a session as in every save; without any, they tell until it is there that it has none
    with new_contents(beside, target) as (note, write):
        for piece in stream.pieces():
            write(piece)
        for piece in side_car_pieces(replace(notes or Notes(), sections=stream.sections), attachments, target):
            note(piece)
    if notes is None:
        beside.unlink()
    return plan.nbytes


class _Stream:
    """The bytes of a plan, counted and summed as they pass."""

    def __init__(self, plan: ConversionPlan, on_progress: OnProgress) -> None:
        self._plan, self._on_progress = plan, on_progress
        self._n_done, self._n_all = 0, plan.nbytes
        self._sums = SectionSums(plan.part_nbytes)

    @property
    def sections(self) -> tuple[SectionSum, ...]:
        """The checksums of what has passed."""
        return self._sums.sections

    def pieces(self, notes: Notes | None = None, attachments: Mapping[str, Buffer] | None = None) -> Iterator[Buffer]:
        """Yield the state, and the notes on it behind it if there are any."""
        self._sums = SectionSums(self._plan.part_nbytes)
        for piece in self._plan.pieces:
            for part in (piece,) if isinstance(piece, bytes) else piece.pieces():
                view = memoryview(part) if isinstance(part, bytes) else _bytes(part)
                self._sums.add(view)
                self._n_done += len(view)
                yield view
                self._on_progress(self._n_done, self._n_all)
        if notes is not None:
            yield from trailer_pieces(replace(notes, sections=self.sections), {**(attachments or {})})


def _bytes(array: AnyArray) -> memoryview:
    return array.data.cast("B") if array.size else memoryview(b"")


def _ignore(n_done: int, n_all: int) -> None:
    return


def _chosen(name: str, value: str | None, known: dict[str, T]) -> T | None:
    if value is not None and value not in known:
        raise ParamError(f"{name}={value!r} must be one of {', '.join(known)}")
    return None if value is None else known[value]


def _whole(name: str, value: int | None, least: int, most: int) -> int | None:
    number = None if value is None else as_int(value)
    if value is not None and (number is None or not least <= number <= most):
        raise ParamError(f"{name}={value!r} must be a whole number in {least}..{most}")
    return number


def _dtype(name: str, value: str | DType | None) -> DType | None:
    """Return an element type that a state can hold."""
    if value is None:
        return None
    by_label = {one.name: number for number, one in ELEMENTS.items()}
    label = value.label if isinstance(value, DType) else str(value).lower()
    if label not in by_label:
        raise ParamError(f"{name}={label!r} is no type that K and V are stored in; take one of {', '.join(by_label)}")
    return BY_NUMBER[by_label[label]]


def _architecture(value: str | None) -> str | None:
    if value is not None and value not in ARCHITECTURES:
        near = get_close_matches(value, ARCHITECTURES, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        known = ", ".join(sorted(ARCHITECTURES))
        raise ParamError(f"arch={value!r} is no architecture that pykv builds{meant}; they are {known}")
    return value


@contextmanager
def _about(source: str | os.PathLike[str]) -> Iterator[None]:
    """Let what cannot be made of a source begin with its path."""
    with naming(source):
        try:
            yield
        except ParamError as error:
            raise ParamError(f"{os.fsdecode(source)}: {error}") from None
