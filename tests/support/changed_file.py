"""A tiny model whose file says something else: keys and tensors added, replaced, or left out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from support.tiny.model import TinyFile
from support.tiny.writer import write_model


def write_changed(
    model: TinyFile,
    path: Path,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any] | None] | None = None,
) -> Path:
    """Write the model with these keys, which may hold {arch}, and these tensors instead of its own; None = without."""
    hparams = {name.format(arch=model.arch): value for name, value in model.hparams().items()}
    hparams |= {name.format(arch=model.arch): value for name, value in (keys or {}).items()}
    weights = model.weights() | dict(tensors or {})
    return write_model(
        path,
        model.arch,
        {name: value for name, value in hparams.items() if value is not None},
        {name: values for name, values in weights.items() if values is not None},
        model.n_vocab,
        model.pre,
    )
