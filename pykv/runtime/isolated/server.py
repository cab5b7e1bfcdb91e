"""What runs in the process of a model: it loads the model, makes contexts, and does what is asked of them."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import reduce
from typing import Any

import numpy as np

from pykv.cells import CellsView, RecurrentView
from pykv.ggml import Device, connect_rpc
from pykv.isolation import Ref, Service
from pykv.memory import AttentionPlan
from pykv.memory.snapshot import Snapshot
from pykv.runtime.context import Context
from pykv.runtime.isolated.messages import ContextFacts, DeviceName, PlannedPart, WireBatch
from pykv.runtime.isolated.where import NamedPlacing
from pykv.runtime.model import Model
from pykv.runtime.observe import Observation, Observer
from pykv.runtime.params import ContextParams
from pykv.runtime.planning import Plan, plan
from pykv.runtime.trace import Trace
from pykv.typing import F32Array

_STAY = (Context, Snapshot, Observer, Trace, CellsView, RecurrentView)
"""What has a life of its own, and is known to the program by a number."""


def _device(named: str | DeviceName) -> str | Device:
    return named if isinstance(named, str) else connect_rpc(named.endpoint)[named.index]


def main(talk: int, control: int, region: int, parent: int) -> None:
    """Serve the program at the other end of two sockets; never returns."""
    Server(talk, control, region, parent).run()


class Server:
    """One model, its contexts, and all that they have given out."""

    def __init__(self, talk: int, control: int, region: int, parent: int) -> None:
        self._objects: dict[int, Any] = {}
        self._n_given = 0
        self._model: Model | None = None
        self._service = Service(talk, control, region, parent, lambda ref: self._objects[ref.number])

    def run(self) -> None:
        """Serve; never returns."""
        self._service.run(self.handle, lambda number: self._objects.pop(number, None))

    def handle(self, what: str, *args: Any) -> Any:
        """Do what is asked: one of the methods from `load` to `take`."""
        return getattr(self, what)(*args)

    def load(
        self,
        path: str | bytes,
        placing: NamedPlacing,
        repack: bool,
        has_progress: bool,
    ) -> Any:
        """Load the model; returns its placement."""
        devices, n_gpu_layers, tensor_split, overrides = placing
        self._model = Model.load(
            path,
            [_device(one) for one in devices],
            n_gpu_layers,
            tensor_split,
            {what: _device(one) for what, one in overrides.items()} if isinstance(overrides, dict) else overrides,
            progress=self._service.call_back if has_progress else None,
            repack=repack,
            isolate=False,
        )
        return self._model.placement

    def plan(self, path: str, placing: NamedPlacing, repack: bool, params: ContextParams) -> Plan:
        """Return what a model and a context would take."""
        devices, n_gpu_layers, tensor_split, overrides = placing
        return plan(
            path,
            [_device(one) for one in devices],
            n_gpu_layers,
            tensor_split,
            {what: _device(one) for what, one in overrides.items()} if isinstance(overrides, dict) else overrides,
            repack=repack,
            isolate=False,
            **{name: getattr(params, name) for name in ContextParams.__dataclass_fields__},
        )

    def memory_plan(self, params: dict[str, Any]) -> dict[str, PlannedPart]:
        """Return what a context would take, part by part."""
        assert self._model is not None, "loaded first"
        return {
            name: PlannedPart(part.nbytes, dict(part.nbytes_per_buffer_type), dict(part.nbytes_per_layer))
            for name, part in self._model.memory_plan(**params).parts.items()
        }

    def context(self, params: ContextParams, attention: AttentionPlan | None) -> tuple[Ref, ContextFacts]:
        """Make a context."""
        assert self._model is not None, "loaded first"
        made = ServedContext(self._model, params, attention, self._service)
        memory = made.memory
        sizes = memory.n_cells, memory.n_stream, memory.n_seq_max
        facts = ContextFacts(made.params, made.attention, memory.spec, *sizes)
        return self._given(made), facts

    def decode(self, number: int, *parts: Any) -> tuple[int, bytes]:
        """Decode a batch; the logits lie in the region afterwards. Returns how many rows, and which tokens have one."""
        context: ServedContext = self._objects[number]
        self._service.stoppable(context.stop)
        context.decode(WireBatch(*parts).batch())
        return context.leave_rows()

    def decode_tapped(self, number: int, *parts: Any) -> tuple[F32Array, bytes, dict[int, F32Array]]:
        """Decode; returns the logits, which tokens have some, and what each layer's attention gave.

        All of it in the reply, whose large arrays would take the place of logits in the region.
        """
        context: ServedContext = self._objects[number]
        self._service.stoppable(context.stop)
        tapped = context.decode_tapped(WireBatch(*parts).batch())
        rows = np.array(context.logits)
        return rows, context.leave_rows()[1], tapped

    def call(self, number: int, name: str, args: tuple[Any, ...], more: dict[str, Any], folder: str | None) -> Any:
        """Call a method of an object, or of what it has: "memory.seq_rm"."""
        if folder is not None:
            with suppress(OSError):  # gone, or not to be entered: then relative paths mean what they meant at first
                os.chdir(folder)
        found = self._objects[number]
        if isinstance(found, ServedContext):
            self._service.stoppable(found.stop)
        return self._given(reduce(getattr, name.split("."), found)(*args, **more))

    def get(self, number: int, name: str) -> Any:
        """Return an attribute of an object, or of what it has."""
        return self._given(reduce(getattr, name.split("."), self._objects[number]))

    def take(self, number: int) -> list[Observation]:
        """Return what an observer has noted, and forget it."""
        return list(self._objects[number])

    def _given(self, value: Any) -> Any:
        """Return what is told of a value: itself, or a number if it stays here."""
        if not isinstance(value, _STAY):
            return value
        self._n_given += 1
        self._objects[self._n_given] = value
        return Ref(self._n_given)


class ServedContext(Context):
    """A context whose logits are written where the program reads them."""

    def __init__(self, model: Model, params: ContextParams, attention: AttentionPlan | None, service: Service) -> None:
        self._service = service
        super().__init__(model, params, attention)

    def stop(self, on: bool) -> None:
        """Stop the decode or verb that runs; with False, let the next one run."""
        if on:
            self._cancel.set()
        else:
            self._cancel.clear()

    def leave_rows(self) -> tuple[int, bytes]:
        """Let the logits lie at the start of the region; returns how many rows, and which tokens have one."""
        rows, there = self.logits, self._new_rows(len(self.logits))
        if not np.may_share_memory(rows, there):  # they were put in order
            there[...] = rows
        return len(rows), self._wanted.tobytes()

    def _new_rows(self, n: int) -> F32Array:
        n_vocab = self.model.hparams.n_vocab
        rows: F32Array = np.frombuffer(self._service.region.view(4 * n * n_vocab), np.float32).reshape(n, n_vocab)
        return rows
