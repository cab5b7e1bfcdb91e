"""Notes behind a state: found from the end, whole or refused."""

from __future__ import annotations

import json
import mmap
import struct
import tracemalloc

import numpy as np
import pytest
import xxhash

from pykv.errors import StateError
from pykv.state_format import (
    Checksum,
    Notes,
    SectionSum,
    checksum,
    read_side_car,
    read_trailer,
    trailer_pieces,
    verify_sections,
)

STATE = bytes(range(200))
SUMS = (SectionSum(0, 120, checksum(STATE[:120])), SectionSum(120, 80, checksum(STATE[120:])))
NOTES = Notes(
    "llama 135M, b1946ac9",
    {"base": 10000.0, "kind": "norm"},
    {"k": "q8_0", "v": ["f16", None]},
    SUMS,
    {"text": "Grüße \u2028", "sampler": {"seed": 2**63, "last": [1, 2, -3]}},
)
ATTACHED = {"window": b"w" * 1000, "states": np.arange(12, dtype=np.float32).reshape(3, 4), "none": b""}


def whole(notes: Notes = NOTES, attachments=ATTACHED, before: bytes = STATE) -> bytes:
    return before + b"".join(bytes(piece) for piece in trailer_pieces(notes, attachments))


def forged(change, attachments: bytes = b"") -> bytes:
    """Return a trailer whose checksum is right and whose notes are not what pykv writes."""
    said = {"model": None, "rope": {}, "types": {}, "sections": [], "extra": {}, "attachments": []}
    text = change(said) if callable(change) else change
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    summed = attachments + text + struct.pack("<IQQ", 1, len(text), len(attachments) + len(text) + 44)
    return summed + xxhash.xxh3_128(summed).digest() + b"pykvnote"


def test_what_is_written_is_what_is_read():
    data = whole()
    trailer = read_trailer(data)
    assert trailer.notes == NOTES
    assert trailer.span == (len(STATE), len(data) - len(STATE))
    found = {name: data[at : at + n] for name, (at, n) in trailer.attachments.items()}
    assert found == {"window": b"w" * 1000, "states": np.arange(12, dtype="<f4").tobytes(), "none": b""}
    assert list(found) == list(ATTACHED)
    verify_sections(data, trailer.notes, stop=trailer.span.start)


def test_the_parts_lie_where_the_format_says():
    data = whole(Notes(), {"a": b"xyz"}, before=b"")
    version, n_notes, n_all = struct.unpack_from("<IQQ", data, len(data) - 44)
    assert (version, n_all) == (1, len(data))
    assert data[:3] == b"xyz"
    assert json.loads(data[3 : 3 + n_notes])["attachments"] == [{"name": "a", "nbytes": 3}]
    assert data[-24:-8] == xxhash.xxh3_128(data[:-24]).digest()
    assert data[-8:] == b"pykvnote"


def test_no_trailer_is_no_fault_and_what_follows_one_is_not_looked_at():
    assert read_trailer(STATE) is None
    assert read_trailer(b"") is None
    assert read_trailer(whole() + b"more") is None
    assert read_trailer(whole() + b"more", stop=len(whole())).notes == NOTES
    assert read_trailer(forged({"not": "looked at"})[-43:]) is None


def test_a_side_car_is_a_trailer_and_nothing_else():
    assert read_side_car(whole(before=b"")).notes == NOTES
    with pytest.raises(StateError, match="side-car: expected nothing before the trailer, found 200 bytes"):
        read_side_car(whole())
    with pytest.raises(StateError, match="side-car: expected b'pykvnote' at its end, found something else"):
        read_side_car(whole()[:-1])


def test_every_changed_bit_of_a_trailer_is_noticed():
    """In the magic it makes the trailer none, so that the state does not end where it should."""
    data = whole(attachments={"a": b"xy"}, before=b"state")
    start = read_trailer(data).span.start
    for at in range(start, len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        if at >= len(data) - 8:
            assert read_trailer(damaged) is None
        else:
            with pytest.raises(StateError):
                read_trailer(damaged)


def test_a_trailer_whose_beginning_is_cut_off_is_refused():
    data = whole(before=b"")
    for n in range(1, len(data) - 43):
        with pytest.raises(StateError):
            read_trailer(data[n:])


@pytest.mark.parametrize("value", [0, 1, 2**31, 2**63, 2**64 - 1])
@pytest.mark.parametrize("back", [40, 32], ids=["notes", "all"])
def test_lengths_are_held_against_the_bytes_that_are_there(value, back):
    data = bytearray(whole())
    struct.pack_into("<Q", data, len(data) - back, value)
    with pytest.raises(StateError):
        read_trailer(data)


def test_another_version_is_told():
    data = bytearray(whole())
    struct.pack_into("<I", data, len(data) - 44, 2)
    with pytest.raises(StateError, match=f"trailer: version: expected 1, found 2, at byte {len(data) - 44}"):
        read_trailer(data)


HOSTILE = {
    "no JSON": (b"{", "not JSON"),
    "not ASCII": ('{"a":"ü"}'.encode(), "not JSON"),
    "nested": (b"[" * 100_000, "not JSON"),
    "digits": (b'{"a":' + b"9" * 10_000 + b"}", "not JSON"),
    "NaN": (b'{"model":NaN}', "NaN is no number"),
    "list": ([], "notes: expected dict, found list"),
    "empty": ({}, "rope: expected dict, found NoneType"),
    "model": (lambda said: {**said, "model": 5}, "model: expected str or NoneType, found int"),
    "sections": (lambda said: {**said, "sections": {}}, "sections: expected list, found dict"),
    "section": (lambda said: {**said, "sections": [1]}, "section: expected dict, found int"),
    "negative": (
        lambda said: {**said, "sections": [{"start": -1, "nbytes": 1, "checksum": ""}]},
        r"start of a section: expected 0 to 2\^63 - 1, found -1",
    ),
    "huge": (
        lambda said: {**said, "sections": [{"start": 2**64, "nbytes": 1, "checksum": ""}]},
        "start of a section: expected 0 to",
    ),
    "a bool": (
        lambda said: {**said, "sections": [{"start": True, "nbytes": 1, "checksum": ""}]},
        "start of a section: expected int, found bool",
    ),
    "overlap": (
        lambda said: {**said, "sections": [{"start": at, "nbytes": 9, "checksum": ""} for at in (0, 9, 17)]},
        "start of a section: expected 18 or more, the end of the one before, found 17",
    ),
    "no checksum": (lambda said: {**said, "sections": [{"start": 0, "nbytes": 1}]}, "expected str, found NoneType"),
    "attachment": (
        lambda said: {**said, "attachments": [{"name": "a", "nbytes": 4}]},
        "attachments: expected 3, found 4",
    ),
    "no attachment": (lambda said: said, "bytes of attachments: expected 3, found 0"),
    "twice": (
        lambda said: {**said, "attachments": [{"name": "a", "nbytes": 1}, {"name": "a", "nbytes": 2}]},
        "name of an attachment: expected one of its own, found 'a'",
    ),
}


@pytest.mark.parametrize(("change", "message"), HOSTILE.values(), ids=HOSTILE)
def test_notes_that_are_forged_are_refused(change, message):
    with pytest.raises(StateError, match=message):
        read_trailer(STATE + forged(change, b"xyz"))


def test_a_section_that_changed_is_told():
    verify_sections(STATE, NOTES)
    damaged = bytearray(STATE)
    damaged[130] ^= 4
    with pytest.raises(
        StateError, match=r"bytes 120 to 199: checksum: expected [0-9a-f]{32}, found .*, at byte 120"
    ) as caught:
        verify_sections(damaged, NOTES)
    assert caught.value.offset == 120
    with pytest.raises(StateError, match="bytes 120 to 199: expected up to byte 200, found 150 bytes"):
        verify_sections(STATE, NOTES, stop=150)
    with pytest.raises(StateError, match=r"bytes [0-9]+ to [0-9]+: expected up to byte"):
        verify_sections(STATE, Notes(sections=(SectionSum(2**62, 2**62, ""),)))


def test_notes_that_are_no_json_are_not_written():
    with pytest.raises(StateError, match="notes that cannot be saved"):
        trailer_pieces(Notes(extra={"x": float("nan")}))
    with pytest.raises(StateError, match="notes that cannot be saved"):
        trailer_pieces(Notes(extra={"x": b"bytes"}))


def test_checksums_do_not_depend_on_the_pieces():
    data = np.random.default_rng(1).bytes(9_000_001)
    total = Checksum()
    for at in range(0, len(data), 1_000_003):
        total.add(data[at : at + 1_000_003])
    assert total.hex() == checksum(data) == xxhash.xxh3_128_hexdigest(data)
    assert checksum(np.arange(6, dtype="<i4").reshape(2, 3)) == xxhash.xxh3_128_hexdigest(np.arange(6, dtype="<i4"))


def test_a_mapped_file_can_be_closed_after_an_error(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(whole()[1:-30] + bytes(22) + b"pykvnote")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with pytest.raises(StateError):
        read_trailer(mapped)
    with pytest.raises(StateError):
        verify_sections(mapped, NOTES)
    mapped.close()


def test_large_attachments_are_not_copied_to_be_found_or_written(tmp_path):
    """They are counted and summed where they lie, in a mapped file or in the caller's memory."""
    path, large = tmp_path / "state", np.full(2**23, 7, np.uint8)
    tracemalloc.start()
    try:
        pieces = trailer_pieces(NOTES, {"checkpoint": large})
        with path.open("wb") as file:
            file.writelines(pieces)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            start, nbytes = read_trailer(mapped).attachments["checkpoint"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (start, nbytes) == (0, large.nbytes)
    assert peak < 2**20
