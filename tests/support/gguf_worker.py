"""Opens GGUF files that may be hostile, and reads all that is in them. One line of JSON (bytes in hex) in, one out."""

from __future__ import annotations

import json
import sys
import tempfile
from math import prod
from pathlib import Path


def inspect(path: Path) -> str:
    """Return "refused", or "read" when everything in the file holds together."""
    from pykv.errors import GGUFError
    from pykv.gguf import GGUFFile

    size = path.stat().st_size
    try:
        file = GGUFFile(path)
    except GGUFError as error:
        return "refused" if str(path) in str(error) else f"the file is not named: {error}"
    with file:
        for key in file.metadata:
            assert isinstance(key, str)
            _ = file.metadata[key]
        for name, info in file.tensors.items():
            assert name == info.name
            assert min(info.ne) >= 0
            assert info.nbytes == info.dtype.row_size(info.ne[0]) * prod(info.ne[1:])
            assert 0 <= info.offset <= info.offset + info.nbytes <= size, info
        if size:
            file.map().close()
    return "read"


def _serve() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hostile.gguf"
        for line in sys.stdin:
            path.write_bytes(bytes.fromhex(json.loads(line)))
            try:
                answer = inspect(path)
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    _serve()
