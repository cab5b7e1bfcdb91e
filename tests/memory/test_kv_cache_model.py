"""A whole KV cache against plain lists, over random decodes, verbs, updates and reads.

The model is what a program believes: each sequence is a list of positions and tokens. Keys must then be RoPE of the
tokens' raw keys in float64, values the raw ones, and what was not moved must keep its keys to the bit.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.cell_state import state
from support.naive_sequences import Held, NaiveSequences
from support.row_writer import Pair, RowWriter, draw, rotated

from pykv.errors import NoSlotError, ParamError, SequenceError, ShiftUnsupported
from pykv.ggml import RopeParams
from pykv.memory import KVCache, KVSettings, LayerSpec, MemorySpec

YARN = {"n_ctx_orig": 64, "freq_scale": 0.25, "ext_factor": 1.0, "attn_factor": 0.9}
SPEC = MemorySpec(
    (
        LayerSpec(1, 8, 4, RopeParams(8)),
        LayerSpec(2, 8, 2, RopeParams(4, "neox", **YARN)),
        LayerSpec(1, 8, 4),
    )
)
N_SEQ = 3
MAX_POS = 120
SEQS = st.integers(0, N_SEQ - 1)
BOUNDS = st.integers(-1, 14)
NEAR = {"f32": 1e-5, "f16": 1e-3}
"""Error of one rounding, and of one turn."""


class CacheMachine(RuleBasedStateMachine):
    """Subclasses choose the layout and the type of K."""

    unified: ClassVar[bool] = True
    type_k: ClassVar[str] = "f32"

    @initialize(n_cells=st.integers(5, 14), v_trans=st.booleans())
    def start(self, n_cells: int, v_trans: bool) -> None:
        kinds = {"type_k": self.type_k, "type_v": "f32", "v_trans": v_trans}
        settings = KVSettings(n_cells, n_seq_max=N_SEQ, unified=self.unified, **kinds)
        self.cache = KVCache(SPEC, settings, n_threads=1)
        self.writer = RowWriter(self.cache)
        self.naive = NaiveSequences(N_SEQ, n_cells, self.unified)
        self.rng = np.random.default_rng(n_cells)
        self.raw: list[list[Pair]] = []
        self.n_turns = 0
        self.seen: dict[Held, list[np.ndarray]] = {}

    # what is done

    @rule(data=st.data(), n_ubatch=st.integers(1, 5))
    def decode(self, data: st.DataObject, n_ubatch: int) -> None:
        tokens = self._draw_tokens(data)
        fresh = draw(SPEC, len(tokens), self.rng)
        first = len(self.raw)
        for _, v in fresh:
            v[:, 0, 0] = first + np.arange(len(tokens))  # so that a value tells its token
        before = state(self.cache.streams)
        fits = all(
            n <= self.naive.n_free(s) for s, n in Counter(0 if self.unified else ids[0] for ids, _ in tokens).items()
        )
        assert self.writer.store(tokens, fresh, n_ubatch) == fits
        if not fits:
            after = state(self.cache.streams)
            assert all(after[name] == before[name] for name in ("pos", "owners", "heads", "ext"))
            return
        for i, (ids, pos) in enumerate(tokens):
            self.raw.append([(k[i], v[i]) for k, v in fresh])
            one = Held(pos, first + i)
            for s in ids:
                self.naive.held[s].append(one)

    @rule(seq=st.integers(-1, N_SEQ - 1), p0=BOUNDS, p1=BOUNDS)
    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        assert self.cache.seq_rm(seq, p0, p1) is True
        self.naive.seq_rm(seq, p0, p1)

    @rule(src=SEQS, dst=SEQS, p0=BOUNDS, p1=BOUNDS)
    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        self._both("seq_cp", src, dst, p0, p1)

    @rule(seq=SEQS)
    def seq_keep(self, seq: int) -> None:
        self._both("seq_keep", seq)

    @rule(seq=SEQS, p0=BOUNDS, p1=BOUNDS, delta=st.integers(-9, 30))
    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        delta = min(delta, MAX_POS - max(self.cache.pos_max(seq), 0))  # the angles of far positions are rounded more
        self._both("seq_add", seq, p0, p1, delta)
        self.n_turns += 1

    @rule(seq=SEQS, p0=BOUNDS, p1=BOUNDS, d=st.integers(1, 4))
    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> None:
        self._both("seq_div", seq, p0, p1, d)
        self.n_turns += 1

    @rule(data=st.booleans())
    def clear(self, data: bool) -> None:
        self.cache.clear(data)
        self.naive = NaiveSequences(N_SEQ, self.cache.n_cells, self.unified)

    @rule()
    def update(self) -> None:
        self.cache.update()
        assert not self.cache.streams.has_shift
        assert not self.cache.streams.pending_copies

    @rule()
    def turn_values(self) -> None:
        self.cache.store_v(not self.cache.store.v_trans)

    @rule()
    def refuse(self) -> None:
        before = state(self.cache.streams)
        for verb, args in (
            ("seq_rm", (N_SEQ,)),
            ("seq_cp", (0, -1)),
            ("seq_keep", (N_SEQ,)),
            ("seq_add", (-1, 0, 1, 1)),
        ):
            with pytest.raises(SequenceError):
                getattr(self.cache, verb)(*args)
        with pytest.raises(ParamError):
            self.cache.seq_div(0, 0, -1, 0)
        assert state(self.cache.streams) == before

    # what is seen

    @rule()
    def read(self) -> None:
        for s in range(N_SEQ):
            if self.naive.held[s]:
                self._read_sequence(s)
            else:
                assert self.cache.k(0, s).shape == (0, 1, 8)
                assert self.cache.v(1, s).shape == (0, 2, 2)

    @rule(seq=SEQS, pos=st.integers(0, 30))
    def look(self, seq: int, pos: int) -> None:
        seen = [p for p, _ in self.naive.rows(seq) if p <= pos]
        assert {kind: found.tolist() for kind, found in self.cache.visible(seq, pos).items()} == {"full": seen}

    @invariant()
    def bookkeeping_agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        for s in range(N_SEQ):
            rows, cells = self.naive.rows(s), self.cache.cells(self.cache.streams.stream_of(s))
            assert np.sort(cells.pos[cells.member(s)]).tolist() == [p for p, _ in rows]
            assert self.cache.pos_min(s) == min((p for p, _ in rows), default=-1)
            assert self.cache.pos_max(s) == max((p for p, _ in rows), default=-1)
        n_used = sum(self.cache.cells(stream).n_used for stream in range(self.cache.n_stream))
        assert n_used == len({one for rows in self.naive.held for one in rows})

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.read()
            self.writer.close()
            self.cache.close()

    # mechanism

    def _draw_tokens(self, data: st.DataObject) -> list[tuple[tuple[int, ...], int]]:
        """Draw a batch that continues the sequences; only those of the same positions can share a token."""
        ranges = [[p for p, _ in self.naive.rows(s)] or [-1] for s in range(N_SEQ)]
        ranges = [(pos[0], pos[-1]) for pos in ranges]
        after = {s: ranges[s][1] + 1 for s in range(N_SEQ)}
        tokens = []
        for ids in data.draw(st.lists(st.sets(SEQS, min_size=1), min_size=1, max_size=5), "sequences"):
            first, pos = min(ids), after[min(ids)]
            like = [s for s in sorted(ids) if (after[s], ranges[s]) == (pos, ranges[first])]
            mine = tuple(like) if self.unified else (first,)
            tokens.append((mine, pos))
            after.update(dict.fromkeys(mine, pos + 1))
        return tokens

    def _both(self, verb: str, *args: int) -> None:
        """Tell cache and model; what is refused leaves everything as it was."""
        before = state(self.cache.streams)
        try:
            getattr(self.cache, verb)(*args)
        except (NoSlotError, ShiftUnsupported):
            assert getattr(self.naive, verb)(*args) is False
            assert state(self.cache.streams) == before
        else:
            assert getattr(self.naive, verb)(*args) is not False

    def _read_sequence(self, s: int) -> None:
        values = [self.cache.v(il, s) for il in range(len(SPEC.layers))]
        keys = [self.cache.k(il, s) for il in range(len(SPEC.layers))]
        pos = [p for p, _ in self.naive.rows(s)]
        tokens = np.rint(values[0][:, 0, 0]).astype(int).tolist()
        # of equal positions, any may come first
        assert sorted(zip(pos, tokens, strict=True)) == self.naive.rows(s)
        most = NEAR[self.type_k] * (1 + self.n_turns)
        for il, layer in enumerate(SPEC.layers):
            raw_k, raw_v = (np.array([self.raw[t][il][kind] for t in tokens]) for kind in (0, 1))
            assert np.array_equal(values[il], raw_v)
            assert np.abs(keys[il] - rotated(layer, raw_k, pos)).max() <= most
            assert np.abs(self.cache.k(il, s, derotate=True) - raw_k).max() <= most
        self._compare_with_last_read(s, pos, tokens, keys)

    def _compare_with_last_read(self, s: int, pos: list[int], tokens: list[int], keys: list[np.ndarray]) -> None:
        """Whoever moves gets a new object in the model: the others keep their keys to the bit."""
        by_row = Counter((one.pos, one.token) for one in self.naive.held[s])
        at = {row: i for i, row in enumerate(zip(pos, tokens, strict=True))}
        for one in self.naive.held[s]:
            if by_row[one.pos, one.token] == 1:
                mine = [k[at[one.pos, one.token]] for k in keys]
                assert all(map(np.array_equal, mine, self.seen.setdefault(one, mine)))


@pytest.mark.parametrize("type_k", ["f32", "f16"])
@pytest.mark.parametrize("unified", [True, False])
def test_random_operations_agree_with_lists(unified: bool, type_k: str) -> None:
    kind = type("Layout", (CacheMachine,), {"unified": unified, "type_k": type_k})
    case = kind.TestCase
    case.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
    case().runTest()
