"""State files as bytes: containers, sections, cells, and where rows lie. Numpy alone, no tensors.

Source: spec state_format.md.
"""

from __future__ import annotations

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
    "CellRecords",
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
]
