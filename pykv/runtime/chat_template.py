"""Write a conversation as the text that a model was trained on: the file's own Jinja template, run in a sandbox.

A template is foreign code. It sees the messages and a few functions, can neither reach Python's internals nor change
what it is given, and writes at most `MAX_CHARS`; its time is not bounded. Its environment is that of transformers'
`apply_chat_template`, which they are written for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pykv.errors import ChatTemplateError

Message = Mapping[str, Any]
"""One turn: "role", "content", and what else the template knows (such as "tool_calls")."""

MAX_CHARS = 64 * 2**20
"""Length of the longest text that a template may write, in characters."""


class ChatTemplate:
    """A model's chat template.

    Raises
    ------
    ChatTemplateError : the source is not a template.
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self._template = _compiled(source)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **extra: Any,
    ) -> str:
        """Return the conversation as text, special tokens written out.

        `add_generation_prompt` ends it with the head of the assistant's turn. `tools` and `extra` are handed to the
        template as they are.

        note: what is written is counted piece by piece, up to `MAX_CHARS`. Nothing bounds the time that a template
        takes, nor the size of a value that it makes for itself.

        Raises
        ------
        ChatTemplateError : a message is malformed, or the template refuses the conversation, fails or writes too much.
        """
        _check_messages(messages)
        values = {"bos_token": self.bos_token, "eos_token": self.eos_token, "tools": tools, **extra}
        try:
            pieces = self._template.generate(
                values, messages=list(messages), add_generation_prompt=add_generation_prompt
            )
            return "".join(_limited(pieces))
        except Exception as error:  # foreign code: whatever it raises is its failure
            raise ChatTemplateError(f"the chat template failed: {error or type(error).__name__}") from error


def _limited(pieces: Iterator[str]) -> Iterator[str]:
    """Hand pieces on until they pass the limit together."""
    n_chars = 0
    for piece in pieces:
        n_chars += len(piece)
        if n_chars > MAX_CHARS:
            raise ChatTemplateError(f"it writes more than {MAX_CHARS} characters")
        yield piece


class _GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's words for training: here only its content counts."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the chat template cannot be read: {error}") from error


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # note: jinja2's own filter writes <, > and ' as escapes, for HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ChatTemplateError(f"messages must be a list of dicts, not {type(messages).__name__}")
    if not messages:
        raise ChatTemplateError("messages is empty: a conversation needs at least one")
    for i, message in enumerate(messages):
        _check_message(f"messages[{i}]", message)


def _check_message(name: str, message: Message) -> None:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"{name} must be a dict, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ChatTemplateError(f"{name}['role'] must be a string such as 'user', not {role!r}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return
    if not isinstance(content, (str, list)):
        raise ChatTemplateError(f"{name}['content'] must be a string or a list of parts, not {type(content).__name__}")
