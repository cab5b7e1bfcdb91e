"""The tokens that a caller notes in a state file: those that a reader takes, and whether they are what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pykv.errors import ParamError
from pykv.runtime.states.read_state import cells_of
from pykv.state_format import CellRecords, Section
from pykv.typing import AnyArray, I32Array

if TYPE_CHECKING:
    from pykv.runtime.context import Context


def checked_tokens(tokens: Sequence[int], context: Context) -> I32Array:
    """Return (n,) int32; raises `ParamError` where a context like this one could not load them."""
    found = np.asarray(tokens)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise ParamError(f"tokens: expected a sequence of integers, found {found.dtype} of shape {found.shape}")
    room, n_vocab = context.n_ctx, context.model.hparams.n_vocab
    if found.size > room:
        raise ParamError(f"tokens: {found.size} of them, and the context holds {room}: no context like it loads such")
    i = first_outside(found, n_vocab)
    if i is not None:
        raise ParamError(f"tokens[{i}]={found[i]}: must be from 0 to {n_vocab - 1}, the ids of the vocabulary")
    return found.astype(np.int32)


def first_outside(tokens: AnyArray, n_vocab: int) -> int | None:
    """Return where the first token is that a vocabulary lacks; None where all are in it."""
    bad = np.flatnonzero((tokens < 0) | (tokens >= n_vocab))
    return int(bad[0]) if bad.size else None


@dataclass(frozen=True)
class Held:
    """How much of a conversation a sequence holds.

    Attributes
    ----------
    n_cells : that a next token sees. A window or a state has fewer than there were tokens.
    end : the next position. Where something was cut out there are fewer tokens.
    """

    n_cells: int
    end: int

    def fits(self, n_tokens: int) -> bool:
        """Return whether so many tokens can be all that was decoded, and perhaps the one that was sampled last."""
        return any(0 <= n_tokens - n <= 1 for n in (self.n_cells, self.end))


def held_by_context(context: Context, seq_id: int | None) -> list[Held]:
    """Return what a sequence, or with None each that is not empty, holds."""
    memory = context.memory
    seqs = range(memory.n_seq_max) if seq_id is None else (seq_id,)
    held = [Held(memory.seen(one)[0].size, memory.pos_max(one) + 1) for one in seqs]
    return [one for one in held if one.n_cells]


def held_by_state(sections: Sequence[Section], *, is_whole: bool) -> list[Held]:
    """Return what each sequence of a state, as it was parsed, holds; of one sequence's state, what that one holds."""
    found: dict[int, Held] = {}
    for section in sections:
        for cells in cells_of(section):
            for seq_id, pos in _positions(cells) if is_whole else [(0, cells.pos)] if cells.n else []:
                before = found.get(seq_id, Held(0, 0))
                found[seq_id] = Held(max(before.n_cells, pos.size), max(before.end, int(pos.max()) + 1))
    return list(found.values())


def _positions(cells: CellRecords) -> Iterator[tuple[int, I32Array]]:
    """Yield each sequence that has some of the cells with the positions of its own."""
    owner = cells.cell_of_id
    for seq_id in np.unique(cells.ids):
        yield int(seq_id), cells.pos[owner[cells.ids == seq_id]]


def has_pictures(sections: Sequence[Section]) -> bool:
    """Return whether some cells can only be a picture's: several at one position, or beside the line of the text."""
    all_cells = [cells for section in sections for cells in cells_of(section) if cells.ext is not None]
    return any(np.any(cells.ext[:, :2] != cells.pos[:, None]) for cells in all_cells if cells.ext is not None)


def tokens_misfit(n_tokens: int, held: Sequence[Held], *, is_text: bool, who: str) -> str | None:
    """Say why so many noted tokens cannot be of what is held; None where they can.

    Of several sequences nobody says whose they are. Of a picture there are cells, and no tokens.

    Parameters
    ----------
    held : the sequences that are not empty.
    is_text : whether all that was decoded has a token.
    who : what holds it, for the message.
    """
    if not n_tokens:
        return None
    if not held:
        return f"{n_tokens} tokens are noted, and {who} holds none"
    if len(held) > 1 or not is_text or held[0].fits(n_tokens):
        return None
    n = held[0].end if held[0].n_cells <= 1 else held[0].n_cells
    return f"{n_tokens} tokens are noted, and {who} holds {n}"
