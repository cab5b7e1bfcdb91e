"""What a memory expects of a state: how many streams, which types and row sizes. A file is held against it.

Source: spec state_format.md sections 3, 4.2 and 6.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowsLayout:
    """The rows of one tensor.

    Attributes
    ----------
    dtype : ggml's number of the element type.
    row_bytes : bytes of one cell's row.
    elem_bytes : bytes of one element where rows can lie by channel, else 0.
    """

    dtype: int
    row_bytes: int
    elem_bytes: int = 0


@dataclass(frozen=True)
class KVLayout:
    """What one KV cache holds.

    Attributes
    ----------
    n_cells : of each stream.
    k, v : per tensor in the order in which they were made; fewer in `v` where V is a view of K.
    v_trans : whether V lies by channel.
    rot : widths by which K and V are rotated before they are stored, 0 = not.
    has_ext : whether x, y and the token of each cell are stored.
    """

    n_stream: int
    n_cells: int
    n_seq_max: int
    k: tuple[RowsLayout, ...]
    v: tuple[RowsLayout, ...]
    v_trans: bool
    rot: tuple[int, int] = (0, 0)
    has_ext: bool = False


@dataclass(frozen=True)
class StatesLayout:
    """What one recurrent memory holds: `n_layer` of the whole model, `r` and `s` per layer that has them."""

    n_cells: int
    n_seq_max: int
    n_layer: int
    r: tuple[RowsLayout, ...]
    s: tuple[RowsLayout, ...]


SectionLayout = KVLayout | StatesLayout
