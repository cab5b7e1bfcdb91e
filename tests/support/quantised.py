"""Files of tiny models whose matrices are quantised, as most files that people have are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from support.rewrite_gguf import copy_key
from support.tiny.writer import KEEP_F32

from pykv.ggml import DType, from_float, to_float


def quantise(path: Path, dtype: DType, target: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Write a copy of a file with all matrices of which that can be done in `dtype`, and return what they hold then."""
    reader, held = gguf.GGUFReader(str(path)), {}
    writer = gguf.GGUFWriter(str(target), reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            copy_key(writer, field)
    for tensor in reader.tensors:
        values = tensor.data.reshape(tuple(reversed(tensor.shape.tolist())))
        is_matrix = values.ndim > 1 and tensor.name.endswith(".weight") and not tensor.name.endswith(KEEP_F32)
        if is_matrix and values.shape[-1] % dtype.block_size == 0:
            raw = from_float(dtype, values.astype(np.float32).reshape(-1))
            held[tensor.name] = to_float(dtype, raw, values.size).reshape(values.shape)
            rows = raw.reshape(*values.shape[:-1], dtype.row_size(values.shape[-1]))
            writer.add_tensor(tensor.name, rows, raw_dtype=gguf.GGMLQuantizationType(int(dtype)))
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held
