"""Reads as much as there is of a state that ends early or is damaged, and tells what is missing.

Which shape it has is not known: the one that finds most is taken, as `parse_unknown` takes the one that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pykv.errors import StateError
from pykv.state_format.containers import SEQUENCE_BYTES_MAGIC, SEQUENCE_MAGIC, SESSION_MAGIC, Container, Kind
from pykv.state_format.cursor import Cursor, mismatch
from pykv.state_format.dialect import NEWEST_FIRST, Dialect
from pykv.state_format.read_cells import read_cells
from pykv.state_format.records import KVSection, RowsRecord, Section, Span, StatesSection, StreamRecords
from pykv.state_format.structure import (
    KVShape,
    StreamHead,
    read_channels,
    read_rows,
    read_state_rows,
    read_states_head,
    read_stream_head,
)
from pykv.state_format.unknown import MAX_SECTIONS
from pykv.typing import MAX_SEQ

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_TRIES = 1000
"""How many sections are tried; then the best so far is good enough."""

_FILES = {SESSION_MAGIC: Kind.SESSION_FILE, SEQUENCE_MAGIC: Kind.SEQUENCE_FILE}


class Salvaged(NamedTuple):
    """What could be read.

    Attributes
    ----------
    sections : all but the last are whole; of the last, the tensors that are.
    fault : why it went no further.
    missing : in words, what the last section says that it has, and has not.
    """

    dialect: Dialect
    sections: tuple[Section, ...]
    fault: StateError
    missing: str


def salvage_container(data: Buffer, fault: StateError) -> Container:
    """Return what is left of a head that `read_container` refused; no sections follow.

    Raises
    ------
    StateError : that fault, where nothing can be told.
    """
    with memoryview(data).cast("B") as view:
        words = np.frombuffer(view[: len(view) // 4 * 4], "<u4")
        magic = int(words[0]) if words.size else -1
        rest = Span(len(view), 0)
        if magic == SEQUENCE_BYTES_MAGIC:
            return Container(Kind.SEQUENCE_BYTES, None, None, None, None, rest)
        kind = _FILES.get(magic)
        if kind is None:
            raise fault
        versions = {each.session_version if kind.whole else each.sequence_version: each for each in Dialect}
        dialect = versions.get(int(words[1])) if words.size > 1 else None
        if words.size > 1 and dialect is None:
            raise fault
        n_tokens = int(words[2]) if words.size > 2 else 0
        return Container(kind, dialect, words[3 : 3 + n_tokens].astype(np.int32), None, None, rest)


def salvage_sections(
    data: Buffer, start: int, *, whole: bool, dialect: Dialect | None = None, stop: int | None = None
) -> Salvaged:
    """Return as much of a state as can be read; for parameters see `parse_unknown`, which refused it."""
    with Cursor(data, start, stop) as cursor:
        searches = (
            _Search(cursor, each, whole=whole, has_ext=has_ext)
            for each in (NEWEST_FIRST if dialect is None else (dialect,))
            for has_ext in (False, True)
        )
        return max((found for search in searches for found in search.ways(start, ())), key=_worth)


def _worth(found: Salvaged) -> tuple[int, int, int]:
    """Return by what the ways to read some bytes are compared.

    First by the rows: these have heads that must be right, while anything passes for a long list of cells.
    """
    n_rows = sum(rows.span.nbytes for section in found.sections for rows in _rows_of(section))
    n_told = sum(section.span.nbytes for section in found.sections)
    return n_rows, n_told, -1 if found.fault.offset is None else found.fault.offset


def _rows_of(section: Section) -> Iterator[RowsRecord]:
    if isinstance(section, StatesSection):
        yield from (*section.r, *section.s)
    else:
        for stream in section.streams:
            yield from (*stream.k, *stream.v)


class _Part(NamedTuple):
    """A section as far as it goes; `fault` None = it is whole."""

    section: Section | None
    fault: StateError | None
    missing: str = ""


class _Search:
    """All ways to read the beginning of some bytes as sections."""

    def __init__(self, cursor: Cursor, dialect: Dialect, *, whole: bool, has_ext: bool) -> None:
        self._cursor, self._dialect, self._whole, self._has_ext = cursor, dialect, whole, has_ext
        self._n_tries = 0

    def ways(self, at: int, before: tuple[Section, ...]) -> Iterator[Salvaged]:
        """Yield the ways that end in a fault, and all that comes before it."""
        if len(before) == MAX_SECTIONS or at == self._cursor.stop:
            end = mismatch("state", "its end", f"{self._cursor.stop - at} more bytes", at)
            yield Salvaged(self._dialect, before, end, "")
            return
        for part in self._parts(at):
            found = before if part.section is None else (*before, part.section)
            if part.fault is not None:
                yield Salvaged(self._dialect, found, part.fault, part.missing)
            if part.section is None or (part.fault is not None and isinstance(part.section, KVSection)):
                continue
            if self._n_tries < MAX_TRIES and part.section.span.nbytes:
                yield from self.ways(at + part.section.span.nbytes, found)

    def _parts(self, at: int) -> Iterator[_Part]:
        for n_v in (None, 0):
            self._n_tries += 1
            self._cursor.at = at
            yield self._kv(KVShape(self._has_ext, None, n_v))
        self._cursor.at = at
        yield self._states()

    def _kv(self, shape: KVShape) -> _Part:
        cursor, start = self._cursor, self._cursor.at
        streams: list[StreamRecords] = []
        n_stream, head = 0, None
        try:
            n_stream = cursor.u32("KV section: number of streams")
            if not 1 <= n_stream <= MAX_SEQ:
                raise mismatch("KV section: number of streams", f"1 to {MAX_SEQ}", n_stream, start)
            for s in range(n_stream):
                head, what = None, f"KV section: stream {s}"
                cells = read_cells(cursor, None if self._whole else 1, has_ext=shape.has_ext, what=what)
                streams.append(StreamRecords(cells))
                if cells.n:
                    head = read_stream_head(cursor, shape, self._dialect, what)
                    self._add_tensors(streams, head, what)
        except StateError as error:
            section = KVSection(tuple(streams), Span(start, cursor.at - start)) if streams else None
            return _Part(section, error, _missing(streams, head, n_stream))
        return _Part(KVSection(tuple(streams), Span(start, cursor.at - start)), None)

    def _add_tensors(self, streams: list[StreamRecords], head: StreamHead, what: str) -> None:
        cursor, cells = self._cursor, streams[-1].cells
        k: list[RowsRecord] = []
        v: list[RowsRecord] = []
        read_v = read_channels if head.v_trans else read_rows
        try:
            for i in range(head.n_k):
                k.append(read_rows(cursor, cells.n, f"{what}: K of layer {i}"))
            for i in range(head.n_v):
                v.append(read_v(cursor, cells.n, f"{what}: V of layer {i}"))
        finally:
            streams[-1] = StreamRecords(cells, tuple(k), tuple(v), head.v_trans, head.rot)

    def _states(self) -> _Part:
        cursor, start = self._cursor, self._cursor.at
        rows: list[RowsRecord] = []
        end = start
        try:
            cells, n_layer = read_states_head(cursor, whole=self._whole)
        except StateError as error:
            return _Part(None, error)
        try:
            end = cursor.at
            while len(rows) < 2 * n_layer:
                rows.append(read_state_rows(cursor, cells.n, f"tensor {len(rows)}"))
                end = cursor.at
        except StateError as error:
            # which tensors are R and which S, only a whole section tells
            return _Part(StatesSection(cells, n_layer, tuple(rows), (), Span(start, end - start)), error)
        halves = tuple(rows[: len(rows) // 2]), tuple(rows[len(rows) // 2 :])
        return _Part(StatesSection(cells, n_layer, *halves, Span(start, end - start)), None)


def _missing(streams: list[StreamRecords], head: StreamHead | None, n_stream: int) -> str:
    """Return what a KV section says that it has, and has not."""
    told = []
    if head is not None:
        for name, have, n in (("K", streams[-1].k, head.n_k), ("V", streams[-1].v, head.n_v)):
            if len(have) < n:
                layers = f"layer {n - 1}" if len(have) == n - 1 else f"layers {len(have)} to {n - 1}"
                told.append(f"{name} of {layers}")
    elif streams and streams[-1].cells.n:
        told.append(f"all tensors of stream {len(streams) - 1}")
    if streams and len(streams) < n_stream <= MAX_SEQ:
        told.append(f"{n_stream - len(streams)} of {n_stream} streams")
    return ", ".join(told)
