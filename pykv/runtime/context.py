"""Context: a model with a memory, decoding batches. Source: spec params.md and decode.md.

validate → update → find slots for the whole batch → per ubatch: apply, compute → logits in batch order
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pykv.batch import Batch, BatchBuilder, BatchLimits, UBatch, ValidBatch, validate
from pykv.errors import ComputeCancelled, ConcurrentUseError, NoSlotError, ParamError, UseAfterCloseError
from pykv.ggml import Backend, cpu_device
from pykv.memory import AttentionMass, AttentionPlan, Memory, MemoryContext, make_memory
from pykv.memory.attention_choice import AttentionInUse
from pykv.memory.kinds import has_states
from pykv.runtime.compute import Compute
from pykv.runtime.fallbacks import warn_of_fallbacks
from pykv.runtime.memory_layout import attention_choice, kv_places, memory_settings
from pykv.runtime.observe import Observer, SeenCells, Watched, watched_by
from pykv.runtime.outputs import Outputs
from pykv.runtime.params import ContextParams, resolve
from pykv.runtime.states.methods import SavedStates
from pykv.typing import POS_INF, BoolArray, F32Array

if TYPE_CHECKING:
    from pykv.runtime.model import Model
    from pykv.runtime.trace import Trace


class Context(SavedStates):
    """Decodes batches of a model's tokens and remembers them.

    Made by `Model.context`. One thread at a time; close it, or use it in ``with``.

    Attributes
    ----------
    model : the model.
    asked : the parameters as they were asked for.
    params : the parameters with everything derived.
    memory : what is remembered, with the verbs over sequences.
    attention : how attention is computed, as asked for or as measured; see `attention_path`.
    traces : those that record what happens here, see `trace`.
    embedded : whether embeddings, such as a picture's, have been decoded: not all that is remembered has a token then.
    """

    def __init__(self, model: Model, params: ContextParams, attention: AttentionPlan | None = None) -> None:
        self.model, self.asked = model, params
        self.params = resolve(params, model.hparams)
        self._cancel_lock = threading.RLock()  # a signal handler may call cancel()
        self._closed = self._decodes = self.embedded = False
        self._logits: F32Array | None = None
        self._wanted: BoolArray = np.zeros(0, np.bool_)
        spec = model.architecture.memory_spec(self.params.rope)
        self._choice = attention_choice(model, self.params, spec, attention)
        self.attention = self._choice.plan
        self.traces: list[Trace] = []
        self._observers: tuple[Observer, ...] = ()
        self._is_tapped = False  # whether compute memory is held for `decode_tapped`
        self._tapped: dict[int, F32Array] | None = None
        self.memory: Memory = make_memory(
            spec,
            memory_settings(self.params, self.attention),
            kv_places(model, self.params),
            self.params.n_threads,
        )
        self._cancel = self.memory.guard.flag  # one for all: moving rows stops at it between two steps
        try:
            self._compute = self._make_compute()
            self._reserve(())
            warn_of_fallbacks(self._compute.misplaced(self.params.widest_ubatch[0]))
        except BaseException:
            self.memory.close()
            raise
        self._limits = BatchLimits(
            n_tokens_max=self.params.n_batch,
            n_vocab=model.hparams.n_vocab,
            n_seq_max=self.params.n_seq_max,
            n_pos_per_embd=spec.n_pos_per_embd,
            n_embd_inp=model.hparams.n_embd,
            pos_end=model.hparams.n_ctx_train if spec.absolute_positions else POS_INF,
        )

    # decode

    def decode(self, batch: Batch | BatchBuilder) -> None:
        """Compute a batch and remember its tokens.

        Afterwards `logits` holds the rows that the batch asked for. Either the whole batch finds room or nothing
        changes. If computing fails or is cancelled, the memory is as after the last ubatch that was computed whole,
        but for states: one that a ubatch was writing is neither old nor new, so that in a memory with states the
        sequences of a ubatch that stops amid its computation are empty afterwards. Others are as before. A ubatch that
        fails before its computation has begun loses nothing.

        Raises
        ------
        BatchError : the batch is malformed, or does not continue what is stored; nothing has changed.
        NoSlotError : not enough free cells; nothing has changed.
        ComputeCancelled, KeyboardInterrupt : `cancel` or Ctrl-C. Ctrl-C cancels also where the program's own handler
            for it returns.
        ComputeError, AllocError, UnsupportedOpError : a backend failed, or cannot turn or copy stored rows.
        UseAfterCloseError, ConcurrentUseError : closed, or in use: by another thread, or by what a signal handler of
            this one interrupts.
        """
        with self._decoding():
            self._decode(batch)

    def decode_tapped(self, batch: Batch | BatchBuilder) -> dict[int, F32Array]:
        """Decode a batch, and return what each layer's attention gave: to find where two computations part.

        Slower than `decode`, and the first call takes more scratch memory, which the context keeps.

        Returns
        -------
        Layer → (n_tokens, n_head * n_embd_head_v) float32, rows in the order of the batch; of layers that attend.

        Raises
        ------
        As `decode`. AllocError too where that memory cannot be had; nothing has changed then.
        """
        with self._decoding():
            if not self._is_tapped:
                self._make_room_for_taps()
            self._tapped, self._compute.is_tapped = {}, True
            try:
                self._decode(batch)
                return self._tapped
            finally:
                self._tapped, self._compute.is_tapped = None, False

    def cancel(self) -> None:
        """Stop the `decode` that runs in another thread, soon. Does nothing if none runs."""
        with self._cancel_lock:
            if self._decodes:
                self._cancel.set()

    @property
    def logits(self) -> F32Array:
        """Logits of the last `decode`, (n_outputs, n_vocab) float32, rows in batch order, read-only."""
        self._require_open()
        if self._logits is None:
            raise ParamError("logits: nothing has been decoded yet, or the last decode failed")
        return self._logits

    def logits_at(self, i: int) -> F32Array:
        """Return the logits of token `i` of the last batch, (n_vocab,); a negative `i` counts outputs from the end.

        Raises
        ------
        ParamError : the token was not an output, or there is no such token.
        """
        rows = self.logits
        if isinstance(i, bool) or not isinstance(i, (int, np.integer)) or not -len(rows) <= i < len(self._wanted):
            raise ParamError(f"i={i!r} must lie in -{len(rows)}..{len(self._wanted) - 1}")
        if i >= 0 and not self._wanted[i]:
            raise ParamError(f"i={i}: the token was not an output; ask for it with `logits` of the batch")
        row: F32Array = rows[i if i < 0 else np.count_nonzero(self._wanted[:i])]
        return row

    @property
    def attention_path(self) -> AttentionInUse:
        """Which path attention takes for single tokens and for prompts, in each kind of layer, and why."""
        self._require_open()
        return self._choice.in_use(self.memory.paths(self.attention))

    @property
    def n_ctx(self) -> int:
        """Tokens that all sequences together can hold."""
        return self.params.n_ctx

    @property
    def n_ctx_seq(self) -> int:
        """Tokens that one sequence can hold."""
        return self.params.n_ctx_seq

    @property
    def n_batch(self) -> int:
        """Most tokens of one batch."""
        return self.params.n_batch

    @property
    def n_reused(self) -> int:
        """Ubatches that ran on the graph of the one before."""
        return self._compute.n_reused

    @property
    def compute_nbytes(self) -> int:
        """Bytes of scratch memory for computing."""
        return self._compute.nbytes

    def trace(self, path: str | bytes | os.PathLike[Any], tokens: bool = True) -> Trace:
        """Record every batch and verb from now on into a file that ``pykv replay`` runs again.

        Parameters
        ----------
        path : the file; replaced if there is one.
        tokens : also record token ids, and a few logits of each row. Without them the file does not tell what was
            said; a replay takes other tokens, so that it shows what positions, cells and masks do, but neither which
            tokens were alike, nor the logits. Embeddings are never recorded, only their width.

        Returns
        -------
        The recording; it ends when it or the context is closed, and early at ``memory.restore``, which the file notes.

        Raises
        ------
        ParamError : no path, or `tokens` is no bool.
        TraceError : the memory holds something already: start before the first decode, or `clear` the memory first.
            Or the file cannot be written, or another trace writes it.
        ConcurrentUseError : another thread is decoding, or using the memory.
        """
        from pykv.runtime.trace import Trace

        self._require_open()
        return Trace(self, path, tokens=tokens)

    def observe(self, layers: Sequence[int] | None = None, what: AttentionMass | None = None) -> Observer:
        """Note from now on how much attention each cell receives, in every ubatch that is decoded.

        Decoding computes the same as without, to the bit. For few tokens at once, as in generation, the fused path
        keeps what it computes anyway, which costs little. For a prompt the weights of all tokens that count are there
        with "matmul" only; beside the other paths they are computed once more. Memory for the longest prompt is had at
        once, and given back when the observer is closed: of `n_ubatch` tokens, unless `what.last` asks for fewer, times
        `n_ctx` cells times the query heads, 4 bytes each, once or twice. Where only generation is to be observed,
        ``what=AttentionMass(last=1)`` takes next to nothing.

        Several observers may be open at once, such as one for sums and one for the largest shares.

        Parameters
        ----------
        layers : the layers to observe; None = all that have attention.
        what : which part of their attention; None = all of it, in one sum for each cell.

        Returns
        -------
        What to iterate over for observations; it ends when it or the context is closed.

        Raises
        ------
        ParamError : no such layer or head, or no layer has attention.
        AllocError : the memory for it cannot be had; nothing has changed.
        ConcurrentUseError : the context is decoding, or its memory in use otherwise.
        """
        self._require_open()
        with self.memory.guard:
            observer = Observer(self, layers, what, self._unobserve)
            try:
                self._reserve((*self._observers, observer))
            except BaseException:
                self._reserve(self._observers)
                raise
            self._observers += (observer,)
        return observer

    def close(self) -> None:
        """Free the memory and the scheduler, end all traces and observers. Safe to call twice.

        Raises
        ------
        ConcurrentUseError : another thread is decoding, or using the memory; nothing is closed.
        """
        if self._closed:
            return
        if self._decodes:
            raise ConcurrentUseError("the context is decoding; cancel() it before close()")
        with self.memory.guard:  # refuses while another thread is inside, before anything is closed
            self._closed = True
            for trace in tuple(self.traces):
                trace.end()
            for observer in self._observers:
                observer.end()
            self._compute.close()
            for backend in self._backends:
                backend.close()
            self.memory.release()

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # mechanism

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """Be the one who decodes."""
        if self._decodes:
            raise ConcurrentUseError("the context is decoding already; one thread at a time, and one decode")
        with self.memory.guard:
            self._require_open()
            self._decodes = True
            try:
                yield
            finally:
                with self._cancel_lock:  # a cancel() until here was for this decode, not for the next
                    self._cancel.clear()
                    self._decodes = False

    def _decode(self, batch: Batch | BatchBuilder) -> None:
        """Decode, and tell the traces what came of it where there are any."""
        if self.traces:
            self._decode_heard(batch)
        else:
            self._decode_silently(batch)

    def _decode_silently(self, batch: Batch | BatchBuilder) -> None:
        if not isinstance(batch, (Batch, BatchBuilder)):
            raise ParamError(f"batch={batch!r} must be a pykv.Batch")
        if len(batch) > self.n_ctx:
            raise NoSlotError(f"no room for {len(batch)} tokens: the cache has {self.n_ctx} cells in all")
        valid = validate(batch, self._limits, self.memory)
        if valid.n_outputs > self.params.n_outputs_max:
            raise ParamError(f"logits: {valid.n_outputs} rows asked for, n_outputs_max={self.params.n_outputs_max}")
        plan = self._plan(valid)
        self.embedded |= valid.token is None
        self._compute.lay_out(valid.n_tokens)
        outputs = Outputs(self._new_rows(valid.n_outputs))
        self._logits = None
        for i, watched in enumerate(watched_by(self._observers, plan.ubatches)):
            self._step(plan, i, outputs, watched)
        self._logits, self._wanted = outputs.in_batch_order(), valid.output

    def _decode_heard(self, batch: Batch | BatchBuilder) -> None:
        from pykv.runtime.trace.heard_batch import HeardBatch

        heard = HeardBatch.of(batch, self._limits, self.memory)
        result: object = "ok"
        try:
            self._decode_silently(batch)
        except BaseException as error:
            result = error
            raise
        finally:
            if heard is not None:
                for trace in tuple(self.traces):
                    trace.hear_decode(heard, result, self._logits if result == "ok" else None)

    def _plan(self, valid: ValidBatch) -> MemoryContext:
        plan = self.memory.init_batch(valid, self.params.n_ubatch)
        if plan is None:
            raise NoSlotError(f"no room for {valid.n_tokens} tokens: {self.memory.used}")
        return plan

    def _step(self, plan: MemoryContext, i: int, outputs: Outputs, watched: Sequence[Watched]) -> None:
        """Apply and compute one ubatch; if that fails, take its tokens out again."""
        ubatch = plan.ubatches[i]
        if self._cancel:
            raise ComputeCancelled(f"cancelled before ubatch {i + 1} of {len(plan.ubatches)}")
        shape = plan.apply(i)
        try:
            room = outputs.room_for(ubatch.batch_idxs[ubatch.output])
            masses = self._compute.run(shape, plan.slots[i], ubatch, room, watched)
            if self._tapped is not None:
                self._note_taps(ubatch, sum(len(one.batch_idxs) for one in plan.ubatches))
        except BaseException:
            self._compute.drop_graph()
            plan.retract(i, touched=self._compute.has_begun)
            raise
        if watched:  # what goes wrong in hearing takes nothing out: the ubatch has been computed whole
            seen = SeenCells(self.memory, plan.slots[i], ubatch)
            for one, mass in zip(watched, masses, strict=True):
                one.observer.hear(one.chosen, seen, mass)

    def _new_rows(self, n: int) -> F32Array:
        """Return memory for the logits of a batch, (n, n_vocab)."""
        return np.empty((n, self.model.hparams.n_vocab), np.float32)

    def _make_room_for_taps(self) -> None:
        """Hold compute memory for graphs that show what attention gives, or leave all as it is."""
        self._is_tapped = True
        try:
            self._reserve(self._observers)
        except BaseException:
            self._is_tapped = False
            self._reserve(self._observers)
            raise

    def _note_taps(self, ubatch: UBatch, n_tokens: int) -> None:
        """Put what attention gave to a ubatch's tokens where they stand in the batch."""
        assert self._tapped is not None, "asked for"
        for il, rows in self._compute.tapped().items():
            whole = self._tapped.setdefault(il, np.empty((n_tokens, rows.shape[1]), np.float32))
            whole[ubatch.batch_idxs] = rows

    def _make_compute(self) -> Compute:
        params, model = self.params, self.model
        devices = [d for d in model.placement.devices if d.kind != "cpu"] + [cpu_device()]
        self._backends = [Backend(device, params.n_threads, self._cancel) for device in devices]
        n_rs_seq = params.n_rs_seq if has_states(self.memory.spec) else 0
        return Compute(model.architecture, self.memory, self.attention, self._backends, model.owners, n_rs_seq)

    def _reserve(self, observers: Sequence[Observer]) -> None:
        """Allocate memory for the largest ubatch under these observers, and drop the graph at hand."""
        n_tokens, n_outputs = self.params.widest_ubatch
        n_seqs = self.params.n_seq_max if self.params.kv_unified else 1
        watches = [observer.widest(n_tokens, n_seqs) for observer in observers]
        self._compute.reserve(n_tokens, n_outputs, watches, is_tapped=self._is_tapped)

    def _unobserve(self, observer: Observer) -> None:
        with self.memory.guard:
            observer.end()
            self._observers = tuple(one for one in self._observers if one is not observer)
            self._reserve(self._observers)

    def _require_open(self) -> None:
        if self._closed:
            raise UseAfterCloseError("the context is closed")
        if self.model.closed:
            raise UseAfterCloseError("the model of this context is closed")
