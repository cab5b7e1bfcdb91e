"""Guards, each as the raw call that ends the process and pykv's call of the same meaning, which raises."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from support.mortal import Mortal

from pykv.errors import ParamError, TensorError
from pykv.ggml import Arena, Tensor

DEADLY = {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}

# raw code, and pykv's call; `t` makes a tensor, `a` is the arena
Guard = tuple[str, Callable[[Arena, Callable[..., Tensor]], Any]]


def check_guard(mortal: Mortal, guard: Guard) -> None:
    """Show that the raw call dies, and that pykv's raises."""
    raw, guarded = guard
    death = mortal.run(raw)
    assert death.signal in DEADLY, f"the raw call lives: {death}"
    arena = Arena(64, 64)
    with pytest.raises((TensorError, ParamError)):
        guarded(arena, lambda dtype, *ne: arena.tensor(dtype, ne))
