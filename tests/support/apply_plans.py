"""Plans of `pykv.policies` carried out, as a caller would: on a memory, and on a plain list."""

from __future__ import annotations

from typing import Protocol

from pykv.policies import ChunkMove, ChunkReuse, ContextShift


class Movable(Protocol):
    """What a plan is carried out on."""

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> object: ...
    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> object: ...


class TokenList:
    """One sequence as a list of [position, token]."""

    def __init__(self, tokens: list[int]) -> None:
        self.rows = [[p, token] for p, token in enumerate(tokens)]

    def seq_rm(self, _: int, p0: int = -1, p1: int = -1) -> None:
        self.rows = [row for row in self.rows if row[0] < p0 or 0 <= p1 <= row[0]]

    def seq_add(self, _: int, p0: int, p1: int, delta: int) -> None:
        for row in self.rows:
            if p0 <= row[0] < p1:
                row[0] += delta

    @property
    def tokens(self) -> list[int]:
        """The tokens in the order of their positions, which must be 0, 1, 2 and so on."""
        rows = sorted(self.rows)
        assert [p for p, _ in rows] == list(range(len(rows))), f"positions {[p for p, _ in rows]}"
        return [token for _, token in rows]


def apply_step(memory: Movable, step: ContextShift | ChunkMove, seq_id: int = 0) -> None:
    """Remove what a step removes and move what it moves."""
    memory.seq_rm(seq_id, *step.removed)
    memory.seq_add(seq_id, *step.moved, step.delta)


def apply_reuse(memory: Movable, reuse: ChunkReuse, seq_id: int = 0) -> None:
    """Leave in a memory what a prompt takes over, and nothing else."""
    for move in reuse.moves:
        apply_step(memory, move, seq_id)
    memory.seq_rm(seq_id, reuse.n_matched, -1)
