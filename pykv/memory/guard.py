"""Guard: one thread at a time changes a memory, and Ctrl-C waits until a change is whole.

What reads only positions (`pos_min`, `pos_max`, `cells`) does not enter: seen from another thread, a change may be
half done.
"""

from __future__ import annotations

import threading
from types import TracebackType

from pykv.errors import ConcurrentUseError
from pykv.ggml import CancelFlag, HeldInterrupt


class Guard:
    """Entered around every change; may be entered again by the thread that is inside.

    Attributes
    ----------
    flag : set by Ctrl-C while it is held back, for changes that can stop between two steps.
    """

    def __init__(self) -> None:
        self.flag = CancelFlag()
        self._lock = threading.RLock()
        self._held: list[HeldInterrupt] = []

    def __enter__(self) -> None:
        held = HeldInterrupt(self.flag)
        held.__enter__()
        if not self._lock.acquire(blocking=False):
            held.__exit__(None, None, None)
            raise ConcurrentUseError("the memory is in use by another thread, which decodes or changes it")
        self._held.append(held)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        held = self._held.pop()
        self._lock.release()
        held.__exit__(kind, error, tb)
