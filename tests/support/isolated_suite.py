"""A plugin under which every model that a test loads lives in a process of its own, unless the test says otherwise.

A test that reaches into that process is counted as skipped, with what it reached for as the reason. A few change from
here what runs there, or watch it while it runs: those are listed.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

PATCHED = "replaces a function that runs in the process of the model"
WATCHED = "reads while another thread decodes, where reads wait"
GONE = "uses a context whose model is closed, which is gone with its process"

APART: dict[str, str] = {
    "test_a_context_outlives_its_closed_model": GONE,
    "test_cancel_at_any_moment": WATCHED,
}
"""Test function → why it says nothing about an isolated model."""


class IsolatedSuite:
    """Isolates models, and counts tests to which that does not apply as skipped."""

    def pytest_sessionstart(self) -> None:
        """Let `Model.load` isolate by itself."""
        from pykv.runtime import Model

        Model.load.__func__.__kwdefaults__["isolate"] = True  # type: ignore[attr-defined]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Tell why a test that has failed does not apply, if it does not."""
        report = yield
        reason = _reason(item, call)
        if reason is not None:
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {reason}")
        return report


def _reason(item: pytest.Item, call: pytest.CallInfo[None]) -> str | None:
    if call.excinfo is None:
        return None
    error = call.excinfo.value
    if isinstance(error, AttributeError) and type(error.obj).__name__.startswith("Isolated"):
        return f"reaches for {type(error.obj).__name__}.{error.name}"
    return APART.get(item.name.partition("[")[0])
