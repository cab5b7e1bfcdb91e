"""A program on a disk that is soon full: one in memory, or where none can be mounted, /dev/full."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

from support.child import child_environment, python_command

NBYTES = 1 << 20

_BEGIN = """
import contextlib, errno, os, sys
from pathlib import Path
from pykv.state_format import new_contents, write_durably

folder, is_small = Path(sys.argv[1]), sys.argv[2] == "small"

@contextlib.contextmanager
def full():
    "Let the disk be full while more is written than it holds."
    if is_small:
        yield
        return
    write, device = os.write, os.open("/dev/full", os.O_WRONLY)
    os.write = lambda fd, data: write(device, data)
    try:
        yield
    finally:
        os.write = write
        os.close(device)
"""


def run_on_a_small_disk(folder: Path, code: str) -> str:
    """Run a program, which knows a `folder` on such a disk and a block `full()`; return what it printed."""
    program = _BEGIN + textwrap.dedent(code)
    done = _run(_mounted(folder), program, folder, "small")
    if done.returncode == _NO_MOUNT:
        done = _run([], program, folder, "large")
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


_NO_MOUNT = 93


def _mounted(folder: Path) -> list[str]:
    """Return what runs a command where a small file system lies over a folder, for that command only."""
    mount = f"mount -t tmpfs -o size={NBYTES} none {folder}"
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    script = f'unshare --mount {" ".join(as_root)} sh -c \'{mount} || exit {_NO_MOUNT}; exec "$@"\' sh "$@"; rc=$?'
    return ["sh", "-c", f"unshare --mount {' '.join(as_root)} true || exit {_NO_MOUNT}; {script}; exit $rc", "sh"]


def _run(before: list[str], program: str, folder: Path, kind: str) -> subprocess.CompletedProcess[str]:
    command = [*before, *python_command("-c", program, str(folder), kind)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=child_environment())
