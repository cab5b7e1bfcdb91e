"""Taking tensors out of a file, and giving them their data on one device or another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.nmse import nmse
from support.rewrite_gguf import rewrite
from support.tiny_gguf import TinyModel
from support.twin import EXACT, TOKENS, Twin

import pykv
from pykv.errors import AllocError, GGUFError
from pykv.ggml import Arena, Buffer, BufferType, Device, cpu_device
from pykv.models import Placement, uploading

TINY = TinyModel(seed=60)
UNTIED = TinyModel(seed=61, is_tied=False, has_bias=True)


def copying(device: Device | None = None) -> Device:
    """Return the CPU as a device that cannot use mapped files in place."""
    return replace(device or cpu_device(), can_wrap_host_memory=False)


def damaged(path: Path, name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> Path:
    """Write a model with one tensor changed, or left out for None."""
    return rewrite(TINY, path / "a.gguf", {name: change(TINY.weights()[name])})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("blk.1.ffn_up.weight", lambda x: None, r"'blk\.1\.ffn_up\.weight' \[128, 160\] is missing"),
        ("output_norm.weight", lambda x: None, r"'output_norm\.weight' \[128\] is missing"),
        (
            "blk.0.attn_q.weight",
            lambda x: x[:-1],
            r"'blk\.0\.attn_q\.weight' is \[128, 127, 1, 1\], expected \[128, 128",
        ),
        ("blk.0.attn_k.weight", lambda x: np.ascontiguousarray(x.T), r"is \[64, 128, 1, 1\], expected \[128, 64"),
        ("blk.0.attn_norm.weight", lambda x: x.astype(np.float16), "is f16, expected f32"),
        ("blk.0.ffn_down.weight", lambda x: x.astype(np.float64), "is f64, expected a float or a quantised type"),
        ("blk.0.attn_v.weight", lambda x: x.astype(np.int32), "is i32, expected a float or a quantised type"),
    ],
)
def test_a_tensor_that_is_wrong_is_named(tmp_path: Path, name: str, change: Callable, message: str) -> None:
    with pytest.raises(GGUFError, match=message):
        pykv.Model.load(damaged(tmp_path, name, change))


@pytest.mark.parametrize("alignment", [1, 2])
def test_a_file_of_unaligned_tensors_ended_in_an_error_about_buffers(tmp_path: Path, alignment: int) -> None:
    path = rewrite(TINY, tmp_path / "a.gguf", {}, alignment=alignment)
    with pytest.raises(GGUFError, match=f"general.alignment={alignment} must be a multiple of 4"):
        pykv.Model.load(path)


@pytest.mark.parametrize("alignment", [4, 8, 4096])
def test_any_other_alignment_is_taken(tmp_path: Path, alignment: int) -> None:
    path = rewrite(TINY, tmp_path / "a.gguf", {}, alignment=alignment)
    with pykv.Model.load(path) as model, model.context(n_ctx=256, **EXACT) as context:
        Twin(context, TINY).decode(3)


def test_half_precision_weights_are_taken(tmp_path: Path) -> None:
    """A matrix may have another type than its neighbours."""
    path = damaged(tmp_path, "blk.0.attn_q.weight", lambda x: x.astype(np.float16))
    with pykv.Model.load(path) as model, model.context(n_ctx=256, **EXACT) as context:
        Twin(context, TINY, most=1e-5).decode(20)


def logits(model: pykv.Model) -> np.ndarray:
    with model.context(n_ctx=256, **EXACT) as context:
        context.decode(pykv.Batch(TOKENS[:20], logits="all"))
        return context.logits


@pytest.mark.parametrize("tiny", [TINY, UNTIED], ids=["tied", "untied"])
def test_uploaded_weights_give_the_rows_of_mapped_ones(
    write_tiny: Callable[[TinyModel], Path], tiny: TinyModel
) -> None:
    path, told = write_tiny(tiny), []
    with pykv.Model.load(path) as mapped:
        expected = logits(mapped)
    uploaded = pykv.Model.load(path, devices=[copying()], progress=lambda done, total: told.append((done, total)))
    with uploaded:
        assert np.array_equal(logits(uploaded), expected)
    done, totals = [d for d, _ in told], {t for _, t in told}
    assert done == sorted(done)
    assert len(totals) == 1
    assert done[-1] == totals.pop()
    assert len(told) >= len(tiny.weights())


@pytest.mark.parametrize("is_staged", [False, True])
def test_weights_sent_in_pieces_are_those_of_the_file(
    is_staged: bool, write_tiny: Callable[[TinyModel], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that end amid rows and pages, by way of a device's host memory or straight from the file."""
    path, told = write_tiny(UNTIED), []
    host = cpu_device().buffer_type if is_staged else None
    monkeypatch.setattr(Device, "host_buffer_type", property(lambda device: host))
    monkeypatch.setattr(uploading, "PIECE", 10_001)
    with pykv.Model.load(path) as mapped:
        expected = logits(mapped)
    with pykv.Model.load(path, copying(), progress=lambda done, total: told.append(done)) as uploaded:
        assert np.array_equal(logits(uploaded), expected)
    assert max(np.diff([0, *told[:-1]])) == 10_001  # the last is what stays mapped


def test_host_memory_that_cannot_be_had_is_done_without(
    write_tiny: Callable[[TinyModel], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = Buffer.allocate

    def scarce(arena: Arena, kind: BufferType, purpose: str) -> Buffer:
        if "staging" in purpose:
            raise AllocError(purpose)
        return allocate(arena, kind, purpose)

    monkeypatch.setattr(Device, "host_buffer_type", property(lambda device: cpu_device().buffer_type))
    monkeypatch.setattr(Buffer, "allocate", scarce)
    path = write_tiny(UNTIED)
    with pykv.Model.load(path, copying()) as uploaded, pykv.Model.load(path) as mapped:
        assert np.array_equal(logits(uploaded), logits(mapped))


def test_an_upload_holds_no_second_copy_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is mapped grows by a piece or two, though single tensors are as large as ten."""
    path = TinyModel(seed=63, n_layer=1, n_ff=20_000).write(tmp_path / "a.gguf")
    monkeypatch.setattr(uploading, "PIECE", 2**20)
    held = []
    with pykv.Model.load(path, copying(), progress=lambda done, total: held.append((done, mapped_bytes()))):
        pass
    assert held[-1][0] > 25 * 2**20
    assert max(n for _, n in held) - held[0][1] < 4 * 2**20


def mapped_bytes() -> int:
    """Return the bytes of files that are in this process's memory."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) * 1024


def test_progress_of_mapped_weights_is_told_once(write_tiny: Callable[[TinyModel], Path]) -> None:
    told = []
    with pykv.Model.load(write_tiny(TINY), progress=lambda done, total: told.append((done, total))):
        (last,) = told
    assert last[0] == last[1] > 0


def test_a_progress_callback_that_raises_ends_the_load(write_tiny: Callable[[TinyModel], Path]) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pykv.Model.load(write_tiny(TINY), devices=[copying()], progress=stop)


def test_layers_on_several_devices_compute_the_same(write_tiny: Callable[[TinyModel], Path]) -> None:
    """The input on the CPU, two layers on one device, one on the next, the output behind it."""
    path = write_tiny(TinyModel(seed=62, n_layer=3))
    first, second = copying(), replace(copying(), name="CPU-2")
    with pykv.Model.load(path) as one, pykv.Model.load(path, devices=[first, second]) as two:
        assert two.placement == Placement(cpu_device(), (first, first, second), second)
        assert two.placement.devices == (first, second, cpu_device())
        assert nmse(logits(two), logits(one)) == 0
