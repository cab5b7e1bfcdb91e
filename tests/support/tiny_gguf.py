"""Tiny seeded random GGUF models: small enough for numpy, complete enough for llama.cpp.

The weights exist twice: as the file that a runtime loads and as the dictionary that `naive_llama` computes
with. Both come from the same seed, so a test needs no reader to know what is in the file.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

F32Array = NDArray[np.float32]

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Control tokens at the end of the vocabulary: end of text (also begin), and the two ends of a turn."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

NEOX_ARCHES = ("qwen2", "qwen3")
"""Families whose RoPE pairs lie half a head apart; llama pairs neighbours."""


@dataclass(frozen=True)
class RopeScaling:
    """How positions are stretched: `kind` is "linear" or "yarn", `factor` the stretch."""

    kind: str
    factor: float
    orig_ctx: int = 0
    attn_factor: float = 1.0


@dataclass(frozen=True)
class TinyModel:
    """Shape of one tiny model. `n_embd == n_head * head_dim` is needed for qwen2 only.

    rope_dim : rotated dims of a head, None = all. llama.cpp refuses a part of a head for these families;
        only the naive forward and pykv can be compared there.
    """

    arch: str = "llama"
    n_layer: int = 2
    n_embd: int = 128
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 32
    n_ff: int = 160
    n_vocab: int = 320
    n_ctx_train: int = 512
    is_tied: bool = True
    has_bias: bool = False
    rms_eps: float = 1e-5
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    has_rope_factors: bool = False
    rope_dim: int | None = None
    seed: int = 1

    @property
    def n_rot(self) -> int:
        """Rotated dims of a head."""
        return self.head_dim if self.rope_dim is None else self.rope_dim

    @property
    def is_neox(self) -> bool:
        """Whether RoPE pairs lie half a head apart."""
        return self.arch in NEOX_ARCHES

    def weights(self) -> dict[str, F32Array]:
        """Return every tensor by its GGUF name, in numpy shapes (rows are outputs)."""
        shapes = dict(_tensor_shapes(self))
        return {name: _values(self.seed, name, shape) for name, shape in shapes.items()}

    def write(self, path: Path) -> Path:
        """Write the model as GGUF version 3, weights in f32, and return `path`."""
        writer = gguf.GGUFWriter(str(path), self.arch)
        _write_hparams(writer, self)
        _write_vocabulary(writer, self)
        for name, array in self.weights().items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _tensor_shapes(model: TinyModel) -> list[tuple[str, tuple[int, ...]]]:
    d, q, kv = model.n_embd, model.n_head * model.head_dim, model.n_head_kv * model.head_dim
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (model.n_vocab, d)),
        ("output_norm.weight", (d,)),
    ]
    if not model.is_tied:
        shapes.append(("output.weight", (model.n_vocab, d)))
    if model.has_rope_factors:
        shapes.append(("rope_freqs.weight", (model.n_rot // 2,)))
    for il in range(model.n_layer):
        block: list[tuple[str, tuple[int, ...]]] = [
            ("attn_norm.weight", (d,)),
            ("attn_q.weight", (q, d)),
            ("attn_k.weight", (kv, d)),
            ("attn_v.weight", (kv, d)),
            ("attn_output.weight", (d, q)),
            ("ffn_norm.weight", (d,)),
            ("ffn_gate.weight", (model.n_ff, d)),
            ("ffn_up.weight", (model.n_ff, d)),
            ("ffn_down.weight", (d, model.n_ff)),
        ]
        if model.arch == "qwen3":
            block += [("attn_q_norm.weight", (model.head_dim,)), ("attn_k_norm.weight", (model.head_dim,))]
        if model.has_bias:
            block += [("attn_q.bias", (q,)), ("attn_k.bias", (kv,)), ("attn_v.bias", (kv,))]
        if model.has_bias and model.arch == "llama":
            block += [("attn_output.bias", (d,)), ("ffn_gate.bias", (model.n_ff,))]
            block += [("ffn_up.bias", (model.n_ff,)), ("ffn_down.bias", (d,))]
        shapes += [(f"blk.{il}.{name}", shape) for name, shape in block]
    return shapes


def _values(seed: int, name: str, shape: tuple[int, ...]) -> F32Array:
    """Draw one tensor; it depends on seed, name and shape only, so options do not disturb one another."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
    noise = np.random.default_rng(key).standard_normal(shape)
    if name == "rope_freqs.weight":
        values = 1.0 + 7.0 * np.linspace(0.0, 1.0, shape[0]) ** 2
    elif "norm" in name:
        values = 1.0 + 0.1 * noise
    elif name.endswith(".bias"):
        values = 0.2 * noise
    elif name.endswith(("attn_q.weight", "attn_k.weight")):
        values = 2.0 * noise / np.sqrt(shape[1])  # sharp attention, so a wrong mask or position shows
    elif name == "token_embd.weight":
        values = 0.5 * noise
    else:
        values = noise / np.sqrt(shape[1])
    return values.astype(np.float32)


def _write_hparams(writer: gguf.GGUFWriter, model: TinyModel) -> None:
    writer.add_name(f"tiny-{model.arch}-{model.seed}")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(model.n_ctx_train)
    writer.add_embedding_length(model.n_embd)
    writer.add_block_count(model.n_layer)
    writer.add_feed_forward_length(model.n_ff)
    writer.add_head_count(model.n_head)
    writer.add_head_count_kv(model.n_head_kv)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_layer_norm_rms_eps(model.rms_eps)
    writer.add_vocab_size(model.n_vocab)
    writer.add_rope_dimension_count(model.n_rot)
    writer.add_rope_freq_base(model.rope_base)
    if (scaling := model.rope_scaling) is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling.kind))
        writer.add_rope_scaling_factor(scaling.factor)
        if scaling.orig_ctx:
            writer.add_rope_scaling_orig_ctx_len(scaling.orig_ctx)
        if scaling.attn_factor != 1.0:
            writer.add_rope_scaling_attn_factors(scaling.attn_factor)


def byte_letters() -> list[str]:
    """Return the printable letter that GPT-2's vocabulary uses for each of the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (chr(0x100 + i) for i in range(256 - len(printable)))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


def vocabulary(n_vocab: int) -> tuple[list[str], list[str]]:
    """Return (tokens, merges): 256 bytes, as many two-letter tokens as fit, then `SPECIALS`."""
    n_merges = n_vocab - 256 - len(SPECIALS)
    pairs = list(islice(product("Ġetaoinshrdlu", "etaoinshrdlucmfwyp"), n_merges))
    if n_merges < 0 or len(pairs) < n_merges:
        raise ValueError(f"n_vocab={n_vocab} does not fit: 259 to {259 + 13 * 18} tokens")
    tokens = [*byte_letters(), *("".join(pair) for pair in pairs), *SPECIALS]
    return tokens, [" ".join(pair) for pair in pairs]


def _write_vocabulary(writer: gguf.GGUFWriter, model: TinyModel) -> None:
    tokens, merges = vocabulary(model.n_vocab)
    n_plain = model.n_vocab - len(SPECIALS)
    kinds = [gguf.TokenType.NORMAL] * n_plain + [gguf.TokenType.CONTROL] * len(SPECIALS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if model.is_neox else "smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(n_plain)
    writer.add_eos_token_id(n_plain + 2)
    writer.add_pad_token_id(n_plain)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)


YARN = RopeScaling("yarn", 4.0, orig_ctx=128)

TINY_MODELS: dict[str, TinyModel] = {
    "llama": TinyModel(seed=1),
    "llama-untied-bias": TinyModel(seed=2, is_tied=False, has_bias=True, rope_base=500000.0),
    "llama-wide-heads": TinyModel(seed=3, n_embd=96, n_head=6, n_head_kv=3, head_dim=64, n_layer=3),
    "llama-mha": TinyModel(seed=4, n_head_kv=4),
    "llama-linear": TinyModel(seed=5, rope_scaling=RopeScaling("linear", 2.0)),
    "llama-yarn": TinyModel(seed=6, rope_scaling=YARN),
    "llama-yarn-attn": TinyModel(seed=7, rope_scaling=RopeScaling("yarn", 8.0, orig_ctx=64, attn_factor=1.25)),
    "llama-factors": TinyModel(seed=8, has_rope_factors=True, rope_base=500000.0),
    "qwen2": TinyModel("qwen2", seed=9, has_bias=True, rope_base=1e6),
    "qwen2-yarn": TinyModel("qwen2", seed=10, has_bias=True, is_tied=False, rope_scaling=YARN),
    "qwen3": TinyModel("qwen3", seed=11, n_embd=96, head_dim=64, rope_base=1e6, rms_eps=1e-6),
}
"""Every option at least once; llama.cpp loads each of them."""

NARROW = TinyModel(n_embd=64, n_head=2, n_head_kv=1, n_ff=96, n_vocab=272)
WIDE = replace(NARROW, n_embd=128, head_dim=64)

SHIFT_MODELS: dict[str, TinyModel] = {
    "norm": replace(NARROW, seed=40),
    "norm-base": replace(NARROW, seed=41, n_layer=3, rope_base=500000.0),
    "norm-linear": replace(NARROW, seed=42, rope_scaling=RopeScaling("linear", 4.0)),
    "norm-factors": replace(NARROW, seed=43, has_rope_factors=True, rope_base=500000.0),
    "norm-yarn": replace(NARROW, seed=44, rope_scaling=YARN),
    "norm-yarn-unit": replace(NARROW, seed=50, rope_scaling=replace(YARN, attn_factor=1 / (1 + 0.1 * math.log(4.0)))),
    "neox": replace(NARROW, arch="qwen2", seed=45, has_bias=True, rope_base=1e6, n_layer=3),
    "neox-linear": replace(NARROW, arch="qwen2", seed=46, rope_scaling=RopeScaling("linear", 2.0)),
    "wide": replace(WIDE, seed=47),
    "wide-factors": replace(WIDE, seed=48, n_layer=3, has_rope_factors=True),
    "wide-neox": replace(WIDE, arch="qwen3", seed=49, rope_base=1e6, rms_eps=1e-6),
}
"""Every way of rotating keys, as small as can be: thousands of programs run on them.

Heads of 64 are those whose quantised keys get Hadamard rotation; "unit" is YaRN that leaves the length of keys alone.
"""
