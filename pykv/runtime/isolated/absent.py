"""What an isolated model and its contexts cannot offer, because it lies in another process; and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

_TENSORS = "tensors lie in the process of the model; read rows with memory.k, .v, .r and .s, or save a state"
_GRAPHS = "graphs are built in the process of the model"
_PARTS = "it is made of parts in the process of the model; memory.cells, .visible and .dump show what they hold"
_TELLS = "functions of this program cannot be called amid a verb there; a trace records all verbs"
_GUARD = "the process of the model guards its memory itself"
_STATES = "states go through state_bytes, load_state_bytes and files"

MODEL: Mapping[str, str] = {"architecture": _GRAPHS, "owners": _TENSORS}

MEMORY: Mapping[str, str] = {
    "apply": _GRAPHS,
    "attention": _PARTS,
    "base": _PARTS,
    "begin_batch": _GRAPHS,
    "beside": _PARTS,
    "bookmark": _GUARD,
    "check_coupled": _GRAPHS,
    "check_share": _GRAPHS,
    "cut_rest": _STATES,
    "ends_misfit": _STATES,
    "follow": _GUARD,
    "full_shapes": _GRAPHS,
    "graph": _GRAPHS,
    "guard": _GUARD,
    "half": _PARTS,
    "index": _PARTS,
    "init_batch": _GRAPHS,
    "kv_of": _PARTS,
    "lay_out": _GRAPHS,
    "lay_out_v": _GUARD,
    "listeners": _TELLS,
    "load_state": _STATES,
    "main": _PARTS,
    "moved_at": _GUARD,
    "note_cut": _STATES,
    "note_loaded": _STATES,
    "other": _PARTS,
    "owners": _TENSORS,
    "parts": _PARTS,
    "paths": _GRAPHS,
    "plan": "model.memory_plan says what a memory takes",
    "prepare": _GRAPHS,
    "recurrent": _PARTS,
    "release": _GUARD,
    "settings": "context.params has them",
    "snapshot_layout": _TENSORS,
    "state_image": _STATES,
    "state_layouts": _STATES,
    "state_parts": _STATES,
    "states": _PARTS,
    "store": _TENSORS,
    "stores": _TENSORS,
    "streams": _PARTS,
    "swa": _PARTS,
    "take": _TENSORS,
    "tensors": _TENSORS,
}


def refuse(owner: object, name: str, absent: Mapping[str, str]) -> NoReturn:
    """Raise `AttributeError` for a member that is not there, with the reason if there is one."""
    told = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if name in absent:
        told += f": {absent[name]}; with isolate=False it is there"
    raise AttributeError(told, name=name, obj=owner)
