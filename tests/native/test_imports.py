"""What importing loads, and what it says where it cannot."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.child import run_cleanly

from pykv import _native

ROOT = Path(__file__).parents[2]


def loaded_by(statement: str) -> set[str]:
    """Return the names of the modules that a fresh interpreter holds after a statement."""
    return set(run_cleanly(f"import sys\n{statement}\nprint(*sys.modules)").split())


@pytest.mark.parametrize("module", ["pykv", "pykv.errors", "pykv.log"])
def test_these_load_neither_numpy_nor_the_extension(module):
    loaded = loaded_by(f"import {module}")
    assert "numpy" not in loaded
    assert not any(name.startswith(("pykv._native", "pykv.ggml", "cffi", "_cffi")) for name in loaded)


@pytest.mark.parametrize("module", ["pykv.batch", "pykv.cells", "pykv.typing"])
def test_bookkeeping_loads_no_extension(module):
    loaded = loaded_by(f"import {module}")
    assert "numpy" in loaded
    assert not any(name.startswith(("pykv._native", "pykv.ggml", "cffi", "_cffi")) for name in loaded)


def test_names_of_the_package_are_loaded_when_asked_for():
    out = run_cleanly("""
        import sys, pykv
        assert "KVCache" in dir(pykv)
        before = "pykv.memory" in sys.modules
        pykv.MemorySpec
        print(before, "pykv.memory" in sys.modules)
        try:
            pykv.nothing
        except AttributeError as error:
            print(error)
    """)
    assert out == "False True\nmodule 'pykv' has no attribute 'nothing'\n"


@pytest.mark.parametrize("change", ["version", "size"])
def test_a_ggml_it_was_not_built_for_is_refused(monkeypatch, change):
    lib, ffi = _native.lib, _native.ffi
    built, size = ffi.string(lib.ggml_version()).decode(), lib.ggml_tensor_overhead()
    version, overhead = ("0.99.1", size) if change == "version" else (built, size + 8)
    fake = SimpleNamespace(
        pykv_built_ggml_version=lib.pykv_built_ggml_version,
        pykv_built_tensor_overhead=lib.pykv_built_tensor_overhead,
        ggml_version=lambda: ffi.new("char[]", version.encode()),
        ggml_tensor_overhead=lambda: overhead,
    )
    monkeypatch.setattr(_native, "lib", fake)
    told = f"built for ggml {built} (tensor of {size} bytes) but loaded ggml {version} (tensor of {overhead} bytes)"
    with pytest.raises(ImportError, match=re.escape(told)):
        _native._check_versions()


def without_site(code: str, *folders: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run code where only these folders can be imported from."""
    paths = ", ".join(repr(str(folder)) for folder in folders)
    return subprocess.run(
        [sys.executable, "-S", "-E", "-c", f"import sys; sys.path[:0] = [{paths}]; {code}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
    )


@pytest.fixture
def source_folder(tmp_path) -> Path:
    """A copy of the source without anything compiled."""
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd", "*.dylib")
    shutil.copytree(ROOT / "pykv", tmp_path / "pykv", ignore=ignore)
    return tmp_path


@pytest.fixture
def numpy_folder() -> Path:
    return Path(importlib.util.find_spec("numpy").origin).parents[1]


@pytest.mark.parametrize("module", ["pykv._native", "pykv.ggml", "pykv.gguf", "pykv.memory"])
def test_the_source_folder_says_that_it_is_not_the_installed_package(source_folder, numpy_folder, module):
    done = without_site(f"import {module}", source_folder, numpy_folder, cwd=source_folder)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: pykv was imported from {source_folder / 'pykv'}, which holds no compiled ext")
    assert "pip install" in last


def test_the_source_folder_is_enough_for_the_bookkeeping(source_folder, numpy_folder):
    code = "import pykv, pykv.batch, pykv.cells; print(pykv.Batch([1, 2]), pykv.__version__)"
    done = without_site(code, source_folder, numpy_folder, cwd=source_folder)
    assert done.returncode == 0, done.stderr


def test_a_broken_extension_is_not_called_missing(source_folder, numpy_folder):
    (source_folder / "pykv" / "_native" / "_pykv.abi3.so").write_bytes(b"not a library")
    done = without_site("import pykv._native", source_folder, numpy_folder, cwd=source_folder)
    assert done.returncode == 1
    assert "no compiled extension" not in done.stderr
    assert "ImportError" in done.stderr
