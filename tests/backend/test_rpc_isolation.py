"""Models on real RPC servers, which die, hang or fall silent: the program lives on.

Each test is a program of its own, since connecting adds devices to a process for good.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.child import child_environment, python_command
from support.rpc import Server, rpc_server
from support.tiny_gguf import TinyModel

pytestmark = pytest.mark.backend

TINY = TinyModel(seed=80, n_layer=3)
PROMPT = list(range(5, 45))

HEAD = """
import json, os, signal, sys, threading, time
import numpy as np
import pykv
from pykv.errors import BackendLost, UseAfterCloseError
from pykv.ggml import connect_rpc
path, servers, folder = json.loads(sys.argv[1])
PROMPT = list(range(5, 45))
PARAMS = {"n_ctx": 256, "flash_attn": True, "n_threads": 1}

def end(i, how=signal.SIGKILL):
    os.kill(servers[i][1], how)

def greedy(context, token, n):
    said = []
    for _ in range(n):
        context.decode(pykv.Batch([token]))
        token = int(context.logits[-1].argmax())
        said.append(token)
    return said

def begin(context):
    context.decode(pykv.Batch(PROMPT))
    return int(context.logits[-1].argmax())
"""


@pytest.fixture
def path(write_tiny: Callable[[TinyModel], Path]) -> str:
    return str(write_tiny(TINY))


@contextmanager
def woken(server: Server) -> Iterator[None]:
    """Let a server that was stopped go on in the end, so that it can be ended."""
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


def run(path: str, folder: Path, body: str, *servers: Server) -> Any:
    """Run a program; return what it prints last, which is JSON."""
    arguments = json.dumps([path, [[one.endpoint, one.process.pid] for one in servers], str(folder)])
    done = subprocess.run(
        python_command("-W", "error", "-c", HEAD + body, arguments),
        capture_output=True,
        text=True,
        timeout=120,
        env=child_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_model_on_a_server_is_isolated_by_itself(path: str, tmp_path: Path) -> None:
    """By name, by device, or where it is taken without being named; and not on the CPU."""
    with rpc_server() as server:
        told = run(
            path,
            tmp_path,
            """
device = connect_rpc(servers[0][0])[1]
told, rows = [], []
for devices in ("CPU", "RPC0", [device], ["cpu", "rpc1"], None):
    with pykv.Model.load(path, devices) as model, model.context(**PARAMS) as context:
        context.decode(pykv.Batch(PROMPT, logits="all"))
        rows.append(context.logits)
        told.append([hasattr(model, "architecture"), [one.name for one in model.placement.layers]])
print(json.dumps([told, [bool(np.array_equal(each, rows[0])) for each in rows]]))
""",
            server,
        )
    assert [is_here for is_here, _ in told[0]] == [True, False, False, False, False]
    assert [names for _, names in told[0][:2]] == [["CPU"] * 3, ["RPC0"] * 3]
    assert told[1][:4] == [True] * 4  # the last may have taken a GPU besides


GOES_ON = """
connect_rpc(servers[0][0])
with pykv.Model.load(path, "CPU") as model, model.context(**PARAMS) as context:
    expected = greedy(context, begin(context), 12)

model = pykv.Model.load(path, "RPC0")
context = model.context(**PARAMS)
first = begin(context)
said = greedy(context, first, 5)
context.save_sequence(folder + "/kept", 0, [*PROMPT, first, *said[:-1]])
said_then = greedy(context, said[-1], 2)
WHEN
try:
    while True:
        greedy(context, said_then[-1], 1)
        context.memory.seq_rm(0, len(PROMPT), -1)
except BackendLost as error:
    lost = [str(error), list(error.devices), error.last_words, model.closed]
uses = []
for use in (lambda: context.decode(pykv.Batch([1])), lambda: context.memory.pos_max(0), model.context):
    try:
        use()
    except BackendLost:
        uses.append("lost")
context.close()
model.close()
with pykv.Model.load(path, "CPU") as model, model.context(**PARAMS) as context:
    held = context.load_sequence(folder + "/kept", 0)
    rest = greedy(context, said[-1], 7)
print(json.dumps([expected, said + rest, lost, uses]))
"""


@pytest.mark.parametrize(
    "when",
    [
        "end(0)",
        "threading.Timer(0.05, end, (0,)).start()",
        "end(0, signal.SIGSTOP); threading.Timer(0.3, end, (0,)).start()",
    ],
    ids=["between two tokens", "amid some token", "while it hangs"],
)
def test_a_server_that_is_killed(path: str, tmp_path: Path, when: str) -> None:
    """The program hears of it, loads what it saved, and goes on where there is a device left."""
    with rpc_server() as server:
        expected, said, lost, uses = run(path, tmp_path, GOES_ON.replace("WHEN", when), server)
    assert said == expected
    message, devices, last_words, is_closed = lost
    assert message.startswith(f"the process that computed on device 0 of {server.endpoint} has ended (SIGABRT):")
    assert "pykv: fatal error inside ggml" in last_words
    assert "Load the model anew on devices that answer, and a saved state into a context of it" in message
    assert devices == [f"device 0 of {server.endpoint}"]
    assert is_closed
    assert uses == ["lost"] * 3


def test_servers_that_this_process_has_never_spoken_to(path: str, tmp_path: Path) -> None:
    """Only the process of the model connects, so that nothing stands between a server and its next client."""
    with rpc_server(1) as one, rpc_server(1) as other:
        told = run(
            path,
            tmp_path,
            """
specs = ["rpc://" + endpoint for endpoint, _ in servers]
from pykv.ggml import devices
with pykv.Model.load(path, "CPU") as model, model.context(**PARAMS) as context:
    expected = greedy(context, begin(context), 4)
for _ in range(2):
    with pykv.Model.load(path, specs) as model, model.context(**PARAMS) as context:
        said = greedy(context, begin(context), 4)
model = pykv.Model.load(path, specs)
end(1)
try:
    greedy(model.context(**PARAMS), 1, 50)
except BackendLost as error:
    lost = list(error.devices)
print(json.dumps([said == expected, [one.backend for one in devices()].count("RPC"), lost == specs]))
""",
            one,
            other,
        )
    assert told == [True, 0, True]


def test_one_of_two_servers_is_killed(path: str, tmp_path: Path) -> None:
    """The other one takes over."""
    with rpc_server(1) as one, rpc_server(1) as other:
        told = run(
            path,
            tmp_path,
            """
for endpoint, _ in servers:
    connect_rpc(endpoint)
with pykv.Model.load(path, "CPU") as model, model.context(**PARAMS) as context:
    expected = greedy(context, begin(context), 8)
with pykv.Model.load(path, ["RPC0", "RPC1"]) as model, model.context(**PARAMS) as context:
    layers = [one.name for one in model.placement.layers]
    said = greedy(context, begin(context), 4)
    state = context.state_bytes(0)
    end(0)
    try:
        greedy(context, said[-1], 50)
    except BackendLost:
        lost = True
with pykv.Model.load(path, "RPC1") as model, model.context(**PARAMS) as context:
    context.load_state_bytes(state, 0)
    said += greedy(context, said[-1], 4)
print(json.dumps([expected, said, layers, lost]))
""",
            one,
            other,
        )
    assert told[1] == told[0]
    assert set(told[2]) == {"RPC0", "RPC1"}
    assert told[3] is True


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_server_is_lost_while_weights_are_uploaded(path: str, tmp_path: Path, how: str) -> None:
    """One that hangs is waited for until the program loses its patience."""
    with rpc_server() as server, woken(server):
        told = run(
            path,
            tmp_path,
            f"""
connect_rpc(servers[0][0])
how = signal.{how}
def press():
    for _ in range(2):
        time.sleep(0.5)
        if not told:
            os.kill(os.getpid(), signal.SIGINT)
told = []
def progress(done, total):
    if done and how:
        end(0, how)
        if how == signal.SIGSTOP:
            threading.Thread(target=press).start()
        globals()["how"] = None
try:
    model = pykv.Model.load(path, "RPC0", progress=progress)
    model.context(**PARAMS)  # what little there is to upload may fit into the socket
except (BackendLost, KeyboardInterrupt) as error:
    told = [type(error).__name__, type(error.__context__).__name__]
with pykv.Model.load(path, "CPU") as model, model.context(**PARAMS) as context:
    begin(context)
with open(f"/proc/self/task/{{os.getpid()}}/children") as file:
    print(json.dumps([told, file.read().split()]))
""",
            server,
        )
    expected = {"SIGKILL": "BackendLost", "SIGSTOP": "KeyboardInterrupt"}[how]
    assert told[0][0] == expected
    assert told[1] == []


def test_a_server_that_hangs_amid_a_decode(path: str, tmp_path: Path) -> None:
    """The first Ctrl-C cannot stop ggml, which waits for the server; the second one ends the wait."""
    with rpc_server() as server, woken(server):
        told = run(
            path,
            tmp_path,
            """
connect_rpc(servers[0][0])
model = pykv.Model.load(path, "RPC0")
context = model.context(**PARAMS)
begin(context)
end(0, signal.SIGSTOP)
presses = []
def press():
    for _ in range(2):
        time.sleep(0.4)
        presses.append(1)
        os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press).start()
try:
    context.decode(pykv.Batch([1] * 20))
except KeyboardInterrupt as error:
    told = [len(presses), type(error.__context__).__name__, model.closed]
print(json.dumps(told))
""",
            server,
        )
    assert told == [2, "BackendLost", True]


def test_a_server_that_is_gone_before_the_model_is_loaded(path: str, tmp_path: Path) -> None:
    """Known by name from before: refused in words, not by the death of anything."""
    with rpc_server() as server:
        told = run(
            path,
            tmp_path,
            """
connect_rpc(servers[0][0])
end(0)
try:
    pykv.Model.load(path, "RPC0")
except pykv.PykvError as error:
    print(json.dumps([type(error).__name__, str(error)]))
""",
            server,
        )
    assert told[0] == "ParamError"
    assert "no server answers" in told[1]


def test_a_program_that_is_killed_leaves_the_server_to_others(path: str, tmp_path: Path) -> None:
    """One client at a time is served: who is gone must not keep its connection."""
    body = """
connect_rpc(servers[0][0])
model = pykv.Model.load(path, "RPC0")
context = model.context(**PARAMS)
begin(context)
LAST
"""
    with rpc_server() as server:
        arguments = json.dumps([path, [[server.endpoint, 0]], str(tmp_path)])
        process = subprocess.run(
            python_command("-c", HEAD + body.replace("LAST", "os.kill(os.getpid(), 9)"), arguments),
            env=child_environment(),
            timeout=60,
            check=False,
        )
        assert process.returncode == -signal.SIGKILL
        assert run(path, tmp_path, body.replace("LAST", "print(json.dumps(context.memory.pos_max(0)))"), server) == 39


def test_the_command_line_says_in_two_lines_that_a_server_is_lost(path: str) -> None:
    command = python_command("-c", "from pykv.cli import main; main()")
    asked = ["run", "-m", path, "-p", "a b c", "-n", "240", "--raw", "--temp", "1", "-c", "256"]
    with rpc_server() as server:
        process = subprocess.Popen(
            [*command, *asked, "--rpc", server.endpoint],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )
        with process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.read(1)  # it has begun to answer
            server.process.kill()
            said = process.stderr.read().splitlines()
            assert process.wait(timeout=60) == 1
    assert [line for line in said if "Traceback" in line] == []
    (error,) = [i for i, line in enumerate(said) if line.startswith("pykv: error: the process that computed on rpc://")]
    assert server.endpoint in said[error]
    assert said[error + 1].lstrip().startswith("next: pykv devices")
