"""Where windows and states are meant to differ: calls that are left out, and calls that llama.cpp is told otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from support.verb_program import Call
from support.verb_setting import Setting, Situation

from pykv.cells import clip_range

Ends = Sequence[int]
"""pos_min and pos_max of each sequence in turn, part by part; states come last."""


def fixed_positions(at: Situation) -> bool:
    """llama.cpp ends its process where a position is more than one number."""
    return at.is_move and not at.memory.can_shift()


def moves_without_layers(at: Situation) -> bool:
    """llama.cpp ends its process where all layers that attend have a window: it turns the keys of no layer too."""
    return at.is_move and len(at.caches) > 1 and all(la.is_swa for la in at.memory.spec.layers if la.n_head_kv)


def moves_of_unturned_keys(at: Situation) -> bool:
    """llama.cpp turns the keys of layers without RoPE too, as if they had it, where other layers do."""
    ropes = [layer.rope for layer in at.memory.spec.layers if layer.n_head_kv]
    return at.is_move and None in ropes and any(ropes)


def coupled_behind_windows(at: Situation) -> bool:
    """llama.cpp compares what is left in the windows, pykv where the sequences begin."""
    if not at.is_coupled or len(at.caches) < 2:
        return False
    base, swa = at.caches
    ends = [{(part.pos_min(s), part.pos_max(s)) for s in at.decoded} for part in (base, swa)]
    return (len(ends[0]) == 1) != (len(ends[1]) == 1)


def gap_behind_a_lost_window(at: Situation) -> bool:
    """To llama.cpp a sequence is empty, and may begin anywhere, if its window was overwritten before a cut."""
    if at.do != "decode" or len(at.caches) < 2:
        return False
    base, swa = at.caches
    return any(swa.pos_max(s) != base.pos_max(s) != p - 1 for s, p in at.decoded.items())


def coupled_states(at: Situation) -> bool:
    """llama.cpp takes no token of several sequences where there are only states; else all get the first one's."""
    if not at.is_coupled or at.states is None:
        return False
    return not at.caches or len({at.states.row(s) for s in at.decoded}) > 1


def apart_from_its_state(at: Situation) -> bool:
    """Where verbs have moved K and V but not the state, llama.cpp goes on behind the nearer of both."""
    if at.do != "decode" or at.states is None or not at.caches:
        return False
    return any(at.memory.pos_max(s) != at.states.pos_max(s) for s in at.decoded)


def part_of_a_state(at: Situation) -> bool:
    """llama.cpp copies the newest state whatever the range; pykv the one behind it, or says that it is not kept."""
    if at.do != "seq_cp" or at.states is None:
        return False
    src, dst, p0, p1 = at.call["args"]
    (first, end), last = clip_range(p0, p1), at.states.pos_max(src)
    return src != dst and first < end <= last and first <= max(last, 0)


def rollback_of_a_shared_state(at: Situation) -> bool:
    """llama.cpp takes the state back for all its sequences."""
    return at.setting.n_rs_seq > 0 and _rolls_back(at) and any(_shares(at, s) for s in _removed_from(at))


def rollback_by_positions(at: Situation) -> bool:
    """llama.cpp counts back by positions, whether or not a token is at each of them, and a state of it was kept."""
    if not (at.setting.n_rs_seq > 0 and _rolls_back(at)):
        return False
    assert at.states is not None
    table, p0 = at.states.table, clip_range(*at.call["args"][1:])[0]
    for s in _removed_from(at):
        back = table.pos(s) - (p0 - 1)
        theirs = back if not table.plane[s] and back <= at.setting.n_rs_seq else None
        if table.steps_back(s, p0) != theirs or (theirs and table.trail[s][theirs] != p0 - 1):
            return True
    return False


def rollback_behind_a_gap(at: Situation) -> bool:
    """llama.cpp takes the state back to the position before, pykv to the last token that is left, if any."""
    if not (_rolls_back(at) and at.caches):
        return False
    p0 = clip_range(*at.call["args"][1:])[0]
    return any(p0 - 1 not in at.memory.seen(s)[0] for s in _removed_from(at))


def outlived_rollback(at: Situation) -> bool:
    """In llama.cpp a rollback that no token has followed outlives its sequence, and does not go to copies."""
    if at.states is None or not any(at.states.table.plane):
        return False
    plane = at.states.table.plane
    if at.do == "seq_cp":
        return bool(plane[at.call["args"][0]])
    if at.do == "seq_rm":
        return clip_range(*at.call["args"][1:]) != clip_range(-1, -1) and any(plane[s] for s in _removed_from(at))
    return (at.do == "seq_keep" and any(p for s, p in enumerate(plane) if s != at.call["args"][0])) or (
        at.is_coupled and any(plane[s] for s in at.decoded)
    )


def state_below_zero(at: Situation) -> bool:
    """llama.cpp keeps a state whose position falls below 0, in a cell that counts as empty; in pykv it is removed."""
    if at.do != "seq_add" or at.states is None:
        return False
    s, p0, p1, delta = at.call["args"]
    first, end = clip_range(p0, p1)
    return first <= at.states.pos_max(s) < end and at.states.pos_max(s) + delta < 0


def keeps_of_one_state(at: Situation) -> bool:
    """llama.cpp drops the states of other streams, whose K and V stay."""
    return at.do == "seq_keep" and at.states is not None and bool(at.caches) and not at.setting.unified


OF_KINDS: tuple[Callable[[Situation], bool], ...] = (
    fixed_positions,
    moves_without_layers,
    moves_of_unturned_keys,
    gap_behind_a_lost_window,
    coupled_behind_windows,
    coupled_states,
    apart_from_its_state,
    part_of_a_state,
    rollback_of_a_shared_state,
    rollback_by_positions,
    rollback_behind_a_gap,
    outlived_rollback,
    state_below_zero,
    keeps_of_one_state,
)


def states_for_llama_cpp(call: Call, setting: Setting, ends: Ends, result: object) -> list[Call]:
    """Return what llama.cpp must be told where there are states.

    It takes no -1 for all sequences, copies states whatever the range is, and puts what is copied beside the K and V
    that are there already.
    """
    if call["do"] == "seq_rm" and call["args"][0] == -1:
        every = range(setting.n_seqs) if result is True else ()
        return [{"do": "seq_rm", "args": [s, *call["args"][1:]]} for s in every]
    if call["do"] == "seq_cp":
        src, dst, p0, p1 = call["args"]
        first, end = clip_range(p0, p1)
        last = ends[-2 * setting.n_seqs :][2 * src + 1]
        is_copied = src != dst and first < end and first <= max(last, 0)
        return [{"do": "seq_rm", "args": [dst, -1, -1]}, call] if is_copied else []
    return [call]


def _rolls_back(at: Situation) -> bool:
    return at.do == "seq_rm" and at.states is not None and clip_range(*at.call["args"][1:])[0] > 0


def _removed_from(at: Situation) -> list[int]:
    """Return the sequences whose newest token a removal is about."""
    assert at.states is not None
    seq_id, p0, p1 = at.call["args"]
    first, end = clip_range(p0, p1)
    seqs = range(at.setting.n_seqs) if seq_id == -1 else [seq_id]
    return [s for s in seqs if first <= at.states.pos_max(s) < end]


def _shares(at: Situation, seq_id: int) -> bool:
    assert at.states is not None
    table = at.states.table
    return len(table.owners[table.tail[seq_id]]) > 1
