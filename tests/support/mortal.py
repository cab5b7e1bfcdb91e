"""A process that forks itself for each piece of code, so that showing how one dies costs no import.

Run as a program it is that process: a line of JSON in, a line of JSON out.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from support.child import child_environment, python_command


@dataclass(frozen=True)
class Death:
    """How a child ended: `signal` is 0 if none ended it; `status` is its exit status."""

    signal: int
    status: int
    stderr: str


class Mortal:
    """Runs code where it may die. The names of `support.raw_ggml` are at hand."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            python_command(__file__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )

    def run(self, code: str) -> Death:
        """Execute code in a fork; it must not print to stdout."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(textwrap.dedent(code)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the forking process itself is gone"
        return Death(**json.loads(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def _run_forked(code: str, scope: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as errors:
        pid = os.fork()
        if pid == 0:
            os.dup2(errors.fileno(), 2)
            try:
                exec(code, scope)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return {"signal": number, "status": 0 if number else os.WEXITSTATUS(status), "stderr": text}


def _serve() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import support.raw_ggml as scope

    for line in sys.stdin:
        print(json.dumps(_run_forked(json.loads(line), dict(vars(scope)))), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    _serve()
