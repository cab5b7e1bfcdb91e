"""Files that are written whole or not at all: kills, full disks, odd targets."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import threading
from pathlib import Path

import pytest
from support import state_kills
from support.child import child_environment, python_command, run_cleanly
from support.small_disk import run_on_a_small_disk

from pykv.state_format import new_contents, temporary, write_durably


@pytest.fixture(params=["no name until complete", "a name from the start", "a copy with a name"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to write: a system or disk may not have the first."""
    if request.param == "a name from the start":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    if request.param == "a copy with a name":

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(errno.EPERM, "no links")

        monkeypatch.setattr(os, "link", refuse)
    return request.param


def only(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.usefixtures("way")
def test_pieces_of_all_sizes_are_written_in_order(tmp_path):
    path = tmp_path / "state.bin"
    sizes = [0, 1, 70_000, 3, 65_536, 65_535, 2, 200_000, 0, 7]
    pieces = [os.urandom(n) for n in sizes]
    views = [memoryview(piece) if n % 2 else bytearray(piece) for n, piece in zip(sizes, pieces, strict=True)]
    assert write_durably(path, views) == sum(sizes)
    assert path.read_bytes() == b"".join(pieces)
    assert write_durably(str(path), []) == 0
    assert path.read_bytes() == b""
    assert only(tmp_path) == ["state.bin"]


def test_a_staging_buffer_may_be_used_again_for_every_piece(tmp_path):
    def pieces():
        buffer = bytearray(100_000)
        for n in (10, 100_000, 5, 80_000):
            buffer[:n] = bytes([n % 256]) * n
            with memoryview(buffer)[:n] as view:
                yield view

    write_durably(tmp_path / "x", pieces())
    assert (tmp_path / "x").read_bytes() == b"".join(bytes([n % 256]) * n for n in (10, 100_000, 5, 80_000))


def test_writes_that_are_cut_short_go_on(tmp_path, monkeypatch):
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:1000]))
        data = os.urandom(100_001)
        assert write_durably(tmp_path / "x", [data[:3], data[3:]]) == len(data)
    assert (tmp_path / "x").read_bytes() == data


@pytest.mark.usefixtures("way")
def test_a_new_file_has_the_mode_that_open_gives_and_an_old_one_keeps_its_own(tmp_path):
    umask = os.umask(0o027)
    try:
        write_durably(tmp_path / "new", [b"x"])
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    (tmp_path / "new").chmod(0o604)
    write_durably(tmp_path / "new", [b"y"])
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o604


@pytest.mark.usefixtures("way")
def test_a_link_is_followed(tmp_path):
    (tmp_path / "kept").mkdir()
    target = tmp_path / "kept" / "state.bin"
    target.write_bytes(b"old")
    (tmp_path / "link").symlink_to(target)
    write_durably(tmp_path / "link", [b"new"])
    assert (tmp_path / "link").is_symlink()
    assert target.read_bytes() == b"new"
    assert only(tmp_path / "kept") == ["state.bin"]


@pytest.mark.parametrize(
    ("make", "error"),
    [(lambda path: path.mkdir(), IsADirectoryError), (os.mkfifo, OSError)],
    ids=["directory", "pipe"],
)
def test_what_is_no_plain_file_is_not_replaced(tmp_path, make, error):
    path = tmp_path / "taken"
    make(path)
    kind = stat.S_IFMT(path.stat().st_mode)
    with pytest.raises(error, match="taken"):
        write_durably(path, [b"x"])
    assert stat.S_IFMT(path.stat().st_mode) == kind
    assert only(tmp_path) == ["taken"]


@pytest.mark.usefixtures("way")
def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_durably(tmp_path / "nowhere" / "x", [b"x"])


@pytest.mark.parametrize("broken", ["write", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.usefixtures("way")
def test_a_disk_that_fails_leaves_the_old_file(tmp_path, monkeypatch, broken, code):
    path = tmp_path / "state.bin"
    path.write_bytes(b"old")
    real, n_calls = getattr(os, broken), []

    def fail(*args):
        n_calls.append(args)
        if broken == "write" and len(n_calls) < 2:
            return real(*args)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, broken, fail)
        with pytest.raises(OSError, match=r"bytes written, the file is as it was before.*state\.bin") as caught:
            write_durably(path, [b"a" * 70_000, b"b" * 70_000])
    assert caught.value.errno == code
    assert caught.value.filename == str(path)
    assert str(70_000 if broken == "write" else 140_000) in str(caught.value)
    assert path.read_bytes() == b"old"
    assert only(tmp_path) == ["state.bin"]


@pytest.mark.usefixtures("way")
def test_the_disk_begins_before_all_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(temporary, "EARLY", 100_000)
    real, done = os.fsync, []

    def note(fd):
        done.append(threading.current_thread() is threading.main_thread())
        real(fd)

    pieces = [os.urandom(70_000) for _ in range(9)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", note)
        write_durably(tmp_path / "x", pieces)
    assert (tmp_path / "x").read_bytes() == b"".join(pieces)
    assert done[:5] == [False] * 4 + [True], "the last one, of all that was written, comes after the early ones"


@pytest.mark.usefixtures("way")
def test_an_error_that_the_disk_tells_early_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(temporary, "EARLY", 100_000)
    path = tmp_path / "state.bin"
    path.write_bytes(b"old")
    real, is_told = os.fsync, []

    def fail_once(fd):
        if is_told:
            real(fd)
            return
        is_told.append(True)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_once)
        with pytest.raises(OSError, match="the file is as it was before") as caught:
            write_durably(path, [b"a" * 70_000] * 9)
    assert caught.value.errno == errno.EIO
    assert path.read_bytes() == b"old"
    assert only(tmp_path) == ["state.bin"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=lambda error: error.__name__)
@pytest.mark.usefixtures("way")
def test_whoever_makes_the_pieces_may_fail(tmp_path, error):
    path = tmp_path / "state.bin"
    path.write_bytes(b"old")

    def pieces():
        yield b"x" * 100_000
        raise error("no more")

    with pytest.raises(error, match="no more"):
        write_durably(path, pieces())
    assert path.read_bytes() == b"old"
    assert only(tmp_path) == ["state.bin"]


def test_a_file_that_may_not_grow_leaves_the_old_one(tmp_path):
    """By the limit of a process: as a full disk does it, after some of the bytes."""
    out = run_cleanly(f"""
        import os, resource
        from pathlib import Path
        from pykv.state_format import new_contents, temporary, write_durably
        folder = Path({str(tmp_path)!r})
        write_durably(folder / "state.bin", [b"old" * 1000])
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        try:
            write_durably(folder / "state.bin", [b"x" * 90_000] * 9)
        except OSError as error:
            print(error)
        assert (folder / "state.bin").read_bytes() == b"old" * 1000
        print(sorted(os.listdir(folder)))
    """)
    assert "File too large; 100000 bytes written, the file is as it was before" in out
    assert str(tmp_path / "state.bin") in out
    assert "['state.bin']" in out


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """What the system says of a write to a full device."""
    out = run_on_a_small_disk(
        tmp_path,
        """
        write_durably(folder / "state.bin", [b"old" * 1000])
        for paths in (("state.bin",), ("state.bin", "notes"), ("notes", "state.bin")):
            try:
                with full(), new_contents(*(folder / one for one in paths)) as writes:
                    for write in writes:
                        for _ in range(20):
                            write(b"x" * 90_000)
            except OSError as error:
                assert error.errno == errno.ENOSPC, error
                print(error)
            assert (folder / "state.bin").read_bytes() == b"old" * 1000
            print(sorted(os.listdir(folder)))
        """,
    )
    lines = out.splitlines()
    assert lines[1::2] == ["['state.bin']"] * 3
    assert all("No space left on device; " in line for line in lines[::2])


def test_a_file_of_a_pair_that_cannot_be_moved_takes_the_other_back(tmp_path, monkeypatch):
    real = os.replace

    def fail(source, target):
        if os.path.basename(target) == "b":
            raise PermissionError(errno.EPERM, "not yours")
        real(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(PermissionError, match="b'"), new_contents(tmp_path / "a", tmp_path / "b") as (_, write):
        write(b"1" * 10)
    assert only(tmp_path) == []


def test_a_folder_that_cannot_be_synchronised_is_told(tmp_path, monkeypatch):
    """By then the new file is there; it was called unchanged."""
    fsync = os.fsync

    def fail(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, "broken")
        fsync(fd)

    (tmp_path / "x").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="the new file is in its place"):
        write_durably(tmp_path / "x", [b"new"])
    assert (tmp_path / "x").read_bytes() == b"new"


@pytest.mark.parametrize("how", [[], ["named"]], ids=["no name until complete", "a name from the start"])
def test_a_kill_at_any_instant_leaves_a_whole_file_and_the_next_save_nothing_else(tmp_path, how):
    """100 of them; some while a save runs, some between two."""
    done = subprocess.run(
        python_command(state_kills.__file__, str(tmp_path), "100", *how),
        capture_output=True,
        text=True,
        check=True,
        env={**child_environment(), "OPENBLAS_NUM_THREADS": "1"},
    )
    n_whole, n_saves, n_left, *names = done.stdout.split()
    assert int(n_whole) == 100
    assert int(n_saves) > 10
    assert int(n_left) > 0 or not how
    assert names == ["state.bin"]
