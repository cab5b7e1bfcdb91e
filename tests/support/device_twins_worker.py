"""A context on the CPU and the same on another device, told the same: a client of `four_devices`.

Each scene raises where bookkeeping or what calls give differs, and returns how far logits are apart.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

Call = dict[str, Any]


class Twins:
    """Two contexts of one model, on the CPU and elsewhere. They are emptied before each program.

    Parameters
    ----------
    here : what the CPU's context has otherwise.
    """

    def __init__(self, path: str, device: str, params: dict[str, Any], here: dict[str, Any]) -> None:
        from support.device_models import model_on
        from support.verb_program import Room

        models = model_on(path, "CPU"), model_on(path, device)
        common: dict[str, Any] = {"n_ctx": 256, "n_batch": 128, "n_ubatch": 64, "n_threads": 1, **params}
        self.here, self.there = (
            model.context(**common, **more) for model, more in zip(models, (here, {}), strict=True)
        )
        n_seqs = self.here.params.n_seq_max
        self.room = Room(n_seqs, common["n_batch"], models[0].hparams.n_vocab, copies_parts=True)
        self.squares = np.zeros(2)

    def run(self, program: Sequence[Any]) -> int:
        """Run a program on both; returns how many rows of logits they gave."""
        from support.verb_program import State, resolve

        self.squares[:] = 0
        n_rows = self.do({"do": "clear", "args": [True]})
        for step in program:
            ends = tuple((self.here.memory.pos_min(s), self.here.memory.pos_max(s)) for s in range(self.room.n_seqs))
            n_rows += sum(map(self.do, resolve(step, State(ends, self.room))))
        return n_rows

    def do(self, call: Call) -> int:
        """Make a call on both, and compare."""
        from support.state_kinds import bookkeeping
        from support.verb_compare import shown

        (mine, rows), (other, expected) = _made(self.there, call), _made(self.here, call)
        assert mine == other, f"{shown(call)}: {mine!r}, on the CPU {other!r}"
        assert bookkeeping(self.there.memory) == bookkeeping(self.here.memory), f"{shown(call)}: cells differ"
        if expected is None or rows is None:
            return 0
        self.squares += np.square(rows - expected).sum(dtype=np.float64), np.square(expected).sum(dtype=np.float64)
        return len(rows)

    @property
    def nmse(self) -> float:
        """How far the rows of the last program are apart, all together."""
        return float(self.squares[0] / self.squares[1]) if self.squares[1] else 0.0

    def close(self) -> None:
        self.here.close()
        self.there.close()


def programs(
    path: str,
    device: str,
    params: dict[str, Any],
    here: dict[str, Any],
    numbers: tuple[int, int],
    most_steps: int = 60,
) -> dict[str, Any]:
    """Run random programs of these numbers, each up to so many steps."""
    from support.verb_program import draw_program

    begun, told = time.monotonic(), []
    with closing(Twins(path, device, params, here)) as twins:
        for number in range(*numbers):
            n_rows = twins.run(draw_program(Random(f"devices-{number}"), twins.room)[:most_steps])
            told.append((twins.nmse, number, n_rows))
    nmse, number, _ = max(told)
    n_rows = sum(n for _, _, n in told)
    return {"nmse": nmse, "program": number, "n_rows": n_rows, "seconds": time.monotonic() - begun}


def landed(
    path: str, device: str, params: dict[str, Any], here: dict[str, Any], pad: int, n_after: int
) -> dict[str, Any]:
    """Decode a long and a short prompt in both orders, with the cells that are looked at rounded up to `pad`.

    Returns the cells of the short one in each order, the NMSE of all rows to the CPU's, and that of the short one's
    rows to those of the other order.
    """
    from support.nmse import nmse

    cells, apart, rows = [], [], []
    for order in ((0, 1), (1, 0)):
        with _padded(pad), closing(Twins(path, device, {"n_seq_max": 2, **params}, here)) as twins:
            for s in order:
                twins.do(_prompt(s, 5 if s else 34, twins.room.n_vocab))
                if s:
                    rows.append(np.array(twins.there.logits))
            cells.append(np.flatnonzero(twins.there.memory.cells(0).member(1)).tolist())
            for i in range(n_after):
                twins.do({"do": "decode", "tokens": [7 + i], "pos": [5 + i], "seq": [[1]], "out": [True]})
            apart.append(twins.nmse)
    return {"cells": cells, "nmse": max(apart), "between": nmse(rows[0], rows[1])}


@contextmanager
def _padded(pad: int) -> Iterator[None]:
    """Let graphs look at a multiple of `pad` cells, where pykv takes 256."""
    from pykv.cells.stream_table import StreamTable

    before = StreamTable.n_kv_of

    def n_kv_of(self: Any, n_used: int, n_pad: int = 1) -> int:
        return min(self.n_cells, max(pad, -(-n_used // pad) * pad))

    StreamTable.n_kv_of = n_kv_of  # type: ignore[method-assign]
    try:
        yield
    finally:
        StreamTable.n_kv_of = before  # type: ignore[method-assign]


def _prompt(seq_id: int, n: int, n_vocab: int) -> Call:
    tokens = np.random.default_rng(seq_id).integers(0, n_vocab, n).tolist()
    return {"do": "decode", "tokens": tokens, "pos": list(range(n)), "seq": [[seq_id]] * n, "out": [True] * n}


def _made(ctx: Any, call: Call) -> tuple[Any, np.ndarray | None]:
    """Make a call; returns what it gave, an error as its words, and the rows of a decode."""
    import pykv
    from pykv.errors import BatchError, NoSlotError, ParamError, ShiftUnsupported

    try:
        if call["do"] != "decode":
            result = getattr(ctx.memory, call["do"])(*call["args"])
            ctx.memory.check()
            return result, None
        ctx.decode(pykv.Batch(call["tokens"], call["pos"], call["seq"], np.array(call["out"], bool)))
        ctx.memory.check()
    except (BatchError, NoSlotError, ParamError, ShiftUnsupported) as error:
        return f"{type(error).__name__}: {error}", None
    return 0, np.array(ctx.logits)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.device_models import meet
    from support.rpc_worker import serve

    serve(meet, programs, landed)
