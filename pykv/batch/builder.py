"""A batch put together entry by entry: each has its own sequences, positions, content and output flag.

Every operation either does all it says or raises and changes nothing.
Follows llama.cpp's ``llama_batch_ext``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from pykv.batch.arrays import float32_array, int32_array, integer
from pykv.batch.batch import Batch
from pykv.batch.limits import BatchLimits
from pykv.errors import BatchError
from pykv.typing import F32Array


@dataclass
class _Entry:
    seqs: set[int]
    token: int | None = None
    row: F32Array | None = None
    output: bool = False
    pos: list[int] = field(default_factory=lambda: [0])

    @property
    def content(self) -> str:
        parts = {"token": self.token, "embedding": self.row}
        return " and ".join(name for name, part in parts.items() if part is not None) or "nothing"


class BatchBuilder:
    """Collects entries for a context with the given limits.

    A new entry is no output and stands at position 0; positions are not filled in from the memory.
    """

    # differs from llama.cpp: a refused operation raises `BatchError` and appends nothing (there: returns -1,
    # -2, -3 or false, and may leave an entry without content), because such an entry spoils the batch later
    # differs from llama.cpp: an embedding row belongs to its entry whatever the order of the calls (there:
    # entry i gets the i-th row stored), because rows given out of order would silently change places

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self._entries: list[_Entry] = []
        self._width = 0

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Drop all entries, and with them the width of their rows."""
        self._entries.clear()
        self._width = 0

    # appending

    def add(self, seq_id: int) -> int:
        """Append an entry of one sequence without content; return its index."""
        return self._append(self._entry(seq_id))

    def add_token(self, seq_id: int, token: int) -> int:
        """Append a token; return its index."""
        entry = self._entry(seq_id)
        entry.token = self._checked_token(token)
        return self._append(entry)

    def add_embd(self, seq_id: int, row: ArrayLike) -> int:
        """Append an embedding; return its index. See `set_embd` for `row`."""
        entry = self._entry(seq_id)
        entry.row = self._checked_row(row)
        index = self._append(entry)
        self._width = entry.row.size
        return index

    def add_seq(self, index: int, seq_id: int) -> None:
        """Put entry `index` into one more sequence; no effect if it is in it already."""
        entry = self._at(index)
        entry.seqs.add(self._checked_seq(seq_id))

    # changing

    def set_token(self, index: int, token: int) -> None:
        """Give entry `index` a token id."""
        entry = self._at(index)
        entry.token = self._checked_token(token)

    def set_output(self, index: int, output: bool = True) -> None:
        """Say whether logits are wanted for entry `index`."""
        entry = self._at(index)
        if not isinstance(output, (bool, np.bool_)):
            raise BatchError(f"output must be a bool, got {output!r}")
        entry.output = bool(output)

    def set_pos(self, index: int, pos: int | Sequence[int]) -> None:
        """Place entry `index`: one position if it has a token, else `n_pos_per_embd`.

        note: set the token first. An entry without one is taken for an embedding.
        """
        entry = self._at(index)
        sections = int32_array("pos", pos).reshape(-1).tolist()
        needed = 1 if entry.token is not None else self.limits.n_pos_per_embd
        if len(sections) != needed:
            kind = "a token" if entry.token is not None else "an entry without a token"
            raise BatchError(f"pos of {kind} takes {needed} value(s), got {len(sections)}")
        if min(sections) < 0:
            raise BatchError(f"pos must not be negative, got {min(sections)}")
        entry.pos = sections

    def set_embd(self, index: int, rows: ArrayLike) -> None:
        """Give entry `index` its embedding: finite numbers of any shape, as many as one row has.

        The first row has the width of the decoder's or of the encoder's input; all others have as many.
        """
        entry = self._at(index)
        if entry.row is not None:
            raise BatchError(f"entry {index} already has an embedding")
        entry.row = self._checked_row(rows)
        self._width = entry.row.size

    # finishing

    def build(self) -> Batch:
        """Return the entries as a batch; the builder keeps them."""
        entries = self._entries
        if not entries:
            return Batch([])
        kind = entries[0].content
        if kind == "nothing":
            raise BatchError("entry 0 has neither a token nor an embedding")
        for index, entry in enumerate(entries):
            if entry.content != kind:
                raise BatchError(f"entry 0 has {kind}, entry {index} has {entry.content}; all must have the same")
        tokens = [entry.token for entry in entries if entry.token is not None]
        rows = [entry.row for entry in entries if entry.row is not None]
        return Batch(
            tokens or None,
            pos=self._positions(),
            seq_id=[tuple(sorted(entry.seqs)) for entry in entries],
            logits=[entry.output for entry in entries],
            embd=np.stack(rows) if rows else None,
        )

    def _positions(self) -> list[list[int]]:
        # an entry that got its token after its position has sections that a token does not use
        n_pos = 1 if self._entries[0].token is not None else self.limits.n_pos_per_embd
        padded = ((entry.pos + [0] * n_pos)[:n_pos] for entry in self._entries)
        return [list(section) for section in zip(*padded, strict=True)]

    def _entry(self, seq_id: int) -> _Entry:
        if len(self._entries) >= self.limits.n_tokens_max:
            raise BatchError(f"the batch is full: it holds n_tokens_max = {self.limits.n_tokens_max} entries")
        return _Entry({self._checked_seq(seq_id)})

    def _append(self, entry: _Entry) -> int:
        self._entries.append(entry)
        return len(self._entries) - 1

    def _at(self, index: int) -> _Entry:
        index = integer("index", index)
        if not 0 <= index < len(self._entries):
            raise BatchError(f"index must lie in [0, {len(self._entries)}), got {index}")
        return self._entries[index]

    def _checked_seq(self, seq_id: int) -> int:
        seq_id = integer("seq_id", seq_id)
        if not 0 <= seq_id < self.limits.n_seq_max:
            raise BatchError(f"seq_id must lie in [0, {self.limits.n_seq_max}), got {seq_id}", seq_id=seq_id)
        return seq_id

    def _checked_token(self, token: int) -> int:
        token = integer("token", token)
        if not 0 <= token < self.limits.n_vocab:
            raise BatchError(f"token must lie in [0, {self.limits.n_vocab}), got {token}")
        return token

    def _checked_row(self, row: ArrayLike) -> F32Array:
        values = float32_array("embd", row)
        if self._width and values.size != self._width:
            raise BatchError(f"embd must hold {self._width} numbers like the batch's first row, got {values.size}")
        if not self.limits.takes_width(values.size):
            raise BatchError(f"embd must hold {self.limits.widths()} numbers, got {values.size}")
        return values.reshape(-1)
