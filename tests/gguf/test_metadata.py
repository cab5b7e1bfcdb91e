"""Typed metadata: every type of the format, missing keys, wrong types."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_bytes import CODES, RawGGUF, array, scalar

from pykv.errors import GGUFError, UseAfterCloseError
from pykv.gguf import GGUFFile


@pytest.fixture
def opened(tmp_path):
    files: list[GGUFFile] = []

    def open_file(*pairs: tuple[str | bytes, bytes]) -> GGUFFile:
        path = tmp_path / f"{len(files)}.gguf"
        path.write_bytes(RawGGUF(list(pairs)).encode())
        files.append(GGUFFile(path))
        return files[-1]

    yield open_file
    for file in files:
        file.close()


LIMITS = {
    "u8": (0, 2**8 - 1),
    "i8": (-(2**7), 2**7 - 1),
    "u16": (0, 2**16 - 1),
    "i16": (-(2**15), 2**15 - 1),
    "u32": (0, 2**32 - 1),
    "i32": (-(2**31), 2**31 - 1),
    "u64": (0, 2**64 - 1),
    "i64": (-(2**63), 2**63 - 1),
    "f32": (-1.5, math.inf),
    "f64": (-0.1, 1e300),
    "bool": (False, True),
}
KINDS = {"f32": float, "f64": float, "bool": bool}


@pytest.mark.parametrize("kind", LIMITS)
def test_scalars(opened, kind):
    low, high = LIMITS[kind]
    metadata = opened(("low", scalar(kind, low)), ("high", scalar(kind, high))).metadata
    wanted = KINDS.get(kind, int)
    for key, value in (("low", low), ("high", high)):
        assert metadata[key] == value
        assert type(metadata[key]) is wanted
        assert metadata.typed(key, wanted) == value


@pytest.mark.parametrize("kind", LIMITS)
def test_arrays(opened, kind):
    values = [LIMITS[kind][i % 2] for i in range(7)]
    file = opened(("a", array(kind, values)), ("none", array(kind, [])))
    a, none = file.metadata["a"], file.metadata["none"]
    assert a.tolist() == values
    assert a.dtype == np.dtype(CODES[kind][1].replace("?", "?").replace("<?", "?"))
    assert none.shape == (0,)
    assert none.dtype == a.dtype
    file.close()
    assert a.tolist() == values, "the array is a copy"


TEXTS = ["", "plain", "größe", "日本語", "🙂", "Ġthe", "a\nb\t", "x" * 70000]


@pytest.mark.parametrize("value", TEXTS, ids=lambda t: repr(t[:8]))
def test_strings(opened, value):
    metadata = opened(("k", scalar("str", value))).metadata
    assert metadata["k"] == value
    assert metadata.typed("k", str) == value


def test_arrays_of_strings(opened):
    metadata = opened(("k", array("str", TEXTS)), ("none", array("str", [])), ("one", array("str", [""]))).metadata
    assert metadata["k"] == TEXTS
    assert metadata["none"] == []
    assert metadata["one"] == [""]


def test_strings_that_are_not_utf8_are_patched(opened):
    metadata = opened(("k", scalar("str", b"a\xffb")), ("l", array("str", [b"\xc3", "ok"]))).metadata
    assert metadata["k"] == "a\ufffdb"
    assert metadata["l"] == ["\ufffd", "ok"]


def test_a_key_that_is_not_utf8_is_refused(opened):
    with pytest.raises(GGUFError, match=r"key is not UTF-8: b'a\\xff'"):
        opened((b"a\xff", scalar("u8", 1)))


def test_keys_in_file_order_and_the_mapping_protocol(opened):
    metadata = opened(("z", scalar("u8", 1)), ("größe", scalar("u8", 2)), ("a.b", scalar("u8", 3))).metadata
    assert list(metadata) == ["z", "größe", "a.b"]
    assert len(metadata) == 3
    assert "größe" in metadata
    assert "x" not in metadata
    assert 7 not in metadata
    assert dict(metadata) == {"z": 1, "größe": 2, "a.b": 3}
    assert metadata.get("x") is None
    with pytest.raises(KeyError):
        metadata["x"]


def test_a_missing_key_is_named_with_its_file(opened):
    file = opened(("k", scalar("u32", 4)))
    with pytest.raises(GGUFError, match=rf"{file.path.name}: the key 'llama.block_count' is missing"):
        file.metadata.typed("llama.block_count", int)
    assert file.metadata.typed("llama.block_count", int, 7) == 7
    assert file.metadata.typed("flag", bool, False) is False
    assert file.metadata.typed("text", str, "") == ""


@pytest.mark.parametrize(
    ("value", "kind", "found"),
    [
        (scalar("str", "5"), int, "str"),
        (scalar("u32", 5), str, "int"),
        (scalar("u32", 1), bool, "int"),
        (scalar("bool", True), int, "bool"),
        (scalar("bool", True), float, "bool"),
        (scalar("f32", 1.0), int, "float"),
        (array("u32", [1]), int, "ndarray"),
        (array("str", ["a"]), str, "list"),
    ],
)
def test_a_mistyped_key_is_named_with_both_types(opened, value, kind, found):
    metadata = opened(("k", value)).metadata
    with pytest.raises(GGUFError, match=rf"the key 'k' holds {found}, expected {kind.__name__}"):
        metadata.typed("k", kind)
    with pytest.raises(GGUFError, match="the key 'k' holds"):
        metadata.typed("k", kind, kind())  # a default does not hide it


def test_an_int_is_taken_as_a_float(opened):
    value = opened(("k", scalar("u32", 10000))).metadata.typed("k", float)
    assert value == 10000.0
    assert type(value) is float


def test_what_was_not_read_before_close_is_refused(opened):
    file = opened(("a", scalar("u8", 1)), ("b", scalar("u8", 2)))
    assert file.metadata["a"] == 1
    file.close()
    with pytest.raises(UseAfterCloseError):
        file.metadata["b"]


JSON_LIKE = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8", exclude_characters="\0")),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20),
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=1, max_size=8),
)
KEYS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)


@given(pairs=st.dictionaries(KEYS, JSON_LIKE, max_size=8))
@settings(max_examples=60, deadline=None)
def test_what_gguf_writes_is_read_back(tmp_path_factory, pairs):
    path = Path(tmp_path_factory.mktemp("written")) / "x.gguf"
    writer = gguf.GGUFWriter(str(path), "test")
    for key, value in pairs.items():
        match value:
            case bool():
                writer.add_bool(f"k{key}", value)
            case int():
                writer.add_int64(f"k{key}", value)
            case float():
                writer.add_float64(f"k{key}", value)
            case str():
                writer.add_key_value(f"k{key}", value, gguf.GGUFValueType.STRING)
            case list():
                writer.add_array(f"k{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with GGUFFile(path) as file:
        for key, value in pairs.items():
            found = file.metadata[f"k{key}"]
            assert (found.tolist() if isinstance(found, np.ndarray) else found) == value
        assert file.metadata["general.architecture"] == "test"
