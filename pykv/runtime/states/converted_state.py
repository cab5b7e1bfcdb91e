"""Plans the conversion of a state: its head, who is in it, and its sections. What cannot be is refused here."""

from __future__ import annotations

import numpy as np

from pykv.errors import ParamError
from pykv.ggml.types import BY_NUMBER
from pykv.memory.state_convert import Form
from pykv.runtime.states.arrange import Aim, arrange_states
from pykv.runtime.states.conversion_plan import ConversionPlan, Wanted
from pykv.runtime.states.converted_kv import ConvertedKV
from pykv.runtime.states.moved_rows import MovedRows, Taken
from pykv.runtime.states.read_state import ReadState, StoredRows
from pykv.state_format import (
    Container,
    Kind,
    KVSection,
    RowsLayout,
    RowsRecord,
    StatesLayout,
    StatesSection,
    context_head,
    sequence_bytes_head,
    sequence_head,
    session_head,
    states_heads,
)
from pykv.typing import I32Array


def plan_conversion(state: ReadState, wanted: Wanted) -> ConversionPlan:
    """Return what to write for a state to become what is wanted.

    Raises
    ------
    ParamError : it cannot be that, or not without something that is not said.
    StateError : streams of the state do not fit each other.
    """
    container = state.saved.container
    plan = ConversionPlan(wanted.kind or container.kind, wanted.dialect or state.dialect)
    if plan.kind is not container.kind:
        plan.note(f"{container.kind.value} → {plan.kind.value}")
    if plan.dialect is not state.dialect:
        plan.note(f"dialect {state.dialect} → {plan.dialect}")
    aim = _aim(state, wanted, plan)
    plan.begin_part()
    plan.pieces.append(_head(container, wanted, plan, aim))
    for section in state.sections:
        plan.begin_part()
        if isinstance(section, KVSection):
            ConvertedKV(section, state.data, wanted, plan).add(aim)
        else:
            _add_states(section, state, plan, aim)
    if wanted.rotation is not None and not plan.uses_rotation:
        k, v = wanted.rotation
        raise ParamError(
            f"rotation={k},{v}: only quantised rows are rotated, and no row is or becomes so; leave it out"
        )
    return plan


def _aim(state: ReadState, wanted: Wanted, plan: ConversionPlan) -> Aim:
    """Return who is in the result, and note who is not."""
    have, kind = state.sequences(), plan.kind
    if state.is_whole and kind.whole:
        if wanted.seq_id is not None:
            raise ParamError(
                f"seq_id={wanted.seq_id}: a {kind.value} holds all sequences; one of them needs to=sequence"
            )
        return Aim(None, None, is_whole=True)
    if not state.is_whole:
        own = have[0] if have else 0
        number = own if wanted.seq_id is None else wanted.seq_id
        if number != own:
            plan.note(f"sequence {own} → {number}")
        return Aim(None, number, kind.whole)
    there = f"it holds {', '.join(map(str, have)) or 'none'}"
    if wanted.seq_id is None and len(have) != 1:
        raise ParamError(f"seq_id: a {kind.value} holds one sequence, say which; {there}")
    seq_id = have[0] if wanted.seq_id is None else wanted.seq_id
    if seq_id not in have:
        raise ParamError(f"seq_id={seq_id}: no such sequence; {there}")
    others = [str(s) for s in have if s != seq_id]
    if others:
        left = f"sequence{'' if len(others) == 1 else 's'} {', '.join(others)}"
        plan.note(f"sequence {seq_id} taken; left out: {left}", is_lossless=False)
    return Aim(seq_id, seq_id, is_whole=False)


def _head(container: Container, wanted: Wanted, plan: ConversionPlan, aim: Aim) -> bytes:
    kind, tokens = plan.kind, _tokens(container, plan)
    if not kind.whole:
        if wanted.arch is not None:
            raise ParamError(f"arch={wanted.arch}: a {kind.value} names no architecture; leave it out")
        return (
            sequence_head(tokens, plan.dialect) if kind is Kind.SEQUENCE_FILE else sequence_bytes_head(aim.number or 0)
        )
    arch = wanted.arch or container.arch
    if arch is None:
        raise ParamError(
            f"arch: a {kind.value} names the model's architecture, which the source does not; say arch=llama or so"
        )
    if container.arch is not None and arch != container.arch:
        plan.note(f"architecture {container.arch} → {arch}", is_lossless=False)
    return session_head(tokens, arch, plan.dialect) if kind is Kind.SESSION_FILE else context_head(arch)


def _tokens(container: Container, plan: ConversionPlan) -> I32Array:
    """Return the tokens of the result; none where its kind has no place for them."""
    is_file = plan.kind in (Kind.SESSION_FILE, Kind.SEQUENCE_FILE)
    if container.tokens is None:
        if is_file:
            plan.note("no tokens in it, since the source has none")
        return np.empty(0, np.int32)
    if container.tokens.size and not is_file:
        n = container.tokens.size
        what = f"{n} token{'' if n == 1 else 's'} left out: a {plan.kind.value} has no place for them"
        plan.note(what, is_lossless=False)
    return container.tokens


def _add_states(section: StatesSection, state: ReadState, plan: ConversionPlan, aim: Aim) -> None:
    arranged, n, data = arrange_states(section, aim), section.cells.n, state.data

    def moved(record: RowsRecord) -> MovedRows:
        rows = StoredRows(record, n, Form(BY_NUMBER[record.dtype]), data)
        return MovedRows([Taken(rows, share.picked) for share in arranged.shares], rows.form)

    layouts = [tuple(RowsLayout(one.dtype, one.row_bytes) for one in rows) for rows in (section.r, section.s)]
    heads = states_heads(arranged.cells, StatesLayout(n, n, section.n_layer, *layouts))
    plan.pieces.append(heads.first)
    for head, record in zip(heads.rows, section.r + section.s, strict=True):
        plan.pieces.append(head)
        if arranged.shares:
            plan.pieces.append(moved(record))
