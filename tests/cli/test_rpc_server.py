"""``pykv rpc-server``: what it refuses before it listens. What it serves is tested beside the backends."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from typer.testing import CliRunner

from pykv.cli.app import app
from pykv.cli.options import placement
from pykv.errors import ParamError
from pykv.ggml import RPCServer, cpu_device, is_remote, remote_devices, rpc_server
from pykv.runtime.placing import PlacementWish


def refused(*args: str) -> str:
    """Run the command, which must refuse; returns what it says, on one line."""
    result = CliRunner().invoke(app, ["rpc-server", *args], catch_exceptions=False)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


@pytest.fixture
def with_rpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ggml seem to have RPC, which the published one has not."""

    class Lib:
        def pykv_rpc_is_built(self) -> bool:
            return True

    monkeypatch.setattr(rpc_server, "lib", Lib())


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3"])
def test_other_machines_are_let_in_on_request_only_and_the_danger_is_told(host: str) -> None:
    said = refused("--host", host)
    assert f"--host {host}" in said
    assert "--allow-network" in said
    assert "no password and no encryption" in said


def test_a_host_that_is_none() -> None:
    assert "--host no.such.host.invalid" in refused("--host", "no.such.host.invalid")


def test_a_device_that_is_none() -> None:
    assert "no device 'CUDA7'" in refused("--device", "CUDA7")


def test_a_folder_for_uploads_that_cannot_be_made(tmp_path: Any, with_rpc: None) -> None:
    (tmp_path / "file").write_text("")
    assert "--cache" in refused("--port", "0", "--cache", str(tmp_path / "file"))


def test_a_port_that_is_taken(with_rpc: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ParamError, match=f"port={port}: cannot be listened on"):
            RPCServer("127.0.0.1", port, [cpu_device()], 1)


def test_a_free_port_is_found_and_seen_to_be_listened_on(with_rpc: None) -> None:
    server = RPCServer("localhost", 0, [cpu_device()], 1)
    assert server.host == "127.0.0.1"
    assert server.port > 0
    assert not server.is_listening
    with socket.create_server((server.host, server.port)):
        assert server.is_listening
    assert not server.is_listening


@pytest.mark.parametrize(
    ("more", "named"),
    [({"n_threads": 0}, "n_threads=0"), ({"port": 65536}, "port=65536"), ({"devices": []}, "devices=")],
)
def test_arguments_of_a_server(more: dict[str, Any], named: str, with_rpc: None) -> None:
    with pytest.raises(ParamError, match=named):
        RPCServer(**{"host": "127.0.0.1", "port": 0, "devices": [cpu_device()], "n_threads": 1} | more)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rpc://127.0.0.1", "must be .host:port"),
        ("rpc://127.0.0.1:0", "must be .host:port"),
        ("rpc://127.0.0.1:50052/x", "for its device N"),
        ("RPC://127.0.0.1:50052/", "for its device N"),
    ],
)
def test_names_of_remote_devices_that_are_none(name: str, said: str) -> None:
    assert is_remote(name)
    for refuse in (lambda: remote_devices(name), lambda: PlacementWish.of([name])):
        with pytest.raises(ParamError, match=said):
            refuse()


def test_servers_come_after_the_devices_that_are_named() -> None:
    assert placement(["CPU"], -1, None, None, ["a:1,b:2"])["devices"] == ["CPU", "rpc://a:1", "rpc://b:2"]
    assert placement(None, -1, None, None, ["a:1"])["devices"] == ["rpc://a:1"]
    assert placement(None, -1, None, None, None)["devices"] is None
