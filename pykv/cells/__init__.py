"""Bookkeeping of KV cells in numpy: which token sits where, who owns it, who may look at it.

Never touches a tensor and needs no extension. `CellStreams` is the way in.
"""

from pykv.cells.cells_view import CellsView
from pykv.cells.index import element_indices, row_indices
from pykv.cells.kv_cells import CellSnapshot, KVCells
from pykv.cells.lookups import encoder_position_buckets, position_buckets, previous_tokens, relative_bucket
from pykv.cells.mask import MaskRule, NonCausal, fill_mask, visible
from pykv.cells.ranges import clip_range
from pykv.cells.recurrent_cells import RecurrentCells
from pykv.cells.recurrent_slot import RecurrentSlot
from pykv.cells.recurrent_view import RecurrentView
from pykv.cells.resume import common_runs, last_kept, loose_resume_points, missing_before, resume_points
from pykv.cells.row_copy import RowCopy
from pykv.cells.slot import SlotInfo, find_slot
from pykv.cells.stream_table import Undo
from pykv.cells.streams import CellStreams
from pykv.cells.window import NO_WINDOW, SwaType, Window

__all__ = [
    "NO_WINDOW",
    "CellSnapshot",
    "CellStreams",
    "CellsView",
    "KVCells",
    "MaskRule",
    "NonCausal",
    "RecurrentCells",
    "RecurrentSlot",
    "RecurrentView",
    "RowCopy",
    "SlotInfo",
    "SwaType",
    "Undo",
    "Window",
    "clip_range",
    "common_runs",
    "element_indices",
    "encoder_position_buckets",
    "fill_mask",
    "find_slot",
    "last_kept",
    "loose_resume_points",
    "missing_before",
    "position_buckets",
    "previous_tokens",
    "relative_bucket",
    "resume_points",
    "row_indices",
    "visible",
]
