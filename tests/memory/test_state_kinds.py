"""Saved, removed, loaded and saved again: the same bytes, for every kind of memory that there is."""

from __future__ import annotations

from typing import Any

import pytest
from support.memory_kinds import BY_NAME, SETTINGS, Setting, has_state, name_of, opened
from support.state_io import load, saved
from support.state_kinds import decode, fill, scribble

EACH = pytest.mark.parametrize("setting", SETTINGS, ids=name_of)


def filled(memory: Any, setting: Setting) -> None:
    """Hold three sequences; of states, sequence 0 has gone back to one that was kept, if any is."""
    fill(memory)
    n_rs_seq = setting[2]
    if n_rs_seq:
        decode(memory, 0, n_rs_seq)
        scribble(memory, 1)
        assert memory.seq_rm(0, memory.pos_max(0) - 1)


@EACH
@pytest.mark.parametrize("seq_id", [-1, 0, 1, 2])
def test_the_bytes_come_back(setting: Setting, seq_id: int) -> None:
    with opened(setting) as memory:
        if BY_NAME[setting[0]].is_lent:
            assert saved(memory, seq_id) == b"", "its cells are the other one's, and nobody saves them twice"
            return
        filled(memory, setting)
        before = {s: saved(memory, s) for s in (-1, 0, 1, 2)}
        ends = [memory.pos_max(s) for s in range(3)]
        memory.seq_rm(seq_id)
        assert not load(memory, before[seq_id], seq_id)
        memory.check()
        assert [saved(memory, s) for s in range(3)] == [before[s] for s in range(3)]
        assert seq_id != -1 or saved(memory) == before[-1]
        assert [memory.pos_max(s) for s in range(3)] == ends
        for s in range(3):
            decode(memory, s, 1)


@EACH
def test_what_is_left_of_a_sequence_comes_back_elsewhere(setting: Setting) -> None:
    """Into the cells that another one holds, in a memory that held something else; there is nothing to go back to."""
    if BY_NAME[setting[0]].is_lent:
        return
    with opened(setting) as one, opened(setting) as other:
        filled(one, setting)
        fill(other, 3)
        blob = saved(one, 0)
        load(other, blob, 2)
        other.check()
        assert other.pos_max(2) == one.pos_max(0)
        if has_state(other):
            assert not other.seq_rm(2, other.pos_max(2))
        load(other, saved(other, 2), 0)
        assert saved(other, 0) == blob
