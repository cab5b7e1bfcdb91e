"""KVContext: the plan for one batch in a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pykv.batch import UBatch
from pykv.cells import SlotInfo
from pykv.errors import ParamError
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
        self._n_applied, self._n_changes = 0, cache.streams.n_changes

    def apply(self, i: int) -> KVShape:
        """Write the bookkeeping of ubatch `i`; mutates the cache's cells.

        Returns
        -------
        What the graph must look like to read the cache now.

        Raises
        ------
        ParamError : not the next ubatch, or the cells have changed since they were found; nothing has changed.
        """
        if i != self._n_applied:
            raise ParamError(f"i={i}: ubatches are applied once each and in order; {self._n_applied} is next")
        ubatch, slot = self.ubatches[i], self.slots[i]
        self._check_current()
        self.cache.apply(slot, ubatch)
        self._n_applied, self._n_changes = i + 1, self.cache.streams.n_changes
        return KVShape(
            n_tokens=ubatch.n_tokens,
            n_kv=self.cache.streams.n_kv(slot),
            s0=slot.s0,
            n_stream=slot.s1 - slot.s0 + 1,
        )

    def retract(self, i: int, *, touched: bool = True) -> None:
        """Take ubatch `i`, applied last, out of the cache again, `touched` or not.

        Exactly its cells go, for all their sequences.
        """
        # differs from llama.cpp: there, every later position of a token's first sequence goes, and other owners keep
        # cells without a computed key
        if self.cache.other is None:
            self.cache.streams.retract(self.slots[i])

    def _check_current(self) -> None:
        """Refuse a plan that something has overtaken: its cells may be taken, its positions may have moved."""
        cache = self.cache
        if cache.other is None and cache.streams.n_changes != self._n_changes:
            raise ParamError("plan: the cells have changed since init_batch; plan the batch anew")
