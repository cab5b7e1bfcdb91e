"""Contexts saved on one device and loaded on another: a client of `four_devices`.

Each scene raises where bytes differ, and returns how far logits are apart.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

TOKENS: list[int] = np.random.default_rng(17).integers(0, 250, 90).tolist()
AFTER: tuple[tuple[int, int], ...] = ((0, 1), (0, 1), (1, 3), (2, 1), (0, 2))
"""Sequences that go on, and by how many tokens. Few: a token of 22 layers takes llvmpipe half a second."""


@dataclass(frozen=True)
class Where:
    """A model on a device, and how its cache stores; one of these has one state."""

    path: str
    device: str
    dtype: str
    attention: str

    def open(self) -> Any:
        """Return a new context."""
        from support.device_models import model_on

        params = {"n_ctx": 256, "n_ubatch": 16, "n_seq_max": 3, "n_threads": 1}
        return model_on(self.path, self.device).context(
            type_k=self.dtype, type_v=self.dtype, attention=self.attention, **params
        )


@dataclass(frozen=True)
class Saved:
    """All that a context saves, files read back, and the logits of the same context when it went on."""

    session: bytes
    notes: bytes
    sequence: bytes
    whole: bytes
    alone: bytes
    partial: bytes
    rows: tuple[np.ndarray, ...]


def carried(path: str, dtype: str, attention: str, source: str, target: str) -> float:
    """Save on one device and load on another: all that is saved there again must be the same bytes.

    Returns the NMSE of the logits of two contexts that go on, one with all sequences and one with one. On the CPU they
    are compared with the context that was saved, elsewhere with those of a CPU that has loaded the same.
    """
    from support.nmse import nmse

    saved = _saved(Where(path, source, dtype, attention))
    here = Where(path, "CPU", dtype, _as_computed_on(source if target == "CPU" else target, dtype, attention))
    if target == "CPU":
        expected, found = (
            (saved.rows, [saved.rows[i] for i, (s, _) in enumerate(AFTER) if s == 0]),
            _gone_on(here, saved),
        )
    else:
        expected, found = _gone_on(here, saved), _gone_on(Where(path, target, dtype, attention), saved)
    pairs = [pair for mine, other in zip(found, expected, strict=True) for pair in zip(mine, other, strict=True)]
    return max(nmse(mine, other) for mine, other in pairs)


def _as_computed_on(device: str, dtype: str, attention: str) -> str:
    """Return which attention of the CPU rounds as that device does.

    ggml's own on the CPU, which RPC servers run too, turns queries into 8 bits for keys in 8 bits; Vulkan and pykv's
    kernel do not. With the tiny Gemma 3n that alone is an NMSE of 9e-4 between the two on the CPU.
    """
    return "fused" if device.startswith("Vulkan") and dtype == "q8_0" else attention


@cache
def _saved(source: Where) -> Saved:
    with closing(source.open()) as ctx:
        for seq_id, n in ((0, 36), (2, 2)):
            _say(ctx, seq_id, n)
        ctx.memory.seq_cp(0, 1, -1, -1)
        for seq_id, n in ((1, 3), (0, 1)):
            _say(ctx, seq_id, n)
        session, notes, sequence = _files(ctx, 0)
        whole, alone, partial = (bytes(ctx.state_bytes(*which)) for which in ((None,), (0,), (0, True)))
        return Saved(session, notes, sequence, whole, alone, partial, _rows(ctx, AFTER))


def _gone_on(target: Where, saved: Saved) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    """Return the logits behind a loaded session, and behind a loaded sequence."""
    from pykv.state_format import side_car

    with TemporaryDirectory() as folder:
        session, sequence = Path(folder) / "session", Path(folder) / "sequence"
        session.write_bytes(saved.session)
        side_car(session).write_bytes(saved.notes)
        sequence.write_bytes(saved.sequence)
        with closing(target.open()) as one, closing(target.open()) as other:
            return _session(one, saved, session), _sequence(other, saved, sequence)


def _session(ctx: Any, saved: Saved, path: Path) -> tuple[np.ndarray, ...]:
    _say(ctx, 1, 2)  # to be replaced
    ctx.load_session(path)
    ctx.memory.check()
    assert _files(ctx, 0) == (saved.session, saved.notes, saved.sequence), "files differ"
    _say(ctx, 2, 1)  # to be replaced once more
    ctx.load_state_bytes(saved.whole)
    ctx.memory.check()
    assert ctx.state_bytes() == saved.whole, "the bytes of all sequences differ"
    ctx.load_state_bytes(saved.partial, 0, partial=True)
    assert ctx.state_bytes(0, partial=True) == saved.partial, "partial bytes differ"
    return _rows(ctx, AFTER)


def _sequence(ctx: Any, saved: Saved, path: Path) -> tuple[np.ndarray, ...]:
    """Load beside another sequence: as itself, and by way of a third, whose number is then in the bytes."""
    _say(ctx, 2, 2)
    others = ctx.state_bytes(2)
    ctx.load_sequence(path, 1)
    ctx.load_state_bytes(ctx.state_bytes(1), 0)
    assert ctx.state_bytes(0) == saved.alone, "the bytes of one sequence differ"
    ctx.memory.seq_rm(0)
    ctx.load_sequence(path, 0)
    ctx.memory.check()
    assert _files(ctx, 0)[2] == saved.sequence, "the file of one sequence differs"
    assert ctx.state_bytes(0, partial=True) == saved.partial, "partial bytes of one sequence differ"
    assert ctx.state_bytes(2) == others, "another sequence was harmed"
    return _rows(ctx, [(1, n) for seq_id, n in AFTER if seq_id == 0])


def _files(ctx: Any, seq_id: int) -> tuple[bytes, bytes, bytes]:
    """Save into files; returns the bytes of a session, of its notes, and of a sequence."""
    from pykv.state_format import side_car

    with TemporaryDirectory() as folder:
        session, sequence = Path(folder) / "session", Path(folder) / "sequence"
        ctx.save_session(session, TOKENS[:30])
        ctx.save_sequence(sequence, seq_id, TOKENS[:43])
        return session.read_bytes(), side_car(session).read_bytes(), sequence.read_bytes()


def _say(ctx: Any, seq_id: int, n: int) -> None:
    """Decode the next tokens of a sequence, with all rows wanted."""
    import pykv

    first = ctx.memory.pos_max(seq_id) + 1
    ctx.decode(pykv.Batch(TOKENS[first : first + n], seq_id=seq_id, logits="all"))


def _rows(ctx: Any, steps: Sequence[tuple[int, int]]) -> tuple[np.ndarray, ...]:
    found = []
    for seq_id, n in steps:
        _say(ctx, seq_id, n)
        found.append(np.array(ctx.logits))
    return tuple(found)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.device_models import meet
    from support.rpc_worker import serve

    serve(meet, carried)
