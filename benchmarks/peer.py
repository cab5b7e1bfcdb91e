"""Run one side of a benchmark in a process of its own and talk to it in JSON lines.

Both sides stay alive with their models and caches, but only the one that was asked runs: the other blocks on
its stdin. `idle_share` tells whether it really did.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HERE = Path(__file__).parent
ISA = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "sve")


class Peer:
    """A child that runs `script`; `ask` blocks until it has answered."""

    def __init__(self, name: str, python: str, script: str) -> None:
        self.name = name
        self._child = subprocess.Popen(
            [python, str(HERE / script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._busy_until = time.perf_counter()
        self._ticks = 0
        self.idle_share = 0.0
        """Largest share of the time between two requests in which the child used a core; Linux only, else 0."""

    def ask(self, do: str, **arguments: Any) -> Any:
        """Send one request and return its result."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._check_idle()
        print(json.dumps({"do": do, **arguments}), file=self._child.stdin, flush=True)
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with {self._child.wait()} while asked to {do}")
        reply = json.loads(line)
        if "error" in reply:
            raise SystemExit(f"{self.name} cannot {do}: {reply['error']}")
        time.sleep(0.03)  # worker threads poll a little before they sleep
        self._ticks, self._busy_until = self._cpu_ticks(), time.perf_counter()
        return reply["result"]

    def close(self) -> None:
        """End the child by closing its stdin, or by its own id where it hangs."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._child.kill()

    def _check_idle(self) -> None:
        elapsed = time.perf_counter() - self._busy_until
        if elapsed > 0.1 and self._ticks:  # the kernel counts in hundredths of a second
            spent = (self._cpu_ticks() - self._ticks) / os.sysconf("SC_CLK_TCK")
            self.idle_share = max(self.idle_share, spent / elapsed)

    def _cpu_ticks(self) -> int:
        stat = Path(f"/proc/{self._child.pid}/stat")
        if not stat.exists():
            return 0
        fields = stat.read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def pykv_peer() -> Peer:
    """Start pykv in this interpreter's twin."""
    return Peer("pykv", sys.executable, "peer_pykv.py")


def llama_peer(name: str) -> Peer:
    """Start llama.cpp in the interpreter that PYKV_ORACLE_PYTHON names."""
    python = os.environ.get("PYKV_ORACLE_PYTHON")
    if not python:
        raise SystemExit("set PYKV_ORACLE_PYTHON to a Python that has llama-cpp-python installed")
    return Peer(name, python, "peer_llama.py")


def serve(side: Any) -> None:
    """Answer requests with the methods of `side` until stdin ends; stray output goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"result": getattr(side, request.pop("do"))(**request)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies)


def machine() -> dict[str, Any]:
    """Describe what a measurement depends on: processor, its vector extensions, cores, load."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    clean = {name.strip(): value.strip() for name, value in fields.items()}
    flags = (clean.get("flags") or clean.get("Features") or "").split()
    return {
        "cpu": clean.get("model name", platform.processor() or platform.machine()),
        "isa": [flag for flag in ISA if flag in flags],
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


def model_path(given: str | None, variable: str = "PYKV_TEST_SMOLLM2", pulled: str = "smollm2-135m") -> str:
    """Return the model to measure: the given one, what the environment names, or the pulled one."""
    if path := given or os.environ.get(variable):
        return path
    from pykv.cli.catalog import cached_path

    return str(cached_path(pulled))


def tokens(n: int, start: int = 0) -> list[int]:
    """Return n ordinary token ids, the same for both sides."""
    return [100 + (i * 7919 + 13) % 40000 for i in range(start, start + n)]


def timed(call: Callable[[], Any]) -> float:
    """Return the milliseconds of one call."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def say(text: str) -> None:
    """Show progress; the one line of JSON has stdout for itself."""
    print(text, file=sys.stderr, flush=True)
