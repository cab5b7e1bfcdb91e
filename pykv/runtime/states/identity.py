"""What a saved state notes about where it came from: the model, its rotations, the types that its memory stores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pykv.errors import StateError
from pykv.state_format import Checksum, Notes

if TYPE_CHECKING:
    from pykv.gguf import GGUFFile
    from pykv.runtime.context import Context

SAMPLE = 64
"""Bytes that are looked at of each tensor: a fine-tune changes all of them, and all of a large file takes long."""


def fingerprint(file: GGUFFile) -> str:
    """Return what tells a model from others, 32 characters: its tensor table, and the first bytes of each tensor."""
    total = Checksum()
    with memoryview(file.map()) as data:
        for info in file.tensors.values():
            total.add(f"{info.name} {info.dtype.label} {info.ne}\n".encode())
            total.add(data[info.offset : info.offset + min(info.nbytes, SAMPLE)])
    return total.hex()


def setup_of(context: Context) -> Notes:
    """Return notes on a context, without those on what is saved."""
    params = context.params
    return Notes(
        model=context.model.fingerprint,
        rope=asdict(params.rope),
        types={"k": params.type_k.label, "v": params.type_v.label},
        embedded=context.embedded,
    )


def check_setup(notes: Notes, context: Context, *, strict: bool) -> list[str]:
    """Return in words how a context differs from the one that was saved, where that can be lived with.

    Raises
    ------
    StateError : the state is of another model; or, if `strict`, of other rotations.
    """
    own = setup_of(context)
    if notes.model is not None and notes.model != own.model:
        raise StateError(
            f"the state is of another model: expected fingerprint {own.model}, found {notes.model}; "
            "what it holds means nothing to this one: load it with the model that it was saved with"
        )
    turned = list(_differences(dict(notes.rope), dict(own.rope)))
    if turned and strict:
        raise StateError(f"keys were rotated otherwise: {'; '.join(turned)}; strict=False loads them as they are")
    return [f"keys were rotated otherwise: {one}" for one in turned]


def _differences(found: dict[str, Any], expected: dict[str, Any]) -> Iterator[str]:
    for name, value in expected.items():
        if name in found and found[name] != value:
            yield f"{name} is {value!r} here, and {found[name]!r} in the state"
