"""A plugin of pytest: ``pytest --pykv-devices CPU,Vulkan0`` runs each test that asks for `pykv_device` on each of them.

Loaded by pytest wherever pykv is installed, so that it imports nothing before a test asks for it.
"""

from __future__ import annotations

import pytest

_FIXTURE = "pykv_device"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("pykv").addoption(
        "--pykv-devices",
        metavar="NAME,NAME",
        default="CPU",
        help="devices that tests with the fixture pykv_device run on, as `pykv devices` names them (default: CPU)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for a device once on each; one that is not there is an error, never a test left out."""
    if _FIXTURE not in metafunc.fixturenames:
        return
    names = [name.strip() for name in str(metafunc.config.getoption("--pykv-devices")).split(",") if name.strip()]
    if not names:
        raise pytest.UsageError("--pykv-devices must name at least one device")
    metafunc.parametrize(_FIXTURE, _known(names), ids=names)


def _known(names: list[str]) -> list[str]:
    from pykv.errors import ParamError
    from pykv.ggml import find_device, is_remote

    for name in names:
        if not is_remote(name):  # a server is asked by the test that uses it
            try:
                find_device(name, "--pykv-devices")
            except ParamError as error:
                raise pytest.UsageError(str(error)) from error
    return names
