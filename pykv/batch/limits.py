"""What one context accepts in a batch; fixed when the context is made, changed by nobody."""

from __future__ import annotations

from dataclasses import dataclass

from pykv.errors import ParamError
from pykv.typing import MAX_SEQ, POS_INF, as_int

_RANGES = {
    "n_tokens_max": (1, POS_INF),
    "n_vocab": (0, POS_INF),
    "n_seq_max": (1, MAX_SEQ),
    "n_pos_per_embd": (1, 4),
    "n_embd_inp": (0, POS_INF),
    "n_embd_inp_enc": (0, POS_INF),
    "pos_end": (1, POS_INF),
}


@dataclass(frozen=True)
class BatchLimits:
    """The sizes against which a batch is checked.

    Attributes
    ----------
    n_tokens_max : most tokens of one batch (the context's `n_batch`).
    n_vocab : token ids lie in ``[0, n_vocab)``.
    n_seq_max : sequence ids lie in ``[0, n_seq_max)``, for a unified cache too.
    n_pos_per_embd : positions of one embedding: 4 for M-RoPE and IM-RoPE, else 1.
    n_embd_inp : width of the rows that the decoder takes, 0 = it takes none.
    n_embd_inp_enc : width of the rows that the encoder takes, 0 = it takes none.
    pos_end : positions lie below it: what the model has learned, where it learns them one by one.

    Raises
    ------
    ParamError : names the number and the limits.
    """

    n_tokens_max: int
    n_vocab: int
    n_seq_max: int
    n_pos_per_embd: int = 1
    n_embd_inp: int = 0
    n_embd_inp_enc: int = 0
    pos_end: int = POS_INF

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = as_int(getattr(self, name))
            if value is None or not least <= value <= most:
                raise ParamError(f"{name}={getattr(self, name)!r} must be a whole number in {least}..{most}")
            object.__setattr__(self, name, value)

    def takes_width(self, width: int) -> bool:
        """Return whether an embedding row of `width` numbers fits the decoder or the encoder."""
        return width > 0 and width in (self.n_embd_inp, self.n_embd_inp_enc)

    def widths(self) -> str:
        """Return the accepted row widths in words, for messages."""
        accepted = sorted({self.n_embd_inp, self.n_embd_inp_enc} - {0})
        return " or ".join(map(str, accepted)) if accepted else "none: this model takes no embeddings"
