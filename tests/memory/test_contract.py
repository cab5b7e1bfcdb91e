"""One contract for every kind of memory: every verb, with one stream and with several, against plain lists.

After each verb all parts agree on where a sequence ends, all invariants hold, and what was refused has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kv_scene import Token, plan_batch, run
from support.memory_kinds import (
    BY_NAME,
    N_CELLS,
    N_SEQ,
    N_UBATCH,
    SETTINGS,
    Kind,
    Setting,
    has_state,
    leaves,
    lender_of,
    name_of,
    opened,
)
from support.naive_sequences import NaiveSequences
from support.resume_runs import spread

from pykv.cells import SwaType
from pykv.errors import BatchError, ParamError, PykvError, SequenceError, ShiftUnsupported, UseAfterCloseError
from pykv.memory import AttentionPath, AttentionPlan, KVCache, Memory, RecurrentMemory, iswa


@pytest.fixture(autouse=True)
def _unpadded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iswa, "PAD", 1)


@pytest.fixture(params=SETTINGS, ids=name_of)
def setting(request: pytest.FixtureRequest) -> Setting:
    return request.param


@pytest.fixture
def kind(setting: Setting) -> Kind:
    return BY_NAME[setting[0]]


@pytest.fixture
def memory(setting: Setting) -> Iterator[Memory]:
    with opened(setting) as one:
        yield one


def store(memory: Memory, tokens: list[Token]) -> bool:
    """Write the bookkeeping of some tokens, where it is kept; False if there is no room."""
    plan = plan_batch(lender_of(memory) or memory, tokens, N_UBATCH)
    for i in range(0 if plan is None else len(plan.ubatches)):
        plan.apply(i)
    return plan is not None


def everything(memory: Memory) -> list[Any]:
    """Return what all parts hold, and where each sequence lies."""
    found: list[Any] = [(memory.pos_min(s), memory.pos_max(s)) for s in range(N_SEQ)]
    for leaf in leaves(memory):
        found.append([leaf.dump(stream) for stream in range(leaf.n_stream)])
        if isinstance(leaf, KVCache):
            found.append([view.shift.tolist() for view in map(leaf.cells, range(leaf.n_stream))])
            found.append(len(leaf.streams.pending_copies))
        else:
            found.append([spread(leaf.resume_points(s, 40), 40) for s in range(N_SEQ)])
    return found


def agree(memory: Memory, naive: NaiveSequences) -> None:
    """Hold positions of the whole and of all its parts against the lists."""
    memory.check()
    for s in range(N_SEQ):
        pos = sorted({p for p, _ in naive.rows(s)})
        if isinstance(memory, KVCache) and memory.spec.window.type is not SwaType.NONE:
            # what it hid may have been overwritten: a cut that brings it back into sight finds less, or nothing
            assert memory.pos_max(s) in (-1, *pos), f"sequence {s}"
        else:
            assert memory.pos_max(s) == (pos[-1] if pos else -1), f"sequence {s}"
        for leaf in leaves(memory):
            if isinstance(leaf, RecurrentMemory):
                assert leaf.pos_max(s) == memory.pos_max(s), f"state of sequence {s}"
            elif leaf.spec.window.type is SwaType.NONE:
                assert sorted({*leaf.seen(s)[0].tolist()}) == pos, f"sequence {s}"
                assert leaf.pos_min(s) == (pos[0] if pos else -1)
            else:
                assert {*leaf.seen(s)[0].tolist()} <= set(pos)
                assert leaf.pos_max(s) in (-1, *pos)
        if not isinstance(memory, KVCache):  # which may have a window itself
            first = pos[-1:] if has_state(memory) else pos[:1]
            assert memory.pos_min(s) == (first[0] if first else -1)


def has_doubles(naive: NaiveSequences) -> bool:
    """Tell whether some sequence holds several tokens at one position."""
    return any(len({p for p, _ in naive.rows(s)}) < len(naive.rows(s)) for s in range(N_SEQ))


def decode(memory: Memory, naive: NaiveSequences, s: int, n: int) -> None:
    """Continue a sequence by some tokens if it can be; else nothing has changed, and it is said from where it can."""
    memory.update()  # which a batch begins with, whatever becomes of it
    first, before = memory.pos_max(s) + 1, everything(memory)
    try:
        is_stored = store(memory, run(s, range(first, first + n)))
    except BatchError as error:
        answer = memory.resumable(s, first)
        is_told = has_doubles(naive) or f"from {answer.largest} on" in str(error)
        is_refused = has_doubles(naive) or not answer  # of two tokens at one position one may be lost
        assert (is_refused, is_told, everything(memory) == before) == (True, True, True), error  # noqa: PT017
        return
    if not is_stored:
        assert has_doubles(naive), "nothing else overfills a window"
        assert everything(memory) == before
        return
    for p in range(first, first + n):
        naive.store(s, p, p)


@pytest.fixture
def naive(memory: Memory) -> NaiveSequences:
    """Fill the memory: sequence 0 longer than a window cache, sequence 1 short, sequence 2 empty."""
    one = NaiveSequences(N_SEQ, N_CELLS, memory.n_stream == 1)
    for s, n in ((0, 22), (1, 6)):
        decode(memory, one, s, n)
    return one


def become(naive: NaiveSequences, is_state: bool, src: int, dst: int, p0: int, p1: int) -> None:
    """Copy as memories with states do: what `dst` held goes. A state alone begins with its first token, whatever p0."""
    last = max((p for p, _ in naive.rows(src)), default=-1)
    end = 2**31 if p1 < 0 else p1
    if src != dst and max(p0, 0) < end and p0 <= max(last, 0):
        naive.held[dst] = []
        naive.seq_cp(src, dst, 0 if is_state else p0, p1)


CALLS = [
    ("seq_rm", (0,)), ("seq_rm", (0, 4, 9)), ("seq_rm", (0, 0, 5)), ("seq_rm", (0, 20)), ("seq_rm", (0, 10)),
    ("seq_rm", (0, 0, 22)), ("seq_rm", (0, 22)), ("seq_rm", (1, 30, 40)), ("seq_rm", (2,)), ("seq_rm", (-1,)),
    ("seq_rm", (-1, 4)), ("seq_rm", (-1, 0, 6)), ("seq_rm", (0, 5, 5)), ("seq_rm", (0, 9, 4)),
    ("seq_cp", (0, 2)), ("seq_cp", (0, 1)), ("seq_cp", (1, 0)), ("seq_cp", (2, 1)), ("seq_cp", (0, 0)),
    ("seq_cp", (0, 2, 0, 20)), ("seq_cp", (0, 2, 0, 9)), ("seq_cp", (0, 2, 6, -1)), ("seq_cp", (0, 2, 30, 40)),
    ("seq_keep", (0,)), ("seq_keep", (1,)), ("seq_keep", (2,)),
    ("seq_add", (0, 0, -1, 5)), ("seq_add", (0, 10, -1, 5)), ("seq_add", (1, 0, -1, -3)), ("seq_add", (1, 0, -1, -9)),
    ("seq_add", (0, 2, 9, 0)), ("seq_add", (2, 0, -1, 4)), ("seq_div", (0, 0, -1, 2)), ("seq_div", (1, 0, 4, 3)),
    ("seq_add", (1, 5, -1, -99)), ("seq_div", (0, 0, -1, 1)), ("clear", ()), ("clear", (False,)),
]  # fmt: skip


MOVES = {"seq_add": (0,), "seq_div": (1,)}
"""Verbs that move positions, and by how much they leave all where they are."""

NEED_SNAPSHOTS = {
    ("seq_rm", (0, 20)), ("seq_rm", (0, 10)), ("seq_rm", (-1, 4)), ("seq_cp", (0, 2, 0, 20)), ("seq_cp", (0, 2, 0, 9)),
}  # fmt: skip
"""What a state must be taken back for."""


def loses_its_end(naive: NaiveSequences, s: int, p0: int, p1: int, delta: int) -> bool:
    """Tell whether the last token of a sequence falls below 0."""
    last = max((p for p, _ in naive.rows(s)), default=-1)
    return max(p0, 0) <= last and (p1 < 0 or last < p1) and last + delta < 0


def tell_naive(memory: Memory, naive: NaiveSequences, verb: str, args: tuple) -> None:
    if lender_of(memory):
        return
    full = args + (-1,) * {"seq_rm": 3 - len(args), "seq_cp": 4 - len(args)}.get(verb, 0)
    if verb == "clear":
        naive.held = [[] for _ in range(N_SEQ)]
    elif verb == "seq_keep" and isinstance(memory, RecurrentMemory):
        naive.held = [rows if s == args[0] else [] for s, rows in enumerate(naive.held)]
    elif verb == "seq_cp" and has_state(memory):
        become(naive, isinstance(memory, RecurrentMemory), *full)
    elif verb == "seq_add" and has_state(memory) and loses_its_end(naive, *full):
        naive.held[full[0]] = []
    else:
        getattr(naive, verb)(*full)


@pytest.mark.parametrize(("verb", "args"), CALLS, ids=lambda part: str(part).replace(" ", ""))
def test_every_verb_of_every_kind(
    memory: Memory, kind: Kind, naive: NaiveSequences, verb: str, args: tuple[Any, ...]
) -> None:
    heard: list[tuple] = []
    memory.listeners.append(lambda *call: heard.append(call))
    before, result = everything(memory), None
    try:
        result = getattr(memory, verb)(*args)
    except (ParamError, ShiftUnsupported) as error:
        result = error
    assert [(name, outcome) for name, _, outcome in heard] == [(verb, result)]
    is_fixed = kind.why_fixed is not None and verb in MOVES
    assert isinstance(result, ShiftUnsupported) == is_fixed
    if result is False or isinstance(result, ParamError):
        assert has_state(memory)
        assert (verb, args) in NEED_SNAPSHOTS
        assert everything(memory) == before
    elif is_fixed or kind.is_lent:
        assert everything(memory) == before
    else:
        tell_naive(memory, naive, verb, args)
    agree(memory, naive)
    for s in range(N_SEQ):
        decode(memory, naive, s, 1)
    agree(memory, naive)


def test_whether_positions_can_be_moved(memory: Memory, kind: Kind, naive: NaiveSequences) -> None:
    """All parts say the same, and where they cannot, even a move by nothing is refused for that reason."""
    support, before = memory.can_shift(), everything(memory)
    assert (bool(support), support.reason) == (kind.why_fixed is None, kind.why_fixed)
    for verb, args in MOVES.items() if kind.why_fixed else ():
        with pytest.raises(ShiftUnsupported) as refused:
            getattr(memory, verb)(0, 0, -1, *args)
        assert refused.value.reason == kind.why_fixed
    assert everything(memory) == before


def test_what_each_kind_cannot_do(memory: Memory, kind: Kind, naive: NaiveSequences) -> None:
    """Cuts behind the last token: refused where a state has no snapshot, and done everywhere else."""
    n_rs_seq = min(leaf.n_rs_seq if isinstance(leaf, RecurrentMemory) else N_CELLS for leaf in leaves(memory))
    assert memory.seq_rm(0, 21) is (n_rs_seq >= 1)
    assert memory.seq_rm(1, 1) is (n_rs_seq >= 5)
    assert memory.seq_rm(1) is True
    assert memory.seq_rm(-1) is True
    assert [memory.pos_max(s) for s in range(N_SEQ)] == ([21, 5, -1] if kind.is_lent else [-1] * N_SEQ)
    memory.check()


@pytest.mark.parametrize("setting", [one for one in SETTINGS if BY_NAME[one[0]].row is not None], ids=name_of)
def test_what_each_kind_stores_of_a_token(memory: Memory, kind: Kind) -> None:
    """Layers that read the rows of others add nothing, and V that is the front of K is not stored again."""
    assert memory.nbytes == N_CELLS * memory.n_stream * kind.row


WRONG: list[tuple[str, tuple, type[Exception]]] = [
    ("seq_rm", (3,), SequenceError), ("seq_rm", (-2,), SequenceError), ("seq_rm", ("0",), SequenceError),
    ("seq_rm", (0, 1.5), ParamError), ("seq_rm", (0, 0, "end"), ParamError), ("seq_cp", (0, 3), SequenceError),
    ("seq_cp", (3, 0), SequenceError), ("seq_cp", (-1, 0), SequenceError), ("seq_cp", (0, 1, "a", 2), ParamError),
    ("seq_keep", (3,), SequenceError), ("seq_keep", (-1,), SequenceError), ("seq_add", (3, 0, -1, 1), SequenceError),
    ("seq_add", (0, 0, -1, 0.5), ParamError), ("seq_add", (0, 0, -1, 2**31 - 3), ParamError),
    ("seq_div", (0, 0, -1, 0), ParamError), ("seq_div", (0, 0, -1, -2), ParamError),
    ("seq_div", (-1, 0, -1, 2), SequenceError),
    ("clear", (1,), ParamError), ("pos_max", (3,), SequenceError), ("pos_min", (-1,), SequenceError),
    ("resumable", (3, 0), SequenceError), ("resumable", (0, -1), ParamError), ("resumable", (0, 1.0), ParamError),
]  # fmt: skip


TOO_FAR = ("seq_add", (0, 0, -1, 2**31 - 3))
"""Wrong because of the tokens that it would move."""


def test_wrong_arguments_change_nothing(memory: Memory, kind: Kind, naive: NaiveSequences) -> None:
    before = everything(memory)
    for verb, args, error in WRONG:
        is_fixed = kind.why_fixed is not None and verb in MOVES and error is ParamError
        is_harmless = kind.is_lent and (verb, args) == TOO_FAR  # nothing moves
        with nullcontext() if is_harmless else pytest.raises(ShiftUnsupported if is_fixed else error):
            getattr(memory, verb)(*args)
        assert everything(memory) == before, (verb, args)
    agree(memory, naive)


USES: list[Callable[[Memory], object]] = [
    lambda m: m.seq_rm(0), lambda m: m.seq_cp(0, 1), lambda m: m.seq_keep(0), lambda m: m.seq_add(0, 0, -1, 1),
    lambda m: m.seq_div(0, 0, -1, 2), lambda m: m.clear(), lambda m: m.pos_min(0), lambda m: m.pos_max(0),
    lambda m: m.update(), lambda m: m.resumable(0, 3), lambda m: m.resume_points(0, 3), lambda m: m.cells(),
    lambda m: m.seen(0), lambda m: m.visible(0, 3), lambda m: m.check(), lambda m: m.dump(), lambda m: m.nbytes,
    lambda m: m.require_open(), lambda m: plan_batch(m, [(0, 22)]),
]  # fmt: skip


def test_a_closed_memory_refuses_everything(memory: Memory, naive: NaiveSequences) -> None:
    memory.close()
    memory.close()
    for use in USES:
        with pytest.raises(UseAfterCloseError):
            use(memory)


def test_all_say_how_full_they_are(memory: Memory, naive: NaiveSequences) -> None:
    assert "used" in memory.used
    assert memory.nbytes > 0
    assert memory.owners
    assert memory.dump()
    assert all(shape.n_tokens >= 8 for shape in memory.full_shapes(8, AttentionPlan.of(AttentionPath.FLASH)))


CALL = st.sampled_from([call for call in CALLS if call[0] != "clear"])


@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
@settings(max_examples=6, deadline=None)
@given(calls=st.lists(st.tuples(CALL, st.integers(0, N_SEQ - 1), st.integers(0, 9)), max_size=8))
def test_random_programs(setting: Setting, calls: list) -> None:
    """Verbs and decodes in any order, in every kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iswa, "PAD", 1)
        with opened(setting) as memory:
            one = NaiveSequences(N_SEQ, N_CELLS, memory.n_stream == 1)
            for (verb, args), s, n in calls:
                if 0 < n <= one.n_free(s):
                    decode(memory, one, s, n)
                before = everything(memory)
                try:
                    result = getattr(memory, verb)(*args)
                except PykvError:
                    result = False
                if result is False:
                    assert everything(memory) == before
                else:
                    tell_naive(memory, one, verb, args)
                agree(memory, one)
