"""Samplers against a plain float64 model of each step, and against the probabilities that they promise."""

from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pykv.errors import ComputeError, ParamError
from pykv.runtime.sampling import (
    Candidates,
    Sampler,
    SamplingParams,
    divide_by_temperature,
    draw,
    filters_of,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise_repetition,
)

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
LOGITS = hnp.arrays(np.float32, st.integers(1, 40), elements=st.integers(-40, 40).map(lambda x: x / 4))


def plain(**wanted: object) -> SamplingParams:
    return SamplingParams(**{**OFF, **wanted})


def ids(candidates: Candidates) -> list[int]:
    return [candidates.id_at(i) for i in range(len(candidates.logits))]


# ---------------------------------------------------------------- the naive model, in float64


def naive_softmax(logits) -> list[float]:
    top = max(logits)
    weights = [math.exp(float(x) - float(top)) for x in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def naive_order(logits) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))


def naive_top_p(logits, p: float) -> list[int] | None:
    """Return the tokens kept, None where rounding may decide."""
    kept, reached, probabilities = [], 0.0, naive_softmax(logits)
    for i in naive_order(logits):
        if kept and abs(reached - p) < 1e-5:
            return None
        if kept and reached > p:
            break
        kept.append(i)
        reached += probabilities[i]
    return kept


# ---------------------------------------------------------------- each step


@settings(deadline=None)
@given(LOGITS, st.integers(1, 50))
def test_top_k_keeps_the_best_and_of_equals_the_first(logits, k):
    before = logits.copy()
    kept = keep_top_k(Candidates(logits), k)
    assert ids(kept) == naive_order(logits)[:k]
    assert kept.logits.tolist() == logits[ids(kept)].tolist()
    assert kept.is_sorted
    assert np.array_equal(logits, before)


@settings(deadline=None)
@given(LOGITS, st.floats(0.0, 0.999))
def test_top_p_keeps_the_fewest_that_reach_p(logits, p):
    expected = naive_top_p(logits, p)
    assume(expected is not None)
    assert ids(keep_top_p(Candidates(logits), p)) == expected


@settings(deadline=None)
@given(LOGITS, st.integers(1, 40), st.floats(0.0, 0.999))
def test_top_p_after_top_k_counts_only_what_is_left(logits, k, p):
    left = naive_order(logits)[:k]
    expected = naive_top_p(logits[left], p)
    assume(expected is not None)
    assert ids(keep_top_p(keep_top_k(Candidates(logits), k), p)) == [left[i] for i in expected]


@pytest.mark.parametrize("spread", [0.01, 8.0])
def test_top_p_of_a_large_vocabulary_looks_as_far_as_it_must(spread):
    logits = (np.random.default_rng(5).standard_normal(3000) * spread).astype(np.float32)
    for p in (0.1, 0.5, 0.9, 0.999):
        kept = ids(keep_top_p(Candidates(logits), p))
        order, probabilities = naive_order(logits), naive_softmax(logits)
        assert kept == order[: len(kept)]
        reached = math.fsum(probabilities[i] for i in kept)
        assert reached > p - 1e-5  # float32 exponentials
        assert reached - probabilities[kept[-1]] < p + 1e-5


@settings(deadline=None)
@given(LOGITS, st.floats(0.001, 1.0), st.booleans())
def test_min_p_keeps_a_share_of_the_best(logits, p, is_sorted):
    start = keep_top_k(Candidates(logits), 20) if is_sorted else Candidates(logits)
    probabilities = naive_softmax(start.logits)
    ratios = [probability / max(probabilities) for probability in probabilities]
    assume(all(abs(ratio / p - 1) > 1e-4 for ratio in ratios))
    kept = keep_min_p(start, p)
    assert ids(kept) == [token for token, ratio in zip(ids(start), ratios, strict=True) if ratio >= p]
    assert kept.is_sorted == is_sorted


@settings(deadline=None)
@given(LOGITS, st.floats(0.05, 20))
def test_temperature_divides_the_logits(logits, temperature):
    scaled = naive_softmax(divide_by_temperature(Candidates(logits), temperature).logits)
    expected = naive_softmax([float(x) / temperature for x in logits])
    assert scaled == pytest.approx(expected, rel=1e-4, abs=1e-12)


@pytest.mark.parametrize("temperature", [1e-46, 1e-30, 1e30])
def test_extreme_temperatures_stay_finite(temperature):
    sampler = Sampler(plain(temperature=temperature, seed=1))
    tokens = {sampler.sample(np.array([1, 3, 2], np.float32)) for _ in range(50)}
    assert tokens == ({1} if temperature < 1 else {0, 1, 2})


def test_repetition_divides_positive_and_multiplies_negative_logits():
    logits = np.array([4, -4, 0, 2, -2], np.float32)
    penalised = penalise_repetition(logits, np.array([0, 1, 2]), 2.0)
    assert penalised.tolist() == [2, -8, 0, 2, -2]
    assert logits.tolist() == [4, -4, 0, 2, -2]


# ---------------------------------------------------------------- the whole


def test_the_defaults_are_those_of_llama_cpp():
    params = SamplingParams()
    assert (params.top_k, params.top_p, params.min_p, params.temperature) == (40, 0.95, 0.05, 0.8)
    assert (params.repetition_penalty, params.penalty_last_n) == (1.0, 64)


def test_steps_run_in_llama_cpps_order_and_idle_ones_not_at_all():
    names = [step.func.__name__ for step in filters_of(SamplingParams())]
    assert names == ["keep_top_k", "keep_top_p", "keep_min_p", "divide_by_temperature"]
    assert filters_of(plain()) == []


def test_temperature_zero_takes_the_best_and_of_equals_the_lowest_id():
    logits = np.array([1, 7, 7, -np.inf], np.float32)
    sampler = Sampler(SamplingParams(temperature=0))
    assert [sampler.sample(logits) for _ in range(5)] == [1] * 5


def test_temperature_zero_heeds_the_repetition_penalty():
    sampler = Sampler(SamplingParams(temperature=0, repetition_penalty=2.0))
    logits = np.array([5, 6, 1], np.float32)
    said = []
    for _ in range(3):
        said.append(sampler.sample(logits))
        sampler.accept(said[-1])
    assert said == [1, 0, 1]  # 6, then 3 < 5, then 3 > 2.5


@pytest.mark.parametrize(("last_n", "penalised"), [(0, set()), (1, {2}), (2, {1, 2}), (3, {1, 2}), (-1, {0, 1, 2})])
def test_only_recent_tokens_are_penalised(last_n, penalised):
    sampler = Sampler(plain(temperature=0, repetition_penalty=4.0, penalty_last_n=last_n))
    for token in (0, 1, 1, 2):
        sampler.accept(token)
    seen = {token for token in range(4) if sampler.sample(_peak(token)) != token}
    assert seen == penalised


def _peak(token: int) -> np.ndarray:
    """Logits whose best is the token, unless it is penalised: then it is token 4."""
    logits = np.zeros(5, np.float32)
    logits[[token, 4]] = 2, 1
    return logits


def test_a_token_leaves_the_window_only_with_its_last_mention():
    sampler = Sampler(plain(temperature=0, repetition_penalty=4.0, penalty_last_n=2))
    for token in (1, 1, 3):
        sampler.accept(token)
    assert sampler.sample(_peak(1)) == 4
    sampler.accept(3)
    assert sampler.sample(_peak(1)) == 1


def test_equal_seeds_draw_equal_tokens_and_reset_begins_anew():
    logits = np.zeros(1000, np.float32)
    one, other, third = (Sampler(plain(seed=seed)) for seed in (7, 7, 8))
    drawn = [one.sample(logits) for _ in range(20)]
    assert drawn == [other.sample(logits) for _ in range(20)]
    assert drawn != [third.sample(logits) for _ in range(20)]
    one.reset()
    assert drawn == [one.sample(logits) for _ in range(20)]


def test_without_a_seed_two_samplers_differ():
    logits = np.zeros(1000, np.float32)
    one, other = Sampler(plain()), Sampler(plain())
    assert [one.sample(logits) for _ in range(20)] != [other.sample(logits) for _ in range(20)]


@pytest.mark.parametrize(
    "params",
    [
        plain(seed=3),
        plain(seed=4, temperature=2.0),
        plain(seed=5, top_k=3),
        plain(seed=6, top_p=0.8),
        plain(seed=7, min_p=0.2),
    ],
)
def test_tokens_come_as_often_as_their_probability_says(params):
    logits, n = np.array([0, 2, -1, 1.5, -np.inf, 1], np.float32), 8_000
    kept = set(naive_order(logits)[: params.top_k or None])
    kept &= set(naive_top_p(logits, params.top_p) or ()) if params.top_p < 1 else kept
    probabilities = naive_softmax(logits)
    kept &= {i for i in kept if probabilities[i] >= params.min_p * max(probabilities)}
    chosen = sorted(kept)
    expected = dict(zip(chosen, naive_softmax([float(logits[i]) / params.temperature for i in chosen]), strict=True))
    sampler = Sampler(params)
    counts = Counter(sampler.sample(logits) for _ in range(n))
    assert set(counts) <= {token for token, probability in expected.items() if probability > 0}
    for token, probability in expected.items():  # five standard deviations
        assert abs(counts[token] - n * probability) <= 5 * math.sqrt(n * probability * (1 - probability)) + 1e-9


@settings(deadline=None)
@given(LOGITS, st.integers(0, 2**32))
def test_a_draw_never_takes_an_impossible_token(logits, seed):
    logits = np.where(np.arange(len(logits)) % 2, np.float32(-np.inf), logits)
    assert draw(Candidates(logits), np.random.default_rng(seed)) % 2 == 0


def test_a_step_of_ones_own_is_one_function():
    def only_even(candidates: Candidates) -> Candidates:
        return candidates.keep(np.arange(0, len(candidates.logits), 2), is_sorted=candidates.is_sorted)

    sampler = Sampler(plain(seed=1), filters=[only_even])
    assert {sampler.sample(np.zeros(6, np.float32)) for _ in range(100)} == {0, 2, 4}


def test_sampling_leaves_the_logits_as_they_were():
    logits = np.random.default_rng(1).standard_normal(3000).astype(np.float32)
    before = logits.copy()
    sampler = Sampler(SamplingParams(seed=1, repetition_penalty=1.3))
    sampler.accept(5)
    sampler.sample(logits)
    assert np.array_equal(logits, before)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ([1, np.nan, np.nan], "logits are NaN, first at token 1"),
        ([-np.inf, -np.inf], "logits are -inf at all tokens"),
        ([1, 2, np.inf], "logits are inf at token 2"),
    ],
)
def test_logits_that_allow_no_choice_are_an_error(bad, complaint, temperature):
    with pytest.raises(ComputeError, match=complaint):
        Sampler(SamplingParams(temperature=temperature)).sample(np.array(bad, np.float32))


@pytest.mark.parametrize("bad", [np.zeros((1, 4), np.float32), np.zeros(0, np.float32), np.zeros(4)])
def test_logits_of_another_shape_or_type_are_an_error(bad):
    with pytest.raises(ParamError, match="logits must be float32 of shape"):
        Sampler(SamplingParams()).sample(bad)


@pytest.mark.parametrize("bad", [None, [0.5, 1.0], "abc", 3, np.float32(1)])
def test_logits_that_are_no_array_were_an_attribute_error(bad):
    with pytest.raises(ParamError, match=rf"^logits must be float32 of shape \(n_vocab,\), not {type(bad).__name__}$"):
        Sampler(SamplingParams()).sample(bad)


@pytest.mark.parametrize("bad", [1.5, True, np.True_, 10**30, 2**31, -1, None, "a", np.float32(1)])
def test_a_token_that_is_none_was_kept_and_broke_the_next_sample(bad):
    sampler = Sampler(SamplingParams(repetition_penalty=1.1, penalty_last_n=2))
    with pytest.raises(
        ParamError, match=f"^token is {re.escape(repr(bad))}, must be an integer from 0 to {2**31 - 1}$"
    ):
        sampler.accept(bad)
    sampler.accept(np.int32(1))
    assert sampler.sample(np.array([0.0, -9.0], np.float32)) == 0


def test_accepted_tokens_must_be_in_the_logits():
    sampler = Sampler(SamplingParams(repetition_penalty=1.1))
    sampler.accept(9)
    with pytest.raises(ParamError, match="logits has 5 tokens, but token 9 was accepted"):
        sampler.sample(np.zeros(5, np.float32))


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("temperature", -0.1, "finite and at least 0"),
        ("temperature", math.inf, "finite and at least 0"),
        ("temperature", math.nan, "finite and at least 0"),
        ("temperature", "1", "finite and at least 0"),
        ("top_k", -1, "an integer of at least 0"),
        ("top_k", 1.5, "an integer of at least 0"),
        ("top_k", True, "an integer of at least 0"),
        ("top_p", 1.01, "between 0 and 1"),
        ("top_p", -0.01, "between 0 and 1"),
        ("min_p", 2, "between 0 and 1"),
        ("repetition_penalty", 0, "above 0"),
        ("repetition_penalty", -1.0, "finite and at least 0"),
        ("penalty_last_n", -2, "an integer of at least -1"),
        ("seed", -1, "an integer of at least 0"),
        ("seed", 0.5, "an integer of at least 0"),
    ],
)
def test_a_parameter_out_of_range_is_named(name, value, limit):
    with pytest.raises(ParamError, match=f"{name} is {value!r}, must be {limit}"):
        SamplingParams(**{name: value})
