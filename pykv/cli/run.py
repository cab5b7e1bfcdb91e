"""``pykv run``: a prompt through a model, streamed, with what it took."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pykv.cli import options
from pykv.cli.catalog import model_path
from pykv.cli.console import duration, notes, size, write_json
from pykv.cli.generate import Generation, Pace, encode_chat, prefill
from pykv.errors import ParamError

if TYPE_CHECKING:
    from pykv.runtime import Context, Model
    from pykv.runtime.params import FlashAttn
    from pykv.runtime.sampling import SamplingParams

EXAMPLE = 'pykv run -m smollm2-135m -p "Why is the sky blue?" -n 64'

DEFAULT_N_CTX = 4096


class Flash(StrEnum):
    """Spellings of the context parameter `flash_attn`."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


FLASH_ATTN: dict[Flash, FlashAttn] = {Flash.AUTO: "auto", Flash.ON: True, Flash.OFF: False}


@dataclass
class Outcome:
    """What one run made and what it took, also when it was stopped half-way."""

    pieces: list[str] = field(default_factory=list)
    prompt: Pace = field(default_factory=Pace)
    generation: Pace = field(default_factory=Pace)
    stop: str = "interrupted"


@dataclass(frozen=True)
class KVUse:
    """How large the memory was: bytes, cells, and the types of its keys and values."""

    nbytes: int
    n_cells: int
    type_k: str
    type_v: str


def _sampling(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, metavar="X", rich_help_panel="Sampling", **settings)


def _memory(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=options.MEMORY_PANEL, **{"metavar": "X", **settings})


def command(
    *,
    model: Annotated[str, typer.Option("--model", "-m", metavar="FILE", help="GGUF file, or name that pull lists.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", metavar="TEXT", help="The text; - reads it from stdin.")],
    n: Annotated[int, typer.Option("--n-predict", "-n", metavar="N", min=1, help="At most so many new tokens.")] = 128,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message of the chat.")] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Write the text into the chat template, or take it as it is.")
    ] = None,
    temperature: Annotated[float, _sampling("--temp", min=0, help="Temperature; 0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, _sampling("--top-k", min=0, help="Keep the k likeliest tokens; 0 = all.")] = 40,
    top_p: Annotated[float, _sampling("--top-p", min=0, max=1, help="Keep this much probability.")] = 0.95,
    min_p: Annotated[
        float, _sampling("--min-p", min=0, max=1, help="Drop tokens below this share of the likeliest.")
    ] = 0.05,
    repetition_penalty: Annotated[float, _sampling("--repeat-penalty", help="Above 1: less repetition.")] = 1.0,
    seed: Annotated[int | None, _sampling("--seed", min=0, help="Makes sampling repeatable.")] = None,
    n_ctx: Annotated[int | None, _memory("--ctx", "-c", min=0, help="Cells; 0 = as trained.")] = None,
    type_k: Annotated[str, _memory("--type-k", help="How keys are stored: f32, f16, q8_0, q4_0 ...")] = "f16",
    type_v: Annotated[str, _memory("--type-v", help="How values are stored.")] = "f16",
    flash_attn: Annotated[
        Flash, _memory("--flash-attn", metavar="auto|on|off", help="Flash attention, or plain; auto as --attention.")
    ] = Flash.AUTO,
    attention: Annotated[
        options.Attention, _memory("--attention", metavar="PATH", help="auto, fused, flash or matmul; auto measures.")
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
    """Answer a question, or continue a text.

    The text goes to stdout, speed and memory to stderr. Ctrl-C stops the text and still shows the figures.
    """
    from pykv.runtime.sampling import SamplingParams

    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, seed=seed
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    import pykv

    placement = options.placement(devices, n_gpu_layers, tensor_split, overrides, rpc)
    with pykv.Model.load(model_path(model), **placement) as loaded:
        tokens = _prompt_tokens(loaded, text, system, chat)
        n_cells = min(DEFAULT_N_CTX, loaded.hparams.n_ctx_train) if n_ctx is None else n_ctx
        with loaded.context(
            n_ctx=n_cells,
            type_k=type_k,
            type_v=type_v,
            flash_attn=FLASH_ATTN[flash_attn],
            attention=attention.value,
            offload_kqv=offload_kqv,
            n_threads=n_threads,
        ) as context:
            outcome = _run(loaded, context, tokens, n, params, stream=not json)
            kv = KVUse(context.memory.nbytes, context.n_ctx_seq, type_k, type_v)
    if json:
        write_json(_record(model, outcome) | {"kv": asdict(kv)})
    else:
        _show(outcome, kv)
    if outcome.stop == "interrupted":
        raise typer.Exit(130)


def _prompt_tokens(model: Model, text: str, system: str | None, chat: bool | None) -> list[int]:
    chat_given = chat is not None
    if chat is None:
        chat = model.tokenizer.chat_template is not None
    if chat:
        messages = [{"role": "system", "content": system}] if system is not None else []
        written = model.chat_template.render([*messages, {"role": "user", "content": text}])
        return encode_chat(model.tokenizer, written)
    if system is not None:
        why = "--raw takes the text as it is" if chat_given else "the file has no chat template"
        raise ParamError(f"--system: {why}, so that there is no place for a system message")
    return model.tokenizer.encode(text)


def _run(model: Model, context: Context, tokens: list[int], n: int, params: SamplingParams, *, stream: bool) -> Outcome:
    """Feed the prompt and collect the answer, showing it as it comes; Ctrl-C ends either."""
    from pykv.runtime.sampling import Sampler

    outcome = Outcome()
    sampler = Sampler(params)
    for token in tokens:  # the repetition penalty counts the prompt too
        sampler.accept(token)
    generation = Generation(context, sampler, model.tokenizer.eog_ids)
    outcome.generation = generation.pace
    decoder = model.tokenizer.stream()
    try:
        prefill(context, tokens, pace=outcome.prompt)
        for token in generation.tokens(n):
            _emit(outcome, decoder.push(token), stream)
        outcome.stop = generation.stop
    except KeyboardInterrupt:
        outcome.stop = "interrupted"
    _emit(outcome, decoder.flush(), stream)
    if stream:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return outcome


def _emit(outcome: Outcome, piece: str, stream: bool) -> None:
    outcome.pieces.append(piece)
    if stream:
        sys.stdout.write(piece)
        sys.stdout.flush()


def _record(model: str, outcome: Outcome) -> dict[str, object]:
    return {
        "model": model,
        "text": "".join(outcome.pieces),
        "stop": outcome.stop,
        "prompt": outcome.prompt.record(),
        "generation": outcome.generation.record(),
    }


def _show(outcome: Outcome, kv: KVUse) -> None:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, pace, remark in (
        ("prompt", outcome.prompt, ""),
        ("generation", outcome.generation, f"stopped: {outcome.stop}"),
    ):
        speed = f"{pace.per_second:.1f} tokens/s"
        table.add_row(name, f"{pace.n_tokens} tokens", duration(pace.seconds), speed, remark)
    table.add_row("KV memory", f"{kv.n_cells} cells", size(kv.nbytes), f"K {kv.type_k}, V {kv.type_v}", "")
    console = notes()
    console.print()
    console.print(table)
