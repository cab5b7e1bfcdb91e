"""The ``pykv`` command. This file needs only the standard library, so that a missing extra is one line."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from importlib.util import find_spec

NEEDS = ("typer", "rich", "platformdirs")


def main() -> None:
    """Run the command line in ``sys.argv`` and leave the process with its exit code.

    0 = done, 1 = it could not be done, 2 = the command line is wrong, 130 = stopped by Ctrl-C.
    """
    if sys.stderr is not None:
        faulthandler.enable()
    level = logging.DEBUG if os.environ.get("PYKV_DEBUG") else logging.WARNING
    logging.basicConfig(format="pykv: %(message)s", level=level)
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        print(f"pykv: error: the command line needs {', '.join(missing)}", file=sys.stderr)
        print('  next: pip install "pykv-ggml[cli]"', file=sys.stderr)
        raise SystemExit(1)
    try:
        from pykv.cli.app import app

        app()
    except KeyboardInterrupt:  # before a command could see to it
        raise SystemExit(130) from None
