"""Which class builds which architecture. A new family is one file and one line here."""

from __future__ import annotations

from pykv.errors import UnknownArchitectureError
from pykv.models.llama import Llama
from pykv.models.qwen2 import Qwen2
from pykv.models.qwen3 import Qwen3

ARCHITECTURES: dict[str, type[Llama]] = {
    "llama": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
}


def find_architecture(name: str) -> type[Llama]:
    """Return the class of an architecture.

    Raises
    ------
    UnknownArchitectureError : lists those that there are.
    """
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnknownArchitectureError(f"general.architecture={name!r} is not supported; known: {known}")
    return ARCHITECTURES[name]
