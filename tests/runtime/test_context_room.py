"""Memory that is not there is refused when a context is made, not met when it is written to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.tiny_gguf import TinyModel

import pykv
from pykv.errors import AllocError
from pykv.ggml import device as device_module


def test_compute_buffers_larger_than_the_host_are_refused(
    write_tiny: Callable[[TinyModel], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pykv.Model.load(write_tiny(TinyModel(seed=82))) as model:
        with model.context(n_ctx=4096, n_ubatch=512, n_threads=1) as context:
            kv, compute = context.memory.nbytes, context.compute_nbytes
        assert compute > 4096 * 512 * 2, "the mask alone takes as much"
        monkeypatch.setattr(device_module, "host_memory_available", lambda: max(kv, compute - 1))
        with pytest.raises(AllocError, match="n_ubatch=512 over 4096 cells"):
            model.context(n_ctx=4096, n_ubatch=512, n_threads=1)
        monkeypatch.setattr(device_module, "host_memory_available", lambda: kv - 1)
        with pytest.raises(AllocError, match="n_ctx=4096"):
            model.context(n_ctx=4096, n_ubatch=512, n_threads=1)
