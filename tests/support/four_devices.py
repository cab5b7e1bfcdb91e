"""Four devices beside each other: the CPU, one that Vulkan reaches, and two that are RPC servers on loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.rpc import rpc_server
from support.worker import Worker

DEVICES = ("CPU", "Vulkan0", "RPC0", "RPC1")
OTHERS = DEVICES[1:]

FULL_F32 = {"GGML_VK_DISABLE_F16": "1"}
"""Environment of a client whose Vulkan multiplies in f32, as the CPU does, where its device would rather do so in f16.

What differs from the CPU without it is then rounding, and no fault."""

Ask = Callable[..., Any]
"""Returns what a scene of the client answers; one that raises fails the test."""


@contextmanager
def four_devices(program: Path, environment: Mapping[str, str] | None = None) -> Iterator[Ask]:
    """Start both servers, each with one device, and a client that has connected to them."""
    with rpc_server(1) as one, rpc_server(1) as two, Worker(program, environment) as worker:

        def ask(scene: str, **arguments: Any) -> Any:
            answer = worker.ask([scene, arguments])
            assert "raised" not in answer, answer
            return answer["returned"]

        found = ask("meet", endpoints=[one.endpoint, two.endpoint])
        if not set(DEVICES) <= set(found):
            pytest.fail(
                f"here are {', '.join(found)}: this needs a ggml with GGML_VULKAN=ON and GGML_RPC=ON, and for "
                "llvmpipe GGML_VK_VISIBLE_DEVICES=0",
                pytrace=False,
            )
        yield ask
