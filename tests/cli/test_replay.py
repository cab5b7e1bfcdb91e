"""``pykv replay``: exit codes for scripts, a table for people, JSON for programs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.stand_in import open_stand_in
from support.tiny_gguf import TinyModel
from typer.testing import CliRunner

import pykv
from pykv.cli.app import app


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "fault.jsonl"
    with open_stand_in(n_seq_max=2, n_ctx=512) as context, context.trace(path):
        context.decode(pykv.Batch(range(20)))
        context.memory.seq_cp(0, 1)
        context.memory.seq_rm(0, 0, 5)
        context.memory.seq_add(0, 5, -1, -5)
        context.decode(pykv.Batch([7], logits="none"))
    return str(path)


def replay(*args: str):
    return CliRunner(env={"NO_COLOR": "1", "COLUMNS": "100"}).invoke(
        app, ["replay", "--threads", "1", *args], catch_exceptions=False
    )


def test_sound_trace(path):
    result = replay(path)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout.splitlines()[-1] == "no difference in 5 steps"
    assert re.search(r"^ +run here +recorded", result.stdout)
    assert re.search(r"^type_k +f16 +f16", result.stdout, re.MULTILINE)


def test_every_option_changes_the_second_side(path):
    options = "--ctx 1024 --ubatch 8 --type-k q8_0 --type-v f32 --streams --no-flash --reference-moves --device cpu"
    result = replay(path, *options.split(), "--json")
    record = json.loads(result.stdout)
    assert record["second"] == {
        "model": "stand-in",
        "device": "CPU",
        "n_ctx": 1024,
        "n_batch": 512,
        "n_ubatch": 8,
        "n_seq_max": 2,
        "kv_unified": False,
        "type_k": "q8_0",
        "type_v": "f32",
        "reference_moves": True,
        "attention": "matmul",
    }
    assert (record["first"]["type_k"], record["first"]["kv_unified"]) == ("f16", True)
    # in streams of their own nothing is shared, so that both ways to move agree
    assert (result.exit_code, record["difference"], record["n_done"]) == (0, None, 5)
    assert record["notes"] == ["device: both sides have CPU, so that this changes nothing"]


def test_first_difference_is_shown(path):
    result = replay(path, "--reference-moves")
    assert result.exit_code == 1
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    at = lines.index("differs after step 4 (line 5): seq_add(0, 5, -1, -5)")
    assert lines[at + 1 :] == [
        "  what    positions, sequence 1",
        "  first   0..19",
        "  second  0..14",
    ]


def test_distances_are_shown(tmp_path):
    path = tmp_path / "t"
    with open_stand_in() as context, context.trace(path):
        context.decode(pykv.Batch(range(8)))
        context.memory.seq_div(0, 0, -1, 2)
    result = replay(str(path), "--reference-moves")
    assert result.exit_code == 1
    assert "differs after the last step: the end\n" in result.stdout
    assert re.search(r"what +K, layer 0, sequence 0, position 0\b", result.stdout)
    assert re.search(r"NMSE +[\d.]+, tolerance 0\.0001", result.stdout)
    assert replay(str(path), "--reference-moves", "--tolerance", "9").exit_code == 0


def test_difference_as_json(path):
    result = replay(path, "--reference-moves", "--json", "--dump")
    record = json.loads(result.stdout)
    assert result.exit_code == 1
    assert record["difference"] == {
        "step": 4,
        "line": 5,
        "did": "seq_add(0, 5, -1, -5)",
        "kind": "positions",
        "where": {"seq": 1},
        "first": "0..19",
        "second": "0..14",
        "nmse": None,
        "tolerance": None,
    }
    assert (record["n_steps"], record["n_done"], record["is_cut"]) == (5, 4, False)
    assert record["cells"][1] == [" ".join(f"{i}:{i}{{1}}" if i < 5 else f"{i}:{i - 5}{{0,1}}" for i in range(20))]


def test_dump_shows_the_cells_of_each_side(path):
    result = replay(path, "--ctx", "256", "--dump")
    assert result.exit_code == 0
    for text in ("first: 36 of 512 cells used", "second: 36 of 256 cells used", "0:0{1}", "5:5{1}"):
        assert text in result.stdout
    assert "\x1b" not in result.stdout


def test_dump_of_streams_is_numbered(path):
    assert "second, stream 1: 20 of 256 cells used" in replay(path, "--streams", "--dump").stdout


def test_model_at_hand_computes(path, write_tiny):
    result = replay(path, "-m", str(write_tiny(TinyModel())))
    assert result.exit_code == 0
    assert "\nnot compared: logits: what computes here is not what was recorded\n" in result.stdout


def test_it_was_not_said_what_was_compared_and_how_close_it_was(path):
    said = replay(path).stdout
    assert "\ncompared: outcomes, positions, cells, tokens, logits\n" in said
    assert "\nnot compared: K and V: a trace does not hold them\n" in said
    assert (
        "\nlogits: within tolerance 1e-05; largest NMSE 0 in step 1, row 0, seq 0, pos 19; top-1 differs in 0 of 1"
        in said
    )
    said = replay(path, "--type-k", "q8_0").stdout
    assert "\ncompared: outcomes, positions, cells, tokens, logits, K and V\n" in said
    assert re.search(r"^K: within tolerance \S+; largest NMSE \S+ in step \d, layer \d, seq \d, pos \d+$", said, re.M)


def test_what_was_compared_as_json(path):
    record = json.loads(replay(path, "--json").stdout)
    assert record["compared"] == ["outcomes", "positions", "cells", "tokens", "logits"]
    assert record["not_compared"] == {"K and V": "a trace does not hold them"}
    assert (record["n_rows"], record["n_top_differ"], record["tolerance"]["spread"]) == (1, 0, 1e-5)
    assert record["farthest"]["logits"] == {
        "nmse": 0.0,
        "tolerance": 1e-5,
        "where": {"step": 1, "row": 0, "seq": 0, "pos": 19},
    }


def test_a_rounded_size_is_told(path):
    assert "\n--ctx: 10 is rounded up to 256\n" in replay(path, "--ctx", "10").stdout


def test_other_model_needs_a_first_one(path, write_tiny):
    result = replay(path, "--other-model", str(write_tiny(TinyModel())))
    assert result.exit_code == 2
    assert result.stderr.startswith("pykv: error: no --model leaves nothing that '")


def test_cut_trace_says_so(path, tmp_path):
    cut = tmp_path / "cut"
    cut.write_bytes(Path(path).read_bytes()[:-9])
    result = replay(str(cut))
    assert result.exit_code == 0
    assert "the last line of the trace is cut off" in result.stdout
    assert "no difference in 4 steps" in result.stdout


def test_trace_that_ended_early_says_so(path, tmp_path):
    """Told as if it were all there was: no difference, and not a word more."""
    ended = tmp_path / "ended"
    ended.write_text(Path(path).read_text() + '{"ended":"restore: by a test"}\n')
    said = replay(str(ended))
    assert (said.exit_code, said.stdout.splitlines()[-1]) == (0, "no difference in 5 steps")
    assert "the trace ended early, what came afterwards is not in it: restore: by a test\n" in said.stdout
    assert json.loads(replay(str(ended), "--json").stdout)["ended"] == "restore: by a test"
    assert json.loads(replay(path, "--json").stdout)["ended"] is None


RECORDS = "ctx.trace(path) records a trace"


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (None, "check the path"),
        (b"", RECORDS),
        (b"GGUF", RECORDS),
        (b'{"pykv_trace":1}\n', "the file was damaged or edited"),
        (b'{"pykv_trace":2}\n', "run it with the pykv that recorded it"),
    ],
    ids=str,
)
def test_file_that_is_no_trace_is_one_line_and_no_difference(tmp_path, content, hint):
    path = tmp_path / "bad"
    if content is not None:
        path.write_bytes(content)
    result = replay(str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"pykv: error: {path}")
    assert f"next: {hint}" in result.stderr


def test_trace_without_steps_is_no_success(tmp_path):
    with open_stand_in() as context:
        context.trace(tmp_path / "t")
    result = replay(str(tmp_path / "t"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the trace holds no step" in result.stderr


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--type-k q9", "--type-k q9 "),
        ("--type-v q8_0 --no-flash", "--type-v q8_0 needs flash attention, but --no-flash"),
        ("--type-v q8_0 --attention matmul", "--type-v q8_0 needs flash attention, but --attention matmul"),
        ("--flash --attention matmul", "--flash means --attention flash, not 'matmul'"),
        ("--device CUDA9", "--device: no device 'CUDA9'"),
        ("--threads 5000", "--threads 5000 must be"),
    ],
)
def test_errors_named_parameters_that_only_python_has(path, typed, said):
    result = replay(path, *typed.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"pykv: error: {said}")


def test_a_trace_without_flash_attention_says_which_option_it_needs(tmp_path):
    with open_stand_in(flash_attn=False) as context, context.trace(tmp_path / "t"):
        context.decode(pykv.Batch(range(4)))
    result = replay(str(tmp_path / "t"), "--type-v", "q8_0")
    assert result.exit_code == 2
    assert "--type-v q8_0 needs flash attention, and the trace was recorded without: give --flash\n" in result.stderr
    assert replay(str(tmp_path / "t"), "--type-v", "q8_0", "--flash").exit_code == 0


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--unified", "--unified/--streams: both sides have True, so that this changes nothing"),
        ("--flash", "--flash/--no-flash: both sides have flash, so that this changes nothing"),
        ("--swa-full", "--swa-full/--window-only: no layer has a window, so that this changes nothing"),
    ],
)
def test_what_changes_nothing_is_told_by_its_option(path, typed, said):
    assert f"\n{said}\n" in replay(path, typed).stdout
    assert said not in replay(path, typed, "--json").stdout


def test_device_that_is_unknown_did_not_say_where_to_look(path):
    result = replay(path, "--device", "CUDA9")
    assert result.exit_code == 2
    assert "next: pykv devices lists those at hand" in result.stderr


def test_model_that_is_missing_is_no_difference(path):
    result = replay(path, "-m", "absent.gguf")
    assert result.exit_code == 2
    assert "absent.gguf" in result.stderr
