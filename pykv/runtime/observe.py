"""Observer: what attention did while a context decoded, as scores of cells.

One observation for each ubatch, cache and stream of which something counts: cells may change between two ubatches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pykv.batch import UBatch
from pykv.cells import SlotInfo
from pykv.cells.arguments import shown
from pykv.errors import ParamError
from pykv.ggml import Tensor
from pykv.memory import AttentionMass, MassWatch
from pykv.memory.attention_mass import indices
from pykv.memory.stored_kv import StoredKV
from pykv.typing import BoolArray, F32Array, I32Array

if TYPE_CHECKING:
    from pykv.runtime.context import Context


@dataclass(frozen=True, eq=False)
class Observation:
    """The attention that the cells of one stream received from the tokens of one ubatch.

    Attributes
    ----------
    stream : the stream.
    mass : layer → (n_kv,) float32, or (n_head_kv, n_kv) where asked for each KV head.
    pos : (n_kv,) position of each cell as it was in that decode, the new tokens included; -1 = empty.
    members : (n_seq, n_kv) whether a cell belonged to a sequence; n_seq is the largest id in use plus one.
    tokens : (k,) the tokens that count, as indices in the batch. A sum over all cells, heads and tokens is k times the
        number of heads.
    """

    stream: int
    mass: Mapping[int, F32Array]
    pos: I32Array
    members: BoolArray
    tokens: I32Array

    def owners(self, cell: int) -> tuple[int, ...]:
        """Return the sequences of one cell, ascending."""
        return tuple(np.flatnonzero(self.members[:, cell]).tolist())


class Observer:
    """Observations in progress. Made by `Context.observe`; close it, or use it in ``with``.

    Iterating takes out what has come since the last time, oldest first; what nobody takes out stays in memory. Nothing
    more comes once it is closed.

    Attributes
    ----------
    layers : the layers that are observed, ascending.
    what : which part of their attention.
    """

    def __init__(
        self,
        context: Context,
        layers: Sequence[int] | None,
        what: AttentionMass | None,
        leave: Callable[[], None],
    ) -> None:
        self.what = AttentionMass() if what is None else what
        if not isinstance(self.what, AttentionMass):
            raise ParamError(f"what = {shown(what)}: must be an AttentionMass")
        self.layers = _layers(context, layers)
        for il in self.layers:
            self.what.check_heads(context.model.hparams.n_head_by_layer[il])
        self._memory = context.memory
        self._leave = leave
        self._seen: deque[Observation] = deque()
        self._closed = False

    def __iter__(self) -> Iterator[Observation]:
        while self._seen:
            yield self._seen.popleft()

    @property
    def closed(self) -> bool:
        """Whether nothing is observed any more."""
        return self._closed

    def close(self) -> None:
        """Stop observing. Safe to call twice; the context closes its observer with itself.

        Raises
        ------
        ConcurrentUseError : another thread is decoding, or using the memory; the observer goes on.
        """
        if not self._closed:
            self._leave()
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # for the context

    def widest(self, n_tokens: int, n_seq_max: int) -> MassWatch:
        """Return what the largest ubatch has to observe."""
        n_rows = n_tokens if self.what.last is None else min(n_tokens, self.what.last * n_seq_max)
        return MassWatch(frozenset(self.layers), self.what, n_rows)

    def watches(self, ubatches: Sequence[UBatch]) -> list[Watched | None]:
        """Return what to observe of each ubatch of a batch; None where nothing counts."""
        whole = (
            np.concatenate([ubatch.seq_first for ubatch in ubatches]) if len(ubatches) > 1 else ubatches[0].seq_first
        )
        chosen, begin = self.what.chosen(whole), 0
        watches: list[Watched | None] = []
        for ubatch in ubatches:
            watches.append(self._watch(ubatch, chosen[begin : begin + ubatch.n_tokens]))
            begin += ubatch.n_tokens
        return watches

    def hear(self, chosen: BoolArray, slot: Any, ubatch: UBatch, masses: Mapping[int, Tensor]) -> None:
        """Take in what has been computed of a ubatch; the cells are as they were then."""
        read = dict(zip(self.layers, _read([masses[il] for il in self.layers]), strict=True))
        layers_of: dict[StoredKV, list[int]] = {}
        slot_of: dict[StoredKV, SlotInfo] = {}
        for il in self.layers:
            cache, own = self._memory.kv_of(il, slot)
            layers_of.setdefault(cache, []).append(il)
            slot_of[cache] = own
        for cache, layers in layers_of.items():
            self._hear_cache(cache, slot_of[cache], {il: read[il] for il in layers}, (chosen, ubatch.batch_idxs))

    def _hear_cache(
        self, cache: StoredKV, slot: SlotInfo, read: Mapping[int, F32Array], tokens: tuple[BoolArray, I32Array]
    ) -> None:
        """Take in the layers of one cache, (S, Hk, n_kv) each."""
        rows, idxs = (one.reshape(len(slot.streams), -1) for one in tokens)
        for k, stream in enumerate(slot.streams):
            if rows[k].any():
                mass = {il: one[k] if self.what.per_kv_head else one[k, 0] for il, one in read.items()}
                n_kv = next(iter(mass.values())).shape[-1]
                cells = cache.cells(stream)
                pos, members = cells.pos[:n_kv].copy(), cells.owners[:, :n_kv]
                self._seen.append(Observation(stream, mass, pos, members, idxs[k][rows[k]]))

    def _watch(self, ubatch: UBatch, chosen: BoolArray) -> Watched | None:
        if not chosen.any():
            return None
        # a stream's tokens follow one another, and a ubatch has as many of each
        streams = ubatch.n_seqs_unq if self._memory.n_stream > 1 else 1
        most = int(np.count_nonzero(chosen.reshape(streams, -1), axis=1).max())
        return Watched(MassWatch(frozenset(self.layers), self.what, most), chosen, self)


@dataclass(frozen=True, eq=False)
class Watched:
    """What to observe of one ubatch: `chosen` (n_tokens,) says which of its tokens count."""

    watch: MassWatch
    chosen: BoolArray
    observer: Observer

    def hear(self, slot: Any, ubatch: UBatch, masses: Mapping[int, Tensor]) -> None:
        """Give the observer what has been computed."""
        self.observer.hear(self.chosen, slot, ubatch, masses)


def _layers(context: Context, given: Sequence[int] | None) -> tuple[int, ...]:
    """Return the layers to observe, ascending; None = all that have K and V."""
    stored = tuple(il for il, layer in enumerate(context.memory.spec.layers) if layer.n_head_kv)
    if given is None:
        return stored
    layers = indices("layers", given, len(context.memory.spec.layers))
    for il in layers:
        if il not in stored:
            raise ParamError(f"layers: layer {il} has no attention to observe")
    return layers


def _read(masses: list[Tensor]) -> list[F32Array]:
    """Return masses [n_kv, Hk, S], which may differ in Hk, as (S, Hk, n_kv)."""
    out = np.empty(sum(mass.n_elements for mass in masses), np.float32)
    arrays, begin = [], 0
    for mass in masses:
        n_kv, n_head_kv, n_stream, _ = mass.ne
        part = out[begin : (begin := begin + n_kv * n_head_kv * n_stream)]
        mass.get_into(part)
        arrays.append(part.reshape(n_stream, n_head_kv, n_kv))
    return arrays
