"""Which class builds which architecture. A new family is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable

from pykv.errors import UnknownArchitectureError
from pykv.models.architecture import Architecture
from pykv.models.bloom import Bloom
from pykv.models.deepseek2 import DeepSeek2
from pykv.models.falcon_h1 import FalconH1
from pykv.models.gemma2 import Gemma2
from pykv.models.gemma3 import Gemma3
from pykv.models.gemma3n import Gemma3n
from pykv.models.gpt_oss import GptOss
from pykv.models.hparams import HParams, refuse_drafting_layers, refuse_experts
from pykv.models.jamba import Jamba
from pykv.models.keys import Keys
from pykv.models.lfm2 import Lfm2
from pykv.models.llama import Llama
from pykv.models.llama4 import Llama4
from pykv.models.mamba import Mamba
from pykv.models.mamba2 import Mamba2
from pykv.models.mpt import Mpt
from pykv.models.qwen2 import Qwen2
from pykv.models.qwen2vl import Qwen2VL
from pykv.models.qwen3 import Qwen3
from pykv.models.qwen3next import Qwen3Next
from pykv.models.rwkv7 import Rwkv7
from pykv.models.weights import Weights

Build = Callable[[HParams, Weights, Keys], Architecture]
"""Takes the weights of one model out of its file."""

ARCHITECTURES: dict[str, Build] = {
    "llama": Llama,
    "llama4": Llama4,
    "gpt-oss": GptOss,
    "deepseek2": DeepSeek2,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "gemma2": Gemma2,
    "gemma3": Gemma3,
    "gemma3n": Gemma3n,
    "qwen2vl": Qwen2VL,
    "mpt": Mpt,
    "bloom": Bloom,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "lfm2": Lfm2,
    "falcon-h1": FalconH1,
    "jamba": Jamba,
    "rwkv7": Rwkv7,
    "qwen3next": Qwen3Next,
}

MIXING_EXPERTS = frozenset({"llama4", "gpt-oss", "deepseek2", "jamba", "qwen3next"})
"""Those that read ``expert_count``; a file of another family that has experts would be computed without them."""


def build_architecture(hparams: HParams, weights: Weights, keys: Keys) -> Architecture:
    """Return the architecture of a file.

    Raises
    ------
    UnknownArchitectureError : lists those that there are.
    GGUFError : a key or a tensor is missing, of no use, or of a variant that is not supported; names it.
    """
    build = find_architecture(keys.architecture)
    if keys.architecture not in MIXING_EXPERTS:
        refuse_experts(keys)
    refuse_drafting_layers(keys)
    return build(hparams, weights, keys)


def find_architecture(name: str) -> Build:
    """Return the class of an architecture.

    Raises
    ------
    UnknownArchitectureError : lists those that there are.
    """
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnknownArchitectureError(f"general.architecture={name!r} is not supported; known: {known}")
    return ARCHITECTURES[name]
