"""A model whose quantised matrices have become f16: no device rounds what is multiplied with them to 8 bits."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from support.rewrite_gguf import copy_key


def write_as_f16(source: Path, target: Path) -> Path:
    """Write a copy whose matrices are f16, and return `target`. All else is as it was."""
    reader = gguf.GGUFReader(str(source))
    writer = gguf.GGUFWriter(str(target), reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            copy_key(writer, field)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        is_matrix = tensor.tensor_type != gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, values.astype(np.float16 if is_matrix else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
