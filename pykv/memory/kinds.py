"""Which kind of memory a model's layers need, what it takes, and making it. Source: spec params.md section 6.

K and V in every layer      KVCache, or ISWACache where some layers have a window
a state in every layer      RecurrentMemory
both                        HybridMemory, of the two above
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pykv.cells import SwaType
from pykv.errors import ParamError
from pykv.ggml import BufferType
from pykv.memory.base import Memory
from pykv.memory.guard import Guard
from pykv.memory.hybrid import HybridMemory
from pykv.memory.iswa import ISWACache
from pykv.memory.kv_cache import KVCache
from pykv.memory.kv_plan import KVPlan
from pykv.memory.kv_settings import KVSettings
from pykv.memory.recurrent import RecurrentMemory
from pykv.memory.spec import MemorySpec
from pykv.memory.state_plan import StatePlan

Place = Callable[[int], BufferType]
"""Layer → the buffer type it goes to."""


@dataclass(frozen=True)
class MemorySettings:
    """How much a memory of any kind stores, and how.

    Attributes
    ----------
    kv : of the layers with K and V; `n_cells` and `n_seq_max` hold for all.
    n_ubatch : tokens that are computed at once, at most.
    swa_full : keep all tokens in layers with a window too.
    n_rs_seq : states that are kept of each sequence beside the latest, for taking back so many tokens.
    """

    kv: KVSettings
    n_ubatch: int
    swa_full: bool = False
    n_rs_seq: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """What a memory takes. Nothing is allocated.

    Attributes
    ----------
    parts : "kv", or "base" and "swa"; "states".
    """

    parts: dict[str, KVPlan | StatePlan]

    @property
    def nbytes(self) -> int:
        """Bytes that allocation takes in all."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def nbytes_per_buffer_type(self) -> dict[str, int]:
        """Bytes that allocation takes in each buffer type, alignment included."""
        return dict(sum((Counter(part.nbytes_per_buffer_type) for part in self.parts.values()), Counter[str]()))

    @property
    def nbytes_per_layer(self) -> dict[int, int]:
        """Bytes of each layer over all streams, without alignment."""
        return dict(sum((Counter(part.nbytes_per_layer) for part in self.parts.values()), Counter[int]()))


def is_windowed(spec: MemorySpec) -> bool:
    """Return whether some layers have a window that others have not."""
    return spec.window.type is not SwaType.NONE and any(layer.is_swa for layer in spec.layers)


def attends(spec: MemorySpec) -> bool:
    """Return whether some layers have K and V."""
    return any(layer.n_head_kv for layer in spec.layers)


def has_states(spec: MemorySpec) -> bool:
    """Return whether some layers have a recurrent state."""
    return any(layer.state is not None for layer in spec.layers)


def memory_plan(spec: MemorySpec, settings: MemorySettings, place: Place | None = None) -> MemoryPlan:
    """Return what a memory of these layers takes.

    Raises
    ------
    ParamError : settings that the layers cannot honour.
    """
    parts: dict[str, KVPlan | StatePlan] = {}
    if is_windowed(spec):
        n_ubatch, swa_full = settings.n_ubatch, settings.swa_full
        base, swa = ISWACache.plan(spec, settings.kv, n_ubatch=n_ubatch, swa_full=swa_full, place=place)
        parts |= {"base": base, "swa": swa}
    elif attends(spec):
        parts["kv"] = KVPlan(spec, settings.kv, place)
    if has_states(spec):
        _check_snapshots(settings)
        parts["states"] = StatePlan(spec, settings.kv.n_seq_max, settings.n_rs_seq, place)
    return MemoryPlan(parts)


def make_memory(
    spec: MemorySpec, settings: MemorySettings, place: Place | None = None, n_threads: int | None = None
) -> Memory:
    """Return an empty memory of the kind that the layers need.

    Raises
    ------
    ParamError : settings that the layers cannot honour.
    AllocError : more bytes than a device has; nothing stays allocated.
    """
    guard = Guard()
    if not has_states(spec):
        return _attention(spec, settings, place, n_threads, guard)
    _check_snapshots(settings)
    recurrent = RecurrentMemory(
        spec,
        settings.kv.n_seq_max,
        settings.n_rs_seq,
        place=place,
        guard=guard,
        reference_moves=settings.kv.reference_moves,
    )
    if not attends(spec):
        return recurrent
    try:
        return HybridMemory(spec, _attention(spec, settings, place, n_threads, guard), recurrent)
    except BaseException:
        recurrent.close()
        raise


def _check_snapshots(settings: MemorySettings) -> None:
    """Refuse to keep so many states that the tokens between them do not fit into one ubatch."""
    # differs from llama.cpp: an error here, where it aborts in the first decode
    most = max(0, settings.n_ubatch - 2)
    if settings.n_rs_seq > most:
        raise ParamError(f"n_rs_seq={settings.n_rs_seq} must be at most {most}, with n_ubatch={settings.n_ubatch}")


def _attention(
    spec: MemorySpec, settings: MemorySettings, place: Place | None, n_threads: int | None, guard: Guard
) -> KVCache | ISWACache:
    """Return the part that holds K and V."""
    if not is_windowed(spec):
        return KVCache(spec, settings.kv, place=place, n_threads=n_threads, guard=guard)
    return ISWACache(
        spec,
        settings.kv,
        n_ubatch=settings.n_ubatch,
        swa_full=settings.swa_full,
        place=place,
        n_threads=n_threads,
        guard=guard,
    )
