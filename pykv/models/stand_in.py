"""A model without weights: the same memory as a real one, filled by simple arithmetic over a seeded table.

A token's row of the table is cut into Q, K and V, rotated and attended as the real model's would be; what the query
saw is added to it, and the sum goes to the next layer. So K, V and logits are wrong wherever a cell, a position or a
mask is wrong, though they mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pykv.errors import ParamError
from pykv.ggml import Arena, Buffer, Device, DType, Tensor, ops
from pykv.ggml.owner import Owner
from pykv.memory import MemorySpec
from pykv.models.architecture import Architecture
from pykv.models.graph_builder import GraphBuilder
from pykv.models.hparams import HParams, RopeScaling
from pykv.models.placement import Placement
from pykv.models.rope import ContextRope
from pykv.models.spec_record import spec_factors, spec_of
from pykv.typing import F32Array

STAND_IN = "stand-in"
"""The name of the architecture."""

N_TOKENS = 251
"""Rows of the table, and tokens of the vocabulary. A prime, so that regular token ids do not fall together."""

SEED = 20
EPS = 1e-5
OFFSET = 32
"""Channels between the first of a query and the first of a key: equal ones would attend to themselves alone."""

MAX_WIDTH = 2**20


@dataclass(frozen=True)
class StandInShape:
    """What a stand-in takes from the model for which it stands.

    Attributes
    ----------
    n_head_by_layer : query heads.
    n_ctx_train : tokens that the model was trained at.
    spec : its memory, see `spec_record`.

    Raises
    ------
    ParamError : no model has this shape.
    """

    n_head_by_layer: tuple[int, ...]
    n_ctx_train: int
    spec: Mapping[str, Any]

    def __post_init__(self) -> None:
        layers = spec_of(self.spec).layers
        if len(layers) != len(self.n_head_by_layer):
            raise ParamError(f"n_head_by_layer names {len(self.n_head_by_layer)} layers, spec {len(layers)}")
        for il, (n_head, layer) in enumerate(zip(self.n_head_by_layer, layers, strict=True)):
            if layer.n_head_kv and (n_head < 1 or n_head % layer.n_head_kv):
                raise ParamError(f"layer {il}: {layer.n_head_kv} KV heads cannot serve {n_head} query heads")
        if self.width > MAX_WIDTH:
            raise ParamError(f"the heads take {self.width} channels, at most {MAX_WIDTH} are possible")

    @property
    def width(self) -> int:
        """Channels of an activation: the widest of Q, K, V and attention's output, and room to shift them."""
        wide = max(
            max(n_head, layer.n_head_kv) * max(layer.n_embd_head_k, layer.n_embd_head_v)
            for n_head, layer in zip(self.n_head_by_layer, spec_of(self.spec).layers, strict=True)
        )
        return -(-wide // OFFSET) * OFFSET + 2 * OFFSET


class StandIn:
    """Offers to a context what a `Model` does.

    Attributes
    ----------
    hparams : sizes; the vocabulary has `N_TOKENS` tokens.
    architecture : builds the graph.
    placement : everything on one device.
    owners : the buffer of the table.
    """

    def __init__(self, shape: StandInShape, device: Device) -> None:
        spec = spec_of(shape.spec)
        self.shape = shape
        self.hparams = _hparams(shape, spec)
        self.placement = Placement(input=device, layers=(device,) * len(spec.layers), output=device)
        self.architecture = StandInGraph(shape, self.hparams, device)
        self.owners: tuple[Owner, ...] = (self.architecture.buffer,)
        self.closed = False

    def close(self) -> None:
        """Free the table. Contexts of it refuse further use."""
        self.closed = True
        for owner in self.owners:
            owner.close()


class StandInGraph(Architecture):
    """Writes down the graph."""

    def __init__(self, shape: StandInShape, hparams: HParams, device: Device) -> None:
        self.hparams, self._n_head = hparams, shape.n_head_by_layer
        factors, n = spec_factors(shape.spec), hparams.n_embd
        arena = Arena(2 + len(factors))
        self._table = arena.tensor(DType.F32, (n, N_TOKENS), "table")
        self._ones = arena.tensor(DType.F32, (n,), "ones")
        self._factors = [arena.tensor(DType.F32, (len(one),), f"factors_{i}") for i, one in enumerate(factors)]
        self.buffer = Buffer.allocate(arena, device.buffer_type, "a stand-in for a model")
        values = (_table(n), np.ones(n, np.float32), *factors)
        for tensor, value in zip((self._table, self._ones, *self._factors), values, strict=True):
            self.buffer.adopt(tensor).set(value)
        self.buffer.mark_weights()
        self._spec = spec_of(shape.spec, self._factors)
        self._last = max(il for il, layer in enumerate(self._spec.layers) if layer.n_head_kv)

    def memory_spec(self, rope: ContextRope) -> MemorySpec:
        """Return the recorded spec: its rotary settings were derived when it was recorded."""
        return self._spec

    def build(self, b: GraphBuilder) -> Tensor | None:
        """Write down the graph; returns logits [N_TOKENS, n_outputs], or None if no outputs are wanted."""
        x = b.embed(self._table)
        for il, layer in enumerate(self._spec.layers):
            if layer.n_head_kv == 0:
                continue
            n_head, head_k, head_v = self._n_head[il], layer.n_embd_head_k, layer.n_embd_head_v
            h = b.rms_norm(x, self._ones, EPS)
            q = _turned(b, il, _cut(b, h, 0, n_head, head_k))
            k = _turned(b, il, _cut(b, h, OFFSET, layer.n_head_kv, head_k))
            v = None if layer.k_only else _cut(b, h, 2 * OFFSET, layer.n_head_kv, head_v)
            b.kv.store(il, k, v)
            if il == self._last and b.shape.n_outputs == 0:
                return None  # later tokens only need what has been stored
            h = b.attend(il, q, float(head_k) ** -0.5)
            # normalised, because the mean of many values is small: what was seen shall weigh as much as the token
            h = b.rms_norm(ops.pad(b.graph.arena, h, x.ne[0] - h.ne[0]), self._ones, EPS)
            if il == self._last:
                h, x = b.select_outputs(h), b.select_outputs(x)
            x = b.add(x, h)
        return b.linear(b.rms_norm(x, self._ones, EPS), self._table)


def _cut(b: GraphBuilder, x: Tensor, offset: int, n_head: int, head: int) -> Tensor:
    """Return [head, n_head, n_tokens] from channel `offset` of [n_embd, n_tokens] on."""
    size, (n, n_tokens) = DType.F32.type_size, x.ne[:2]
    strides = (size * head, size * n, size * n * n_tokens)
    arena = b.graph.arena
    return ops.cont(arena, ops.view(arena, x, (head, n_head, n_tokens, 1), strides, size * offset))


def _turned(b: GraphBuilder, il: int, x: Tensor) -> Tensor:
    """Return the heads [head, n_head, n_tokens] rotated from where the layer's are."""
    at, size, arena = b.layers[il].rope_at, x.dtype.row_size, b.arena
    if not at:
        return b.rope(il, x)
    front = ops.view(arena, x, (at, *x.ne[1:]), x.nb[1:])
    back = ops.view(arena, x, (x.ne[0] - at, *x.ne[1:]), x.nb[1:], size(at))
    return ops.concat(arena, front, b.rope(il, back), 0)


def _table(n: int) -> F32Array:
    return np.random.default_rng(SEED).standard_normal((N_TOKENS, n), np.float32)


def _hparams(shape: StandInShape, spec: MemorySpec) -> HParams:
    first = next((layer for layer in spec.layers if layer.n_head_kv), None)
    if first is None:
        raise ParamError("model: nothing stands in for one whose layers have states alone; give the model itself")
    return HParams(
        architecture=STAND_IN,
        n_layer=len(spec.layers),
        n_embd=shape.width,
        n_vocab=N_TOKENS,
        n_ctx_train=shape.n_ctx_train,
        n_head_by_layer=shape.n_head_by_layer,
        n_head_kv_by_layer=tuple(layer.n_head_kv for layer in spec.layers),
        n_ff_by_layer=(0,) * len(spec.layers),
        n_embd_head_k=first.n_embd_head_k,
        n_embd_head_v=first.n_embd_head_v,
        n_rot=0 if first.rope is None else first.rope.n_dims,
        norm_rms_eps=EPS,
        rope_freq_base=10000.0,
        rope_scaling=RopeScaling(),
        attention_scale=0.0,
    )
