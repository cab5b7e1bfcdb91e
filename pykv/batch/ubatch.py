"""The piece of a batch that is computed at once.

A plain record: made by the splits, read by slot search, masks and graph inputs, changed by nobody.
Follows llama.cpp's ``llama_ubatch``.
"""

from __future__ import annotations

from dataclasses import dataclass

from pykv.typing import BoolArray, F32Array, I32Array


@dataclass(frozen=True, eq=False)
class UBatch:
    """At most `n_ubatch` tokens, in the order in which they are computed.

    Attributes
    ----------
    token : (n_tokens,) ids, or None for a batch of embeddings.
    embd : (n_tokens, width) rows, or None.
    pos : (n_pos, n_tokens); row 0 is the sequential position.
    seq_ids : per token, its sequence ids in ascending order, at least one.
    seq_first : (n_tokens,) the first id of each token, through which it sees the cells.
    seq_id_unq : the distinct sequence ids, ascending.
    output : (n_tokens,) whether logits are wanted.
    batch_idxs : (n_tokens,) index of each token in the caller's batch.
    n_seqs : number of sequence *sets*; ``n_tokens == n_seq_tokens * n_seqs``.
    equal_seqs : made by the equal or the per-sequence split.
    """

    token: I32Array | None
    embd: F32Array | None
    pos: I32Array
    seq_ids: tuple[tuple[int, ...], ...]
    seq_first: I32Array
    seq_id_unq: tuple[int, ...]
    output: BoolArray
    batch_idxs: I32Array
    n_seqs: int
    equal_seqs: bool

    @property
    def n_tokens(self) -> int:
        return len(self.seq_ids)

    @property
    def n_seq_tokens(self) -> int:
        return len(self.seq_ids) // self.n_seqs

    @property
    def n_seqs_unq(self) -> int:
        return len(self.seq_id_unq)

    @property
    def n_pos(self) -> int:
        return len(self.pos)

    @property
    def is_pos_2d(self) -> bool:
        """Whether positions carry a row and a column beside the time (M-RoPE)."""
        return len(self.pos) >= 3
