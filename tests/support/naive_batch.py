"""Validation and splitting written down rule by rule, with plain lists and no thought of speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from support.batch_notation import Stored


@dataclass
class Entry:
    """One token of a batch; `ids` in the order in which the caller listed them."""

    ids: tuple[int, ...]
    pos: int | None = None
    token: int = 0
    output: bool = False


@dataclass
class RuleBrokenError(Exception):
    """The first rule that failed, and the sequence at fault."""

    rule: str
    seq: int | None = None


def naive_positions(entries: Sequence[Entry], stored: Stored | None) -> list[int]:
    """Return the positions of all entries; those without one continue the first listed sequence."""
    counters: dict[int, int] = {}
    positions = []
    for entry in entries:
        if entry.pos is not None:
            positions.append(entry.pos)
            continue
        lead = entry.ids[0]
        if lead not in counters:
            counters[lead] = stored.pos_max(lead) + 1 if stored else 0
        positions.append(counters[lead])
        counters[lead] += 1
    return positions


def naive_validate(
    entries: Sequence[Entry],
    stored: Stored | None,
    *,
    n_vocab: int,
    n_seq_max: int,
    n_pos: int,
    pure_embd: bool,
) -> list[int]:
    """Return the positions, or raise `RuleBrokenError` for the first rule that fails."""
    for entry in entries:
        if not pure_embd and not 0 <= entry.token < n_vocab:
            raise RuleBrokenError("token")
    for entry in entries:
        if not entry.ids:
            raise RuleBrokenError("empty set")
    for entry in entries:
        if any(not 0 <= seq < n_seq_max for seq in entry.ids):
            raise RuleBrokenError("sequence id")
    positions = naive_positions(entries, stored)
    if any(pos < 0 for pos in positions):
        raise RuleBrokenError("negative position")
    sets = [sorted(set(entry.ids)) for entry in entries]
    _continuity(sets, positions, stored, n_pos, pure_embd)
    _coupling(sets, stored)
    _order(sets, positions)
    return positions


def _continuity(
    sets: list[list[int]], positions: list[int], stored: Stored | None, n_pos: int, pure_embd: bool
) -> None:
    for seq in sorted({seq for ids in sets for seq in ids}):
        own = [pos for pos, ids in zip(positions, sets, strict=True) if seq in ids]
        low, high = min(own), max(own)
        last = stored.pos_max(seq) if stored else -1
        if n_pos == 1:
            starts = last < 0 or low == last + 1
            whole = len(set(own)) >= high - low + 1
        else:
            starts = last < 0 or (low >= last if pure_embd else low > last)
            whole = True
        if not starts:
            raise RuleBrokenError("start", seq)
        if not whole:
            raise RuleBrokenError("gap", seq)


def _coupling(sets: list[list[int]], stored: Stored | None) -> None:
    for ids in sets:
        for other in ids[1:]:
            if stored and stored.ranges.get(ids[0]) != stored.ranges.get(other):
                raise RuleBrokenError("diverged", other)


def _order(sets: list[list[int]], positions: list[int]) -> None:
    latest: dict[int, int] = {}
    for ids, pos in zip(sets, positions, strict=True):
        for seq in ids:
            if pos < latest.get(seq, -1):
                raise RuleBrokenError("order", seq)
            latest[seq] = pos


class NaiveSplitter:
    """Each split returns (batch indices, n_seqs), or None."""

    def __init__(self, sets: Sequence[frozenset[int]], output: Sequence[bool]) -> None:
        self.sets = list(sets)
        self.output = list(output)
        self.reset()

    def reset(self) -> None:
        self.used = [False] * len(self.sets)
        self.out_ids: list[int] = []

    def unused(self) -> list[int]:
        return [i for i, used in enumerate(self.used) if not used]

    def simple(self, m: int) -> tuple[list[int], int] | None:
        taken = self.unused()[:m]
        return self._hand_out(taken, len(taken))

    def equal(self, m: int, *, sequential: bool, keep_tail: int = 0) -> tuple[list[int], int] | None:
        if sequential and any(len(ids) > 1 for ids in self.sets):
            return None
        chosen = self._choose(m, sequential)
        if not chosen:
            return None
        pools = [[i for i in self.unused() if self.sets[i] == ids] for ids in chosen]
        taken: list[list[int]] = [[] for _ in chosen]
        while True:
            if any(not pool for pool in pools):
                break
            for pool, mine in zip(pools, taken, strict=True):
                mine.append(pool.pop(0))
            if (len(taken[0]) + 1) * len(chosen) > m:
                break
        if keep_tail:
            taken = self._keep_tails(pools, taken, m, keep_tail)
        return self._hand_out([i for mine in taken for i in mine], len(taken))

    def _choose(self, m: int, sequential: bool) -> list[frozenset[int]]:
        chosen: list[frozenset[int]] = []
        for i in self.unused():
            ids = self.sets[i]
            if any(ids & other for other in chosen):
                continue
            if sequential and chosen and min(ids) != min(chosen[-1]) + 1:
                continue
            chosen.append(ids)
            if len(chosen) == m:
                break
        return chosen

    @staticmethod
    def _keep_tails(pools: list[list[int]], taken: list[list[int]], m: int, keep_tail: int) -> list[list[int]]:
        k = 0
        while k < len(pools) and (not pools[k] or len(pools[k]) >= keep_tail):
            k += 1
        if k:
            return taken[:k]
        pool, mine = pools[0], taken[0]
        if len(mine) + len(pool) <= m:
            return [mine + pool]
        while len(pool) < keep_tail:
            pool.insert(0, mine.pop())
        return [mine]

    def seq(self, m: int, *, narrow: bool = True) -> tuple[list[int], int] | None:
        unused = self.unused()
        taken: list[int] = []
        current: frozenset[int] | None = None
        for i in unused:
            if len(taken) == m:
                break
            if current is None or (self.sets[i] <= current if narrow else self.sets[i] == current):
                current = self.sets[i]
                taken.append(i)
        return self._hand_out(taken, 1)

    def _hand_out(self, taken: list[int], n_seqs: int) -> tuple[list[int], int] | None:
        if not taken:
            return None
        for i in taken:
            assert not self.used[i]
            self.used[i] = True
        self.out_ids += [i for i in taken if self.output[i]]
        return taken, n_seqs
