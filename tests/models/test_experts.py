"""Experts against numpy, one token at a time: every way of choosing and weighing them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support.cpu_graph import Bench
from support.nmse import nmse

from pykv.ggml import Arena, Tensor
from pykv.models.blocks import Affine
from pykv.models.experts import Experts, Routing, mix_experts
from pykv.models.gpt_oss import oai_gate
from pykv.models.graph_builder import GraphBuilder

N_EMBD, N_FF, N_EXPERT, N_TOKENS = 16, 12, 8, 7


class Builder:
    """As much of a graph builder as experts need."""

    linear = GraphBuilder.linear

    def __init__(self, arena: Arena) -> None:
        self.arena, self.graph = arena, self

    def expand(self, node: Tensor) -> None:
        """Leave it to the output to bring in what it needs."""


@dataclass
class Weights:
    """Random weights as numpy has them, outputs first."""

    has_biases: bool = False
    has_choice_bias: bool = False

    def __post_init__(self) -> None:
        rng = np.random.default_rng(8)

        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        self.x = draw(N_TOKENS, N_EMBD)
        self.router, self.gate = draw(N_EXPERT, N_EMBD), draw(N_EXPERT, N_FF, N_EMBD)
        self.up, self.down = draw(N_EXPERT, N_FF, N_EMBD), draw(N_EXPERT, N_EMBD, N_FF)
        sizes = {"router": (N_EXPERT,), "gate": (N_EXPERT, N_FF), "up": (N_EXPERT, N_FF), "down": (N_EXPERT, N_EMBD)}
        self.biases = {name: draw(*size) if self.has_biases else None for name, size in sizes.items()}
        self.choice_bias = 2 * draw(N_EXPERT) if self.has_choice_bias else None

    def bias(self, name: str) -> Any:
        found = self.biases[name]
        return 0.0 if found is None else found

    def put(self, bench: Bench, *, merged: bool) -> Experts:
        """Return the weights as operands of a graph."""

        def affine(name: str) -> Affine:
            bias = self.biases[name]
            return Affine(bench.put(getattr(self, name)), None if bias is None else bench.put(bias))

        both = None
        if merged:
            weight = bench.put(np.concatenate([self.gate, self.up], axis=1))
            biases = [self.biases[name] for name in ("gate", "up")]
            both = Affine(weight, bench.put(np.concatenate(biases, axis=1)) if self.has_biases else None)
        return Experts(
            router=affine("router"),
            choice_bias=None if self.choice_bias is None else bench.put(self.choice_bias),
            gate=None if merged else affine("gate"),
            up=None if merged else affine("up"),
            gate_up=both,
            down=affine("down"),
        )


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x - x.max()) / np.exp(x - x.max()).sum()


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def naive_choice(w: Weights, routing: Routing, x: np.ndarray) -> list[tuple[int, float]]:
    """Return the experts of one token and their weights."""
    scores = w.router @ x + w.bias("router")
    probs = {"softmax": softmax, "sigmoid": lambda s: 1 / (1 + np.exp(-s))}.get(routing.gating, lambda s: s)(scores)
    merits = (scores if routing.chooses_by_score else probs) + (0 if w.choice_bias is None else w.choice_bias)
    if routing.n_group > 1:
        groups = merits.reshape(routing.n_group, -1)
        order = np.argsort(-np.sort(groups, axis=1)[:, -2:].sum(axis=1))
        groups[order[routing.n_group_used :]] = -np.inf
        merits = groups.reshape(-1)
    chosen = np.argsort(-merits)[: routing.n_used]
    weights = probs[chosen]
    if routing.gating == "softmax_of_chosen":
        weights = softmax(weights)
    if routing.is_normed:
        weights = weights / max(weights.sum(), 2.0**-14)
    return list(zip(chosen.tolist(), (weights * routing.scale).tolist(), strict=True))


def naive(w: Weights, routing: Routing, activate: Any) -> np.ndarray:
    rows = []
    for x in w.x.astype(np.float64):
        total = np.zeros(N_EMBD)
        for i, weight in naive_choice(w, routing, x):
            given = x * weight if routing.weighs_input else x
            gate, up = (
                getattr(w, n)[i] @ given + np.broadcast_to(w.bias(n), (N_EXPERT, N_FF))[i] for n in ("gate", "up")
            )
            out = w.down[i] @ activate(gate, up) + np.broadcast_to(w.bias("down"), (N_EXPERT, N_EMBD))[i]
            total += out if routing.weighs_input else weight * out
        rows.append(total)
    return np.array(rows)


def computed(w: Weights, routing: Routing, *, merged: bool = False, **activate: Any) -> np.ndarray:
    bench = Bench(nodes=Arena(96, 96))
    out = mix_experts(Builder(bench.nodes), bench.put(w.x), w.put(bench, merged=merged), routing, **activate)
    assert out.is_contiguous
    with bench.computed(out):
        return out.numpy()[0, 0]


ROUTINGS = {
    "mixtral": Routing(N_EXPERT, 2, is_normed=True),
    "deepseek v2": Routing(N_EXPERT, 3, scale=16.0),
    "deepseek v3": Routing(N_EXPERT, 3, "sigmoid", is_normed=True, scale=2.5, n_group=4, n_group_used=2),
    "two of four": Routing(N_EXPERT, 4, "softmax", n_group=2, n_group_used=1),
    "gpt-oss": Routing(N_EXPERT, 4, "softmax_of_chosen"),
    "llama4": Routing(N_EXPERT, 1, "sigmoid", chooses_by_score=True, weighs_input=True),
    "llama4 with more": Routing(N_EXPERT, 3, "sigmoid", chooses_by_score=True, weighs_input=True),
    "all": Routing(N_EXPERT, N_EXPERT, "sigmoid"),
}


@pytest.mark.parametrize("merged", [False, True], ids=["apart", "merged"])
@pytest.mark.parametrize(("biases", "choice_bias"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_experts_are_those_of_numpy(routing: Routing, biases: bool, choice_bias: bool, merged: bool) -> None:
    w = Weights(biases, choice_bias)
    expected = naive(w, routing, lambda gate, up: silu(gate) * up)
    assert nmse(computed(w, routing, merged=merged), expected) < 1e-11


def test_the_gate_of_gpt_oss_is_cut_off() -> None:
    w, routing = Weights(has_biases=True), ROUTINGS["gpt-oss"]
    w.x *= 4  # so that many reach the limit

    def activate(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)

    assert nmse(computed(w, routing, activate=oai_gate), naive(w, routing, activate)) < 1e-11


def test_weights_that_vanish_are_not_divided_by_zero() -> None:
    """Sigmoids of very negative scores: their sum counts as the smallest normal f16."""
    w, routing = Weights(), Routing(N_EXPERT, 2, "sigmoid", is_normed=True)
    w.x[:] = np.abs(w.x)
    w.router[:] = -np.abs(w.router) * 100
    out = computed(w, routing)
    assert np.isfinite(out).all()
    assert np.abs(out).max() < 1e-3
