"""A saved state held against a context: parsed, or refused with words on what can be done about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pykv.errors import StateError
from pykv.runtime.states.read_state import cells_of
from pykv.runtime.states.saved_file import SavedFile
from pykv.state_format import Section, SectionLayout, parse_state
from pykv.state_format.unknown import BEHIND

if TYPE_CHECKING:
    from pykv.memory import Memory

_OTHER_PART = {
    False: "these are the bytes of state_bytes(partial=True): pass partial=True",
    True: "these are the bytes of state_bytes(partial=False), of all that a sequence holds: pass partial=False",
}
"""What is wrong, by the `partial` that was passed, with bytes that are read with the other one."""


def parsed(saved: SavedFile, memory: Memory, *, partial: bool, strict: bool) -> tuple[Section, ...]:
    """Return the sections of a saved state, which suit a memory.

    Raises
    ------
    StateError : they do not; says whether strict=False, the other `partial`, another file or context helps.
    """
    layouts = memory.state_layouts(partial)
    try:
        return _parse(saved, layouts, strict=strict)
    except StateError as error:
        if not saved.container.kind.is_file and _is_read(saved, memory.state_layouts(not partial), exact=True):
            raise StateError(_OTHER_PART[partial]) from None
        raise StateError(f"{error}; {_way_out(saved, layouts, strict=strict)}", offset=error.offset) from None


def _parse(
    saved: SavedFile, layouts: Sequence[SectionLayout], *, strict: bool, exact: bool = True
) -> tuple[Section, ...]:
    container = saved.container
    start, nbytes = container.state
    return parse_state(
        saved.data,
        start,
        layouts,
        whole=container.kind.whole,
        dialect=container.dialect,
        stop=start + nbytes,
        strict=strict,
        exact=exact,
    )[0]


def _way_out(saved: SavedFile, layouts: Sequence[SectionLayout], *, strict: bool) -> str:
    """Say what can be done about a state that was refused."""
    if strict and _is_read(saved, layouts, exact=True):
        return "strict=False converts it, and warns where that loses something"
    if _is_read(saved, layouts, exact=False):
        behind = f"what follows is neither a section, {BEHIND}"
        return f"{behind}; take another copy of the file"
    try:
        _, sections = saved.parsed()
    except StateError:
        return "the state is damaged or cut off: take another copy of it"
    return _other_context(sections, layouts, is_whole=saved.container.kind.whole)


def _is_read(saved: SavedFile, layouts: Sequence[SectionLayout], *, exact: bool) -> bool:
    try:
        _parse(saved, layouts, strict=False, exact=exact)
    except StateError:
        return False
    return True


def _other_context(sections: Sequence[Section], layouts: Sequence[SectionLayout], *, is_whole: bool) -> str:
    """Say what a sound state needs, of which no conversion while it is loaded makes what the memory stores."""
    n_seq_max = min((one.n_seq_max for one in layouts), default=0)
    last = max((int(cells.ids.max(initial=-1)) for one in sections for cells in cells_of(one)), default=-1)
    if is_whole and last >= n_seq_max:
        return (
            f"a context of n_seq_max={last + 1} takes it, and `pykv state convert FILE NEW --to sequence --seq N` "
            "takes one sequence out of it"
        )
    return (
        "the state is whole, and not of a context like this one: `pykv state inspect FILE` shows what it holds, and a "
        "context of that model, and of no smaller n_ctx, takes it"
    )
