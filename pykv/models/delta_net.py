"""A gated delta net: a matrix per head that decays and is corrected towards each token's key and value.

Queries, keys and values pass a short convolution first; what is read is normed and gated. Yang, Kautz and Hatamizadeh
2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pykv.ggml import Tensor, ops
from pykv.memory import StateSpec
from pykv.models import short_conv
from pykv.models.graph_builder import GraphBuilder
from pykv.models.keys import Keys
from pykv.models.weights import LayerWeights


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of a delta net.

    Attributes
    ----------
    n_conv : tokens that the convolution sees.
    head : elements of a query, a key and a value of one head.
    n_key, n_value : heads of queries and keys, and of values, which share them in runs.
    """

    n_conv: int
    head: int
    n_key: int
    n_value: int

    @classmethod
    def read(cls, keys: Keys) -> Self:
        """Read the sizes; raises GGUFError where they do not go together."""
        sizes = cls(
            n_conv=keys.size("ssm.conv_kernel", least=2),
            head=keys.size("ssm.state_size"),
            n_key=keys.size("ssm.group_count"),
            n_value=keys.size("ssm.time_step_rank"),
        )
        if sizes.n_value % sizes.n_key:
            raise keys.refusal("ssm.group_count", sizes.n_key, f"a divisor of {sizes.n_value} value heads")
        n_inner = keys.size("ssm.inner_size")
        if n_inner != sizes.values:
            raise keys.refusal("ssm.inner_size", n_inner, f"{sizes.n_value} heads of {sizes.head}")
        return sizes

    @property
    def values(self) -> int:
        """Elements of all values."""
        return self.head * self.n_value

    @property
    def n_channel(self) -> int:
        """Channels that are convolved: queries, keys and values."""
        return 2 * self.head * self.n_key + self.values

    @property
    def state(self) -> StateSpec:
        """What a layer remembers."""
        return StateSpec((self.n_conv - 1) * self.n_channel, self.head * self.values)


@dataclass(frozen=True)
class DeltaNet:
    """Weights of one layer's delta net."""

    sizes: DeltaSizes
    qkv: Tensor
    gate: Tensor
    beta_alpha: Tensor
    kernel: Tensor
    dt_b: Tensor
    a: Tensor
    norm: Tensor
    w_out: Tensor

    @classmethod
    def take(cls, w: LayerWeights, n_embd: int, sizes: DeltaSizes) -> Self:
        """Take the weights of a layer."""
        return cls(
            sizes=sizes,
            qkv=w.need("attn_qkv.weight", n_embd, sizes.n_channel),
            gate=w.need("attn_gate.weight", n_embd, sizes.values),
            beta_alpha=w.need("ssm_ba.weight", n_embd, 2 * sizes.n_value),
            kernel=w.need_f32("ssm_conv1d.weight", sizes.n_conv, sizes.n_channel),
            dt_b=w.need("ssm_dt.bias", sizes.n_value),
            a=w.need("ssm_a", sizes.n_value),
            norm=w.need("ssm_norm.weight", sizes.head),
            w_out=w.need("ssm_out.weight", sizes.values, n_embd),
        )

    def mix(self, b: GraphBuilder, il: int, x: Tensor, eps: float) -> Tensor:
        """Return what the net makes of `x` [n_embd, n_tokens]; the states move on."""
        arena, sizes, (n_tokens, n_seqs) = b.arena, self.sizes, (b.states.n_seq_tokens, b.states.n_seqs)
        line = ops.reshape(arena, b.linear(x, self.qkv), sizes.n_channel, n_tokens, n_seqs)
        gate = ops.reshape(arena, b.linear(x, self.gate), sizes.head, sizes.n_value, n_tokens, n_seqs)
        beta, decay = self._beta_and_decay(b, x)
        line = ops.silu(arena, short_conv.convolve(b, il, line, self.kernel))
        q, k = (self._unit_heads(b, line, i * sizes.head * sizes.n_key, eps) for i in range(2))
        v = short_conv.heads(b, line, sizes.head, sizes.n_value, 2 * sizes.head * sizes.n_key)
        state = ops.reshape(arena, b.states.read_s(il), sizes.head, sizes.head, sizes.n_value, n_seqs)
        n_states = b.states.n_planes
        y, states = ops.gated_delta_net(arena, state, q=q, k=k, v=v, gate=decay, beta=beta, n_states=n_states)
        b.states.write_s(il, states)
        y = ops.mul(arena, b.rms_norm(y, self.norm, eps), ops.silu(arena, gate))
        return b.linear(ops.reshape(arena, y, sizes.values, n_tokens * n_seqs), self.w_out)

    def _beta_and_decay(self, b: GraphBuilder, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return how far each head is corrected, and ln of what it keeps, both [1, n_value, n_seq_tokens, n_seqs]."""
        arena, sizes, ne = b.arena, self.sizes, (b.states.n_seq_tokens, b.states.n_seqs)
        each = sizes.n_value // sizes.n_key  # those of the heads that share a key lie together
        both = ops.reshape(arena, b.linear(x, self.beta_alpha), 2 * each, sizes.n_key, *ne)

        def half(at: int) -> Tensor:
            part = ops.view(arena, both, (each, *both.ne[1:]), both.nb[1:], at * each * both.nb[0])
            return ops.reshape(arena, ops.cont(arena, part), sizes.n_value, *ne)

        beta = ops.sigmoid(arena, half(0))
        decay = ops.mul(arena, ops.softplus(arena, b.add(half(1), self.dt_b)), self.a)
        return ops.reshape(arena, beta, 1, sizes.n_value, *ne), ops.reshape(arena, decay, 1, sizes.n_value, *ne)

    def _unit_heads(self, b: GraphBuilder, line: Tensor, at: int, eps: float) -> Tensor:
        """Return heads [head, n_value, n_seq_tokens, n_seqs] of length 1, each as often as value heads share it."""
        arena, (head, n_key, n_value) = b.arena, (self.sizes.head, self.sizes.n_key, self.sizes.n_value)
        x = ops.rms_norm(arena, short_conv.heads(b, line, head, n_key, at), eps / head)
        x = ops.scale(arena, x, float(head) ** -0.5)
        if n_key == n_value:
            return x
        n_tokens, n_seqs = x.ne[2:]
        x = ops.reshape(arena, x, head, 1, n_key, n_tokens * n_seqs)
        x = ops.repeat(arena, x, head, n_value // n_key, n_key, n_tokens * n_seqs)
        return ops.reshape(arena, x, head, n_value, n_tokens, n_seqs)
