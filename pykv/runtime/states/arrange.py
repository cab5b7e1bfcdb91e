"""Which cells of a state go where in another one: other streams, one sequence of many, another number for it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pykv.errors import ParamError
from pykv.memory.state_arrange import NO_CELLS, Arranged, Share, held_by, into_streams, joined, picked_as
from pykv.state_format import CellRecords, KVSection, StatesSection


class Aim(NamedTuple):
    """Who is in the result.

    Attributes
    ----------
    picked : the sequence to be taken out of a state of all; None = all that there is.
    number : the number that it has in the result; None = each keeps its own.
    is_whole : whether the result is a state of all sequences.
    """

    picked: int | None
    number: int | None
    is_whole: bool


def arrange_kv(section: KVSection, aim: Aim, n_stream: int) -> list[Arranged]:
    """Return the streams of the result.

    Raises
    ------
    ParamError : a sequence would have no stream.
    """
    sources = [stream.cells for stream in section.streams]
    if aim.number is not None:
        if aim.is_whole and 1 < n_stream <= aim.number:
            raise _no_stream(aim.number, n_stream)
        streams = [Arranged(NO_CELLS, ())] * n_stream
        home = aim.number if aim.number < n_stream else 0
        streams[home] = joined([_taken(s, cells, aim, 1) for s, cells in enumerate(sources)])
        return streams
    last = max(int(cells.ids.max(initial=0)) for cells in sources)
    if n_stream not in (1, len(sources)) and last >= n_stream:
        raise _no_stream(last, n_stream)
    return into_streams(sources, n_stream)


def arrange_states(section: StatesSection, aim: Aim) -> Arranged:
    """Return the cells of the result; one sequence's state does not say whose it is."""
    if aim.number is None:
        return joined([(section.cells, Share(0, None, section.cells.n))])
    return joined([_taken(0, section.cells, aim, int(aim.is_whole))])


def n_without_owner(section: KVSection) -> int:
    """Return how many cells belong to no sequence."""
    return sum(int((stream.cells.n_ids == 0).sum()) for stream in section.streams)


def _no_stream(seq_id: int, n_stream: int) -> ParamError:
    return ParamError(
        f"n_stream={n_stream}: sequence {seq_id} needs a stream of its own; take {seq_id + 1} or more, or 1"
    )


def _taken(stream: int, cells: CellRecords, aim: Aim, n_ids: int) -> tuple[CellRecords, Share]:
    """Return the cells that an aim picks from a stream, with `n_ids` ids each: its number, or none."""
    at = np.arange(cells.n) if aim.picked is None else held_by(cells, aim.picked)
    return picked_as(stream, cells, at, [] if aim.number is None else [aim.number] * n_ids)
