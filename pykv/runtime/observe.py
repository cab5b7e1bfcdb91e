"""Observer: what attention did while a context decoded, as scores of cells.

One observation for each ubatch and stream of which something counts: cells may change between two ubatches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from pykv.batch import UBatch
from pykv.cells import SlotInfo
from pykv.cells.arguments import integer, shown
from pykv.errors import ParamError
from pykv.ggml import Tensor
from pykv.memory import AttentionMass, MassWatch, Memory
from pykv.memory.attention_mass import indices
from pykv.memory.stored_kv import StoredKV
from pykv.typing import AnyArray, BoolArray, F32Array, I32Array

if TYPE_CHECKING:
    from pykv.runtime.context import Context

_Array = TypeVar("_Array", bound=AnyArray)


@dataclass(frozen=True, eq=False)
class Observation:
    """The attention that the cells of one stream received from the tokens of one ubatch.

    A memory with windows stores layers with a window apart from the others, so that there is one observation for each
    of the two kinds: `mass` names the layers.

    Attributes
    ----------
    stream : the stream.
    mass : layer → (n_kv,) float32, or (n_head_kv, n_kv) where asked for each KV head.
    pos : (n_kv,) position of each cell as it was in that decode, the new tokens included; -1 = empty.
    members : (n_seq, n_kv) whether a cell belonged to a sequence; n_seq is the largest id in use plus one.
    tokens : (k,) the tokens that count, as indices in the batch. A sum over all cells, heads and tokens is k times the
        number of heads.

    All arrays are read-only; those of one decode may be shared among observers.
    """

    stream: int
    mass: Mapping[int, F32Array]
    pos: I32Array
    members: BoolArray
    tokens: I32Array

    def owners(self, cell: int) -> tuple[int, ...]:
        """Return the sequences of one cell, ascending."""
        cell = integer("cell", cell, 0, self.pos.size - 1)
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
        leave: Callable[[Observer], None],
    ) -> None:
        self.what = AttentionMass() if what is None else what
        if not isinstance(self.what, AttentionMass):
            raise ParamError(f"what = {shown(what)}: must be an AttentionMass")
        self.layers = _layers(context, layers)
        for il in self.layers:
            self.what.check_heads(context.model.hparams.n_head_by_layer[il])
        self._n_stream = context.memory.n_stream
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
        """Stop observing, and give back the memory that only this took. Safe to call twice; the context closes its
        observers with itself.

        Raises
        ------
        ConcurrentUseError : the context is decoding, or its memory in use otherwise; the observer goes on.
        """
        if not self._closed:
            self._leave(self)

    def end(self) -> None:
        """Take in nothing more. For a context, which has entered its memory's guard."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # for the context

    def widest(self, n_tokens: int, n_seq_max: int) -> MassWatch:
        """Return what the largest ubatch has to observe of a stream, of which `n_seq_max` sequences have a share."""
        n_rows = n_tokens if self.what.last is None else min(n_tokens, self.what.last * n_seq_max)
        return MassWatch(frozenset(self.layers), self.what, n_rows)

    def watches(self, ubatches: Sequence[UBatch]) -> list[Watched | None]:
        """Return what to observe of each ubatch of a batch; None where nothing counts."""
        chosen, begin = self.what.chosen([ids for ubatch in ubatches for ids in ubatch.seq_ids]), 0
        watches: list[Watched | None] = []
        for ubatch in ubatches:
            watches.append(self._watch(ubatch, chosen[begin : begin + ubatch.n_tokens]))
            begin += ubatch.n_tokens
        return watches

    def hear(self, chosen: BoolArray, seen: SeenCells, masses: Mapping[int, Tensor]) -> None:
        """Take in what has been computed of a ubatch."""
        read = dict(zip(self.layers, _read([masses[il] for il in self.layers]), strict=True))
        for cells, layers in seen.by_cache(self.layers).items():
            rows = chosen.reshape(len(cells.slot.streams), -1)
            idxs = seen.ubatch.batch_idxs.reshape(rows.shape)
            for k in np.flatnonzero(rows.any(axis=1)).tolist():
                mass = {il: read[il][k] if self.what.per_kv_head else read[il][k, 0] for il in layers}
                pos, members = cells.copied(k, mass[layers[0]].shape[-1])
                tokens = _read_only(idxs[k][rows[k]])
                self._seen.append(Observation(cells.slot.streams[k], MappingProxyType(mass), pos, members, tokens))

    def _watch(self, ubatch: UBatch, chosen: BoolArray) -> Watched | None:
        if not chosen.any():
            return None
        # a stream's tokens follow one another, and a ubatch has as many of each
        streams = ubatch.n_seqs_unq if self._n_stream > 1 else 1
        most = int(np.count_nonzero(chosen.reshape(streams, -1), axis=1).max())
        return Watched(MassWatch(frozenset(self.layers), self.what, most), chosen, self)


@dataclass(frozen=True, eq=False)
class Watched:
    """What an observer wants of one ubatch: `chosen` (n_tokens,) says which of its tokens count."""

    watch: MassWatch
    chosen: BoolArray
    observer: Observer


def watched_by(observers: Sequence[Observer], ubatches: Sequence[UBatch]) -> list[list[Watched]]:
    """Return what to observe of each ubatch of a batch."""
    if not observers:
        return [[] for _ in ubatches]
    of_each = zip(*(observer.watches(ubatches) for observer in observers), strict=True)
    return [[watched for watched in of_one if watched is not None] for of_one in of_each]


class SeenCells:
    """The cells that a ubatch has looked at, of each cache that some layer reads."""

    def __init__(self, memory: Memory, slot: Any, ubatch: UBatch) -> None:
        self._memory, self._slot, self.ubatch = memory, slot, ubatch
        self._caches: dict[StoredKV, CacheCells] = {}

    def by_cache(self, layers: Sequence[int]) -> dict[CacheCells, list[int]]:
        """Return the cells of each cache, with those of the layers that read it."""
        found: dict[CacheCells, list[int]] = {}
        for il in layers:
            cache, slot = self._memory.kv_of(il, self._slot)
            if cache not in self._caches:
                self._caches[cache] = CacheCells(cache, slot)
            found.setdefault(self._caches[cache], []).append(il)
        return found


class CacheCells:
    """The cells of one cache as they are now, copied when first asked for."""

    def __init__(self, cache: StoredKV, slot: SlotInfo) -> None:
        self._cache, self.slot = cache, slot
        self._copies: dict[int, tuple[I32Array, BoolArray]] = {}

    def copied(self, k: int, n_kv: int) -> tuple[I32Array, BoolArray]:
        """Return positions (n_kv,) and members (n_seq, n_kv) of the slot's stream number `k`, read-only."""
        if k not in self._copies:
            view = self._cache.cells(self.slot.streams[k])
            self._copies[k] = _read_only(view.pos[:n_kv].copy()), view.owners_before(n_kv)
        return self._copies[k]


def _layers(context: Context, given: Sequence[int] | None) -> tuple[int, ...]:
    """Return the layers to observe, ascending; None = all that have K and V."""
    stored = tuple(il for il, layer in enumerate(context.memory.spec.layers) if layer.n_head_kv)
    if not stored:
        raise ParamError("layers: no layer has attention to observe")
    if given is None:
        return stored
    layers = indices("layers", given, len(context.memory.spec.layers))
    for il in layers:
        if il not in stored:
            raise ParamError(f"layers: layer {il} has no attention to observe")
    return layers


def _read(masses: list[Tensor]) -> list[F32Array]:
    """Return masses [n_kv, Hk, S], which may differ in Hk, as (S, Hk, n_kv), read-only."""
    out = np.empty(sum(mass.n_elements for mass in masses), np.float32)
    ends = np.cumsum([mass.n_elements for mass in masses]).tolist()
    for mass, end in zip(masses, ends, strict=True):
        mass.get_into(out[end - mass.n_elements : end])
    parts = np.split(_read_only(out), ends[:-1])
    return [part.reshape(mass.ne[2::-1]) for mass, part in zip(masses, parts, strict=True)]


def _read_only(array: _Array) -> _Array:
    array.flags.writeable = False
    return array
