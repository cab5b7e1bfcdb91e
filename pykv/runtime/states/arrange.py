"""Which cells of a state go where in another one: other streams, one sequence of many, another number for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pykv.errors import ParamError
from pykv.state_format import CellRecords, KVSection, StatesSection
from pykv.typing import I64Array

NO_CELLS = CellRecords(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int32))


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


class Share(NamedTuple):
    """Cells of one stream of the source; `picked` None = all."""

    stream: int
    picked: I64Array | None


@dataclass(frozen=True, eq=False)
class Arranged:
    """One stream of the result: its cells, and from where their rows come, one after the other."""

    cells: CellRecords
    shares: tuple[Share, ...]


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
        streams[home] = _joined([_taken(s, cells, aim, 1) for s, cells in enumerate(sources)])
        return streams
    if n_stream == len(sources):
        return [Arranged(cells, (Share(s, None),)) for s, cells in enumerate(sources)]
    if n_stream == 1:
        return [_joined([(cells, Share(s, None)) for s, cells in enumerate(sources)])]
    beyond = [int(cells.ids.max()) for cells in sources if cells.ids.size and cells.ids.max() >= n_stream]
    if beyond:
        raise _no_stream(max(beyond), n_stream)
    aims = [Aim(s, s, is_whole=True) for s in range(n_stream)]
    return [_joined([_taken(i, cells, one, 1) for i, cells in enumerate(sources)]) for one in aims]


def arrange_states(section: StatesSection, aim: Aim) -> Arranged:
    """Return the cells of the result; one sequence's state does not say whose it is."""
    if aim.number is None:
        return Arranged(section.cells, (Share(0, None),))
    return _joined([_taken(0, section.cells, aim, int(aim.is_whole))])


def n_without_owner(section: KVSection) -> int:
    """Return how many cells belong to no sequence."""
    return sum(int((stream.cells.n_ids == 0).sum()) for stream in section.streams)


def _no_stream(seq_id: int, n_stream: int) -> ParamError:
    return ParamError(
        f"n_stream={n_stream}: sequence {seq_id} needs a stream of its own; take {seq_id + 1} or more, or 1"
    )


def _taken(stream: int, cells: CellRecords, aim: Aim, n_ids: int) -> tuple[CellRecords, Share]:
    """Return the cells that an aim picks from a stream, with `n_ids` ids each: its number, or none."""
    if aim.picked is None:
        at = np.arange(cells.n)
    else:
        at = np.repeat(np.arange(cells.n), cells.n_ids)[cells.ids == aim.picked]
    ids = np.full(at.size * n_ids, aim.number, np.int32)
    ext = None if cells.ext is None else cells.ext[at]
    own = CellRecords(cells.pos[at], np.full(at.size, n_ids, np.int32), ids, ext)
    return own, Share(stream, None if at.size == cells.n else at)


def _joined(found: Sequence[tuple[CellRecords, Share]]) -> Arranged:
    """Return the cells one after the other; their rows follow them."""
    filled = [(cells, share) for cells, share in found if cells.n]
    if not filled:
        return Arranged(NO_CELLS, ())
    if len(filled) == 1:
        return Arranged(filled[0][0], (filled[0][1],))
    ext = [cells.ext for cells, _ in filled if cells.ext is not None]
    cells = CellRecords(
        np.concatenate([cells.pos for cells, _ in filled]),
        np.concatenate([cells.n_ids for cells, _ in filled]),
        np.concatenate([cells.ids for cells, _ in filled]),
        np.concatenate(ext) if ext else None,
    )
    return Arranged(cells, tuple(share for _, share in filled))
