"""States of memories that the CPU cannot reach: ggml's RPC server on loopback holds the rows.

The bytes are those of the same memory in host memory, and of the format; each loads on the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.rpc import rpc_server
from support.state_kinds import KINDS
from support.worker import Worker

pytestmark = pytest.mark.backend

WORKER = Path(__file__).parents[1] / "support" / "rpc_states_worker.py"
TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q5_1", "iq4_nl")

Ask = Callable[..., Any]
"""Returns what a scene answers; one that raises fails the test."""


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    with rpc_server() as server, Worker(WORKER) as worker:

        def answered(scene: str, **arguments: Any) -> Any:
            answer = worker.ask([scene, arguments])
            assert "raised" not in answer, answer
            return answer["returned"]

        assert answered("connect", endpoint=server.endpoint) == ["RPC0", "RPC1"]
        yield answered


@pytest.mark.parametrize(("name", "unified"), KINDS, ids=str)
def test_every_kind_goes_there_and_back(ask: Ask, name: str, unified: bool) -> None:
    assert ask("kind", name=name, unified=unified) > 100


@pytest.mark.parametrize(("name", "unified"), [("recurrent", True), ("hybrid", True), ("hybrid iswa", True)])
def test_states_that_were_taken_back(ask: Ask, name: str, unified: bool) -> None:
    assert ask("kind", name=name, unified=unified, n_rs_seq=3) > 100


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize(("dtype", "v_trans"), [*product(TYPES, [False]), *product(TYPES[:3], [True])])
def test_every_type_and_layout_of_rows(ask: Ask, dtype: str, v_trans: bool, unified: bool) -> None:
    assert ask("rows", dtype=dtype, v_trans=v_trans, unified=unified) > 1000


@pytest.mark.parametrize(("unified", "v_trans"), [*product([True, False], repeat=2)])
@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_converted_there_as_here(ask: Ask, unified: bool, v_trans: bool, dtype: str) -> None:
    ask("converted", unified=unified, v_trans=v_trans, dtype=dtype)


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("seq_id", [-1, 0])
@pytest.mark.parametrize(("name", "unified"), KINDS, ids=str)
def test_a_transfer_that_fails_harms_nobody_else(ask: Ask, name: str, unified: bool, seq_id: int, n: int) -> None:
    """Saving changes nothing. What was loaded is gone, since rows were overwritten; others are as they were."""
    message = ask("interrupted", name=name, unified=unified, seq_id=seq_id, n=n)
    assert message == "no answer to get_into, no answer to set"


@pytest.mark.parametrize(("name", "unified"), [("kv", True), ("kv", False), ("hybrid", True), ("twin", False)])
def test_what_does_not_fit_changes_no_byte_there(ask: Ask, name: str, unified: bool) -> None:
    ask("refused", name=name, unified=unified)
