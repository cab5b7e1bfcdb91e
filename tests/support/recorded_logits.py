"""What real llama.cpp computed for the tiny files of every family, recorded: right values for where it is missing.

Each file, written with f32 matrices, decodes the same `scenario`; six rows of its logits are kept as float16, whose
rounding is an NMSE of 1e-7. The checksum of the file stands beside them. It is the same on every machine: values are
drawn element by element in float64, without any sum, and rounded to float32 last, which swallows what two maths
libraries differ by.

After a change of a family's tiny files, or a new one, record all of it again, with a Python that has llama.cpp::

    PYKV_ORACLE_PYTHON=/path/to/python PYTHONPATH=tests python -m support.recorded_logits
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from support.oracle import F32Array, Oracle, OracleBatch
from support.tiny.model import TinyFile
from support.tiny.registry import BY_NAME
from support.tiny_gguf import TINY_MODELS

PATH = Path(__file__).parents[1] / "data" / "family_logits.npz"


def _with_f32_matrices() -> dict[str, TinyFile]:
    """Return all tiny files; those that are the same but for the type of their matrices once, by the first name."""
    names: dict[TinyFile, str] = {}
    for name, model in (TINY_MODELS | BY_NAME).items():
        names.setdefault(replace(model, matrices="f32"), name)
    return {name: model for model, name in names.items()}


MODELS = _with_f32_matrices()

N_RS_SEQ = {"lfm2": 4}
"""Families whose states llama.cpp can take back, and how many tokens are asked for here.

Of those that pykv builds it is LFM2 alone: `llm_arch_supports_rs_rollback` lists it, and for all others llama.cpp takes
`n_rs_seq` as 0, so that a cut says no. What pykv makes of a cut there, `tests/models/test_rollback.py` compares with
a history without the tokens.
"""

START = {"llama4": 8000}
"""Where a text begins, if not at 0: here the next chunk of 8192 positions begins within the prompt."""

N_CUT = 3
TOKENS = [int(t) for t in np.random.default_rng(17).integers(0, 256, 400)]

Decode = Callable[[OracleBatch], F32Array]
Edit = Callable[..., Any]


@dataclass(frozen=True)
class Outcome:
    """What a model gave: rows, float, (6, n_vocab); whether the end of a sequence could be cut off."""

    rows: np.ndarray[Any, Any]
    is_cut: bool


@dataclass(frozen=True)
class Recording:
    """What llama.cpp gave for one file, and the sha256 of that file's bytes."""

    outcome: Outcome
    sha256: str


def settings(tiny: TinyFile) -> dict[str, Any]:
    """Return the parameters of a context, in pykv and in llama.cpp."""
    exact = {"type_k": "f32", "type_v": "f32", "flash_attn": False, "n_threads": 1}
    sizes = {"n_ctx": 768, "n_ubatch": 64, "n_seq_max": 3, "kv_unified": True}
    return exact | sizes | {"n_rs_seq": N_RS_SEQ.get(tiny.arch, 0)}


def scenario(tiny: TinyFile, decode: Decode, edit: Edit) -> Outcome:
    """Decode a prompt, two sequences in a batch, a copy beside its source, and what comes after a cut.

    The prompt takes five ubatches; it is longer than every window, and than the 256 cells of a window's cache.

    Parameters
    ----------
    decode : returns the wanted rows of a batch.
    edit : applies a verb to the memory, by its name, and returns what it said.
    """
    at = START.get(tiny.arch, 0)
    rows = [decode(_batch((0, at, TOKENS[:290])))]
    rows.append(decode(_batch((1, 0, TOKENS[300:340]), (0, at + 290, TOKENS[290:300]))))
    edit("seq_rm", 1, -1, -1)  # makes room in the cache of a window: shared cells that it has left are not reused
    edit("seq_cp", 0, 2, -1, -1)
    rows.append(decode(_batch((2, at + 300, TOKENS[340:345]), (0, at + 300, TOKENS[350:355]))))
    is_cut = bool(edit("seq_rm", 0, at + 305 - N_CUT, -1))
    rows.append(decode(_batch((0, at + 305 - N_CUT * is_cut, TOKENS[360:362]))))
    return Outcome(np.concatenate(rows), is_cut)


def _batch(*runs: tuple[int, int, Sequence[int]]) -> OracleBatch:
    """Return a batch of runs: (sequence, first position, tokens); the last row of each is wanted."""
    parts = [OracleBatch.of(tokens, start, seq_id) for seq_id, start, tokens in runs]
    columns = ([getattr(part, name) for part in parts] for name in ("tokens", "pos", "seq_ids", "logits"))
    return OracleBatch(*(list(chain.from_iterable(column)) for column in columns))


def on_llama_cpp(oracle: Oracle, tiny: TinyFile, path: Path) -> Outcome:
    """Return what llama.cpp gives for a tiny file at `path`."""
    with oracle.context(path, **settings(tiny)) as context:
        outcome = scenario(tiny, lambda batch: context.decode(batch)[0], context.memory)
    oracle.call("unload", str(path))
    return outcome


def sha256_of(path: Path) -> str:
    """Return the checksum of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load() -> dict[str, Recording]:
    """Return all recordings by the names of their tiny files."""
    with np.load(PATH) as data:
        kept = zip(data["names"].tolist(), data["is_cut"].tolist(), data["sha256"].tolist(), strict=True)
        return {name: Recording(Outcome(data[f"rows/{name}"], is_cut), sha256) for name, is_cut, sha256 in kept}


def save(recordings: dict[str, Recording]) -> None:
    """Write all recordings; equal ones make equal files."""
    np.savez_compressed(
        PATH,
        names=np.array(list(recordings)),
        sha256=np.array([one.sha256 for one in recordings.values()]),
        is_cut=np.array([one.outcome.is_cut for one in recordings.values()]),
        **{f"rows/{name}": one.outcome.rows.astype(np.float16) for name, one in recordings.items()},
    )


def main() -> None:
    """Record every tiny file."""
    recordings = {}
    with TemporaryDirectory() as folder, Oracle.from_environment() as oracle:
        for name, tiny in MODELS.items():
            path = tiny.write(Path(folder) / f"{name}.gguf")
            recordings[name] = Recording(on_llama_cpp(oracle, tiny, path), sha256_of(path))
    save(recordings)
    print(f"{len(recordings)} tiny files, {PATH.stat().st_size} bytes in {PATH}")


if __name__ == "__main__":
    main()
