"""What `connect_rpc` refuses before ggml is let near a server. No server is needed for it."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
from support.rpc import WELCOME, answering

from pykv.errors import ParamError
from pykv.ggml import connect_rpc, devices, rpc


def asked(monkeypatch: pytest.MonkeyPatch, *, is_built: bool = True) -> list[bytes]:
    """Stand in for ggml, which knows no server; returns the list of what it will be asked for."""
    endpoints: list[bytes] = []
    add_server = lambda endpoint: endpoints.append(endpoint) or rpc.ffi.NULL  # noqa: E731
    ggml = SimpleNamespace(pykv_rpc_is_built=lambda: is_built, pykv_rpc_add_server=add_server)
    monkeypatch.setattr(rpc, "lib", ggml)
    return endpoints


@pytest.mark.parametrize(
    "endpoint",
    ["", "host", "host:", ":50052", "host:0", "host:65536", "host:1:2", "a b:1", "host:-1", "host:1\n", 1, None],
)
def test_no_endpoint(endpoint: object) -> None:
    with pytest.raises(ParamError, match='must be "host:port"'):
        connect_rpc(endpoint)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), "5", None])
def test_no_timeout(timeout: object) -> None:
    with pytest.raises(ParamError, match=r"timeout=.* must be a positive number of seconds"):
        connect_rpc("127.0.0.1:1", timeout)  # type: ignore[arg-type]


def test_a_ggml_without_rpc_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch, is_built=False)
    with pytest.raises(ParamError, match=r"'127\.0\.0\.1:1': this ggml was built without RPC; .*GGML_RPC=ON"):
        connect_rpc("127.0.0.1:1")


@pytest.mark.parametrize(
    "reply",
    [b"", b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", WELCOME[:-1], b"\x1d" + WELCOME[1:], b"\0" * 36],
    ids=["hangs up", "http", "cut off", "another size", "zeros"],
)
def test_what_is_no_server_is_not_shown_to_ggml(monkeypatch: pytest.MonkeyPatch, reply: bytes) -> None:
    """An answer that ggml does not expect would end the process."""
    endpoints = asked(monkeypatch)
    with answering(reply) as endpoint, pytest.raises(ParamError, match="no RPC server that this ggml understands"):
        connect_rpc(endpoint)
    assert not endpoints


def test_a_server_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints = asked(monkeypatch)
    with answering(None) as endpoint, pytest.raises(ParamError, match=r"no answer within 0\.1 s"):
        connect_rpc(endpoint, timeout=0.1)
    assert not endpoints


@pytest.mark.parametrize("host", ["127.0.0.1", "a..b"])
def test_nobody_is_there(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    asked(monkeypatch)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(ParamError, match="no server answers"):
            connect_rpc(f"{host}:{taken.getsockname()[1]}")


def test_a_server_that_ggml_refuses_leaves_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints, before = asked(monkeypatch), devices()
    with answering(WELCOME) as endpoint, pytest.raises(ParamError, match=r"version 5\.0\.0, which this ggml refuses"):
        connect_rpc(endpoint)
    assert endpoints == [endpoint.encode()]
    assert devices() == before
