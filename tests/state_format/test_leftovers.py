"""What killed writers leave in a folder goes with the next save; what others are writing there stays."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.child import child_environment, python_command

from pykv.state_format import leftovers, new_content, new_contents, temporary, write_durably

OLD = time.time() - leftovers.STALE_SECONDS - 60

_BEGIN = f"""
import os, signal, sys
from pathlib import Path
from pykv.state_format import new_contents, write_durably
folder = Path(sys.argv[1])
if sys.argv[2] == "a name from the start" and hasattr(os, "O_TMPFILE"):
    del os.O_TMPFILE
die = lambda *_: os.kill(os.getpid(), {int(signal.SIGKILL)})
"""


@pytest.fixture(params=["no name until complete", "a name from the start"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "a name from the start":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    return request.param


def child(folder: Path, way: str, code: str) -> subprocess.Popen[str]:
    """Run a program that knows the `folder`, and how to `die` by a signal that nothing can catch."""
    command = python_command("-c", _BEGIN + code, str(folder), way)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment())


def hidden(folder: Path) -> list[str]:
    return [one.name for one in folder.iterdir() if one.name.startswith(".")]


def kept(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.iterdir()}


def other_system(name: str) -> str:
    """Return the name that another system, or this one before it was started anew, would have given."""
    return "." + "".join("1" if digit == "0" else "0" for digit in name[1:9]) + name[9:]


def test_files_of_killed_writers_stayed_for_good(tmp_path: Path, way: str) -> None:
    """One with two files that are complete, one amid its writing."""
    with child(tmp_path, way, "os.replace = die\nwith new_contents(folder / 'a', folder / 'b') as (one, two): pass"):
        pass
    assert len(hidden(tmp_path)) == 2
    with child(tmp_path, way, "write_durably(folder / 'c', (die() if i else b'x' * 10**6 for i in range(2)))"):
        pass
    assert len(hidden(tmp_path)) == (way == "a name from the start")  # it has removed those before
    write_durably(tmp_path / "state", [b"new"])
    assert kept(tmp_path) == {"state": b"new"}


def test_another_process_that_still_writes_keeps_its_file(tmp_path: Path, way: str) -> None:
    """In the midst of it, and when all is there and only the place of it is not taken."""
    code = """
def wait(*_):
    print("here", flush=True)
    sys.stdin.readline()
replace = os.replace
os.replace = lambda *given: (wait(), replace(*given))
with new_contents(folder / "a", folder / "b") as writes:
    for write in writes:
        write(b"x" * 100_000)
    wait()
    for write in writes:
        write(b"y" * 100_000)
"""
    with child(tmp_path, way, code) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        for n_named in (2 if way == "a name from the start" else 0, 2, 1):
            assert writer.stdout.readline() == "here\n"
            before = hidden(tmp_path)
            write_durably(tmp_path / "other", [b"new"])
            assert hidden(tmp_path) == before
            assert len(before) == n_named
            writer.stdin.write("\n")
            writer.stdin.flush()
    assert writer.returncode == 0
    whole = b"x" * 100_000 + b"y" * 100_000
    assert kept(tmp_path) == {"a": whole, "b": whole, "other": b"new"}


def test_two_saves_of_one_process_do_not_take_each_others_file(tmp_path: Path, way: str) -> None:
    with new_content(tmp_path / "a") as one:
        one(b"x" * 100_000)
        with new_content(tmp_path / "b") as other:
            other(b"y")
            write_durably(tmp_path / "c", [b"z"])
    assert kept(tmp_path) == {"a": b"x" * 100_000, "b": b"y", "c": b"z"}


@pytest.mark.parametrize("is_held", [False, True], ids=["taken and gone", "taken for a moment"])
def test_a_file_that_is_taken_for_a_leftover_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_held: bool
) -> None:
    """Another process looks between the instants when a file is made and when it is locked."""
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    real, locks = temporary._open_new, []

    def watched(path: str) -> int:
        fd = real(path)
        if len(locks) < 3:
            locks.append(os.open(path, os.O_RDONLY))
            if is_held:
                fcntl.flock(locks[-1], fcntl.LOCK_EX)
            else:
                leftovers.remove_leftovers(str(tmp_path))
        return fd

    monkeypatch.setattr(temporary, "_open_new", watched)
    write_durably(tmp_path / "state", [b"x" * 100_000])
    assert len(locks) == 3
    for fd in locks:
        os.close(fd)
    assert kept(tmp_path) == {"state": b"x" * 100_000}


def test_who_always_loses_its_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    monkeypatch.setattr(temporary, "claim", lambda *_: False)
    with pytest.raises(BlockingIOError, match="state"):
        write_durably(tmp_path / "state", [b"x"])
    assert kept(tmp_path) == {}


@pytest.mark.parametrize(("is_old", "is_locked", "stays"), [
    (False, False, True), (True, False, False), (True, True, True),
], ids=["fresh", "old", "old and locked"])  # fmt: skip
def test_files_of_other_machines_go_when_they_are_old(
    tmp_path: Path, is_old: bool, is_locked: bool, stays: bool
) -> None:
    """A lock that is held there may not be seen here."""
    path = tmp_path / other_system(leftovers.temporary_name())
    path.write_bytes(b"x")
    if is_old:
        os.utime(path, (OLD, OLD))
    with path.open("rb") as file:
        if is_locked:
            fcntl.flock(file, fcntl.LOCK_EX)
        write_durably(tmp_path / "state", [b"new"])
    assert hidden(tmp_path) == [path.name] * stays


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_where_no_system_says_which_it_is_files_go_when_they_are_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    if not known:
        monkeypatch.setattr(leftovers, "_kernel", lambda: "")
    for _ in range(2):
        (tmp_path / leftovers.temporary_name()).write_bytes(b"x")
    os.utime(tmp_path / hidden(tmp_path)[0], (OLD, OLD))
    leftovers.remove_leftovers(str(tmp_path))
    assert len(hidden(tmp_path)) == (0 if known else 1)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    (path.parent / "mine").write_bytes(b"mine")
    path.symlink_to("mine")


@pytest.mark.parametrize("make", [Path.mkdir, pipe, link], ids=["folder", "pipe", "link"])
def test_what_is_no_plain_file_stays(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    path = tmp_path / leftovers.temporary_name()
    make(path)
    write_durably(tmp_path / "state", [b"new"])
    assert hidden(tmp_path) == [path.name]


@pytest.mark.parametrize(
    "name", [".pykv-tmp", ".x.pykv-tmp", ".0123456789abcdef.pykv-tmp~", "0123456789abcdef.pykv-tmp"]
)
def test_files_of_other_names_stay(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"mine")
    os.utime(tmp_path / name, (OLD, OLD))
    write_durably(tmp_path / "state", [b"new"])
    assert (tmp_path / name).read_bytes() == b"mine"


def test_a_leftover_that_may_not_be_written_is_removed(tmp_path: Path) -> None:
    """It has the mode of the file that it was to replace."""
    path = tmp_path / leftovers.temporary_name()
    path.write_bytes(b"x")
    path.chmod(0o400)
    write_durably(tmp_path / "state", [b"new"])
    assert hidden(tmp_path) == []


def test_leftovers_are_removed_where_a_link_leads(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept" / "state")
    for folder in (tmp_path, tmp_path / "kept"):
        (folder / leftovers.temporary_name()).write_bytes(b"x")
    with new_contents(tmp_path / "link") as (write,):
        write(b"new")
    assert len(hidden(tmp_path)) == 1
    assert kept(tmp_path / "kept") == {"state": b"new"}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("what", ["the system", "the disk"])
def test_without_locks_nothing_is_removed_and_saves_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    for module in (leftovers, temporary) if what == "the system" else ():
        monkeypatch.setattr(module, "HAS_LOCKS", False)

    def refuse(*_: object) -> None:
        raise OSError(38, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    left = tmp_path / leftovers.temporary_name()
    left.write_bytes(b"x")
    write_durably(tmp_path / "state", [b"new" * 100_000])
    assert kept(tmp_path) == {"state": b"new" * 100_000, left.name: b"x"}


def test_a_folder_that_cannot_be_read_is_saved_into_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str) -> list[str]:
        raise PermissionError(13, "not yours")

    monkeypatch.setattr(os, "listdir", refuse)
    write_durably(tmp_path / "state", [b"new"])
    assert (tmp_path / "state").read_bytes() == b"new"
