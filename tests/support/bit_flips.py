"""Saved states with a few bits or bytes changed, most of them where lengths, types and cells are told."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from support.state_io import rows_of

import pykv
from pykv.state_format import Span, parse_state, read_container


class Flipped(NamedTuple):
    """A damaged copy.

    Attributes
    ----------
    where : the bytes that are others now.
    """

    data: bytes
    where: frozenset[int]


def flips(good: bytes, rng: random.Random, n: int, heads: list[int]) -> Iterator[Flipped]:
    """Yield damaged copies with one to four changes each, two of three among the bytes in `heads`."""
    while n:
        data, changed = bytearray(good), set()
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            at = rng.choice(heads) if rng.random() < 0.67 else rng.randrange(len(data))
            data[at] = data[at] ^ 1 << rng.randrange(8) if rng.random() < 0.5 else rng.choice([0, 1, 2, 127, 128, 255])
            changed.add(at)
        where = frozenset(i for i in changed if data[i] != good[i])
        if where:
            n -= 1
            yield Flipped(bytes(data), where)


class Map(NamedTuple):
    """What the bytes of a sound state are: rows of tensors; what is free to have any value; and the rest, ascending."""

    rows: frozenset[int]
    free: frozenset[int]
    heads: list[int]


def map_of(ctx: pykv.Context, good: bytes) -> Map:
    """Return which bytes of a state are rows, and which are cells, tokens, and the number of a sequence."""
    container = read_container(good)
    whole = container.kind.whole
    sections, _ = parse_state(good, container.state.start, ctx.memory.state_layouts(), whole=whole)
    rows = frozenset().union(*(_bytes_of(each.span) for one in sections for each in rows_of(one)))
    free = set(range(4, 8)) if container.seq_id is not None else set()
    if container.tokens is not None:
        free |= set(range(12, 12 + 4 * container.tokens.size))
    for one in sections:
        for cells in [stream.cells for stream in one.streams] if hasattr(one, "streams") else [one.cells]:
            free |= set(range(cells.start, cells.end))
    return Map(rows, frozenset(free), sorted({*range(len(good))} - rows))


def _bytes_of(span: Span) -> range:
    return range(span.start, span.start + span.nbytes)
