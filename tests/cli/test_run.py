"""``pykv run``: the text on stdout, the figures on stderr, and an end that is never a traceback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.naive_llama import NaiveLlama
from support.tiny.vocab import SPECIALS, byte_letters, vocabulary
from support.tiny_gguf import TinyModel
from typer.testing import CliRunner

from pykv.cli.app import app
from pykv.runtime import Context, Model

MODEL = TinyModel(seed=1)
TOKENS = vocabulary(MODEL.n_vocab)[0]
PLAIN = ("--raw", "--temp", "0", "-p", "xyz")


@pytest.fixture(scope="module")
def path(write_tiny):
    return str(write_tiny(MODEL))


def run(path: str, *args: str, stdin: str | None = None):
    return CliRunner().invoke(app, ["run", "-m", path, "--threads", "1", *args], input=stdin, catch_exceptions=False)


def record(path: str, *args: str, stdin: str | None = None):
    result = run(path, "--json", *args, stdin=stdin)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def likeliest(prompt: list[int], n: int) -> list[int]:
    """Continue a prompt in plain numpy, up to a token that ends the text."""
    naive, said = NaiveLlama(MODEL, np.float16), []
    logits = naive.decode(prompt)[-1]
    while len(said) < n and TOKENS[token := int(logits.argmax())] not in SPECIALS:
        said.append(token)
        logits = naive.decode([token])[-1]
    return said


def spell(tokens: list[int]) -> str:
    letters = byte_letters()
    data = bytes(letters.index(letter) for token in tokens for letter in TOKENS[token])
    return data.decode("utf-8", "replace")


def test_text_at_temperature_0_is_what_numpy_says(path):
    said = likeliest([TOKENS.index(letter) for letter in "xyz"], 6)
    assert len(said) == 6
    answer = record(path, *PLAIN, "-n", "6")
    assert answer["text"] == spell(said)
    assert answer["stop"] == "limit"
    assert answer["prompt"]["n_tokens"] == 3
    assert answer["generation"]["n_tokens"] == 6


def test_memory_is_reported_in_bytes(path):
    kv = record(path, *PLAIN, "-n", "1", "--ctx", "300", "--type-k", "q8_0")["kv"]
    # 512 cells, 2 layers, 2 heads of 32: 34 bytes a block of K, 64 of V
    assert kv == {"nbytes": 512 * 2 * 2 * (34 + 64), "n_cells": 512, "type_k": "q8_0", "type_v": "f16"}


def test_text_and_figures_go_to_different_streams(path):
    text = record(path, *PLAIN, "-n", "4")["text"]
    result = run(path, *PLAIN, "-n", "4")
    assert result.stdout == text + "\n"
    for word in ("prompt", "3 tokens", "generation", "4 tokens", "tokens/s", "stopped: limit", "KV memory"):
        assert word in result.stderr
    assert "\x1b" not in result.output


def test_same_seed_same_text(path):
    sampled = ("--raw", "-p", "xyz", "-n", "8", "--temp", "30", "--top-k", "0", "--top-p", "1", "--min-p", "0")
    first = record(path, *sampled, "--seed", "7")["text"]
    assert record(path, *sampled, "--seed", "7")["text"] == first
    others = {record(path, *sampled, "--seed", str(seed))["text"] for seed in (8, 9, 10)}
    assert others != {first}


def test_chat_is_the_default_where_the_file_has_a_template(path):
    # the template adds two control tokens, the role, two line ends and the assistant's head
    chat = record(path, "-p", "xyz", "-n", "1")["prompt"]["n_tokens"]
    assert chat == record(path, "--chat", "-p", "xyz", "-n", "1")["prompt"]["n_tokens"]
    assert chat > record(path, "--raw", "-p", "xyz", "-n", "1")["prompt"]["n_tokens"] + 3
    assert record(path, "--system", "Be brief.", "-p", "xyz", "-n", "1")["prompt"]["n_tokens"] > chat


def test_prompt_from_stdin(path):
    assert record(path, "--raw", "-p", "-", "-n", "1", stdin="wxyz")["prompt"]["n_tokens"] == 4


def test_full_context_ends_the_text(path):
    answer = record(path, "--raw", "--temp", "0", "-p", 250 * "x", "-n", "100", "--ctx", "256")
    assert answer["stop"] == "context full"
    # 256 cells hold the prompt and six tokens; the seventh is the last answer
    assert answer["generation"]["n_tokens"] == 7


def test_prompt_of_several_batches(path):
    """A prompt longer than n_batch is decoded in pieces, with the same answer."""
    prompt = [TOKENS.index("x")] * 40 + [TOKENS.index("y")] * 3
    from pykv import Model
    from pykv.cli.generate import prefill

    with Model.load(path) as model, model.context(n_ctx=256, n_batch=16) as context:
        assert prefill(context, prompt).n_tokens == 43
        assert int(context.logits[-1].argmax()) == int(NaiveLlama(MODEL).decode(prompt)[-1].argmax())


def test_ctrl_c_in_a_long_prompt_was_0_tokens_in_0_us(path, monkeypatch):
    from pykv import Model
    from pykv.cli.generate import Pace, prefill

    decode, calls, pace = Context.decode, iter(range(1, 100)), Pace()

    def interrupted(self, batch):
        if next(calls) == 3:
            raise KeyboardInterrupt
        decode(self, batch)

    monkeypatch.setattr(Context, "decode", interrupted)
    with (
        Model.load(path) as model,
        model.context(n_ctx=256, n_batch=16, n_threads=1) as context,
        pytest.raises(KeyboardInterrupt),
    ):
        prefill(context, [TOKENS.index("x")] * 43, pace=pace)
    assert pace.n_tokens == 32
    assert pace.seconds > 0


def test_prompt_longer_than_the_context_says_which_option(path):
    result = run(path, "--raw", "-p", 256 * "x", "--ctx", "256")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "pykv: error: 256 more tokens after 0 stored ones; the context holds 256",
        "  next: take a larger --ctx, or a shorter prompt",
    ]


@pytest.mark.parametrize("at", [1, 3], ids=["in the prompt", "in the answer"])
def test_ctrl_c_ends_the_text_and_still_shows_the_figures(path, monkeypatch, at):
    decode, calls = Context.decode, iter(range(1, 100))

    def interrupted(self, batch):
        if next(calls) == at:
            raise KeyboardInterrupt
        decode(self, batch)

    monkeypatch.setattr(Context, "decode", interrupted)
    result = run(path, *PLAIN, "-n", "50")
    assert result.exit_code == 130
    assert "stopped: interrupted" in result.stderr
    assert "KV memory" in result.stderr
    assert "error" not in result.stderr


@pytest.mark.parametrize(
    ("args", "exit_code", "words"),
    [
        (("--type-k", "q9"), 2, "--type-k q9"),
        (("--type-v", "q8_0", "--flash-attn", "off"), 2, "--type-v q8_0 needs flash attention, but --flash-attn off"),
        (("-t", "5000"), 2, "--threads 5000"),
        (("--temp", "-1"), 2, "--temp"),
        (("-n", "0"), 2, "-n"),
        (("--flash-attn", "perhaps"), 2, "--flash-attn"),
        (("--device", "GPU77"), 2, "no device 'GPU77'"),
        (("--tensor-split", "1,x"), 2, "--tensor-split 1,x must be numbers"),
        (("--tensor-split", "1,1"), 2, "a number for each of 1 devices"),
        (("--override", "3"), 2, "--override 3 must be a layer or a pattern"),
        (("--override", "99=CPU"), 2, "--override: layer 99 must lie in 0.."),
        (("--override", "exps=CPU"), 2, "--override: no tensor's name matches 'exps'"),
        (("--override", "(=CPU"), 2, "--override: '(' is no regular expression"),
        (("--override", "0=GPU77"), 2, "--override: no device 'GPU77'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_option_is_exit_code_2_without_traceback(path, args, exit_code, words):
    result = run(path, *PLAIN, *args)
    assert result.exit_code == exit_code
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_placement_options_say_what_the_library_is_told(path, monkeypatch):
    told = []
    load = Model.load
    monkeypatch.setattr(Model, "load", lambda *args, **more: told.append(more) or load(args[0]))
    options = "--devices CPU,RPC0 -d RPC1 --gpu-layers 3 --tensor-split 3,1.5,0 --override 0-1=CPU --override"
    assert run(path, *PLAIN, *options.split(), "blk.=[01]=CPU", "--override", "2=CPU", "-n", "1").exit_code == 0
    assert told == [
        {
            "devices": ["CPU", "RPC0", "RPC1"],
            "n_gpu_layers": 3,
            "tensor_split": [3.0, 1.5, 0.0],
            "overrides": {range(2): "CPU", "blk.=[01]": "CPU", 2: "CPU"},
        }
    ]


def test_a_model_in_parts_says_the_same(path):
    placed = ("-d", "CPU,CPU", "--tensor-split", "1,2", "--override", "ffn_=CPU", "--no-kv-offload")
    plain, split = run(path, *PLAIN), run(path, *PLAIN, *placed)
    assert plain.exit_code == split.exit_code == 0
    assert split.stdout == plain.stdout != ""


def test_empty_prompt_is_an_error(path):
    result = run(path, "--raw", "-p", "")
    assert result.exit_code == 1
    assert result.stderr == "pykv: error: the prompt is empty\n"


def test_absent_model_lists_the_catalogue():
    result = run("nowhere.gguf", "-p", "x")
    assert result.exit_code == 1
    assert "'nowhere.gguf' does not exist" in result.stderr
    assert "smollm2-135m" in result.stderr


def test_a_device_file_does_exist():
    assert "'/dev/null' is no regular file" in run("/dev/null", "-p", "x").stderr


def test_a_system_message_without_a_template_was_dropped(path, tmp_path):
    result = run(path, "--raw", "-p", "x", "--system", "Be brief.")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--system: --raw takes the text as it is" in result.stderr
    plain = tmp_path / "plain.gguf"
    plain.write_bytes(Path(path).read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_templite"))
    result = run(str(plain), "-p", "x", "--system", "Be brief.")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--system: the file has no chat template" in result.stderr


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_attention_paths_agree(path, mode):
    assert record(path, *PLAIN, "-n", "4", "--flash-attn", mode)["text"] == record(path, *PLAIN, "-n", "4")["text"]


@pytest.mark.model
def test_real_ctrl_c_ends_a_long_answer_with_its_figures(smollm2_path):
    code = "from pykv.cli import main; main()"
    args = ["run", "-m", str(smollm2_path), "--raw", "-p", "One, two, three,", "-n", "4000", "--temp", "0"]
    child = subprocess.Popen(
        [sys.executable, "-c", code, *args], cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.read(8)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "stopped: interrupted" in err
    assert "Traceback" not in err
