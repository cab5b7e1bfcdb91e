"""The devices that a session of tests runs on: those that `pytest --device` names, the CPU unless it does.

Memories that no test places, models that no test gives devices, and the graphs of all scenes go there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from pykv.ggml import Backend, BufferType, Device, Sched, cpu_device, find_device
from pykv.ggml.owner import Owner

_names: tuple[str, ...] = ("CPU",)


@contextmanager
def running_on(names: Sequence[str]) -> Iterator[None]:
    """Run on the devices of these names; several take the layers by turns."""
    global _names
    from pykv.memory import memory_buffers
    from pykv.runtime import Model

    for name in names:
        find_device(name)
    load = Model.load.__func__  # type: ignore[attr-defined]

    def load_there(cls: type[Model], path: Any, devices: Any = None, *rest: Any, **named: Any) -> Model:
        return load(cls, path, list(names) if devices is None else devices, *rest, **named)

    before, _names = _names, tuple(names)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory_buffers, "unplaced", home)
            patch.setattr(Model, "load", classmethod(load_there))
            yield
    finally:
        _names = before


def chosen() -> tuple[Device, ...]:
    """Return the devices in use."""
    return tuple(map(find_device, _names))


def home(il: int) -> BufferType:
    """Return the memory that a layer goes to."""
    return chosen()[il % len(_names)].buffer_type


@contextmanager
def backends(n_threads: int = 1) -> Iterator[list[Backend]]:
    """Open the devices in use, and the CPU behind them, as a scheduler wants it."""
    with ExitStack() as stack:
        devices = dict.fromkeys((*(one for one in chosen() if one.kind != "cpu"), cpu_device()))
        yield [stack.enter_context(Backend(device, n_threads)) for device in devices]


@contextmanager
def sched(graph_size: int, stands_on: Sequence[Owner] = ()) -> Iterator[Sched]:
    """Open a scheduler over the devices in use, for graphs of that size."""
    with backends() as opened, Sched(opened, graph_size, stands_on) as one:
        yield one
