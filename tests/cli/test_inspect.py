"""``pykv inspect`` tells what is in the file and what its memory costs."""

from __future__ import annotations

import json

import pytest
from support.tiny.registry import BY_NAME
from support.tiny_gguf import TinyModel
from typer.testing import CliRunner

from pykv.cli.app import app

MODEL = TinyModel(n_layer=3, n_head=4, n_head_kv=2, head_dim=32, n_ctx_train=4096)

# bytes of 32 elements in ggml's formats
BLOCK_NBYTES = {"f32": 128, "f16": 64, "q8_0": 34, "q4_0": 18}


@pytest.fixture(scope="module")
def path(write_tiny):
    return str(write_tiny(MODEL))


def inspect(*args: str):
    return CliRunner().invoke(app, ["inspect", *args], catch_exceptions=False)


def test_shape_as_json(path):
    record = json.loads(inspect(path, "--json").stdout)
    expected = {
        "architecture": "llama",
        "runs_here": True,
        "n_layer": 3,
        "n_embd": 128,
        "n_head": 4,
        "n_head_kv": 2,
        "n_embd_head_k": 32,
        "n_embd_head_v": 32,
        "n_ctx_train": 4096,
        "n_vocab": 320,
        "has_chat_template": True,
        "tensor_types": {"f32": 2 + 3 * 9},
    }
    assert expected.items() <= record.items()
    assert record["n_params"] == sum(array.size for array in MODEL.weights().values())


def test_memory_is_costed_for_the_usual_contexts_up_to_the_trained_one(path):
    costs = json.loads(inspect(path, "--json").stdout)["kv_nbytes"]
    assert list(costs) == ["2048", "4096"]
    for n_ctx, row in costs.items():
        # 3 layers, K and V, 2 heads of 32 elements
        assert row == {kind: 3 * 2 * 2 * nbytes * int(n_ctx) for kind, nbytes in BLOCK_NBYTES.items()}


@pytest.mark.parametrize(("n_ctx", "n_cells"), [("1", 256), ("256", 256), ("257", 512)])
def test_context_is_costed_as_it_is_rounded(path, n_ctx, n_cells):
    costs = json.loads(inspect(path, "--json", "-c", n_ctx).stdout)["kv_nbytes"]
    assert costs[n_ctx]["f16"] == 3 * 2 * 2 * 64 * n_cells


def test_block_types_that_do_not_divide_a_head_are_left_out(write_tiny):
    path = write_tiny(TinyModel(n_embd=64, n_head=4, head_dim=16, n_head_kv=1))
    row = json.loads(inspect(str(path), "--json", "-c", "256").stdout)["kv_nbytes"]["256"]
    assert row == {"f32": 2 * 2 * 64 * 256, "f16": 2 * 2 * 32 * 256, "q8_0": None, "q4_0": None}
    assert inspect(str(path), "-c", "256").exit_code == 0


def test_table_reads_without_colour(path):
    result = inspect(path, "-c", "2048")
    assert result.exit_code == 0
    for text in ("llama", "3 of width 128", "4 query heads, 2 KV heads", "1.5 MiB", "816.0 KiB"):
        assert text in result.stdout
    assert "\x1b" not in result.stdout


def test_metadata_lists_every_key_and_shortens_arrays(path):
    keys = json.loads(inspect(path, "--json", "--metadata").stdout)["metadata"]
    assert keys["llama.block_count"] == 3
    assert keys["tokenizer.ggml.tokens"] == "array of 320"
    assert "llama.block_count" in inspect(path, "--metadata").stdout


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all"], ids=["empty", "cut", "other"])
def test_file_that_is_no_gguf_is_one_line(tmp_path, content):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    result = inspect(str(path))
    assert result.exit_code == 1
    assert result.stderr.startswith("pykv: error: ")
    assert "next: check that the file is a whole GGUF file" in result.stderr


def test_layers_with_a_window_cost_what_the_window_needs(write_tiny):
    model = BY_NAME["gemma3-4l-w16-every2"]
    row = json.loads(inspect(str(write_tiny(model)), "--json", "-c", "2048").stdout)["kv_nbytes"]["2048"]
    per_cell = 2 * 2 * model.n_head_kv * model.head_dim  # K and V, f16
    # a window of 16 and 512 tokens at once come to 768 cells in every other layer
    assert row["f16"] == per_cell * (2 * 768 + 2 * 2048)


def test_states_cost_the_same_at_every_context(write_tiny):
    costs = json.loads(inspect(str(write_tiny(BY_NAME["mamba-4l"])), "--json", "-c", "256", "-c", "4096").stdout)
    rows = list(costs["kv_nbytes"].values())
    assert rows[0] == rows[1]
    assert len(set(rows[0].values())) == 1


KINDS = {
    "n_full": 0,
    "n_window": 0,
    "window": 0,
    "window_kind": None,
    "n_state": 0,
    "state_nbytes": 0,
    "n_reuse": 0,
    "n_k_only": 0,
}
F32 = 4


@pytest.mark.parametrize(
    ("model", "kinds", "line"),
    [
        (MODEL, {"n_full": 3}, "layers that attend: 3 to everything"),
        (
            BY_NAME["gemma3-7l-w32"],
            {"n_full": 1, "n_window": 6, "window": 32, "window_kind": "standard"},
            "layers that attend: 1 to everything, 6 to the last 32 tokens",
        ),
        (
            BY_NAME["gemma3n-22l-w32"],  # of every five, the last sees everything; 20 keep K and V of their own
            {"n_full": 4, "n_window": 18, "window": 32, "window_kind": "standard", "n_reuse": 2},
            "layers that attend: 4 to everything, 18 to the last 32 tokens; 2 of them with the K and V of another one",
        ),
        (
            BY_NAME["llama4-4l"],
            {"n_full": 1, "n_window": 3, "window": 8192, "window_kind": "chunked"},
            "layers that attend: 1 to everything, 3 to chunks of 8192 tokens",
        ),
        (
            BY_NAME["deepseek2-3l"],
            {"n_full": 3, "n_k_only": 3},
            "layers that attend: 3 to everything; V is a part of K",
        ),
        (
            BY_NAME["lfm2-4l"],  # the last inputs of a convolution over 3
            {"n_full": 1, "n_state": 3, "state_nbytes": 3 * 2 * 64 * F32},
            "layers that attend: 1 to everything; layers with a state: 3, 1.5 KiB a sequence",
        ),
        (
            BY_NAME["rwkv7-3l"],  # two token shifts, and a square for each head
            {"n_state": 3, "state_nbytes": 3 * (2 * 128 + 128 * 64) * F32},
            "layers with a state: 3, 99.0 KiB a sequence",
        ),
    ],
    ids=lambda value: getattr(value, "arch", ""),
)
def test_what_the_layers_remember_is_told_by_kind(write_tiny, model, kinds, line):
    path = str(write_tiny(model))
    assert json.loads(inspect(path, "--json", "-c", "256").stdout)["memory"] == KINDS | kinds
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["inspect", path]).stdout
    assert [row.split(None, 1)[1].rstrip() for row in shown.splitlines() if row.startswith("memory  ")] == [line]


def test_a_family_that_does_not_run_has_no_kinds(write_tiny, tmp_path):
    path = tmp_path / "other.gguf"
    path.write_bytes(write_tiny(MODEL).read_bytes().replace(b"llama", b"lambs"))
    result = inspect(str(path), "--json")
    assert (result.exit_code, json.loads(result.stdout)["memory"]) == (0, None)
    assert "\nmemory  " not in inspect(str(path)).stdout
