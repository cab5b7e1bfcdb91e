"""Several position axes: what cells keep of a picture, what its patches see, and that nothing shifts (case A19)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.tiny import qwen2vl
from support.tiny.model import TinyFile
from support.twin import snapshot

import pykv
from pykv.errors import BatchError, NoSlotError, ShiftUnsupported
from pykv.runtime import Context

N_EMBD = qwen2vl.MODELS["qwen2vl-2l-wide"].n_embd
PATCHES = np.random.default_rng(4).standard_normal((6, N_EMBD)).astype(np.float32)
N_COLS = 3


@pytest.fixture
def context(write_tiny: Callable[[TinyFile], Path]) -> Iterator[Context]:
    with (
        pykv.Model.load(write_tiny(qwen2vl.MODELS["qwen2vl-2l-wide"])) as model,
        model.context(n_ctx=256, n_threads=1, flash_attn=False, type_k="f32", type_v="f32") as one,
    ):
        yield one


def picture(at: int, rows: np.ndarray = PATCHES) -> pykv.Batch:
    """Return two rows of three patches at one time, rows and columns counted from there on."""
    y, x = np.divmod(np.arange(6), N_COLS)
    return pykv.Batch(None, [np.full(6, at), at + y, at + x, 0 * x], embd=rows, logits="all")


def test_cells_keep_columns_and_rows(context: Context) -> None:
    context.decode(pykv.Batch([11, 12]))
    context.decode(picture(2))
    context.decode(pykv.Batch([13], pos=[5]))
    cells = context.memory.streams.cells[0]
    assert cells.pos[:9].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5]
    assert cells.ext_x[:9].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5]
    assert cells.ext_y[:9].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5]
    assert cells.ext_tok[:9].tolist() == [11, 12, -1, -1, -1, -1, -1, -1, 13]
    context.memory.check()


@pytest.mark.parametrize("changed", range(6))
def test_a_patch_sees_those_above_and_to_the_left_in_its_row(context: Context, changed: int) -> None:
    """In reading order: another patch changes its own row of logits and all that follow, and none before."""
    context.decode(pykv.Batch([11, 12]))
    context.decode(picture(2))
    before = context.logits.copy()
    context.memory.seq_rm(0, 2, -1)
    other = PATCHES.copy()
    other[changed] = -other[changed]
    context.decode(picture(2, other))
    same = [np.array_equal(*rows) for rows in zip(before, context.logits, strict=True)]
    assert same == [True] * changed + [False] * (6 - changed)


@pytest.mark.parametrize("verb", ["seq_add", "seq_div"])
def test_sliding_a_context_of_several_axes_gave_bad_text(context: Context, verb: str) -> None:
    """Both verbs are refused, nothing changes, and decoding goes on (case A19)."""
    context.decode(pykv.Batch(range(6)))
    before = snapshot(context)
    support = context.memory.can_shift()
    assert not support
    assert support.reason == "multi_dim_positions"
    args = (0, 2, 6, -2) if verb == "seq_add" else (0, 0, 6, 2)
    with pytest.raises(ShiftUnsupported, match="4 positions"):
        getattr(context.memory, verb)(*args)
    assert snapshot(context)[0] == before[0]
    assert snapshot(context)[1] == before[1]
    context.decode(pykv.Batch([6], pos=[6]))
    assert context.memory.pos_max(0) == 6
    context.memory.check()


def test_a_full_context_ends_cleanly(context: Context) -> None:
    context.decode(pykv.Batch([5] * 256))
    before = snapshot(context)
    with pytest.raises(NoSlotError):
        context.decode(pykv.Batch([6], pos=[256]))
    assert snapshot(context) == before


def test_text_may_leave_out_positions_and_never_goes_back(context: Context) -> None:
    context.decode(picture(0))
    context.decode(pykv.Batch([1], pos=[3]))
    with pytest.raises(BatchError, match="last stored position is 3"):
        context.decode(pykv.Batch([1], pos=[3]))
    context.decode(picture(3))
    with pytest.raises(BatchError, match="last stored position is 3"):
        context.decode(picture(2))
    assert context.memory.pos_max(0) == 3


@pytest.mark.parametrize(
    ("embd", "pos", "words"),
    [
        (np.zeros((2, N_EMBD + 1)), np.zeros((4, 2)), "embd"),
        (np.zeros((2, N_EMBD)), np.zeros((3, 2)), "pos"),
        (np.full((2, N_EMBD), np.nan), np.zeros((4, 2)), "embd"),
        (np.zeros((2, N_EMBD)), -np.ones((4, 2)), "pos"),
    ],
    ids=["width", "axes", "nan", "negative"],
)
def test_what_is_no_picture_is_refused(context: Context, embd: np.ndarray, pos: np.ndarray, words: str) -> None:
    context.decode(pykv.Batch([1, 2]))
    before = snapshot(context)
    with pytest.raises(BatchError, match=words):
        context.decode(pykv.Batch(None, pos.astype(np.int32), embd=embd))
    assert snapshot(context) == before
