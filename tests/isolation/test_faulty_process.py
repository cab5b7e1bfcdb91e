"""A process that does wrong what it is asked for, whatever it is: an exception, at once, and the process is gone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from pykv.errors import BackendLost
from pykv.isolation import Link


@pytest.fixture
def link() -> Iterator[Link]:
    one = Link("support.faulty_server", ("RPC0", "RPC1"))
    yield one
    one.end()


def lost(link: Link, fault: str) -> BackendLost:
    with pytest.raises(BackendLost) as caught:
        link.ask(fault)
    assert link.closed
    with pytest.raises(ProcessLookupError):
        os.kill(link.pid, 0)
    return caught.value


def test_ggmls_last_words_are_told(link: Link) -> None:
    error = lost(link, "abort")
    said = error.last_words.splitlines()
    assert said[0] == "a line of a library's own"
    assert said[-1].startswith("pykv: fatal error inside ggml, the process ends: ")
    assert "GGML_ASSERT" in said[-1]
    assert str(error).startswith("the process that computed on RPC0, RPC1 has ended (SIGABRT):\n  a line of")
    assert error.devices == ("RPC0", "RPC1")


def test_only_the_last_lines_are_told(link: Link) -> None:
    error = lost(link, "words")
    assert error.last_words.splitlines() == ["a line"] * 11 + ["\ufffd the last one"]
    assert "(exit status 3)" in str(error)


@pytest.mark.parametrize("fault", ["exit", "nonsense", "cut off", "no message", "a class of others"])
def test_nonsense_ends_it(link: Link, fault: str) -> None:
    lost(link, fault)


def test_an_exception_of_an_unknown_class_is_what_it_is_based_on(link: Link) -> None:
    with pytest.raises(KeyError, match="of a class that is not known elsewhere") as caught:
        link.ask("own exception")
    assert type(caught.value) is KeyError
    assert link.ask("nothing") == "nothing"


def test_an_exit_there_is_none_here(link: Link) -> None:
    with pytest.raises(SystemExit):
        link.ask("exit in Python")
    assert link.ask("nothing") == "nothing"
