"""SavedStates: what a context offers for saving and loading."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from pykv.runtime.states import load, save
from pykv.runtime.states.remarks import Remarks
from pykv.state_format import NEWEST, Dialect

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pykv.runtime.context import Context


class SavedStates(ABC):
    """A context that can be saved: all of it as a session, or one sequence.

    Files are llama.cpp's own, which llama.cpp reads too. A crash while one is written leaves the old file or the new
    one, and a save that fails leaves nothing. What pykv notes in addition, the model's fingerprint, its rotations,
    checksums and what the caller gives, stands behind the state in a sequence file, and in a file ``<path>.pykv``
    beside a session file, which belongs to it: copy or move both. `pykv.open_state` reads what the caller gave.

    Loading is whole or not at all: a file that is damaged, or of another model, layout or size, is refused with
    `StateError` before anything changes. Without ``strict`` what can be converted is: the order of V, a session's
    number of streams, element types; what is lost is said in a ``RuntimeWarning``.

    ``dialect`` names the versions of session and sequence files to write, "11/4" or "10/3"; reading finds out.
    """

    def save_session(
        self,
        path: str | os.PathLike[str],
        tokens: Sequence[int] = (),
        *,
        extra: Mapping[str, Any] | None = None,
        attachments: Mapping[str, Buffer] | None = None,
        dialect: str | Dialect = NEWEST,
    ) -> int:
        """Write all sequences into a session file, and notes beside it.

        Parameters
        ----------
        tokens : (n,) what has been decoded, all of it, for whoever loads the file; the token that was sampled last may
            be among them though it is not decoded yet. Of several sequences, one's. Pictures have none. Where they
            cannot be of what is saved, a ``RuntimeWarning`` says so, now and whenever the file is loaded.
        extra : a dict of anything that JSON holds, to be found again by `pykv.open_state`: a sampler's state, text. Its
            names are texts, inside too, and at most 100 lists and dicts stand within each other.
        attachments : bytes by name, such as ``state_bytes(0, partial=True)`` of an earlier end of a sequence.
        dialect : see `SavedStates`.

        Returns
        -------
        The bytes of the session file.

        Raises
        ------
        ParamError : no such dialect, tokens that are not of the vocabulary or more than `n_ctx`, a path that no file
            can have or that is the name of another session's notes, or extra or attachments that cannot be saved;
            nothing was written.
        OSError : of the kind that open() raises: the file cannot be written; what was there before is unchanged.
        """
        remarks = Remarks(extra, attachments)
        return save.save_session(self._saved_context, path, tokens, remarks, save.parse_dialect(dialect))

    def load_session(self, path: str | os.PathLike[str], *, strict: bool = True) -> list[int]:
        """Hold what a session file holds, and nothing else. Returns the tokens that are noted in it.

        They are what was given when it was saved; where they cannot be of what it holds, a ``RuntimeWarning`` says so.

        Raises
        ------
        StateError : see `SavedStates`; nothing has changed, and the message says what can be done.
        ParamError : no file can have such a path.
        OSError : of the kind that open() raises: the file cannot be read; nothing has changed.
        """
        return load.load_session(self._saved_context, path, strict=strict)

    def save_sequence(
        self,
        path: str | os.PathLike[str],
        seq_id: int,
        tokens: Sequence[int] = (),
        *,
        extra: Mapping[str, Any] | None = None,
        attachments: Mapping[str, Buffer] | None = None,
        dialect: str | Dialect = NEWEST,
    ) -> int:
        """Write one sequence into a file, with notes behind it. As `save_session`; returns the bytes of the file."""
        remarks = Remarks(extra, attachments)
        return save.save_sequence(self._saved_context, path, seq_id, tokens, remarks, save.parse_dialect(dialect))

    def load_sequence(self, path: str | os.PathLike[str], seq_id: int, *, strict: bool = True) -> list[int]:
        """Let a sequence be the one in a file, whatever its number was. Returns the tokens that are noted in it.

        Other sequences stay as they are. Raises as `load_session`, and

        Raises
        ------
        NoSlotError : there is no room beside the others; nothing has changed.
        """
        return load.load_sequence(self._saved_context, path, seq_id, strict=strict)

    def state_bytes(
        self, seq_id: int | None = None, partial: bool = False, *, dialect: str | Dialect = NEWEST
    ) -> memoryview:
        """Return one sequence, or with None all, as llama.cpp keeps it in memory: bytes that do not change.

        Parameters
        ----------
        partial : only what a cut cannot bring back, windows and states, to go back to later: see `load_state_bytes`. A
            memory that has neither gives all: its only part is never left out.
        """
        return save.state_bytes(self._saved_context, seq_id, partial, save.parse_dialect(dialect))

    def load_state_bytes(
        self, data: Buffer, seq_id: int | None = None, partial: bool = False, *, strict: bool = True
    ) -> None:
        """Let a sequence, or with None all of the context, be what `state_bytes` returned.

        Bytes carry no notes: those of another model of the same shape, or with keys rotated otherwise, are not told
        apart, and make nonsense. A file from `save_sequence` is checked for that.

        Parameters
        ----------
        partial : what `state_bytes` was given. Partial bytes hold windows and states alone: they go onto a sequence
            that still holds all tokens that it held when they were taken, and perhaps more. These, from where the bytes
            end on, are removed as by ``memory.seq_rm(seq_id, end)``, and decoding goes on there. That those before
            are the same tokens is not checked.

        Raises
        ------
        StateError : as in `load_session`; also where `partial` is not what the bytes are, or a sequence holds fewer
            tokens than partial bytes end at.
        NoSlotError : there is no room; nothing has changed.
        """
        load.load_bytes(self._saved_context, data, seq_id, partial=partial, strict=strict)

    @property
    def _saved_context(self) -> Context:
        self._require_open()
        return cast("Context", self)

    @abstractmethod
    def _require_open(self) -> None:
        """Raise `UseAfterCloseError` if it is closed."""
