"""``pykv state inspect`` tells what is in a saved state, and of a damaged one that it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.state_bytes import EXT, F16, F32, NO_ID, OWNED, Q8, SEQ2, SHARED, STREAM1, StateBytes
from support.state_values import DATA, sequence_file, session_file
from typer.testing import CliRunner

from pykv.cli.app import app
from pykv.state_format import Notes, SectionSum, checksum, trailer_pieces

MANIFEST = json.loads((DATA / "manifest.json").read_text())
FILES = sorted(path.name for path in DATA.glob("*.gg*"))


def run(*args: object):
    runner = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "120"})
    return runner.invoke(app, ["state", "inspect", *map(str, args)], catch_exceptions=False)


def told(path: object) -> dict:
    result = run(path, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def written(tmp_path: Path, *pieces: StateBytes | bytes) -> Path:
    path = tmp_path / "state"
    path.write_bytes(b"".join(bytes(one.data) if isinstance(one, StateBytes) else bytes(one) for one in pieces))
    return path


def noted(state: StateBytes, **attachments: bytes) -> bytes:
    sums = (SectionSum(0, len(state.data), checksum(state.data)),)
    notes = Notes("abcdef", {"freq_base": 1e4, "freq_scale": None}, {"k": "f16"}, sums, {"text": "hello", "seed": 1})
    return b"".join(map(bytes, trailer_pieces(notes, attachments)))


@pytest.mark.parametrize("name", FILES)
def test_files_of_llama_cpp(name):
    said, record = MANIFEST[Path(name).stem], told(DATA / name)
    is_session, is_gemma = name.endswith("sn"), name.startswith("gemma")
    kind = "session" if is_session else "sequence"
    n_tokens = len(said["tokens"])
    assert record["kind"] == f"{kind} file"
    assert record["dialect"] == "11/4"
    assert record["architecture"] == (("gemma3" if is_gemma else "llama") if is_session else None)
    assert record["tokens"] == said["tokens"]
    assert record["nbytes"] == said[f"{kind}_bytes"] == os.stat(DATA / name).st_size
    assert record["checksums"] == {"n_noted": 0, "is_verified": False, "wrong": []}
    assert (record["faults"], record["is_whole"]) == ([], True)
    assert record["notes"] is None
    assert [one["name"] for one in record["sections"]] == (["KV", "window"] if is_gemma else ["KV"])
    quantised = said["type_k"] == 8
    width, row_bytes = (256, 512) if is_gemma else (192, 204 if quantised else 384)
    for section, n_layer in zip(record["sections"], (3, 15) if is_gemma else (30,), strict=True):
        assert section["n_stream"] == (1 if said["kv_unified"] else 2)
        for s, stream in enumerate(section["streams"]):
            if not is_session and s > 0:
                assert stream == {"n_cells": 0, "sequences": []}
                continue
            nbytes = n_layer * n_tokens * row_bytes
            tensors = [{"n": n_layer, "type": "q8_0" if quantised else "f16", "width": width, "nbytes": nbytes}]
            assert stream == {
                "n_cells": n_tokens,
                "sequences": [{"sequence": s, "n_cells": n_tokens, "positions": [[0, n_tokens - 1]]}],
                "has_ext": False,
                "v_layout": "cell" if said["flash_attn"] else "channel",
                "rotation": [64, 64] if quantised else [0, 0],
                "tensors": {"K": tensors, "V": tensors},
            }


def test_table_reads_without_colour():
    result = run(DATA / "gemma3_fa_f16.ggsn")
    assert result.exit_code == 0
    for text in (
        "session file", "11/4", "gemma3", "6: 2 818 5279 529 7001 563", "108.7 KiB (111262 bytes)", "none noted",
        "window", "sequence 0: 0..5", "K: 15 x f16, 256 wide", "V: 3 x f16, 256 wide, by cell", "90.0 KiB",
    ):  # fmt: skip
        assert text in result.stdout
    assert "\x1b" not in result.stdout
    assert "V: 30 x f16, 192 wide, by channel" in run(DATA / "smollm2_nofa_f16.ggsq").stdout
    assert "rotated by 64 (K), 64 (V)" in run(DATA / "smollm2_fa_q8_0.ggsq").stdout


def test_positions_of_sequences_that_share_cells(tmp_path):
    record = told(written(tmp_path, session_file(list(range(20))).kv([SHARED], [F16], [F16])))
    assert record["sections"][0]["streams"][0]["sequences"] == [
        {"sequence": 0, "n_cells": 2, "positions": [[0, 1]]},
        {"sequence": 1, "n_cells": 2, "positions": [[0, 0], [4, 4]]},
        {"sequence": 2, "n_cells": 2, "positions": [[0, 0], [2, 2]]},
        {"sequence": 3, "n_cells": 1, "positions": [[4, 4]]},
        {"sequence": -1, "n_cells": 1, "positions": [[9, 9]]},
    ]
    text = run(tmp_path / "state").stdout
    assert "20: 0 1 2 3 ... 16 17 18 19" in text
    assert "sequence 1: 0, 4" in text
    assert "nobody: 9" in text


def test_streams_and_sections_of_all_kinds(tmp_path):
    state = session_file([]).kv([[], STREAM1], [Q8], [F16], rot=(64, 0)).states(OWNED, 7, [F32], [F32])
    path = written(tmp_path, state)
    kv, states = told(path)["sections"]
    assert (kv["name"], [one["n_cells"] for one in kv["streams"]]) == ("KV", [0, 2])
    assert kv["streams"][1]["tensors"] == {
        "K": [{"n": 1, "type": "q8_0", "width": 64, "nbytes": 2 * 68}],
        "V": [{"n": 1, "type": "f16", "width": 8, "nbytes": 2 * 16}],
    }
    assert (states["name"], states["n_layer"], states["n_cells"]) == ("states", 7, 2)
    assert states["sequences"][1] == {"sequence": 1, "n_cells": 1, "positions": [[5, 5]]}
    assert states["tensors"] == {
        "R": [{"n": 1, "type": "f32", "width": 6, "nbytes": 48}],
        "S": [{"n": 1, "type": "f32", "width": 6, "nbytes": 48}],
    }
    text = run(path).stdout
    assert "1 of 2" in text
    assert "0 of 2" not in text  # it is empty
    assert "tokens        none" in text


def test_a_cache_without_values_beside_another_is_an_index(tmp_path):
    state = sequence_file([1]).kv([SEQ2], [F16], [F16]).kv([SEQ2], [F16], [])
    assert [one["name"] for one in told(written(tmp_path, state))["sections"]] == ["KV", "index"]


def test_states_of_a_sequence_do_not_say_whose_they_are(tmp_path):
    state = sequence_file([1]).kv([SEQ2], [F16], [F16]).states(NO_ID, 3, [F32], [F32])
    states = told(written(tmp_path, state))["sections"][1]
    assert states["sequences"] == [{"sequence": 2, "n_cells": 1, "positions": [[8, 8]]}]


def test_cells_with_places_in_a_picture(tmp_path):
    path = written(tmp_path, session_file([1]).kv([EXT], [F16], [F16]))
    assert told(path)["sections"][0]["streams"][0]["has_ext"]
    assert "with x, y and token of each cell" in run(path).stdout


def test_an_older_dialect_does_not_say_rotations(tmp_path):
    path = written(tmp_path, sequence_file([1], 3).kv([SEQ2], [Q8], [Q8], rot=None))
    record = told(path)
    assert record["dialect"] == "10/3"
    assert record["sections"][0]["streams"][0]["rotation"] is None
    assert "rotation not said" in run(path).stdout


def test_bytes_of_states_that_are_no_files(tmp_path):
    whole = StateBytes().arch("llama").kv([SHARED], [F16], [F16], rot=None)
    record = told(written(tmp_path, whole))
    assert (record["kind"], record["architecture"], record["tokens"]) == ("context state", "llama", None)
    assert (record["dialect"], record["says_dialect"]) == ("10/3", False)
    one = StateBytes(bytearray(b"\xd8\x3c\x14\xaf\2\0\0\0")).kv([SEQ2], [F16], [F16])
    record = told(written(tmp_path, one))
    assert (record["kind"], record["sequence"]) == ("sequence state", 2)
    assert "11/4 (found out, it does not say)" in run(tmp_path / "state").stdout


def test_notes_and_checksums_behind_a_sequence(tmp_path):
    state = sequence_file([1]).kv([SEQ2], [F16], [F16])
    path = written(tmp_path, state, noted(state, window=b"x" * 2048))
    record = told(path)
    assert record["checksums"] == {"n_noted": 1, "is_verified": True, "wrong": []}
    assert record["notes"] == {
        "model": "abcdef",
        "rope": {"freq_base": 1e4, "freq_scale": None},
        "types": {"k": "f16"},
        "extra": {"text": "hello", "seed": 1},
        "attachments": {"window": 2048},
    }
    assert record["state_nbytes"] == len(state.data) - 16
    text = run(path).stdout
    for line in ("noted, and right", "fingerprint abcdef", "freq_base 10000.0", "text, seed", "window, 2.0 KiB"):
        assert line in text
    assert "freq_scale" not in text


def test_notes_beside_a_session(tmp_path):
    state = session_file([1]).kv([SHARED], [F16], [F16])
    path = written(tmp_path, state)
    (tmp_path / "state.pykv").write_bytes(noted(state, previous=noted(state)))
    record = told(path)
    assert record["checksums"]["is_verified"]
    assert record["notes"]["attachments"] == {}  # what is kept for a crash is nobody's


def test_a_damaged_session_was_an_error_without_a_table(tmp_path):
    state = session_file([1]).kv([SHARED], [F16], [F16])
    start = 12 + 4 + 4 + 5
    parts = ((0, start), (start, len(state.data) - start))
    sums = tuple(SectionSum(at, n, checksum(state.data[at : at + n])) for at, n in parts)
    beside = b"".join(map(bytes, trailer_pieces(Notes("abcdef", sections=sums))))
    (tmp_path / "state.pykv").write_bytes(beside)
    state.data[-1] ^= 1
    path = written(tmp_path, state)
    result = run(path)
    assert result.exit_code == 1
    for text in ("WRONG for section KV, else right", "fingerprint abcdef", "K: 1 x f16, 8 wide", "sequence 1: 0, 4"):
        assert text in result.stdout
    where = f"section KV does not match its checksum: in bytes {start} to {len(state.data) - 1}, expected "
    assert result.stderr.splitlines()[0].startswith(f"pykv: error: {path}: {where}{sums[1].checksum}, found ")
    record = json.loads(run(path, "--json").stdout)
    assert record["checksums"] == {"n_noted": 2, "is_verified": False, "wrong": ["section KV"]}
    assert [one["offset"] for one in record["faults"]] == [start]


@pytest.mark.parametrize("content", [b"", b"garbage", b"x" * 100 + b"pykvnote"])
def test_damaged_notes_beside_a_session_named_no_file(tmp_path, content):
    path = written(tmp_path, (DATA / "smollm2_fa_f16.ggsn").read_bytes())
    beside = tmp_path / "state.pykv"
    beside.write_bytes(content)
    result = run(path)
    assert result.exit_code == 1
    assert "K: 30 x f16, 192 wide" in result.stdout
    assert result.stderr.startswith(f"pykv: error: {beside}: damaged notes: ")
    assert len(result.stderr.splitlines()) == 1
    result = run(beside)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"pykv: error: {beside}: damaged notes on a session: ")
    assert f"the session is {path}" in result.stderr


def test_notes_in_place_of_a_session_were_a_puzzle(tmp_path):
    state = session_file([1]).kv([SHARED], [F16], [F16])
    path, beside = written(tmp_path, state), tmp_path / "state.pykv"
    beside.write_bytes(noted(state, window=b"x" * 2048))
    result = run(beside)
    assert (result.exit_code, result.stderr) == (0, "")
    for text in ("notes on a session", "which is the file to inspect", "fingerprint abcdef", "window, 2.0 KiB"):
        assert text in result.stdout
    record = told(beside)
    assert (record["kind"], record["session"]) == ("notes on a session", str(path))


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_rows_that_changed_are_told_after_all_else(tmp_path, options):
    state = sequence_file([1]).kv([SEQ2], [F16], [F16])
    trailer = noted(state)
    state.data[-1] ^= 1
    result = run(written(tmp_path, state, trailer), *options)
    assert result.exit_code == 1
    assert "sequence file" in result.stdout
    if options:
        assert json.loads(result.stdout)["checksums"]["is_verified"] is False
    else:
        assert "WRONG for the state" in result.stdout
    first, hint = result.stderr.splitlines()
    assert first.startswith(f"pykv: error: {tmp_path / 'state'}: the state does not match its checksum: in bytes 0 to")
    assert hint.startswith("  next: take another copy; pykv state diff")


# of a head of 12 + 28 bytes, a section of 8 + 84 + 16 and 60 tensors of 12 + 2688
@pytest.mark.parametrize(("n", "tokens", "n_cells", "tensors", "said"), [
    (4, [], None, None, "version: expected 4 bytes, found the end after 0"),
    (11, [], None, None, "number of tokens"),
    (23, 2, None, None, "number of tokens"),
    (40, 7, None, None, "no section can be read"),
    (60, 7, 0, None, "no section can be read"),
    (140, 7, 7, None, "all tensors of stream 0"),
    (148 + 2700 * 2 + 5, 7, 7, (2, 0), "missing of KV: K of layers 2 to 29, V of layers 0 to 29"),
    (148 + 2700 * 45, 7, 7, (30, 15), "missing of KV: V of layers 15 to 29"),
    (-1, 7, 7, (30, 29), "missing of KV: V of layer 29; KV section: stream 0: V of layer 29: 7 rows of 384: expected"),
])  # fmt: skip
def test_of_cut_files_nothing_was_shown(tmp_path, n, tokens, n_cells, tensors, said):
    path = written(tmp_path, (DATA / "smollm2_fa_f16.ggsq").read_bytes()[:n])
    result = run(path, "--json")
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    assert (record["kind"], record["is_whole"]) == ("sequence file", False)
    assert len(record["tokens"]) == (tokens or 0)
    assert said in record["faults"][0]["what"]
    assert record["faults"][0]["offset"] <= path.stat().st_size
    assert result.stderr.startswith(f"pykv: error: {path}: ")
    if n_cells:
        (stream,) = record["sections"][0]["streams"]
        assert stream["sequences"] == [{"sequence": 0, "n_cells": 7, "positions": [[0, 6]]}]
        found = {kind: sum(one["n"] for one in group) for kind, group in stream.get("tensors", {}).items()}
        assert found == ({} if tensors is None else dict(zip("KV", tensors, strict=True)))
    text = run(path).stdout
    assert "WRONG" in text
    assert "sequence file" in text


def test_of_cut_sessions_the_notes_tell_how_much_is_missing(tmp_path):
    state = session_file([1]).kv([SHARED, SHARED], [F16], [F16])
    path = written(tmp_path, state.data[:-7])
    (tmp_path / "state.pykv").write_bytes(noted(state))
    record = json.loads(run(path, "--json").stdout)
    assert [one["n_cells"] for one in record["sections"][0]["streams"]] == [5, 5]
    assert record["faults"][0]["what"].startswith("missing of KV: V of layer 0; ")
    assert record["faults"][1]["what"].endswith("were saved, 7 of them are missing at the end")


@pytest.mark.parametrize("n", [0, 1, 3])
def test_files_of_which_nothing_is_left_are_one_line(tmp_path, n):
    path = written(tmp_path, (DATA / "smollm2_fa_f16.ggsq").read_bytes()[:n])
    result = run(path)
    assert (result.exit_code, result.stdout) == (1, "")
    lines = result.stderr.splitlines()
    assert lines[0].startswith(f"pykv: error: {path}: ")
    assert lines[1:] == ["  next: the file is damaged, cut off or no saved state; take another copy of it"]


@pytest.mark.parametrize("content", [b"not a state at all, but some text", b"GGUF" * 100, b"qsgg\5\0\0\0" + bytes(40)])
def test_other_files_are_one_line(tmp_path, content):
    result = run(written(tmp_path, content))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("pykv: error: ")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", ["missing", "."])
def test_what_cannot_be_opened_is_named(tmp_path, name):
    result = run(tmp_path / name)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"pykv: error: {tmp_path / name}: input or output failed: ")


def test_every_command_shows_an_example_and_the_group_lists_them():
    runner = CliRunner(env={"COLUMNS": "120"})
    listed = runner.invoke(app, ["state", "--help"]).output
    for name in ("inspect", "convert", "diff"):
        assert name in listed
        assert f"Example: pykv state {name} " in runner.invoke(app, ["state", name, "--help"]).output
