"""The caller's batch: tokens or embeddings, their positions, their sequences, and which of them are outputs.

Checks form only (types, shapes, lengths); whether the content fits a context is `validate`'s question.
Follows llama.cpp's ``llama_batch``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import FrozenInstanceError
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike

from pykv.batch.arrays import float32_array, frozen, int32_array, integer
from pykv.errors import BatchError
from pykv.typing import BoolArray, F32Array, I32Array

IdSets = tuple[tuple[int, ...], ...]
"""Per token, the ids of its sequences in the order in which they were listed."""

_set = object.__setattr__

_ID_SET_KINDS = {tuple, list, set, frozenset}


class Batch:
    """Tokens or embeddings to be computed together, in the order in which they are listed.

    Copies everything it is given and never changes. An empty batch can be made, but is refused by `validate` at decode.

    Parameters
    ----------
    tokens : (n,) token ids, or None with `embd`.
    pos : None to continue each sequence after its last stored position; or one position a token, (n,).
        For embeddings without tokens, every section of every position: (n_pos, n), or flat with
        ``pos[j * n + i]`` section j of entry i.
    seq_id : one sequence for all; or one a token, (n,); or a list with the ids of each token, such as
        ``[(0, 1), 0]``, where a token with several ids couples these sequences.
    logits : which tokens are outputs: "last", "all", "none", or a boolean mask (n,).
    embd : (n, width) rows in place of the tokens, or beside them.

    Attributes
    ----------
    token, embd, output : as above, read-only; None where there is none.
    pos : (n_pos, n), or None.
    seq_id : an int, an array (n,), or a tuple of tuples in listed order, each without duplicates.

    Raises
    ------
    BatchError
        Wrong shapes or lengths, numbers that are no int32, embeddings that are not finite.
    AttributeError
        An attribute is assigned or deleted.
    """

    __slots__ = ("embd", "output", "pos", "seq_id", "token")

    token: I32Array | None
    embd: F32Array | None
    pos: I32Array | None
    seq_id: int | I32Array | IdSets
    output: BoolArray

    def __init__(
        self,
        tokens: ArrayLike | None,
        pos: ArrayLike | None = None,
        seq_id: int | ArrayLike | Sequence[Iterable[int] | int] = 0,
        logits: str | ArrayLike = "last",
        *,
        embd: ArrayLike | None = None,
    ) -> None:
        token = None if tokens is None else _tokens(tokens)
        rows = None if embd is None else _rows(embd)
        n = _agreed_length(token, rows)
        _set(self, "token", token)
        _set(self, "embd", rows)
        _set(self, "pos", None if pos is None else _positions(pos, n, token is None))
        _set(self, "seq_id", seq_id if type(seq_id) is int else _sequences(seq_id, n))
        _set(self, "output", _outputs(logits, n))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(f"batch.{name} cannot be set to {value!r}: a batch never changes, make another one")

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenInstanceError(f"batch.{name} cannot be deleted: a batch never changes")

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        """Fill a copy, which Python makes empty."""
        for name, value in state[1].items():
            _set(self, name, frozen(value) if isinstance(value, np.ndarray) else value)

    def __len__(self) -> int:
        return len(self.output)

    def __repr__(self) -> str:
        kinds = [name for name in ("token", "embd") if getattr(self, name) is not None]
        return f"Batch({len(self)} x {'+'.join(kinds)}, {np.count_nonzero(self.output)} outputs)"


def _tokens(tokens: ArrayLike) -> I32Array:
    if isinstance(tokens, (str, bytes)):
        raise BatchError(
            f"tokens must be integers, got the text {tokens!r}: encode it first, with model.tokenizer.encode(text)"
        )
    token = int32_array("tokens", tokens)
    if token.ndim != 1:
        raise BatchError(f"tokens must have shape (n,), got {token.shape}")
    return token


def _rows(embd: ArrayLike) -> F32Array:
    rows = float32_array("embd", embd)
    if rows.ndim != 2 and rows.size == 0:
        rows = frozen(rows.reshape(0, 0))
    if rows.ndim != 2:
        raise BatchError(f"embd must have shape (n, width), got {rows.shape}")
    return rows


def _agreed_length(token: I32Array | None, embd: F32Array | None) -> int:
    if token is None:
        if embd is None:
            raise BatchError("a batch needs tokens or embd, got neither")
        return len(embd)
    if embd is not None and len(embd) != len(token):
        raise BatchError(f"embd has {len(embd)} rows for {len(token)} tokens")
    return len(token)


def _positions(pos: ArrayLike, n: int, pure_embd: bool) -> I32Array:
    given = int32_array("pos", pos)
    if given.shape in ((n,), (1, n)):
        return given.reshape(1, n)
    if not pure_embd:
        raise BatchError(f"pos must have shape ({n},), one position a token, got {given.shape}")
    if given.ndim == 1 and n and given.size and given.size % n == 0:
        return given.reshape(-1, n)  # flat, section-major
    if given.ndim != 2 or given.shape[0] == 0 or given.shape[1] != n:
        raise BatchError(f"pos must have shape (n_pos, {n}) or be flat and section-major, got {given.shape}")
    return given


def _sequences(seq_id: object, n: int) -> int | I32Array | IdSets:
    if isinstance(seq_id, (list, tuple)):
        if not _ID_SET_KINDS.isdisjoint(map(type, seq_id)):
            return _coupled(seq_id, n)
    elif not isinstance(seq_id, np.ndarray) or seq_id.ndim == 0:
        if isinstance(seq_id, (int, np.generic, np.ndarray)) or not isinstance(seq_id, Iterable):
            return integer("seq_id", seq_id)
        if isinstance(seq_id, (set, frozenset)):
            raise BatchError("seq_id is one set; to put every token into several sequences, list it once a token")
    ids = int32_array("seq_id", seq_id)  # type: ignore[arg-type]
    if ids.shape != (n,):
        hint = "; for one token in several sequences, write [(0, 1)]" if n == 1 else ""
        raise BatchError(f"seq_id must be an int or hold one id a token, ({n},), got shape {ids.shape}{hint}")
    return ids


def _coupled(entries: Sequence[object], n: int) -> I32Array | IdSets:
    if len(entries) != n:
        raise BatchError(f"seq_id lists the sequences of {len(entries)} tokens, but the batch has {n}")
    ids = tuple(map(_listed_ids, entries))
    if all(len(entry) == 1 for entry in ids):
        return int32_array("seq_id", [entry[0] for entry in ids])
    return ids


def _listed_ids(entry: object) -> tuple[int, ...]:
    if isinstance(entry, (set, frozenset)):
        entry = sorted(integer("seq_id", seq) for seq in entry)
    if isinstance(entry, (list, tuple)):
        return tuple(dict.fromkeys(integer("seq_id", seq) for seq in entry))
    return (integer("seq_id", entry),)


def _outputs(logits: str | ArrayLike, n: int) -> BoolArray:
    if isinstance(logits, str):
        if logits not in ("last", "all", "none"):
            raise BatchError(f"logits must be 'last', 'all', 'none' or a boolean mask, got {logits!r}")
        output = np.zeros(n, np.bool_)
        if logits != "none":
            output[-1 if logits == "last" else 0 :] = True
        return frozen(output)
    try:
        mask = np.array(logits)
    except ValueError as error:
        raise BatchError(f"logits must be a boolean mask of shape ({n},): {error}") from None
    if mask.shape != (n,) or (n and mask.dtype != np.bool_):
        raise BatchError(f"logits must be a boolean mask of shape ({n},), got {mask.dtype} of shape {mask.shape}")
    return frozen(mask.astype(np.bool_, copy=False))
