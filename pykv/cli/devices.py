"""``pykv devices``: what this machine can compute on, and what each device takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pykv.cli.console import results, size, write_json

if TYPE_CHECKING:
    from pykv.ggml import Device, DeviceFeatures
    from pykv.memory import KVSupport

EXAMPLE = "pykv devices --json"

_FEATURES = {
    "is_async": "async",
    "has_host_buffer": "host buffer",
    "wraps_host_memory": "wraps host memory",
    "has_events": "events",
}
_COLUMNS: dict[str, Callable[[KVSupport], bool]] = {
    "flash attention": lambda one: one.flash,
    "matmul attention": lambda one: one.matmul,
    "row writes": lambda one: one.set_rows,
    "moves": lambda one: one.shift,
}


def command(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line instead of tables.")] = False,
) -> None:
    """List the devices that ggml can compute on, their features, and which K and V each attends to by itself.

    What a device does not take, the CPU does: slower, and with a warning. Heads are named by their width, or by those
    of K and V.
    """
    from pykv.ggml import device_features, devices
    from pykv.memory import device_support

    found = [(device, device_features(device), device_support(device)) for device in devices()]
    if json:
        for device, features, support in found:
            write_json(_record(device, features, support))
        return
    _show_list([device for device, _, _ in found])
    for device, features, support in found:
        _show(device, features, support)


def _record(device: Device, features: DeviceFeatures, support: Iterable[KVSupport]) -> dict[str, Any]:
    return {
        "name": device.name,
        "kind": device.kind,
        "description": device.description,
        "memory_free": device.memory_free,
        "memory_total": device.memory_total,
        "buffer_type": device.buffer_type.name,
        "features": asdict(features),
        "kv_support": [asdict(one) | {"dtype": one.dtype.label} for one in support],
    }


def _show_list(listed: Iterable[Device]) -> None:
    from rich.table import Table

    table = Table("name", "kind", "what it is", "free", "memory", "buffer type")
    for device in listed:
        memory = size(device.memory_free), size(device.memory_total)
        table.add_row(device.name, device.kind, device.description, *memory, device.buffer_type.name)
    results().print(table)


def _show(device: Device, features: DeviceFeatures, support: Iterable[KVSupport]) -> None:
    """Print one device: a line of features, and a table of types."""
    from rich.markup import escape
    from rich.table import Table

    words = [word for name, word in _FEATURES.items() if getattr(features, name)]
    words += [name if value == "1" else f"{name}={value}" for name, value in features.build.items()]
    console = results()
    console.print(f"\n{escape(device.name)}: {escape(', '.join(words) or 'no features told')}")
    by_type: dict[str, list[KVSupport]] = {}
    for one in support:
        by_type.setdefault(one.dtype.label, []).append(one)
    table = Table("K and V", *_COLUMNS)
    for label, asked in by_type.items():
        table.add_row(label, *(_heads(asked, takes) for takes in _COLUMNS.values()))
    console.print(table)


def _heads(asked: Iterable[KVSupport], takes: Callable[[KVSupport], bool]) -> str:
    """Return for which heads a device does something: all, none, or their widths."""
    asked = list(asked)
    taken = [one for one in asked if takes(one)]
    if len(taken) in (0, len(asked)):
        return "all heads" if taken else "no"
    return ", ".join(str(one.head_k) if one.head_k == one.head_v else f"{one.head_k}/{one.head_v}" for one in taken)
