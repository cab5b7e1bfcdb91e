"""State files as bytes: containers, sections, cells, and where rows lie. Numpy alone, no tensors.

Source: spec state_format.md.
"""

from __future__ import annotations

from pykv.state_format.dialect import NEWEST, Dialect
from pykv.state_format.encode import Heads, encode_cells, kv_section_head, kv_stream_heads, states_heads
from pykv.state_format.layout import KVLayout, RowsLayout, SectionLayout, StatesLayout
from pykv.state_format.records import (
    CellRecords,
    KVSection,
    RowsRecord,
    Section,
    Span,
    StatesSection,
    StreamRecords,
)

__all__ = [
    "NEWEST",
    "CellRecords",
    "Dialect",
    "Heads",
    "KVLayout",
    "KVSection",
    "RowsLayout",
    "RowsRecord",
    "Section",
    "SectionLayout",
    "Span",
    "StatesLayout",
    "StatesSection",
    "StreamRecords",
    "encode_cells",
    "kv_section_head",
    "kv_stream_heads",
    "states_heads",
]
