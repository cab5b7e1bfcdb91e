"""Options that several commands share, as annotated types."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from pykv.errors import ParamError

MEMORY_PANEL = "Memory and devices"


class Attention(StrEnum):
    """Spellings of the context parameter `attention`."""

    AUTO = "auto"
    FUSED = "fused"
    FLASH = "flash"
    MATMUL = "matmul"


Threads = Annotated[
    int | None, typer.Option("--threads", "-t", metavar="N", min=1, help="CPU threads; else one a core.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text.")]
Devices = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        "--devices",
        "-d",
        metavar="NAME",
        help="One that devices lists, or several: repeated, or with commas between.",
        rich_help_panel=MEMORY_PANEL,
    ),
]
RPC = Annotated[
    list[str] | None,
    typer.Option(
        "--rpc",
        metavar="HOST:PORT",
        help="The devices of a pykv rpc-server, beside those of --device; several as there.",
        rich_help_panel=MEMORY_PANEL,
    ),
]
GPULayers = Annotated[
    int,
    typer.Option(
        "--gpu-layers",
        "--n-gpu-layers",
        metavar="N",
        min=-1,
        help="Layers on devices, from the last one down; -1 = all.",
        rich_help_panel=MEMORY_PANEL,
    ),
]
TensorSplit = Annotated[
    str | None,
    typer.Option(
        "--tensor-split",
        metavar="X,X",
        help="How much of them each device takes, such as 3,1.",
        rich_help_panel=MEMORY_PANEL,
    ),
]
Override = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        metavar="WHAT=NAME",
        help="Layers (3 or 0-7), or tensors by a pattern of their names, on another device; repeatable.",
        rich_help_panel=MEMORY_PANEL,
    ),
]
OffloadKQV = Annotated[
    bool,
    typer.Option(
        "--kv-offload/--no-kv-offload",
        help="K and V beside the layer's weights, or in host memory.",
        rich_help_panel=MEMORY_PANEL,
    ),
]


def placement(
    devices: Sequence[str] | None,
    n_gpu_layers: int,
    tensor_split: str | None,
    overrides: Sequence[str] | None,
    rpc: Sequence[str] | None,
) -> dict[str, Any]:
    """Return what these options mean to `Model.load`.

    Raises
    ------
    ParamError : one that cannot be read.
    """
    names = [*listed(devices), *(f"rpc://{endpoint}" for endpoint in listed(rpc))]
    return {
        "devices": names or None,
        "n_gpu_layers": n_gpu_layers,
        "tensor_split": None if tensor_split is None else _shares(tensor_split),
        "overrides": dict(map(_override, overrides or ())),
    }


def listed(given: Sequence[str] | None) -> list[str]:
    """Return the elements of an option that is repeated, or has commas between them."""
    return [one.strip() for text in given or () for one in text.split(",")]


def _shares(text: str) -> list[float]:
    try:
        return [float(one) for one in text.split(",")]
    except ValueError:
        raise ParamError(f"tensor_split={text!r} must be numbers with commas between, such as 3,1") from None


def _override(text: str) -> tuple[int | range | str, str]:
    what, is_given, name = text.rpartition("=")
    if not is_given or not what or not name:
        raise ParamError(f"overrides={text!r} must be a layer or a pattern, = and a device, such as 3=CPU")
    first, is_range, last = what.partition("-")
    if what.isdecimal():
        return int(what), name
    if is_range and first.isdecimal() and last.isdecimal():
        return range(int(first), int(last) + 1), name
    return what, name
