"""One tiny model as a GGUF file: metadata by plain dictionary, tensors, vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from support.tiny.vocab import write_vocabulary

KEEP_F32 = (
    "norm.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_inp_shexp.weight",
    "position_embd.weight",
    "ssm_conv1d.weight",
    "shortconv.conv.weight",
    "time_mix_w1.weight",
    "time_mix_w2.weight",
    "time_mix_lerp_fused.weight",
    "channel_mix_lerp_k.weight",
    "altup_correct_coef.weight",
    "altup_predict_coef.weight",
)
"""Matrices that llama.cpp's converters leave in f32, by the ends of their names."""


def stored(name: str, values: np.ndarray[Any, Any], matrices: str) -> np.ndarray[Any, Any]:
    """Return a tensor in the type of the file: vectors and a few small matrices are always f32."""
    if matrices == "f32" or values.ndim == 1 or not name.endswith(".weight") or name.endswith(KEEP_F32):
        return values
    return values.astype({"f16": np.float16}[matrices])


def write_model(
    path: Path,
    arch: str,
    hparams: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray[Any, Any]],
    n_vocab: int,
    pre: str,
) -> Path:
    """Write a GGUF file, version 3, and return `path`; hparams are by `gguf.Keys` names or literal ones."""
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in hparams.items():
        _add(writer, key.format(arch=arch), value)
    write_vocabulary(writer, n_vocab, pre)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a value by its Python type, as converters do: bool, u32, f32, string, or an array of i32, f32 or bool."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))
