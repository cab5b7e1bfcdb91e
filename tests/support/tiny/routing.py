"""Expert routing that rounding cannot change.

Which experts a token meets is a comparison of router logits; with random routers some comparisons are so close that
two correct programs choose differently, and everything after differs. Here the first `n_expert` elements of the
residual stream tell the token's class and nothing else: the embedding puts +1 there for the experts of the class and
-1 for the others, what is added later barely touches these elements, and the router reads them. So the chosen
experts and the others are apart by about as much as the logits are large, in every layer.
"""

from __future__ import annotations

import numpy as np
from support.tiny.values import F32Array

WRITES = ("attn_output", "ffn_down", "ffn_down_exps", "ffn_down_shexp", "ssm_out", "shortconv.out_proj")
"""Tensors that write into the residual stream, by the end of their names before .weight or .bias."""

QUIET, GAIN = 0.05, 2.0


def route_by_token(weights: dict[str, F32Array], n_expert: int, n_used: int) -> None:
    """Change the values in place: tokens of class t % n_expert meet experts t, t + 1, ... of one order per layer."""
    embedding = weights["token_embd.weight"]
    expert, first = np.arange(n_expert), np.arange(len(embedding))[:, None] % n_expert
    embedding[:, :n_expert] = np.where((expert - first) % n_expert < n_used, 1.0, -1.0)
    for name, values in weights.items():
        stem, _, kind = name.rpartition(".")
        if stem.endswith(WRITES):
            # rows of a matrix are outputs; those of a bias are its last dim
            rows = values[..., :n_expert, :] if kind == "weight" else values[..., :n_expert]
            rows *= QUIET
        elif stem.endswith("ffn_gate_inp") and kind == "weight":
            il = int(name.split(".")[1])
            np.multiply(values, QUIET, out=values)
            values[expert, (expert + il) % n_expert] = GAIN
