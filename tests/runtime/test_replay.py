"""A replay of a sound trace differs nowhere, whatever changes; and it names the first thing that is wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stand_in import SHAPE, SPEC, open_stand_in
from support.tiny_gguf import TinyModel

import pykv
from pykv.cells import SwaType, Window
from pykv.errors import ComputeCancelled, ParamError, PykvError, TraceError
from pykv.memory import KVCache, kv_graph
from pykv.models.spec_record import spec_record
from pykv.runtime import Context
from pykv.runtime.replay import Changes, Report, replay, stored_rows
from pykv.runtime.replay.difference import differ_in_rows
from pykv.runtime.replay.distance import row_nmse
from pykv.runtime.trace.file import read_trace
from pykv.runtime.trace.fingerprint import Fingerprint

SEVERAL = {"n_seq_max": 3, "n_ctx": 512, "n_ubatch": 16}


def program(context: Context) -> None:
    """Prompts, forks, cuts, moves, refusals, and decodes in between; the same in one stream and in several."""
    memory = context.memory
    context.decode(pykv.Batch(range(30), logits="all"))
    memory.seq_cp(0, 1)
    context.decode(pykv.Batch([40, 41, 42], seq_id=[0, 1, 1], logits="all"))
    memory.seq_rm(0, 5, 10)
    memory.seq_add(0, 10, -1, -5)
    context.decode(pykv.Batch([50], seq_id=0))
    for batch in (pykv.Batch([7], pos=[90]), pykv.Batch([300_000]), pykv.Batch(range(200), seq_id=9)):
        with pytest.raises(PykvError):
            context.decode(batch)
    with pytest.raises(PykvError):
        memory.seq_rm(9)
    memory.seq_div(1, 0, -1, 2)
    context.decode(pykv.Batch(range(60, 80), seq_id=[2] * 10 + [1] * 10, logits="none"))
    memory.seq_rm(2)
    for token in range(5):
        context.decode(pykv.Batch([token], seq_id=0))


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """The program on a stand-in."""
    path = tmp_path_factory.mktemp("replay") / "trace.jsonl"
    with open_stand_in(**SEVERAL) as context, context.trace(path):
        program(context)
    return path


@pytest.fixture(scope="module")
def tiny(write_tiny: Callable[[TinyModel], Path]) -> Path:
    return write_tiny(TinyModel(head_dim=64, n_embd=256))


@pytest.fixture(scope="module")
def tiny_trace(tiny: Path, tmp_path_factory) -> Path:
    """The program on a real model."""
    path = tmp_path_factory.mktemp("replay") / "tiny.jsonl"
    with (
        pykv.Model.load(tiny) as model,
        model.context(n_threads=1, flash_attn=True, **SEVERAL) as context,
        context.trace(path),
    ):
        program(context)
    return path


def run(path: Path, changes: Changes | None = None, **options: Any) -> Report:
    return replay(read_trace(path), changes, n_threads=1, **options)


def test_recording_is_met_again(path):
    done = []
    report = run(path, on_step=done.append)
    assert report.difference is None
    assert report.is_recording
    assert report.compared == ["outcomes", "positions", "cells", "tokens", "logits"]
    assert report.left_out == {"K and V": "a trace does not hold them"}
    assert done == list(range(1, report.n_steps + 1))
    assert report.n_done == report.n_steps == 18
    # sequence 0 has 31 - 5 + 1 + 5 cells, sequence 1 has 32 + 10; they still share position 0
    assert [cells.n_used for cells in report.cells[0].values()] == [32 + 42 - 1]


CHANGES = {
    "ubatch": Changes(n_ubatch=3),
    "context": Changes(n_ctx=1024),
    "plain": Changes(flash_attn=False),
    "streams": Changes(kv_unified=False, n_ctx=1536),
    "device": Changes(device="cpu"),
    **{kind: Changes(type_k=kind, type_v=kind) for kind in ("f32", "bf16", "q8_0", "q5_1", "q4_0", "iq4_nl")},
    "all": Changes("CPU", None, 768, 7, "q8_0", "f16", False, False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_sound_trace_differs_nowhere(path, name):
    report = run(path, CHANGES[name])
    assert report.difference is None
    assert (report.n_done, report.is_recording, len(report.cells)) == (report.n_steps, False, 2)
    assert (report.left_out, list(report.distances.farthest)) == ({}, ["K", "V", "logits"])


@pytest.mark.parametrize("name", ["ubatch", "plain", "streams", "q8_0"])
def test_a_sound_trace_differs_nowhere_in_a_model(tiny_trace, tiny, name):
    assert run(tiny_trace, CHANGES[name], model=tiny).difference is None


def test_a_model_meets_its_recorded_logits(tiny_trace, tiny):
    report = run(tiny_trace, model=tiny, tolerance=0)
    assert report.difference is None
    assert "logits" in report.compared
    assert report.first == report.second


def test_a_stand_in_computes_for_a_model_that_is_not_at_hand(tiny_trace):
    report = run(tiny_trace)
    assert report.difference is None
    assert report.left_out["logits"] == "what computes here is not what was recorded"
    assert "tokens" in report.compared
    assert (report.first["model"], report.second["model"][-5:]) == ("stand-in", ".gguf")


def test_another_model_is_another_computation(tiny_trace, tiny, write_tiny):
    other = write_tiny(TinyModel(head_dim=64, n_embd=256, seed=5))
    report = run(tiny_trace, Changes(model=other), model=tiny)
    assert report.difference is not None
    assert (report.difference.step, report.difference.kind, report.difference.where["layer"]) == (1, "K", 0)
    assert report.difference.nmse > 0.1


def test_trace_without_tokens_shows_what_positions_do(tmp_path):
    with open_stand_in(**SEVERAL) as context, context.trace(tmp_path / "t", tokens=False):
        program(context)
    report = run(tmp_path / "t")
    assert report.difference is None
    assert report.compared == ["outcomes", "positions", "cells"]
    assert run(tmp_path / "t", CHANGES["streams"]).difference is None


def test_the_recorded_model_was_said_to_be_another_where_tokens_were_private(tiny, tmp_path):
    with (
        pykv.Model.load(tiny) as model,
        model.context(n_threads=1, n_ctx=256, flash_attn=True) as context,
        context.trace(tmp_path / "t", tokens=False),
    ):
        context.decode(pykv.Batch([1, 2, 3]))
    report = run(tmp_path / "t", model=tiny)
    assert report.left_out["logits"] == report.left_out["tokens"] == "the trace holds no token ids"


def test_half_a_batch_that_was_cancelled_is_run_half(tmp_path):
    with open_stand_in(n_ubatch=4) as context, context.trace(tmp_path / "t"):
        context.decode(pykv.Batch([1, 2]))
        for n_ubatches in (0, 2):
            _cancel_after(context, n_ubatches)
            with pytest.raises(ComputeCancelled):
                context.decode(pykv.Batch(range(12)))
            del context._step
        context.decode(pykv.Batch([8]))
        assert context.memory.pos_max(0) == 10
    assert run(tmp_path / "t").difference is None
    assert run(tmp_path / "t", Changes(n_ubatch=5)).difference is None


def _cancel_after(context: Context, n_ubatches: int) -> None:
    step, n_done = context._step, [0]

    def counting(*args: Any) -> None:
        if n_done[0] == n_ubatches:
            context._cancel.set()
        step(*args)
        n_done[0] += 1

    context._step = counting


@pytest.mark.parametrize("seed", range(4))
def test_random_programs_differ_nowhere(tmp_path, seed):
    """Against keys of another type, in other ubatches, in a larger cache."""
    rng = random.Random(seed)
    with open_stand_in(**SEVERAL) as context, context.trace(tmp_path / "t"):
        for _ in range(25):
            _random_step(context, rng)
    report = run(tmp_path / "t", Changes(n_ctx=768, n_ubatch=5, type_k="f32"))
    assert report.difference is None


def _random_step(context: Context, rng: random.Random) -> None:
    memory, seq, p0 = context.memory, rng.randrange(3), rng.randrange(20)
    match rng.randrange(8):
        case 0:
            memory.seq_rm(seq, p0, p0 + rng.randrange(1, 9))
        case 1:
            memory.seq_cp(seq, (seq + 1) % 3)
        case 2:
            memory.seq_add(seq, p0, -1, rng.randrange(-3, 5))
        case 3:
            memory.seq_div(seq, p0, -1, 2)
        case _:
            n = rng.randrange(1, 20)
            context.decode(pykv.Batch([rng.randrange(251) for _ in range(n)], seq_id=seq))


@pytest.mark.parametrize("kind", [SwaType.STANDARD, SwaType.CHUNKED])
def test_what_a_window_leaves_over_is_no_difference(tmp_path, kind):
    """Cells behind the window are taken anew when the search comes to them, which depends on the size."""
    spec = replace(SPEC, window=Window(50, kind))
    shape = replace(SHAPE, spec=spec_record(spec))
    with open_stand_in(shape, n_batch=60) as context, context.trace(tmp_path / "t"):
        for _ in range(8):
            context.decode(pykv.Batch(range(60)))
            context.decode(pykv.Batch([1]))
        assert context.memory.pos_max(0) == 487
    assert run(tmp_path / "t").difference is None
    report = run(tmp_path / "t", Changes(n_ctx=512))
    assert report.difference is None
    assert report.cells[0][""].n_used < report.cells[1][""].n_used


def test_a_batch_that_was_refused_once_and_fits_now(path, tmp_path):
    """A trace of a fault outlives the fault: two sides agree where the recording says something else."""
    lines = path.read_text().splitlines()
    record = json.loads(lines[1]) | {"pos": None, "outcome": {"error": "NoSlotError"}}
    (tmp_path / "t").write_text("\n".join([lines[0], json.dumps(record), *lines[2:]]))
    assert run(tmp_path / "t", Changes(n_ctx=768)).difference is None
    assert run(tmp_path / "t").difference.kind == "outcome"


# what is wrong is found


def altered(path: Path, tmp_path: Path, number: int, change: Callable[[dict], None]) -> Report:
    """Replay the trace with its step `number` changed."""
    lines = path.read_text().splitlines()
    record = json.loads(lines[number])
    change(record)
    lines[number] = json.dumps(record)
    (tmp_path / "altered").write_text("\n".join(lines) + "\n")
    return run(tmp_path / "altered")


def test_outcome_that_is_another(path, tmp_path):
    report = altered(path, tmp_path, 7, lambda step: step.update(outcome="ok"))
    found = report.difference
    assert (found.step, found.line, found.kind, found.second) == (7, 8, "outcome", "ok")
    assert found.first.startswith("BatchError: sequence 0: the last stored position is 26")
    assert (found.did, report.n_done) == ("decode of 1 token of sequence 0", 7)


def test_a_message_that_is_another_is_no_difference(path, tmp_path):
    said = {"error": "BatchError", "message": "in other words"}
    assert altered(path, tmp_path, 7, lambda step: step.update(outcome=said)).difference is None


def test_positions_that_are_others(path, tmp_path):
    found = altered(path, tmp_path, 3, lambda step: step["seen"].update({"1": [0, 30]})).difference
    assert (found.step, found.kind, found.where) == (3, "positions", {"seq": 1})
    assert (found.first, found.second) == ("0..31", "0..30")


def test_logits_that_are_others(path, tmp_path):
    found = altered(path, tmp_path, 3, lambda step: step["rows"][1].__setitem__(4, 99.0)).difference
    assert (found.step, found.kind, found.where) == (3, "logits", {"row": 1, "seq": 1, "pos": 30})
    assert found.nmse > found.tolerance
    assert str(found).startswith("logits, row 1, sequence 1, position 30: top-1 ")


def test_one_row_of_logits_too_many(path, tmp_path):
    found = altered(path, tmp_path, 3, lambda step: step["rows"].pop()).difference
    assert (found.kind, found.first, found.second) == ("logits", "3 rows", "2 rows")


def holed(path: Path, tmp_path: Path) -> Report:
    """Replay a trace in which a cell in the middle was not removed when it was recorded."""
    lines = path.read_text().splitlines()
    kept = [i for i, line in enumerate(lines) if json.loads(line).get("do") != "seq_rm"]
    (tmp_path / "holed").write_text("\n".join(lines[i] for i in kept) + "\n")
    return run(tmp_path / "holed")


@pytest.fixture(scope="module")
def cut_path(tmp_path_factory) -> Path:
    """15 tokens, one of them in the middle is removed, and one more."""
    path = tmp_path_factory.mktemp("replay") / "cut.jsonl"
    with open_stand_in() as context, context.trace(path):
        context.decode(pykv.Batch(range(15)))
        context.memory.seq_rm(0, 7, 8)
        context.decode(pykv.Batch([40], logits="none"))
        context.decode(pykv.Batch([41]))
    return path


def test_one_cell_too_many_was_no_difference(cut_path, tmp_path):
    """Neither the ends of the sequence nor, within what was tolerated, the logits showed it."""
    found = holed(cut_path, tmp_path).difference
    assert (found.step, found.kind, found.where) == (2, "cells", {"seq": 0})
    assert (found.first, found.second) == ("16 cells", "15 cells")


def test_as_many_cells_at_other_positions(cut_path, tmp_path):
    report = altered(cut_path, tmp_path, 2, lambda step: step.update(args=[0, 6, 7]))
    found = report.difference
    assert (found.step, found.kind) == (2, "cells")
    assert (found.first, found.second) == ("14 cells", "14 cells, at other positions")


def test_one_visible_token_too_many_shows_in_the_logits(cut_path, tmp_path, monkeypatch):
    """Were the cells not compared, the tolerance of a recording would still tell."""
    monkeypatch.setattr("pykv.runtime.replay.lockstep.differ_in_held", lambda *_: None)
    found = holed(cut_path, tmp_path).difference
    assert (found.step, found.kind) == (3, "logits")
    assert found.nmse > 10 * found.tolerance


def test_other_tokens_in_the_same_places_were_no_difference(cut_path, tmp_path):
    found = altered(cut_path, tmp_path, 3, lambda step: step.update(tokens=[39])).difference
    assert (found.step, found.kind, found.where) == (3, "tokens", {"seq": 0})


def test_how_close_it_was_did_not_show(path):
    report = run(path, Changes(type_k="q4_0", type_v="q4_0"))
    assert report.difference is None
    distances = report.distances
    assert distances.n_rows == sum(len(step.rows) for step in read_trace(path).steps if hasattr(step, "rows")) == 39
    for kind, names in (("K", ["step", "layer", "seq", "pos"]), ("logits", ["step", "row", "seq", "pos"])):
        one = distances.farthest[kind]
        assert 0 < one.nmse <= one.tolerance
        assert list(one.where) == names
    assert run(path).distances.farthest["logits"].nmse == 0


def test_another_likeliest_token_within_tolerance_did_not_show(path, tmp_path):
    report = altered(path, tmp_path, 3, lambda step: step["rows"][1].__setitem__(0, 99))
    assert (report.difference, report.distances.n_rows, report.distances.n_top_differ) == (None, 39, 1)


def test_a_smaller_context_made_smaller_batches(path):
    """It is rounded up before it limits the batch, and the report says so."""
    with_batch = run(path, Changes(n_ctx=300))
    assert with_batch.difference is None
    assert (with_batch.second["n_ctx"], with_batch.second["n_batch"]) == (512, 512)
    assert with_batch.notes == [
        "n_ctx: 300 is rounded up to 512",
        "n_ctx: both sides have 512, so that this changes nothing",
    ]
    assert run(path, Changes(n_ctx=10, kv_unified=False)).second["n_ctx"] == 3 * 256


@pytest.mark.parametrize("changes", [Changes(type_k="f16"), Changes(device="cpu"), Changes(flash_attn=True)])
def test_a_change_that_changes_nothing_was_passed_over(path, changes):
    (note,) = run(path, changes).notes
    assert note.endswith("so that this changes nothing")


@pytest.mark.parametrize("unified", [True, False])
def test_seq_keep_removed_others_in_streams_than_in_one_pool(tmp_path, unified):
    with open_stand_in(n_seq_max=3, n_ctx=768, kv_unified=unified) as context, context.trace(tmp_path / "t"):
        context.decode(pykv.Batch(range(30), seq_id=[0, 1, 2] * 10))
        context.memory.seq_keep(1)
        left = (0, 1, 2) if not unified else (1,)
        assert [seq for seq in range(3) if context.memory.pos_max(seq) >= 0] == list(left)
        context.decode(pykv.Batch(range(6), seq_id=[0, 1, 2] * 2))
        with pytest.raises(PykvError):
            context.memory.seq_keep(3)
    assert run(tmp_path / "t").difference is None
    report = run(tmp_path / "t", Changes(kv_unified=not unified))
    assert (report.difference, report.n_done) == (None, 4)


def test_moves_of_shared_cells_take_siblings_along_in_the_reference(path):
    found = run(path, Changes(reference_moves=True)).difference
    assert (found.step, found.did, found.kind, found.where) == (5, "seq_add(0, 10, -1, -5)", "cells", {"seq": 1})
    assert found.first == "32 cells, alone with 25, 26, 27, 28, 29"
    assert found.second == "32 cells, alone with 5, 6, 7, 8, 9"


def test_keys_that_are_turned_the_wrong_way(tmp_path):
    """The reference turns the keys of a divided range by the opposite angle; seen when they are read next."""
    with open_stand_in() as context, context.trace(tmp_path / "t"):
        context.decode(pykv.Batch(range(20)))
        context.memory.seq_div(0, 0, -1, 2)
        context.decode(pykv.Batch([1]))
    found = run(tmp_path / "t", Changes(reference_moves=True)).difference
    assert (found.step, found.kind, found.where) == (3, "K", {"layer": 0, "seq": 0, "pos": 0})
    assert found.nmse > 0.05
    # position 0 keeps the key that was there, and gets that of position 1
    assert found.first != found.second


def test_what_shows_only_at_the_end(tmp_path):
    with open_stand_in() as context, context.trace(tmp_path / "t"):
        context.decode(pykv.Batch(range(20)))
        context.memory.seq_div(0, 0, -1, 2)
    found = run(tmp_path / "t", Changes(reference_moves=True)).difference
    assert (found.step, found.line, found.did, found.kind) == (3, 0, "the end", "K")


def only_in(n_cells: int, monkeypatch: pytest.MonkeyPatch, spoil: Callable[..., None]) -> None:
    """Spoil the mask of caches of one size."""
    fill = kv_graph.fill_mask

    def spoiled(out: Any, streams: Any, slot: Any, ubatch: Any, rule: Any) -> None:
        fill(out, streams, slot, ubatch, rule)
        if streams.cells[0].n == n_cells:
            spoil(out)

    monkeypatch.setattr(kv_graph, "fill_mask", spoiled)


def test_a_key_that_is_hidden_wrongly(path, monkeypatch):
    """What the query saw goes to the next layer, whose keys show it first."""
    only_in(768, monkeypatch, lambda out: out[..., 3].fill(-np.inf))
    found = run(path, Changes(n_ctx=768)).difference
    assert (found.step, found.kind, found.where["layer"]) == (1, "K", 1)
    assert found.where["pos"] == 3  # the first query that would have seen it


def test_values_in_the_wrong_places(path, monkeypatch):
    rows = kv_graph.row_indices
    monkeypatch.setattr(
        kv_graph,
        "row_indices",
        lambda slot, n: rows(slot, n)[::-1] if n == 768 and slot.n_tokens > 1 else rows(slot, n),
    )
    found = run(path, Changes(n_ctx=768)).difference
    assert (found.step, found.kind, found.where) == (1, "K", {"layer": 0, "seq": 0, "pos": 0})


def test_a_sequence_that_lost_a_cell(path, monkeypatch):
    """A hole in the middle, which the ends do not show."""
    rm = KVCache.seq_rm

    def too_much(self: KVCache, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        return rm(self, seq_id, p0, p1 + 1 if self.n_cells == 768 and p1 > 0 else p1)

    monkeypatch.setattr(KVCache, "seq_rm", too_much)
    found = run(path, Changes(n_ctx=768)).difference
    assert (found.step, found.did, found.kind, found.where) == (4, "seq_rm(0, 5, 10)", "cells", {"seq": 0})
    assert (found.first, found.second) == ("26 cells, alone with 10", "25 cells")


def test_a_long_sequence_is_compared_now_and_then_and_still_names_the_step(tmp_path, monkeypatch):
    """Of 300 tokens a few new ones are not worth a look; found later, a row tells which decode wrote it."""
    with open_stand_in(n_ctx=512) as context, context.trace(tmp_path / "t"):
        context.decode(pykv.Batch(range(250)))
        context.decode(pykv.Batch(range(50)))
        for token in range(30):
            context.decode(pykv.Batch([token], logits="none"))
    reads = []
    monkeypatch.setattr(stored_rows, "differ_in_rows", lambda *args: (reads.append(args[2]), differ_in_rows(*args))[1])
    assert run(tmp_path / "t", Changes(n_ctx=768)).difference is None
    assert len([seqs for seqs in reads if seqs]) == 1 + 1 + 3  # the prompts, 10 and 10 tokens, and the rest
    rows = kv_graph.row_indices
    # the 7th of the tokens is stored where nobody looks for it
    monkeypatch.setattr(
        kv_graph, "row_indices", lambda slot, n: rows(slot, n) + 100 * (n == 768 and rows(slot, n)[0] == 306)
    )
    report = run(tmp_path / "t", Changes(n_ctx=768))
    found = report.difference
    assert (found.step, found.line, found.kind, found.where) == (9, 10, "K", {"layer": 0, "seq": 0, "pos": 306})
    assert report.n_done == 12


# what cannot be run


def test_a_trace_without_steps_differed_nowhere(tmp_path):
    with open_stand_in() as context:
        context.trace(tmp_path / "t")
    with pytest.raises(TraceError, match="the trace holds no step"):
        run(tmp_path / "t")


def test_quantised_v_of_a_trace_without_flash_attention_did_not_say_what_to_do(tmp_path):
    with open_stand_in(flash_attn=False) as context, context.trace(tmp_path / "t"):
        context.decode(pykv.Batch([1]))
    with pytest.raises(ParamError, match=r"type_v='q8_0' needs flash attention.*give flash_attn=True"):
        run(tmp_path / "t", Changes(type_v="q8_0"))
    assert run(tmp_path / "t", Changes(type_v="q8_0", flash_attn=True)).difference is None


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (Changes(device="CUDA9"), {}, "no device 'CUDA9'"),
        (Changes(type_k="q7"), {}, "type_k='q7'"),
        (Changes(type_v="q8_0", flash_attn=False), {}, "type_v='q8_0' needs flash attention"),
        (Changes(n_ctx=-1), {}, "n_ctx=-1"),
        (Changes(model="x.gguf"), {}, "model=None leaves nothing that 'x.gguf' could be compared with"),
        (None, {"tolerance": -1.0}, "tolerance=-1.0"),
        (None, {"tolerance": "much"}, "tolerance='much'"),
    ],
)
def test_what_cannot_be_changed(path, changes, options, message):
    with pytest.raises(ParamError, match=message):
        run(path, changes, **options)


# distances


def test_nmse_of_rows_is_that_of_each_row():
    one = np.array([[3, 4], [1, 0], [0, 0]], np.float32)
    other = np.array([[3, 5], [1, 0], [0, 0]], np.float32)
    assert row_nmse(one, other).tolist() == [1 / 34, 0, 0]


def test_a_row_near_zero_is_measured_by_the_others():
    one = np.array([[10, 0], [0.001, 0]], np.float32)
    other = np.array([[10, 0], [0, 0]], np.float32)
    assert row_nmse(one, other)[1] == pytest.approx(1e-6 / 0.5, rel=1e-5)  # a hundredth of the mean size, 50


@pytest.mark.parametrize(
    ("a", "b", "is_equal"),
    [(np.nan, np.nan, True), (np.inf, np.inf, True), (np.nan, 1, False), (np.inf, -np.inf, False), (1, np.inf, False)],
)
def test_what_is_no_number_equals_only_its_like(a, b, is_equal):
    one, other = np.array([[a, 1]], np.float32), np.array([[b, 1]], np.float32)
    assert row_nmse(one, other)[0] == (0 if is_equal else np.inf)


def test_fingerprint_of_what_is_no_number_survives_json():
    row = np.array([np.nan, 1.0, np.inf] * 5, np.float32)
    record = json.loads(json.dumps(Fingerprint.of(row).record(), allow_nan=False))
    assert len(Fingerprint.from_record(record).values) == 10
