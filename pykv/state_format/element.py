"""Element types that a state may hold, by ggml's numbers: how many elements make a block, and its bytes.

Source: spec state_format.md section 3.
"""

from __future__ import annotations

from typing import NamedTuple


class Element(NamedTuple):
    """One type: its name, and how many elements lie in a block of how many bytes."""

    name: str
    n_block: int
    nbytes: int

    def width(self, row_bytes: int) -> int | None:
        """Return how many elements lie in a row of so many bytes; None where it is not a whole number of blocks."""
        n, rest = divmod(row_bytes, self.nbytes)
        return None if rest else n * self.n_block


ELEMENTS = {
    0: Element("f32", 1, 4),
    1: Element("f16", 1, 2),
    2: Element("q4_0", 32, 18),
    3: Element("q4_1", 32, 20),
    6: Element("q5_0", 32, 22),
    7: Element("q5_1", 32, 24),
    8: Element("q8_0", 32, 34),
    20: Element("iq4_nl", 32, 18),
    30: Element("bf16", 1, 2),
}


def type_name(dtype: int) -> str:
    """Return the name of a type for messages, or its number where it has none here."""
    known = ELEMENTS.get(dtype)
    return known.name if known else f"type {dtype}"
