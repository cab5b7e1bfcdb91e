"""Gemma 2, 3 and 3n in plain numpy: the logits of one whole text, without a cache. Shares nothing with pykv."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from support.tiny.gemma2 import Gemma2
from support.tiny.gemma3 import Gemma3
from support.tiny.gemma3n import N_EMBD_PER_LAYER, N_LAYER_SPARSE, N_LAYER_WITH_KV, N_STREAM, Gemma3n

F64Array = NDArray[np.float64]
Model = Gemma2 | Gemma3 | Gemma3n


def naive_gemma(model: Model, tokens: Sequence[int]) -> F64Array:
    """Return the logits of every token, (n_tokens, n_vocab)."""
    return (_Streams if isinstance(model, Gemma3n) else _Plain)(model).logits(np.asarray(tokens))


def _gelu(x: F64Array) -> F64Array:
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def _length(x: F64Array) -> F64Array:
    return np.linalg.norm(x, axis=-1, keepdims=True)


class _Plain:
    """One residual stream: attention and feed-forward, normed before and after."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.weights = {name: array.astype(np.float64) for name, array in model.weights().items()}
        self.windowed = (
            [il % 2 == 0 for il in range(model.n_layer)] if isinstance(model, Gemma2) else list(model.windowed)
        )
        self.cap_scores = model.cap_scores if isinstance(model, Gemma2) else 0.0
        self.cap_logits = 0.0 if isinstance(model, Gemma3) else model.cap_logits
        self.kv: dict[int, tuple[F64Array, F64Array]] = {}

    def logits(self, tokens: NDArray[np.int64]) -> F64Array:
        x = self.weights["token_embd.weight"][tokens] * np.sqrt(self.model.n_embd)
        x = self.norm(self.layers(x, tokens), "output_norm")
        return self.capped(x @ self.weights["token_embd.weight"].T, self.cap_logits)

    def layers(self, x: F64Array, tokens: NDArray[np.int64]) -> F64Array:
        for il in range(self.model.n_layer):
            x = x + self.norm(self.attention(il, self.norm(x, f"blk.{il}.attn_norm")), f"blk.{il}.post_attention_norm")
            x = x + self.feed_forward(il, x)
        return x

    def attention(self, il: int, x: F64Array) -> F64Array:
        m, n = self.model, len(x)
        q = self.heads(il, "q", x) * (1.0 if isinstance(m, Gemma3n) else m.head_dim**-0.5)
        k, v = self.stored(il, x)
        k, v = (rows.repeat(m.n_head // m.n_head_kv, axis=1) for rows in (k, v))
        scores = self.capped(np.einsum("ihd,jhd->hij", q, k), self.cap_scores)
        back = np.arange(n)[:, None] - np.arange(n)[None, :]
        sees = (back >= 0) & (back < m.n_swa if self.windowed[il] else True)
        p = np.exp(np.where(sees, scores, -np.inf) - scores.max())
        out = np.einsum("hij,jhd->ihd", p / p.sum(axis=-1, keepdims=True), v)
        return self.linear(out.reshape(n, -1), f"blk.{il}.attn_output")

    def stored(self, il: int, x: F64Array) -> tuple[F64Array, F64Array]:
        m = self.model
        v = self.linear(x, f"blk.{il}.attn_v").reshape(len(x), m.n_head_kv, m.head_dim)
        self.kv[il] = self.heads(il, "k", x), v
        return self.kv[il]

    def heads(self, il: int, which: str, x: F64Array) -> F64Array:
        h = self.linear(x, f"blk.{il}.attn_{which}").reshape(len(x), -1, self.model.head_dim)
        name = f"blk.{il}.attn_{which}_norm"
        return self.rotated(il, self.norm(h, name) if f"{name}.weight" in self.weights else h)

    def rotated(self, il: int, x: F64Array) -> F64Array:
        m, half = self.model, self.model.head_dim // 2
        base, factor = m.rope_base, 1.0
        if isinstance(m, Gemma3):
            base, factor = (m.rope_base_swa, 1.0) if self.windowed[il] else (m.rope_base, m.rope_factor)
        elif isinstance(m, Gemma3n) and self.windowed[il]:
            base = 10000.0
        angle = np.arange(len(x))[:, None] / factor * base ** (-np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    def feed_forward(self, il: int, x: F64Array) -> F64Array:
        h = self.norm(x, f"blk.{il}.ffn_norm")
        gate = _gelu(self.gate(il, self.linear(h, f"blk.{il}.ffn_gate")))
        h = self.linear(gate * self.linear(h, f"blk.{il}.ffn_up"), f"blk.{il}.ffn_down")
        return self.norm(h, f"blk.{il}.post_ffw_norm")

    def gate(self, il: int, x: F64Array) -> F64Array:
        return x

    def linear(self, x: F64Array, name: str) -> F64Array:
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, x: F64Array, name: str = "") -> F64Array:
        normed = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + self.model.rms_eps)
        return normed * self.weights[f"{name}.weight"] if name else normed

    def capped(self, x: F64Array, cap: float) -> F64Array:
        return cap * np.tanh(x / cap) if cap else x


class _Streams(_Plain):
    """Gemma 3n: streams are (n_stream, n_tokens, n_embd)."""

    def layers(self, x: F64Array, tokens: NDArray[np.int64]) -> F64Array:
        told = self.told(x, tokens)
        others = np.stack([x @ w.T for w in self.weights["altup_proj.weight"]])
        streams = np.concatenate([x[None], others * _length(x) / _length(others)])
        for il in range(self.model.n_layer):
            streams = self.block(il, streams, told[:, il])
        others = np.stack([s @ w.T for s, w in zip(streams[1:], self.weights["altup_unembd_proj.weight"], strict=True)])
        others *= _length(streams[0]) / _length(others)
        merged: F64Array = (streams[0] + others.sum(axis=0)) / N_STREAM
        return merged

    def block(self, il: int, streams: F64Array, told: F64Array) -> F64Array:
        name = f"blk.{il}"
        mix = self.linear(self.modalities(il, streams[0]), f"{name}.altup_predict_coef")
        mix = mix.reshape(-1, N_STREAM, N_STREAM)  # token, to, from
        predicted = np.einsum("tij,jtd->itd", mix, streams) + streams
        x = predicted[0]
        h = self.norm(x, f"{name}.attn_norm")
        bypass = self.linear(self.linear(h, f"{name}.laurel_l"), f"{name}.laurel_r")
        bypass = self.norm(bypass, f"{name}.laurel_post_norm") + h
        x = x + self.norm(self.attention(il, h), f"{name}.post_attention_norm")
        x = (x + bypass) / np.sqrt(2.0)
        x = x + self.feed_forward(il, x)
        shares = self.linear(self.modalities(il, x), f"{name}.altup_correct_coef") + 1.0
        streams = predicted + (x - predicted[0]) * shares.T[:, :, None]
        h = _gelu(self.linear(streams[0] * self.weights[f"{name}.altup_correct_scale.weight"], f"{name}.inp_gate"))
        streams[1:] += self.norm(self.linear(h * told, f"{name}.proj"), f"{name}.post_norm")
        return streams

    def modalities(self, il: int, x: F64Array) -> F64Array:
        normed = self.norm(x, f"blk.{il}.altup_router_norm") / self.model.n_embd
        return np.tanh(self.linear(normed, f"blk.{il}.altup_router"))

    def told(self, x: F64Array, tokens: NDArray[np.int64]) -> F64Array:
        """Return what each layer is told of each token, (n_tokens, n_layer, n_per_layer)."""
        shape = (len(tokens), self.model.n_layer, N_EMBD_PER_LAYER)
        own = self.weights["per_layer_token_embd.weight"][tokens].reshape(shape) * np.sqrt(N_EMBD_PER_LAYER)
        seen = (self.linear(x, "per_layer_model_proj") / np.sqrt(self.model.n_embd)).reshape(shape)
        return (self.norm(seen, "per_layer_proj_norm") + own) / np.sqrt(2.0)

    def stored(self, il: int, x: F64Array) -> tuple[F64Array, F64Array]:
        if il >= N_LAYER_WITH_KV:
            return self.kv[N_LAYER_WITH_KV - (2 if self.windowed[il] else 1)]
        k, v = super().stored(il, x)
        self.kv[il] = k, self.norm(v)
        return self.kv[il]

    def gate(self, il: int, x: F64Array) -> F64Array:
        if il >= N_LAYER_SPARSE:
            return x
        least = x.mean(axis=-1, keepdims=True) + 1.6448533535003662 * x.std(axis=-1, ddof=1, keepdims=True)
        return np.maximum(x - least, 0.0)
