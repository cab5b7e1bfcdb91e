"""Damaged and hostile states: refused by one kind of error, or read as something that holds together."""

from __future__ import annotations

import functools
import os
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from support.state_bytes import F16, SEQ2, Sample, StateBytes, kv_layout, samples

from pykv.errors import StateError
from pykv.state_format import (
    Kind,
    KVSection,
    Section,
    mapped,
    parse_state,
    parse_unknown,
    read_container,
    read_trailer,
)


@dataclass(frozen=True)
class File:
    """A whole file, what is in it, and where its length fields are."""

    sample: Sample
    data: bytes
    lengths: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        return self.sample.name


@functools.cache
def files() -> list[File]:
    """Return the samples, whole ones as session files and the others as sequence files."""
    made = []
    for sample in samples():
        head = StateBytes()
        if sample.whole:
            head.file_head(b"nsgg", 11, [5, 6, 7]).arch("llama")
        else:
            head.file_head(b"qsgg", 4, [5, 6, 7])
        n = len(head.data)
        lengths = (*head.lengths, *((at + n, size) for at, size in sample.state.lengths))
        made.append(File(sample, bytes(head.data) + bytes(sample.state.data), lengths))
    return made


def each_file() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", files(), ids=lambda file: file.name)


def read(data: bytes | bytearray | memoryview, sample: Sample, *, strict: bool = True) -> None:
    """Read a file as a load does, and check that what was read lies within it."""
    trailer = read_trailer(data)
    container = read_container(data, stop=trailer.span.start if trailer else None)
    if container.kind.whole is not sample.whole:
        raise StateError("another container")
    sections, end = parse_state(
        data, container.state.start, sample.layouts, whole=sample.whole, dialect=container.dialect, strict=strict
    )
    assert end == len(data)
    check(sections, container.state.start, end)


def inspect(data: bytes | bytearray | memoryview) -> None:
    """Read a file of which nothing is known."""
    container = read_container(data)
    whole = container.kind in (Kind.SESSION_FILE, Kind.CONTEXT_BYTES)
    found = parse_unknown(data, container.state.start, whole=whole, dialect=container.dialect)
    check(found.sections, container.state.start, len(data))


def check(sections: tuple[Section, ...], start: int, end: int) -> None:
    """Check that cells are possible, and that sections and rows follow one another."""
    at = start
    for section in sections:
        assert section.span.start == at
        at += section.span.nbytes
        parts = section.streams if isinstance(section, KVSection) else (section,)
        before = section.span.start
        for part in parts:
            cells = part.cells
            assert cells.n == len(cells.n_ids)
            assert len(cells.ids) == cells.n_ids.sum()
            assert cells.pos.min(initial=0) >= 0
            assert cells.ids.min(initial=0) >= 0
            for rows in (part.k + part.v) if isinstance(section, KVSection) else (part.r + part.s):
                assert rows.span.nbytes == cells.n * rows.row_bytes
                assert rows.span.start >= before
                before = rows.span.start + rows.span.nbytes
                assert before <= at
    assert at == end


@each_file()
def test_the_files_that_are_damaged_below_are_sound(file):
    read(file.data, file.sample)
    inspect(file.data)


@each_file()
def test_every_cut_is_refused(file):
    view = memoryview(file.data)
    for n in range(len(view)):
        with pytest.raises(StateError):
            read(view[:n], file.sample)


@each_file()
def test_more_bytes_than_the_state_has_are_refused(file):
    for more in (b"\0", bytes(8), file.data):
        with pytest.raises(StateError):
            read(file.data + more, file.sample)


@each_file()
@pytest.mark.parametrize("value", [0, -1, 2**31, 2**31 - 1, 2**32, 2**63, 2**63 - 1], ids=hex)
def test_lengths_that_lie(file, value):
    for at, size in file.lengths:
        data = bytearray(file.data)
        lie = value % 2 ** (8 * size)
        if struct.unpack_from("<I" if size == 4 else "<Q", data, at)[0] == lie:
            continue
        struct.pack_into("<I" if size == 4 else "<Q", data, at, lie)
        for strict in (True, False):
            with pytest.raises(StateError):
                read(data, file.sample, strict=strict)


def damaged(n: int, seed: int) -> Iterator[tuple[File, bytearray]]:
    """Yield files with flipped bits and changed bytes, one to four a file, most in the heads."""
    rng = random.Random(seed)
    for _ in range(n):
        file = rng.choice(files())
        data = bytearray(file.data)
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            at = rng.randrange(len(data))
            if rng.random() < 0.5:
                data[at] ^= 1 << rng.randrange(8)
            else:
                data[at] = rng.choice([0, 1, 2, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        yield file, data


def refusal(reader: Callable[[], None]) -> StateError | None:
    """Return the error with which something is refused; any other is the test's failure."""
    try:
        reader()
    except StateError as error:
        return error
    return None


@pytest.mark.parametrize("strict", [True, False])
def test_ten_thousand_damaged_files_as_a_load_reads_them(strict):
    n_refused = 0
    for file, data in damaged(10_000, seed=1 + strict):
        error = refusal(functools.partial(read, data, file.sample, strict=strict))
        n_refused += error is not None
        assert error is None or error.offset is None or 0 <= error.offset <= len(data), error
    assert n_refused > 3000  # the others are changes of payload, tokens, positions


def test_a_thousand_damaged_files_as_an_inspection_reads_them():
    n_refused = sum(refusal(functools.partial(inspect, data)) is not None for _, data in damaged(1000, seed=3))
    assert n_refused > 300


def test_noise_behind_each_magic():
    rng = random.Random(4)
    heads = [b"", b"nsgg\x0b\0\0\0", b"qsgg\4\0\0\0", b"\xd8\x3c\x14\xaf", b"\5\0\0\0llama"]
    for _ in range(1000):
        data = rng.choice(heads) + bytes(rng.choices([0, 0, 0, 1, 2, 255], k=rng.randrange(200)))
        refusal(functools.partial(inspect, data))
        refusal(functools.partial(read, data, files()[0].sample))


def test_a_length_that_lies_takes_no_memory():
    """Nothing is made of a count before the bytes are there that it needs."""
    data = bytearray(StateBytes().kv([SEQ2], [F16], [F16]).data)
    roomy = replace(kv_layout([F16], [F16]), n_cells=2**32)
    for claimed in (2**32 - 1, 2**31, 10**6, 20):
        struct.pack_into("<I", data, 4, claimed)
        with pytest.raises(StateError, match=f"cells: expected no more than 172 bytes can hold, found {claimed}"):
            parse_state(data, 0, [roomy], whole=False)
        with pytest.raises(StateError, match=f"cells: expected at most 8, found {claimed}"):
            parse_state(data, 0, [kv_layout([F16], [F16])], whole=False)


def test_files_that_are_none(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "state").write_bytes(files()[0].data)
    for name, error in [
        (".", IsADirectoryError),
        ("empty", StateError),
        ("pipe", OSError),
        ("none", FileNotFoundError),
    ]:
        with pytest.raises(error, match=name if name != "." else str(tmp_path)), mapped(tmp_path / name):
            pass
    with mapped(tmp_path / "state") as data:
        inspect(data)
        read(data, files()[0].sample)


def test_a_mapped_file_is_closed_after_an_error(tmp_path):
    path = tmp_path / "state"
    for file in files():
        path.write_bytes(file.data[:-1])
        with mapped(path) as data:
            for reader in (inspect, functools.partial(read, sample=file.sample)):
                with pytest.raises(StateError):
                    reader(data)
        assert data.closed
