"""``pykv demo``: one conversation becomes two in the same cells, and one of them forgets its last turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pykv.cli import catalog, options
from pykv.cli.console import duration, notes, results, write_json
from pykv.cli.story import Story

if TYPE_CHECKING:
    from pykv.cli.dialogue import Spoken
    from pykv.runtime import Context, Model

EXAMPLE = "pykv demo -n 24"

MODEL = "smollm2-135m"
N_CTX = 512
QUESTION = "Tell me about the sea in two short sentences."
FOLLOW_UPS = ("Name one animal that lives in it.", "Say the same as a line of a poem.")


def command(
    model: Annotated[str | None, typer.Option("--model", "-m", help=f"Another chat model than {MODEL}.")] = None,
    n: Annotated[int, typer.Option("-n", min=1, max=80, help="At most so many tokens an answer.")] = 40,
    n_threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Show what a KV memory can do.

    Answer, fork, share cells, trim; with timings, and the cells drawn. Downloads SmolLM2 135M (94 MiB,
    Apache-2.0) on first use.
    """
    from rich.console import Console

    import pykv

    path = catalog.model_path(model) if model else _own_model()
    story = Story(Console(quiet=True) if json else results())
    begun = time.perf_counter()
    with pykv.Model.load(path) as loaded:
        seconds = time.perf_counter() - begun
        story.step("load", f"Load {path.name}: {duration(seconds)}", seconds=seconds)
        with loaded.context(n_ctx=N_CTX, n_seq_max=2, kv_unified=True, n_threads=n_threads) as context:
            first = _answer(story, loaded, context, n)
            n_shared = _fork(story, context)
            _both_go_on(story, loaded, context, first, n)
            _trim(story, context, n_shared)
    if json:
        write_json({"model": path.name, "steps": story.steps})


def _own_model() -> Path:
    path = catalog.cached_path(MODEL)
    if path.is_file():
        return path
    from pykv.cli.pull import ensure

    notes().print(f"{MODEL} is not here yet; downloading it once", soft_wrap=True)
    return ensure(catalog.find_entry(MODEL))[0]


def _answer(story: Story, model: Model, context: Context, n: int) -> Spoken:
    from pykv.cli.dialogue import speak
    from pykv.cli.generate import encode_chat

    story.say("you", QUESTION)
    spoken = speak(model, context, {0: encode_chat(model.tokenizer, model.chat_template.render(_chat()))}, n)
    story.say("model", spoken.said[0])
    story.pace("prefill", "Prefill", spoken.prompt)
    story.pace("generation", "Generation", spoken.generation)
    return spoken


def _chat(*answers: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": QUESTION},
        *({"role": "assistant", "content": text} for text in answers),
    ]


def _fork(story: Story, context: Context) -> int:
    """Let sequence 1 share all cells of sequence 0; return how many those are."""
    seconds = _timed(lambda: context.memory.seq_cp(0, 1, 0, -1))
    n_shared = int(context.memory.cells().n_used)
    story.step(
        "fork",
        f"Fork (seq_cp): B shares all {n_shared} cells of A, in {duration(seconds)}; nothing is copied",
        seconds=seconds,
        n_shared=n_shared,
    )
    return n_shared


def _both_go_on(story: Story, model: Model, context: Context, first: Spoken, n: int) -> None:
    from pykv.cli.dialogue import next_turn, speak

    n_shared = int(context.memory.cells().n_used)
    stored = model.chat_template.render(_chat()) + first.said[0]
    chat = _chat(first.said[0])
    both = speak(model, context, {s: next_turn(model, stored, chat, text) for s, text in enumerate(FOLLOW_UPS)}, n)
    for s, question in enumerate(FOLLOW_UPS):
        story.say(f"you, in {'AB'[s]}", question)
        story.say("model", both.said[s])
    n_used = context.memory.cells().n_used
    story.pace("together", "Both in the same batches", both.generation, n_used=n_used, n_apart=n_used + n_shared)
    story.note(f"{n_used} cells are used; two caches would take {n_used + n_shared}")
    story.cells(context.memory.cells())


def _trim(story: Story, context: Context, n_kept: int) -> None:
    n_before = context.memory.cells().n_used
    seconds = _timed(lambda: context.memory.seq_rm(1, n_kept, -1))
    n_freed = n_before - context.memory.cells().n_used
    story.step(
        "trim",
        f"Trim (seq_rm): B forgets its last turn, {n_freed} cells are free again, in {duration(seconds)}",
        seconds=seconds,
        n_freed=n_freed,
    )
    story.cells(context.memory.cells())
    story.note(". empty   A, B owned by one conversation   # shared by both")


def _timed(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun
