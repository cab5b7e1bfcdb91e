"""An observed context: what its attention gave to each cell, against a forward pass in plain numpy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.naive_llama import NaiveLlama
from support.tiny_gguf import TinyModel
from support.twin import TOKENS

import pykv
from pykv import AttentionMass
from pykv.errors import AllocError, ComputeCancelled, ConcurrentUseError, ParamError, UseAfterCloseError
from pykv.ggml import Graph, Sched
from pykv.memory import AttentionPath, AttentionPlan
from pykv.runtime import Context
from pykv.runtime.observe import Observation
from pykv.runtime.params import ContextParams

TINY = TinyModel(seed=91)  # two layers, four heads over two KV heads
PATHS = ("fused", "flash", "matmul")
NEAR = {"fused": 5e-3, "flash": 5e-3, "matmul": 1e-4}
"""How far a share may be off: the first two round keys, values and queries to f16."""


@pytest.fixture(scope="module")
def model(write_tiny: Callable[[TinyModel], Path]) -> Iterator[pykv.Model]:
    with pykv.Model.load(write_tiny(TINY)) as loaded:
        yield loaded


class SeenLlama(NaiveLlama):
    """The naive forward pass, which also keeps its softmax: per layer (n_head, n_new, n_rows)."""

    shares: dict[int, np.ndarray]

    def _attention(self, il, x, may_see):
        m = self.model
        h = self._norm(x, f"blk.{il}.attn_norm.weight")
        q = self._rotate(self._linear(h, f"blk.{il}.attn_q").reshape(len(x), m.n_head, m.head_dim), self.pos[-len(x) :])
        new = self._linear(h, f"blk.{il}.attn_k").reshape(len(x), m.n_head_kv, m.head_dim)
        keys = self._rotate(np.concatenate([self._stored_k[il], new]), self.pos)
        keys = keys.repeat(m.n_head // m.n_head_kv, axis=1)
        scores = np.where(may_see, np.einsum("ihd,jhd->hij", q, keys) / np.sqrt(m.head_dim), -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        self.shares[il] = weights / weights.sum(axis=-1, keepdims=True)
        return super()._attention(il, x, may_see)


def naive() -> SeenLlama:
    out = SeenLlama(TINY)
    out.shares = {}
    return out


def context(model: pykv.Model, path: str, **settings) -> pykv.Context:
    exact = {"type_k": "f32", "type_v": "f32", "n_threads": 1, "n_ctx": 256}
    return model.context(**exact | {"attention": path} | settings)


def by_position(seen: Observation, il: int, seq_id: int) -> np.ndarray:
    """Return the mass of a sequence's cells in the order of their positions."""
    cells = np.flatnonzero(seen.members[seq_id])
    return seen.mass[il][..., cells[np.argsort(seen.pos[cells])]]


@pytest.mark.parametrize("path", PATHS)
def test_each_token_received_what_the_naive_forward_gave_it(model: pykv.Model, path: str) -> None:
    oracle = naive()
    with context(model, path) as ctx, ctx.observe() as observer:
        for tokens in (TOKENS[:70], TOKENS[70:73], TOKENS[73:74]):
            ctx.decode(pykv.Batch(tokens))
            oracle.decode(tokens)
            (seen,) = observer
            assert list(seen.tokens) == list(range(len(tokens)))
            assert list(seen.mass) == [0, 1]
            for il, mass in seen.mass.items():
                assert mass.dtype == np.float32
                assert mass.shape == seen.pos.shape == seen.members.shape[1:]
                expected = oracle.shares[il].sum(axis=(0, 1))
                assert np.abs(by_position(seen, il, 0) - expected).max() <= NEAR[path] * max(1, expected.max())
                assert mass.sum() == pytest.approx(4 * len(tokens), rel=1e-4)
                assert not mass[seen.pos < 0].any()


@pytest.mark.parametrize("path", PATHS)
def test_heads_largest_and_the_last_tokens(model: pykv.Model, path: str) -> None:
    whats = (
        AttentionMass(per_kv_head=True, heads=(1, 2)),
        AttentionMass(largest=True, per_kv_head=True),
        AttentionMass(last=4, per_kv_head=True),
    )
    for what in whats:
        oracle = naive()
        with context(model, path) as ctx, ctx.observe(layers=[1], what=what) as observer:
            for tokens in (TOKENS[:70], TOKENS[70:76], TOKENS[76:77]):
                ctx.decode(pykv.Batch(tokens))
                oracle.decode(tokens)
                (seen,) = observer
                assert list(seen.mass) == [1]
                shares = oracle.shares[1][:, -(what.last or 99) :]
                assert list(seen.tokens) == list(range(len(tokens)))[-(what.last or 99) :]
                if what.heads:
                    shares = np.array([one if h in what.heads else 0 * one for h, one in enumerate(shares)])
                shares = shares.reshape(2, -1, shares.shape[-1])
                expected = shares.max(axis=1) if what.largest else shares.sum(axis=1)
                assert by_position(seen, 1, 0).shape == expected.shape
                assert np.abs(by_position(seen, 1, 0) - expected).max() <= NEAR[path] * max(1, expected.max())


@pytest.mark.parametrize("path", PATHS)
def test_each_stream_is_observed_for_itself(model: pykv.Model, path: str) -> None:
    with context(model, path, n_ctx=512, n_seq_max=2, kv_unified=False) as ctx, ctx.observe() as observer:
        ctx.decode(pykv.Batch(TOKENS[:20], seq_id=[0] * 12 + [1] * 8))
        ctx.decode(pykv.Batch(TOKENS[20:22], seq_id=[0, 1]))
        *_, first, second = observer
        both = (first, second)
        assert [seen.stream for seen in both] == [0, 1]
        assert [list(seen.tokens) for seen in both] == [[0], [1]]
        for seen, n in zip(both, (13, 9), strict=True):
            assert seen.members[seen.stream].sum() == n
            assert seen.mass[0].sum() == pytest.approx(4, rel=1e-4)


def test_only_ubatches_with_tokens_that_count_are_seen(model: pykv.Model) -> None:
    with context(model, "matmul", n_ubatch=16) as ctx, ctx.observe(what=AttentionMass(last=6)) as observer:
        ctx.decode(pykv.Batch(TOKENS[:52]))
        assert [list(seen.tokens) for seen in observer] == [[46, 47], [48, 49, 50, 51]]


@pytest.mark.parametrize("path", PATHS)
def test_the_last_layer_is_seen_where_no_logits_are_wanted(model: pykv.Model, path: str) -> None:
    oracle = naive()
    with context(model, path) as ctx, ctx.observe(layers=[1]) as observer:
        for tokens in (TOKENS[:70], TOKENS[70:74]):
            ctx.decode(pykv.Batch(tokens, logits="none"))
            oracle.decode(tokens)
            (seen,) = observer
            expected = oracle.shares[1].sum(axis=(0, 1))
            assert np.abs(by_position(seen, 1, 0) - expected).max() <= NEAR[path] * max(1, expected.max())


def test_an_observation_keeps_the_cells_as_they_were(model: pykv.Model) -> None:
    with context(model, "fused", n_seq_max=2) as ctx, ctx.observe(layers=[0]) as observer:
        ctx.decode(pykv.Batch(TOKENS[:5]))
        ctx.memory.seq_cp(0, 1)
        ctx.memory.seq_rm(0, 0, 2)
        ctx.decode(pykv.Batch(TOKENS[5:6]))
        ctx.memory.clear()
        first, second = observer
        assert first.pos[:6].tolist() == [0, 1, 2, 3, 4, -1]
        assert [first.owners(cell) for cell in range(2)] == [(0,), (0,)]
        assert [second.owners(cell) for cell in range(7)] == [(1,), (1,), (0, 1), (0, 1), (0, 1), (0,), ()]
        assert second.mass[0][:2].tolist() == [0, 0]
        assert not list(observer)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "f16")])
def test_logits_are_the_same_bits_with_and_without(model: pykv.Model, path: str, types: tuple[str, str]) -> None:
    settings = {"type_k": types[0], "type_v": types[1]}
    with context(model, path, **settings) as plain, context(model, path, **settings) as watched:
        observer = watched.observe()
        for i, tokens in enumerate((TOKENS[:70], TOKENS[70:75], TOKENS[75:76], TOKENS[76:77])):
            if i == 3:
                observer.close()
            for ctx in (plain, watched):
                ctx.decode(pykv.Batch(tokens, logits="all"))
            assert np.array_equal(plain.logits, watched.logits)
        assert len(list(observer)) == 3


def test_graphs_are_reused_while_observing(model: pykv.Model) -> None:
    with context(model, "fused") as ctx:
        ctx.decode(pykv.Batch(TOKENS[:5]))
        with ctx.observe():
            before = ctx.n_reused
            for token in TOKENS[5:9]:
                ctx.decode(pykv.Batch([token]))
            assert ctx.n_reused == before + 3


def test_what_is_refused(model: pykv.Model) -> None:
    with context(model, "flash") as ctx:
        for arguments, message in (
            ({"layers": [2]}, "layers = 2: must be an integer from 0 to 1"),
            ({"layers": []}, "layers = \\[\\]: must name at least one"),
            ({"layers": 1}, "layers = 1: must be a sequence"),
            ({"what": "mass"}, "what = 'mass': must be an AttentionMass"),
            ({"what": AttentionMass(heads=(4,))}, "no head 4, the layer has heads 0 to 3"),
        ):
            with pytest.raises(ParamError, match=message):
                ctx.observe(**arguments)
        for zero_dim in (np.array(1), np.array([0.0])):
            with pytest.raises(ParamError, match="layers = "):
                ctx.observe(layers=zero_dim)


@pytest.mark.parametrize("path", PATHS)
def test_sums_and_largest_shares_at_the_same_time(model: pykv.Model, path: str) -> None:
    """Each observer sees what it would see alone, and one that begins or ends meanwhile disturbs no other."""
    whats = (AttentionMass(), AttentionMass(largest=True, per_kv_head=True), AttentionMass(last=3, heads=(1,)))
    parts = (TOKENS[:70], TOKENS[70:100], TOKENS[100:104], TOKENS[104:105])

    def alone(what: AttentionMass) -> list[Observation]:
        with context(model, path) as ctx, ctx.observe(what=what) as observer:
            for part in parts:
                ctx.decode(pykv.Batch(part))
            return list(observer)

    with context(model, path) as ctx, context(model, path) as plain:
        together = [ctx.observe(what=what) for what in whats]
        for i, part in enumerate(parts):
            for one in (ctx, plain):
                one.decode(pykv.Batch(part, logits="all"))
            assert np.array_equal(ctx.logits, plain.logits)
            if i == 1:
                together[1].close()
        for k, (observer, what) in enumerate(zip(together, whats, strict=True)):
            seen = list(observer)
            assert len(seen) == (2 if k == 1 else 4)
            for ours, expected in zip(seen, alone(what), strict=False):
                assert ours.tokens.tolist() == expected.tokens.tolist()
                for il in (0, 1):
                    assert np.array_equal(ours.mass[il], expected.mass[il])


def test_layers_may_be_observed_differently(model: pykv.Model) -> None:
    with context(model, "fused") as ctx:
        first, second = ctx.observe([0]), ctx.observe([1], AttentionMass(last=1, per_kv_head=True))
        ctx.decode(pykv.Batch(TOKENS[:20]))
        ((seen_0,), (seen_1,)) = first, second
        assert (list(seen_0.mass), list(seen_1.mass)) == ([0], [1])
        assert (len(seen_0.tokens), len(seen_1.tokens)) == (20, 1)
        assert seen_1.mass[1].shape == (2, 256)


def test_an_observation_cannot_be_changed(model: pykv.Model) -> None:
    with context(model, "fused") as ctx, ctx.observe() as observer:
        ctx.decode(pykv.Batch(TOKENS[:5]))
        (seen,) = observer
        for array in (seen.pos, seen.members, seen.tokens, *seen.mass.values()):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
        with pytest.raises(TypeError):
            seen.mass[0] = seen.mass[1]
        for cell in (-1, 256, 1.5, "a", None):
            with pytest.raises(ParamError, match=r"cell = .*: must be an integer from 0 to 255"):
                seen.owners(cell)


def test_an_observation_held_as_many_cells_as_the_context_has(write_tiny: Callable[[TinyModel], Path]) -> None:
    with (
        pykv.Model.load(write_tiny(TinyModel(seed=91, n_ctx_train=4096))) as deep,
        context(deep, "fused", n_ctx=4096, n_seq_max=64) as ctx,
        ctx.observe() as observer,
    ):
        ctx.decode(pykv.Batch(TOKENS[:2], pos=[0, 0], seq_id=[0, 63]))
        (seen,) = observer
        assert seen.members.shape == (64, 256)
        assert seen.members.base is None
        assert seen.members.any(axis=1).tolist() == [True, *[False] * 62, True]


# memory, failures


def test_an_observer_that_was_closed_kept_its_memory(model: pykv.Model) -> None:
    for path in PATHS:
        with context(model, path) as ctx:
            before = ctx.compute_nbytes
            all_of_it, late = ctx.observe(), ctx.observe(what=AttentionMass(last=1))
            assert ctx.compute_nbytes >= before
            late.close()
            all_of_it.close()
            assert ctx.compute_nbytes == before


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("last", [None, 1, 20, 40, 70])
def test_memory_is_had_when_observing_begins(model: pykv.Model, path: str, last: int | None) -> None:
    with context(model, path, n_ubatch=64, n_ctx=1024) as ctx:
        ctx.observe(what=AttentionMass(last=last))
        ctx.observe(what=AttentionMass(last=last, largest=True, per_kv_head=True), layers=[1])
        before = ctx.compute_nbytes
        for n in (64, 1, 63, 17, 64 + 15, 16, 64 + 63, 2 * 64 + 1, 40, 64, 64, 64, 64):
            ctx.decode(pykv.Batch(TOKENS[:n], logits="all"))
            assert ctx.compute_nbytes == before, n


def test_observing_without_memory_left_nothing_reserved(model: pykv.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with context(model, "flash") as ctx, ctx.observe(what=AttentionMass(last=1)) as observer:
        before, reserve = ctx.compute_nbytes, ctx._compute._sched.__class__.reserve

        def no_memory(sched: Sched, graph: Graph, purpose: str) -> None:
            if ctx._observers != (observer,) or wanted:
                wanted.clear()
                raise AllocError(f"{purpose}: no memory for the compute buffers")
            reserve(sched, graph, purpose)

        wanted = [1]
        monkeypatch.setattr(Sched, "reserve", no_memory)
        with pytest.raises(AllocError, match="n_ubatch=256 over 256 cells: no memory"):
            ctx.observe()
        monkeypatch.undo()
        assert ctx.compute_nbytes == before
        ctx.decode(pykv.Batch(TOKENS[:5]))
        assert [seen.tokens.tolist() for seen in observer] == [[4]]


@pytest.mark.parametrize("error", [AllocError("full"), ComputeCancelled("stopped")], ids=["AllocError", "cancelled"])
def test_a_ubatch_that_fails_is_not_seen(model: pykv.Model, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    oracle = naive()
    with context(model, "matmul", n_ubatch=8) as ctx, ctx.observe(layers=[0]) as observer:
        compute, n = Sched.compute, 0

        def third_fails(sched: Sched, graph: Graph) -> None:
            nonlocal n
            n += 1
            if n == 3:
                raise error
            compute(sched, graph)

        monkeypatch.setattr(Sched, "compute", third_fails)
        with pytest.raises(type(error)):
            ctx.decode(pykv.Batch(TOKENS[:30]))
        monkeypatch.undo()
        assert [seen.tokens.tolist() for seen in observer] == [[*range(8)], [*range(8, 16)]]
        oracle.decode(TOKENS[:16])
        ctx.decode(pykv.Batch(TOKENS[16:20]))
        oracle.decode(TOKENS[16:20])
        (seen,) = observer
        expected = oracle.shares[0].sum(axis=(0, 1))
        assert np.abs(by_position(seen, 0, 0) - expected).max() <= NEAR["matmul"] * max(1, expected.max())


def test_a_decode_that_is_cancelled_while_observed(model: pykv.Model) -> None:
    with context(model, "fused", n_ctx=2048, n_ubatch=4) as ctx, ctx.observe() as observer:
        failed: list[BaseException] = []

        def decode() -> None:
            try:
                ctx.decode(pykv.Batch(TOKENS[:1900]))
            except ComputeCancelled as error:
                failed.append(error)

        thread = threading.Thread(target=decode)
        thread.start()
        while ctx.n_reused < 5 and thread.is_alive():
            time.sleep(0.001)
        with pytest.raises(ConcurrentUseError):
            observer.close()
        with pytest.raises(ConcurrentUseError):
            ctx.observe()
        ctx.cancel()
        thread.join()
        assert len(failed) == 1
        assert not observer.closed
        stored = ctx.memory.pos_max(0) + 1
        assert sum(len(seen.tokens) for seen in observer) == stored


def test_v_that_is_turned_while_observed(model: pykv.Model) -> None:
    plan = AttentionPlan(AttentionPath.FLASH, 20, AttentionPath.FUSED)
    oracle, ways = naive(), set()
    with Context(model, ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32"), plan) as ctx:
        observer = ctx.observe(layers=[1])
        for tokens in (TOKENS[:15], *([t] for t in TOKENS[15:30]), TOKENS[30:50]):
            ctx.decode(pykv.Batch(tokens))
            oracle.decode(tokens)
            ways.add(ctx.memory.store.v_trans)
            (seen,) = observer
            expected = oracle.shares[1].sum(axis=(0, 1))
            assert np.abs(by_position(seen, 1, 0) - expected).max() <= NEAR["flash"] * max(1, expected.max())
    assert ways == {False, True}


def test_closing_in_any_order(model: pykv.Model) -> None:
    ctx = context(model, "fused")
    first = ctx.observe()
    ctx.decode(pykv.Batch(TOKENS[:3]))
    first.close()
    first.close()
    assert first.closed
    ctx.decode(pykv.Batch(TOKENS[3:4]))
    assert len(list(first)) == 1
    second = ctx.observe()
    ctx.decode(pykv.Batch(TOKENS[4:5]))
    ctx.close()
    assert second.closed
    second.close()
    assert len(list(second)) == 1
    with pytest.raises(UseAfterCloseError):
        ctx.observe()


def test_another_thread_cannot_observe_what_is_in_use(model: pykv.Model) -> None:
    with context(model, "fused") as ctx:
        refused: list[BaseException] = []

        def other() -> None:
            try:
                ctx.observe()
            except BaseException as error:
                refused.append(error)

        with ctx.memory.guard:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        assert [type(error) for error in refused] == [ConcurrentUseError]
