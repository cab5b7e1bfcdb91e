"""Python programs in a process of their own, for what may kill one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping


def python_command(*arguments: str) -> list[str]:
    """Return the command line of this interpreter, with a trace on fatal signals.

    -P: the folder it runs in may be the source folder, which must not hide the installed package.
    """
    return [sys.executable, "-P", *(["-S"] if sys.flags.no_site else []), "-X", "faulthandler", *arguments]


def child_environment() -> dict[str, str]:
    """Return an environment in which a child imports what this process imports."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def run_python(
    code: str, *, timeout: float = 120, cwd: str | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; the caller looks at `returncode`, `stdout` and `stderr`."""
    return subprocess.run(
        python_command("-c", textwrap.dedent(code)),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=cwd,
        env={**child_environment(), **(environment or {})},
    )


def run_cleanly(code: str, **options: object) -> str:
    """Run a program that must end well; return what it printed."""
    done = run_python(code, **options)  # type: ignore[arg-type]
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout
