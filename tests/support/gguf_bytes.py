"""GGUF files written byte by byte, so that any field can be wrong."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

CODES = {
    "u8": (0, "<B"),
    "i8": (1, "<b"),
    "u16": (2, "<H"),
    "i16": (3, "<h"),
    "u32": (4, "<I"),
    "i32": (5, "<i"),
    "f32": (6, "<f"),
    "bool": (7, "<?"),
    "u64": (10, "<Q"),
    "i64": (11, "<q"),
    "f64": (12, "<d"),
}
STRING, ARRAY = 8, 9


def text(value: str | bytes) -> bytes:
    """Return a string as the format has it."""
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: str, value: Any) -> bytes:
    """Return type and value."""
    if kind == "str":
        return struct.pack("<I", STRING) + text(value)
    code, layout = CODES[kind]
    return struct.pack("<I", code) + struct.pack(layout, value)


def array(kind: str, values: Sequence[Any], count: int | None = None) -> bytes:
    """Return type and values of an array; `count` lies about their number."""
    n = len(values) if count is None else count
    if kind == "str":
        return struct.pack("<IIQ", ARRAY, STRING, n) + b"".join(map(text, values))
    code, layout = CODES[kind]
    return struct.pack("<IIQ", ARRAY, code, n) + b"".join(struct.pack(layout, value) for value in values)


@dataclass
class RawTensor:
    """One row of the tensor table, and the data."""

    name: str | bytes
    ne: tuple[int, ...]
    kind: int = 0
    data: bytes = b""
    offset: int | None = None


@dataclass
class RawGGUF:
    """A file in the making. `pairs` hold encoded values: `scalar` or `array`."""

    pairs: list[tuple[str | bytes, bytes]] = field(default_factory=list)
    tensors: list[RawTensor] = field(default_factory=list)
    version: int = 3
    n_pairs: int | None = None
    n_tensors: int | None = None
    alignment: int = 32
    magic: bytes = b"GGUF"

    def header(self) -> bytes:
        """Return everything before the data section's padding."""
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_pairs = len(self.pairs) if self.n_pairs is None else self.n_pairs
        parts = [self.magic, struct.pack("<IQQ", self.version, n_tensors, n_pairs)]
        parts += [text(key) + value for key, value in self.pairs]
        at = 0
        for tensor in self.tensors:
            offset = at if tensor.offset is None else tensor.offset
            parts.append(text(tensor.name) + struct.pack("<I", len(tensor.ne)))
            parts.append(b"".join(struct.pack("<Q", n % 2**64) for n in tensor.ne))
            parts.append(struct.pack("<IQ", tensor.kind, offset % 2**64))
            at += self._padded(len(tensor.data))
        return b"".join(parts)

    def encode(self) -> bytes:
        """Return the whole file; no padding behind the last tensor."""
        out = self.header()
        for tensor in self.tensors:
            out = out.ljust(self._padded(len(out)), b"\0") + tensor.data
        return out

    def _padded(self, n: int) -> int:
        return -(-n // self.alignment) * self.alignment
