"""Which calls a program leaves out, because pykv and llama.cpp are known and meant to differ there."""

from __future__ import annotations

from collections.abc import Callable

from support.verb_program import Call
from support.verb_rules_kinds import OF_KINDS, Ends, states_for_llama_cpp
from support.verb_setting import Setting, Situation

from pykv.memory.rope_turn import magnitude

WINDOW_GONE = "window gone"
"""What a decode gives that pykv refuses since tokens that it must see were overwritten. llama.cpp would compute it."""


def part_across_streams(at: Situation) -> bool:
    """llama.cpp ends its process, or takes a part for the whole."""
    if at.call["do"] != "seq_cp" or at.setting.unified or not at.setting.in_their_streams:
        return False
    src, dst, p0, p1 = at.call["args"]
    return src != dst and not (p0 <= 0 and p1 < 0)


def coupled_in_streams(at: Situation) -> bool:
    """To llama.cpp there is no room for the batch; pykv says that no smaller one could be taken either."""
    in_streams = at.setting.in_their_streams or not at.setting.unified
    return in_streams and at.is_coupled


def yarn_moves(at: Situation) -> bool:
    """llama.cpp multiplies all stored keys by YaRN's magnitude at every shift; pykv turns the moved ones only."""
    ropes = [layer.rope for layer in at.memory.spec.layers if layer.rope is not None]
    return at.is_move and any(abs(magnitude(rope) - 1) > 1e-6 for rope in ropes)


def shared_moves(at: Situation) -> bool:
    """llama.cpp moves a shared cell for all its sequences; pykv first gives the mover one of its own."""
    return not at.setting.reference_moves and not at.setting.in_their_streams and at.is_shared_move


def moves_of_copies(at: Situation) -> bool:
    """What pykv has copied across streams, llama.cpp shares, and would move for all."""
    return at.is_move and not at.setting.unified and not at.setting.in_their_streams


def copies_beside_others(at: Situation) -> bool:
    """In one stream a copy comes to what is there already, or is a part; across llama.cpp's streams it is all."""
    if at.call["do"] != "seq_cp" or not at.setting.unified or not at.setting.in_their_streams:
        return False
    src, dst, p0, p1 = at.call["args"]
    return src != dst and not (p0 <= 0 and p1 < 0 and at.memory.pos_max(dst) < 0)


def keeps_of_one_stream(at: Situation) -> bool:
    """In one stream all other sequences go, with a stream for each all stay."""
    return at.setting.is_mixed and at.call["do"] == "seq_keep"


def room_for_one(at: Situation) -> bool:
    """One stream is full at another time than several."""
    return at.setting.is_mixed and at.call["do"] == "decode" and len(at.call["pos"]) > 16


def twins(at: Situation) -> bool:
    """Tokens at one position see each other if they are computed at once, and streams split batches otherwise."""
    if not at.setting.is_mixed or at.call["do"] != "decode":
        return False
    places = [(tuple(ids), p) for ids, p in zip(at.call["seq"], at.call["pos"], strict=True)]
    return len(set(places)) < len(places)


EXCLUDED: tuple[Callable[[Situation], bool], ...] = (
    part_across_streams,
    coupled_in_streams,
    yarn_moves,
    shared_moves,
    moves_of_copies,
    copies_beside_others,
    keeps_of_one_stream,
    room_for_one,
    twins,
    *OF_KINDS,
)
"""Calls that a program leaves out because the two sides are meant to differ; each docstring is the reason."""


def for_llama_cpp(call: Call, setting: Setting, ends: Ends, result: object) -> list[Call]:
    """Return what llama.cpp must be told to do the same, nothing if it shall not do it.

    Parameters
    ----------
    ends : before the call.
    result : what the call gave in pykv.
    """
    if result == WINDOW_GONE:
        return []
    if setting.has_states:
        return states_for_llama_cpp(call, setting, ends, result)
    if call["do"] == "seq_div" and not setting.reference_moves:
        return _as_additions(call, ends)
    if call["do"] == "seq_cp" and not setting.unified and not setting.in_their_streams:
        src, dst, p0, p1 = call["args"]
        return [] if src == dst else [{"do": "seq_rm", "args": [dst, p0, p1]}, call]
    return [call]


def _as_additions(call: Call, ends: Ends) -> list[Call]:
    """Return the moves that a division comes to: llama.cpp's own turns keys the wrong way."""
    seq_id, p0, p1, d = call["args"]
    last = ends[2 * seq_id + 1]
    # upwards: what has moved lies below what is still to move
    moved = range(max(p0, 0), (last if p1 < 0 else min(p1 - 1, last)) + 1)
    return [{"do": "seq_add", "args": [seq_id, p, p + 1, p // d - p]} for p in moved if p // d != p]
