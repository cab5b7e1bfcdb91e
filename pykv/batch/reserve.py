"""A ubatch without content, by whose shape worst-case graphs are sized."""

from __future__ import annotations

import numpy as np

from pykv.batch.ubatch import UBatch
from pykv.errors import ParamError


def reserve_ubatch(n_seq_tokens: int, n_seqs: int, n_pos: int = 1) -> UBatch:
    """Return a ubatch of `n_seqs` sequences with `n_seq_tokens` tokens each, all zeros.

    note: its tokens belong to no sequence yet (`seq_ids` holds empty tuples); `seq_first` still names the
    sequence that each would have.

    Source: batch.md 3.
    """
    for name, value in (("n_seq_tokens", n_seq_tokens), ("n_seqs", n_seqs), ("n_pos", n_pos)):
        if value < 1:
            raise ParamError(f"{name} must be at least 1, got {value}")
    n = n_seq_tokens * n_seqs
    return UBatch(
        token=np.zeros(n, np.int32),
        embd=None,
        pos=np.zeros((n_pos, n), np.int32),
        seq_ids=((),) * n,
        seq_first=np.repeat(np.arange(n_seqs, dtype=np.int32), n_seq_tokens),
        seq_id_unq=tuple(range(n_seqs)),
        output=np.zeros(n, np.bool_),
        batch_idxs=np.arange(n, dtype=np.int32),
        n_seqs=n_seqs,
        equal_seqs=True,
    )
