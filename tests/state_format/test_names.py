"""Names that users chose: files in one folder, on any system, or refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykv.errors import ParamError
from pykv.state_format import safe_name, side_car


@pytest.mark.parametrize("name", ["a", "a.bin", ".hidden", "größe 2", "x" * 255, "ü" * 127, "a.b.c", "-rf", "CON1"])
def test_names_that_can_only_be_files(name):
    assert safe_name(name) == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "0 bytes, expected 1 to 255"),
        ("x" * 256, "256 bytes"),
        ("ü" * 128, "256 bytes"),
        ("\ud800", "not valid UTF-8"),
        (".", "neither"),
        ("..", "neither"),
        ("a..b", "neither"),
        ("a/b", "must not contain '/'"),
        ("/etc/passwd", "must not contain '/'"),
        ("a\\b", "must not contain"),
        ("c:x", "must not contain ':'"),
        *[(f"a{c}b", "must not contain") for c in '*?"<>|\0\n\t\x1f\x7f\x85\x9f\uff0e\u2215\u2216\ufffd\ufeff'],
        (" a", "begin with a space"),
        ("a ", "end in a space"),
        ("a.", "end in a space or a dot"),
    ],
)
def test_names_that_could_be_something_else(name, message):
    with pytest.raises(ParamError, match=message):
        safe_name(name)


@given(st.text("ab./\\ ~:\0\x85é\u2215", max_size=6))
@settings(max_examples=200, deadline=None)
def test_a_safe_name_stays_in_its_folder(name):
    try:
        safe_name(name)
    except ParamError:
        return
    assert os.path.dirname(name) == ""
    assert os.path.normpath(os.path.join("/folder", name)) == f"/folder/{name}"


def test_the_name_of_a_side_car():
    assert side_car("a/chat.bin") == Path("a/chat.bin.pykv")
