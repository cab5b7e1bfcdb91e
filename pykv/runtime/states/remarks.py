"""Remarks: what a caller wants to find again beside a state, refused at once where it cannot be saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pykv.cells.arguments import shown
from pykv.errors import ParamError, StateError
from pykv.runtime.states.side_notes import PREVIOUS
from pykv.state_format import Notes, trailer_pieces

if TYPE_CHECKING:
    from typing_extensions import Buffer

MOST_LEVELS = 100
"""Lists and dicts within each other that `extra` may have: any reader of JSON follows so many."""


@dataclass(frozen=True)
class Remarks:
    """What a caller wants to find again beside a state.

    Attributes
    ----------
    extra : anything that JSON holds: the state of a sampler, text.
    attachments : bytes by name, such as ``state_bytes(seq_id, partial=True)`` of earlier ends of the sequence.

    Raises
    ------
    ParamError : they cannot be saved; names the argument.
    """

    extra: Mapping[str, Any] | None = None
    attachments: Mapping[str, Buffer] | None = None

    def __post_init__(self) -> None:
        for name, value in (("extra", self.extra), ("attachments", self.attachments)):
            if value is not None and not isinstance(value, Mapping):
                raise ParamError(f"{name}={shown(value)}: must be a dict")
            for key in value or ():
                if not isinstance(key, str):
                    raise ParamError(f"{name}: the name {shown(key)} must be a text")
        for key, data in (self.attachments or {}).items():
            _check_attachment(key, data)
        extra = dict(self.extra or {})
        try:
            _check_levels(extra)
            trailer_pieces(Notes(extra=extra))
        except StateError as error:
            raise ParamError(f"extra={shown(self.extra)}: must be what JSON holds: {error}") from None

    def on(self, notes: Notes) -> Notes:
        """Return notes with what is extra."""
        return replace(notes, extra=dict(self.extra or {}))


def _check_attachment(name: str, data: Buffer) -> None:
    if name == PREVIOUS:
        raise ParamError(f"attachments[{name!r}]: pykv uses this name, take another")
    try:
        is_contiguous = memoryview(data).contiguous
    except (TypeError, ValueError, BufferError):
        raise ParamError(f"attachments[{name!r}]={shown(data)}: must be bytes") from None
    if not is_contiguous:
        raise ParamError(f"attachments[{name!r}]: must be bytes that lie together")


def _check_levels(extra: dict[str, Any]) -> None:
    """Refuse what is too deep or holds itself, and names that are no text, which JSON would make such."""
    level: list[Any] = [extra]
    for _ in range(MOST_LEVELS):
        level = list({id(inner): inner for each in level for inner in _inner(each)}.values())
        if not level:
            return
    raise ParamError(f"extra: more than {MOST_LEVELS} lists and dicts within each other, or one that holds itself")


def _inner(value: Any) -> list[Any]:
    """Return the lists and dicts that a list or a dict holds."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ParamError(f"extra: the name {shown(key)} must be a text")
    held = value.values() if isinstance(value, dict) else value
    return [one for one in held if isinstance(one, (dict, list, tuple))]
