"""What can still be read of states that are cut off or damaged, held against what a plain writer put there."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
from support.state_bytes import F16, OWNED, Q8, SEQ2, SHARED, STREAM1, Cell, Rows, Sample, StateBytes, samples
from support.state_io import rows_of
from support.state_values import sequence_file, session_file

from pykv.errors import StateError
from pykv.state_format import Dialect, Kind, read_container
from pykv.state_format.salvage import Salvaged, salvage_container, salvage_sections

WIDE = Rows(1, 4096, 2)
EACH = pytest.mark.parametrize("sample", samples(), ids=lambda sample: sample.name)
DIALECT = pytest.mark.parametrize("dialect", [Dialect.S11, None], ids=["told", "found"])


def salvaged(state: StateBytes | bytes | bytearray, *, whole: bool = False, dialect: Any = Dialect.S11) -> Salvaged:
    data = bytes(state.data if isinstance(state, StateBytes) else state)
    found = salvage_sections(data, 0, whole=whole, dialect=dialect)
    check(found, len(data))
    return found


def check(found: Salvaged, nbytes: int) -> None:
    """Check that all that was found lies in the data, one after the other."""
    at = 0
    for section in found.sections:
        assert section.span.start >= at
        for rows in rows_of(section):
            assert rows.span.start >= at
            at = rows.span.start + rows.span.nbytes
    assert at <= nbytes
    assert found.fault.offset is None or 0 <= found.fault.offset <= nbytes


def payloads(found: Salvaged) -> list[tuple[int, int]]:
    return [tuple(rows.span) for section in found.sections for rows in rows_of(section)]


def whole_ones(sample: Sample, n: int) -> list[tuple[int, int]]:
    """Return the rows of which the first n bytes of a state hold all."""
    return [(at, nbytes) for at, nbytes in sample.state.payloads if at + nbytes <= n]


@EACH
@DIALECT
def test_every_tensor_before_a_cut_is_found_wherever_the_cut_is(sample: Sample, dialect: Any) -> None:
    """Of states with streams or places in a picture, nothing was: a list of cells that are none got further."""
    for n in range(0, len(sample.state.data), 1 if dialect else 3):
        found = salvaged(sample.state.data[:n], whole=sample.whole, dialect=dialect)
        assert payloads(found) == whole_ones(sample, n), f"{n} bytes are left: {found}"


@EACH
def test_more_bytes_than_a_state_has_are_a_fault_behind_all_of_it(sample: Sample) -> None:
    nbytes = len(sample.state.data)
    found = salvaged(bytes(sample.state.data) + b"\xff" * 7, whole=sample.whole)
    assert payloads(found) == sample.state.payloads
    assert found.fault.offset is not None
    assert found.fault.offset >= nbytes


@EACH
def test_every_tensor_before_a_type_that_is_none_is_found(sample: Sample) -> None:
    for i, (at, _) in enumerate(sample.state.payloads):
        data = bytearray(sample.state.data)
        data[at - 12 : at - 8] = b"\xff" * 4
        assert payloads(salvaged(data, whole=sample.whole)) == sample.state.payloads[:i]


THREE = StateBytes().kv([SEQ2], [F16] * 3, [F16] * 3)
META, HEAD = 4 + 4 + 3 * 12, 16
ROWS = 12 + 3 * 16


@pytest.mark.parametrize(("n", "missing"), [
    (META, "all tensors of stream 0"),
    (META + HEAD, "all tensors of stream 0"),
    (META + HEAD + 35, "all tensors of stream 0"),
    (META + HEAD + 72, "K of layers 1 to 2, V of layers 0 to 2"),
    (META + HEAD + 2 * ROWS - 1, "K of layers 1 to 2, V of layers 0 to 2"),
    (META + HEAD + 3 * ROWS - 1, "K of layer 2, V of layers 0 to 2"),
    (META + HEAD + 3 * ROWS, "V of layers 0 to 2"),
    (META + HEAD + 6 * ROWS - 1, "V of layer 2"),
])  # fmt: skip
def test_what_is_missing_is_told_by_layer(n: int, missing: str) -> None:
    found = salvaged(THREE.data[:n])
    assert found.missing == missing
    (section,) = found.sections
    assert section.streams[0].cells.pos.tolist() == [5, 6, 7]


def test_streams_that_are_missing_are_counted() -> None:
    state = StateBytes().kv([SHARED[:1], STREAM1, [], []], [Q8], [Q8])
    (first, _), (second, _) = state.payloads[1:3]
    assert salvaged(state.data[:first], whole=True).missing == "V of layer 0, 3 of 4 streams"
    assert salvaged(state.data[: second + 5], whole=True).missing == "all tensors of stream 1, 2 of 4 streams"
    assert salvaged(state.data[: second + 12], whole=True).missing == "K of layer 0, V of layer 0, 2 of 4 streams"
    assert salvaged(state.data[:-4], whole=True).missing == "1 of 4 streams"


def test_the_rest_of_a_state_section_is_not_taken_apart() -> None:
    """Which tensors are R and which S, only a whole section tells: they come in one row."""
    state = StateBytes().states(OWNED, 2, [Rows(0, 24, 4)] * 2, [Rows(0, 24, 4)] * 2)
    (section,) = salvaged(state.data[:-1], whole=True).sections
    assert section.cells.pos.tolist() == [3, 5]
    assert (len(section.r), len(section.s)) == (3, 0)


def test_an_older_dialect_is_found() -> None:
    state = StateBytes().kv([SEQ2], [WIDE], [WIDE], rot=None)
    found = salvaged(state.data[:-1], dialect=None)
    assert found.dialect is Dialect.S10
    assert payloads(found) == state.payloads[:1]


# heads


def cut(data: bytes) -> Any:
    with pytest.raises(StateError) as caught:
        read_container(data)
    return salvage_container(data, caught.value)


TOKENS = [5, 2**31 - 1, -1]


@pytest.mark.parametrize(("head", "kind", "versions"), [
    (sequence_file(TOKENS), Kind.SEQUENCE_FILE, {4: Dialect.S11, 3: Dialect.S10}),
    (session_file(TOKENS), Kind.SESSION_FILE, {11: Dialect.S11, 10: Dialect.S10}),
], ids=["sequence", "session"])  # fmt: skip
def test_of_a_head_all_whole_tokens_are_found(head: StateBytes, kind: Kind, versions: dict[int, Dialect]) -> None:
    for version, dialect in versions.items():
        data = bytearray(head.data)
        struct.pack_into("<I", data, 4, version)
        for n in range(4, len(data) - 1 if kind is Kind.SESSION_FILE else 24):
            found = cut(bytes(data[:n]))
            assert (found.kind, found.arch) == (kind, None)
            assert found.dialect is (dialect if n >= 8 else None)
            assert found.tokens.tolist() == TOKENS[: max(0, (n - 12) // 4)]
            assert tuple(found.state) == (n, 0)


def test_of_a_sequence_in_memory_the_kind_is_told() -> None:
    found = cut(bytes.fromhex("d83c14af") + b"\0")
    assert (found.kind, found.tokens, found.seq_id) == (Kind.SEQUENCE_BYTES, None, None)


@pytest.mark.parametrize(
    "data", [b"", b"qsg", b"GGUF" + bytes(40), b"qsgg\5\0\0\0" + bytes(40), b"nsgg" + b"\xff" * 8], ids=repr
)
def test_what_is_no_head_keeps_its_first_fault(data: bytes) -> None:
    with pytest.raises(StateError) as first:
        read_container(data)
    with pytest.raises(StateError) as second:
        salvage_container(data, first.value)
    assert second.value is first.value


# anything


def test_damaged_states_give_what_lies_in_them() -> None:
    rng = random.Random(12)
    for _ in range(600):
        sample = rng.choice(samples())
        data = bytearray(sample.state.data[: rng.randrange(1, len(sample.state.data) + 1)])
        for _ in range(rng.choice([1, 1, 2, 4])):
            data[rng.randrange(len(data))] = rng.choice([0, 1, 2, 127, 128, 255])
        salvaged(data, whole=sample.whole, dialect=rng.choice([Dialect.S11, None]))


@pytest.mark.parametrize("whole", [True, False])
def test_noise_and_what_can_be_read_in_many_ways_ends(whole: bool) -> None:
    rng = random.Random(13)
    for _ in range(300):
        salvaged(bytes(rng.choices([0, 0, 0, 1, 2, 255], k=rng.randrange(300))), whole=whole, dialect=None)
    for unit in (bytes(12), b"\1\0\0\0" + bytes(4), bytes(StateBytes().kv([[Cell(0, (0,))]], [F16], [F16]).data)):
        salvaged(unit * 2000, whole=whole, dialect=None)


def test_a_length_that_lies_takes_no_memory() -> None:
    data = bytearray(THREE.data)
    for at in (0, 4, META + 4, META + HEAD + 4):
        damaged = data.copy()
        struct.pack_into("<I", damaged, at, 2**32 - 1)
        assert payloads(salvaged(damaged)) == []
