"""``pykv plan``: what a model and a context would take on each device, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pykv.cli import options
from pykv.cli.catalog import model_path
from pykv.cli.console import results, size, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from pykv.runtime.planning import DeviceNeeds, Plan

EXAMPLE = "pykv plan -m smollm2-135m --ctx 8192 --type-k q8_0 --type-v q8_0"


def command(
    *,
    model: Annotated[str, typer.Option("--model", "-m", metavar="FILE", help="GGUF file, or name that pull lists.")],
    n_ctx: Annotated[
        int, typer.Option("--ctx", "--n-ctx", "-c", metavar="N", min=0, help="Tokens of all sequences; 0 = as trained.")
    ] = 0,
    n_seq_max: Annotated[int, typer.Option("--n-seq", metavar="N", min=1, help="Sequences.")] = 1,
    kv_unified: Annotated[
        bool, typer.Option("--unified/--streams", help="One pool of cells for all sequences, or an equal part each.")
    ] = True,
    type_k: Annotated[str, typer.Option("--type-k", metavar="TYPE", help="How keys are stored.")] = "f16",
    type_v: Annotated[str, typer.Option("--type-v", metavar="TYPE", help="How values are stored.")] = "f16",
    n_batch: Annotated[
        int, typer.Option("--batch", "--n-batch", metavar="N", min=0, help="Most tokens given at once.")
    ] = 2048,
    n_ubatch: Annotated[
        int, typer.Option("--ubatch", "--n-ubatch", metavar="N", min=0, help="Most tokens computed at once.")
    ] = 512,
    swa_full: Annotated[
        bool, typer.Option("--swa-full", help="Layers with a window keep all cells, not only the window.")
    ] = False,
    attention: Annotated[
        options.Attention,
        typer.Option("--attention", metavar="PATH", help="auto, fused, flash or matmul; auto measures."),
    ] = options.Attention.AUTO,
    offload_kqv: options.OffloadKQV = True,
    devices: options.Devices = None,
    n_gpu_layers: options.GPULayers = -1,
    tensor_split: options.TensorSplit = None,
    overrides: options.Override = None,
    rpc: options.RPC = None,
    n_threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Say whether a model and a context fit, and what they take on each device.

    Reads the head of the file alone. Ends with 0 if all fits into what is free now, with 1 if not.
    """
    import pykv

    plan = pykv.plan(
        model_path(model),
        **options.placement(devices, n_gpu_layers, tensor_split, overrides, rpc),
        n_ctx=n_ctx,
        n_seq_max=n_seq_max,
        kv_unified=kv_unified,
        type_k=type_k,
        type_v=type_v,
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        swa_full=swa_full,
        attention=attention.value,
        offload_kqv=offload_kqv,
        n_threads=n_threads,
    )
    if json:
        write_json(_record(plan))
    else:
        _show(plan)
    raise typer.Exit(0 if plan.fits else 1)


def _record(plan: Plan) -> dict[str, Any]:
    record = asdict(plan) | {"fits": plan.fits, "total": plan.total}
    for told, device in zip(record["devices"], plan.devices, strict=True):
        told |= {"total": device.total, "fits": device.fits}
    return record


def _show(plan: Plan) -> None:
    console = results()
    console.print(_table(plan.devices))
    per_sequence = "" if plan.n_ctx_seq == plan.n_ctx else f", {plan.n_ctx_seq} in each sequence"
    largest = f"{plan.largest_n_ctx} tokens fit into what is free now" if plan.largest_n_ctx else "no context fits"
    console.print(f"context    {plan.n_ctx} tokens{per_sequence}; the model was trained for {plan.n_ctx_train}")
    console.print(f"largest    {largest}")
    console.print(f"attention  {plan.attention}", soft_wrap=True)
    for one in plan.suggestions:
        fits = ", and all fits" if one.fits and not plan.fits else ""
        console.print(f"try        {_options(one.change)}: {_saved(one.saves)}{fits}; {one.note}", soft_wrap=True)


def _table(devices: tuple[DeviceNeeds, ...]) -> Table:
    """Return a table with a column for each device."""
    from rich.table import Table

    table = Table("", *(device.name for device in devices))
    for name, of in _ROWS.items():
        if any(of(device) for device in devices) or name == "in all":
            table.add_row(name, *(size(of(device)) for device in devices), end_section=name == "rows of logits")
    table.add_row("free now", *("?" if device.free is None else size(device.free) for device in devices))
    table.add_row("", *("fits" if device.fits else "[yellow]too much[/]" for device in devices))
    return table


_ROWS: dict[str, Callable[[DeviceNeeds], int]] = {
    "weights": lambda needs: needs.weights,
    "keys and values": lambda needs: needs.kv,
    "states": lambda needs: needs.states,
    "scratch to compute": lambda needs: needs.compute,
    "rows of logits": lambda needs: needs.output,
    "in all": lambda needs: needs.total,
    "mapped weights": lambda needs: needs.mapped,
}
"""What a table shows of a device. Mapped weights are not among those that are allocated."""

_SPELT = {
    "n_ctx": "--ctx",
    "n_ubatch": "--ubatch",
    "n_gpu_layers": "--gpu-layers",
    "type_k": "--type-k",
    "type_v": "--type-v",
}
_FLAGS = {"swa_full": "without --swa-full", "offload_kqv": "--no-kv-offload", "repack": "repack=False (in Python)"}


def _options(change: dict[str, object]) -> str:
    """Return changes of parameters as options."""
    return " ".join(_FLAGS[name] if name in _FLAGS else f"{_SPELT[name]} {value}" for name, value in change.items())


def _saved(saves: dict[str, int]) -> str:
    """Return what a change saves, and where."""
    parts = [
        f"{'saves' if n > 0 else 'takes'} {size(abs(n))}" + (f" on {name}" if len(saves) > 1 else "")
        for name, n in saves.items()
        if n
    ]
    return ", ".join(parts)
