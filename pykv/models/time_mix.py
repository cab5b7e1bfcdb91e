"""RWKV-7's time mix: how a token's inputs and the one before it change each head's matrix, and what is read from it.

Peng et al. 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from pykv.ggml import Tensor, ops
from pykv.models import scan_steps
from pykv.models.blocks import Affine
from pykv.models.graph_builder import GraphBuilder
from pykv.models.keys import Keys
from pykv.models.weights import LayerWeights

N_INPUTS = 6
"""Mixtures of a token and the one before it: for receptance, decay, key, value, rate and gate."""

SLOWEST = -0.606531
"""ln of the least that a matrix keeps of itself: -exp(-1/2)."""

HEAD_EPS = 64e-5
LENGTH_EPS = 1e-12


@dataclass(frozen=True)
class TimeMixSizes:
    """Sizes of the time mix.

    Attributes
    ----------
    head : rows and columns of a head's matrix.
    decay, rate, value, gate : ranks of the small matrices behind these.
    """

    n_embd: int
    head: int
    decay: int
    rate: int
    value: int
    gate: int

    @classmethod
    def read(cls, keys: Keys, n_embd: int) -> Self:
        """Read the sizes; raises GGUFError where they do not go together."""
        head = keys.size("wkv.head_size")
        if n_embd % head or head % ops.WKV_LANES:
            raise keys.refusal("wkv.head_size", head, f"a multiple of {ops.WKV_LANES} and a divisor of n_embd={n_embd}")
        return cls(
            n_embd=n_embd,
            head=head,
            decay=keys.size("attention.decay_lora_rank"),
            rate=keys.size("attention.iclr_lora_rank"),
            value=keys.size("attention.value_residual_mix_lora_rank"),
            gate=keys.size("attention.gate_lora_rank"),
        )


@dataclass(frozen=True)
class LowRank:
    """Two thin matrices with something between them, and what is added behind; `bias` is None for nothing."""

    inner: Tensor
    outer: Tensor
    bias: Tensor | None

    @classmethod
    def take(cls, w: LayerWeights, letter: str, n_embd: int, rank: int, *, has_bias: bool = True) -> Self:
        """Take the matrices and the bias of one letter."""
        return cls(
            inner=w.need(f"time_mix_{letter}1.weight", n_embd, rank),
            outer=w.need(f"time_mix_{letter}2.weight", rank, n_embd),
            bias=w.need(f"time_mix_{letter}0.weight", n_embd) if has_bias else None,
        )

    def forward(self, b: GraphBuilder, x: Tensor, between: Callable[..., Tensor] | None = None) -> Tensor:
        """Return outer · between(inner · x) + bias."""
        x = b.linear(x, self.inner)
        return b.linear(x if between is None else between(b.arena, x), self.outer, self.bias)


@dataclass(frozen=True)
class TimeMix:
    """Weights of one layer's time mix; `value_mix` is None in the first layer, whose values the others mix in."""

    sizes: TimeMixSizes
    lerp: Tensor
    receptance: Tensor
    key: Tensor
    value: Tensor
    decay: LowRank
    rate: LowRank
    value_mix: LowRank | None
    gate: LowRank
    k_k: Tensor
    k_a: Tensor
    r_k: Tensor
    norm: Affine
    output: Tensor

    @classmethod
    def take(cls, w: LayerWeights, sizes: TimeMixSizes, *, is_first: bool) -> Self:
        """Take the weights of a layer."""
        n = sizes.n_embd
        return cls(
            sizes=sizes,
            lerp=w.need_f32("time_mix_lerp_fused.weight", n, 1, 1, N_INPUTS),
            receptance=w.need("time_mix_receptance.weight", n, n),
            key=w.need("time_mix_key.weight", n, n),
            value=w.need("time_mix_value.weight", n, n),
            decay=LowRank.take(w, "w", n, sizes.decay),
            rate=LowRank.take(w, "a", n, sizes.rate),
            value_mix=None if is_first else LowRank.take(w, "v", n, sizes.value),
            gate=LowRank.take(w, "g", n, sizes.gate, has_bias=False),
            k_k=w.need("time_mix_k_k.weight", n),
            k_a=w.need("time_mix_k_a.weight", n),
            r_k=w.need("time_mix_r_k.weight", n),
            norm=Affine.take(w, "time_mix_ln", n, needs_bias=True),
            output=w.need("time_mix_output.weight", n, n),
        )

    def mix(
        self, b: GraphBuilder, il: int, x: Tensor, before: Tensor, first_value: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return what the mix makes of `x`, and its values, all [n_embd, n_tokens].

        `before` holds for each token the one before it, `first_value` the values of the first layer.
        """
        arena = b.arena
        xr, xw, xk, xv, xa, xg = self._inputs(b, x, before)
        decay = ops.sigmoid(arena, self.decay.forward(b, xw, ops.tanh))
        decay = ops.exp(arena, ops.scale(arena, decay, SLOWEST))
        key, value = b.linear(xk, self.key), b.linear(xv, self.value)
        own_value = value
        if self.value_mix is not None and first_value is not None:
            share = ops.sigmoid(arena, self.value_mix.forward(b, xv))
            value = b.add(value, ops.mul(arena, ops.sub(arena, first_value, value), share))
        rate = ops.sigmoid(arena, self.rate.forward(b, xa))
        direction = ops.l2_norm(arena, self._heads(b, ops.mul(arena, key, self.k_k)), LENGTH_EPS)
        ka = ops.mul(arena, key, self.k_a)
        key = b.add(key, ops.sub(arena, ops.mul(arena, rate, ka), ka))
        r, w, k, v, a = (self._heads(b, one) for one in (b.linear(xr, self.receptance), decay, key, value, rate))
        forget, learn = ops.neg(arena, direction), ops.mul(arena, direction, a)
        y = self._scan(b, il, {"r": r, "w": w, "k": k, "v": v, "a": forget, "b": learn})
        out = b.add(self._normed(b, y), self._bonus(b, r, k, v))
        return b.linear(ops.mul(arena, out, self.gate.forward(b, xg, ops.sigmoid)), self.output), own_value

    def _inputs(self, b: GraphBuilder, x: Tensor, before: Tensor) -> list[Tensor]:
        """Return the mixtures of each token and the one before it, [n_embd, n_tokens] each."""
        (n, n_tokens), size = x.ne[:2], x.nb[0]
        step = ops.repeat(b.arena, ops.sub(b.arena, before, x), n, n_tokens, 1, N_INPUTS)
        mixed = b.add(ops.mul(b.arena, step, self.lerp), x)
        row, part = size * n, size * n * n_tokens
        return [ops.view(b.arena, mixed, (n, n_tokens, 1, 1), (row, part, part), i * part) for i in range(N_INPUTS)]

    def _scan(self, b: GraphBuilder, il: int, operands: Mapping[str, Tensor]) -> Tensor:
        """Return [head, n_head, ...]: what the heads' matrices give for each token."""
        stored = b.states.read_s(il)

        def scan(tokens: range, before: Tensor | None) -> tuple[Tensor, Tensor]:
            some = {name: _some_tokens(b, x, tokens) for name, x in operands.items()}
            return ops.rwkv_wkv7(b.arena, stored if before is None else before, **some)

        y, states = scan_steps.scan_all(b, scan)
        b.states.write_s(il, states)
        return y

    def _normed(self, b: GraphBuilder, y: Tensor) -> Tensor:
        """Return each head of [head, n_head, ...] less its mean, over its deviation, scaled and shifted."""
        y = ops.norm(b.arena, y, HEAD_EPS)
        y = ops.mul(b.arena, ops.reshape(b.arena, y, self.sizes.n_embd, y.ne[2] * y.ne[3]), self.norm.weight)
        assert self.norm.bias is not None
        return b.add(y, self.norm.bias)

    def _bonus(self, b: GraphBuilder, r: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what a token adds from its own value, [n_embd, n_tokens]."""
        weight = ops.reshape(b.arena, self.r_k, *r.ne[:2])
        match = ops.sum_rows(b.arena, ops.mul(b.arena, ops.mul(b.arena, k, r), weight))
        return ops.reshape(b.arena, ops.mul(b.arena, v, match), self.sizes.n_embd, v.ne[2])

    def _heads(self, b: GraphBuilder, x: Tensor) -> Tensor:
        return b.heads(x, self.sizes.head)


def _some_tokens(b: GraphBuilder, x: Tensor, tokens: range) -> Tensor:
    """Return some tokens of each sequence of [head, n_head, n_tokens], dense."""
    n, n_tokens, n_seqs = len(tokens), b.states.n_seq_tokens, b.states.n_seqs
    if n == n_tokens:
        return x
    (head, n_head), (_, row, token, _) = x.ne[:2], x.nb
    some = ops.view(b.arena, x, (head, n_head, n, n_seqs), (row, token, token * n_tokens), tokens.start * token)
    some = some if some.is_contiguous else ops.cont(b.arena, some)
    return some if n_seqs == 1 else ops.reshape(b.arena, some, head, n_head, n * n_seqs)
