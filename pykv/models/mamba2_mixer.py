"""Mamba-2's mixer: a short convolution, then a scan in heads that decay as one, gated and normed by groups.

Dao and Gu 2024.
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
class Mamba2Sizes:
    """Sizes of the mixer.

    Attributes
    ----------
    n_conv : tokens that the convolution sees.
    n_inner : channels that are scanned, `n_head` heads of them.
    n_state : elements of the state of one channel.
    n_group : heads of a group share what is written into their states and read out of them.
    """

    n_conv: int
    n_inner: int
    n_state: int
    n_head: int
    n_group: int

    @classmethod
    def read(cls, keys: Keys) -> Self:
        """Read the sizes; raises GGUFError where they do not go together."""
        sizes = cls(
            n_conv=keys.size("ssm.conv_kernel", least=2),
            n_inner=keys.size("ssm.inner_size"),
            n_state=keys.size("ssm.state_size"),
            n_head=keys.size("ssm.time_step_rank"),
            n_group=keys.size("ssm.group_count"),
        )
        if sizes.n_inner % sizes.n_head:
            raise keys.refusal("ssm.time_step_rank", sizes.n_head, f"a divisor of {sizes.n_inner} channels")
        if sizes.n_head % sizes.n_group:
            raise keys.refusal("ssm.group_count", sizes.n_group, f"a divisor of {sizes.n_head} heads")
        return sizes

    @property
    def n_channel(self) -> int:
        """Channels that are convolved: those that are scanned, and what each group writes and reads."""
        return self.n_inner + 2 * self.n_group * self.n_state

    @property
    def state(self) -> StateSpec:
        """What a layer remembers."""
        return StateSpec((self.n_conv - 1) * self.n_channel, self.n_state * self.n_inner)


@dataclass(frozen=True)
class Mamba2Mixer:
    """Weights of one layer's mixer; None where the file has none."""

    sizes: Mamba2Sizes
    w_in: Tensor
    kernel: Tensor
    kernel_b: Tensor | None
    dt_b: Tensor
    a: Tensor
    d: Tensor
    norm: Tensor | None
    w_out: Tensor

    @classmethod
    def take(cls, w: LayerWeights, n_embd: int, sizes: Mamba2Sizes, *, needs_all: bool) -> Self:
        """Take the weights of a layer; without `needs_all` the norm and the convolution's bias may be missing."""
        some = w.need if needs_all else w.maybe
        n, n_head, n_group = sizes.n_inner, sizes.n_head, sizes.n_group
        return cls(
            sizes=sizes,
            w_in=w.need("ssm_in.weight", n_embd, n + sizes.n_channel + n_head),
            kernel=w.need_f32("ssm_conv1d.weight", sizes.n_conv, sizes.n_channel),
            kernel_b=some("ssm_conv1d.bias", sizes.n_channel),
            dt_b=w.need("ssm_dt.bias", n_head),
            a=w.need_f32("ssm_a", 1, n_head),
            d=w.need_f32("ssm_d", 1, n_head),
            norm=(w.need_f32 if needs_all else w.maybe_f32)("ssm_norm.weight", n // n_group, n_group),
            w_out=w.need("ssm_out.weight", n, n_embd),
        )

    def mix(self, b: GraphBuilder, il: int, x: Tensor, eps: float) -> Tensor:
        """Return what the mixer makes of `x` [n_embd, n_tokens]; the states move on."""
        arena, sizes, (n_tokens, n_seqs) = b.arena, self.sizes, (b.states.n_seq_tokens, b.states.n_seqs)
        n, n_head, n_channel = sizes.n_inner, sizes.n_head, sizes.n_channel
        wide = b.linear(x, self.w_in)
        wide = ops.reshape(arena, wide, wide.ne[0], n_tokens, n_seqs)
        gate = ops.cont(arena, short_conv.heads(b, wide, n // n_head, n_head, 0))
        line = short_conv.convolve(b, il, short_conv.channels(b, wide, n_channel, n), self.kernel)
        if self.kernel_b is not None:
            line = b.add(line, self.kernel_b)
        line = ops.silu(arena, line)
        dt = b.add(ops.cont(arena, short_conv.channels(b, wide, n_head, n + n_channel)), self.dt_b)
        channels = short_conv.heads(b, line, n // n_head, n_head, 0)
        y = self._scan(b, il, line, channels, dt)
        y = b.add(y, ops.mul(arena, channels, self.d))
        y = b.swiglu(gate, y)
        if self.norm is not None:
            y = b.rms_norm(ops.reshape(arena, y, n // sizes.n_group, sizes.n_group, n_tokens, n_seqs), self.norm, eps)
        return b.linear(ops.reshape(arena, y, n, n_tokens * n_seqs), self.w_out)

    def _scan(self, b: GraphBuilder, il: int, line: Tensor, channels: Tensor, dt: Tensor) -> Tensor:
        """Return [head, n_head, n_seq_tokens, n_seqs]: what the channels' states give for each token."""
        sizes, (head, n_head) = self.sizes, channels.ne[:2]
        written = short_conv.heads(b, line, sizes.n_state, sizes.n_group, sizes.n_inner)
        read = short_conv.heads(b, line, sizes.n_state, sizes.n_group, sizes.n_inner + sizes.n_group * sizes.n_state)

        def scan(stored: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            states = ops.reshape(b.arena, stored, sizes.n_state, head, n_head, stored.ne[1])
            n_states = b.states.n_planes
            return ops.ssm_scan(
                b.arena, states, rows, x=channels, dt=dt, a=self.a, b=written, c=read, n_states=n_states
            )

        y, states = b.states.scan_s(il, scan)
        b.states.write_s(il, states)
        return y
