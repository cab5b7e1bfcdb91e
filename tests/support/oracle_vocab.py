"""Asks llama.cpp about a vocabulary: one short-lived child process for all questions on one file."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("oracle_tokenize.py")
PYTHON_VARIABLE = "PYKV_ORACLE_PYTHON"
VARIANTS = ((False, False), (False, True), (True, False), (True, True))
"""(add_special, parse_special), all of them."""


def encode_request(text: str | bytes, variants: Sequence[tuple[bool, bool]] = VARIANTS) -> dict[str, Any]:
    """Ask for the ids of a text, once for each variant."""
    raw = text.encode() if isinstance(text, str) else text
    return {"encode": base64.b64encode(raw).decode(), "variants": variants}


def decode_request(ids: Sequence[int], special: bool) -> dict[str, Any]:
    """Ask for the bytes of some tokens, as base64."""
    return {"decode": list(ids), "special": special}


def ask_llama_cpp(model: Path, requests: Iterable[dict[str, Any]]) -> list[Any]:
    """Return llama.cpp's answers; the interpreter is the one that `PYKV_ORACLE_PYTHON` names."""
    python = os.environ.get(PYTHON_VARIABLE)
    assert python, f"set {PYTHON_VARIABLE} to a Python that has llama-cpp-python installed"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run(
        [python, str(WORKER), str(model)], input=lines.encode(), capture_output=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
