"""The dialects of state files: what the versions in a file's head stand for.

Source: spec state_format.md section 1, and what llama.cpp writes since session version 11.
"""

from __future__ import annotations

from enum import Enum


class Dialect(Enum):
    """One form of the KV section, by the versions that session and sequence files of it carry."""

    S10 = (10, 3)
    S11 = (11, 4)

    @property
    def session_version(self) -> int:
        return self.value[0]

    @property
    def sequence_version(self) -> int:
        return self.value[1]

    @property
    def says_rotation(self) -> bool:
        """Whether the rows' head says by which widths K and V are rotated."""
        return self is Dialect.S11

    def __str__(self) -> str:
        return f"{self.session_version}/{self.sequence_version}"


NEWEST = Dialect.S11
NEWEST_FIRST = (Dialect.S11, Dialect.S10)
