"""A child process that answers one line of JSON with one, and whose death is an answer too."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from support.child import child_environment, python_command


class DeathError(AssertionError):
    """The child ended; the message holds its last words."""


class Worker:
    """Runs a program of `tests/support` that serves lines, with `environment` beside what is set here already.

    It starts it anew after a death.
    """

    def __init__(self, program: Path, environment: Mapping[str, str] | None = None) -> None:
        self._program, self._environment = program, {**child_environment(), **(environment or {})}
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)

    def ask(self, question: Any) -> Any:
        """Return the answer.

        Raises
        ------
        DeathError : with what faulthandler wrote.
        """
        process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            self._bury()
            self._errors.seek(0)
            raise DeathError(
                f"exit status {process.returncode}: {self._errors.read().decode(errors='replace')[-4000:]}"
            )
        return json.loads(line)

    def _start(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                python_command(str(self._program)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=self._environment,
            )
        return self._process

    def _bury(self) -> None:
        if self._process is not None:
            self._process.communicate(timeout=60)
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bury()
        self._errors.close()
