"""The compiled extension: loads libggml, imports `ffi` and `lib`, refuses a ggml that it was not built for.

Only `pykv.ggml` and `pykv.gguf` import this.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path


def _preload() -> None:
    """Load the libraries of the libggml-python package, so that the extension binds to them wherever it lies.

    Without that package (a system's ggml, or a build of one's own) the loader finds ggml by itself.
    """
    spec = importlib.util.find_spec("libggml")
    if spec is None or not spec.submodule_search_locations:
        return
    suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    prefix = "" if sys.platform == "win32" else "lib"
    for home in spec.submodule_search_locations:
        for folder in (Path(home) / "lib64", Path(home) / "lib", Path(home) / "bin"):
            for stem in ("ggml-base", "ggml-cpu", "ggml"):
                library = folder / f"{prefix}{stem}{suffix}"
                if library.exists():
                    ctypes.CDLL(str(library))


_preload()

try:
    from pykv._native._pykv import ffi, lib
except ImportError as error:
    here = Path(__file__).resolve().parent
    if not any(here.glob("_pykv*.so")) and not any(here.glob("_pykv*.pyd")):
        raise ImportError(
            f"pykv was imported from {here.parent}, which holds no compiled extension. That is the source folder: "
            "run from another folder, or install it in place with `pip install -e .`"
        ) from error
    raise


def _text(value: object) -> str:
    return str(ffi.string(value).decode())


def _check_versions() -> None:
    built = (_text(lib.pykv_built_ggml_version()), int(lib.pykv_built_tensor_overhead()))
    loaded = (_text(lib.ggml_version()), int(lib.ggml_tensor_overhead()))
    # ggml promises no stable binary interface, so even a patch release may have moved a field
    if built != loaded:
        raise ImportError(
            f"pykv was built for ggml {built[0]} (tensor of {built[1]} bytes) but loaded ggml {loaded[0]} "
            f"(tensor of {loaded[1]} bytes); reinstall pykv-ggml beside the ggml that it shall use"
        )


_check_versions()
lib.pykv_install_abort_hook()

__all__ = ["ffi", "lib"]
