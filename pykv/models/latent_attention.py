"""Latent attention (MLA): K and V of all heads are read out of one short vector per token, and that is what is stored.

Absorbed, as files hold it today: the matrix that would make K of the vector is multiplied into Q, the one that would
make V into the output, so all heads read one K head, and V is its front. Older files make K and V of every head, and
these are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pykv.errors import GGUFError
from pykv.ggml import RopeParams, Tensor, ops
from pykv.memory import LayerSpec
from pykv.models.graph_builder import GraphBuilder
from pykv.models.hparams import HParams
from pykv.models.keys import Keys
from pykv.models.weights import LayerWeights


@dataclass(frozen=True)
class LatentSizes:
    """Sizes that all layers have in common.

    Attributes
    ----------
    q_rank : width of the queries' bottleneck, 0 = none.
    kv_rank : elements of the vector, beside the rotated ones.
    n_rot : elements of a key that are rotated, and are one for all heads.
    head_k, head_v : elements of one head's K and V, as if they were made.
    is_absorbed : see the module.
    """

    q_rank: int
    kv_rank: int
    n_rot: int
    head_k: int
    head_v: int
    is_absorbed: bool

    @property
    def n_plain(self) -> int:
        """Elements of one head's K that are not rotated."""
        return self.head_k - self.n_rot

    @classmethod
    def read(cls, keys: Keys, hp: HParams, *, has_q_rank: bool) -> Self:
        """Return the sizes of a file; `has_q_rank` says whether it must tell of the bottleneck.

        Raises
        ------
        GGUFError : the sizes do not go together; names them.
        """
        names = "attention.key_length_mla", "attention.value_length_mla"
        head_k, head_v = (keys.size(name, 0, least=0) for name in names)
        if bool(head_k) != bool(head_v):
            raise GGUFError(f"{keys.path}: {keys.key(names[0])}={head_k} and {keys.key(names[1])}={head_v} go together")
        sizes = cls(
            q_rank=keys.size("attention.q_lora_rank", least=0) if has_q_rank else 0,
            kv_rank=keys.size("attention.kv_lora_rank"),
            n_rot=hp.n_rot,
            head_k=head_k or hp.n_embd_head_k,
            head_v=head_v or hp.n_embd_head_v,
            is_absorbed=bool(head_k),
        )
        sizes._check(keys, hp)
        return sizes

    def _check(self, keys: Keys, hp: HParams) -> None:
        if self.n_plain < 1:
            raise GGUFError(f"{keys.path}: heads of {self.head_k} must be longer than {self.n_rot} rotated elements")
        if self.is_absorbed and self.kv_rank + self.n_rot > hp.n_embd_head_k:
            limits = f"at most the {hp.n_embd_head_k} elements of a key without the {self.n_rot} that are rotated"
            raise keys.refusal("attention.kv_lora_rank", self.kv_rank, limits)
        for il, n_head in enumerate(hp.n_head_by_layer):
            spec = self.layer_spec(n_head, None)
            wanted = spec.n_head_kv, spec.n_embd_head_k, spec.n_embd_head_v
            found = hp.n_head_kv_by_layer[il], hp.n_embd_head_k, hp.n_embd_head_v
            if found != wanted:
                raise GGUFError(f"{keys.path}: layer {il}: KV heads, K and V elements {found} must be {wanted}")

    def layer_spec(self, n_head: int, rope: RopeParams | None) -> LayerSpec:
        """Return what the memory must know of a layer."""
        if self.is_absorbed:
            return LayerSpec(1, self.kv_rank + self.n_rot, self.kv_rank, rope, rope_at=self.kv_rank, k_only=True)
        return LayerSpec(n_head, self.head_k, self.head_v, rope, rope_at=self.n_plain)


@dataclass(frozen=True)
class LatentAttention:
    """Weights of one layer; None where the file has none.

    Attributes
    ----------
    q_narrow, q_norm, q : makes queries; the first two are the bottleneck.
    kv, kv_norm : makes the vector, and behind it the rotated part of K.
    k_absorbed, v_absorbed : of each head, K's matrix transposed, and V's.
    heads : makes K, without its rotated part, and V of each head.
    """

    sizes: LatentSizes
    q_narrow: Tensor | None
    q_norm: Tensor | None
    q: Tensor
    kv: Tensor
    kv_norm: Tensor
    k_absorbed: Tensor | None
    v_absorbed: Tensor | None
    heads: Tensor | None
    out: Tensor

    @classmethod
    def take(cls, w: LayerWeights, n_embd: int, n_head: int, sizes: LatentSizes) -> Self:
        """Take the tensors of a layer."""
        s, rank = sizes, sizes.q_rank
        plain, is_absorbed = s.n_plain, s.is_absorbed
        q_name, n_in = ("attn_q_b.weight", rank) if rank else ("attn_q.weight", n_embd)
        return cls(
            sizes=s,
            q_narrow=w.need("attn_q_a.weight", n_embd, rank) if rank else None,
            q_norm=w.need("attn_q_a_norm.weight", rank) if rank else None,
            q=w.need(q_name, n_in, n_head * s.head_k),
            kv=w.need("attn_kv_a_mqa.weight", n_embd, s.kv_rank + s.n_rot),
            kv_norm=w.need("attn_kv_a_norm.weight", s.kv_rank),
            k_absorbed=w.need("attn_k_b.weight", plain, s.kv_rank, n_head) if is_absorbed else None,
            v_absorbed=w.need("attn_v_b.weight", s.kv_rank, s.head_v, n_head) if is_absorbed else None,
            heads=None if is_absorbed else w.need("attn_kv_b.weight", s.kv_rank, n_head * (plain + s.head_v)),
            out=w.need("attn_output.weight", n_head * s.head_v, n_embd),
        )

    def store(self, b: GraphBuilder, il: int, x: Tensor, eps: float) -> Tensor:
        """Store what `x` [n_embd, n_tokens] is remembered by; return its queries, [Dk, n_head, n_tokens]."""
        s = self.sizes
        vector, turned = _split(b, b.heads(b.linear(x, self.kv), s.kv_rank + s.n_rot), s.kv_rank)
        turned = b.rope(il, turned)  # [n_rot, 1, n_tokens]
        vector = b.rms_norm(vector, self.kv_norm, eps)  # [kv_rank, 1, n_tokens]
        q_plain, q_turned = _split(b, b.heads(self._queries(b, x, eps), s.head_k), s.n_plain)
        q_turned = b.rope(il, q_turned)
        if self.heads is None:
            b.kv.store(il, ops.concat(b.arena, vector, turned, 0))
            q_plain = self._absorb(b, q_plain)
        else:
            self._store_heads(b, il, vector, turned)
        return ops.concat(b.arena, q_plain, q_turned, 0)

    def read(self, b: GraphBuilder, il: int, q: Tensor, scale: float) -> Tensor:
        """Return what the queries see, [n_embd, n_tokens]."""
        seen = b.attend(il, q, scale)
        if self.v_absorbed is not None:
            seen = ops.permute(b.arena, b.heads(seen, self.sizes.kv_rank), 0, 2, 1, 3)
            values = ops.mul_mat(b.arena, self.v_absorbed, seen)  # [head_v, n_tokens, n_head]
            values = ops.cont(b.arena, ops.permute(b.arena, values, 0, 2, 1, 3))
            seen = ops.reshape(b.arena, values, values.ne[0] * values.ne[1], values.ne[2])
        return b.linear(seen, self.out)

    def _queries(self, b: GraphBuilder, x: Tensor, eps: float) -> Tensor:
        if self.q_narrow is not None and self.q_norm is not None:
            x = b.rms_norm(b.linear(x, self.q_narrow), self.q_norm, eps)
        return b.linear(x, self.q)

    def _absorb(self, b: GraphBuilder, q: Tensor) -> Tensor:
        """Return queries [n_plain, n_head, n_tokens] as they meet the vector, [kv_rank, n_head, n_tokens]."""
        assert self.k_absorbed is not None
        absorbed = ops.mul_mat(b.arena, self.k_absorbed, ops.permute(b.arena, q, 0, 2, 1, 3))
        return ops.permute(b.arena, absorbed, 0, 2, 1, 3)

    def _store_heads(self, b: GraphBuilder, il: int, vector: Tensor, turned: Tensor) -> None:
        s, n_tokens = self.sizes, vector.ne[2]
        assert self.heads is not None
        made = b.linear(ops.reshape(b.arena, vector, s.kv_rank, n_tokens), self.heads)
        k, v = _split(b, b.heads(made, s.n_plain + s.head_v), s.n_plain)
        turned = ops.repeat(b.arena, turned, s.n_rot, k.ne[1], n_tokens)
        b.kv.store(il, ops.concat(b.arena, k, turned, 0), ops.cont(b.arena, v))


def _split(b: GraphBuilder, x: Tensor, at: int) -> tuple[Tensor, Tensor]:
    """Return views of the heads [head, n_head, n_tokens] up to an element, and from there on."""
    rest, size = x.ne[1:], x.dtype.row_size
    front = ops.view(b.arena, x, (at, *rest), x.nb[1:])
    return front, ops.view(b.arena, x, (x.ne[0] - at, *rest), x.nb[1:], size(at))
