"""pykv: a KV memory for GGUF models. Bookkeeping in numpy, tensors in ggml.

Names are loaded when first used, so that ``import pykv`` costs nothing and the pure packages
(``pykv.batch``, ``pykv.cells``) work where the extension is not built.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pykv.batch import Batch
    from pykv.errors import PykvError
    from pykv.memory import AttentionMass, KVCache, KVSettings, LayerSpec, MemorySpec
    from pykv.runtime import Context, Model
    from pykv.runtime.planning import plan
    from pykv.runtime.sampling import Sampler, SamplingParams
    from pykv.runtime.states import open_state

__version__ = "0.1.0"

_HOMES = {
    "AttentionMass": "pykv.memory",
    "Batch": "pykv.batch",
    "Context": "pykv.runtime",
    "KVCache": "pykv.memory",
    "KVSettings": "pykv.memory",
    "LayerSpec": "pykv.memory",
    "MemorySpec": "pykv.memory",
    "Model": "pykv.runtime",
    "PykvError": "pykv.errors",
    "Sampler": "pykv.runtime.sampling",
    "SamplingParams": "pykv.runtime.sampling",
    "open_state": "pykv.runtime.states",
    "plan": "pykv.runtime.planning",
}

_MODULES = ("parity", "quality")
"""Packages that may be used without importing them by name."""

__all__ = [
    "AttentionMass",
    "Batch",
    "Context",
    "KVCache",
    "KVSettings",
    "LayerSpec",
    "MemorySpec",
    "Model",
    "PykvError",
    "Sampler",
    "SamplingParams",
    "__version__",
    "open_state",
    "parity",
    "plan",
    "quality",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None and name not in _MODULES:
        raise AttributeError(f"module 'pykv' has no attribute {name!r}")
    value = importlib.import_module(f"pykv.{name}") if home is None else getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
