"""Outcome: what a step returned, or the error that it raised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pykv.cells.arguments import shown
from pykv.runtime.trace.fields import of_kind, taken

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Outcome:
    """What a step came to.

    Attributes
    ----------
    value : "ok" for a decode, else what the verb returned.
    error : name of the error's class, None if there was none.
    """

    value: object = "ok"
    error: str | None = None
    message: str = ""

    @classmethod
    def of(cls, result: object) -> Outcome:
        """Return the outcome of what a verb's listener hears: a value, or an exception."""
        if isinstance(result, BaseException):
            return cls(None, type(result).__name__, str(result))
        return cls(result if isinstance(result, _PLAIN) else shown(result))

    def record(self) -> object:
        """Return it for JSON."""
        return self.value if self.error is None else {"error": self.error, "message": self.message}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Outcome:
        """Return the outcome that the record of a step holds.

        Raises
        ------
        ValueError : it holds none.
        """
        if "outcome" not in record:
            raise ValueError("'outcome' is missing")
        said = record["outcome"]
        if isinstance(said, dict):
            return cls(None, taken(said, "error", str), of_kind("message", said.get("message", ""), str))
        if not isinstance(said, _PLAIN):
            raise ValueError(f"outcome={shown(said)} must be a plain value or an error")
        return cls(said)

    def is_like(self, other: Outcome) -> bool:
        """Tell whether both came to the same; messages may name other sizes."""
        return (self.value, self.error) == (other.value, other.error)

    def __str__(self) -> str:
        return str(self.value) if self.error is None else f"{self.error}: {self.message}"
