"""Heads of files and of states kept in memory: byte for byte, told apart, and refused where damaged."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.errors import StateError
from pykv.state_format import (
    Dialect,
    Kind,
    context_head,
    read_container,
    sequence_bytes_head,
    sequence_head,
    session_head,
)

TOKENS = np.array([1, -2, 2**31 - 1], np.int32)
SAID = b"\1\0\0\0\xfe\xff\xff\xff\xff\xff\xff\x7f"


@pytest.mark.parametrize(("dialect", "session", "sequence"), [(Dialect.S10, 10, 3), (Dialect.S11, 11, 4)], ids=str)
def test_heads_byte_for_byte(dialect, session, sequence):
    counted = b"\3\0\0\0" + SAID
    assert session_head(TOKENS, "llama", dialect) == (
        bytes.fromhex("6e736767") + bytes([session, 0, 0, 0]) + counted + b"\5\0\0\0llama"
    )
    assert sequence_head(TOKENS, dialect) == bytes.fromhex("71736767") + bytes([sequence, 0, 0, 0]) + counted
    assert str(dialect) == f"{session}/{sequence}"


def test_heads_of_states_kept_in_memory():
    assert context_head("gemma3") == b"\6\0\0\0gemma3"
    assert sequence_bytes_head(-5) == bytes.fromhex("d83c14af") + b"\xfb\xff\xff\xff"


def test_the_newest_dialect_is_the_default():
    assert session_head(TOKENS[:0], "x")[4] == 11
    assert sequence_head(TOKENS[:0])[4] == 4


@pytest.mark.parametrize(
    ("head", "kind", "dialect", "tokens", "arch", "seq_id"),
    [
        (session_head(TOKENS, "llama", Dialect.S10), Kind.SESSION_FILE, Dialect.S10, TOKENS, "llama", None),
        (session_head(TOKENS[:0], "llama"), Kind.SESSION_FILE, Dialect.S11, TOKENS[:0], "llama", None),
        (sequence_head(TOKENS, Dialect.S10), Kind.SEQUENCE_FILE, Dialect.S10, TOKENS, None, None),
        (sequence_head(TOKENS), Kind.SEQUENCE_FILE, Dialect.S11, TOKENS, None, None),
        (context_head("gemma3"), Kind.CONTEXT_BYTES, None, None, "gemma3", None),
        (sequence_bytes_head(7), Kind.SEQUENCE_BYTES, None, None, None, 7),
    ],
)
def test_containers_are_told_apart(head, kind, dialect, tokens, arch, seq_id):
    container = read_container(head + b"state" + b"rest", stop=len(head) + 5)
    assert (container.kind, container.dialect, container.arch, container.seq_id) == (kind, dialect, arch, seq_id)
    assert (None if container.tokens is None else container.tokens.tolist()) == (
        None if tokens is None else tokens.tolist()
    )
    assert container.state == (len(head), 5)
    assert kind.whole is (kind in (Kind.SESSION_FILE, Kind.CONTEXT_BYTES))
    for n in range(len(head)):
        with pytest.raises(StateError):
            read_container(head[:n])


@pytest.mark.parametrize(
    ("data", "message", "offset"),
    [
        (b"", "magic: expected 4 bytes, found the end after 0", 0),
        (b"ggs", "magic: expected 4 bytes, found the end after 3", 0),
        (b"GGUF\3\0\0\0" + bytes(99), "a GGUF model, not a saved state", 0),
        (bytes(64), "the name of a model family, found 0x00000000", 0),
        (b"\3\0\0\0a\nb", "saved state: expected the magic of a session", 0),
        (b"nsgg\x09\0\0\0", "session file: version: expected 10 or 11, found 9", 4),
        (b"nsgg\x0c\0\0\0", "session file: version: expected 10 or 11, found 12", 4),
        (b"qsgg\x0a\0\0\0", "sequence file: version: expected 3 or 4, found 10", 4),
        (b"qsgg\4\0\0\0\3\0\0\0" + bytes(11), "number of tokens: expected at most the 2 that follow, found 3", 8),
        (b"qsgg\4\0\0\0\xff\xff\xff\xff" + bytes(64), "at most the 16 that follow, found 4294967295", 8),
        (b"nsgg\x0b\0\0\0" + bytes(4) + b"\xff\xff\xff\xffllama", "name: expected 1 to 5, found 4294967295", 12),
        (b"nsgg\x0b\0\0\0" + bytes(4) + b"\5\0\0\0llam\xff", "model family: expected printable ASCII", 16),
        (bytes.fromhex("d83c14af0000"), "source sequence: expected 4 bytes, found the end after 2", 4),
    ],
)
def test_damaged_heads(data, message, offset):
    with pytest.raises(StateError, match=message) as caught:
        read_container(data)
    assert caught.value.offset == offset
