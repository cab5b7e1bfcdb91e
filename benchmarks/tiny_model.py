"""Write a model so small that its memory is all bookkeeping. Needs the gguf package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

WIDTH, N_VOCAB = 32, 64 * 1024


def write_tiny_model(path: Path, n_ctx: int) -> Path:
    """Write one layer of one 32-wide head, without a vocabulary, that takes `n_ctx` tokens; weights are zero."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_vocab_size(N_VOCAB)
    writer.add_tokenizer_model("no_vocab")
    vectors = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
    squares = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (N_VOCAB, WIDTH)}
    shapes |= dict.fromkeys(vectors, (WIDTH,)) | {f"blk.0.{name}": (WIDTH, WIDTH) for name in squares}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
