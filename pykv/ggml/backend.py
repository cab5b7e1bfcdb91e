"""Backend: a device made ready to compute, with its threads and its cancel flag."""

from __future__ import annotations

import os
from typing import Any

from pykv._native import ffi, lib
from pykv.errors import AllocError, ParamError
from pykv.ggml.buffer import BufferType
from pykv.ggml.device import Device
from pykv.ggml.owner import Owner

MAX_THREADS = int(lib.GGML_MAX_N_THREADS)


class CancelFlag:
    """A flag that running CPU computations look at between two graph nodes.

    Setting it from another thread, or by Ctrl-C, stops the computation soon.
    """

    def __init__(self) -> None:
        self.cell = ffi.new("int32_t *")

    def set(self) -> None:
        self.cell[0] = 1

    def clear(self) -> None:
        self.cell[0] = 0

    def __bool__(self) -> bool:
        return bool(self.cell[0])


class Backend(Owner):
    """A device's stream of computations.

    On the CPU it owns a thread pool, so that threads live from one compute to the next.
    """

    def __init__(self, device: Device, n_threads: int = 0, cancel: CancelFlag | None = None) -> None:
        if not 0 <= n_threads <= MAX_THREADS:
            raise ParamError(f"n_threads={n_threads} must lie in 1..{MAX_THREADS}")
        ptr = lib.ggml_backend_dev_init(device.ptr, ffi.NULL)
        if ptr == ffi.NULL:
            raise AllocError(f"device {device.name} cannot be initialised")
        self.device = device
        pool = ffi.NULL
        if n_threads and lib.pykv_backend_set_n_threads(ptr, n_threads):
            pool = lib.pykv_threadpool_new(ptr, n_threads) if n_threads > 1 else ffi.NULL
            if pool != ffi.NULL:
                lib.pykv_backend_set_threadpool(ptr, pool)
        self._cancel = cancel
        if cancel is not None:
            lib.pykv_backend_watch_cancel(ptr, cancel.cell)

        def free(backend: Any, pool: Any = pool, cancel: CancelFlag | None = cancel) -> None:
            # the flag is named here to outlive the backend that reads it
            lib.pykv_threadpool_free(backend, pool)
            lib.ggml_backend_free(backend)

        self._own(ptr, free)

    @property
    def buffer_type(self) -> BufferType:
        """The memory that this backend prefers."""
        return BufferType(lib.ggml_backend_get_default_buffer_type(self.ptr))

    def synchronize(self) -> None:
        """Wait for everything queued on this backend."""
        lib.ggml_backend_synchronize(self.ptr)


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), MAX_THREADS)
    return min(os.cpu_count() or 1, MAX_THREADS)
