"""Mixtures of experts: which experts a token meets, and what they make of it.

Follows llama.cpp's ``build_moe_ffn``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from pykv.ggml import Tensor, ops
from pykv.models.blocks import Affine
from pykv.models.graph_builder import GraphBuilder
from pykv.models.keys import Keys
from pykv.models.weights import LayerWeights, Use

Activate = Callable[[GraphBuilder, Tensor, Tensor], Tensor]
"""Joins gate and up, [n_ff, n_used, n_tokens] each."""

GATINGS = {1: "softmax", 2: "sigmoid", 3: "softmax_of_chosen"}
"""What ``expert_gating_func`` means."""

LEAST_SUM = 2.0**-14
"""What a sum of weights counts at least, when they are divided by it: the smallest normal f16."""


@dataclass(frozen=True)
class Routing:
    """How a token's experts are chosen and weighted.

    Attributes
    ----------
    n_expert, n_used : experts there are, and that each token meets.
    gating : how router scores become weights: "softmax" or "sigmoid" of all, or "softmax_of_chosen".
    chooses_by_score : the largest scores are chosen, not the largest weights.
    is_normed : the weights of the chosen are divided by their sum.
    scale : factor on weights.
    n_group, n_group_used : experts come in groups, of which only the best ones count; 1 = no groups.
    weighs_input : weights go on what the experts are given, not on what they return.
    """

    n_expert: int
    n_used: int
    gating: str = "softmax"
    chooses_by_score: bool = False
    is_normed: bool = False
    scale: float = 1.0
    n_group: int = 1
    n_group_used: int = 1
    weighs_input: bool = False

    @classmethod
    def from_keys(cls, keys: Keys, gating: str, *, chooses_by_score: bool = False, weighs_input: bool = False) -> Self:
        """Return what a file says about its experts.

        Raises
        ------
        GGUFError : names the key, its value and the limit.
        """
        n_expert = keys.size("expert_count")
        n_used = keys.size("expert_used_count")
        n_group, n_group_used = _groups(keys, n_expert, n_used)
        return cls(
            n_expert=n_expert,
            n_used=n_used,
            gating=gating,
            chooses_by_score=chooses_by_score,
            is_normed=keys.flag("expert_weights_norm", False),
            scale=keys.finite("expert_weights_scale", 0.0) or 1.0,
            n_group=n_group,
            n_group_used=n_group_used,
            weighs_input=weighs_input,
        )


def _groups(keys: Keys, n_expert: int, n_used: int) -> tuple[int, int]:
    n_group = keys.size("expert_group_count", 0, least=0)
    if n_group <= 1:
        return 1, 1
    # the two best of each group tell how good it is
    if n_expert % n_group or n_expert // n_group < 2:
        raise keys.refusal("expert_group_count", n_group, f"equal parts of {n_expert} experts, two or more in each")
    n_group_used = keys.size("expert_group_used_count")
    if n_group_used >= n_group or n_group_used * (n_expert // n_group) < n_used:
        limits = f"fewer than the {n_group} groups, and hold {n_used} experts"
        raise keys.refusal("expert_group_used_count", n_group_used, limits)
    return n_group, n_group_used


@dataclass(frozen=True)
class Experts:
    """Weights of one layer's experts; None where the file has none.

    Attributes
    ----------
    router : scores of all experts.
    choice_bias : [n_expert], counts for the choice alone.
    gate_up : gate and up below one another, instead of `gate` and `up`.
    """

    router: Affine
    choice_bias: Tensor | None
    gate: Affine | None
    up: Affine | None
    gate_up: Affine | None
    down: Affine

    @classmethod
    def take(cls, w: LayerWeights, n_embd: int, n_ff: int, n_expert: int) -> Self:
        """Take the tensors of a layer, gate and up together or apart."""
        gate_up = _maybe_stack(w, "ffn_gate_up_exps", n_embd, 2 * n_ff, n_expert)
        apart = gate_up is None
        return cls(
            router=Affine.take(w, "ffn_gate_inp", n_embd, n_expert),
            choice_bias=w.maybe("exp_probs_b.bias", n_expert),
            gate=_stack(w, "ffn_gate_exps", n_embd, n_ff, n_expert) if apart else None,
            up=_stack(w, "ffn_up_exps", n_embd, n_ff, n_expert) if apart else None,
            gate_up=gate_up,
            down=_stack(w, "ffn_down_exps", n_ff, n_embd, n_expert),
        )


def _stack(w: LayerWeights, name: str, *ne: int) -> Affine:
    """Return the matrices of all experts [n_in, n_out, n_expert], with their biases [n_out, n_expert] if there are."""
    return Affine(w.need(f"{name}.weight", *ne, use=Use.EXPERTS), w.maybe_f32(f"{name}.bias", *ne[1:]))


def _maybe_stack(w: LayerWeights, name: str, *ne: int) -> Affine | None:
    weight = w.maybe(f"{name}.weight", *ne, use=Use.EXPERTS)
    return None if weight is None else Affine(weight, w.maybe_f32(f"{name}.bias", *ne[1:]))


def swiglu(b: GraphBuilder, gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    return ops.swiglu(b.arena, gate, up)


def mix_experts(b: GraphBuilder, x: Tensor, experts: Experts, routing: Routing, activate: Activate = swiglu) -> Tensor:
    """Return what a token's experts make of it in all, [n_embd, n_tokens] of `x` [n_embd, n_tokens]."""
    chosen, weights = route(b, x, experts, routing)
    b.graph.expand(weights)  # next to the choice, so that a backend can do both at once
    n_embd, n_tokens = x.ne[:2]
    given = ops.reshape(b.arena, x, n_embd, 1, n_tokens)
    if routing.weighs_input:
        given = ops.mul(b.arena, ops.repeat(b.arena, given, n_embd, routing.n_used, n_tokens), weights)
    out = _by_chosen(b, activate(b, *_gate_and_up(b, given, experts, chosen)), experts.down, chosen)
    if not routing.weighs_input:
        out = ops.mul(b.arena, out, weights)
    return _sum(b, out)


def route(b: GraphBuilder, x: Tensor, experts: Experts, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return each token's experts [n_used, n_tokens] i32, and their weights [1, n_used, n_tokens]."""
    arena, n_tokens = b.arena, x.ne[1]
    scores = b.linear(x, experts.router.weight, experts.router.bias)
    probs = scores
    if routing.gating == "softmax":
        probs = ops.soft_max(arena, scores)
    elif routing.gating == "sigmoid":
        probs = ops.sigmoid(arena, scores)
    merits = scores if routing.chooses_by_score else probs
    if experts.choice_bias is not None:
        merits = ops.add(arena, merits, experts.choice_bias)
    if routing.n_group > 1:
        merits = _best_groups(b, merits, routing)
    chosen = ops.argsort_top_k(arena, merits, routing.n_used)
    weights = ops.get_rows(arena, ops.reshape(arena, probs, 1, routing.n_expert, n_tokens), chosen)
    weights = ops.reshape(arena, weights, routing.n_used, n_tokens)
    if routing.gating == "softmax_of_chosen":
        weights = ops.soft_max(arena, weights)
    if routing.is_normed:
        weights = ops.div(arena, weights, ops.clamp(arena, ops.sum_rows(arena, weights), LEAST_SUM, math.inf))
    if routing.scale != 1.0:
        weights = ops.scale(arena, weights, routing.scale)
    return chosen, ops.reshape(arena, weights, 1, routing.n_used, n_tokens)


def _best_groups(b: GraphBuilder, merits: Tensor, routing: Routing) -> Tensor:
    """Return the merits [n_expert, n_tokens] with -inf for experts outside the best groups.

    A group is as good as its two best experts are together.
    """
    arena, (n_expert, n_tokens) = b.arena, merits.ne[:2]
    n_group = routing.n_group
    groups = ops.reshape(arena, merits, n_expert // n_group, n_group, n_tokens)
    single = ops.reshape(arena, merits, 1, n_expert // n_group, n_group, n_tokens)
    best = ops.get_rows(arena, single, ops.argsort_top_k(arena, groups, 2))
    best = ops.sum_rows(arena, ops.reshape(arena, best, 2, n_group, n_tokens))
    chosen = ops.argsort_top_k(arena, ops.reshape(arena, best, n_group, n_tokens), routing.n_group_used)
    nothing = ops.fill(arena, groups, -math.inf)
    kept = ops.set_rows(arena, nothing, ops.get_rows(arena, groups, chosen), chosen)
    return ops.reshape(arena, kept, n_expert, n_tokens)


def _gate_and_up(b: GraphBuilder, x: Tensor, experts: Experts, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return both [n_ff, n_used, n_tokens] of `x` [n_embd, n_used or 1, n_tokens]."""
    if experts.gate_up is None:
        assert experts.gate is not None
        assert experts.up is not None
        up = _by_chosen(b, x, experts.up, chosen)
        return _by_chosen(b, x, experts.gate, chosen), up
    both = _by_chosen(b, x, experts.gate_up, chosen)
    half, size = both.ne[0] // 2, both.dtype.row_size
    gate, up = (ops.view(b.arena, both, (half, *both.ne[1:]), both.nb[1:], at) for at in (0, size(half)))
    return gate, up


def _by_chosen(b: GraphBuilder, x: Tensor, stack: Affine, chosen: Tensor) -> Tensor:
    """Return the products with the matrices of the chosen experts, [n_out, n_used, n_tokens]."""
    out = ops.mul_mat_id(b.arena, stack.weight, x, chosen)
    return out if stack.bias is None else ops.add_id(b.arena, out, stack.bias, chosen)


def _sum(b: GraphBuilder, out: Tensor) -> Tensor:
    """Return the sum over experts of [n_embd, n_used, n_tokens], contiguous."""
    n_embd, n_used, n_tokens, _ = out.ne
    strides = (out.nb[2], out.nb[3], out.nb[3])
    one = [ops.view(b.arena, out, (n_embd, n_tokens, 1, 1), strides, i * out.nb[1]) for i in range(n_used)]
    total = one[0]
    for other in one[1:]:
        total = ops.add(b.arena, total, other)
    return total if n_used > 1 else ops.cont(b.arena, total)
