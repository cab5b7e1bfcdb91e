"""``pykv rpc-server``: lend this machine's devices to a program on another one."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from pykv.cli import options
from pykv.cli.console import notes, size, write_json
from pykv.errors import ParamError

if TYPE_CHECKING:
    from pykv.ggml import RPCServer

EXAMPLE = "pykv rpc-server --port 50052 --device CPU"

_DANGER = (
    "whoever reaches this port can use this machine's memory and processor, unasked and unseen: there is no password "
    "and no encryption, and what clients send is believed"
)
_LOOK = 0.02
"""Seconds between two looks whether the server listens."""


def command(
    *,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="Where to listen; 0 takes a free port.")
    ] = 50052,
    devices: options.Devices = None,
    n_threads: options.Threads = None,
    cache: Annotated[
        Path | None, typer.Option("--cache", metavar="FOLDER", help="Keeps uploaded weights for the next client.")
    ] = None,
    allow_network: Annotated[
        bool, typer.Option("--allow-network", help="Listen for other machines too. Nothing protects this one then.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Lend devices of this machine to programs on others, one at a time. Ctrl-C ends it.

    There: pykv run --rpc HOST:PORT ..., or devices=["rpc://HOST:PORT"] in Python.
    """
    from pykv.ggml import RPCServer, cpu_device, find_device, usable_cores

    address = _address(host, allow_network)
    names = options.listed(devices)
    lent = [find_device(name, "devices") for name in names] or [cpu_device()]
    server = RPCServer(address, port, lent, n_threads or usable_cores(), cache)
    if allow_network:
        notes().print(f"warning: {_DANGER}", style="yellow", soft_wrap=True)
    _serve(server, json)


def _address(host: str, allow_network: bool) -> str:
    """Return the address of a host, if it is this machine's own or others are allowed."""
    import ipaddress
    import socket

    try:
        address = socket.gethostbyname(host)
    except (OSError, UnicodeError) as error:
        raise ParamError(f"host={host!r} is no IPv4 address and no name of one: {error}") from error
    if not ipaddress.ip_address(address).is_loopback and not allow_network:
        raise ParamError(f"host={host!r} is seen by other machines, which needs --allow-network: {_DANGER}")
    return address


def _serve(server: RPCServer, json: bool) -> NoReturn:
    """Serve until a signal comes, or say that it cannot be done."""
    told = threading.Event()  # ggml's server never returns, so it has a thread that nobody waits for
    ended = threading.Event()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        told.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    out = _own_stdout()

    def run() -> None:
        server.serve()
        ended.set()
        told.set()

    threading.Thread(target=run, daemon=True).start()
    while not server.is_listening and not told.wait(_LOOK):
        pass
    if not told.is_set():
        _tell(server, out, json)
        told.wait()
    if ended.is_set():
        raise ParamError(f"host={server.host!r}, port={server.port}: cannot be listened on; somebody else took it")
    notes().print("stopped", style="dim")
    sys.stderr.flush()
    os._exit(0)  # the thread is inside ggml, whose own end it would meet otherwise


def _own_stdout() -> int:
    """Return stdout as a descriptor of our own: ggml's server writes a line there for every connection."""
    sys.stdout.flush()
    out, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return out


def _tell(server: RPCServer, out: int, json: bool) -> None:
    """Say that the server listens, and how it is used."""
    with os.fdopen(out, "w", encoding="utf-8") as stream:
        if json:
            record = {
                "endpoint": server.endpoint,
                "host": server.host,
                "port": server.port,
                "devices": [device.name for device in server.devices],
                "pid": os.getpid(),
            }
            write_json(record, stream)
            return
        stream.write(f"listening on {server.endpoint}\n")
        for i, device in enumerate(server.devices):
            stream.write(f"  {i}  {device.name}  {device.description}  {size(device.memory_free)} free\n")
        stream.write(f"use it: pykv run --rpc {server.endpoint} -m MODEL -p TEXT      (Ctrl-C ends the server)\n")
