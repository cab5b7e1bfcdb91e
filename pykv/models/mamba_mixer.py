"""Mamba's mixer: a short convolution, then a scan in which each channel decays on its own.

Gu and Dao 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pykv.ggml import Tensor, ops
from pykv.memory import StateSpec
from pykv.models import scan_steps, short_conv
from pykv.models.graph_builder import GraphBuilder
from pykv.models.keys import Keys
from pykv.models.weights import LayerWeights

NODES_PER_STEP = 20
"""What a token that is scanned by itself takes, at most, with what keeps its state and its inputs."""


@dataclass(frozen=True)
class MambaSizes:
    """Sizes of the mixer.

    Attributes
    ----------
    n_conv : tokens that the convolution sees.
    n_inner : channels that are scanned.
    n_state : elements of the state of one channel.
    dt_rank : numbers of which the step lengths of all channels are made.
    """

    n_conv: int
    n_inner: int
    n_state: int
    dt_rank: int

    @classmethod
    def read(cls, keys: Keys) -> Self:
        """Read the sizes."""
        return cls(
            n_conv=keys.size("ssm.conv_kernel", least=2),
            n_inner=keys.size("ssm.inner_size"),
            n_state=keys.size("ssm.state_size"),
            dt_rank=keys.size("ssm.time_step_rank"),
        )

    @property
    def state(self) -> StateSpec:
        """What a layer remembers."""
        return StateSpec((self.n_conv - 1) * self.n_inner, self.n_state * self.n_inner)


@dataclass(frozen=True)
class Norms:
    """How step, input and output of a state are normed, RMS each; None = without a weight."""

    dt: Tensor | None = None
    b: Tensor | None = None
    c: Tensor | None = None

    @classmethod
    def take(cls, w: LayerWeights, sizes: MambaSizes) -> Self:
        """Take their weights."""
        return cls(
            dt=w.need("ssm_dt_norm.weight", sizes.dt_rank),
            b=w.need("ssm_b_norm.weight", sizes.n_state),
            c=w.need("ssm_c_norm.weight", sizes.n_state),
        )


@dataclass(frozen=True)
class MambaMixer:
    """Weights of one layer's mixer; `norms` is None where nothing is normed."""

    sizes: MambaSizes
    w_in: Tensor
    kernel: Tensor
    kernel_b: Tensor
    w_x: Tensor
    w_dt: Tensor
    dt_b: Tensor
    a: Tensor
    d: Tensor
    w_out: Tensor
    norms: Norms | None

    @classmethod
    def take(cls, w: LayerWeights, n_embd: int, sizes: MambaSizes, norms: Norms | None) -> Self:
        """Take the weights of a layer."""
        n = sizes.n_inner
        return cls(
            sizes=sizes,
            w_in=w.need("ssm_in.weight", n_embd, 2 * n),
            kernel=w.need_f32("ssm_conv1d.weight", sizes.n_conv, n),
            kernel_b=w.need("ssm_conv1d.bias", n),
            w_x=w.need("ssm_x.weight", n, sizes.dt_rank + 2 * sizes.n_state),
            w_dt=w.need("ssm_dt.weight", sizes.dt_rank, n),
            dt_b=w.need("ssm_dt.bias", n),
            a=w.need_f32("ssm_a", sizes.n_state, n),
            d=w.need("ssm_d", n),
            w_out=w.need("ssm_out.weight", n, n_embd),
            norms=norms,
        )

    def mix(self, b: GraphBuilder, il: int, x: Tensor, eps: float) -> Tensor:
        """Return what the mixer makes of `x` [n_embd, n_tokens]; the states move on."""
        arena, n, (n_tokens, n_seqs) = b.arena, self.sizes.n_inner, (b.states.n_seq_tokens, b.states.n_seqs)
        both = b.linear(ops.reshape(arena, x, x.ne[0], n_tokens, n_seqs), self.w_in)
        x, gate = short_conv.channels(b, both, n, 0), short_conv.channels(b, both, n, n)
        x = ops.silu(arena, b.add(short_conv.convolve(b, il, x, self.kernel), self.kernel_b))
        y = ops.reshape(arena, self._scan(b, il, x, eps), n, n_tokens, n_seqs)
        y = b.add(y, ops.mul(arena, x, self.d))
        y = b.linear(b.swiglu(ops.cont(arena, gate), y), self.w_out)
        return ops.reshape(arena, y, y.ne[0], n_tokens * n_seqs)

    def _scan(self, b: GraphBuilder, il: int, x: Tensor, eps: float) -> Tensor:
        """Return [1, n_inner, n_seq_tokens, n_seqs]: what the states of `x` give for each token."""
        arena, n_state, (n, n_tokens, n_seqs, _) = b.arena, self.sizes.n_state, x.ne
        dt, written, read = self._made(b, x, eps)
        each = ops.reshape(arena, x, 1, n, n_tokens, n_seqs), written, read

        def scan(stored: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            def some(tokens: range, before: Tensor | None) -> tuple[Tensor, Tensor]:
                states, index = (stored, rows) if before is None else (before, scan_steps.each_state(b))
                states = ops.reshape(arena, states, n_state, 1, n, states.ne[1])
                xs, bs, cs = (scan_steps.some_tokens(b, one, tokens, 2) for one in each)
                dts = scan_steps.some_tokens(b, dt, tokens, 1)
                dts = dts if dts.is_contiguous else ops.cont(arena, dts)
                return ops.ssm_scan(arena, states, index, x=xs, dt=dts, a=self.a, b=bs, c=cs)

            return scan_steps.scan_all(b, some)

        y, states = b.states.scan_s(il, scan)
        b.states.write_s(il, states)
        return y

    def _made(self, b: GraphBuilder, x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return the step lengths [n_inner, ...] of `x`, what it writes and how it is read, both [n_state, 1, ...]."""
        sizes = self.sizes
        made = b.linear(x, self.w_x)
        dt = short_conv.channels(b, made, sizes.dt_rank, 0)
        written = short_conv.heads(b, made, sizes.n_state, 1, sizes.dt_rank)
        read = short_conv.heads(b, made, sizes.n_state, 1, sizes.dt_rank + sizes.n_state)
        if self.norms is None:
            dt = ops.cont(b.arena, dt)
        else:
            dt = _normed(b, dt, self.norms.dt, eps)
            written, read = _normed(b, written, self.norms.b, eps), _normed(b, read, self.norms.c, eps)
        return b.linear(dt, self.w_dt, self.dt_b), written, read


def _normed(b: GraphBuilder, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return ops.rms_norm(b.arena, x, eps) if weight is None else b.rms_norm(x, weight, eps)
