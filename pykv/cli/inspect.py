"""``pykv inspect``: what a GGUF file holds, and what its memory would cost. Loads no weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pykv.cli import options
from pykv.cli.catalog import model_path
from pykv.cli.console import results, size, write_json
from pykv.cli.memory_kinds import MemoryKinds
from pykv.errors import ParamError

if TYPE_CHECKING:
    from pykv.gguf import GGUFFile
    from pykv.memory import MemorySpec
    from pykv.models.hparams import HParams

EXAMPLE = "pykv inspect model.gguf --ctx 8192"

KV_TYPES = ("f32", "f16", "q8_0", "q4_0")
N_CTX_STEP = 256
"""A context's size is rounded up to a multiple of this."""

N_UBATCH = 512
"""Tokens that a context computes at once by default; window caches have room for them."""

DEFAULT_CONTEXTS = (2048, 8192, 32768, 131072)


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file, or a name that `pykv pull` lists.")],
    ctx: Annotated[
        list[int] | None,
        typer.Option("--ctx", "-c", min=1, help="Context sizes to cost, in tokens; repeatable."),
    ] = None,
    metadata: Annotated[bool, typer.Option("--metadata", help="Also list every key of the file.")] = False,
    json: options.Json = False,
) -> None:
    """Show what a GGUF file holds.

    With the bytes of its memory per context size and element type, for one sequence. Loads no weights.
    """
    from pykv.gguf import GGUFFile
    from pykv.models.hparams import HParams

    with GGUFFile(model_path(model)) as file:
        hparams = HParams.from_gguf(file)
        shape = _shape(file, hparams)
        spec = _spec(file, hparams)
        kinds = MemoryKinds.of(spec) if shape["runs_here"] else None
        costs = {n_ctx: _costs(spec, n_ctx) for n_ctx in ctx or _contexts(hparams.n_ctx_train)}
        keys = {key: _short(file.metadata[key]) for key in file.metadata} if metadata else {}
    if json:
        record = shape | {"memory": None if kinds is None else asdict(kinds), "kv_nbytes": costs}
        write_json(record | ({"metadata": keys} if metadata else {}))
        return
    _show(shape, kinds, costs, keys)


def _shape(file: GGUFFile, hparams: HParams) -> dict[str, Any]:
    from pykv.models import registry

    tensors = file.tensors.values()
    types = Counter(tensor.dtype.label for tensor in tensors)
    return {
        "file": str(file.path),
        "name": file.metadata.typed("general.name", str, ""),
        "architecture": hparams.architecture,
        "runs_here": hparams.architecture in registry.ARCHITECTURES,
        "nbytes": file.nbytes,
        "n_params": sum(tensor.ne[0] * tensor.ne[1] * tensor.ne[2] * tensor.ne[3] for tensor in tensors),
        "tensor_types": dict(types.most_common()),
        "n_layer": hparams.n_layer,
        "n_embd": hparams.n_embd,
        "n_head": hparams.n_head,
        "n_head_kv": hparams.n_head_kv,
        "n_embd_head_k": hparams.n_embd_head_k,
        "n_embd_head_v": hparams.n_embd_head_v,
        "n_ctx_train": hparams.n_ctx_train,
        "n_vocab": hparams.n_vocab,
        "has_chat_template": "tokenizer.chat_template" in file.metadata,
    }


def _contexts(n_ctx_train: int) -> tuple[int, ...]:
    """Return the usual context sizes below the trained one, and that one."""
    return (*(n for n in DEFAULT_CONTEXTS if n < n_ctx_train), n_ctx_train)


def _spec(file: GGUFFile, hparams: HParams) -> MemorySpec:
    """Return what the model remembers of each token; of a family that pykv does not run, one full-size cache."""
    from pykv.ggml import cpu_device
    from pykv.memory import LayerSpec, MemorySpec
    from pykv.models import ARCHITECTURES, Keys, Placement, RopeRequest, Weights, build_architecture, derive_rope

    if hparams.architecture not in ARCHITECTURES:
        heads = hparams.n_embd_head_k, hparams.n_embd_head_v
        return MemorySpec(tuple(LayerSpec(n, *heads) for n in hparams.n_head_kv_by_layer))
    cpu = cpu_device()
    weights = Weights(file, Placement(cpu, (cpu,) * hparams.n_layer, cpu))
    rope = derive_rope(hparams, RopeRequest(), hparams.n_ctx_train)
    return build_architecture(hparams, weights, Keys(file)).memory_spec(rope)


def _costs(spec: MemorySpec, n_ctx: int) -> dict[str, int | None]:
    """Return the bytes of a context for each element type, None where the type does not fit."""
    from pykv.memory import KVSettings, MemorySettings, memory_plan

    n_cells = -(-n_ctx // N_CTX_STEP) * N_CTX_STEP
    costs: dict[str, int | None] = {}
    for kind in KV_TYPES:
        try:
            settings = MemorySettings(KVSettings(n_cells, type_k=kind, type_v=kind), min(n_ctx, N_UBATCH))
            costs[kind] = memory_plan(spec, settings).nbytes
        except ParamError:
            costs[kind] = None
    return costs


def _short(value: Any) -> Any:
    """Return a metadata value as JSON takes it; long arrays by their length."""
    if isinstance(value, (str, int, float, bool)):
        return value
    return list(value) if len(value) <= 8 and isinstance(value, list) else f"array of {len(value)}"


def _show(
    shape: dict[str, Any], kinds: MemoryKinds | None, costs: dict[int, dict[str, int | None]], keys: dict[str, Any]
) -> None:
    from rich.table import Table
    from rich.text import Text

    out = results()
    facts = Table.grid(padding=(0, 2))
    attention = ""
    if shape["n_head_kv"]:
        heads = f"{shape['n_head']} query heads, {shape['n_head_kv']} KV heads"
        attention = f"; {heads}, K {shape['n_embd_head_k']} and V {shape['n_embd_head_v']} wide"
    runs = "" if shape["runs_here"] else " (pykv does not run this family yet; costs are for one full-size cache)"
    types = ", ".join(f"{n} {kind}" for kind, n in shape["tensor_types"].items())
    for name, value in (
        ("file", shape["file"]),
        ("model", shape["name"]),
        ("architecture", shape["architecture"] + runs),
        ("size", f"{size(shape['nbytes'])}, {shape['n_params'] / 1e6:.0f}M parameters"),
        ("tensors", types),
        ("layers", f"{shape['n_layer']} of width {shape['n_embd']}{attention}"),
        *([] if kinds is None else [("memory", kinds)]),
        ("context", f"{shape['n_ctx_train']} tokens as trained"),
        ("vocabulary", f"{shape['n_vocab']} tokens{', chat template' if shape['has_chat_template'] else ''}"),
        *keys.items(),
    ):
        facts.add_row(name, Text(str(value)))
    out.print(facts)
    table = Table("context", *KV_TYPES, title="memory of one sequence, K and V of the same type")
    for n_ctx, row in costs.items():
        table.add_row(str(n_ctx), *("-" if nbytes is None else size(nbytes) for nbytes in row.values()))
    for column in table.columns:
        column.justify = "right"
    out.print(table)
