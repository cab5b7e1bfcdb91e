"""Fixtures that every test may ask for. Nothing here loads the extension or llama.cpp by itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.oracle import Oracle, OracleError
from support.rpc import rpc_server
from support.tiny.model import TinyFile
from support.tiny_gguf import TINY_MODELS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        metavar="NAME[,NAME]",
        default="CPU",
        help="where memories, models and graphs go that no test places; RPC0,RPC1 are two servers of this session",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Run on the devices of ``--device``, with a server on loopback for each RPC device among them.

    With PYKV_TEST_ISOLATE=1 models live in processes of their own.
    """
    if os.environ.get("PYKV_TEST_ISOLATE") == "1":
        from support.isolated_suite import IsolatedSuite

        config.pluginmanager.register(IsolatedSuite())
    names = str(config.getoption("device")).split(",")
    if names == ["CPU"]:
        return
    from support.not_on import NotOn
    from support.on_device import running_on

    from pykv.ggml import connect_rpc

    stack = ExitStack()
    config.add_cleanup(stack.close)
    for name in names:
        if name.startswith("RPC"):
            connect_rpc(stack.enter_context(rpc_server(n_devices=1)).endpoint)
    stack.enter_context(running_on(names))
    config.pluginmanager.register(NotOn())


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """Hear SIGINT, as child processes then do too: a shell that starts pytest in the background has it ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _real_model(variable: str, name: str) -> Path:
    """Return the file that the environment names, else the one `pykv pull` left; fail, never skip."""
    if given := os.environ.get(variable):
        path = Path(given)
    else:
        from pykv.cli.catalog import cached_path

        path = Path(cached_path(name))
    if not path.is_file():
        pytest.fail(f"no model at {path}: run `pykv pull {name}`, or set {variable}", pytrace=False)
    return path


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1: llama family, 30 layers, 9 heads of 64 over 3 KV heads."""
    return _real_model("PYKV_TEST_SMOLLM2", "smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M Q4_K_M: 18 layers, one KV head of 256, sliding windows of 512 on most layers."""
    return _real_model("PYKV_TEST_GEMMA3", "gemma3-270m")


@pytest.fixture(scope="session")
def write_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TinyFile], Path]:
    """Write tiny models, each shape once a session."""
    folder = tmp_path_factory.mktemp("tiny-gguf")
    written: dict[TinyFile, Path] = {}

    def write(model: TinyFile) -> Path:
        if model not in written:
            written[model] = model.write(folder / f"{len(written):02}-{model.arch}.gguf")
        return written[model]

    return write


@pytest.fixture(scope="session")
def tiny_paths(write_tiny: Callable[[TinyFile], Path]) -> dict[str, Path]:
    """Every model of `TINY_MODELS` as a file."""
    return {name: write_tiny(model) for name, model in TINY_MODELS.items()}


@pytest.fixture(scope="session")
def tiny_llama_path(tiny_paths: dict[str, Path]) -> Path:
    """The plain tiny model: `TINY_MODELS["llama"]`."""
    return tiny_paths["llama"]


@pytest.fixture(scope="session")
def oracle() -> Iterator[Oracle]:
    """One llama.cpp process for the whole session."""
    try:
        process = Oracle.from_environment()
    except OracleError as error:
        pytest.fail(str(error), pytrace=False)
    with process:
        yield process
