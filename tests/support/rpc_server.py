"""Serves this machine's CPU to ggml's RPC clients, as one device or several, one client after the other. Needs no pykv.

usage: rpc_server.py host:port n_devices
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path

_CPU = 0  # GGML_BACKEND_DEVICE_TYPE_CPU
_N_THREADS = 1


def _load(name: str) -> ctypes.CDLL:
    """Load a library of the libggml-python package."""
    spec = importlib.util.find_spec("libggml")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("libggml-python is not installed")
    found = [
        path for home in spec.submodule_search_locations for path in Path(home).glob(f"lib*/{name}.*") if path.is_file()
    ]
    if not found:
        raise SystemExit(f"libggml-python has no {name}: rebuild it with -C cmake.define.GGML_RPC=ON")
    return ctypes.CDLL(str(found[0]))


def serve(endpoint: str, n_devices: int) -> None:
    """Serve until the process ends; returns at once where the port is taken."""
    ggml, rpc = _load("libggml"), _load("libggml-rpc")
    ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    cpu = ggml.ggml_backend_dev_by_type(_CPU)
    start = rpc.ggml_backend_rpc_start_server
    start.restype = None
    start.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_void_p),
    ]
    devices = (ctypes.c_void_p * n_devices)(*[cpu] * n_devices)
    start(endpoint.encode(), None, _N_THREADS, n_devices, devices)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
