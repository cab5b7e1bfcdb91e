"""States of which nothing is known: what they hold is found by their length, or it is said that it cannot be."""

from __future__ import annotations

import pytest
from support.state_bytes import F16, F32, SEQ2, SHARED, Cell, Rows, StateBytes, samples

from pykv.errors import StateError
from pykv.state_format import Dialect, KVSection, parse_state, parse_unknown


@pytest.mark.parametrize("sample", samples(), ids=lambda s: s.name)
def test_a_state_is_read_as_if_its_memory_were_known(sample):
    data = b"xx" + bytes(sample.state.data) + b"trailer"
    expected, _ = parse_state(data, 2, sample.layouts, whole=sample.whole, stop=len(data) - 7)
    found = parse_unknown(data, 2, whole=sample.whole, stop=len(data) - 7)
    assert found.dialect is Dialect.S11
    assert [type(section) for section in found.sections] == [type(section) for section in expected]
    for section, other in zip(found.sections, expected, strict=True):
        assert section.span == other.span
        if isinstance(section, KVSection):
            assert [(s.k, s.v, s.rot) for s in section.streams] == [(s.k, s.v, s.rot) for s in other.streams]
            assert [s.cells.ids.tolist() for s in section.streams] == [s.cells.ids.tolist() for s in other.streams]
        else:
            assert (section.r, section.s) == (other.r, other.s)


def test_the_older_dialect_is_found():
    state = StateBytes().kv([SHARED], [F16, F16], [F16, F16], rot=None).kv([SHARED], [F32], [F32], rot=None)
    found = parse_unknown(bytes(state.data), 0, whole=True)
    assert found.dialect is Dialect.S10
    assert len(found.sections) == 2
    with pytest.raises(StateError, match="state: expected sections of a known shape up to the end, found none"):
        parse_unknown(bytes(state.data), 0, whole=True, dialect=Dialect.S11)


def test_what_does_not_fit_is_told_with_the_best_attempt():
    state = StateBytes().kv([SEQ2], [F16] * 2, [F16] * 2)
    with pytest.raises(StateError, match="V of layer 1: 3 rows of 16: expected 48 bytes, found the end after 47"):
        parse_unknown(bytes(state.data[:-1]), 0, whole=False)
    with pytest.raises(
        StateError, match=f"found them up to byte {len(state.data)}, and behind them 4 bytes that are none"
    ):
        parse_unknown(bytes(state.data) + b"more", 0, whole=False)
    with pytest.raises(StateError, match="found none"):
        parse_unknown(b"", 0, whole=False)


def test_what_can_be_read_in_two_ways_is_not_guessed():
    """As V: a head of 12 bytes and 14 rows of 2. As a second memory: one stream of 2 cells without ids or layers."""
    state = StateBytes().kv([[Cell(0, (0,))] * 14], [Rows(1, 2)], [Rows(1, 2)])
    at, n = state.payloads[-1]
    assert n == 28
    state.data[at:] = bytes(n)
    with pytest.raises(StateError, match="can be read in 2 ways or more: its memory must be known"):
        parse_unknown(bytes(state.data), 0, whole=True)
    assert len(parse_unknown(bytes(state.data), 0, whole=False).sections) == 1  # there every cell has an id


def test_a_file_made_of_countless_ways_ends_the_search():
    """Each place can be the head of a tensor without rows, or of a section of such tensors."""
    data = b"".join(w.to_bytes(4, "little") for w in (0, 0, 64)) * 8000 + b"x"
    with pytest.raises(StateError, match="too many ways"):
        parse_unknown(data, 0, whole=True)
