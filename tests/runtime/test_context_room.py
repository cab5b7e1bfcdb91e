"""Memory that is not there is refused when a context is made, not met when it is written to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.child import run_cleanly
from support.tiny.registry import BY_NAME
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


def test_a_graph_of_so_many_states_ended_the_process(tmp_path: Path) -> None:
    """The scheduler of ggml takes memory in proportion to the nodes of the largest graph."""
    path = tmp_path / "mamba.gguf"
    BY_NAME["mamba-4l"].write(path)
    said = run_cleanly(f"""
        import resource
        import pykv

        with pykv.Model.load({str(path)!r}) as model:
            resource.setrlimit(resource.RLIMIT_AS, (2**31, resource.RLIM_INFINITY))
            try:
                model.context(n_ctx=4096, n_ubatch=4096, n_rs_seq=2000, n_threads=1)
            except pykv.errors.AllocError as error:
                print(error)
            with model.context(n_ctx=256, n_rs_seq=2, n_threads=1) as context:
                context.decode(pykv.Batch([1, 2, 3]))
                print(context.logits.shape[0])
    """)
    assert said.startswith("no memory for a scheduler for graphs of 16")
    assert said.endswith("\n1\n")


def test_so_many_observers_ended_the_process(tmp_path: Path) -> None:
    """One that there is no memory for changes nothing."""
    path = tmp_path / "gemma3n.gguf"
    BY_NAME["gemma3n-22l-w32"].write(path)
    said = run_cleanly(f"""
        import resource
        import pykv

        with pykv.Model.load({str(path)!r}) as model, model.context(n_ctx=256, n_ubatch=16, n_threads=1) as context:
            resource.setrlimit(resource.RLIMIT_AS, (2**30, resource.RLIM_INFINITY))
            held = []
            try:
                while True:
                    held.append(context.observe(what=pykv.AttentionMass(last=1)))
            except pykv.errors.AllocError as error:
                print(error)
            context.decode(pykv.Batch([1, 2, 3]))
            print(len(held) > 3)
    """)
    assert "no memory for a scheduler for graphs of" in said
    assert said.endswith("\nTrue\n")
