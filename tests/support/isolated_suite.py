"""A plugin under which every model that a test loads lives in a process of its own, unless the test says otherwise.

A test that reaches into that process is counted as skipped, with what it reached for as the reason. A few change from
here what runs there, or watch it while it runs: those are listed.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

PATCHED = "replaces a function that runs in the process of the model"
WATCHED = "reads while another thread decodes, where reads wait"
INNER = "looks, in a thread or with `is`, at objects that the process of the model keeps"
GONE = "uses a context whose model is closed, which is gone with its process"

APART: dict[str, str] = {
    "test_a_close_that_the_memory_refused_left_its_buffers_for_ever": INNER,
    "test_a_context_outlives_its_closed_model": GONE,
    "test_a_context_that_failed_to_open_leaves_nothing": PATCHED,
    "test_a_decode_that_is_cancelled_while_observed": PATCHED,
    "test_a_model_that_no_device_can_compute_is_refused_at_once": PATCHED,
    "test_a_save_that_fails_leaves_what_was_there": PATCHED,
    "test_a_ubatch_that_fails_is_not_seen": PATCHED,
    "test_an_observation_held_as_many_cells_as_the_context_has": INNER,
    "test_another_thread_may_follow": INNER,
    "test_cancel_at_any_moment": WATCHED,
    "test_compute_buffers_larger_than_the_host_are_refused": PATCHED,
    "test_compute_memory_serves_prompts_on_both_sides_of_a_depth": PATCHED,
    "test_keys_on_another_device_take_ggmls_path": PATCHED,
    "test_layers_with_a_window_take_another_path_than_was_told": PATCHED,
    "test_the_path_of_the_present_depth_is_told": PATCHED,
}
"""Test function → why it says nothing about an isolated model."""


class IsolatedSuite:
    """Isolates models, and counts tests to which that does not apply as skipped."""

    def pytest_sessionstart(self) -> None:
        """Let `Model.load` isolate by itself."""
        from pykv.runtime import Model

        Model.load.__func__.__kwdefaults__["isolate"] = True  # type: ignore[attr-defined]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what is listed."""
        for item in items:
            reason = APART.get(item.name.partition("[")[0])
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Tell why a test that has failed does not apply, if it does not."""
        report = yield
        error = None if call.excinfo is None else call.excinfo.value
        if isinstance(error, AttributeError) and type(error.obj).__name__.startswith("Isolated"):
            reason = f"Skipped: reaches for {type(error.obj).__name__}.{error.name}"
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, reason)
        return report
