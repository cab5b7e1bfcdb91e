"""Feeds the parser of state files with whatever a fuzzer makes of good ones. Not a part of the tests.

From the root of a checkout, with a Python that has numpy, xxhash and atheris:

    python tests/fuzz/state_parser.py CORPUS_FOLDER -max_total_time=600 -max_len=4096

An empty or missing corpus folder is filled first: one file for each small state that the tests know, and the small
beginnings of files that llama.cpp wrote. Anything but StateError ends the run, with the input in `crash-*`, which can
be given instead of the folder to see it again. What is read without an error must lie within the bytes, and give the
same bytes when it is written again.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import atheris

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

with atheris.instrument_imports(include=["pykv.state_format"]):
    from support.state_bytes import Sample, StateBytes, samples

    from pykv.errors import StateError
    from pykv.state_format import (
        Dialect,
        KVLayout,
        KVSection,
        Notes,
        Section,
        SectionLayout,
        SectionSum,
        Span,
        StreamRecords,
        kv_section_head,
        kv_stream_heads,
        parse_state,
        parse_unknown,
        read_container,
        read_trailer,
        states_heads,
        trailer_pieces,
        verify_sections,
    )

SAMPLES = samples()


def one_input(data: bytes) -> None:
    """Do with the bytes all that loading and inspecting do."""
    stop = len(data)
    with contextlib.suppress(StateError):
        trailer = read_trailer(data)
        if trailer is not None:
            stop = trailer.span.start
            verify_sections(data, trailer.notes, stop)
    with contextlib.suppress(StateError):
        container = read_container(data, stop)
        whole, start = container.kind.whole, container.state.start
        for sample in SAMPLES:
            if sample.whole == whole:
                load(data, start, stop, sample, container.dialect, whole=whole)
        found = parse_unknown(data, start, whole=whole, dialect=container.dialect, stop=stop)
        assert found.sections[-1].span.start + found.sections[-1].span.nbytes == stop


def load(data: bytes, start: int, stop: int, sample: Sample, dialect: Dialect | None, *, whole: bool) -> None:
    """Parse the state as one for the sample's memory, and write again what was read."""
    with contextlib.suppress(StateError):
        parse_state(data, start, sample.layouts, whole=whole, dialect=dialect, stop=stop, strict=False)
    for each in Dialect if dialect is None else (dialect,):
        try:
            sections, end = parse_state(data, start, sample.layouts, whole=whole, dialect=each, stop=stop)
        except StateError:
            continue
        assert end == stop
        pairs = zip(sections, sample.layouts, strict=True)
        again = b"".join(written(data, section, layout, each) for section, layout in pairs)
        assert again == data[start:stop]


def written(data: bytes, section: Section, layout: SectionLayout, dialect: Dialect) -> bytes:
    if isinstance(section, KVSection):
        assert isinstance(layout, KVLayout)
        streams = (stream_written(data, stream, layout, dialect) for stream in section.streams)
        return kv_section_head(len(section.streams)) + b"".join(streams)
    assert not isinstance(layout, KVLayout)
    heads = states_heads(section.cells, layout)
    return heads.first + with_payload(data, heads.rows, [rows.span for rows in section.r + section.s])


def stream_written(data: bytes, stream: StreamRecords, layout: KVLayout, dialect: Dialect) -> bytes:
    heads = kv_stream_heads(stream.cells, layout, dialect)
    return heads.first + with_payload(data, heads.rows, [rows.span for rows in stream.k + stream.v])


def with_payload(data: bytes, heads: tuple[bytes, ...], spans: list[Span]) -> bytes:
    return b"".join(head + data[at : at + n] for head, (at, n) in zip(heads, spans, strict=True))


def fill_corpus(folder: Path) -> None:
    """Write the files from which the fuzzer starts."""
    folder.mkdir(parents=True, exist_ok=True)
    for sample in SAMPLES:
        head = StateBytes()
        if sample.whole:
            head.file_head(b"nsgg", 11, [5, 6, 7]).arch("llama")
        else:
            head.file_head(b"qsgg", 4, [5, 6, 7])
        state = bytes(sample.state.data)
        in_memory = b"\5\0\0\0llama" if sample.whole else b"\xd8\x3c\x14\xaf\0\0\0\0"
        trailer = b"".join(bytes(piece) for piece in trailer_pieces(_notes(), {"a": b"xyz"}))
        name = sample.name.replace(" ", "-")
        (folder / f"{name}.file").write_bytes(bytes(head.data) + state)
        (folder / f"{name}.bytes").write_bytes(in_memory + state)
        (folder / f"{name}.trailer").write_bytes(bytes(head.data) + state + trailer)
    for path in (ROOT / "tests" / "data" / "state").glob("*.gg*"):
        (folder / path.name).write_bytes(path.read_bytes()[:2048])


def _notes() -> Notes:

    return Notes("model", {"base": 1e4}, {"k": "f16"}, (SectionSum(0, 4, "0" * 32),), {"text": "x"})


def main() -> None:
    folders = [Path(each) for each in sys.argv[1:] if not each.startswith("-")]
    if folders and not folders[0].is_file() and not (folders[0].is_dir() and any(folders[0].iterdir())):
        fill_corpus(folders[0])
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
