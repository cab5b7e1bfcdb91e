"""The command line as a whole: help, version, exit codes, one-line errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import pykv
from pykv import cli, errors, memory
from pykv.cli import devices, failure
from pykv.cli.app import app

COMMANDS = ("pull", "devices", "inspect", "plan", "parity", "run", "demo", "replay", "rpc-server", "state", "quality")


def pykv_(*args: str):
    return CliRunner().invoke(app, list(args), catch_exceptions=False)


def in_child(code: str, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, away from the source folder."""
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(
        command, env=os.environ | environ, cwd="/", capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example(name):
    result = pykv_(name, "--help")
    assert result.exit_code == 0
    assert f"Example: pykv {name}" in re.sub(r"\s+", " ", result.output)


def test_help_lists_every_command_and_where_to_start():
    result = pykv_("--help")
    assert result.exit_code == 0
    for name in COMMANDS:
        assert re.search(rf"\b{name}\b", result.output)
    assert "pykv demo" in result.output


def test_version():
    result = pykv_("--version")
    assert (result.exit_code, result.output) == (0, f"pykv {pykv.__version__}\n")


def test_unknown_option_is_a_usage_error():
    assert pykv_("devices", "--nonsense").exit_code == 2


def test_help_loads_neither_numpy_nor_the_extension():
    code = "import sys, pykv.cli.app; print({'numpy', 'pykv._native', 'pykv.ggml'} & set(sys.modules))"
    assert in_child(code).stdout == "set()\n"


def test_missing_extra_is_named_in_one_line_without_traceback(tmp_path):
    shutil.copytree(Path(pykv.__file__).parent, tmp_path / "pykv", ignore=shutil.ignore_patterns("*.so", "*.pyd"))
    # -S leaves site-packages out, so that only pykv and the standard library are there
    result = in_child("from pykv.cli import main; main()", "-S", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert 'pip install "pykv-ggml[cli]"' in result.stderr
    assert "Traceback" not in result.stderr


def test_main_turns_the_fault_handler_on(monkeypatch):
    code = "import faulthandler, sys; from pykv.cli import main; sys.argv = ['pykv', '--version']\n"
    code += "try: main()\nfinally: print(faulthandler.is_enabled())"
    assert in_child(code).stdout.split() == ["pykv", pykv.__version__, "True"]


def test_main_reports_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "rich" else name)
    monkeypatch.setattr(cli.faulthandler, "enable", lambda: None)
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert capsys.readouterr().err.splitlines() == [
        "pykv: error: the command line needs rich",
        '  next: pip install "pykv-ggml[cli]"',
    ]


@pytest.mark.parametrize(
    ("error", "exit_code", "hint"),
    [
        (errors.GGUFError("x.gguf: not a GGUF file"), 1, "pykv pull"),
        (errors.AllocError("KV buffer of 3 GiB"), 1, "--type-k q8_0"),
        (errors.BackendLost("the process has ended"), 1, "with --device CPU"),
        (errors.ContextLengthExceeded("9 tokens"), 1, "--ctx"),
        (errors.ChatTemplateError("no [template]"), 1, "--raw"),
        (errors.ParamError("type_k=q9"), 2, None),
        (ImportError("no compiled extension"), 1, "pip install"),
        (KeyboardInterrupt(), 130, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_is_one_line_and_a_hint(monkeypatch, error, exit_code, hint):
    def fail():
        raise error

    monkeypatch.setattr("pykv.ggml.devices", fail)
    result = pykv_("devices")
    lines = result.stderr.splitlines()
    assert result.exit_code == exit_code
    assert lines[0] == f"pykv: error: {str(error) or 'stopped'}"
    assert ["next: " in line and hint in line for line in lines[1:]] == ([True] if hint else [])
    assert result.stdout == ""


def test_traceback_only_on_request(monkeypatch):
    def fail():
        raise errors.ComputeError("the device is gone")

    monkeypatch.setattr("pykv.ggml.devices", fail)
    monkeypatch.setenv(failure.DEBUG_VARIABLE, "1")
    assert "Traceback" in pykv_("devices").stderr


@pytest.mark.parametrize("args", ["devices", "devices --json", "pull", "--version", "run --help"])
def test_a_full_disk_behind_stdout_was_a_traceback(args):
    command = [sys.executable, "-c", "from pykv.cli import main; main()", *args.split()]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd="/", stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert done.stderr == "pykv: error: input or output failed: No space left on device\n"
    assert done.returncode == 1


RUN = get_command(app).commands["run"].params


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.ParamError("flash_attn=False means attention='matmul', not 'flash'"),
         "--flash-attn off means --attention matmul, not 'flash'"),
        (errors.ParamError("n_threads=5000 must be at most 512"), "--threads 5000 must be at most 512"),
        (errors.ParamError("n_ctx=-1 is negative; n_seq_max=2 is not"), "--ctx -1 is negative; n_seq_max=2 is not"),
        (errors.ParamError("devices: no device 'X'"), "--device: no device 'X'"),
        (errors.ParamError("repetition_penalty is 0, must be above 0"), "--repeat-penalty 0, must be above 0"),
        (errors.ParamError("n_threads=None is no number"), "no --threads is no number"),
        (errors.AllocError("KV cache needs 3221225472 bytes, 4096 bytes free"),
         "KV cache needs 3221225472 bytes (3.0 GiB), 4096 bytes free"),
        (errors.BatchError("n_ctx=5 is full"), "n_ctx=5 is full"),
    ],
    ids=str,
)  # fmt: skip
def test_errors_named_parameters_that_only_python_has(error, said):
    assert failure.spelt(error, RUN) == said


def test_an_error_that_no_option_of_the_command_caused():
    error = errors.ParamError("n_ctx=5 is too few")
    assert failure.spelt(error, get_command(app).commands["devices"].params) == str(error)


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("'x' does not exist; pass a .gguf file or one of: y", "check the path"),
        ("'x' is a folder; pass a .gguf file or one of: y", "check the path"),
        ("x.gguf: cannot be opened: Permission denied", "check the path and who may read it"),
        ("y has not been downloaded yet; run: pykv pull y", None),
        ("x.gguf: cut off", "check that the file is a whole GGUF file"),
    ],
)
def test_hints_for_files_misled(message, hint):
    given = failure.hint_for(errors.GGUFError(message))
    assert given is None if hint is None else given.startswith(hint)


def test_devices_lists_the_cpu():
    result = pykv_("devices")
    assert result.exit_code == 0
    assert "CPU" in result.output
    assert "wraps host memory" in result.output
    line = next(line for line in result.output.splitlines() if "iq4_nl" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")] == ["iq4_nl", *["all heads"] * 4]


def test_devices_names_the_heads_that_one_takes(monkeypatch):
    def of_some(device):
        return [replace(one, flash=one.head_k < 80, matmul=False, shift=one.head_k > 500) for one in real(device)]

    real = memory.device_support
    monkeypatch.setattr(memory, "device_support", of_some)
    line = next(line for line in pykv_("devices").output.splitlines() if "f16" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        "f16", "32, 40, 64, 72", "no", "all heads", "512, 576/512",
    ]  # fmt: skip


def test_devices_as_json_has_an_object_a_line():
    records = [json.loads(line) for line in pykv_("devices", "--json").stdout.splitlines()]
    cpu = next(record for record in records if record["kind"] == "cpu")
    about = {"name", "kind", "description", "memory_free", "memory_total", "buffer_type"}
    assert set(cpu) == about | {"features", "kv_support"}
    assert 0 < cpu["memory_free"] <= cpu["memory_total"]
    assert cpu["buffer_type"] == "CPU"
    assert cpu["features"]["wraps_host_memory"] is True
    assert cpu["features"]["build"]
    wide = {"dtype": "iq4_nl", "head_k": 576, "head_v": 512}
    assert wide | dict.fromkeys(("flash", "matmul", "set_rows", "shift"), True) in cpu["kv_support"]
    assert devices.EXAMPLE == "pykv devices --json"
