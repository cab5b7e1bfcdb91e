"""Exceptions between processes: each of pykv's own arrives as what it was."""

from __future__ import annotations

import inspect

import pytest

from pykv import errors
from pykv.isolation.raised import again, told

SPECIAL: dict[str, Exception] = {
    "BatchError": errors.BatchError("a gap", seq_id=1, last=3, first=7),
    "ShiftUnsupported": errors.ShiftUnsupported("shared_cells", "a draft sees them"),
    "StateError": errors.StateError("damaged", offset=12),
    "BackendLost": errors.BackendLost("gone", devices=("RPC0",), last_words="no answer"),
}
"""Those whose attributes their messages do not hold."""

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, BaseException)]


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_ran_out_in_the_other_process_was_a_type_error_here(kind: type[Exception]) -> None:
    sent = SPECIAL.get(kind.__name__) or kind("no room for 7 bytes")
    came = again(*told(sent))
    assert type(came) is type(sent)
    assert (str(came), came.args, vars(came)) == (str(sent), sent.args, vars(sent))
