"""IsolatedContext: a context in the process of its model."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pykv.batch import Batch, BatchBuilder
from pykv.errors import BatchError, ConcurrentUseError, NoSlotError, ParamError, UseAfterCloseError
from pykv.memory import AttentionMass, AttentionPlan, Memory
from pykv.memory.attention_choice import AttentionInUse
from pykv.runtime.context import Context
from pykv.runtime.isolated.given import Given, IsolatedObserver, IsolatedTrace
from pykv.runtime.isolated.memory import IsolatedMemory
from pykv.runtime.isolated.messages import ContextFacts, WireBatch
from pykv.runtime.observe import Observer
from pykv.runtime.params import ContextParams
from pykv.runtime.states.remarks import Remarks
from pykv.runtime.states.saved_file import SavedFile
from pykv.runtime.trace import Trace
from pykv.state_format import NEWEST, Dialect
from pykv.typing import F32Array

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pykv.isolation import Ref
    from pykv.runtime.isolated.model import IsolatedModel

_CHANGE_NOTHING = (BatchError, NoSlotError, ParamError)


class IsolatedContext(Context):
    """Offers what `Context` does; see `IsolatedModel` for what differs.

    What is read while another thread decodes waits for that to end, and in a signal handler raises
    `ConcurrentUseError`.
    """

    def __init__(self, model: IsolatedModel, params: ContextParams, attention: AttentionPlan | None = None) -> None:
        self.model, self.asked = model, params
        self._link = model.link
        self._cancel_lock = threading.RLock()  # a signal handler may call cancel()
        self._closed = self._decodes = self._unwanted = False
        self._request = 0
        self._logits: F32Array | None = None
        self._wanted = np.zeros(0, np.bool_)
        self._given: weakref.WeakSet[Given] = weakref.WeakSet()
        ref: Ref
        facts: ContextFacts
        ref, facts = self._link.ask("context", params, attention)
        self.params, self.attention = facts.params, facts.attention
        weakref.finalize(self, self._link.drop, ref.number).atexit = False
        self._ref, self._remote = ref, IsolatedMemory(self._link, ref, facts)
        self.memory = cast("Memory", self._remote)

    # decode

    def decode(self, batch: Batch | BatchBuilder) -> None:
        """See `Context.decode`; besides, `BackendLost` if the process of the model ends."""
        self._ask_decode("decode", batch)

    def decode_tapped(self, batch: Batch | BatchBuilder) -> dict[int, F32Array]:
        """See `Context.decode_tapped`."""
        (tapped,) = self._ask_decode("decode_tapped", batch)
        return dict(tapped)

    def _ask_decode(self, what: str, batch: Batch | BatchBuilder) -> tuple[Any, ...]:
        """Let a batch be decoded; returns what is told beside the logits."""
        if self._decodes:
            raise ConcurrentUseError("the context is decoding already; one thread at a time, and one decode")
        with self._remote.entered():
            self._require_open()
            if not isinstance(batch, (Batch, BatchBuilder)):
                raise ParamError(f"batch={batch!r} must be a pykv.Batch")
            parts = WireBatch.of(batch.build() if isinstance(batch, BatchBuilder) else batch)
            self._decodes = True
            try:
                rows, wanted, *more = self._link.ask(what, self._ref.number, *parts, begun=self._begun, take=self._rows)
            except _CHANGE_NOTHING:
                raise
            except BaseException:
                self._logits = None
                raise
            else:
                self._logits, self._wanted = rows, wanted
                return tuple(more)
            finally:
                with self._cancel_lock:
                    self._decodes, self._unwanted, self._request = False, False, 0

    def cancel(self) -> None:
        """See `Context.cancel`."""
        with self._cancel_lock:
            if self._decodes:
                self._unwanted = True
                self._stop()

    @property
    def attention_path(self) -> AttentionInUse:
        """See `Context.attention_path`."""
        path: AttentionInUse = self._get("attention_path")
        return path

    @property
    def embedded(self) -> bool:  # type: ignore[override]
        """Whether embeddings, such as a picture's, have been decoded."""
        return bool(self._get("embedded"))

    @property
    def n_reused(self) -> int:
        """Ubatches that ran on the graph of the one before."""
        return int(self._get("n_reused"))

    @property
    def compute_nbytes(self) -> int:
        """Bytes of scratch memory for computing."""
        return int(self._get("compute_nbytes"))

    @property
    def traces(self) -> list[Trace]:  # type: ignore[override]
        """The traces that record what happens here."""
        return [cast("Trace", one) for one in self._given if isinstance(one, IsolatedTrace) and not one.closed]

    def trace(self, path: str | bytes | os.PathLike[Any], tokens: bool = True) -> Trace:
        """See `Context.trace`."""
        self._require_open()
        made = IsolatedTrace(self._link, self._remote.call_on_files("trace", path, tokens))
        self._given.add(made)
        return cast("Trace", made)

    def observe(self, layers: Sequence[int] | None = None, what: AttentionMass | None = None) -> Observer:
        """See `Context.observe`."""
        self._require_open()
        made = IsolatedObserver(self._link, self._remote.inside("observe", layers, what))
        self._given.add(made)
        return cast("Observer", made)

    def close(self) -> None:
        """See `Context.close`."""
        if self._closed:
            return
        if self._decodes:
            raise ConcurrentUseError("the context is decoding; cancel() it before close()")
        with self._remote.entered():
            if not self._link.closed:
                for one in tuple(self._given):
                    one.keep()
                self._link.ask("call", self._ref.number, "close", (), {}, None)
            self._closed = True

    # saved states

    def save_session(
        self,
        path: str | os.PathLike[str],
        tokens: Sequence[int] = (),
        *,
        extra: Mapping[str, Any] | None = None,
        attachments: Mapping[str, Buffer] | None = None,
        dialect: str | Dialect = NEWEST,
    ) -> int:
        """See `SavedStates.save_session`."""
        more = _remarks(extra, attachments)
        return int(self._files("save_session", path, tokens, dialect=dialect, **more))

    def load_session(self, path: str | os.PathLike[str], *, strict: bool = True) -> list[int]:
        """See `SavedStates.load_session`."""
        return list(self._files("load_session", path, strict=strict))

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
        """See `SavedStates.save_sequence`."""
        more = _remarks(extra, attachments)
        return int(self._files("save_sequence", path, seq_id, tokens, dialect=dialect, **more))

    def load_sequence(self, path: str | os.PathLike[str], seq_id: int, *, strict: bool = True) -> list[int]:
        """See `SavedStates.load_sequence`."""
        return list(self._files("load_sequence", path, seq_id, strict=strict))

    def state_bytes(
        self, seq_id: int | None = None, partial: bool = False, *, dialect: str | Dialect = NEWEST
    ) -> memoryview:
        """See `SavedStates.state_bytes`."""
        self._require_open()
        return memoryview(self._remote.inside("state_bytes", seq_id, partial, dialect=dialect)).toreadonly()

    def load_state_bytes(
        self, data: Buffer, seq_id: int | None = None, partial: bool = False, *, strict: bool = True
    ) -> None:
        """See `SavedStates.load_state_bytes`."""
        self._require_open()
        SavedFile.of_bytes(data)  # refused here, where it has its type
        self._remote.inside("load_state_bytes", memoryview(data).cast("B"), seq_id, partial, strict=strict)

    # mechanism

    def _begun(self, number: int) -> None:
        with self._cancel_lock:
            self._request = number
            self._stop()

    def _stop(self) -> None:
        if self._unwanted and self._request:
            self._link.cancel(self._request)

    def _rows(self, reply: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the logits, which may lie in the region while the reply counts them, and what else was told."""
        rows, n_vocab = reply[0], self.model.hparams.n_vocab
        if isinstance(rows, int):
            there = self._link.region.view(4 * rows * n_vocab)
            rows = np.frombuffer(there, np.float32).reshape(rows, n_vocab).copy()
        rows.flags.writeable = False
        return rows, np.frombuffer(reply[1], np.bool_), *reply[2:]

    def _get(self, name: str) -> Any:
        self._require_open()
        return self._link.ask("get", self._ref.number, name)

    def _files(self, name: str, *args: Any, **more: Any) -> Any:
        self._require_open()
        return self._remote.call_on_files(name, *args, **more)

    def _require_open(self) -> None:
        if self._closed:
            raise UseAfterCloseError("the context is closed")
        if self.model.closed and self._link.lost is None:
            raise UseAfterCloseError("the model of this context is closed")
        self._link.require_open()


def _remarks(extra: Mapping[str, Any] | None, attachments: Mapping[str, Buffer] | None) -> dict[str, Any]:
    """Return what is noted beside a state; refused here, in terms of what the caller gave."""
    Remarks(extra, attachments)
    if attachments is not None:
        attachments = {name: memoryview(data).tobytes() for name, data in attachments.items()}
    return {"extra": extra, "attachments": attachments}
