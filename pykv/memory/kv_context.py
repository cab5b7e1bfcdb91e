"""KVContext: the plan for one batch in a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pykv.batch import UBatch
from pykv.cells import SlotInfo
from pykv.memory.kv_graph import KVShape

if TYPE_CHECKING:
    from pykv.memory.kv_cache import KVCache


class KVContext:
    """Ubatches of one batch and the slots that were found for them.

    Attributes
    ----------
    ubatches, slots : in order, one slot per ubatch.
    """

    def __init__(self, cache: KVCache, ubatches: Sequence[UBatch], slots: Sequence[SlotInfo]) -> None:
        self.cache, self.ubatches, self.slots = cache, ubatches, slots

    def apply(self, i: int) -> KVShape:
        """Write the bookkeeping of ubatch `i`; mutates the cache's cells.

        Returns
        -------
        What the graph must look like to read the cache now.
        """
        ubatch, slot = self.ubatches[i], self.slots[i]
        self.cache.apply(slot, ubatch)
        return KVShape(
            n_tokens=ubatch.n_tokens,
            n_kv=self.cache.streams.n_kv(slot),
            s0=slot.s0,
            n_stream=slot.s1 - slot.s0 + 1,
        )
