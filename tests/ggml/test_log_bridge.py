"""ggml's log lines in Python's logging."""

from __future__ import annotations

import logging
import threading

import pytest
from support.child import run_cleanly, run_python

from pykv._native import lib
from pykv.errors import AllocError
from pykv.ggml import Arena, Buffer, DType, cpu_device
from pykv.ggml.log_bridge import _THREAD, _LineJoiner, caught_errors

DEBUG, INFO, WARN, ERROR, CONT = (
    getattr(lib, f"GGML_LOG_LEVEL_{name}") for name in ("DEBUG", "INFO", "WARN", "ERROR", "CONT")
)


def joined(*fragments: tuple[int, str]) -> list[tuple[int, str]]:
    lines: list[tuple[int, str]] = []
    joiner = _LineJoiner(lambda level, line: lines.append((level, line)))
    for level, text in fragments:
        joiner.push(level, text)
    return lines


def too_much() -> None:
    arena = Arena(1)
    arena.tensor(DType.F32, (2**55,))
    with pytest.raises(AllocError):
        Buffer.allocate(arena, cpu_device().buffer_type, "test")


def test_an_error_of_ggml_is_a_record(caplog):
    with caplog.at_level(logging.DEBUG, logger="pykv"):
        too_much()
    errors = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert errors
    assert all(r.name == "pykv.ggml" for r in errors)
    assert any("failed to allocate" in r.getMessage() and str(2**57) in r.getMessage() for r in errors)
    assert all("\n" not in r.getMessage() for r in errors)


def test_levels():
    logged = joined((DEBUG, "a\n"), (INFO, "b\n"), (WARN, "c\n"), (ERROR, "d\n"), (999, "e\n"))
    assert logged == [
        (logging.DEBUG, "a"),
        (logging.DEBUG, "b"),
        (logging.WARNING, "c"),
        (logging.ERROR, "d"),
        (logging.DEBUG, "e"),
    ]


def test_fragments_become_lines():
    assert joined((WARN, "one "), (CONT, "two"), (CONT, " three\nfo"), (CONT, "ur\n\n")) == [
        (logging.WARNING, "one two three"),
        (logging.WARNING, "four"),
    ]
    assert joined((INFO, "no end")) == []
    assert joined((INFO, "one "), (INFO, "line\n")) == [(logging.DEBUG, "one line")]


def test_a_line_that_never_ends_is_not_glued_to_an_error():
    assert joined((INFO, "progress ..."), (ERROR, "failed\n")) == [
        (logging.DEBUG, "progress ..."),
        (logging.ERROR, "failed"),
    ]


def test_per_cent_signs_are_text(caplog):
    with caplog.at_level(logging.DEBUG, logger="pykv"):
        _THREAD.joiner.push(ERROR, "100 %s done\n")
    assert caplog.messages == ["100 %s done"]


def test_caught_errors_are_not_logged(caplog):
    with caplog.at_level(logging.DEBUG, logger="pykv"):
        with caught_errors() as lines:
            too_much()
        assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []
        too_much()
    assert any("failed to allocate" in line for line in lines)
    assert any(r.levelno == logging.ERROR for r in caplog.records)


def test_another_threads_errors_are_not_caught(caplog):
    with caplog.at_level(logging.ERROR, logger="pykv"), caught_errors() as lines:
        thread = threading.Thread(target=too_much)
        thread.start()
        thread.join()
    assert lines == []
    assert any("failed to allocate" in message for message in caplog.messages)


def test_nothing_is_written_where_logging_is_not_configured():
    done = run_python("""
        from pykv.errors import AllocError
        from pykv.ggml import Arena, Buffer, DType, cpu_device
        arena = Arena(1)
        arena.tensor(DType.F32, (2**55,))
        try:
            Buffer.allocate(arena, cpu_device().buffer_type, "test")
        except AllocError:
            print("refused")
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused\n", "")


def test_lines_that_come_while_the_interpreter_goes_down():
    run_cleanly("""
        import atexit, logging
        logging.basicConfig(level=logging.DEBUG)

        def late():
            arena = Arena(1)
            arena.tensor(DType.F32, (2**55,))
            try:
                Buffer.allocate(arena, cpu_device().buffer_type, "test")
            except Exception as error:
                print(type(error).__name__)

        atexit.register(late)  # runs after the bridge is gone: handlers run last in, first out
        from pykv.ggml import Arena, Buffer, DType, cpu_device

        class Late:
            def __del__(self):
                late()

        kept = Late()
        kept.itself = kept
    """)
