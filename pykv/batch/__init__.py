"""From the caller's tokens to the ubatches that are computed: build, validate, split.

Pure numpy; knows a memory only as the source of stored positions.
"""

from pykv.batch.batch import Batch
from pykv.batch.builder import BatchBuilder
from pykv.batch.limits import BatchLimits
from pykv.batch.reserve import reserve_ubatch
from pykv.batch.split import Splitter, whole
from pykv.batch.ubatch import UBatch
from pykv.batch.valid import ValidBatch
from pykv.batch.validate import validate

__all__ = [
    "Batch",
    "BatchBuilder",
    "BatchLimits",
    "Splitter",
    "UBatch",
    "ValidBatch",
    "reserve_ubatch",
    "validate",
    "whole",
]
