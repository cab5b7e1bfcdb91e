"""The two sides of a replay: a context that runs the steps again, and the recording of what they came to once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from pykv.batch import Batch
from pykv.cells import NO_WINDOW, CellsView, RecurrentView, SwaType, Window
from pykv.errors import ComputeCancelled
from pykv.memory import HybridMemory, ISWACache, Memory
from pykv.memory.kinds import is_windowed
from pykv.models.stand_in import STAND_IN
from pykv.runtime.context import Context
from pykv.runtime.trace.fingerprint import Fingerprint
from pykv.runtime.trace.header import TraceHeader
from pykv.runtime.trace.held import Held, Ranges, held, ranges
from pykv.runtime.trace.outcome import Outcome
from pykv.runtime.trace.step import OK, DecodeStep, Step, VerbStep
from pykv.typing import F32Array, I32Array, I64Array

NO_TOKEN = -1
"""Stands for every token that the recorded vocabulary lacked: it is refused everywhere."""


Cells = dict[str, CellsView | RecurrentView]
"""Name of a part, of a stream, or of both → its cells; "" where there is only one."""


class Side(Protocol):
    """What is compared after each step."""

    def do(self, step: Step) -> Outcome:
        """Run a step."""
        ...

    def ranges(self) -> Ranges:
        """Return the ends of all sequences."""
        ...

    def fingerprints(self) -> tuple[Fingerprint, ...]:
        """Return the logits of the last step in short."""
        ...

    def held(self, seqs: Iterable[int]) -> Mapping[int, Held]:
        """Return what sequences hold after the last step, as far as it is known."""
        ...


class Recording:
    """What the trace says."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._step: Step | None = None

    def do(self, step: Step) -> Outcome:
        self._step = step
        return step.outcome

    def ranges(self) -> Ranges:
        assert self._step is not None, "a step has been run"
        return _seen_ends(self._step.ranges, self._window)

    def fingerprints(self) -> tuple[Fingerprint, ...]:
        return self._step.rows if isinstance(self._step, DecodeStep) else ()

    def held(self, seqs: Iterable[int]) -> Mapping[int, Held]:
        assert self._step is not None, "a step has been run"
        return {seq: self._step.held[seq] for seq in seqs if seq in self._step.held}


class LiveRun:
    """A context that runs the steps.

    Attributes
    ----------
    window : behind which it depends on the layout how much is left; none where other layers keep all.
    logits : rows of the last step if it was a decode that went well, else None.
    """

    def __init__(self, context: Context, header: TraceHeader, close: Callable[[], None]) -> None:
        self.context, self._header, self._close = context, header, close
        self.window = NO_WINDOW if is_windowed(context.memory.spec) else context.memory.spec.window
        self.logits: F32Array | None = None

    def do(self, step: Step) -> Outcome:
        self.logits = None
        try:
            if not isinstance(step, DecodeStep):
                return Outcome.of(self._do_verb(step))
            self.context.decode(self._batch(step))
        except ComputeCancelled:
            raise  # by whoever runs the replay
        except Exception as error:
            return Outcome.of(error)
        self.logits = self.context.logits
        return OK

    def ranges(self) -> Ranges:
        return _seen_ends(ranges(self.context.memory), self.window)

    def fingerprints(self) -> tuple[Fingerprint, ...]:
        return () if self.logits is None else tuple(map(Fingerprint.of, self.logits))

    def held(self, seqs: Iterable[int]) -> Mapping[int, Held]:
        return held(self.context.memory, seqs, has_tokens=True)

    @property
    def layers(self) -> list[int]:
        """The layers that have K and V."""
        return [il for il, layer in enumerate(self.context.memory.spec.layers) if layer.n_head_kv]

    @property
    def stateful(self) -> list[tuple[str, int]]:
        """What states are computed: recent inputs ("R") and states ("S"), each with its layer; none by a stand-in."""
        if self.context.model.hparams.architecture == STAND_IN:
            return []
        states = [(il, layer.state) for il, layer in enumerate(self.context.memory.spec.layers) if layer.state]
        return [(kind, il) for il, one in states for kind, n in (("R", one.n_embd_r), ("S", one.n_embd_s)) if n]

    def positions(self, seq: int, il: int | None = None) -> I32Array:
        """Return the positions of a sequence that a next token may look at in a layer, ascending, one for each cell."""
        return np.sort(self.context.memory.seen(seq, il)[0])

    def rows(self, kind: str, il: int, seq: int) -> tuple[I32Array, F32Array]:
        """Return the positions of a sequence, each once, and K ("K") or V there, (n, n_embd).

        After `seq_div` several tokens share a position, in an order that the layout decides: their rows are summed.
        """
        memory = self.context.memory
        positions, values = self.positions(seq, il), (memory.k if kind == "K" else memory.v)(il, seq)
        values = values.reshape(len(values), -1)[len(values) - len(positions) :]  # what a window hides comes first
        unique, starts = np.unique(positions, return_index=True)
        if len(unique) < len(positions):
            values = np.add.reduceat(values, starts, axis=0)
        return unique, values

    def state(self, kind: str, il: int, seq: int) -> tuple[I32Array, F32Array]:
        """Return the position (1,) behind which a sequence's state stands, and its "R" or "S" in a layer, (1, n)."""
        memory: Any = self.context.memory
        row = (memory.r if kind == "R" else memory.s)(il, seq)
        return np.array([memory.pos_max(seq)], np.int32), row[None]

    def cells(self) -> Cells:
        """Return the cells of each stream of each part, by name."""
        return dict(_cells(self.context.memory, []))

    def close(self) -> None:
        self.context.close()
        self._close()

    def _do_verb(self, step: VerbStep) -> object:
        memory, was_unified = self.context.memory, self._header.params.kv_unified
        if step.name == "seq_keep" and step.outcome.error is None and was_unified != self.context.params.kv_unified:
            # it empties the stream of its sequence: here that would be of others than it was there
            for seq in range(self.context.params.n_seq_max):
                if was_unified and seq != step.args[0]:
                    memory.seq_rm(seq)
            return None
        return getattr(memory, step.name)(*map(_argument, step.args))

    def _batch(self, step: DecodeStep) -> Batch:
        n = len(step.seqs_by_token)
        output = np.zeros(n, np.bool_)
        output[list(step.out)] = True
        seq_id: Any = [list(ids) for ids in step.seqs_by_token] if n else 0
        if step.embd and step.tokens is None:
            return Batch(None, step.pos, seq_id, output, embd=np.zeros((n, step.embd), np.float32))
        return Batch(self._tokens(step), step.pos, seq_id, output)

    def _tokens(self, step: DecodeStep) -> I64Array:
        """Return token ids that the model here has."""
        n_vocab = self.context.model.hparams.n_vocab
        if step.tokens is not None:
            tokens = np.array(step.tokens, np.int64)
            is_known = (tokens >= 0) & (tokens < self._header.model.n_vocab)
            return np.where(is_known, tokens % n_vocab, NO_TOKEN)
        n = len(step.seqs_by_token)
        pos = np.arange(n) if step.pos is None else np.array(step.pos, np.int64).reshape(-1, n)[0]
        first = np.array([ids[0] if ids else 0 for ids in step.seqs_by_token], np.int64)
        tokens = (pos * 7919 + first * 31 + 17) % n_vocab
        tokens[list(step.outside)] = NO_TOKEN
        return tokens


def _cells(memory: Memory, names: list[str]) -> Iterator[tuple[str, CellsView | RecurrentView]]:
    if isinstance(memory, HybridMemory):
        yield from _cells(memory.attention, names)
        yield from _cells(memory.recurrent, [*names, "states"])
    elif isinstance(memory, ISWACache):
        yield from _cells(memory.base, [*names, "without a window"])
        yield from _cells(memory.swa, [*names, "with a window"])
    else:
        for stream in range(memory.n_stream):
            yield ", ".join([*names, f"stream {stream}"] if memory.n_stream > 1 else names), memory.cells(stream)


def _argument(arg: object) -> object:
    """Return an argument of a verb; in place of what was no number, something else that is none."""
    return object() if isinstance(arg, dict) else arg


def _seen_ends(ends: Ranges, window: Window) -> Ranges:
    """Behind a window, how much is left over depends on the layout."""
    return ends if window.type is SwaType.NONE else {seq: (0, last) for seq, (_, last) in ends.items()}
