"""Files that llama.cpp wrote: read completely, and written again to the same bytes."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import pytest

from pykv.errors import StateError
from pykv.state_format import (
    Container,
    Dialect,
    Kind,
    KVLayout,
    KVSection,
    RowsLayout,
    kv_section_head,
    kv_stream_heads,
    parse_state,
    parse_unknown,
    read_container,
    read_trailer,
    sequence_head,
    session_head,
)

DATA = Path(__file__).parents[1] / "data" / "state"
MANIFEST = json.loads((DATA / "manifest.json").read_text())
FILES = sorted(path.name for path in DATA.glob("*.gg*"))


def layouts(name: str) -> list[KVLayout]:
    """Return what the model's caches expect: SmolLM2 has 30 layers 192 wide, Gemma 3 has 3 and 15 of 256."""
    said = MANIFEST[name]
    n_stream = 1 if said["kv_unified"] else said["n_seq_max"]
    counts, width, head = ([3, 15], 256, 256) if name.startswith("gemma") else ([30], 192, 64)
    quantised = said["type_k"] == 8
    rows = RowsLayout(8, width // 32 * 34) if quantised else RowsLayout(1, width * 2, 2)
    rot = (head, head) if quantised else (0, 0)
    v_trans = not said["flash_attn"]
    n_cells = 256
    return [KVLayout(n_stream, n_cells, said["n_seq_max"], (rows,) * n, (rows,) * n, v_trans, rot) for n in counts]


def write_again(container: Container, data: bytes, expected: list[KVLayout], sections: tuple[KVSection, ...]) -> bytes:
    """Return the file made anew out of what was read; only payload is copied."""
    if container.kind is Kind.SESSION_FILE:
        written = session_head(container.tokens, container.arch, container.dialect)
    else:
        written = sequence_head(container.tokens, container.dialect)
    for section, layout in zip(sections, expected, strict=True):
        written += kv_section_head(len(section.streams))
        for stream in section.streams:
            heads = kv_stream_heads(stream.cells, layout, container.dialect)
            written += heads.first
            for head, rows in zip(heads.rows, stream.k + stream.v, strict=True):
                written += head + data[rows.span.start : rows.span.start + rows.span.nbytes]
    return written


def test_the_files_are_there():
    assert {Path(name).stem for name in FILES} == set(MANIFEST)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_completely_and_written_again(name):
    data = (DATA / name).read_bytes()
    said, stem = MANIFEST[Path(name).stem], Path(name).stem
    container = read_container(data)
    assert container.kind is (Kind.SESSION_FILE if name.endswith("sn") else Kind.SEQUENCE_FILE)
    assert container.dialect is Dialect.S11
    assert container.tokens.tolist() == said["tokens"]
    assert container.arch == (None if name.endswith("sq") else "gemma3" if stem.startswith("gemma") else "llama")
    whole = container.kind.whole
    expected = layouts(stem)
    sections, end = parse_state(data, container.state.start, expected, whole=whole, dialect=container.dialect)
    assert end == len(data) == said["session_bytes" if whole else "sequence_bytes"]
    for section in sections:
        for s, stream in enumerate(section.streams):
            there = whole or s == 0
            assert stream.cells.pos.tolist() == (list(range(len(said["tokens"]))) if there else [])
            assert stream.cells.ids.tolist() == [s] * stream.cells.n
    assert write_again(container, data, expected, sections) == data
    assert read_trailer(data) is None


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_understood_without_its_model(name):
    """And the mapping that it was read from can be closed."""
    with (DATA / name).open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    container = read_container(mapped)
    found = parse_unknown(mapped, container.state.start, whole=container.kind.whole)
    mapped.close()
    expected = layouts(Path(name).stem)
    assert found.dialect is Dialect.S11
    assert [(len(s.streams[0].k), len(s.streams[0].v)) for s in found.sections] == [
        (len(layout.k), len(layout.v)) for layout in expected
    ]
    assert {s.streams[0].v_trans for s in found.sections} == {expected[0].v_trans}
    assert {s.streams[0].rot for s in found.sections} == {expected[0].rot}


@pytest.mark.parametrize("name", ["smollm2_fa_q8_0.ggsq", "gemma3_fa_f16.ggsn"])
def test_every_cut_of_a_file_is_noticed(name):
    """At the first and last bytes, and at every 997th between."""

    def read(stop: int) -> None:
        container = read_container(data[:stop])
        parse_state(
            data, container.state.start, expected, whole=container.kind.whole, dialect=container.dialect, stop=stop
        )

    data = memoryview((DATA / name).read_bytes())
    expected = layouts(Path(name).stem)
    state = read_container(data).state.start
    for stop in {*range(state + 200), *range(0, len(data), 997), *range(len(data) - 30, len(data))}:
        with pytest.raises(StateError):
            read(stop)
    read(len(data))
