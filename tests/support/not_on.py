"""What the devices in use cannot do, by the library's own table of limits: tests that ask for it are left out, counted.

A test that runs into a limit which `pykv.ggml.limits` declares for one of the devices does not fail: it is "not on
device", and the summary tells the limits and how often each was met. Nothing else is excused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from support import on_device

from pykv.errors import UnsupportedOpError
from pykv.ggml.limits import Limit, limits_of

_NOT_ON = "not on device"


def limits() -> tuple[Limit, ...]:
    """Return the limits of the devices in use."""
    return tuple(limit for backend in {one.backend for one in on_device.chosen()} for limit in limits_of(backend))


def bound(exact: float, rounded: float) -> float:
    """Return the bound of a difference: the second one where f32 matrices with strides are rounded to f16."""
    return rounded if any(one.name == "products" for one in limits()) else exact


class NotOn:
    """Takes tests that met a limit out of the failures, and tells them at the end."""

    def __init__(self) -> None:
        self._met: Counter[Limit] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if call.excinfo is not None and isinstance(call.excinfo.value, UnsupportedOpError):
            met = [one for one in limits() if one.name == call.excinfo.value.limit]
            if met:
                self._met[met[0]] += 1
                report.outcome, report.longrepr, report.met = "passed", None, met[0]
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        return (_NOT_ON, "n", _NOT_ON.upper()) if hasattr(report, "met") else None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for limit, n in self._met.items():
            terminalreporter.write_line(f"{n} {_NOT_ON}: {limit.backend} has no {limit.what}")
