"""What surrounds a state: the heads of session files, of sequence files, and of states kept in memory.

Source: spec state_format.md section 1.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from pykv.errors import StateError
from pykv.state_format.cursor import Cursor, mismatch
from pykv.state_format.dialect import NEWEST, Dialect
from pykv.state_format.records import Span
from pykv.typing import I32Array

if TYPE_CHECKING:
    from typing_extensions import Buffer

SESSION_MAGIC = 0x6767736E
SEQUENCE_MAGIC = 0x67677371
SEQUENCE_BYTES_MAGIC = 0xAF143CD8
MODEL_MAGIC = 0x46554747
"""What a GGUF file begins with."""

MAX_ARCH = 128
"""Bytes of the longest name of a model family that is taken for one."""


class Kind(Enum):
    """The four containers, by what they are called in messages."""

    SESSION_FILE = "session file"
    SEQUENCE_FILE = "sequence file"
    CONTEXT_BYTES = "context state"
    SEQUENCE_BYTES = "sequence state"

    @property
    def whole(self) -> bool:
        """Whether it is the state of all sequences."""
        return self in (Kind.SESSION_FILE, Kind.CONTEXT_BYTES)

    @property
    def is_file(self) -> bool:
        """Whether it says which tokens it is of, as only files do."""
        return self in (Kind.SESSION_FILE, Kind.SEQUENCE_FILE)


@dataclass(frozen=True, eq=False)
class Container:
    """What the head says, and where the state is.

    Attributes
    ----------
    dialect : None where nothing says which: the states kept in memory carry no version.
    tokens : (n,) of a file, else None.
    arch : the model's family, of a whole state, else None.
    seq_id : the sequence that was saved, of a sequence state kept in memory, else None.
    state : from the first section to the end of the bytes.
    """

    kind: Kind
    dialect: Dialect | None
    tokens: I32Array | None
    arch: str | None
    seq_id: int | None
    state: Span


def session_head(tokens: I32Array, arch: str, dialect: Dialect = NEWEST) -> bytes:
    """Return what a session file has before its first section."""
    return _file_head(SESSION_MAGIC, dialect.session_version, tokens) + context_head(arch)


def sequence_head(tokens: I32Array, dialect: Dialect = NEWEST) -> bytes:
    """Return what a sequence file has before its first section."""
    return _file_head(SEQUENCE_MAGIC, dialect.sequence_version, tokens)


def context_head(arch: str) -> bytes:
    """Return what a whole state kept in memory has before its first section."""
    name = arch.encode()
    return struct.pack("<I", len(name)) + name


def sequence_bytes_head(seq_id: int) -> bytes:
    """Return what the state of a sequence kept in memory has before its first section."""
    return struct.pack("<Ii", SEQUENCE_BYTES_MAGIC, seq_id)


def _file_head(magic: int, version: int, tokens: I32Array) -> bytes:
    return struct.pack("<III", magic, version, len(tokens)) + np.asarray(tokens).astype("<i4").tobytes()


def read_container(data: Buffer, stop: int | None = None) -> Container:
    """Tell what kind of saved state the bytes are, and read its head.

    Parameters
    ----------
    stop : the byte behind the state, where something follows it; None = the end of the data.

    Raises
    ------
    StateError : no container that is known, one of an unknown version, or a head that is damaged.
    """
    with Cursor(data, 0, stop) as cursor:
        magic = cursor.u32("magic")
        if magic == SESSION_MAGIC:
            dialect = _read_version(cursor, {each.session_version: each for each in Dialect}, Kind.SESSION_FILE)
            tokens = _read_tokens(cursor)
            return Container(Kind.SESSION_FILE, dialect, tokens, _read_arch(cursor), None, _rest(cursor))
        if magic == SEQUENCE_MAGIC:
            dialect = _read_version(cursor, {each.sequence_version: each for each in Dialect}, Kind.SEQUENCE_FILE)
            return Container(Kind.SEQUENCE_FILE, dialect, _read_tokens(cursor), None, None, _rest(cursor))
        if magic == SEQUENCE_BYTES_MAGIC:
            seq_id = cursor.i32("source sequence")
            return Container(Kind.SEQUENCE_BYTES, None, None, None, seq_id, _rest(cursor))
        if magic == MODEL_MAGIC:
            raise StateError("a GGUF model, not a saved state: pykv.Model.load reads it", offset=0)
        cursor.at = 0
        try:
            arch = _read_arch(cursor)
        except StateError:
            known = "the magic of a session or sequence, or the name of a model family"
            raise mismatch("saved state", known, f"{magic:#010x}", 0) from None
        return Container(Kind.CONTEXT_BYTES, None, None, arch, None, _rest(cursor))


def _rest(cursor: Cursor) -> Span:
    return Span(cursor.at, cursor.left)


def _read_version(cursor: Cursor, known: dict[int, Dialect], kind: Kind) -> Dialect:
    version = cursor.u32(f"{kind.value}: version")
    if version not in known:
        expected = " or ".join(str(each) for each in sorted(known))
        raise mismatch(f"{kind.value}: version", expected, version, cursor.at - 4)
    return known[version]


def _read_tokens(cursor: Cursor) -> I32Array:
    n_tokens = cursor.u32("number of tokens")
    if 4 * n_tokens > cursor.left:
        raise mismatch("number of tokens", f"at most the {cursor.left // 4} that follow", n_tokens, cursor.at - 4)
    return cursor.words(n_tokens, "tokens")


def _read_arch(cursor: Cursor) -> str:
    at = cursor.at
    nbytes = cursor.u32("length of the model family's name")
    if not 1 <= nbytes <= min(MAX_ARCH, cursor.left):
        raise mismatch("length of the model family's name", f"1 to {min(MAX_ARCH, cursor.left)}", nbytes, at)
    name = cursor.bytes(nbytes, "model family")
    if not name.isascii() or not name.decode("ascii").isprintable():
        raise mismatch("model family", "printable ASCII", repr(name), at + 4)
    return name.decode("ascii")
