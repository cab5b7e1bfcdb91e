"""Plans over remote devices: measured by a process of its own, which a server that dies takes with it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

from pykv.isolation import Link
from pykv.runtime.isolated import where
from pykv.runtime.params import ContextParams

if TYPE_CHECKING:
    from pykv.runtime.planning import Plan

SERVER = "pykv.runtime.isolated.server"


def isolated_plan(
    path: str | bytes | os.PathLike[str], placing: where.Placing, repack: bool, params: ContextParams
) -> Plan:
    """Return what `pykv.plan` does, from another process.

    Raises
    ------
    BackendLost : that process has ended.
    """
    names, n_gpu_layers, tensor_split, overrides = where.all_named(placing)
    link = Link(SERVER, where.titles(names))
    try:
        told = (names, n_gpu_layers, tensor_split, overrides)
        return cast("Plan", link.ask("plan", os.path.abspath(os.fsdecode(path)), told, repack, params, at_once=True))
    finally:
        link.end()
