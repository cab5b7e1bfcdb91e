"""What devices cannot do, asked of them where it might end a process: a client of `four_devices`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

TOKENS: list[int] = np.random.default_rng(19).integers(0, 250, 40).tolist()


def answered(path: str, device: str, context: dict[str, Any]) -> dict[str, Any]:
    """Decode a prompt and two tokens.

    Returns the logits' NMSE to those of the CPU, what K and V in this type lose there and here (NMSE to K and V in f32
    on the CPU), and what was warned of.
    """
    from support.nmse import nmse

    from pykv.errors import FallbackWarning

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = _rows(path, device, context)
    here = _rows(path, "CPU", context)
    exact = _rows(path, "CPU", {"type_k": "f32", "type_v": "f32", "attention": "matmul"})
    words = [str(one.message) for one in told if issubclass(one.category, FallbackWarning)]
    return {"nmse": nmse(found, here), "lost": nmse(found, exact), "lost_on_cpu": nmse(here, exact), "told": words}


def refusal(path: str, device: str, context: dict[str, Any]) -> str:
    """Return what making a context raises."""
    try:
        _rows(path, device, context)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was made")


def _rows(path: str, device: str, context: dict[str, Any]) -> np.ndarray:
    import pykv

    with (
        pykv.Model.load(path, [device], repack=False, isolate=False) as model,
        model.context(**{"n_ctx": 256, "n_threads": 1, **context}) as ctx,
    ):
        rows = []
        for first, end in ((0, 20), (20, 21), (21, 22)):
            ctx.decode(pykv.Batch(TOKENS[first:end], logits="all"))
            rows.append(np.array(ctx.logits))
        return np.concatenate(rows)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.device_models import meet
    from support.rpc_worker import serve

    serve(meet, answered, refusal)
