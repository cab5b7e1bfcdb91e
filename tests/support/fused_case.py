"""One attention for the fused kernel: operands as a cache stores them, and what numpy makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import gguf
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.cpu_graph import Bench
from support.naive_attention import F64Array, dense_attention

from pykv.ggml import DType, Tensor, from_float, ops

F32Array = NDArray[np.float32]

PLAIN = (DType.F32, DType.F16, DType.BF16)
BLOCKS = (DType.Q8_0, DType.Q5_1, DType.Q5_0, DType.Q4_1, DType.Q4_0, DType.IQ4_NL)
TYPES = (*PLAIN, *BLOCKS)

MASKS = ("none", "causal", "holes", "window", "blocks", "interleaved", "some rows see nothing", "nothing")


@dataclass(frozen=True)
class FusedCase:
    """Shapes, types and options; `seed` draws the numbers.

    Attributes
    ----------
    head_v : V's width; with `v_in_k` V is the front of each K row.
    spare : elements behind the heads of a cell, and cells behind those of a stream, that must not be read.
    n_unwritten : cells at the front that hold NaN.
    """

    type_k: DType = DType.F16
    type_v: DType = DType.F16
    head_k: int = 64
    head_v: int = 64
    n_head_kv: int = 2
    group: int = 3
    n_kv: int = 130
    n_rows: int = 1
    n_stream: int = 1
    mask: str = "causal"
    mask_type: DType = DType.F16
    softcap: float = 0.0
    max_bias: float = 0.0
    sinks: bool = False
    v_in_k: bool = False
    spare: bool = False
    n_unwritten: int = 0
    seed: int = 0

    def output(self, n_threads: int = 1) -> F32Array:
        """Return (S, n, H, Dv) as the kernel computes it."""
        return self._computed(self._fused, n_threads)

    def flash(self) -> F32Array:
        """Return the same as ggml's operation computes it; only where that can."""
        return self._computed(self._flash, 1)

    def expected(self) -> F64Array:
        """Return the same in float64, over K and V as they are stored."""
        values = self._values()
        return dense_attention(
            values["q"],
            _stored(values["k"], self.type_k),
            _stored(values["k"], self.type_k)[..., : self.head_v] if self.v_in_k else _stored(values["v"], self.type_v),
            None if self.mask == "none" else values["mask"],
            scale=self.scale,
            max_bias=self.max_bias,
            softcap=self.softcap,
            sinks=values["sinks"] if self.sinks else None,
        )

    @property
    def scale(self) -> float:
        return float(self.head_k) ** -0.5

    def _computed(self, build, n_threads: int) -> F32Array:
        bench = Bench(n_threads=n_threads)
        out = build(bench)
        with bench.computed(out):
            return out.numpy()

    def _fused(self, bench: Bench) -> Tensor:
        values, arena = self._values(), bench.nodes
        q = ops.permute(arena, bench.put(values["q"].swapaxes(1, 2)), 0, 2, 1, 3)  # heads outside rows: any strides do
        k = self._cells(bench, values["k"], self.type_k)
        if self.v_in_k:
            v = ops.view(arena, k, (self.head_v, *k.ne[1:]), k.nb[1:])
        else:
            v = self._cells(bench, values["v"], self.type_v)
        mask = None if self.mask == "none" else self._mask(bench, values["mask"])
        sinks = bench.put(values["sinks"]) if self.sinks else None
        options = {"scale": self.scale, "max_bias": self.max_bias, "logit_softcap": self.softcap, "sinks": sinks}
        return ops.fused_attn(arena, q, k, v, mask, **options)

    def _flash(self, bench: Bench) -> Tensor:
        values, arena = self._values(), bench.nodes
        k, v = (
            ops.permute(arena, self._cells(bench, values[name], dtype), 0, 2, 1, 3)
            for name, dtype in (("k", self.type_k), ("v", self.type_v))
        )
        mask = bench.put(values["mask"][:, None].astype(np.float16))
        options = {"scale": self.scale, "max_bias": self.max_bias, "logit_softcap": self.softcap}
        return ops.flash_attn(arena, bench.put(values["q"].swapaxes(1, 2)), k, v, mask, **options)

    def _cells(self, bench: Bench, x: F32Array, dtype: DType) -> Tensor:
        """Return [D, Hk, n_kv, S] over rows of cells, with NaN in what must not be read or not be seen."""
        n_stream, n_kv, n_head, head = x.shape
        rows = np.zeros((n_stream, n_kv + 3 * self.spare, (n_head * head) + 32 * self.spare), np.float32)
        rows[:, :n_kv, : n_head * head] = x.reshape(n_stream, n_kv, -1)
        raw = from_float(dtype, rows).reshape(*rows.shape[:2], -1).copy().view(np.uint8)
        raw[:, n_kv:] = raw[:, :, dtype.row_size(n_head * head) :] = 0xFF
        raw[:, : self.n_unwritten] = 0xFF
        all_cells = bench.put(rows, dtype)
        bench.values[all_cells] = raw
        strides = (dtype.row_size(head), all_cells.nb[1], all_cells.nb[2])
        return ops.view(bench.nodes, all_cells, (head, n_head, n_kv, n_stream), strides)

    def _mask(self, bench: Bench, mask: F32Array) -> Tensor:
        rows = np.zeros((self.n_stream, 1, self.n_rows + 2 * self.spare, self.n_kv), np.float32)
        rows[:, 0, : self.n_rows] = mask
        return bench.put(rows.astype(np.float16) if self.mask_type == DType.F16 else rows)

    def _values(self) -> dict[str, F32Array]:
        rng = np.random.default_rng(self.seed)
        n_head = self.n_head_kv * self.group

        def normal(*shape: int) -> F32Array:
            return rng.standard_normal(shape).astype(np.float32)

        return {
            "q": 2 * normal(self.n_stream, self.n_rows, n_head, self.head_k),
            "k": normal(self.n_stream, self.n_kv, self.n_head_kv, self.head_k),
            "v": normal(self.n_stream, self.n_kv, self.n_head_kv, self.head_v),
            "sinks": 2 * normal(n_head),
            "mask": self._seen(rng),
        }

    def _seen(self, rng: np.random.Generator) -> F32Array:
        """Return the mask (S, n, n_kv), with distances if there is a bias; exact in f16."""
        s, i, c = np.ogrid[: self.n_stream, : self.n_rows, : self.n_kv]
        last = self.n_kv - self.n_rows + i - s
        seen = {
            "none": c >= 0,
            "causal": c <= last,
            "holes": rng.random((self.n_stream, self.n_rows, self.n_kv)) < 0.4,
            "window": (c <= last) & (c > last - 40),
            "blocks": c // 64 % 3 == 1,
            "interleaved": c % 5 == (i + s) % 5,
            "some rows see nothing": (i % 2 == 1) & (c <= last),
            "nothing": c < 0,
        }[self.mask]
        distance = np.minimum(0, np.abs(last - c) * -1.0) if self.max_bias else np.zeros(())
        return np.where(seen, distance, -np.inf).astype(np.float32) + np.zeros(
            (self.n_stream, self.n_rows, 1), np.float32
        )


def _stored(x: F32Array, dtype: DType) -> NDArray[np.floating]:
    """Return what is left of numbers once they are stored, by another implementation than ggml's."""
    raw = from_float(dtype, x).reshape(*x.shape[:-1], -1)
    return gguf.dequantize(raw, gguf.GGMLQuantizationType(int(dtype)))


def _fitting(case: FusedCase) -> FusedCase:
    """Round widths up to whole blocks; let V be the front of K where asked."""
    if case.v_in_k:
        case = replace(case, type_v=case.type_k, head_v=min(case.head_k, case.head_v))
    wide = {
        name: -(-getattr(case, name) // 32) * 32 if dtype.is_quantized else getattr(case, name)
        for name, dtype in (("head_k", case.type_k), ("head_v", case.type_v))
    }
    return replace(case, **wide)


FUSED_CASES = st.builds(
    FusedCase,
    type_k=st.sampled_from(TYPES),
    type_v=st.sampled_from(TYPES),
    head_k=st.sampled_from([16, 32, 48, 64, 80, 96, 128, 192, 256, 576]),
    head_v=st.sampled_from([16, 32, 64, 80, 112, 128, 256, 512]),
    n_head_kv=st.integers(1, 4),
    group=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16]),
    n_kv=st.sampled_from([1, 2, 63, 64, 65, 129, 300]),
    n_rows=st.sampled_from([1, 1, 2, 3, 8, 15, 16, 17, 33, 64]),
    n_stream=st.integers(1, 3),
    mask=st.sampled_from(MASKS),
    mask_type=st.sampled_from([DType.F16, DType.F32]),
    softcap=st.sampled_from([0.0, 0.0, 4.0]),
    max_bias=st.sampled_from([0.0, 0.0, 8.0]),
    sinks=st.booleans(),
    v_in_k=st.sampled_from([False, False, True]),
    spare=st.booleans(),
    seed=st.integers(0, 2**16),
).map(_fitting)
