"""Damaged and hostile files: refused with an error, or read as something that holds together. Never a death."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import gguf_worker
from support.gguf_bytes import ARRAY, RawGGUF, RawTensor, array, scalar
from support.worker import Worker

from pykv.errors import GGUFError
from pykv.gguf import GGUFFile

PAIRS = [
    ("general.architecture", scalar("str", "llama")),
    ("general.alignment", scalar("u32", 32)),
    ("llama.block_count", scalar("u32", 2)),
    ("f", scalar("f32", 0.5)),
    ("b", scalar("bool", True)),
    ("tokens", array("str", ["a", "bc", "größe", ""])),
    ("scores", array("f32", [0.0, 1.0, 2.0])),
    ("flags", array("bool", [True, False])),
]
TENSORS = [
    RawTensor("token_embd.weight", (8, 4), 0, bytes(128)),
    RawTensor("output.weight", (32, 2), 8, bytes(68)),
    RawTensor("norm", (3,), 0, bytes(12)),
]
SOUND = RawGGUF(PAIRS, TENSORS)
WHOLE = SOUND.encode()
HEADER = len(SOUND.header())


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(Path(gguf_worker.__file__)) as worker:
        yield worker


def test_the_file_that_is_damaged_below_is_sound(worker):
    assert worker.ask(WHOLE.hex()) == "read"


def test_a_file_cut_at_any_length_is_refused(tmp_path):
    path = tmp_path / "cut.gguf"
    for n in range(len(WHOLE)):
        path.write_bytes(WHOLE[:n])
        with pytest.raises(GGUFError, match=r"cut\.gguf"):
            GGUFFile(path)


def test_only_padding_behind_the_last_tensor_may_be_cut(tmp_path):
    path = tmp_path / "cut.gguf"
    padded = WHOLE.ljust(-(-len(WHOLE) // 32) * 32, b"\0")
    assert len(padded) > len(WHOLE)
    for n in range(len(WHOLE), len(padded) + 1):
        path.write_bytes(padded[:n])
        with GGUFFile(path) as file:
            assert list(file.tensors) == [t.name for t in TENSORS]


def test_a_tensor_that_is_cut_off_is_named(tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(WHOLE[:-1])
    with pytest.raises(GGUFError, match=rf"cut off: tensor 'norm' \[3, 1, 1, 1\] ends at byte {len(WHOLE)}, the file"):
        GGUFFile(path)


@given(flips=st.lists(st.tuples(st.integers(4, HEADER - 1), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=400, deadline=None)
def test_changed_bytes_in_the_header(worker, flips):
    damaged = bytearray(WHOLE)
    for at, value in flips:
        damaged[at] = value
    assert worker.ask(damaged.hex()) in ("read", "refused")


@given(
    at=st.integers(8, HEADER - 8), value=st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
)
@settings(max_examples=200, deadline=None)
def test_large_numbers_anywhere_in_the_header(worker, at, value):
    damaged = bytearray(WHOLE)
    damaged[at : at + 8] = struct.pack("<Q", value)
    assert worker.ask(damaged.hex()) in ("read", "refused")


@given(tail=st.binary(max_size=200))
@example(tail=b"")
@settings(max_examples=100, deadline=None)
def test_noise_behind_a_good_beginning(worker, tail):
    assert worker.ask((WHOLE[:24] + tail).hex()) in ("read", "refused")


REFUSED = {
    "more pairs than there are": RawGGUF(PAIRS, TENSORS, n_pairs=9),
    "pairs past int64": RawGGUF(PAIRS, TENSORS, n_pairs=2**64 - 1),
    "more tensors than there are": RawGGUF(PAIRS, TENSORS, n_tensors=4),
    "tensors past int64": RawGGUF(PAIRS, TENSORS, n_tensors=2**63),
    "as many tensors as fit in memory never": RawGGUF(PAIRS, TENSORS, n_tensors=2**40),
    "an alignment of zero": RawGGUF([("general.alignment", scalar("u32", 0))]),
    "an alignment that is no power of two": RawGGUF([("general.alignment", scalar("u32", 48))]),
    "an alignment of another type": RawGGUF([("general.alignment", scalar("u64", 32))]),
    "an alignment that is an array": RawGGUF([("general.alignment", array("u8", [32]))]),
    "an alignment past the end": RawGGUF([("general.alignment", scalar("u32", 2**31))], [RawTensor("a", (1,))]),
    "an empty key": RawGGUF([("", scalar("u8", 1))]),
    "a key twice": RawGGUF([("k", scalar("u8", 1)), ("k", scalar("u8", 2))]),
    "a key twice, behind a nul": RawGGUF([(b"k\0a", scalar("u8", 1)), (b"k\0b", scalar("u8", 2))]),
    "a key that is not utf-8": RawGGUF([(b"\xff", scalar("u8", 1))]),
    "an unknown type": RawGGUF([("k", struct.pack("<IQ", 13, 0))]),
    "a negative type": RawGGUF([("k", struct.pack("<iQ", -1, 0))]),
    "an array of arrays": RawGGUF([("k", struct.pack("<IIQ", ARRAY, ARRAY, 1) + array("u8", [1])[4:])]),
    "an array of an unknown type": RawGGUF([("k", struct.pack("<IIQ", ARRAY, 99, 1))]),
    "an array longer than the file": RawGGUF([("k", array("u64", [1], count=2**29))]),
    "an array past int64": RawGGUF([("k", array("u64", [1], count=2**64 - 1))]),
    "an array whose bytes overflow": RawGGUF([("k", array("u64", [1], count=2**61))]),
    "strings longer than the file": RawGGUF([("k", array("str", ["a"], count=2**29))]),
    "a string past int64": RawGGUF([("k", struct.pack("<IQ", 8, 2**64 - 1))]),
    "a string longer than the file": RawGGUF([("k", struct.pack("<IQ", 8, 2**20))]),
    "five dims": RawGGUF([], [RawTensor("a", (1, 1, 1, 1, 1), 0, bytes(4))]),
    "a negative dim": RawGGUF([], [RawTensor("a", (-1,), 0, bytes(4))]),
    "dims whose product overflows to zero": RawGGUF([], [RawTensor("a", (2**32, 2**32), 0, bytes(4))]),
    "dims whose product overflows to a small number": RawGGUF([], [RawTensor("a", (2**32 + 1, 2**32), 0, bytes(4))]),
    "dims whose bytes overflow": RawGGUF([], [RawTensor("a", (2**61, 4), 0, bytes(4))]),
    "an unknown tensor type": RawGGUF([], [RawTensor("a", (32,), 200, bytes(4))]),
    "a tensor type that was removed": RawGGUF([], [RawTensor("a", (32,), 4, bytes(4))]),
    "rows that are no whole blocks": RawGGUF([], [RawTensor("a", (33,), 8, bytes(68))]),
    "a tensor twice": RawGGUF([], [RawTensor("a", (1,), 0, bytes(4)), RawTensor("a", (1,), 0, bytes(4))]),
    "a tensor twice, behind a nul": RawGGUF([], [RawTensor(b"a\0b", (1,), 0, bytes(4)), RawTensor("a", (1,), 0)]),
    "a name of 64 bytes": RawGGUF([], [RawTensor("n" * 64, (1,), 0, bytes(4))]),
    "a name that is not utf-8": RawGGUF([], [RawTensor(b"\xff", (1,), 0, bytes(4))]),
    "an offset that is not the next": RawGGUF([], [RawTensor("a", (1,), 0, bytes(4), offset=32)]),
    "an offset past int64": RawGGUF([], [RawTensor("a", (1,), 0, bytes(4), offset=2**64 - 32)]),
    "a tensor past the end": RawGGUF([], [RawTensor("a", (1000,), 0, bytes(4))]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_these_are_refused(worker, name):
    assert worker.ask(REFUSED[name].encode().hex()) == "refused"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("an alignment of zero", "alignment 0 is not a power of 2"),
        ("an unknown tensor type", r"tensor 'a' has invalid ggml type 200"),
        ("an array of arrays", "key 'k' has invalid GGUF type 9"),
        ("a key twice", "duplicate key 'k'"),
        ("five dims", "invalid number of dimensions: 5 > 4"),
        ("a tensor past the end", r"cut off: tensor 'a' \[1000, 1, 1, 1\]"),
        ("a name that is not utf-8", r"the name of a tensor is not UTF-8: b'\\xff'"),
    ],
)
def test_the_reason_is_told(tmp_path, caplog, name, message):
    path = tmp_path / "x.gguf"
    path.write_bytes(REFUSED[name].encode())
    with pytest.raises(GGUFError, match=f"x.gguf: .*{message}"):
        GGUFFile(path)
    assert caplog.records == [], "it is raised, not logged too"


READ = {
    "no dims": RawGGUF([], [RawTensor("a", (), 0, bytes(4))]),
    "a dim of zero": RawGGUF([], [RawTensor("a", (0, 5), 0, b"")]),
    "a name of 63 bytes": RawGGUF([], [RawTensor("n" * 63, (1,), 0, bytes(4))]),
    "an empty tensor name": RawGGUF([], [RawTensor("", (1,), 0, bytes(4))]),
    "a bool that is neither": RawGGUF([("k", struct.pack("<IB", 7, 2))]),
    "a nul in a string": RawGGUF([("k", scalar("str", b"a\0b")), ("l", array("str", [b"\0", b"c"]))]),
}


@pytest.mark.parametrize("name", READ)
def test_these_are_odd_but_read(worker, name):
    assert worker.ask(READ[name].encode().hex()) == "read"
