"""``pykv state convert``: what it writes is what llama.cpp wrote, or what plain numpy makes of the payload."""

from __future__ import annotations

import io
import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support.state_bytes import F16, F32, SEQ2, Cell, Rows, StateBytes, samples
from support.state_values import DATA, WIDTH, f16, payloads, q8_0, sequence_file, session_file
from typer.testing import CliRunner

from pykv.cli import console
from pykv.cli.app import app
from pykv.runtime.states import convert
from pykv.state_format import Notes, SectionSum, checksum, mapped, read_side_car, read_trailer, trailer_pieces
from pykv.state_format import verify_sections as verify

FILES = sorted(path.name for path in DATA.glob("*.gg*"))


def run(*args: object):
    runner = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "120"})
    return runner.invoke(app, ["state", "convert", *map(str, args)], catch_exceptions=False)


def done(*args: object) -> dict:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def written(tmp_path: Path, state: StateBytes, name: str = "in") -> Path:
    path = tmp_path / name
    path.write_bytes(state.data)
    return path


def lossless(record: dict) -> list[str]:
    assert all(change["is_lossless"] for change in record["changes"])
    assert record["is_lossless"]
    return [change["what"] for change in record["changes"]]


@pytest.mark.parametrize("name", FILES)
def test_what_is_not_asked_for_stays(tmp_path, name):
    record = done(DATA / name, tmp_path / "out")
    assert lossless(record) == []
    assert (tmp_path / "out").read_bytes() == (DATA / name).read_bytes()


@pytest.mark.parametrize("sample", samples(), ids=lambda one: one.name)
def test_memories_of_all_kinds_stay_as_they_are(tmp_path, sample):
    head = (session_file if sample.whole else sequence_file)([7, 8])
    head.data += sample.state.data
    path = written(tmp_path, head)
    assert lossless(done(path, tmp_path / "out")) == []
    assert (tmp_path / "out").read_bytes() == head.data


@pytest.mark.parametrize("name", ["smollm2_fa_f16", "smollm2_streams2_f16", "gemma3_fa_f16"])
def test_a_sequence_of_a_session_is_what_llama_cpp_saves_of_it(tmp_path, name):
    record = done(DATA / f"{name}.ggsn", tmp_path / "out", "--to", "sequence", "--seq", 0)
    assert (tmp_path / "out").read_bytes() == (DATA / f"{name}.ggsq").read_bytes()
    assert record["is_lossless"] == ("streams" not in name)  # there, another sequence is left out


@pytest.mark.parametrize(("name", "arch"), [("smollm2_fa_f16", "llama"), ("gemma3_fa_f16", "gemma3")])
def test_a_session_of_one_sequence_is_what_llama_cpp_saves(tmp_path, name, arch):
    lossless(done(DATA / f"{name}.ggsq", tmp_path / "out", "--to", "session", "--arch", arch))
    assert (tmp_path / "out").read_bytes() == (DATA / f"{name}.ggsn").read_bytes()


def test_states_in_memory_have_heads_of_their_own(tmp_path):
    source = DATA / "smollm2_fa_f16.ggsn"
    record = done(source, tmp_path / "out", "--to", "context-state")
    assert (tmp_path / "out").read_bytes() == source.read_bytes()[12 + 4 * 7 :]
    assert [change["is_lossless"] for change in record["changes"]] == [True, False]  # tokens have no place
    done(source, tmp_path / "one", "--to", "sequence-state")
    section = (DATA / "smollm2_fa_f16.ggsq").read_bytes()[12 + 4 * 7 :]
    assert (tmp_path / "one").read_bytes() == b"\xd8\x3c\x14\xaf" + bytes(4) + section
    done(tmp_path / "one", tmp_path / "back", "--to", "sequence", "--seq", 3)
    state = (tmp_path / "back").read_bytes()
    assert state[:12] == b"qsgg" + b"\4\0\0\0" + bytes(4)
    assert state[12 + 8 + 8 : 12 + 8 + 12] == b"\3\0\0\0"  # the id of the first cell


def test_dialects_differ_by_what_is_said_of_rotations(tmp_path):
    new = sequence_file([1]).kv([SEQ2], [F16, F16], [F16, F16])
    path = written(tmp_path, new)
    assert lossless(done(path, tmp_path / "old", "--dialect", "10/3")) == ["dialect 11/4 → 10/3"]
    data = bytes(new.data)
    at = 12 + 4 + 4 + 4 + 3 * 12 + 8
    assert (tmp_path / "old").read_bytes() == data[:4] + b"\3" + data[5:at] + data[at + 8 :]
    done(tmp_path / "old", tmp_path / "new", "--dialect", "11/4")
    assert (tmp_path / "new").read_bytes() == data


def test_old_quantised_rows_need_to_be_told_their_rotation(tmp_path):
    source = DATA / "smollm2_fa_q8_0.ggsq"
    lossless(done(source, tmp_path / "old", "--dialect", "10/3"))
    lossless(done(tmp_path / "old", tmp_path / "still old", "--to", "session", "--arch", "llama"))
    result = run(tmp_path / "old", tmp_path / "out", "--dialect", "11/4")
    assert result.exit_code == 2
    assert "pass --rotation K,V" in result.stderr
    assert not (tmp_path / "out").exists()
    lossless(done(tmp_path / "old", tmp_path / "out", "--dialect", "11/4", "--rotation", "64,64"))
    assert (tmp_path / "out").read_bytes() == source.read_bytes()


def test_quantised_rows_become_numbers(tmp_path):
    source = DATA / "smollm2_fa_q8_0.ggsq"
    record = done(source, tmp_path / "out", "--type-k", "f32", "--type-v", "f32", "--v-layout", "channel")
    expected = [q8_0(raw, WIDTH, 64) for raw in payloads(source.read_bytes(), 6 * 34)]
    got = payloads((tmp_path / "out").read_bytes(), 4 * WIDTH)
    for i, (raw, values) in enumerate(zip(got, expected, strict=True)):
        found = np.frombuffer(raw, "<f4")
        found = found.reshape(-1, WIDTH) if i < 30 else found.reshape(WIDTH, -1).T
        np.testing.assert_allclose(found, values, rtol=1e-5, atol=1e-5 * np.abs(values).max())
    assert [change["what"] for change in record["changes"]] == [
        "V by cell → by channel",
        "K q8_0 → f32",
        "V q8_0 → f32",
    ]


def test_the_largest_error_is_told(tmp_path):
    source = DATA / "smollm2_fa_f16.ggsq"
    record = done(source, tmp_path / "out", "--type-k", "q8_0", "--rotation", "64,64")
    before = payloads(source.read_bytes(), 2 * WIDTH)[:30]
    data = (tmp_path / "out").read_bytes()
    assert data[12 + 28 + 8 + 84 + 8 :][:8] == b"\x40\0\0\0" + bytes(4)  # K rotated by 64, V not
    at, worst = 12 + 28 + 8 + 84 + 16, 0.0
    for raw in before:
        at += 12
        values, stored = f16(raw, WIDTH), q8_0(data[at : at + 7 * 6 * 34], WIDTH, 64)
        at += 7 * 6 * 34
        worst = max(worst, (np.abs(stored - values).max(1) / np.abs(values).max(1)).max())
    (change,) = record["changes"]
    assert change["what"] == "K f16 → q8_0"
    assert not change["is_lossless"]
    assert change["largest_error"] == pytest.approx(worst, rel=1e-3)
    assert 0 < worst < 0.02
    assert data[at:] == source.read_bytes()[-len(data[at:]) :]  # V is as it was


def test_wider_types_lose_nothing(tmp_path):
    source = DATA / "smollm2_fa_f16.ggsq"
    whats = lossless(done(source, tmp_path / "out", "--type-k", "f32", "--type-v", "f32"))
    assert whats == ["K f16 → f32", "V f16 → f32"]
    got = payloads((tmp_path / "out").read_bytes(), 4 * WIDTH)
    for raw, before in zip(got, payloads(source.read_bytes(), 2 * WIDTH), strict=True):
        assert raw == f16(before, WIDTH).tobytes()
    lossless(done(tmp_path / "out", tmp_path / "back", "--type-k", "f16", "--type-v", "f16"))
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_another_rotation(tmp_path):
    source = DATA / "smollm2_fa_q8_0.ggsq"
    record = done(source, tmp_path / "out", "--rotation", "0,64")
    assert [change["what"] for change in record["changes"]] == ["K rotated by 64 → 0"]
    got, before = (payloads(one.read_bytes(), 6 * 34) for one in (tmp_path / "out", source))
    assert got[30:] == before[30:]
    for raw, old in zip(got[:30], before[:30], strict=True):
        values = q8_0(old, WIDTH, 64)
        off = np.abs(q8_0(raw, WIDTH) - values).max(1) / np.abs(values).max(1)
        assert off.max() <= record["changes"][0]["largest_error"] * 1.001


@pytest.mark.parametrize(("name", "order", "what"), [
    ("smollm2_fa_f16", "channel", "V by cell → by channel"),
    ("smollm2_nofa_f16", "cell", "V by channel → by cell"),
])  # fmt: skip
def test_v_is_turned(tmp_path, name, order, what):
    source = DATA / f"{name}.ggsq"
    assert lossless(done(source, tmp_path / "out", "--v-layout", order)) == [what]
    before, after = (payloads(one.read_bytes(), 2 * WIDTH) for one in (source, tmp_path / "out"))
    shape = (7, WIDTH) if order == "channel" else (WIDTH, 7)
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        assert new == (old if i < 30 else np.frombuffer(old, "<u2").reshape(shape).T.tobytes())


def test_streams_of_a_sequence_become_one(tmp_path):
    record = done(DATA / "smollm2_streams2_f16.ggsq", tmp_path / "out", "--unify")
    assert lossless(record) == ["2 streams → 1"]
    assert (tmp_path / "out").read_bytes() == (DATA / "smollm2_fa_f16.ggsq").read_bytes()
    done(tmp_path / "out", tmp_path / "back", "--streams", 2)
    assert (tmp_path / "back").read_bytes() == (DATA / "smollm2_streams2_f16.ggsq").read_bytes()


def rows_of(state: StateBytes, tensor: int, row_bytes: int) -> list[bytes]:
    at, n = state.payloads[tensor]
    return [bytes(state.data[at + i : at + i + row_bytes]) for i in range(0, n, row_bytes)]


@pytest.mark.parametrize("v_trans", [False, True])
def test_streams_of_a_session_follow_one_another(tmp_path, v_trans):
    streams = [[Cell(0, (0,)), Cell(1, (0,))], [], [Cell(0, (2,)), Cell(5, (2,)), Cell(6, (2,))]]
    source = session_file([]).kv(streams, [F16], [F16], v_trans=v_trans)
    expected = session_file([]).kv([streams[0] + streams[2]], [F16], [F16], v_trans=v_trans)
    for tensor in range(2):
        a, b = (source.data[at : at + n] for at, n in (source.payloads[tensor], source.payloads[2 + tensor]))
        if tensor and v_trans:
            tables = (np.frombuffer(bytes(one), "<u2").reshape(8, -1) for one in (a, b))
            joined = np.concatenate(list(tables), axis=1).tobytes()
        else:
            joined = a + b
        at, n = expected.payloads[tensor]
        expected.data[at : at + n] = joined
    path = written(tmp_path, source)
    assert lossless(done(path, tmp_path / "out", "--unify")) == ["3 streams → 1"]
    assert (tmp_path / "out").read_bytes() == expected.data
    done(tmp_path / "out", tmp_path / "back", "--streams", 3)
    assert (tmp_path / "back").read_bytes() == source.data


def test_shared_cells_are_copied_into_streams(tmp_path):
    cells = [Cell(0, (0, 1)), Cell(9, ()), Cell(1, (1,)), Cell(1, (0,))]
    source = session_file([]).kv([cells], [F16], [])
    rows = rows_of(source, 0, 16)
    expected = session_file([]).kv([[Cell(0, (0,)), Cell(1, (0,))], [Cell(0, (1,)), Cell(1, (1,))]], [F16], [])
    for i, picked in enumerate(((0, 3), (0, 2))):
        at, n = expected.payloads[i]
        expected.data[at : at + n] = b"".join(rows[j] for j in picked)
    record = done(written(tmp_path, source), tmp_path / "out", "--streams", 2)
    assert (tmp_path / "out").read_bytes() == expected.data
    assert [(one["what"], one["is_lossless"]) for one in record["changes"]] == [
        ("1 stream → 2", True),
        ("1 cell of no sequence left out", False),
    ]


def test_one_sequence_out_of_all_kinds_of_sections(tmp_path):
    cells = [Cell(0, (0, 2), (1, 2, 3)), Cell(1, (0,), (4, 5, 6)), Cell(7, (2,), (7, 8, 9))]
    owned = [Cell(3, (0,)), Cell(7, (1, 2))]
    source = session_file([5]).kv([cells], [F16, F32], [F16, F32]).states(owned, 4, [F32], [F32])
    own = [Cell(0, (2,), (1, 2, 3)), Cell(7, (2,), (7, 8, 9))]
    expected = sequence_file([5]).kv([own], [F16, F32], [F16, F32]).states([Cell(7, ())], 4, [F32], [F32])
    for tensor, rows in enumerate((F16, F32, F16, F32, F32, F32)):
        picked = (0, 2) if tensor < 4 else (1,)
        at, n = expected.payloads[tensor]
        found = rows_of(source, tensor, rows.row_bytes)
        expected.data[at : at + n] = b"".join(found[i] for i in picked)
    record = done(written(tmp_path, source), tmp_path / "out", "--to", "sequence", "--seq", 2)
    assert (tmp_path / "out").read_bytes() == expected.data
    assert [one["what"] for one in record["changes"]][1] == "sequence 2 taken; left out: sequences 0, 1"
    # and back: alone, it is as it was
    done(tmp_path / "out", tmp_path / "back", "--to", "session", "--arch", "llama")
    done(tmp_path / "back", tmp_path / "again", "--to", "sequence")
    assert (tmp_path / "again").read_bytes() == expected.data


def noted(state: StateBytes, attachments: dict[str, bytes] | None = None) -> list:
    sums = (SectionSum(0, len(state.data), checksum(state.data)),)
    notes = Notes("fingerprint", {"freq_base": 1e4}, {"k": "f16", "v": "f16"}, sums, {"text": "hello"})
    return trailer_pieces(notes, attachments)


def check_notes(notes: Notes, k: str = "f16") -> None:
    assert (notes.model, notes.rope, notes.extra) == ("fingerprint", {"freq_base": 1e4}, {"text": "hello"})
    assert notes.types == {"k": k, "v": "f16"}
    assert len(notes.sections) == 2  # the head, and what the cache wrote


def test_notes_go_along_and_their_checksums_are_made_anew(tmp_path):
    state = sequence_file([1]).kv([SEQ2], [F16], [F16])
    for at, n in state.payloads:  # numbers, of which every type knows
        state.data[at : at + n] = np.linspace(-1, 1, n // 2).astype("<f2").tobytes()
    path = tmp_path / "in"
    path.write_bytes(bytes(state.data) + b"".join(map(bytes, noted(state, {"window": b"abc"}))))
    record = done(path, tmp_path / "out", "--dialect", "10/3", "--type-k", "f32")
    assert record["has_notes"]
    data = (tmp_path / "out").read_bytes()
    trailer = read_trailer(data)
    check_notes(trailer.notes, "f32")
    verify(data, trailer.notes)
    # a head of magic, version, count and one token, then the section
    assert [(one.start, one.nbytes) for one in trailer.notes.sections] == [(0, 16), (16, trailer.span.start - 16)]
    at, n = trailer.attachments["window"]
    assert data[at : at + n] == b"abc"

    done(path, tmp_path / "session", "--to", "session", "--arch", "llama")
    beside = tmp_path / "session.pykv"
    trailer = read_side_car(beside.read_bytes())
    check_notes(trailer.notes)
    verify((tmp_path / "session").read_bytes(), trailer.notes)
    assert list(trailer.attachments) == ["window"]

    # once more over it: the notes on the session that was there are kept, until the new one is
    done(tmp_path / "session", tmp_path / "session", "--dialect", "10/3")
    trailer = read_side_car(beside.read_bytes())
    verify((tmp_path / "session").read_bytes(), trailer.notes)
    assert list(trailer.attachments) == ["window", "previous"]

    record = done(tmp_path / "session", tmp_path / "bytes", "--to", "context-state")
    assert not record["has_notes"]
    assert "notes left out: a context state has no place for them" in [one["what"] for one in record["changes"]]


def test_notes_of_a_session_that_is_gone_were_left_beside_the_new_one(tmp_path):
    state = session_file([]).kv([SEQ2], [F16], [F16])
    out = written(tmp_path, state, "out")
    (tmp_path / "out.pykv").write_bytes(b"".join(map(bytes, noted(state))))
    done(DATA / "smollm2_fa_f16.ggsn", out)
    assert out.read_bytes() == (DATA / "smollm2_fa_f16.ggsn").read_bytes()
    assert not (tmp_path / "out.pykv").exists()


def test_a_file_beside_that_is_nothing_of_ours_stays(tmp_path):
    (tmp_path / "out.pykv").write_text("mine")
    done(DATA / "smollm2_fa_f16.ggsn", tmp_path / "out")
    assert (tmp_path / "out.pykv").read_text() == "mine"


@pytest.mark.parametrize(("name", "options", "said"), [
    ("smollm2_streams2_f16.ggsn", "--to sequence", "ggsn: --seq: a sequence file holds one sequence, say which"),
    ("smollm2_streams2_f16.ggsn", "--to sequence --seq 5", "--seq 5: no such sequence; it holds 0, 1"),
    ("smollm2_streams2_f16.ggsn", "--seq 0", "--seq 0: a session file holds all sequences; one of them needs --to s"),
    ("smollm2_fa_f16.ggsq", "--to session", "--arch: a session file names the model's architecture"),
    ("smollm2_fa_f16.ggsq", "--type-k q8_0", "pass --rotation K,V"),
    ("smollm2_fa_f16.ggsq", "--type-k q8_0 --rotation 128,64", "must be 0 or a power of two that divides the 192"),
    ("smollm2_fa_f16.ggsq", "--type-k q8_0 --rotation 3,0", "must be two numbers, each 0 or a power of two"),
    ("smollm2_fa_f16.ggsq", "--rotation 64", "expected two numbers with a comma between them"),
    ("smollm2_fa_f16.ggsq", "--type-k q9", "--type-k q9 is no type that K and V are stored in; take one"),
    ("smollm2_fa_f16.ggsq", "--type-v q4_k --rotation 0,0", "q4_k is no type that K and V are stored in; take one"),
    ("smollm2_fa_q8_0.ggsq", "--v-layout channel", "--v-layout channel: q8_0 is stored in blocks"),
    ("smollm2_fa_f16.ggsq", "--v-layout columns", "--v-layout columns must be one of cell, channel"),
    ("smollm2_fa_f16.ggsq", "--dialect 12/5", "--dialect 12/5 must be one of 10/3, 11/4"),
    ("smollm2_fa_f16.ggsq", "--to nothing", "--to nothing must be one of session, sequence"),
    ("smollm2_fa_f16.ggsq", "--seq 256", "--seq 256 must be a whole number in 0..255"),
    ("smollm2_fa_f16.ggsq", "--streams 0", "--streams 0 must be a whole number in 1..256"),
    ("smollm2_fa_f16.ggsq", "--streams 2 --unify", "--streams 2: --unify means 1"),
    ("smollm2_fa_f16.ggsq", "--streams 2 --seq 2 --to session --arch llama", "sequence 2 needs a stream of its own"),
    ("smollm2_streams2_f16.ggsn", "--streams 1 --type-v q8_0", "pass --rotation K,V"),
    ("smollm2_fa_f16.ggsq", "--rotation 64,64", "--rotation 64,64: only quantised rows are rotated, and no row is"),
    ("smollm2_fa_f16.ggsq", "--rotation 0,0", "--rotation 0,0: only quantised rows are rotated, and no row is"),
    ("smollm2_fa_f16.ggsn", "--arch nonsense", "--arch nonsense is no architecture that pykv builds; they are bloom, "),
    ("smollm2_fa_f16.ggsn", "--arch lama", "did you mean llama?"),
    ("smollm2_fa_f16.ggsq", "--arch llama", "ggsq: --arch llama: a sequence file names no architecture; leave it out"),
    ("smollm2_fa_f16.ggsq", "--type-k bananas", "take one of f32, f16, q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, bf16"),
])  # fmt: skip
def test_what_cannot_be_is_refused_and_nothing_written(tmp_path, name, options, said):
    out = tmp_path / "out"
    out.write_text("old")
    result = run(DATA / name, out, *options.split())
    assert result.exit_code == 2
    assert result.stderr.startswith("pykv: error: ")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert out.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_rows_that_are_no_whole_blocks_were_a_fault_inside(tmp_path):
    path = written(tmp_path, sequence_file([]).kv([SEQ2], [F16], [F16]))
    result = run(path, tmp_path / "out", "--type-k", "q8_0", "--rotation", "0,0")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "--type-k q8_0: rows of 8 elements are no whole blocks of 32" in result.stderr


def test_streams_with_unlike_tensors_cannot_be_one(tmp_path):
    source = session_file([])
    one, other = ([Cell(0, (s,))] for s in range(2))
    source.length(2)
    for cells, rows in ((one, F16), (other, Rows(1, 32, 2))):
        part = StateBytes().kv([cells], [rows], [rows])
        source.data += part.data[4:]
    result = run(written(tmp_path, source), tmp_path / "out", "--unify")
    assert result.exit_code == 1
    assert "streams of one section with unlike tensors" in result.stderr


def test_damaged_and_missing_files_leave_the_target_alone(tmp_path):
    data = (DATA / "smollm2_fa_f16.ggsq").read_bytes()
    (tmp_path / "cut").write_bytes(data[:-1])
    state = sequence_file([1]).kv([SEQ2], [F16], [F16])
    trailer = b"".join(map(bytes, noted(state)))
    state.data[-1] ^= 1
    (tmp_path / "bad sum").write_bytes(bytes(state.data) + trailer)
    out = tmp_path / "out"
    out.write_text("old")
    for name in ("cut", "bad sum", "missing", "."):
        result = run(tmp_path / name, out)
        assert result.exit_code == 1
        assert result.stderr.startswith("pykv: error: ")
        assert "Traceback" not in result.stderr
        assert out.read_text() == "old"


def test_a_target_that_cannot_be_written_is_one_line(tmp_path):
    result = run(DATA / "smollm2_fa_f16.ggsq", tmp_path / "no" / "out")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert "No such file or directory" in result.stderr


def test_text_says_what_is_lossy(tmp_path):
    result = run(DATA / "smollm2_streams2_f16.ggsn", tmp_path / "out", "--to", "sequence", "--seq", 1, "--unify")
    assert result.exit_code == 0
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert "lossless session file → sequence file" in lines
    assert "lossy    sequence 1 taken; left out: sequence 0" in lines
    assert "lossless 2 streams → 1" in lines
    assert "\x1b" not in result.stdout
    result = run(DATA / "smollm2_fa_f16.ggsq", tmp_path / "out", "--type-k", "q4_0", "--rotation", "64,64")
    assert "lossy    K f16 → q4_0; largest error 0." in result.stdout
    assert run(DATA / "smollm2_fa_f16.ggsq", tmp_path / "out").stdout.startswith("  nothing is changed")


@pytest.mark.parametrize("options", [{"v_layout": "channel"}, {"type_k": "f32", "type_v": "f32", "seq_id": 3}])
def test_large_states_pass_in_small_pieces(tmp_path, options):
    """120 MB, of which most is a hole in the file."""
    cells = [Cell(p, (0,)) for p in range(2048)]
    wide = Rows(1, 2 * 8192, 2)
    small = StateBytes().kv([cells], [], [])
    path, n_layer = tmp_path / "large", 2
    with path.open("wb") as file:
        head = sequence_file([]).data + small.data
        head[-12:-8] = n_layer.to_bytes(4, "little")  # before the rotations
        file.write(head)
        for _ in range(2 * n_layer):
            file.write(b"\1\0\0\0" + wide.row_bytes.to_bytes(8, "little"))
            file.seek(wide.row_bytes * len(cells), 1)
        file.truncate(file.tell())
    told = []
    tracemalloc.start()
    try:
        result = convert(path, tmp_path / "out", **options, on_progress=lambda *two: told.append(two))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.is_lossless
    assert peak < 2**26
    assert told == sorted(told)
    assert told[-1] == (result.nbytes, result.nbytes)
    with mapped(tmp_path / "out") as data:
        assert len(data) == result.nbytes


def test_a_bar_shows_how_far_a_long_conversion_is(tmp_path, monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(console, "notes", lambda: Console(file=shown, force_terminal=True, width=60))
    monkeypatch.setattr(console, "PATIENCE", -1)
    arguments = DATA / "smollm2_fa_f16.ggsq", tmp_path / "out"
    assert run(*arguments).exit_code == 0
    assert "convert" in shown.getvalue()
    assert "100%" in shown.getvalue()
    shown.truncate(0)
    done(*arguments)  # as JSON
    monkeypatch.setattr(console, "PATIENCE", 60)
    assert run(*arguments).exit_code == 0
    assert not shown.getvalue().strip("\0")


@pytest.mark.parametrize("target", [".", "in/out", "pipe", "no/out"])
def test_notes_were_left_beside_a_target_that_cannot_be_written(tmp_path, target):
    state = session_file([1]).kv([SEQ2], [F16], [F16])
    path = written(tmp_path, state)
    (tmp_path / "in.pykv").write_bytes(b"".join(map(bytes, noted(state))))
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir()), sorted(tmp_path.parent.iterdir())
    result = run(path, tmp_path / target)
    assert result.exit_code == 1
    assert "Traceback" not in result.stderr
    assert (sorted(tmp_path.iterdir()), sorted(tmp_path.parent.iterdir())) == before


@pytest.mark.parametrize("n_calls", [1, 3])
def test_ctrl_c_leaves_nothing_behind(tmp_path, n_calls):
    state = session_file([1]).kv([SEQ2], [F16], [F16])
    path = written(tmp_path, state)
    (tmp_path / "in.pykv").write_bytes(b"".join(map(bytes, noted(state))))
    before = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    calls = []

    def stop(n_done: int, n_all: int) -> None:
        calls.append(n_done)
        if len(calls) == n_calls:
            raise KeyboardInterrupt

    for target in (tmp_path / "out", path):
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            convert(path, target, type_k="f32", on_progress=stop)
        assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == before


def test_a_target_where_notes_lie_would_replace_them(tmp_path):
    """A session's notes are no target, nor is a session whose own notes would lie where the source is."""
    state = session_file([1]).kv([SEQ2], [F16], [F16])
    path = written(tmp_path, state)
    beside = tmp_path / "in.pykv"
    beside.write_bytes(b"".join(map(bytes, noted(state))))
    before = beside.read_bytes()
    result = run(path, beside)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert f"{beside}: holds the notes on a session" in result.stderr
    assert beside.read_bytes() == before
    source = tmp_path / "a.pykv"
    source.write_bytes(state.data)
    (tmp_path / "a.pykv.pykv").write_bytes(before)
    result = run(source, tmp_path / "a")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert source.read_bytes() == state.data
    (tmp_path / "mine.pykv").write_text("mine")
    result = run(path, tmp_path / "mine")
    assert (result.exit_code, (tmp_path / "mine.pykv").read_text()) == (2, "mine")


def test_layers_whose_v_is_stored_in_blocks_were_laid_out_by_channel(tmp_path):
    path = written(tmp_path, sequence_file([]).kv([SEQ2], [F16, F16], [F16, Rows(8, 34)]))
    result = run(path, tmp_path / "out", "--v-layout", "channel")
    assert result.exit_code == 2
    assert "--v-layout channel: q8_0 is stored in blocks" in result.stderr
