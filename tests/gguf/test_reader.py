"""Opening files, the tensor table, and the mapping."""

from __future__ import annotations

import mmap
import os
import re
import threading

import gguf
import numpy as np
import pytest
from support.gguf_bytes import RawGGUF, RawTensor, scalar

from pykv.errors import GGUFError, ParamError, UseAfterCloseError
from pykv.ggml import DType
from pykv.gguf import GGUFFile, TensorInfo


def tensor_names(path) -> dict[str, tuple]:
    """Return the table by gguf's own reader: type, dims, offset in the file, bytes."""
    reader = gguf.GGUFReader(path)
    table = {}
    for t in reader.tensors:
        ne = tuple(int(n) for n in t.shape)
        table[t.name] = (t.tensor_type.name, (*ne, 1, 1, 1)[:4], int(t.data_offset), int(t.n_bytes))
    return table


@pytest.fixture
def mixed(tmp_path):
    """A file with a tensor of many types."""
    path = tmp_path / "mixed.gguf"
    writer = gguf.GGUFWriter(str(path), "test")
    rng = np.random.default_rng(1)
    kinds = gguf.GGMLQuantizationType
    for kind in (kinds.Q8_0, kinds.Q4_0, kinds.Q5_1, kinds.Q4_K, kinds.IQ2_XXS, kinds.BF16):
        block, size = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (3, 512 // block * size), dtype=np.uint8)
        writer.add_tensor(f"w.{kind.name}", raw, raw_dtype=kind)
    for array in (np.float32, np.float16, np.float64, np.int8, np.int16, np.int32, np.int64):
        writer.add_tensor(np.dtype(array).name, rng.integers(0, 9, (2, 3, 4, 5)).astype(array))
    writer.add_tensor("one", np.ones(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_table_is_that_of_ggufs_own_reader(mixed):
    with GGUFFile(mixed) as file:
        found = {name: (t.dtype.name, t.ne, t.offset, t.nbytes) for name, t in file.tensors.items()}
    assert found == tensor_names(mixed)
    assert list(found) == list(tensor_names(mixed)), "in file order"


def test_the_table_of_every_tiny_model(tiny_paths):
    for path in tiny_paths.values():
        with GGUFFile(path) as file:
            found = {name: (t.dtype.name, t.ne, t.offset, t.nbytes) for name, t in file.tensors.items()}
        assert found == tensor_names(path)


@pytest.mark.parametrize("path", [None, 3, True, ["a.gguf"], 1.5])
def test_what_is_no_path_ended_in_a_bare_type_error(path):
    with pytest.raises(ParamError, match=re.escape(f"path={path!r} must be the path of a file")):
        GGUFFile(path)


def test_a_path_in_bytes_is_taken(mixed):
    with GGUFFile(os.fsencode(mixed)) as file:
        assert file.path == mixed
    with pytest.raises(GGUFError, match="cannot be opened"):
        GGUFFile(b"/nowhere/\xff.gguf")


@pytest.mark.parametrize("alignment", [1, 4, 8, 32, 64, 4096])
def test_any_alignment(tmp_path, alignment):
    pairs = [("general.alignment", scalar("u32", alignment))]
    data = [bytes(range(12)), bytes(range(100, 108))]
    raw = RawGGUF(pairs, [RawTensor("a", (3,), 0, data[0]), RawTensor("b", (2,), 0, data[1])], alignment=alignment)
    path = tmp_path / "x.gguf"
    path.write_bytes(raw.encode())
    with GGUFFile(path) as file, file.map() as mapped:
        assert file.alignment == alignment
        for name, expect in zip("ab", data, strict=True):
            info = file.tensors[name]
            assert info.offset % alignment == 0
            assert mapped[info.offset : info.offset + info.nbytes] == expect


def test_data_is_mapped_and_not_copied(mixed):
    with GGUFFile(mixed) as file:
        mapped = file.map()
        assert isinstance(mapped, mmap.mmap)
        assert len(mapped) == file.nbytes == mixed.stat().st_size
        info = file.tensors["float32"]
        assert np.frombuffer(mapped, np.float32, 120, info.offset).max() < 9
        with pytest.raises(TypeError):
            mapped[0] = 0
        mapped.close()


def test_no_tensors_and_no_keys(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(RawGGUF().encode())
    with GGUFFile(path) as file:
        assert file.tensors == {}
        assert dict(file.metadata) == {}
        assert file.alignment == 32


def test_version_2_is_read(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(RawGGUF([("k", scalar("u8", 5))], version=2).encode())
    with GGUFFile(path) as file:
        assert file.metadata["k"] == 5


def test_a_str_a_path_and_a_link(mixed, tmp_path):
    link = tmp_path / "größe-link"
    link.symlink_to(mixed)
    for path in (str(mixed), mixed, link, os.fspath(link)):
        with GGUFFile(path) as file:
            assert isinstance(file.tensors["one"], TensorInfo)
            assert file.tensors["one"].dtype is DType.F32


def test_a_path_that_is_not_utf8(mixed, tmp_path):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.gguf")
    os.link(mixed, odd)
    with GGUFFile(odd) as file:
        assert "one" in file.tensors


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file: it starts with b''"),
        (b"GG", "not a GGUF file: it starts with b'GG'"),
        (b"GGML\3\0\0\0" + bytes(40), "not a GGUF file: it starts with b'GGML', not b'GGUF'"),
        (b"\x7fELF" + bytes(40), "not a GGUF file"),
        (b"GGUF", "cut off: it ends at byte 4"),
        (b"GGUF\1\0\0\0" + bytes(40), "version 1; known are"),
        (b"GGUF\4\0\0\0" + bytes(40), "version 4; known are"),
        (b"GGUF\0\0\0\3" + bytes(40), "other byte order"),
        (b"GGUF\3\0\0\0", "damaged or cut off: failed to read header"),
    ],
)
def test_what_is_not_such_a_file(tmp_path, content, message):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError, match=f"x.gguf: .*{message}"):
        GGUFFile(path)


def test_what_is_no_file_at_all(tmp_path):
    with pytest.raises(GGUFError, match=r"missing\.gguf: cannot be opened: No such file"):
        GGUFFile(tmp_path / "missing.gguf")
    with pytest.raises(GGUFError, match="not a file that can be mapped"):
        GGUFFile(tmp_path)
    with pytest.raises(GGUFError, match="not a file that can be mapped"):
        GGUFFile("/dev/null")
    with pytest.raises(GGUFError, match="embedded null"):
        GGUFFile("a\0b")
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nothing")
    with pytest.raises(GGUFError, match="cannot be opened"):
        GGUFFile(dangling)
    with pytest.raises(GGUFError, match="cannot be opened"):
        GGUFFile(tmp_path / ("x" * 300))


def test_a_pipe_does_not_block(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(GGUFError, match="not a file that can be mapped"):
        GGUFFile(pipe)


def test_a_closed_file_refuses_everything_but_keeps_what_was_read(mixed):
    file = GGUFFile(mixed)
    file.close()
    file.close()
    for use in (file.map, lambda: file.alignment, file.__enter__):
        with pytest.raises(UseAfterCloseError):
            use()
    assert "one" in file.tensors


def test_threads_open_files_at_once(mixed, tmp_path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(mixed.read_bytes()[:100])
    seen: list[object] = []

    def work(path) -> None:
        for _ in range(20):
            try:
                with GGUFFile(path) as file:
                    seen.append(len(file.tensors))
            except GGUFError as error:
                seen.append(str(error))

    threads = [threading.Thread(target=work, args=(path,)) for path in (mixed, bad, mixed, bad)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 80
    assert set(seen) == {14, next(s for s in seen if isinstance(s, str))}
