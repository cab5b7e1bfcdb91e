"""``pykv state diff``: distances as plain numpy finds them in the payloads, and who lacks what."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.nmse import nmse
from support.state_bytes import EXT, F16, F32, NO_ID, OWNED, Q8, SEQ2, SHARED, Cell, Rows, StateBytes, samples
from support.state_values import DATA, N_LAYER, WIDTH, f16, payloads, plain, q8_0, sequence_file, session_file
from typer.testing import CliRunner

from pykv.cli.app import app
from pykv.state_format import Notes, SectionSum, checksum, trailer_pieces


def run(*args: object):
    runner = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "160"})
    return runner.invoke(app, ["state", "diff", *map(str, args)], catch_exceptions=False)


def told(*args: object, differs: bool = True) -> dict:
    result = run(*args, "--json")
    assert result.exit_code == int(differs), result.stderr
    record = json.loads(result.stdout)
    assert record["is_identical"] is not differs
    return record


@pytest.fixture
def write(tmp_path):
    def write(name: str, state: StateBytes) -> Path:
        (tmp_path / name).write_bytes(state.data)
        return tmp_path / name

    return write


@pytest.mark.parametrize("name", sorted(path.name for path in DATA.glob("*.gg*")))
def test_a_file_is_identical_to_itself(name):
    record = told(DATA / name, DATA / name, differs=False)
    assert (record["stored_otherwise"], record["differences"], record["tokens"]) == ([], [], None)
    assert len(record["tensors"]) == (36 if name.startswith("gemma") else 60)


@pytest.mark.parametrize("sample", samples(), ids=lambda one: one.name)
def test_states_of_all_kinds_are_identical_to_themselves(write, sample):
    """Also where random bytes are no numbers."""
    head = (session_file if sample.whole else sequence_file)([7])
    head.data += sample.state.data
    path = write("a", head)
    assert told(path, path, differs=False)["tensors"]


@pytest.mark.parametrize("names", [
    ("smollm2_fa_f16.ggsq", "smollm2_fa_f16.ggsn"),
    ("smollm2_fa_f16.ggsn", "smollm2_streams2_f16.ggsq"),
    ("smollm2_streams2_f16.ggsq", "smollm2_fa_f16.ggsq"),
    ("gemma3_fa_f16.ggsn", "gemma3_fa_f16.ggsq"),
])  # fmt: skip
def test_form_is_no_difference(names):
    record = told(*(DATA / name for name in names), differs=False)
    assert record["stored_otherwise"]
    result = run(*(DATA / name for name in names))
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith("identical: ")


def test_types_are_compared_as_numbers_with_rotations_undone():
    a, b = DATA / "smollm2_fa_f16.ggsq", DATA / "smollm2_fa_q8_0.ggsq"
    record = told(a, b)
    ones = [f16(raw, WIDTH) for raw in payloads(a.read_bytes(), 2 * WIDTH)]
    others = [q8_0(raw, WIDTH, 64) for raw in payloads(b.read_bytes(), 6 * 34)]
    for i, (one, other, found) in enumerate(zip(ones, others, record["tensors"], strict=True)):
        assert (found["section"], found["kind"], found["layer"]) == ("KV", "KV"[i // N_LAYER], i % N_LAYER)
        assert (found["n_rows"], found["n_differ"]) == (7, 7)
        assert found["nmse"] == pytest.approx(nmse(other, one), rel=1e-4)
        assert found["max_abs"] == pytest.approx(float(np.abs(one - other).max()), rel=1e-4)
    assert record["stored_otherwise"] == [
        {"what": "KV: K", "first": "f16", "second": "q8_0"},
        {"what": "KV: V", "first": "f16", "second": "q8_0"},
        {"what": "KV: rotation of K and V", "first": "0, 0", "second": "64, 64"},
    ]


def test_v_by_channel_is_compared_with_v_by_cell():
    a, b = DATA / "smollm2_fa_f16.ggsq", DATA / "smollm2_nofa_f16.ggsq"
    record = told(a, b)
    for i, (one, other) in enumerate(
        zip(payloads(a.read_bytes(), 2 * WIDTH), payloads(b.read_bytes(), 2 * WIDTH), strict=True)
    ):
        x, y = f16(one, WIDTH), f16(other, WIDTH) if i < N_LAYER else f16(other, 7).T
        found = record["tensors"][i]
        assert found["n_differ"] == int((x != y).any(axis=1).sum())
        assert found["nmse"] == pytest.approx(nmse(y, x), rel=1e-4, abs=1e-12)
        assert found["max_abs"] == pytest.approx(float(np.abs(x - y).max()), rel=1e-4)


def test_rows_are_found_by_position_whatever_their_order(write):
    values = np.arange(2 * 3 * 8, dtype=np.float32).reshape(2, 3, 8)
    order = [2, 0, 1]
    a, b = sequence_file([1]).kv([SEQ2], [F16], [F16]), sequence_file([1])
    b.kv([[Cell(SEQ2[i].pos, (0,)) for i in order]], [F16], [F16])  # and of another number
    plain(a, values)
    plain(b, values[:, order])
    paths = write("a", a), write("b", b)
    told(*paths, differs=False)
    changed = values[:, order].copy()
    changed[1, 1] += 2  # V of position 5
    plain(b, changed)
    record = told(paths[0], write("b", b))
    k, v = record["tensors"]
    assert (k["n_rows"], k["n_differ"], k["nmse"], k["max_abs"]) == (3, 0, 0, 0)
    assert (v["n_rows"], v["n_differ"], v["max_abs"]) == (3, 1, 2)
    assert v["nmse"] == pytest.approx(8 * 4 / np.square(values[1]).sum())


def test_streams_are_compared_with_one_pool(write):
    one = session_file([]).kv([[Cell(0, (0,)), Cell(1, (0,))], [Cell(0, (1,))]], [F16], [])
    pool = session_file([]).kv([[Cell(0, (0, 1)), Cell(1, (0,))]], [F16], [])
    rows = np.array([[1] * 8, [2] * 8, [1] * 8], np.float32)
    plain(one, rows)
    plain(pool, rows[:2])
    record = told(write("a", one), write("b", pool), differs=False)
    (cells,) = record["cells"]
    assert (cells["n_cells"], cells["n_both"]) == ([3, 2], 3)
    assert record["tensors"][0]["n_rows"] == 3
    rows[2] = 3
    plain(one, rows)
    assert told(write("a", one), write("b", pool))["tensors"][0]["n_differ"] == 1
    # a shared row counts once where both share it
    assert told(write("c", pool), write("b", pool), differs=False)["tensors"][0]["n_rows"] == 2


def test_cells_that_the_other_lacks(write):
    mine = [Cell(p, (0,)) for p in (0, 1, 2, 7)] + [Cell(p, (1,)) for p in (0, 1)] + [Cell(9, ())]
    yours = [Cell(p, (0,)) for p in (0, 1, 5)] + [Cell(3, (4,))]
    values = np.ones((7, 8))
    a, b = (session_file([]).kv([cells], [F16], []) for cells in (mine, yours))
    plain(a, values)
    plain(b, values[:4])
    paths = write("a", a), write("b", b)
    (cells,) = told(*paths)["cells"]
    assert (cells["n_cells"], cells["n_both"]) == ([7, 4], 2)
    assert cells["only_first"] == [
        {"seq_id": -1, "start": 9, "stop": 10},
        {"seq_id": 0, "start": 2, "stop": 3},
        {"seq_id": 0, "start": 7, "stop": 8},
        {"seq_id": 1, "start": 0, "stop": 2},
    ]
    assert cells["only_second"] == [{"seq_id": 0, "start": 5, "stop": 6}, {"seq_id": 4, "start": 3, "stop": 4}]
    text = run(*paths).stdout
    assert "KV: only in A: nobody, 9..9; sequence 0, 2..2; sequence 0, 7..7; sequence 1, 0..1" in text
    assert text.splitlines()[-1].startswith("different: 0 of 1 tensors differ")
    assert told(*paths, "--seq", 0)["cells"][0]["only_first"][0] == {"seq_id": 0, "start": 2, "stop": 3}


def test_one_sequence_is_compared_with_its_own_in_a_session(write):
    rows = np.arange(5 * 8).reshape(5, 8)
    whole = session_file([]).kv([SHARED], [F16], [])
    plain(whole, rows)
    own = sequence_file([]).kv([[Cell(2, (2,)), Cell(0, (2,))]], [F16], [])
    plain(own, rows[[4, 0]])
    paths = write("a", whole), write("b", own)
    told(*paths, "--seq", 2, differs=False)
    assert "of sequence 2, and nothing else" in run(*paths, "--seq", 2).stdout.splitlines()[-1]
    record = told(*paths, "--seq", 1)
    assert record["cells"][0]["n_both"] == 1


def test_a_session_of_several_was_called_identical_to_the_file_of_one(write):
    rows = np.arange(5 * 8).reshape(5, 8)
    whole = session_file([]).kv([SHARED], [F16], [])
    plain(whole, rows)
    own = sequence_file([]).kv([[Cell(2, (2,)), Cell(0, (2,))]], [F16], [])
    plain(own, rows[[4, 0]])
    paths = write("a", whole), write("b", own)
    there = ", ".join(map(str, sorted({s for cell in SHARED for s in cell.ids})))
    for first, second, said in ((*paths, [there, "2"]), (*reversed(paths), ["2", there])):
        record = told(first, second)
        assert record["differences"] == [{"what": "sequences", "first": said[0], "second": said[1]}]
        assert "sequences" in run(first, second).stdout


def test_tokens_that_differ(write):
    a, b = (sequence_file(tokens).kv([SEQ2], [F16], []) for tokens in ([1, 2, 3, 4], [1, 9, 3, 8, 5]))
    for one in (a, b):
        plain(one, np.zeros((3, 8)))
    record = told(write("a", a), write("b", b))
    assert record["tokens"] == {"n": [4, 5], "n_differ": 2, "first": 1}
    assert "tokens: 4 and 5, 2 differ, the first at 1" in run(write("a", a), write("b", b)).stdout
    short = sequence_file([1, 2]).kv([SEQ2], [F16], [])
    plain(short, np.zeros((3, 8)))
    assert told(write("a", a), write("b", short))["tokens"] == {"n": [4, 2], "n_differ": 0, "first": 2}


def test_places_in_a_picture_that_differ(write):
    other = [EXT[0]._replace(ext=(3, 4, 78)), *EXT[1:]]
    a, b = (session_file([]).kv([cells], [F16], []) for cells in (EXT, other))
    for one in (a, b):
        plain(one, np.ones((3, 8)))
    assert told(write("a", a), write("b", b))["cells"][0]["n_ext_differ"] == 1


def test_states_are_compared_by_sequence(write):
    a = session_file([]).states(OWNED, 2, [F32], [F32])
    b = session_file([]).states(OWNED[::-1], 2, [F32], [F32])
    rows = np.arange(24, dtype=np.float32).reshape(2, 2, 6)
    plain(a, rows, "<f4")
    plain(b, rows[:, ::-1], "<f4")
    told(write("a", a), write("b", b), differs=False)
    rows = rows.copy()
    rows[1, 0, 3] = -5  # S of sequences 0 and 2
    plain(a, rows, "<f4")
    r, s = told(write("a", a), write("b", b))["tensors"]
    assert (r["kind"], r["n_differ"], s["kind"], s["n_differ"], s["max_abs"]) == ("R", 0, "S", 1, 20)
    assert "R rows differ" in run(write("a", a), write("b", b)).stdout


def test_families_sections_and_widths_that_differ(write):
    record = told(DATA / "smollm2_fa_f16.ggsn", DATA / "gemma3_fa_f16.ggsn")
    assert record["differences"] == [
        {"what": "architecture", "first": "llama", "second": "gemma3"},
        {"what": "sections", "first": "KV", "second": "KV, window"},
    ]
    assert record["tensors"] == []
    a, b = sequence_file([]).kv([SEQ2], [F16], [F16]), sequence_file([]).kv([SEQ2], [F16, F16], [Rows(1, 32, 2)] * 2)
    record = told(write("a", a), write("b", b))
    assert record["differences"] == [
        {"what": "KV: widths of K", "first": "1 of 8", "second": "2 of 8"},
        {"what": "KV: widths of V", "first": "1 of 8", "second": "2 of 16"},
    ]
    assert "2 of 16" in run(write("a", a), write("b", b)).stdout


def test_numbers_that_are_none_are_infinitely_far(write):
    a, b = (sequence_file([]).kv([SEQ2], [F32], []) for _ in range(2))
    values = np.ones((3, 6), np.float32)
    plain(a, values, "<f4")
    values[1, 2] = np.nan
    plain(b, values, "<f4")
    (found,) = told(write("a", a), write("b", b))["tensors"]
    assert (found["n_differ"], found["nmse"], found["max_abs"]) == (1, None, None)
    assert "inf" in run(write("a", a), write("b", b)).stdout


def test_rotations_that_are_not_said(write):
    old, new = (sequence_file([], v).kv([SEQ2], [Q8], [Q8], rot=rot) for v, rot in ((3, None), (4, (64, 64))))
    for (at, n), (there, _) in zip(old.payloads, new.payloads, strict=True):
        old.data[at : at + n] = new.data[there : there + n]
    plain_f16 = sequence_file([]).kv([SEQ2], [Rows(1, 128, 2)], [Rows(1, 128, 2)])
    told(write("old", old), write("new", new), differs=False)  # that of the other one
    told(write("old", old), write("old again", old), differs=False)
    result = run(write("old", old), write("f16", plain_f16))
    assert result.exit_code == 2
    assert "pass --rotation K,V" in result.stderr
    assert told(write("old", old), write("f16", plain_f16), "--rotation", "64,64")["tensors"]


def test_a_state_that_does_not_say_whose_it_is(tmp_path, write):
    one = sequence_file([]).states(NO_ID, 2, [F32], [F32])
    whole = session_file([]).states(OWNED, 2, [F32], [F32])
    result = run(write("a", one), write("b", whole))
    said = f"--seq: {tmp_path / 'a'} does not say which sequence it is of; say it: {tmp_path / 'b'} holds 0, 1, 2"
    assert (result.exit_code, result.stderr) == (2, f"pykv: error: {said}\n")
    told(write("a", one), write("b", whole), "--seq", 1)
    result = run(write("a", one), write("b", whole), "--seq", 5)
    assert (result.exit_code, f"--seq 5: no such sequence; {tmp_path / 'b'} holds 0, 1, 2" in result.stderr) == (
        2,
        True,
    )


@pytest.mark.parametrize("n", [0, 3, 50, -1])
def test_what_cannot_be_compared_does_not_leave_as_a_difference(tmp_path, n):
    good = DATA / "smollm2_fa_f16.ggsq"
    bad = tmp_path / "bad"
    bad.write_bytes(good.read_bytes()[:n])
    for paths in ((good, bad), (bad, good), (good, tmp_path / "missing"), (tmp_path, good)):
        result = run(*paths)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("pykv: error: ")
        assert str(tmp_path) in result.stderr.splitlines()[0]


def test_table_reads_without_colour():
    text = run(DATA / "smollm2_fa_f16.ggsq", DATA / "smollm2_nofa_f16.ggsq").stdout
    assert "\x1b" not in text
    for word in ("stored otherwise", "KV: V lies by", "channel", "K rows differ", "V NMSE", "6 of 7"):
        assert word in text
    assert text.splitlines()[-1].startswith("different: 5")


def damaged(tmp_path: Path, state: StateBytes, name: str) -> Path:
    """Write a sequence whose last byte is not what was noted."""
    sums = (SectionSum(0, len(state.data), checksum(state.data)),)
    trailer = b"".join(map(bytes, trailer_pieces(Notes(sections=sums))))
    path = tmp_path / name
    path.write_bytes(bytes(state.data[:-1]) + bytes([state.data[-1] ^ 1]) + trailer)
    return path


def test_wrong_checksums_were_not_told(tmp_path, write):
    state = sequence_file([1]).kv([SEQ2], [F16], [F16])
    good, bad = write("good", state), damaged(tmp_path, state, "bad")
    for paths in ((good, bad), (bad, good)):
        result = run(*paths)
        assert result.exit_code == 1
        assert result.stderr.startswith(f"pykv: warning: {bad}: the state does not match its checksum: in bytes 0 to ")
        assert len(result.stderr.splitlines()) == 1
        record = told(*paths)
        assert [one.startswith(str(bad)) for one in record["warnings"]] == [True]
    assert run(bad, bad).exit_code == 0
    assert len(run(bad, bad).stderr.splitlines()) == 2


def test_layers_that_are_the_same_were_listed_one_by_one(write):
    n = 9
    values = np.arange(2 * n * 3 * 8, dtype=np.float32).reshape(2 * n, 3, 8)
    a, b = (sequence_file([]).kv([SEQ2], [F16] * n, [F16] * n) for _ in range(2))
    plain(a, values)
    values[4, 0, 0] += 1  # K of layer 4
    values[n + 5, 1, 0] += 1  # V of layer 5
    plain(b, values)
    paths = write("a", a), write("b", b)
    rows = [line.split("│")[1:4] for line in run(*paths).stdout.splitlines() if line.startswith("│ KV")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["KV", "0..3", "0 of 3"], ["KV", "4", "1 of 3"], ["KV", "5", "0 of 3"], ["KV", "6..8", "0 of 3"],
    ]  # fmt: skip
    assert len(told(*paths)["tensors"]) == 2 * n


def test_options_that_do_nothing_are_told(write):
    path = write("a", sequence_file([]).kv([SEQ2], [F16], [F16]))
    result = run(path, path, "--rotation", "64,64")
    assert (result.exit_code, result.stderr) == (
        0, "pykv: warning: --rotation 64,64: not needed, both files say it or store no blocks\n"
    )  # fmt: skip
    result = run(path, path, "--rotation", "3,7")
    assert (result.exit_code, "must be two numbers, each 0 or a power of two" in result.stderr) == (2, True)
    result = run(path, path, "--seq", 0)
    assert (result.exit_code, "hold one sequence each; leave it out" in result.stderr) == (2, True)


def test_notes_in_place_of_a_session_are_told(tmp_path):
    session = tmp_path / "s.bin"
    session.write_bytes((DATA / "smollm2_fa_f16.ggsn").read_bytes())
    beside = tmp_path / "s.bin.pykv"
    beside.write_bytes(b"".join(map(bytes, trailer_pieces(Notes()))))
    result = run(beside, session)
    assert result.exit_code == 2
    assert result.stderr == (
        f"pykv: error: {beside}: holds the notes on a session, not the session; that is {session}\n"
    )
