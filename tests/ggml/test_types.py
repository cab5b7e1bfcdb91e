"""Element types: numbers from the library, sizes and conversions from gguf's own tables."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from pykv._native import lib
from pykv.errors import ParamError, TensorError
from pykv.ggml import DType, from_float, to_float

RNG = np.random.default_rng(12)
ALL = list(DType)

REFERENCE = [DType.BF16, DType.F16, DType.Q8_0, DType.Q5_1, DType.Q5_0, DType.Q4_1, DType.Q4_0]
"""Types that gguf quantises bit for bit like ggml's reference."""

INTEGERS = {"I8", "I16", "I32", "I64"}
NO_WRITER = {"IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "Q8_K", "F64", *INTEGERS}
NO_READER = {"Q8_1", "Q8_K", "F64", *INTEGERS}


@pytest.mark.parametrize("dtype", ALL, ids=lambda t: t.label)
def test_numbers_come_from_the_library(dtype):
    assert dtype == getattr(lib, f"GGML_TYPE_{dtype.name}")


def test_every_type_of_this_ggml_is_known():
    known = {n for n in range(lib.GGML_TYPE_COUNT) if lib.ggml_blck_size(n) > 0}
    assert known == set(map(int, DType))


IN_FILES = [t for t in ALL if t.name in gguf.GGMLQuantizationType.__members__ and t != DType.Q8_1]  # never in a file


@pytest.mark.parametrize("dtype", IN_FILES, ids=lambda t: t.label)
def test_sizes_and_numbers_are_those_of_the_format(dtype):
    kind = gguf.GGMLQuantizationType[dtype.name]
    assert int(dtype) == kind.value
    assert (dtype.block_size, dtype.type_size) == gguf.GGML_QUANT_SIZES[kind]
    assert dtype.row_size(dtype.block_size * 7) == dtype.type_size * 7
    assert dtype.is_quantized == (dtype.block_size > 1)


@pytest.mark.parametrize("dtype", ALL, ids=lambda t: t.label)
def test_labels_can_be_parsed(dtype):
    assert DType.parse(dtype.label) is DType.parse(dtype.label.upper()) is DType.parse(dtype) is dtype


def test_labels_are_what_users_write():
    assert [t.label for t in (DType.Q8_0, DType.Q4_K, DType.BF16, DType.IQ4_NL)] == ["q8_0", "q4_K", "bf16", "iq4_nl"]


@pytest.mark.parametrize("name", ["", "q9_0", "float", None, 8, "COUNT"])
def test_unknown_types_are_named(name):
    with pytest.raises(ParamError, match=r"type_k=.*is no element type; known: f32, f16"):
        DType.parse(name, "type_k")


@pytest.mark.parametrize("dtype", [DType.Q8_0, DType.Q4_K], ids=lambda t: t.label)
@pytest.mark.parametrize("n", [-256, -1, 1, 31, 257])
def test_rows_that_are_no_whole_blocks(dtype, n):
    with pytest.raises(TensorError, match=f"a row of {n} elements"):
        dtype.row_size(n)


@pytest.mark.parametrize("dtype", REFERENCE, ids=lambda t: t.label)
def test_from_float_writes_the_reference_blocks(dtype):
    values = (RNG.standard_normal((6, 64)) * np.logspace(-3, 3, 6)[:, None]).astype(np.float32)
    expect = gguf.quantize(values, gguf.GGMLQuantizationType[dtype.name])
    assert from_float(dtype, values).tobytes() == expect.tobytes()


@pytest.mark.parametrize("dtype", [t for t in ALL if t.is_quantized and t.name not in NO_READER], ids=lambda t: t.label)
def test_to_float_reads_any_block_as_gguf_does(dtype):
    # random bytes, but scales that are finite: exponent bits of f16 are not all ones
    raw = RNG.integers(0, 256, (8, dtype.row_size(256)), dtype=np.uint8) & 0x3B
    try:
        expect = gguf.dequantize(raw, gguf.GGMLQuantizationType[dtype.name])
    except (KeyError, NotImplementedError):
        expect = None
    out = to_float(dtype, raw, 8 * 256)
    assert out.shape == (2048,)
    if expect is not None:
        assert np.allclose(out, expect.reshape(-1), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", ALL, ids=lambda t: t.label)
def test_every_type_converts_or_says_that_it_cannot(dtype):
    values = RNG.standard_normal(256).astype(np.float32)
    if dtype.name in NO_WRITER:
        with pytest.raises(TensorError, match="cannot be converted"):
            from_float(dtype, values)
    else:
        raw = from_float(dtype, values)
        assert raw.nbytes == dtype.row_size(256)
        if dtype.name not in NO_READER:
            assert np.corrcoef(to_float(dtype, raw, 256), values)[0, 1] > 0.7
    if dtype.name in NO_READER:
        with pytest.raises(TensorError, match="cannot be converted"):
            to_float(dtype, np.zeros(dtype.row_size(256), np.uint8), 256)


def test_conversions_check_their_sizes():
    with pytest.raises(TensorError, match="raw has 33 bytes; 32 elements of q8_0 need 34"):
        to_float(DType.Q8_0, np.zeros(33, np.uint8), 32)
    with pytest.raises(TensorError, match="no multiple"):
        to_float(DType.Q8_0, np.zeros(340, np.uint8), -32)
    with pytest.raises(TensorError, match="no multiple"):
        from_float(DType.Q4_0, np.zeros(31, np.float32))
    assert to_float(DType.Q8_0, np.zeros(0, np.uint8), 0).shape == (0,)
    assert from_float(DType.Q8_0, np.zeros((0, 32), np.float32)).shape == (0,)


def test_values_in_any_layout():
    values = RNG.standard_normal((32, 4)).astype(np.float32)
    assert np.array_equal(from_float(DType.F16, values.T).view(np.float16), values.T.reshape(-1).astype(np.float16))
    assert np.array_equal(from_float(DType.F32, values.astype(np.float64)).view(np.float32), values.reshape(-1))
