"""Every tiny model by architecture and by name. A new architecture is one file here and one line below."""

from __future__ import annotations

from support.tiny import (
    bloom,
    deepseek2,
    falcon_h1,
    gemma2,
    gemma3,
    gemma3n,
    gpt_oss,
    jamba,
    lfm2,
    llama4,
    mamba,
    mamba2,
    mpt,
    qwen2vl,
    qwen3next,
    rwkv7,
)
from support.tiny.model import TinyFile

BY_ARCH: dict[str, dict[str, TinyFile]] = {
    "gemma2": dict(gemma2.MODELS),
    "gemma3": dict(gemma3.MODELS),
    "gemma3n": dict(gemma3n.MODELS),
    "gpt-oss": dict(gpt_oss.MODELS),
    "llama4": dict(llama4.MODELS),
    "mamba": dict(mamba.MODELS),
    "mamba2": dict(mamba2.MODELS),
    "rwkv7": dict(rwkv7.MODELS),
    "falcon-h1": dict(falcon_h1.MODELS),
    "jamba": dict(jamba.MODELS),
    "lfm2": dict(lfm2.MODELS),
    "qwen3next": dict(qwen3next.MODELS),
    "deepseek2": dict(deepseek2.MODELS),
    "mpt": dict(mpt.MODELS),
    "bloom": dict(bloom.MODELS),
    "qwen2vl": dict(qwen2vl.MODELS),
}

BY_NAME: dict[str, TinyFile] = {name: model for models in BY_ARCH.values() for name, model in models.items()}
