"""What a sequence held, told apart from what it holds now, and cells that are put back where they were."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ubatches import run

from pykv.batch import UBatch
from pykv.cells import CellStreams, SwaType, Window
from pykv.cells.kept_cells import History, KeptCells
from pykv.errors import NoSlotError

POSITIONS = st.dictionaries(st.integers(0, 11), st.integers(0, 2), max_size=10)


def stored(tokens: dict[int, int], order: list[int]) -> CellStreams:
    """Return a stream of sequence 0, its tokens by position, in cells of any order."""
    streams = CellStreams(16)
    cells = streams.cells[0]
    for cell, p in enumerate(order):
        cells.store(np.array([cell]), np.array([p], np.int32), ((0,),))
        cells.ext_set(cell, 0, 0, tokens[p])
    return streams


@settings(max_examples=200, deadline=None)
@given(then=POSITIONS, now=POSITIONS, p=st.integers(0, 12), data=st.data())
def test_what_is_gone_is_named(then: dict[int, int], now: dict[int, int], p: int, data: st.DataObject) -> None:
    """By positions first, by tokens where those agree; the cells do not matter."""
    histories = [
        History.of(stored(tokens, data.draw(st.permutations(sorted(tokens)))).cells[0], 0, p) for tokens in (then, now)
    ]
    found = histories[0].gone_from(histories[1])
    old, new = ({at: token for at, token in tokens.items() if at < p} for tokens in (then, now))
    if old == new:
        assert found is None
    elif lost := sorted(old.keys() - new.keys()):
        assert found.startswith(f"lacks positions {lost[0]} to ")
        end = int(found.split()[-1])
        assert set(range(lost[0], end + 1)) <= set(lost)
        assert end + 1 not in lost
    elif more := sorted(new.keys() - old.keys()):
        assert found.startswith(f"holds also positions {more[0]} to ")
    else:
        assert found == "holds other tokens at the same positions"


@settings(max_examples=150, deadline=None)
@given(
    n_swa=st.integers(1, 6),
    kind=st.sampled_from([SwaType.STANDARD, SwaType.CHUNKED]),
    sizes=st.lists(st.integers(1, 4), max_size=12),
    again=st.lists(st.integers(1, 4), min_size=1, max_size=6),
)
def test_tokens_take_the_cells_that_they_took(n_swa: int, kind: SwaType, sizes: list[int], again: list[int]) -> None:
    """Restored, the same ubatches find the same cells, wherever the window stood in the ring."""
    streams = CellStreams(n_swa + 5, window=Window(n_swa, kind))

    def decode(n: int) -> list[int]:
        first = streams.pos_max(0) + 1
        some = run(0, first, first + n)
        slot = streams.find_slot(some)
        assert slot is not None
        streams.apply(slot, some)
        return slot.idxs[0].tolist()

    for n in sizes:
        decode(n)
    end = streams.pos_max(0) + 1
    seen = max(0, streams.window.span(end)[0])
    kept = KeptCells.of(streams, 0, seen)
    first = [decode(n) for n in again]
    assert kept.put_into(streams, 0).tolist() == kept.idxs.tolist()
    streams.check()
    assert sorted(streams.cells[0].pos[kept.idxs].tolist()) == [*range(seen, end)]
    assert [decode(n) for n in again] == first


def test_no_room() -> None:
    streams = CellStreams(4, n_seq_max=2)
    store(streams, run(0, 0, 3))
    kept = KeptCells.of(streams, 0, 0)
    streams.seq_rm(0)
    store(streams, run(1, 0, 4))
    with pytest.raises(NoSlotError, match="3 cells of a snapshot, and stream 0 has 0 free"):
        kept.put_into(streams, 0)


def store(streams: CellStreams, some: UBatch) -> None:
    streams.apply(streams.find_slot(some), some)
