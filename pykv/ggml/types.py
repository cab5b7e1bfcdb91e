"""Element types of tensors: names, block sizes, row sizes, conversion to and from float32."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from math import prod

import numpy as np

from pykv._native import ffi, lib
from pykv.errors import ParamError, TensorError
from pykv.typing import AnyArray, F32Array

_MAX_BYTES = 2**62  # sums of a few sizes must not overflow an int64 either

_NUMPY = {"F32": np.float32, "F16": np.float16, "F64": np.float64} | {
    f"I{bits}": np.dtype(f"int{bits}").type for bits in (8, 16, 32, 64)
}


class DType(IntEnum):
    """A ggml element type. Quantised types store blocks of elements.

    Attributes
    ----------
    block_size : elements in one block; 1 for plain types.
    type_size : bytes of one block.
    is_quantized : whether it stores blocks.
    """

    block_size: int
    type_size: int
    is_quantized: bool

    def __new__(cls, number: int) -> DType:
        member = int.__new__(cls, number)
        member._value_ = number
        member.block_size = int(lib.ggml_blck_size(number))
        member.type_size = int(lib.ggml_type_size(number))
        member.is_quantized = bool(lib.ggml_is_quantized(number))
        return member

    # built from the library's own numbers, never from typed ones
    F32 = lib.GGML_TYPE_F32
    F16 = lib.GGML_TYPE_F16
    BF16 = lib.GGML_TYPE_BF16
    F64 = lib.GGML_TYPE_F64
    I8 = lib.GGML_TYPE_I8
    I16 = lib.GGML_TYPE_I16
    I32 = lib.GGML_TYPE_I32
    I64 = lib.GGML_TYPE_I64
    Q4_0 = lib.GGML_TYPE_Q4_0
    Q4_1 = lib.GGML_TYPE_Q4_1
    Q5_0 = lib.GGML_TYPE_Q5_0
    Q5_1 = lib.GGML_TYPE_Q5_1
    Q8_0 = lib.GGML_TYPE_Q8_0
    Q8_1 = lib.GGML_TYPE_Q8_1
    Q2_K = lib.GGML_TYPE_Q2_K
    Q3_K = lib.GGML_TYPE_Q3_K
    Q4_K = lib.GGML_TYPE_Q4_K
    Q5_K = lib.GGML_TYPE_Q5_K
    Q6_K = lib.GGML_TYPE_Q6_K
    Q8_K = lib.GGML_TYPE_Q8_K
    IQ1_S = lib.GGML_TYPE_IQ1_S
    IQ1_M = lib.GGML_TYPE_IQ1_M
    IQ2_XXS = lib.GGML_TYPE_IQ2_XXS
    IQ2_XS = lib.GGML_TYPE_IQ2_XS
    IQ2_S = lib.GGML_TYPE_IQ2_S
    IQ3_XXS = lib.GGML_TYPE_IQ3_XXS
    IQ3_S = lib.GGML_TYPE_IQ3_S
    IQ4_NL = lib.GGML_TYPE_IQ4_NL
    IQ4_XS = lib.GGML_TYPE_IQ4_XS
    TQ1_0 = lib.GGML_TYPE_TQ1_0
    TQ2_0 = lib.GGML_TYPE_TQ2_0
    MXFP4 = lib.GGML_TYPE_MXFP4
    NVFP4 = lib.GGML_TYPE_NVFP4
    Q1_0 = lib.GGML_TYPE_Q1_0
    Q2_0 = lib.GGML_TYPE_Q2_0

    @property
    def label(self) -> str:
        """The name that users write, such as ``"q8_0"``."""
        return self.name.lower() if not self.name.endswith("_K") else self.name.lower()[:-1] + "K"

    @property
    def numpy_dtype(self) -> np.dtype[np.generic] | None:
        """The numpy type with the same memory layout, None where numpy has none."""
        kind = _NUMPY.get(self.name)
        return None if kind is None else np.dtype(kind)

    def row_size(self, n: int) -> int:
        """Return the bytes of `n` elements in a row.

        Raises
        ------
        TensorError : `n` is negative or not a whole number of blocks.
        """
        if n < 0 or n % self.block_size:
            raise TensorError(f"a row of {n} elements is no multiple of the block of {self.label} ({self.block_size})")
        return n // self.block_size * self.type_size

    def check_size(self, ne: Sequence[int]) -> None:
        """Raise unless a tensor `ne` of this type can be counted in bytes.

        Raises
        ------
        TensorError : more bytes than an int64 holds, or rows that are no whole blocks.
        """
        n_bytes = self.row_size(ne[0]) * prod(ne[1:])
        if n_bytes > _MAX_BYTES:
            raise TensorError(f"ne={list(ne)} of {self.label} takes {n_bytes} bytes; the limit is {_MAX_BYTES}")

    @classmethod
    def parse(cls, name: str | DType, argument: str = "type") -> DType:
        """Return the type that a user named.

        Raises
        ------
        ParamError : there is no such type; the message names `argument`.
        """
        if isinstance(name, DType):
            return name
        found = cls.__members__.get(name.upper()) if isinstance(name, str) else None
        if found is None:
            raise ParamError(f"{argument}={name!r} is no element type; known: {', '.join(t.label for t in cls)}")
        return found


BY_NUMBER = {int(dtype): dtype for dtype in DType}


def to_float(dtype: DType, raw: AnyArray, n: int) -> F32Array:
    """Return `n` elements, stored as bytes of type `dtype`, as float32 of shape (n,).

    Raises
    ------
    TensorError : the bytes are too few, or the type has no conversion.
    """
    need = dtype.row_size(n)
    raw = np.ascontiguousarray(raw).view(np.uint8).reshape(-1)
    if raw.size < need:
        raise TensorError(f"raw has {raw.size} bytes; {n} elements of {dtype.label} need {need}")
    out = np.empty(n, np.float32)
    if not lib.pykv_to_float(dtype, ffi.from_buffer(raw), ffi.from_buffer("float[]", out, require_writable=True), n):
        raise TensorError(f"{dtype.label} cannot be converted to f32")
    return out


def from_float(dtype: DType, values: F32Array) -> AnyArray:
    """Return float32 values as the bytes (uint8) of type `dtype`, quantised by ggml's reference conversion.

    Raises
    ------
    TensorError : the values do not fill whole blocks, or the type has no conversion.
    """
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    # note: these need tables that ggml does not build by itself, and it ends the process without them
    if dtype in (DType.IQ2_S, DType.IQ3_XXS, DType.IQ3_S):
        raise TensorError(f"f32 cannot be converted to {dtype.label}")
    out = np.empty(dtype.row_size(flat.size), np.uint8)
    source = ffi.from_buffer("float[]", flat)
    if not lib.pykv_from_float(dtype, source, ffi.from_buffer(out, require_writable=True), flat.size):
        raise TensorError(f"f32 cannot be converted to {dtype.label}")
    return out
