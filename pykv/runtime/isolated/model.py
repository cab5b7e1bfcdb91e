"""IsolatedModel: a model in a process of its own. What its file says is read here."""

from __future__ import annotations

import os
import weakref
from typing import Any, NoReturn, cast

from pykv.errors import UseAfterCloseError
from pykv.gguf import GGUFFile
from pykv.isolation import Link
from pykv.memory import MemoryPlan
from pykv.models import HParams, Placement, find_architecture
from pykv.models.weights import Progress
from pykv.runtime.context import Context
from pykv.runtime.isolated import absent, where
from pykv.runtime.isolated.context import IsolatedContext
from pykv.runtime.isolated.planned import SERVER
from pykv.runtime.model import Model
from pykv.runtime.params import ContextParams


class IsolatedModel(Model):
    """A `Model` whose weights, contexts and computations are in another process, which may die without this one.

    It does what a model does, but for what `absent.MODEL` lists. Its contexts take turns, whatever their threads, and
    are gone with it. When the process ends, as it does when ggml loses a server, the call that waits for it raises
    `BackendLost`, and so does every later one.

    While a call waits, Ctrl-C asks the process to stop, as it stops a decode that runs here, and a second Ctrl-C ends
    the process: `KeyboardInterrupt` then, and `BackendLost` from there on. While the model is being loaded the first
    one does.
    """

    def __init__(
        self,
        path: str | bytes | os.PathLike[str],
        placing: where.Placing,
        progress: Progress | None,
        *,
        repack: bool,
    ) -> None:
        names, n_gpu_layers, tensor_split, overrides = where.all_named(placing)
        self._file = GGUFFile(path)
        self.path, self.metadata = self._file.path, self._file.metadata
        find_architecture(self.metadata.typed("general.architecture", str))
        self.hparams = HParams.from_gguf(self._file)
        self._closed = False
        self.link = Link(SERVER, where.titles(names))
        end = weakref.finalize(self, self.link.end)
        try:
            placement: Placement = self.link.ask(
                "load",
                os.path.abspath(self.path),
                (names, n_gpu_layers, tensor_split, overrides),
                repack,
                progress is not None,
                call_back=progress,
                at_once=True,
            )
            self.placement = where.here(placement)
        except BaseException:
            end()
            self._file.close()
            raise

    def make_context(self, params: ContextParams, attention: Any = None) -> Context:
        """See `Model.make_context`."""
        return IsolatedContext(self, params, attention)

    def memory_plan(self, **params: Any) -> MemoryPlan:
        """Return what the memory of a context with these parameters takes, without allocating it."""
        self._require_open()
        return MemoryPlan(cast("Any", self.link.ask("memory_plan", params)))

    @property
    def closed(self) -> bool:
        """Whether it has been closed, or its process has ended."""
        return self._closed or self.link.closed

    def close(self) -> None:
        """End the process, and with it all contexts. Safe to call twice.

        Raises
        ------
        ConcurrentUseError : a context of it is in use.
        """
        self.link.close()
        self._closed = True
        self._file.close()

    def __getattr__(self, name: str) -> NoReturn:
        absent.refuse(self, name, absent.MODEL)

    def _require_open(self) -> None:
        if self._closed:
            raise UseAfterCloseError("the model is closed")
        self.link.require_open()
