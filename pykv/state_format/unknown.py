"""Finds the sections of a state of which nothing is known: of all shapes they could have, one fits the length.

Source: spec state_format.md section 2: a state does not say of which memory it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from pykv.errors import StateError
from pykv.state_format.cursor import Cursor
from pykv.state_format.dialect import NEWEST_FIRST, Dialect
from pykv.state_format.records import KVSection, RowsRecord, Section, Span, StatesSection
from pykv.state_format.structure import KVShape, read_kv, read_state_rows, read_states_head

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_SECTIONS = 4
"""More parts than any memory has."""

MAX_TRIES = 10_000
"""How often something is read before the search ends: made to mislead, a file can have more ways than there is time."""

BEHIND = "nor notes that are whole: they were cut off, or something was added"
"""What is said of bytes behind a state."""

Sections = tuple[Section, ...]


class Found(NamedTuple):
    """What a state was found to be."""

    dialect: Dialect
    sections: Sections


def parse_unknown(
    data: Buffer, start: int, *, whole: bool, dialect: Dialect | None = None, stop: int | None = None
) -> Found:
    """Read a state without knowing of which memory it is, by trying all shapes until the whole length fits.

    Parameters
    ----------
    data, start, stop, whole : see `parse_state`.
    dialect : None = not known either: the newest that fits.

    Raises
    ------
    StateError : no shape fits, with the byte up to which the best one did; or several do, and they differ.
    """
    with Cursor(data, start, stop) as cursor:
        searches: list[_Search] = []
        for each in NEWEST_FIRST if dialect is None else (dialect,):
            search = _Search(cursor, each, whole=whole)
            try:
                found = search.all_that_fit()
            except _TooManyWays:
                raise StateError(f"the state can be read in too many ways: {MAX_TRIES} were tried") from None
            if len(found) > 1:
                raise StateError(f"the state can be read in {len(found)} ways or more: its memory must be known")
            if found:
                return Found(each, found[0])
            searches.append(search)
        best = max(searches, key=lambda search: _reach(search.furthest))
        reach, why = _reach(best.furthest), best.failure()
    raise StateError(f"state: expected sections of a known shape up to the end, found {why}", offset=reach)


def _reach(error: StateError | None) -> int:
    return -1 if error is None or error.offset is None else error.offset


class _TooManyWays(Exception):
    """Ends the search; never leaves this module."""


class _Search:
    """All ways to read the bytes as sections, in one dialect.

    Attributes
    ----------
    furthest : the error of the way that got furthest and did not fit.
    """

    def __init__(self, cursor: Cursor, dialect: Dialect, *, whole: bool) -> None:
        self._cursor = cursor
        self._dialect = dialect
        self._whole = whole
        self._read: dict[tuple[int, bool], list[Section]] = {}
        self._dead: set[tuple[int, int, bool]] = set()
        self._ends: set[int] = set()
        self._n_tries = 0
        self.furthest: StateError | None = None

    def all_that_fit(self) -> list[Sections]:
        """Return the ways to read all bytes that differ; two at most, since one more is one too many."""
        start = self._cursor.at
        found: dict[tuple[object, ...], Sections] = {}
        for has_ext in (False, True):
            for sections in self._ways(start, (), has_ext):
                found.setdefault(_identity(sections), sections)
                if len(found) > 1:
                    break
        self._cursor.at = start
        return list(found.values())

    def failure(self) -> str:
        """Say what there is instead of a state."""
        at = _reach(self.furthest)
        if at not in self._ends:
            return f"none; the best attempt: {self.furthest}"
        return f"them up to byte {at}, and behind them {self._cursor.stop - at} bytes that are none, {BEHIND}"

    def _ways(self, at: int, before: Sections, has_ext: bool) -> Iterator[Sections]:
        """Yield the ways to read what is left; remember where there are none."""
        if at == self._cursor.stop and before:
            yield before
            return
        if before:
            self._ends.add(at)
        place = (at, len(before), has_ext)
        if len(before) == MAX_SECTIONS or place in self._dead:
            return
        dead = True
        for section in self._sections_at(at, has_ext):
            for way in self._ways(at + section.span.nbytes, (*before, section), has_ext):
                dead = False
                yield way
        if dead:
            self._dead.add(place)

    def _sections_at(self, at: int, has_ext: bool) -> list[Section]:
        """Return what could be read from a byte on."""
        if (at, has_ext) not in self._read:
            self._read[at, has_ext] = [*self._kv_at(at, has_ext), *self._states_at(at)]
        return self._read[at, has_ext]

    def _kv_at(self, at: int, has_ext: bool) -> Iterator[KVSection]:
        for n_v in (None, 0):
            self._cursor.at = at
            self._count_try()
            try:
                section = read_kv(self._cursor, KVShape(has_ext, None, n_v), self._dialect, whole=self._whole)
            except StateError as error:
                self._note(error)
                continue
            yield section
            if not any(stream.v for stream in section.streams):
                return  # nothing in it depends on n_v

    def _states_at(self, at: int) -> Iterator[StatesSection]:
        """Yield states sections of one tensor, of two, and so on while there are tensors to be read."""
        cursor = self._cursor
        cursor.at = at
        rows: list[RowsRecord] = []
        try:
            cells, n_layer = read_states_head(cursor, whole=self._whole)
            while len(rows) < 2 * n_layer:
                self._count_try()
                rows.append(read_state_rows(cursor, cells.n, f"tensor {len(rows)}"))
                r, s = _halves(tuple(rows))
                yield StatesSection(cells, n_layer, r, s, Span(at, cursor.at - at))
        except StateError as error:
            self._note(error)

    def _count_try(self) -> None:
        self._n_tries += 1
        if self._n_tries > MAX_TRIES:
            raise _TooManyWays

    def _note(self, error: StateError) -> None:
        self.furthest = max(self.furthest, error, key=_reach)


def _halves(rows: tuple[RowsRecord, ...]) -> tuple[tuple[RowsRecord, ...], tuple[RowsRecord, ...]]:
    """Return the tensors of R and of S: as many of each, unless their number is odd."""
    n_r = len(rows) // 2 if len(rows) % 2 == 0 else len(rows)
    return rows[:n_r], rows[n_r:]


def _identity(sections: Sections) -> tuple[object, ...]:
    """Return what two ways to read the same bytes must share to be the same."""
    return tuple((type(section), section.span, tuple(_rows(section))) for section in sections)


def _rows(section: Section) -> Iterator[RowsRecord]:
    if isinstance(section, StatesSection):
        yield from section.r + section.s
    else:
        for stream in section.streams:
            yield from stream.k + stream.v
