"""State files as bytes: containers, sections, cells, and where rows lie. Numpy alone, no tensors.

Source: spec state_format.md.
"""

from __future__ import annotations

from pykv.state_format.checksum import Checksum, checksum
from pykv.state_format.containers import (
    Container,
    Kind,
    context_head,
    read_container,
    sequence_bytes_head,
    sequence_head,
    session_head,
)
from pykv.state_format.dialect import NEWEST, Dialect
from pykv.state_format.durable import Sink, new_content, new_contents, write_durably
from pykv.state_format.element import ELEMENTS, Element, type_name
from pykv.state_format.encode import Heads, encode_cells, kv_section_head, kv_stream_heads, states_heads
from pykv.state_format.layout import KVLayout, RowsLayout, SectionLayout, StatesLayout
from pykv.state_format.names import plain_path, safe_name, session_of, side_car
from pykv.state_format.parse import hold, parse_state
from pykv.state_format.records import (
    CellRecords,
    KVSection,
    RowsRecord,
    Section,
    Span,
    StatesSection,
    StreamRecords,
)
from pykv.state_format.source import mapped
from pykv.state_format.trailer import (
    Notes,
    SectionSum,
    Trailer,
    read_side_car,
    read_trailer,
    trailer_pieces,
    verify_sections,
)
from pykv.state_format.unknown import Found, parse_unknown

__all__ = [
    "ELEMENTS",
    "NEWEST",
    "CellRecords",
    "Checksum",
    "Container",
    "Dialect",
    "Element",
    "Found",
    "Heads",
    "KVLayout",
    "KVSection",
    "Kind",
    "Notes",
    "RowsLayout",
    "RowsRecord",
    "Section",
    "SectionLayout",
    "SectionSum",
    "Sink",
    "Span",
    "StatesLayout",
    "StatesSection",
    "StreamRecords",
    "Trailer",
    "checksum",
    "context_head",
    "encode_cells",
    "hold",
    "kv_section_head",
    "kv_stream_heads",
    "mapped",
    "new_content",
    "new_contents",
    "parse_state",
    "parse_unknown",
    "plain_path",
    "read_container",
    "read_side_car",
    "read_trailer",
    "safe_name",
    "sequence_bytes_head",
    "sequence_head",
    "session_head",
    "session_of",
    "side_car",
    "states_heads",
    "trailer_pieces",
    "type_name",
    "verify_sections",
    "write_durably",
]
