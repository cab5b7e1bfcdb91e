"""Any batch against any memory: the same verdict as the rules written down one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batch_notation import Stored
from support.naive_batch import Entry, RuleBrokenError, naive_validate

from pykv.batch import Batch, BatchLimits, validate
from pykv.errors import BatchError

N_SEQ = 4
N_VOCAB = 10

good_seqs = st.integers(0, N_SEQ - 1)
any_seqs = st.one_of(good_seqs, st.integers(-1, N_SEQ))
id_lists = st.lists(good_seqs, min_size=1, max_size=1)
several = st.one_of(id_lists, st.lists(good_seqs, min_size=1, max_size=3, unique=True))
anything = st.lists(any_seqs, max_size=3, unique=True)
memories = st.one_of(
    st.none(),
    st.dictionaries(good_seqs, st.tuples(st.integers(0, 1), st.integers(1, 3)), max_size=N_SEQ).map(Stored),
    st.fixed_dictionaries({seq: st.tuples(st.integers(0, 1), st.just(2)) for seq in range(N_SEQ)}).map(Stored),
    st.just(Stored(dict.fromkeys(range(N_SEQ), (0, 2)))),
)


@st.composite
def continuing(draw: st.DrawFn, memory: Stored | None, ids: st.SearchStrategy[list[int]]) -> list[Entry]:
    """Draw entries that mostly continue the memory: each steps 1 on, with some slips."""
    stored = {seq: memory.pos_max(seq) if memory else -1 for seq in range(-1, N_SEQ + 1)}
    latest = {seq: last if last >= 0 else 2 for seq, last in stored.items()}  # room for steps back
    entries = []
    for entry_ids in draw(st.lists(ids, min_size=1, max_size=8)):
        step = draw(st.sampled_from([*[1] * 12, 0, 0, 2, -1, -9]))
        pos = max((latest[seq] for seq in entry_ids), default=0) + step
        latest.update(dict.fromkeys(entry_ids, pos))
        token = draw(st.sampled_from([*[*range(N_VOCAB)] * 20, -1, N_VOCAB]))
        entries.append(Entry(tuple(entry_ids), pos, token))
    return entries


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Entry], Stored | None]:
    memory = draw(memories)
    entries = draw(continuing(memory, draw(st.sampled_from([id_lists, id_lists, several, several, anything]))))
    if draw(st.sampled_from([True, False, False])):
        for entry in entries:
            entry.pos = None
    return entries, memory


def as_batch(entries: list[Entry], n_pos: int, pure_embd: bool) -> Batch:
    pos = None if entries[0].pos is None else [entry.pos for entry in entries]
    n = len(entries)
    if pure_embd and pos is not None:
        pos += [0] * (n * (n_pos - 1))
    ids = [entry.ids for entry in entries]
    if pure_embd:
        return Batch(None, pos, ids, embd=[[1.0]] * n)  # type: ignore[arg-type]
    return Batch([entry.token for entry in entries], pos, ids)  # type: ignore[arg-type]


def verdict(entries: list[Entry], memory: Stored | None, n_pos: int, pure_embd: bool) -> list[int] | RuleBrokenError:
    try:
        return naive_validate(entries, memory, n_vocab=N_VOCAB, n_seq_max=N_SEQ, n_pos=n_pos, pure_embd=pure_embd)
    except RuleBrokenError as broken:
        return broken


@settings(max_examples=300, deadline=None)
@given(case=cases(), n_pos=st.sampled_from([1, 1, 4]), pure_embd=st.booleans())
def test_any_batch_meets_the_verdict_of_the_rules(
    case: tuple[list[Entry], Stored | None], n_pos: int, pure_embd: bool
) -> None:
    entries, memory = case
    batch = as_batch(entries, n_pos, pure_embd)
    limits = BatchLimits(16, N_VOCAB, N_SEQ, n_pos_per_embd=n_pos, n_embd_inp=1)
    expected = verdict(entries, memory, n_pos, pure_embd)
    if isinstance(expected, RuleBrokenError):
        with pytest.raises(BatchError) as caught:
            validate(batch, limits, memory)
        if expected.seq is not None:
            assert caught.value.seq_id == expected.seq
            assert caught.value.last == (-1 if memory is None else memory.pos_max(expected.seq))
        return
    valid = validate(batch, limits, memory)
    assert valid.pos[0].tolist() == expected
    assert valid.pos.shape == (n_pos, len(entries))
    assert valid.seq_ids == tuple(tuple(sorted(entry.ids)) for entry in entries)
    assert valid.seq_id_unq == tuple(sorted({seq for entry in entries for seq in entry.ids}))
    assert valid.has_coupled == any(len(entry.ids) > 1 for entry in entries)
