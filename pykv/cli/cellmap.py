"""Draw who owns which cell: one character a cell, told apart by shape as well as by colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rich.text import Text

    from pykv.cells import CellsView, RecurrentView

EMPTY, SHARED = ".", "#"
_COLOURS = ("green", "yellow", "magenta", "blue")


def cell_letters(cells: CellsView | RecurrentView) -> str:
    """Return a character a cell: ``.`` empty, ``A`` only sequence 0, ``B`` only sequence 1, ``#`` shared."""
    letters = np.full(cells.n, EMPTY)
    n_owners = cells.owners.sum(axis=0)
    for seq_id, mine in enumerate(cells.owners):
        letters[mine & (n_owners == 1)] = chr(ord("A") + seq_id % 26)
    letters[n_owners > 1] = SHARED
    return "".join(letters)


def cell_map(cells: CellsView, width: int = 64) -> Text:
    """Return the map in rows of `width` cells; rows that are empty to the end are left out."""
    from rich.text import Text

    letters = cell_letters(cells)
    used = max(1, -(-len(letters.rstrip(EMPTY)) // width))
    drawn = Text()
    for row in range(used):
        drawn.append(f"{row * width:6} ", "dim")
        for letter in letters[row * width : (row + 1) * width]:
            drawn.append(letter, _style(letter))
        drawn.append("\n")
    left = len(letters) - used * width
    if left > 0:
        drawn.append(f"       ({left} more empty cells)\n", "dim")
    return drawn


def _style(letter: str) -> str:
    if letter == EMPTY:
        return "dim"
    return "bold cyan" if letter == SHARED else _COLOURS[(ord(letter) - ord("A")) % len(_COLOURS)]


def cell_dump(cells: CellsView | RecurrentView) -> Text:
    """Return the words in the colours of their owners, to be wrapped between words."""
    from rich.text import Text

    letters = cell_letters(cells)
    words = cells.words()
    drawn = Text()
    for i, word in enumerate(words):
        drawn.append(word, _style(letters[i]))
        drawn.append(" " if i + 1 < len(words) else "")
    return drawn if words else Text("(all cells are empty)", "dim")
