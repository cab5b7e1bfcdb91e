"""A device whose memory is not this process's: ggml's RPC server on loopback.

Weights are uploaded, inputs are copied, graphs are split, results are fetched. The server computes with the same
kernels as the CPU here, so that rows differ only where something went astray on the way.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.child import run_cleanly
from support.naive_llama import NaiveLlama
from support.naive_rope import naive_rope
from support.nmse import nmse
from support.rpc import Server, answering, occupied, rpc_server
from support.rpc_worker import logits, play
from support.tiny.registry import BY_NAME
from support.tiny_gguf import TINY_MODELS, TinyModel
from support.worker import DeathError, Worker

pytestmark = pytest.mark.backend

WORKER = Path(__file__).parents[1] / "support" / "rpc_worker.py"
TINY = TinyModel(seed=80, n_layer=3)
BOTH = ["RPC0", "RPC1"]

SAME = 1e-12
"""NMSE against the CPU with the same attention path; measured 0."""

ROUNDED = 2e-5
"""NMSE against exact numbers, with K, V and the query rounded to f16; measured at most 6e-6."""

QUANTISED = 4e-3
"""NMSE against exact numbers, with K and the query in 8 bits; measured at most 1.8e-3, to the last digit as here."""

BETWEEN_PATHS = 4e-4
"""NMSE between the two attention paths, with K in 8 bits; measured at most 9e-5."""

TOKENS = tuple(int(t) for t in np.random.default_rng(11).integers(0, 300, 200))

Steps = tuple[tuple[Any, ...], ...]
STEPS: Steps = (
    ("decode", TOKENS[:20], None, 0),  # one ubatch
    ("decode", TOKENS[20:21], None, 0),
    ("decode", TOKENS[21:22], None, 0),  # the same graph again
    ("decode", TOKENS[22:102], None, 1),  # a prompt of more than one tile
    ("seq_rm", 0, 15, -1),
    ("decode", TOKENS[102:105], None, 0),
    ("decode", TOKENS[105:113], None, (0, 1) * 4),
)
"""For one stream and for several."""

FORK: Steps = (
    ("decode", TOKENS[:24], None, 0),
    ("seq_cp", 0, 1, 0, 20),
    ("decode", TOKENS[24:28], None, 1),
    ("decode", TOKENS[28:30], None, 0),
    ("seq_rm", 0, 10, 14),
    ("decode", TOKENS[30:33], None, (0, 1, 1)),
    ("clear",),
    ("decode", TOKENS[33:40], None, 1),
)
"""Two histories over one beginning, in shared cells."""


MOVES: Steps = (
    ("decode", TOKENS[:40], None, 0),
    ("seq_cp", 0, 1, -1, -1),  # shared cells, or rows of another stream
    ("seq_rm", 0, 4, 14),
    ("seq_add", 0, 14, -1, -10),
    ("decode", TOKENS[40:44], None, 0),
    ("decode", TOKENS[44:48], None, 1),  # the other one's keys have stayed
    ("seq_cp", 0, 1, 2, 9),  # a part, which replaces that part across streams
    ("seq_rm", 1, 20, -1),
    ("seq_div", 0, 10, -1, 2),
    ("decode", TOKENS[48:52], None, 0),
    ("decode", TOKENS[52:55], None, 1),
)
"""Keys are turned and rows copied where they lie."""


@pytest.fixture(scope="module", autouse=True)
def _no_other_gpu() -> Iterator[None]:
    """Hide Vulkan's devices from the child processes: what is taken by default is another server's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GGML_VK_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with rpc_server() as one:
        yield one


class Client:
    """A connected child process."""

    def __init__(self, worker: Worker, endpoint: str) -> None:
        self._worker = worker
        self.connected = self.ask("connect", endpoint=endpoint)

    def ask(self, scene: str, **arguments: Any) -> Any:
        """Return what a scene answers; one that raises fails the test."""
        answer = self._worker.ask([scene, arguments])
        assert "raised" not in answer, answer
        return answer["returned"]

    def refusal(self, scene: str, **arguments: Any) -> str:
        """Return what a scene raises."""
        answer = self._worker.ask([scene, arguments])
        assert "raised" in answer, answer
        return str(answer["raised"])


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Worker(WORKER) as worker:
        yield Client(worker, server.endpoint)


@pytest.fixture
def path(write_tiny: Callable[[TinyModel], Path]) -> str:
    return str(write_tiny(TINY))


@cache
def exact(tiny: TinyModel, steps: Steps) -> list[np.ndarray]:
    """Return what a forward pass in plain numpy gives."""
    naive = NaiveLlama(tiny)
    return play(steps, naive.decode, naive)


def differences(actual: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest NMSE of a decode."""
    assert len(actual) == len(expected) > 0
    return max(nmse(a, e) for a, e in zip(actual, expected, strict=True))


# devices


def test_the_servers_devices_are_listed(client: Client, server: Server) -> None:
    told = client.connected
    assert told["now"] == told["before"] + BOTH
    assert told["again"] == [device["name"] for device in told["new"]] == BOTH
    for i, device in enumerate(told["new"]):
        assert device["kind"] == "gpu"
        assert device["backend"] == "RPC"
        assert device["description"] == server.endpoint
        assert device["memory_total"] >= device["memory_free"] > 2**20
        assert not device["can_wrap_host_memory"]
        assert not device["is_host"]
        assert device["buffer_type"] == f"RPC{i}[{server.endpoint}]"


# operations


def f32(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def on_device(client: Client, name: str, *operands: np.ndarray) -> np.ndarray:
    packed = [(str(one.dtype), one.tolist()) for one in operands]
    answer = client.ask("op", name=name, device="RPC1", operands=packed)
    assert not answer["is_host"], "it was not the device that computed"
    return np.array(answer["values"])


def test_rows_are_gathered(client: Client) -> None:
    table, index = f32(7, 32), np.array([6, 0, 3, 3], np.int32)
    assert np.array_equal(on_device(client, "get_rows", table, index)[0, 0], table[index])


def test_rows_are_scattered(client: Client) -> None:
    table, rows, index = f32(8, 32), f32(2, 32), np.array([5, 1], np.int64)
    expected = table.copy()
    expected[index] = rows
    assert np.array_equal(on_device(client, "set_rows", table, rows, index)[0, 0], expected)


def test_matrices_are_multiplied(client: Client) -> None:
    a, b = f32(12, 64), f32(5, 64)
    assert np.allclose(on_device(client, "mul_mat", a, b)[0, 0], b @ a.T, rtol=1e-4, atol=1e-5)


def test_heads_are_rotated(client: Client) -> None:
    x, pos = f32(4, 3, 32), np.array([0, 1, 2, 9], np.int32)
    assert np.allclose(on_device(client, "rope", x, pos)[0], naive_rope(x, pos, n_dims=32), atol=2e-5)


# memory


def test_an_input_on_the_device_is_handed_over(client: Client) -> None:
    """`GraphInput` fills a copy here; `commit` sends it."""
    answer = client.ask("staged", device="RPC0", values=[1.0, 2.5, -3.0])
    assert answer == {"before": [0.0, 0.0, 0.0], "after": [1.0, 2.5, -3.0]}


@pytest.mark.parametrize("n_bytes", [4096, 12 * 2**20], ids=["small", "past the size that ggml hashes first"])
def test_bytes_come_back(client: Client, n_bytes: int) -> None:
    assert client.ask("round_trip", device="RPC1", n_bytes=n_bytes)


# models


def test_weights_are_uploaded_and_counted(client: Client, path: str) -> None:
    answer = client.ask("logits", path=path, devices=["RPC0"], steps=[STEPS[0]], context={"flash_attn": True})
    done = [one for one, _ in answer["told"]]
    totals = {total for _, total in answer["told"]}
    assert done == sorted(done)
    assert len(done) >= len(TINY.weights())
    assert totals == {done[-1]}
    # embeddings are tied: once on the CPU, once beside the output
    assert done[-1] == sum(4 * x.size for x in TINY.weights().values()) + 4 * TINY.n_vocab * TINY.n_embd


def test_the_servers_devices_are_taken_by_default(client: Client, path: str) -> None:
    answer = client.ask("logits", path=path, devices=None, steps=[STEPS[0]], context={"flash_attn": True})
    assert answer["layers"] == ["RPC0", "RPC0", "RPC1"]
    assert answer["ends"] == ["CPU", "RPC1"]


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize("type_k", ["f16", "q8_0"])
@pytest.mark.parametrize("flash_attn", [True, False, "auto"])
def test_rows_on_the_device_are_the_cpus(
    client: Client, path: str, flash_attn: bool | str, type_k: str, unified: bool
) -> None:
    context = {"n_seq_max": 2, "kv_unified": unified, "type_k": type_k, "flash_attn": flash_attn}
    answer = client.ask("logits", path=path, devices=["RPC0"], steps=STEPS, context=context)
    assert answer["layers"] == ["RPC0"] * 3
    assert answer["n_reused"] > 0
    assert differences(answer["rows"], exact(TINY, STEPS)) <= (ROUNDED if type_k == "f16" else QUANTISED)
    bound = SAME
    if flash_attn == "auto":  # each device measures for itself which path that takes
        context["flash_attn"], bound = True, ROUNDED if type_k == "f16" else BETWEEN_PATHS
    assert differences(answer["rows"], logits(path, ["CPU"], STEPS, context)["rows"]) <= bound


@pytest.mark.parametrize("flash_attn", [True, False])
def test_histories_that_share_a_beginning(client: Client, path: str, flash_attn: bool) -> None:
    context = {"n_seq_max": 2, "flash_attn": flash_attn}
    answer = client.ask("logits", path=path, devices=BOTH, steps=FORK, context=context)
    assert differences(answer["rows"], exact(TINY, FORK)) <= ROUNDED
    assert differences(answer["rows"], logits(path, ["CPU"], FORK, context)["rows"]) <= SAME


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("type_k", ["f32", "f16", "bf16", "q8_0"])
def test_keys_are_turned_and_rows_copied_on_the_device(
    client: Client, path: str, type_k: str, flash_attn: bool, unified: bool
) -> None:
    context = {"n_ctx": 512, "n_seq_max": 2, "kv_unified": unified, "type_k": type_k, "flash_attn": flash_attn}
    answer = client.ask("logits", path=path, devices=BOTH, steps=MOVES, context=context)
    assert not any(answer["is_host"])
    assert differences(answer["rows"], logits(path, ["CPU"], MOVES, context)["rows"]) <= SAME


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"])
def test_every_type_of_keys_and_values(client: Client, path: str, kind: str) -> None:
    context = {"type_k": kind, "type_v": kind, "flash_attn": True}
    answer = client.ask("logits", path=path, devices=["RPC1"], steps=STEPS[:2], context=context)
    assert differences(answer["rows"], logits(path, ["CPU"], STEPS[:2], context)["rows"]) <= SAME


def test_two_contexts_in_turns(client: Client, path: str) -> None:
    """The server keeps one graph a device and repeats it on demand: it must be the right one."""
    told = client.ask("in_turns", path=path, device="RPC0", tokens=TOKENS[:12])
    assert told["n_reused"][0] == told["n_reused"][1] > 0
    for rows, order in zip(told["rows"], (TOKENS[:12], TOKENS[11::-1]), strict=True):
        steps = tuple(("decode", (token,), None, 0) for token in order)
        assert differences(rows, exact(TINY, steps)) <= ROUNDED


@pytest.mark.parametrize("n_gpu_layers", [0, 1, 2, 4])
@pytest.mark.parametrize("flash_attn", [True, False])
def test_layers_here_and_there(client: Client, path: str, flash_attn: bool, n_gpu_layers: int) -> None:
    """The first layers on the CPU, the rest on one device or on two: one graph in several pieces."""
    context = {"flash_attn": flash_attn, "n_seq_max": 2}
    more = {"path": path, "steps": STEPS, "context": context}
    expected = logits(**more, devices=["CPU"])["rows"]
    assert differences(expected, exact(TINY, STEPS)) <= ROUNDED
    for devices in (["RPC0"], BOTH):
        answer = client.ask("logits", **more, devices=devices, n_gpu_layers=n_gpu_layers)
        n_here = min(3, 4 - n_gpu_layers)
        assert answer["layers"][:n_here] == ["CPU"] * n_here
        assert set(answer["layers"][n_here:]) <= set(devices)
        assert answer["ends"][0] == "CPU"
        assert answer["ends"][1] in (devices if n_gpu_layers else ["CPU"])
        assert differences(answer["rows"], expected) <= SAME


@pytest.mark.parametrize("name", ["llama-untied-bias", "llama-factors", "qwen3"])
@pytest.mark.parametrize("n_gpu_layers", [-1, 2])
def test_families(client: Client, tiny_paths: dict[str, Path], name: str, n_gpu_layers: int) -> None:
    """Biases, frequency factors that lie with the first layer, norms of heads."""
    more = {"path": str(tiny_paths[name]), "steps": STEPS[:4], "context": {"n_seq_max": 2, "flash_attn": True}}
    answer = client.ask("logits", **more, devices=["RPC1"], n_gpu_layers=n_gpu_layers)
    assert differences(answer["rows"], exact(TINY_MODELS[name], STEPS[:4])) <= ROUNDED
    assert differences(answer["rows"], logits(**more, devices=["CPU"])["rows"]) <= SAME


# the cache


@pytest.mark.parametrize("type_k", ["f16", "q8_0"])
def test_keys_and_values_lie_beside_their_layers(client: Client, server: Server, path: str, type_k: str) -> None:
    """Two layers on the device, one here: 256 cells of two heads of 32, K and V."""
    answer = client.ask(
        "logits", path=path, devices=["RPC0"], n_gpu_layers=3, steps=[STEPS[0]], context={"type_k": type_k}
    )
    layer = 256 * 64 * 2 + {"f16": 256 * 64 * 2, "q8_0": 256 * 64 // 32 * 34}[type_k]
    assert answer["layers"] == ["CPU", "RPC0", "RPC0"]
    assert answer["is_host"] == [True, False, False]
    assert answer["planned"] == {"CPU": layer, f"RPC0[{server.endpoint}]": 2 * layer}
    assert answer["nbytes"] == 3 * layer


@pytest.mark.parametrize("flash_attn", [True, False])
def test_a_cache_in_host_memory_serves_layers_on_the_device(client: Client, path: str, flash_attn: bool) -> None:
    context = {"offload_kqv": False, "flash_attn": flash_attn, "n_seq_max": 2}
    answer = client.ask("logits", path=path, devices=["RPC0"], steps=STEPS, context=context)
    assert answer["layers"] == ["RPC0"] * 3
    assert answer["is_host"] == [True] * 3
    assert set(answer["planned"]) == {"CPU"}
    assert differences(answer["rows"], exact(TINY, STEPS)) <= ROUNDED


@pytest.mark.parametrize("n_gpu_layers", [-1, 2])
def test_the_fused_kernel_ran_on_a_server_that_has_none(client: Client, path: str, n_gpu_layers: int) -> None:
    """The RPC device says that it runs every operation, also a function of another process."""
    context = {"attention": "fused", "n_seq_max": 2}
    more = {"path": path, "devices": ["RPC0"], "steps": STEPS, "n_gpu_layers": n_gpu_layers}
    told = client.refusal("logits", **more, context=context)
    il = 0 if n_gpu_layers == -1 else 2
    assert f"K and V of layer {il} lie on RPC0, where the fused kernel does not run" in told
    answer = client.ask("logits", **more, context=context | {"offload_kqv": False})
    assert answer["is_host"] == [True] * 3
    assert differences(answer["rows"], exact(TINY, STEPS)) <= ROUNDED


def test_stored_values_are_turned_and_turned_back(client: Client, path: str) -> None:
    told = client.ask("turn_v", path=path, device="RPC0", tokens=TOKENS[:30])
    rows, channels, again = (np.array(told[name]) for name in ("rows", "channels", "again"))
    assert rows.any()
    assert np.array_equal(channels.reshape(64, 256), rows.reshape(256, 64).T)
    assert np.array_equal(again, rows)


def test_rows_after_the_values_were_turned(client: Client, path: str) -> None:
    steps = (*STEPS[:4], ("store_v", True), ("store_v", False), *STEPS[4:], ("store_v", True), STEPS[1])
    context = {"n_seq_max": 2, "flash_attn": True}
    answer = client.ask("logits", path=path, devices=BOTH, steps=steps, context=context)
    plain = tuple(step for step in steps if step[0] != "store_v")
    assert differences(answer["rows"], exact(TINY, plain)) <= ROUNDED


@pytest.mark.parametrize("on", ["host", "device"])
@pytest.mark.parametrize(("name", "flash_attn"), [("gemma3-4l-w16-every2", True), ("gemma3-4l-w16-every2", False)])
def test_a_window_comes_back(client: Client, tmp_path: Path, name: str, flash_attn: bool, on: str) -> None:
    """Rows go through the host, or from buffer to buffer on the server; V stored by channel goes through the host."""
    path = BY_NAME[name].write(tmp_path / "tiny.gguf")
    context = {"n_ctx": 256, "n_ubatch": 8, "flash_attn": flash_attn}
    told = client.ask("restored", path=str(path), device="RPC0", tokens=TOKENS[:70], on=on, context=context)
    assert told["nbytes"] > 0
    assert told["again"] == told["first"]


@pytest.mark.parametrize("on", ["host", "device"])
def test_a_state_comes_back(client: Client, tmp_path: Path, on: str) -> None:
    path = BY_NAME["mamba2-4l"].write(tmp_path / "tiny.gguf")
    told = client.ask("restored", path=str(path), device="RPC0", tokens=TOKENS[:50], on=on, context={"n_ctx": 64})
    assert told["nbytes"] > 0
    assert told["again"] == told["first"]


def test_a_cache_larger_than_the_servers_memory(client: Client, path: str) -> None:
    """Refused before anything is asked of the server, and the server goes on."""
    refusal = client.refusal("logits", path=path, devices=["RPC0"], steps=[], context={"n_ctx": 2**30})
    assert re.match(
        r"AllocError: KV cache of n_ctx=1073741824 x 1 streams needs \d+ bytes in RPC0\[.* bytes free", refusal
    )
    assert client.ask("round_trip", device="RPC0", n_bytes=4096)


def test_memory_that_is_not_here(client: Client) -> None:
    told = client.ask("refused", device="RPC0")
    assert re.match(r"AllocError: far too much: RPC0\[.*\] has no room for \d+ bytes", told["too much"])
    assert told["wrapped"] == "AllocError: RPC0 cannot use host memory in place"
    assert re.match(r"TensorError: .* has no host view", told["viewed"])


# servers


def test_nobody_listens(client: Client) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        assert re.match(
            f"ParamError: endpoint='{endpoint}': no server answers", client.refusal("connect", endpoint=endpoint)
        )


def test_a_server_that_serves_somebody_else(client: Client, server: Server, path: str) -> None:
    """It would keep ggml waiting without end; and what needs no server must not ask it."""
    elsewhere = server.endpoint.replace("127.0.0.1", "localhost")
    with occupied(server):
        refusal = client.refusal("connect", endpoint=elsewhere, timeout=0.3)
        answer = client.ask("logits", path=path, devices=["CPU"], steps=[STEPS[0]], context={})
    assert "no answer within 0.3 s; a server serves one client at a time" in refusal
    assert answer["layers"] == ["CPU"] * 3


def test_a_server_of_another_version(client: Client) -> None:
    with answering(struct.pack("<Q4B24x", 28, 4, 1, 0, 0)) as endpoint:
        assert "the server speaks version 4.1.0, which this ggml refuses" in client.refusal(
            "connect", endpoint=endpoint
        )


def test_a_client_that_closes_nothing_ends_well(server: Server, path: str) -> None:
    code = f"""
        import pykv, pykv.ggml
        pykv.ggml.connect_rpc({server.endpoint!r})
        ctx = pykv.Model.load({path!r}, isolate=False).context(n_ctx=256)
        ctx.decode(pykv.Batch([1, 2, 3]))
        print(ctx.logits.shape)
    """
    assert run_cleanly(code) == "(1, 320)\n"


@pytest.mark.abort
def test_a_server_that_dies_takes_its_client_along(path: str) -> None:
    """Nothing that pykv could catch: ggml ends the process."""
    with rpc_server() as mortal, Worker(WORKER) as worker:
        client = Client(worker, mortal.endpoint)
        with pytest.raises(DeathError):
            client.ask("lose_server", path=path, device="RPC0", server_pid=mortal.process.pid)


def test_a_server_that_dies_unused_harms_nobody(path: str) -> None:
    with Worker(WORKER) as worker:
        with rpc_server() as mortal:
            client = Client(worker, mortal.endpoint)
            client.ask("logits", path=path, devices=["RPC0"], steps=[STEPS[0]], context={})
        answer = client.ask("logits", path=path, devices=["CPU"], steps=[STEPS[0]], context={})
        assert answer["layers"] == ["CPU"] * 3
        assert client.ask("connect", endpoint=mortal.endpoint)["new"][0]["memory_free"] == 0
        with rpc_server() as next_one:
            told = client.ask("connect", endpoint=next_one.endpoint)
            assert told["again"] == ["RPC2", "RPC3"]
            answer = client.ask("logits", path=path, devices=["RPC3"], steps=[STEPS[0]], context={})
            assert answer["layers"] == ["RPC3"] * 3
