"""Tiny models with something changed in the file: keys and tensors that `TinyModel` itself would not write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from support.tiny_gguf import TinyModel


def rewrite(
    tiny: TinyModel,
    path: Path,
    tensors: Mapping[str, np.ndarray | None],
    keys: Mapping[str, list[int]] | None = None,
    alignment: int | None = None,
) -> Path:
    """Write a tiny model in which some tensors are others, or None for missing, and some keys hold lists.

    Tensors start at multiples of `alignment` bytes, None = as usual.
    """
    original = tiny.write(path.with_suffix(".original"))
    writer = gguf.GGUFWriter(str(path), tiny.arch)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for field in gguf.GGUFReader(str(original)).fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            copy_key(writer, field, keys or {})
    for name, values in (tiny.weights() | tensors).items():
        if values is not None:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def copy_key(writer: gguf.GGUFWriter, field: Any, changed: Mapping[str, list[int]] = MappingProxyType({})) -> None:
    """Write a key of another file, or the list that stands for it in `changed`."""
    if field.name in changed:
        writer.add_array(field.name, changed[field.name])
        return
    kind = field.types[0]
    item = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
    writer.add_key_value(field.name, field.contents(), kind, sub_type=item)
