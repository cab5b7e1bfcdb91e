"""Parity: whether devices compute the same. The same tokens, verbs and shifts on each, compared layer by layer."""

from pykv.parity.compare import compare
from pykv.parity.report import Distance, Flip, ParityReport, Place, SideReport

__all__ = ["Distance", "Flip", "ParityReport", "Place", "SideReport", "compare"]
