"""Grant: a scheduler's promise of memory to one arena, good until the scheduler allocates anew."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from pykv.errors import TensorError, UseAfterCloseError

if TYPE_CHECKING:
    from pykv.ggml.sched import Sched


class Grant:
    """Memory that a scheduler has given to the tensors of one arena. Does not keep the scheduler alive."""

    __slots__ = ("_sched", "is_current")

    def __init__(self, sched: Sched) -> None:
        self._sched = weakref.ref(sched)
        self.is_current = True

    @property
    def sched(self) -> Sched:
        """The scheduler.

        Raises
        ------
        UseAfterCloseError : it is closed or gone.
        """
        sched = self._sched()
        if sched is None or sched.closed:
            raise UseAfterCloseError("the scheduler that holds the tensor's memory is closed")
        return sched

    def check(self) -> None:
        """Raise unless the memory is still this arena's.

        Raises
        ------
        UseAfterCloseError : the scheduler is closed.
        TensorError : it has allocated another graph, or was reset.
        """
        _ = self.sched
        if not self.is_current:
            raise TensorError("the scheduler has taken the tensor's memory back; allocate the graph anew")
