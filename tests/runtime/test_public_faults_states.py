"""Faults of saved states that users of such systems reported, on contexts of every kind; named after symptoms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.saved_contexts import KINDS, PARAMS, REORDERED, TOKENS, held, next_row, told
from support.state_io import rows_of
from support.tiny.model import TinyFile
from support.tiny_gguf import TinyModel
from support.verb_setting import MODELS

import pykv
from pykv.errors import NoSlotError, PykvError, StateError
from pykv.state_format import parse_state, read_container, read_trailer, side_car

N_SHARED = 128

pytestmark = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def model(kind: str, write_tiny: Callable[[TinyFile | TinyModel], Path]) -> Iterator[pykv.Model]:
    with pykv.Model.load(write_tiny(MODELS[KINDS[kind]])) as loaded:
        yield loaded


# case A11, ggml-org/llama.cpp PR #17982


@pytest.mark.parametrize("flash_attn", [True, False])
def test_free_cells_that_do_not_lie_together_were_no_room(kind: str, model: pykv.Model, flash_attn: bool) -> None:
    with model.context(**PARAMS, kv_unified=True, flash_attn=flash_attn) as ctx:
        for first in range(0, N_SHARED, 8):
            told(ctx, [(first + i) % 40 for i in range(16)], [0, 1] * 8)
        kept, others = bytes(ctx.state_bytes(1)), bytes(ctx.state_bytes(0))
        ctx.memory.seq_rm(1)
        ctx.load_state_bytes(kept, 2)
        ctx.memory.check()
        assert bytes(ctx.state_bytes(0)) == others
        assert ctx.memory.pos_max(2) == N_SHARED - 1
        again = bytes(ctx.state_bytes(2))
        ctx.memory.seq_rm(2)
        ctx.load_state_bytes(again, 1)
        assert bytes(ctx.state_bytes(1)) == kept
        with model.context(**PARAMS, kv_unified=True, flash_attn=flash_attn) as larger:
            told(larger, [i % 40 for i in range(N_SHARED + 1)])
            blob = larger.state_bytes(0)
        before = held(ctx)
        if kind == "states":
            ctx.load_state_bytes(blob, 1)
            assert bytes(ctx.state_bytes(0)) == others
            return
        with pytest.raises(NoSlotError, match="129 cells of a state"):
            ctx.load_state_bytes(blob, 1)
        assert held(ctx) == before


# case A16, ggml-org/llama.cpp#27068


def spoiled(ctx: pykv.Context, blob: bytes, *, whole: bool) -> bytes:
    """Return a state with no numbers in the first rows, and an impossible type of the last ones."""
    layouts, start = ctx.memory.state_layouts(), read_container(blob).state.start
    sections, _ = parse_state(blob, start, layouts, whole=whole)
    rows = [one for section in sections for one in rows_of(section) if one.span.nbytes]
    out = bytearray(blob)
    first, last = rows[0].span, rows[-1].span
    out[first.start : first.start + first.nbytes] = b"\xff" * first.nbytes
    out[last.start - 12] = 77
    return bytes(out)


@pytest.mark.parametrize("whole", [False, True])
def test_rows_of_a_damaged_state_stayed_in_the_memory(kind: str, model: pykv.Model, whole: bool) -> None:
    with model.context(**PARAMS) as source, model.context(**PARAMS) as ctx, model.context(**PARAMS) as twin:
        told(source, TOKENS[::-1], 1)
        for one in (ctx, twin):
            told(one, TOKENS)
            told(one, TOKENS[:4], 1)
        seq_id = None if whole else 1
        good, before = bytes(source.state_bytes(seq_id)), held(ctx)
        with pytest.raises(StateError, match="type"):
            ctx.load_state_bytes(spoiled(ctx, good, whole=whole), seq_id)
        ctx.memory.check()
        assert held(ctx) == before
        for s in (0, 1):
            row = next_row(ctx, s)
            assert np.isfinite(row).all()
            np.testing.assert_array_equal(row, next_row(twin, s))
        ctx.load_state_bytes(good, seq_id)
        np.testing.assert_allclose(next_row(ctx, 1), next_row(source, 1), rtol=0, atol=REORDERED)


# case A17, ggml-org/llama.cpp#27439


def lengths(n: int) -> list[int]:
    """Return every length of the heads, some of the rows, and the last ones."""
    return sorted({*range(min(n, 70)), *range(0, n, max(1, n // 20)), n // 2, *range(n - 5, n)})


def test_states_that_were_cut_off_ended_the_process(kind: str, model: pykv.Model) -> None:
    with model.context(**PARAMS) as ctx:
        told(ctx, TOKENS[:4])
        told(ctx, TOKENS, 2)
        before = held(ctx)
        for seq_id in (None, 0):
            good = bytes(ctx.state_bytes(seq_id))
            bad = [good[:n] for n in lengths(len(good))] + [good + b"\0", b"\x55" + good[1:]]
            for data in bad:
                with pytest.raises(StateError):
                    ctx.load_state_bytes(data, seq_id)
            assert held(ctx) == before
            ctx.load_state_bytes(good, seq_id)
            assert held(ctx)[1] == before[1]


def test_files_that_were_cut_off_ended_the_process(kind: str, model: pykv.Model, tmp_path: Path) -> None:
    """As llama.cpp writes them, without notes: no checksum tells."""
    path = tmp_path / "state"
    with model.context(**PARAMS) as ctx:
        told(ctx, TOKENS[:4])
        told(ctx, TOKENS, 2)
        before = held(ctx)
        for save, load in (
            (lambda: ctx.save_session(path, TOKENS[:4]), lambda: ctx.load_session(path)),
            (lambda: ctx.save_sequence(path, 0, TOKENS[:4]), lambda: ctx.load_sequence(path, 0)),
        ):
            save()
            side_car(path).unlink(missing_ok=True)
            whole = path.read_bytes()
            trailer = read_trailer(whole)
            good = whole if trailer is None else whole[: trailer.span.start]
            bad = [good[:n] for n in lengths(len(good))[::4]]
            bad += [b"", good + b"\0", b"\x55" + good[1:], good[:4] + b"\x63" + good[5:]]
            for data in bad:
                path.write_bytes(data)
                with pytest.raises(StateError):
                    load()
            path.unlink()
            path.mkdir()
            with pytest.raises((PykvError, IsADirectoryError)):
                load()
            path.rmdir()
            assert held(ctx) == before
            path.write_bytes(good)
            with pytest.warns(RuntimeWarning, match="which model"):
                assert load() == TOKENS[:4]
            assert held(ctx)[1] == before[1]
