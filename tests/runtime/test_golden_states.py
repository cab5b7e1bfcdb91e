"""State files that llama.cpp wrote of real models, and what follows them; it wrote down what it said itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pykv

pytestmark = pytest.mark.model

DATA = Path(__file__).parents[1] / "data" / "state"
MANIFEST: dict[str, dict[str, Any]] = json.loads((DATA / "manifest.json").read_text())
FILES = sorted(path.name for path in DATA.glob("*.gg*"))
TYPES = {1: "f16", 8: "q8_0"}

NOTED = 1e-4
"""What rounding to four digits leaves of a logit, in the manifest."""

TIE = 0.2
"""Most that llama.cpp's token may stay behind the largest logit, once in a file.

With a ggml that was built as llama.cpp's, none does. With another build one does, by 0.113: the 19th of Gemma 3, which
llama.cpp itself has before the next by 0.215, by 0.141 without repacked weights, and by 0.0006 without flash attention.
"""


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[pykv.Model]:
    with pykv.Model.load(smollm2_path) as model:
        yield model


@pytest.fixture(scope="module")
def gemma3(gemma3_path: Path) -> Iterator[pykv.Model]:
    with pykv.Model.load(gemma3_path) as model:
        yield model


@pytest.fixture(params=FILES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def said(name: str) -> dict[str, Any]:
    """What llama.cpp noted of the context that it saved."""
    return MANIFEST[Path(name).stem]


@pytest.fixture
def loaded(name: str, said: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[pykv.Context]:
    model = request.getfixturevalue(name.partition("_")[0])
    with context_like(model, said) as ctx:
        with pytest.warns(RuntimeWarning, match="nothing says which model"):
            tokens = ctx.load_session(DATA / name) if name.endswith("sn") else ctx.load_sequence(DATA / name, 0)
        assert tokens == said["tokens"]
        assert (ctx.memory.pos_min(0), ctx.memory.pos_max(0)) == (0, len(tokens) - 1)
        yield ctx


@contextmanager
def context_like(model: pykv.Model, said: dict[str, Any]) -> Iterator[pykv.Context]:
    """Open a context with the parameters of the one that was saved."""
    same = {key: said[key] for key in ("flash_attn", "kv_unified", "n_seq_max", "n_ctx", "n_ubatch", "swa_full")}
    with model.context(**same, type_k=TYPES[said["type_k"]], type_v=TYPES[said["type_v"]], n_threads=1) as ctx:
        yield ctx


def row_behind(ctx: pykv.Context, token: int, pos: int) -> Any:
    """Return the logits behind a token of sequence 0."""
    ctx.decode(pykv.Batch([token], pos=[pos], seq_id=[0]))
    return np.array(ctx.logits[-1])


def test_what_follows_a_file_is_what_llama_cpp_said(loaded: pykv.Context, said: dict[str, Any]) -> None:
    """Its own tokens lead; each but the first, which came of the prompt, is the largest logit, or ties with it."""
    tokens, start = said["greedy_continuation_seq0"], len(said["tokens"])
    behind = []
    for i, (token, expected) in enumerate(pairwise(tokens)):
        row = row_behind(loaded, token, start + i)
        behind.append(float(row.max() - row[expected]))
    assert max(behind) <= TIE
    assert sum(gap > 0 for gap in behind) <= 1


def test_the_last_token_again_has_the_logits_that_llama_cpp_noted(loaded: pykv.Context, said: dict[str, Any]) -> None:
    last = len(said["tokens"]) - 1
    assert loaded.memory.seq_rm(0, last, -1)
    row = row_behind(loaded, said["tokens"][-1], last)
    ids, logits = zip(*said["top5_logits_after_prompt"], strict=True)
    np.testing.assert_allclose(row[list(ids)], logits, rtol=0, atol=NOTED)
    assert int(row.argmax()) == ids[0] == said["greedy_continuation_seq0"][0]
