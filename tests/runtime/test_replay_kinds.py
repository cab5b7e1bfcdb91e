"""Traces of every kind of memory: recorded on a model, run again as they were and otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.stand_in import LAYER, SHAPE, SPEC, open_stand_in
from support.tiny.registry import BY_NAME
from typer.testing import CliRunner

import pykv
from pykv.cells import SwaType, Window
from pykv.cli.app import app
from pykv.errors import ParamError, PykvError
from pykv.memory import LayerSpec, MemorySpec, StateSpec, kv_graph
from pykv.models.spec_record import spec_of, spec_record
from pykv.models.stand_in import StandInShape
from pykv.runtime import Context
from pykv.runtime.replay import Changes, Report, replay
from pykv.runtime.replay.side import LiveRun
from pykv.runtime.trace.file import read_trace

WINDOWS, STATES, BOTH, KEYS, AXES, ALL = (
    "gemma3-4l-w16-every2",
    "mamba2-4l",
    "falcon-h1-3l",
    "deepseek2-3l",
    "qwen2vl-3l",
    "lfm2-4l-w16",
)
SETTINGS: dict[str, dict[str, Any]] = {
    WINDOWS: {},
    STATES: {},
    BOTH: {},
    KEYS: {"type_k": "f32", "type_v": "f32"},
    AXES: {},
    ALL: {"n_rs_seq": 4},
}


def program(context: Context) -> None:
    """Prompts, forks, cuts, moves and refusals; a prompt longer than a window's cache at the end."""
    memory = context.memory
    context.decode(pykv.Batch(range(40), logits="all"))
    memory.seq_cp(0, 1)
    context.decode(pykv.Batch([40, 41, 42], seq_id=[0, 1, 1], logits="all"))
    memory.seq_rm(0, 38, -1)
    try:
        memory.seq_add(1, 0, -1, 3)
    except PykvError:
        assert not memory.can_shift()
    with pytest.raises(PykvError):
        context.decode(pykv.Batch([7], pos=[1]))
    context.decode(pykv.Batch(range(60, 80), seq_id=[2] * 10 + [1] * 10, logits="none"))
    memory.seq_rm(0)
    for token in range(4):
        context.decode(pykv.Batch([token], seq_id=1))
    for start in (0, 140):
        context.decode(pykv.Batch([(7 * i) % 256 for i in range(start, start + 140)], seq_id=0))
    memory.seq_rm(-1, 0, 30)
    context.decode(pykv.Batch([5, 6], seq_id=[0, 2]))


@pytest.fixture(scope="module", params=SETTINGS)
def recorded(request: Any, write_tiny: Callable[..., Path], tmp_path_factory: Any) -> tuple[str, Path, Path]:
    """Name, file and trace of a model."""
    model, path = write_tiny(BY_NAME[request.param]), tmp_path_factory.mktemp("trace") / "t.jsonl"
    record(model, path, **SETTINGS[request.param])
    return request.param, model, path


def record(file: Path, path: Path, **params: Any) -> None:
    params = {"n_ctx": 768, "n_seq_max": 3, "n_ubatch": 16, "n_threads": 1, "flash_attn": True} | params
    with pykv.Model.load(str(file)) as model, model.context(**params) as context, context.trace(path):
        program(context)


def run(path: Path, *args: Any, **options: Any) -> Report:
    return replay(read_trace(path), *args, n_threads=1, **options)


def test_a_trace_runs_again_exactly(recorded: tuple[str, Path, Path]) -> None:
    """What a window left over counted as a difference, and a model without any attention could not be recorded."""
    name, model, path = recorded
    report = run(path, model=model, tolerance=0)
    assert report.difference is None
    assert report.n_done == report.n_steps
    assert report.compared == ["outcomes", "positions", "cells", "tokens", "logits"]
    lacks = {WINDOWS: ["K and V"], STATES: ["states"], BOTH: ["K and V", "states"], ALL: ["K and V", "states"]}
    assert list(report.left_out) == lacks.get(name, ["K and V"])


CHANGES = {
    "streams": Changes(kv_unified=False, n_ctx=2304),
    "layout": Changes(flash_attn=False),
    "size": Changes(n_ctx=1024, n_ubatch=24),
    "all that is behind windows": Changes(swa_full=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_trace_runs_the_same_with_another_setting(recorded: tuple[str, Path, Path], change: str) -> None:
    name, model, path = recorded
    report = run(path, CHANGES[change], model=model)
    assert report.difference is None, str(report.difference)
    assert report.left_out == {}
    # mamba2 and falcon-h1 keep recent inputs (R) and states (S), lfm2 recent inputs alone
    kinds = {STATES: ["R", "S", "logits"], BOTH: ["K", "V", "R", "S", "logits"], ALL: ["K", "V", "R", "logits"]}
    assert set(report.distances.farthest) == set(kinds.get(name, ["K", "V", "logits"]))
    notes = []
    if change == "all that is behind windows" and name not in (WINDOWS, ALL):
        notes = ["swa_full: no layer has a window, so that this changes nothing"]
    elif change == "layout" and name == STATES:
        notes = ["flash_attn: both sides have flash, so that this changes nothing"]
    assert report.notes == notes


def test_a_stand_in_runs_what_has_keys(recorded: tuple[str, Path, Path]) -> None:
    name, _, path = recorded
    if name == STATES:
        with pytest.raises(ParamError, match="nothing stands in for one whose layers have states alone"):
            run(path)
        return
    assert run(path).difference is None
    report = run(path, Changes(kv_unified=False, n_ctx=2304))
    assert report.difference is None
    assert report.left_out == ({"states": "a stand-in computes none"} if name in (BOTH, ALL) else {})


def test_the_header_says_what_the_memory_was_made_with(recorded: tuple[str, Path, Path]) -> None:
    name, model, path = recorded
    header = json.loads(path.read_text().splitlines()[0])
    assert header["params"]["swa_full"] is False
    assert header["params"]["n_rs_seq"] == SETTINGS[name].get("n_rs_seq", 0)
    memory = header["model"]["memory"]
    assert (memory["window"]["n_swa"] > 0) == (name in (WINDOWS, ALL))
    assert any(layer["state"] for layer in memory["layers"]) == (name in (STATES, BOTH, ALL))
    assert any(layer["k_only"] for layer in memory["layers"]) == (name == KEYS)
    with pykv.Model.load(str(model)) as opened, opened.context(n_ctx=256, n_threads=1) as context:
        assert spec_record(spec_of(memory)) == spec_record(context.memory.spec)


def test_settings_of_windows_and_states_are_told(recorded: tuple[str, Path, Path]) -> None:
    name, model, path = recorded
    report = run(path, model=model)
    for side in (report.first, report.second):
        assert side.get("swa_full") == (False if name in (WINDOWS, ALL) else None)
        assert side.get("n_rs_seq") == {STATES: 0, BOTH: 0, ALL: 4}.get(name)


# faults


def test_a_state_that_is_wrong_names_its_layer(
    write_tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = write_tiny(BY_NAME[STATES]), tmp_path / "t"
    record(model, path)
    state = LiveRun.state

    def spoiled(self: LiveRun, kind: str, il: int, seq: int) -> Any:
        positions, row = state(self, kind, il, seq)
        return positions, row + (self.context.params.n_ubatch == 24 and (kind, il) == ("S", 2) and positions[0] > 50)

    monkeypatch.setattr(LiveRun, "state", spoiled)
    found = run(path, Changes(n_ubatch=24), model=model).difference
    assert found is not None
    assert (found.kind, found.where) == ("S", {"layer": 2, "seq": 1, "pos": 54})
    assert found.did.startswith("decode")


def test_a_window_that_hides_too_much(
    write_tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer has a window: what its query did not see shows in the keys of the second."""
    model, path = write_tiny(BY_NAME[WINDOWS]), tmp_path / "t"
    record(model, path)
    fill = kv_graph.fill_mask

    def spoiled(out: Any, streams: Any, slot: Any, ubatch: Any, rule: Any) -> None:
        fill(out, streams, slot, ubatch, rule)
        if streams.cells[0].n == 1024:  # the base cache, or with swa_full both
            out[..., 3].fill(float("-inf"))

    monkeypatch.setattr(kv_graph, "fill_mask", spoiled)
    found = run(path, Changes(n_ctx=1024, swa_full=True), model=model).difference
    assert found is not None
    assert (found.step, found.kind, found.where) == (1, "K", {"layer": 1, "seq": 0, "pos": 3})


# what is shown

WINDOWED = StandInShape(
    n_head_by_layer=(2, 2),
    n_ctx_train=4096,
    spec=spec_record(MemorySpec((replace(LAYER, is_swa=True), LAYER), window=Window(20, SwaType.STANDARD))),
)
MIXED = StandInShape(
    n_head_by_layer=(2, 2),
    n_ctx_train=4096,
    spec=spec_record(MemorySpec((LayerSpec.recurrent(StateSpec(8, 16)), LAYER))),
)


def dump(path: Path, *args: str) -> str:
    result = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "100"}).invoke(
        app, ["replay", "--threads", "1", "--dump", *args, str(path)], catch_exceptions=False
    )
    assert result.exit_code == 0
    return result.stdout


def test_dump_shows_both_halves_of_windows(tmp_path: Path) -> None:
    with open_stand_in(WINDOWED, n_ctx=512, n_batch=100) as context, context.trace(tmp_path / "t"):
        for _ in range(3):
            context.decode(pykv.Batch(range(100)))
    shown = dump(tmp_path / "t")
    assert "run here, without a window: 300 of 512 cells used" in shown
    assert "run here, with a window: 256 of 256 cells used" in shown
    shown = dump(tmp_path / "t", "--swa-full")
    assert "second, with a window: 300 of 512 cells used" in shown
    assert "swa_full" in shown


def test_dump_shows_cells_and_states(tmp_path: Path) -> None:
    with open_stand_in(MIXED, n_ctx=512, n_seq_max=2) as context, context.trace(tmp_path / "t"):
        context.decode(pykv.Batch(range(6)))
        context.memory.seq_cp(0, 1)
    shown = dump(tmp_path / "t")
    assert "run here: 6 of 512 cells used" in shown
    assert "run here, states: 1 of 2 cells used" in shown
    assert "0:5{0,1}" in shown
    shown = dump(tmp_path / "t", "--streams")
    assert "second, stream 1: 6 of 256 cells used" in shown


def test_a_layer_without_attention_has_no_heads() -> None:
    """Asked for, a model of states alone could not be recorded."""
    state = LayerSpec.recurrent(StateSpec(8, 16))
    assert StandInShape((0, 2), 4096, spec_record(MemorySpec((state, LAYER)))).n_head_by_layer == (0, 2)
    with pytest.raises(ParamError, match="layer 1: 1 KV heads cannot serve 0 query heads"):
        StandInShape((0, 0), 4096, spec_record(MemorySpec((state, LAYER))))
    assert SHAPE.spec == spec_record(SPEC)
