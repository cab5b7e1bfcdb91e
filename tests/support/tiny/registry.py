"""Every tiny model by architecture and by name. A new architecture is one file here and one line below."""

from __future__ import annotations

from support.tiny import deepseek2, falcon_h1, gemma2, gemma3, gpt_oss, lfm2, mamba, mamba2, rwkv7
from support.tiny.model import TinyFile

BY_ARCH: dict[str, dict[str, TinyFile]] = {
    "gemma2": dict(gemma2.MODELS),
    "gemma3": dict(gemma3.MODELS),
    "gpt-oss": dict(gpt_oss.MODELS),
    "mamba": dict(mamba.MODELS),
    "mamba2": dict(mamba2.MODELS),
    "rwkv7": dict(rwkv7.MODELS),
    "falcon-h1": dict(falcon_h1.MODELS),
    "lfm2": dict(lfm2.MODELS),
    "deepseek2": dict(deepseek2.MODELS),
}

BY_NAME: dict[str, TinyFile] = {name: model for models in BY_ARCH.values() for name, model in models.items()}
