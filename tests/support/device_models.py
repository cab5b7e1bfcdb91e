"""Models on the devices of one process, each loaded once, for clients of `four_devices`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pykv
from pykv.ggml import connect_rpc, devices


def meet(endpoints: Sequence[str]) -> list[str]:
    """Connect to servers; returns the names of all devices."""
    for endpoint in endpoints:
        connect_rpc(endpoint, 5.0)
    return [device.name for device in devices()]


@cache
def model_on(path: str, device: str) -> pykv.Model:
    """Return a model whose layers all lie on one device, as they are in the file, held in this process."""
    return pykv.Model.load(path, [device], repack=False, isolate=False)
