"""A llama-family forward pass in plain numpy, slow and obvious: the oracle of tests without llama.cpp.

Every token ever seen stays as one row: token, position, sequence ids, and per layer its K before RoPE and
its V. K is rotated anew for the position that the row has now, so moving positions needs no shift, and
sequences are just labels. Nothing is shared with pykv.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from support.tiny_gguf import TinyModel

F64Array = NDArray[np.float64]


def rope_angles(model: TinyModel, factors: F64Array | None, pos: NDArray[np.int64]) -> tuple[F64Array, F64Array]:
    """Return cos and sin times the magnitude, each (n, n_rot / 2), as ggml's CPU RoPE defines them."""
    pair = np.arange(model.n_rot // 2)
    theta = pos[:, None] * np.float64(model.rope_base) ** (-2.0 * pair / model.n_rot)
    if factors is not None:
        theta = theta / factors
    scaling = model.rope_scaling
    if scaling is None:
        return np.cos(theta), np.sin(theta)
    squeezed, magnitude = theta / scaling.factor, scaling.attn_factor
    if scaling.kind == "yarn":
        # llama.cpp cancels the magnitude that ggml's YaRN applies and puts its own there, which is the same
        # number: 1 + 0.1 ln(factor)
        magnitude *= 1.0 + 0.1 * np.log(scaling.factor)
        keep = 1.0 - np.clip((pair - (ends := yarn_ends(model))[0]) / max(0.001, ends[1] - ends[0]), 0.0, 1.0)
        theta = squeezed * (1.0 - keep) + theta * keep
    else:
        theta = squeezed
    return np.cos(theta) * magnitude, np.sin(theta) * magnitude


def yarn_ends(model: TinyModel, beta_fast: float = 32.0, beta_slow: float = 1.0) -> tuple[float, float]:
    """Return the pairs between which YaRN goes over from extrapolation to interpolation."""
    assert model.rope_scaling is not None
    orig_ctx = model.rope_scaling.orig_ctx or model.n_ctx_train

    def pair_with_turns(turns: float) -> float:
        return model.n_rot * np.log(orig_ctx / (turns * 2 * np.pi)) / (2 * np.log(model.rope_base))

    low, high = np.floor(pair_with_turns(beta_fast)), np.ceil(pair_with_turns(beta_slow))
    return max(0.0, float(low)), min(model.n_rot - 1.0, float(high))


class NaiveLlama:
    """One context over a tiny model.

    Parameters
    ----------
    kv_dtype : K (after RoPE) and V are rounded through this type before use, as a cache of it would.
    """

    def __init__(self, model: TinyModel, kv_dtype: type = np.float64) -> None:
        self.model = model
        self.kv_dtype = kv_dtype
        self.weights = {name: array.astype(np.float64) for name, array in model.weights().items()}
        self.pos: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.seqs: list[set[int]] = []
        self._stored_k = [self._no_rows() for _ in range(model.n_layer)]
        self._stored_v = [self._no_rows() for _ in range(model.n_layer)]

    def decode(
        self,
        tokens: Sequence[int],
        pos: Sequence[int] | None = None,
        seq_ids: int | Sequence[int | Sequence[int]] = 0,
    ) -> F64Array:
        """Append tokens and return their logits, (n_tokens, n_vocab); `pos` None continues each sequence."""
        ids = _per_token(seq_ids, len(tokens))
        self.pos = np.append(self.pos, self._continued(ids) if pos is None else np.asarray(pos, dtype=np.int64))
        self.seqs.extend(set(seqs) for seqs in ids)
        may_see = self._may_see(len(tokens))
        x = self.weights["token_embd.weight"][np.asarray(tokens)]
        for il in range(self.model.n_layer):
            x = x + self._attention(il, x, may_see)
            x = x + self._feed_forward(il, x)
        x = self._norm(x, "output_norm.weight")
        return x @ self.weights.get("output.weight", self.weights["token_embd.weight"]).T

    # memory verbs: ranges are half-open, a negative bound is the open end

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> None:
        """Take a sequence (-1 = every one) off the rows in [p0, p1); rows without a sequence go away."""
        for i in self._rows_of(seq_id, p0, p1):
            self.seqs[i] = set() if seq_id < 0 else self.seqs[i] - {seq_id}
        self._drop_empty()

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Put `dst` on the rows of `src` in [p0, p1)."""
        for i in self._rows_of(src, p0, p1):
            self.seqs[i].add(dst)

    def seq_keep(self, seq_id: int) -> None:
        """Forget every other sequence."""
        self.seqs = [seqs & {seq_id} for seqs in self.seqs]
        self._drop_empty()

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move the rows of a sequence in [p0, p1) by `delta`; what falls below zero goes away."""
        rows = self._rows_of(seq_id, p0, p1)
        self.pos[rows] += delta
        for i in rows:
            if self.pos[i] < 0:
                self.seqs[i] = set()
        self._drop_empty()

    def seq_div(self, seq_id: int, p0: int, p1: int, divisor: int) -> None:
        """Divide the positions of a sequence in [p0, p1), rounding towards zero."""
        self.pos[self._rows_of(seq_id, p0, p1)] //= divisor

    def clear(self) -> None:
        """Forget everything."""
        self.seqs = [set() for _ in self.seqs]
        self._drop_empty()

    def _rows_of(self, seq_id: int, p0: int, p1: int) -> list[int]:
        low, high = max(p0, 0), p1 if p1 >= 0 else np.iinfo(np.int64).max
        return [
            i
            for i, (pos, seqs) in enumerate(zip(self.pos, self.seqs, strict=True))
            if low <= pos < high and (seq_id < 0 or seq_id in seqs)
        ]

    def _drop_empty(self) -> None:
        keep = [i for i, seqs in enumerate(self.seqs) if seqs]
        self.pos = self.pos[keep]
        self.seqs = [self.seqs[i] for i in keep]
        self._stored_k = [rows[keep] for rows in self._stored_k]
        self._stored_v = [rows[keep] for rows in self._stored_v]

    def _no_rows(self) -> F64Array:
        return np.empty((0, self.model.n_head_kv, self.model.head_dim))

    def _continued(self, ids: list[tuple[int, ...]]) -> NDArray[np.int64]:
        ends: dict[int, int] = {}
        for pos, seqs in zip(self.pos, self.seqs, strict=True):
            ends.update({s: max(ends.get(s, -1), int(pos)) for s in seqs})
        out = []
        for seqs in ids:
            out.append(1 + max(ends.get(s, -1) for s in seqs))
            ends.update(dict.fromkeys(seqs, out[-1]))
        return np.asarray(out, dtype=np.int64)

    def _may_see(self, n_new: int) -> NDArray[np.bool_]:
        """Return (n_new, n_rows): a row is seen from a later or equal position of the same sequence."""
        new = range(len(self.seqs) - n_new, len(self.seqs))
        shares = np.array([[min(self.seqs[i]) in seqs for seqs in self.seqs] for i in new])
        return shares & (self.pos[None, :] <= self.pos[new.start :, None])

    def _attention(self, il: int, x: F64Array, may_see: NDArray[np.bool_]) -> F64Array:
        m = self.model
        h = self._norm(x, f"blk.{il}.attn_norm.weight")
        q = self._linear(h, f"blk.{il}.attn_q").reshape(len(x), m.n_head, m.head_dim)
        k = self._linear(h, f"blk.{il}.attn_k").reshape(len(x), m.n_head_kv, m.head_dim)
        v = self._linear(h, f"blk.{il}.attn_v").reshape(len(x), m.n_head_kv, m.head_dim)
        if m.arch == "qwen3":
            q, k = (
                self._norm(q, f"blk.{il}.attn_q_norm.weight"),
                self._norm(k, f"blk.{il}.attn_k_norm.weight"),
            )
        self._stored_k[il] = np.concatenate([self._stored_k[il], k])
        self._stored_v[il] = np.concatenate([self._stored_v[il], v])
        q = self._rotate(q, self.pos[-len(x) :])
        all_k = self._rounded(self._rotate(self._stored_k[il], self.pos)).repeat(m.n_head // m.n_head_kv, axis=1)
        all_v = self._rounded(self._stored_v[il]).repeat(m.n_head // m.n_head_kv, axis=1)
        scores = np.einsum("ihd,jhd->hij", q, all_k) / np.sqrt(m.head_dim)
        scores = np.where(may_see, scores, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hij,jhd->ihd", p, all_v).reshape(len(x), -1)
        return self._linear(mixed, f"blk.{il}.attn_output")

    def _feed_forward(self, il: int, x: F64Array) -> F64Array:
        h = self._norm(x, f"blk.{il}.ffn_norm.weight")
        gate, up = self._linear(h, f"blk.{il}.ffn_gate"), self._linear(h, f"blk.{il}.ffn_up")
        return self._linear(gate / (1.0 + np.exp(-gate)) * up, f"blk.{il}.ffn_down")

    def _linear(self, x: F64Array, name: str) -> F64Array:
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, x: F64Array, name: str) -> F64Array:
        mean_square = np.square(x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + self.model.rms_eps) * self.weights[name]

    def _rounded(self, rows: F64Array) -> F64Array:
        return rows.astype(self.kv_dtype).astype(np.float64)

    def _rotate(self, x: F64Array, pos: NDArray[np.int64]) -> F64Array:
        """Apply RoPE to (n, n_heads, head_dim)."""
        half = self.model.n_rot // 2
        cos, sin = rope_angles(self.model, self.weights.get("rope_freqs.weight"), pos)
        first = slice(0, half) if self.model.is_neox else slice(0, 2 * half, 2)
        second = slice(half, 2 * half) if self.model.is_neox else slice(1, 2 * half, 2)
        a, b, out = x[..., first], x[..., second], x.copy()
        out[..., first] = a * cos[:, None] - b * sin[:, None]
        out[..., second] = a * sin[:, None] + b * cos[:, None]
        return out


def _per_token(seq_ids: int | Sequence[int | Sequence[int]], n_tokens: int) -> list[tuple[int, ...]]:
    each: Iterable[int | Sequence[int]] = [seq_ids] * n_tokens if isinstance(seq_ids, int) else seq_ids
    ids = [(seqs,) if isinstance(seqs, int) else tuple(seqs) for seqs in each]
    if len(ids) != n_tokens:
        raise ValueError(f"seq_ids has {len(ids)} entries, tokens {n_tokens}")
    return ids
