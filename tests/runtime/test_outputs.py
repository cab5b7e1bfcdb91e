"""Rows of logits, written as computed and read as batched."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.runtime.outputs import Outputs


def fill(outputs: Outputs, *pieces: list[int]) -> None:
    """Write each row as the batch index that it belongs to."""
    for piece in pieces:
        room = outputs.room_for(np.array(piece, np.int32))
        assert room.shape == (len(piece), 3)
        room[:] = np.array(piece)[:, None]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (([5], [3]), [3, 5]),
        (([0, 1, 2],), [0, 1, 2]),
        (([2, 5], [3, 4], [0]), [0, 2, 3, 4, 5]),
        (([7], [], [1]), [1, 7]),
        (([4],), [4]),
        (([],), []),
        ((), []),
    ],
)
def test_rows_are_read_in_batch_order(pieces: tuple[list[int], ...], expected: list[int]) -> None:
    """Equal splits compute sequence by sequence; the first case is example E1 of batch.md."""
    outputs = Outputs(np.empty((sum(map(len, pieces)), 3), np.float32))
    fill(outputs, *pieces)
    rows = outputs.in_batch_order()
    assert rows.shape == (len(expected), 3)
    assert rows[:, 0].tolist() == expected
    assert rows.dtype == np.float32
    assert not rows.flags.writeable
