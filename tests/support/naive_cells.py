"""Cells, slots, sequence verbs and masks in plain Python, one cell at a time, straight from the specification.

The oracle for `pykv.cells`: slow, without caches, and shares no code with it.
"""

from __future__ import annotations

import copy
import math

from pykv.batch.ubatch import UBatch

INF = 2**31 - 1


class Refused(Exception):
    """A verb that cannot be honoured; its argument says why. Nothing has changed."""


class NaiveCells:
    """One stream (spec cells.md).

    Attributes
    ----------
    token, angle : what the row of each cell must hold once all pending work is done: which token was stored in it,
        and by how much its key is turned in all.
    """

    def __init__(self, n: int, div_sign: int = 1) -> None:
        self.n, self.div_sign = n, div_sign
        self.reset()

    def reset(self) -> None:
        self.token = [0] * self.n
        self.angle = [0] * self.n
        self.pos = [-1] * self.n
        self.shift = [0] * self.n
        self.ext = [(0, 0, -1)] * self.n
        self.seq: list[set[int]] = [set() for _ in range(self.n)]
        self.has_shift = False

    def reset_shift(self) -> None:
        self.shift = [0] * self.n
        self.has_shift = False

    def empty(self, i: int) -> bool:
        return self.pos[i] == -1

    def used(self) -> list[int]:
        return [i for i in range(self.n) if not self.empty(i)]

    def pairs(self, s: int) -> list[tuple[int, int]]:
        return sorted((self.pos[i], i) for i in range(self.n) if s in self.seq[i])

    def pos_min(self, s: int) -> int:
        return self.pairs(s)[0][0] if self.pairs(s) else -1

    def pos_max(self, s: int) -> int:
        return self.pairs(s)[-1][0] if self.pairs(s) else -1

    def used_min(self) -> int:
        return min(self.used(), default=0)

    def used_max_p1(self) -> int:
        return max(self.used(), default=-1) + 1

    def pos_set(self, i: int, p: int) -> None:
        assert self.empty(i)
        assert not self.seq[i]
        self.pos[i] = self.angle[i] = p

    def ext_set(self, i: int, ext: tuple[int, int, int]) -> None:
        self.ext[i] = ext

    def seq_add(self, i: int, s: int) -> None:
        assert not self.empty(i)
        assert s not in self.seq[i]
        self.seq[i].add(s)

    def seq_rm(self, i: int, s: int) -> bool:
        assert not self.empty(i)
        self.seq[i].remove(s)
        if self.seq[i]:
            return False
        self.rm(i)
        return True

    def seq_keep(self, i: int, s: int) -> bool:
        if s in self.seq[i]:
            self.seq[i] = {s}
            return False
        if self.seq[i]:
            self.rm(i)
            return True
        return False

    def rm(self, i: int) -> None:
        assert not self.empty(i)
        self.pos[i], self.shift[i], self.ext[i], self.seq[i] = -1, 0, (0, 0, -1), set()

    def pos_add(self, i: int, d: int) -> bool:
        assert not self.empty(i)
        self.has_shift = True
        self.pos[i] += d
        self.shift[i] += d
        self.angle[i] += d
        if self.pos[i] < 0:
            self.pos[i], self.shift[i], self.seq[i] = -1, 0, set()
            return True
        return False

    def pos_div(self, i: int, d: int) -> None:
        assert not self.empty(i)
        old = self.pos[i]
        self.pos[i] = old // d
        self.shift[i] += (self.pos[i] - old) * self.div_sign
        self.angle[i] += (self.pos[i] - old) * self.div_sign
        self.has_shift = True

    def copy_from(self, other: NaiveCells, i: int, j: int, s: int) -> None:
        """Let the empty cell `j` be what cell `i` of a stream is, for sequence `s` alone."""
        self.pos_set(j, other.pos[i])
        self.seq_add(j, s)
        self.ext_set(j, other.ext[i])
        self.shift[j], self.token[j], self.angle[j] = other.shift[i], other.token[i], other.angle[i]
        self.has_shift = self.has_shift or other.shift[i] != 0

    def seq_pos_tok_le(self, s: int, p: int) -> int:
        below = [(q, i) for q, i in self.pairs(s) if q <= p]
        return self.ext[below[-1][1]][2] if below else -1


def masked_swa(n: int, kind: str, p0: int, p1: int) -> bool:
    """Whether a window hides `p0` from `p1` (spec kv_cache.md section 2)."""
    return {
        "NONE": lambda: False,
        "STANDARD": lambda: p1 - p0 >= n,
        "CHUNKED": lambda: p0 < (p1 // n) * n,
        "SYMMETRIC": lambda: abs(p1 - p0) > n // 2,
    }[kind]()


class NaiveStreams:
    """One cache (spec kv_cache.md sections 2 to 6).

    Parameters
    ----------
    reference : move cells as llama.cpp does: shared ones for all owners, and by old - new in a division.
    """

    def __init__(
        self, n: int, n_seq_max: int, unified: bool, n_swa: int = 0, kind: str = "NONE", *, reference: bool = False
    ) -> None:
        self.n, self.unified, self.n_swa, self.kind, self.reference = n, unified, n_swa, kind, reference
        self.cells = [NaiveCells(n, -1 if reference else 1) for _ in range(1 if unified else n_seq_max)]
        self.heads = [0] * len(self.cells)

    def stream(self, s: int) -> int:
        return 0 if len(self.cells) == 1 else s

    # slots

    def find_slot(self, ub: UBatch, cont: bool = False) -> list[tuple[int, list[int]]] | None:
        """Return (stream, cells) per stream, or None."""
        parts = [0] if len(self.cells) == 1 else [self.stream(s) for s in ub.seq_id_unq]
        n = ub.n_tokens // len(parts)
        found = [(stream, self.walk(stream, n, cont)) for stream in parts]
        return None if any(idxs is None for _, idxs in found) else found

    def walk(self, stream: int, n: int, cont: bool, empty_only: bool = False) -> list[int] | None:
        cells, h = self.cells[stream], self.heads[stream]
        if h > len(cells.used()) + 2 * n:
            h = 0
        if n > self.n:
            return None
        unit, tested, got = (n if cont else 1), 0, []
        while True:
            if h + unit > self.n:
                tested += self.n - h
                h = 0
                continue
            for _ in range(unit):
                i = h
                h += 1
                tested += 1
                if cells.empty(i) or (not empty_only and self.left_window(cells, i)):
                    got.append(i)
                elif cont:
                    break
            if len(got) == n:
                return got
            if cont:
                got = []
            if tested >= self.n:
                return None

    def left_window(self, cells: NaiveCells, i: int) -> bool:
        hidden = [masked_swa(self.n_swa, self.kind, cells.pos[i], cells.pos_max(q) + 1) for q in cells.seq[i]]
        return bool(hidden) and all(hidden)

    def apply(self, slot: list[tuple[int, list[int]]], ub: UBatch, tokens: list[int] | None = None) -> None:
        """Store a ubatch; `tokens` tells what is written to the rows."""
        n = ub.n_tokens // len(slot)
        lost: dict[int, int] = {}
        for k, (stream, idxs) in enumerate(slot):
            cells = self.cells[stream]
            for j, c in enumerate(idxs):
                i = k * n + j
                if not cells.empty(c):
                    for q in cells.seq[c]:
                        lost[q] = max(lost.get(q, -1), cells.pos[c])
                    cells.rm(c)
                cells.pos_set(c, int(ub.pos[0, i]))
                cells.token[c] = tokens[i] if tokens else 0
                if ub.is_pos_2d or ub.token is not None:
                    x, y = (int(ub.pos[2, i]), int(ub.pos[1, i])) if ub.is_pos_2d else (0, 0)
                    cells.ext_set(c, (x, y, -1 if ub.token is None else int(ub.token[i])))
                for s in ub.seq_ids[i]:
                    cells.seq_add(c, s)
        for q, last in lost.items():
            first = self.cells[self.stream(q)].pos_min(q)
            if first <= last:
                self.seq_rm(q, first, last + 1)
        for stream, idxs in slot:
            self.heads[stream] = idxs[-1] + 1

    def prepare(self, ubatches: list[UBatch]) -> list[list[tuple[int, list[int]]]] | None:
        trial, slots = copy.deepcopy(self), []
        for ub in ubatches:
            slot = trial.find_slot(ub)
            if slot is None:
                return None
            slots.append(slot)
            trial.apply(slot, ub)
        return slots

    def n_kv(self, streams: list[int], n_pad: int) -> int:
        pad = max(n_pad, 256)
        return max(min(self.n, max(pad, math.ceil(self.cells[s].used_max_p1() / pad) * pad)) for s in streams)

    # sequences

    @staticmethod
    def bounds(p0: int, p1: int) -> tuple[int, int]:
        return (0 if p0 < 0 else p0), (INF if p1 < 0 else p1)

    def clear(self) -> None:
        for cells in self.cells:
            cells.reset()
        self.heads = [0] * len(self.cells)

    def seq_rm(self, s: int, p0: int, p1: int) -> bool:
        p0, p1 = self.bounds(p0, p1)
        for stream in range(len(self.cells)) if s == -1 else [self.stream(s)]:
            cells, freed = self.cells[stream], []
            for i in range(self.n):
                if not p0 <= cells.pos[i] < p1:
                    continue
                if s == -1:
                    cells.rm(i)
                    freed.append(i)
                elif s in cells.seq[i] and cells.seq_rm(i, s):
                    freed.append(i)
            if freed:
                self.heads[stream] = min(self.heads[stream], freed[0])
        return True

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Share cells within a stream; across streams become, in the range, what `src` is."""
        s0, s1 = self.stream(src), self.stream(dst)
        p0, p1 = self.bounds(p0, p1)
        hit = self.within(src, p0, p1)
        if s0 == s1:
            for i in hit:
                self.cells[s0].seq[i].add(dst)
            return
        target, old = self.cells[s1], self.within(dst, p0, p1)
        if len(hit) > self.n - len(target.used()) + len(old):
            raise Refused("no room")
        self.seq_rm(dst, p0, p1)
        if hit and not target.used():
            target.reset()
            own, self.heads[s1] = hit, self.heads[s0]
        else:
            own = self.room(s1, len(hit))
        for i, j in zip(hit, own, strict=True):
            target.copy_from(self.cells[s0], i, j, dst)

    def within(self, s: int, p0: int, p1: int) -> list[int]:
        """Return the cells of a sequence that hold a position of ``[p0, p1)``."""
        cells = self.cells[self.stream(s)]
        return [i for i in range(self.n) if s in cells.seq[i] and p0 <= cells.pos[i] < p1]

    def room(self, stream: int, n: int) -> list[int]:
        """Return `n` empty cells in ring order from the head."""
        own = self.walk(stream, n, cont=False, empty_only=True) if n else []
        if own is None:
            raise Refused("shared_cells")
        return own

    def seq_keep(self, s: int) -> None:
        stream = self.stream(s)
        freed = [i for i in range(self.n) if self.cells[stream].seq_keep(i, s)]
        if freed:
            self.heads[stream] = min(self.heads[stream], freed[0])

    def seq_add(self, s: int, p0: int, p1: int, d: int) -> None:
        p0, p1 = self.bounds(p0, p1)
        if d == 0 or p0 == p1:
            return
        cells = self.cells[self.stream(s)]
        hit = self.within(s, p0, p1)
        if not self.reference:
            hit = self.split_off(s, hit, staying=[i for i in hit if cells.pos[i] + d < 0])
            for i in [i for i in hit if len(cells.seq[i]) > 1]:
                cells.seq[i].remove(s)
                hit.remove(i)
        freed = [i for i in sorted(hit) if cells.pos_add(i, d)]
        self.heads[self.stream(s)] = freed[0] if freed else 0

    def seq_div(self, s: int, p0: int, p1: int, d: int) -> None:
        p0, p1 = self.bounds(p0, p1)
        if d == 1 or p0 == p1:
            return
        cells = self.cells[self.stream(s)]
        hit = self.within(s, p0, p1)
        if not self.reference:
            hit = self.split_off(s, hit, staying=[i for i in hit if cells.pos[i] // d == cells.pos[i]])
        for i in hit:
            cells.pos_div(i, d)

    def split_off(self, s: int, hit: list[int], staying: list[int]) -> list[int]:
        """Give a sequence copies of the shared ones of its cells, but for some; returns its cells then."""
        stream = self.stream(s)
        cells = self.cells[stream]
        shared = [i for i in hit if len(cells.seq[i]) > 1 and i not in staying]
        own = self.room(stream, len(shared))
        for i, j in zip(shared, own, strict=True):
            cells.copy_from(cells, i, j, s)
            cells.seq[i].remove(s)
        return [i for i in hit if i not in shared] + own


def mask_value(
    cells: NaiveCells,
    j: int,
    ub: UBatch,
    i: int,
    *,
    causal: bool,
    non_causal: str,
    n_swa: int,
    kind: str,
    alibi: bool,
) -> float:
    """Return the mask of token `i` at cell `j`: the tests of spec kv_cache.md section 9, in their order."""
    hidden = -math.inf
    q, p1, p0 = ub.seq_ids[i][0], int(ub.pos[0, i]), cells.pos[j]
    if cells.empty(j) or q not in cells.seq[j]:
        return hidden
    if not causal and non_causal == "swa_only" and kind == "NONE":
        causal = True
    if causal and p0 > p1:
        return hidden
    if causal and ub.is_pos_2d and p0 == p1:
        x, y, _ = cells.ext[j]
        x1, y1 = int(ub.pos[2, i]), int(ub.pos[1, i])
        if y > y1 or (y == y1 and x > x1):
            return hidden
    first = min(int(ub.pos[0, k]) for k in range(ub.n_tokens) if ub.seq_ids[k][0] == q)
    in_span = not causal and non_causal == "swa_full" and p0 >= first
    if masked_swa(n_swa, kind, p0, p1) and not in_span:
        return hidden
    return float(-abs(p0 - p1)) if alibi else 0.0


def naive_bucket(p0: int, p1: int, n_buckets: int, bidirectional: bool) -> int:
    """Return a relative position bucket (spec kv_cache.md section 11)."""
    base = 0
    if bidirectional:
        n_buckets //= 2
        base = n_buckets if p0 > p1 else 0
        r = abs(p0 - p1)
    else:
        r = max(0, p1 - p0)
    exact = n_buckets // 2
    if r < exact:
        return base + r
    # the tiny nudge keeps powers of two on their border, where the logarithm itself falls short
    far = math.floor(exact + math.log(r / exact) * (n_buckets - exact) / math.log(128 / exact) + 1e-9)
    return base + min(n_buckets - 1, far)
