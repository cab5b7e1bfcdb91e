"""A cache's bookkeeping against the plain-Python model, over random decodes, sequence verbs and updates.

What is queued is judged by what it does: rows of numbers stand for stored keys, and after every step each occupied
cell's row must become what the model says.
"""

from __future__ import annotations

import copy
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.cell_state import naive_state, state
from support.naive_cells import NaiveStreams, Refused, mask_value
from support.stored_rows import StoredRows
from support.ubatches import ubatch

from pykv.batch.ubatch import UBatch
from pykv.cells import CellStreams, MaskRule, NonCausal, SlotInfo, SwaType, Window, fill_mask
from pykv.errors import NoSlotError, ShiftUnsupported

N_SEQ = 3
SEQS = st.integers(0, N_SEQ - 1)
POS = st.integers(-1, 9)
RANGES = st.one_of(st.just((-1, -1)), st.tuples(POS, st.just(-1)), st.tuples(POS, POS))


def refusal(cache: CellStreams | NaiveStreams, verb: str, args: tuple[int, ...]) -> str | None:
    """Call a verb; return why it was refused, None if it was not."""
    try:
        getattr(cache, verb)(*args)
    except Refused as refused:
        return str(refused)
    except ShiftUnsupported as refused:
        return refused.reason
    except NoSlotError:
        return "no room"
    return None


class CacheOperations(RuleBasedStateMachine):
    """Subclasses choose the layout, the window and how shared cells move."""

    unified: ClassVar[bool] = True
    window: ClassVar[Window] = Window()
    reference: ClassVar[bool] = False

    @initialize(n=st.integers(3, 12), data=st.data())
    def start(self, n: int, data: st.DataObject) -> None:
        """Begin with tokens of sequence 0 in no order: only then does reuse leave something to purge."""
        self.n = n
        how = {"unified": self.unified, "window": self.window, "reference_moves": self.reference}
        self.streams = CellStreams(n, n_seq_max=N_SEQ, **how)
        window = self.window.n_swa, self.window.type.name
        self.naive = NaiveStreams(n, N_SEQ, self.unified, *window, reference=self.reference)
        self.stored = StoredRows(self.streams)
        self.last: tuple[SlotInfo, UBatch] | None = None
        for i, p in enumerate(data.draw(st.permutations(range(data.draw(st.integers(0, n), "filled"))))):
            for cells in (self.streams.cells[0], self.naive.cells[0]):
                cells.pos_set(i, p)
                cells.seq_add(i, 0)
            (self.naive.cells[0].token[i],) = self.stored.fresh(1)
            self.stored.rows[0, i] = self.naive.cells[0].token[i], p

    def next_positions(self) -> dict[int, int]:
        return {s: self.naive.cells[self.naive.stream(s)].pos_max(s) + 1 for s in range(N_SEQ)}

    def draw_ubatch(self, data: st.DataObject, after: dict[int, int], most: int) -> UBatch:
        """Draw tokens that continue the sequences, and move `after` behind them."""
        embd = data.draw(st.booleans(), "embd")
        if not self.unified:
            chosen = sorted(data.draw(st.sets(SEQS, min_size=1), "sequences"))
            each = data.draw(st.integers(1, max(1, most // len(chosen))), "tokens each")
            entries = [((s,), after[s] + k) for s in chosen for k in range(each)]
            for s in chosen:
                after[s] += each
            return ubatch(entries, embd=embd, equal=True)
        entries = []
        for ids in data.draw(st.lists(st.sets(SEQS, min_size=1, max_size=2), min_size=1, max_size=most), "sets"):
            p = max(after[s] for s in ids)
            entries.append((tuple(sorted(ids)), p))
            after.update(dict.fromkeys(ids, p + 1))
        return ubatch(entries, embd=embd)

    @rule(data=st.data(), several=st.integers(1, 3))
    def decode(self, data: st.DataObject, several: int) -> None:
        """Prepare one ubatch or more, and apply them if they fit; no row is written over while copies are queued."""
        after = self.next_positions()
        ubatches = [self.draw_ubatch(data, after, 4) for _ in range(several)]
        before = state(self.streams)
        slots, expected = self.streams.prepare(ubatches), self.naive.prepare(ubatches)
        assert state(self.streams) == before
        copy.deepcopy(self.streams).check()
        found = [list(zip(s.streams, s.idxs.tolist(), strict=True)) for s in slots] if slots else None
        assert found == expected
        if slots and self.streams.pending_copies:
            self.update(None)
        for slot, naive_slot, ub in zip(slots or [], expected or [], ubatches, strict=False):
            tokens = self.stored.fresh(ub.n_tokens)
            self.streams.apply(slot, ub)
            self.naive.apply(naive_slot, ub, tokens)
            self.stored.write(slot, ub, tokens)
            self.last = slot, ub
            assert self.streams.n_kv(slot) == self.naive.n_kv(list(slot.streams), 1)

    @rule(
        causal=st.booleans(),
        alibi=st.booleans(),
        mode=st.sampled_from(list(NonCausal)),
        dtype=st.sampled_from([np.float16, np.float32]),
    )
    def mask(self, causal: bool, alibi: bool, mode: NonCausal, dtype: type) -> None:
        """Fill the mask of the last ubatch, whatever has become of its cells since."""
        if self.last is None:
            return
        slot, ub = self.last
        n = ub.n_tokens // len(slot.streams)
        out = np.full((len(slot.streams), n, self.n), 7, dtype)
        fill_mask(out, self.streams, slot, ub, MaskRule(causal, self.window, alibi, mode))
        how = {"causal": causal, "non_causal": mode.value, "alibi": alibi}
        window = {"n_swa": self.window.n_swa, "kind": self.window.type.name}
        for k, stream in enumerate(slot.streams):
            cells = self.naive.cells[stream]
            for t in range(n):
                row = [mask_value(cells, j, ub, k * n + t, **how, **window) for j in range(self.n)]
                assert out[k, t].tolist() == row

    @rule(s=st.integers(-1, N_SEQ - 1), span=RANGES)
    def seq_rm(self, s: int, span: tuple[int, int]) -> None:
        assert self.streams.seq_rm(s, *span)
        self.naive.seq_rm(s, *span)

    def both(self, verb: str, *args: int) -> None:
        """Tell both; what the model refuses must be refused for the same reason, and change nothing."""
        before, why = state(self.streams), refusal(self.naive, verb, args)
        assert refusal(self.streams, verb, args) == why
        assert why is None or state(self.streams) == before

    @rule(src=SEQS, dst=SEQS, span=RANGES)
    def seq_cp(self, src: int, dst: int, span: tuple[int, int]) -> None:
        self.both("seq_cp", src, dst, *span)

    @rule(pair=st.permutations(range(N_SEQ)), span=RANGES, verb=st.sampled_from(["seq_add", "seq_div"]))
    def fork_and_move(self, pair: list[int], span: tuple[int, int], verb: str) -> None:
        """Let two sequences share cells and move one of them, which chance alone seldom does."""
        src, dst, _ = pair
        self.both("seq_cp", src, dst, -1, -1)
        self.both(verb, dst, *span, 2)

    @rule(s=SEQS)
    def seq_keep(self, s: int) -> None:
        self.both("seq_keep", s)

    @rule(s=SEQS, span=RANGES, d=st.integers(-6, 3))
    def seq_add(self, s: int, span: tuple[int, int], d: int) -> None:
        self.both("seq_add", s, *span, d)

    @rule(s=SEQS, span=RANGES, d=st.integers(1, 3))
    def seq_div(self, s: int, span: tuple[int, int], d: int) -> None:
        self.both("seq_div", s, *span, d)

    @rule(at_most=st.none() | st.integers(1, 4))
    def update(self, at_most: int | None) -> None:
        """Carry out what is queued, or stop on the way."""
        self.stored.update(at_most)
        for cells, naive in zip(self.streams.cells, self.naive.cells, strict=True):
            if not cells.has_shift:
                naive.reset_shift()
            naive.shift = cells.shift.tolist()  # what an interrupted update has left is judged by its effect

    @rule()
    def clear(self) -> None:
        self.streams.clear()
        self.naive.clear()

    @rule(s=SEQS)
    def ends(self, s: int) -> None:
        cells = self.naive.cells[self.naive.stream(s)]
        assert (self.streams.pos_min(s), self.streams.pos_max(s)) == (cells.pos_min(s), cells.pos_max(s))

    @invariant()
    def equal(self) -> None:
        if not hasattr(self, "streams"):
            return
        seen = state(self.streams)
        assert {key: seen[key] for key in seen if key != "copies"} == naive_state(self.naive)
        copy.deepcopy(self.streams).check()  # a copy, because asking would refresh what has grown stale

    @invariant()
    def rows_follow(self) -> None:
        """After an update each occupied cell's row holds its own token, turned to where the cell is now."""
        if not hasattr(self, "streams"):
            return
        rows = self.stored.after_update()
        for stream, cells in enumerate(self.naive.cells):
            for i in cells.used():
                assert rows[stream, i].tolist() == [cells.token[i], cells.angle[i]]
                assert self.reference or cells.angle[i] == cells.pos[i]


LAYOUTS = [
    (True, Window(), False),
    (True, Window(), True),
    (True, Window(3, SwaType.STANDARD), False),
    (True, Window(2, SwaType.CHUNKED), False),
    (True, Window(3, SwaType.SYMMETRIC), False),
    (False, Window(), False),
    (False, Window(), True),
    (False, Window(2, SwaType.STANDARD), False),
    (False, Window(3, SwaType.CHUNKED), False),
]


@pytest.mark.parametrize(("unified", "window", "reference"), LAYOUTS, ids=lambda x: getattr(x, "type", x))
def test_random_operations_agree_with_the_model(unified: bool, window: Window, reference: bool) -> None:
    kind = type("Layout", (CacheOperations,), {"unified": unified, "window": window, "reference": reference})
    case = kind.TestCase
    case.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
    case().runTest()
