"""Guard: one decode or change of a memory at a time, and Ctrl-C waits until it is whole.

What reads only positions (`pos_min`, `pos_max`, `cells`) does not enter: seen from another thread, a change may be
half done.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from pykv.errors import ConcurrentUseError, ParamError
from pykv.ggml import CancelFlag, HeldInterrupt


class Guard:
    """Entered around every decode and change, and by nobody else meanwhile.

    Not by the same thread either: what Python runs between two of its steps, such as a signal handler, must not change
    what it stands on.

    Attributes
    ----------
    flag : set by Ctrl-C while it is held back, for changes that can stop between two steps.
    """

    def __init__(self) -> None:
        self.flag = CancelFlag()
        self._lock = threading.Lock()
        self._thread = 0
        self._held = HeldInterrupt(self.flag)

    def __enter__(self) -> None:
        held = HeldInterrupt(self.flag)
        held.__enter__()
        if not self._lock.acquire(blocking=False):
            held.__exit__(None, None, None)
            where = "this thread, in what this call interrupts" if self._is_mine else "another thread"
            raise ConcurrentUseError(f"the memory is in use by {where}, which decodes or changes it")
        self._thread, self._held = threading.get_ident(), held

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        held, self._thread = self._held, 0
        self._lock.release()
        held.__exit__(kind, error, tb)

    def entered(self) -> AbstractContextManager[None]:
        """Return what a step of a decode or change enters: nothing if that has entered, else the guard.

        For code that no caller reaches but through such a decode or change.
        """
        return nullcontext() if self._is_mine else self

    def inner(self) -> InnerGuard:
        """Return the guard of a part of the memory."""
        return InnerGuard(self)

    def require_whole(self, verb: str) -> None:
        """Raise `ParamError` if this is the guard of a part, which `verb` must not change on its own."""

    @property
    def _is_mine(self) -> bool:
        return self._thread == threading.get_ident()


class InnerGuard(Guard):
    """The guard of a part: whoever enters it enters that of the whole.

    It lets nobody in who has entered already, since that may be what this thread interrupts: the whole takes
    steps of its parts, see `verb.step`, which enter nothing.
    """

    def __init__(self, whole: Guard) -> None:
        self.flag, self._whole = whole.flag, whole

    def __enter__(self) -> None:
        self._whole.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._whole.__exit__(kind, error, tb)

    def require_whole(self, verb: str) -> None:
        """See `Guard.require_whole`."""
        raise ParamError(f"{verb}: this is a part of a memory, which changes as a whole; call the verb of the whole")

    @property
    def _is_mine(self) -> bool:
        return self._whole._is_mine
