"""Every kind of memory, small, and what each is meant to do otherwise than a plain cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from support.iswa_memory import FULL, LAYERS, SWA

from pykv.cells import SwaType, Window
from pykv.ggml import RopeParams
from pykv.memory import (
    HybridMemory,
    ISWACache,
    KVCache,
    KVSettings,
    LayerSpec,
    Memory,
    MemorySettings,
    MemorySpec,
    RecurrentMemory,
    StateSpec,
    make_memory,
)
from pykv.memory.twin import TwinCache

N_SEQ, N_CELLS, N_UBATCH = 3, 64, 8

Maker = Callable[[MemorySpec, MemorySettings], Memory]


class Lender(KVCache):
    """A cache whose cells a draft sees: of the draft's two layers one reads this cache's last, one is its own."""

    def __init__(self, spec: MemorySpec, settings: KVSettings) -> None:
        super().__init__(spec, settings, n_threads=1)
        own = replace(spec, layers=(spec.layers[-1],) * 2)
        self.draft = KVCache(own, settings, other=self, share={0: len(spec.layers) - 1}, n_threads=1)

    def release(self) -> None:
        self.draft.release()
        super().release()


def of_layers(spec: MemorySpec, settings: MemorySettings) -> Memory:
    """Return what a context would make."""
    return make_memory(spec, settings, n_threads=1)


def twin(spec: MemorySpec, settings: MemorySettings) -> TwinCache:
    """Return a cache with an index of one key of 6 elements a layer."""
    index = replace(spec, layers=(LayerSpec(1, 6, 6, k_only=True),) * 2)
    return TwinCache(spec, index, settings.kv, n_threads=1)


@dataclass(frozen=True)
class Kind:
    """One kind of memory.

    Attributes
    ----------
    cls : what makes it.
    row : bytes that one token takes, over all layers; None where parts differ in how many tokens they hold.
    why_fixed : the reason for which every move of positions is refused; None = positions can be moved.
    is_lent : the cells are another cache's: verbs are heard, and leave them alone.
    """

    cls: type
    spec: MemorySpec
    row: int | None = None
    make: Maker = of_layers
    why_fixed: str | None = None
    is_lent: bool = False


STATE = LayerSpec.recurrent(StateSpec(4, 6))
WINDOW = Window(4, SwaType.STANDARD)
LATENT = LayerSpec(1, 12, 8, RopeParams(4), rope_at=8, k_only=True)
PLAIN = MemorySpec((FULL, FULL))
AXES = {"n_pos_per_embd": 4}
FIXED = "multi_dim_positions"

BY_NAME: dict[str, Kind] = {
    "kv": Kind(KVCache, PLAIN, 2 * 24),
    "window everywhere": Kind(KVCache, MemorySpec((FULL, FULL), WINDOW), 2 * 24),
    "iswa": Kind(ISWACache, MemorySpec(LAYERS, WINDOW)),
    "recurrent": Kind(RecurrentMemory, MemorySpec((STATE, STATE))),
    "hybrid": Kind(HybridMemory, MemorySpec((FULL, STATE))),
    "hybrid iswa": Kind(HybridMemory, MemorySpec((FULL, STATE, SWA), WINDOW)),
    "twin": Kind(TwinCache, PLAIN, 2 * (24 + 12), twin),
    "target": Kind(Lender, PLAIN, 2 * 24, lambda spec, settings: Lender(spec, settings.kv)),
    "draft": Kind(KVCache, PLAIN, 24, lambda spec, settings: Lender(spec, settings.kv).draft, is_lent=True),
    "reuse": Kind(KVCache, MemorySpec((FULL, FULL, FULL), reuse={2: 0}), 2 * 24),
    "iswa reuse": Kind(ISWACache, MemorySpec((*LAYERS, SWA, FULL), WINDOW, reuse={4: 2, 5: 3})),
    "k only": Kind(KVCache, MemorySpec((LATENT, LATENT)), 2 * 24),
    "m-rope": Kind(KVCache, MemorySpec((FULL, FULL), **AXES), 2 * 24, why_fixed=FIXED),
    "iswa m-rope": Kind(ISWACache, MemorySpec(LAYERS, WINDOW, **AXES), why_fixed=FIXED),
    "hybrid m-rope": Kind(HybridMemory, MemorySpec((FULL, STATE), **AXES), why_fixed=FIXED),
    "embedded positions": Kind(
        KVCache, MemorySpec((FULL, FULL), absolute_positions=True), 2 * 24, why_fixed="absolute_positions"
    ),
}
"""K and V of a token of `FULL` take 8 + 4 elements of f16, those of `LATENT` 12; a twin's index keeps 6 beside them."""

Setting = tuple[str, bool, int]
"""Kind, whether all sequences share one stream, and states that are kept for going back."""

SETTINGS: list[Setting] = [
    *((kind, unified, 0) for kind in BY_NAME for unified in (True, False) if kind != "recurrent"),
    *((kind, True, n_rs_seq) for kind in BY_NAME for n_rs_seq in (0, 3) if kind == "recurrent"),
    *((kind, True, 3) for kind in BY_NAME if kind.startswith("hybrid")),
]


def name_of(setting: Setting) -> str:
    """Return a setting in words."""
    kind, unified, n_rs_seq = setting
    return f"{kind}-{'unified' if unified else 'streams'}-rs{n_rs_seq}"


@contextmanager
def opened(setting: Setting) -> Iterator[Memory]:
    """Make a memory, and free it afterwards with the cache whose cells it sees."""
    name, unified, n_rs_seq = setting
    kind, kv = BY_NAME[name], KVSettings(N_CELLS, n_seq_max=N_SEQ, unified=unified)
    memory = kind.make(kind.spec, MemorySettings(kv, N_UBATCH, n_rs_seq=n_rs_seq))
    try:
        assert isinstance(memory, kind.cls)
        yield memory
    finally:
        (lender_of(memory) or memory).close()


def lender_of(memory: Memory) -> KVCache | None:
    """Return the cache whose cells a memory sees, None if they are its own."""
    return getattr(memory, "other", None)


def leaves(memory: Memory) -> list[Memory]:
    """Return the memories that do the work: parts, and both sides of a loan."""
    if isinstance(memory, Lender):
        return [memory, memory.draft]
    if lender := lender_of(memory):
        return [memory, lender]
    parts = getattr(memory, "parts", None)
    return [memory] if parts is None else [leaf for part in parts for leaf in leaves(part)]


def has_state(memory: Memory) -> bool:
    """Tell whether some layers have recurrent states."""
    return any(isinstance(leaf, RecurrentMemory) for leaf in leaves(memory))
