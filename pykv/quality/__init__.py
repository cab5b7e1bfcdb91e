"""What a context shift or the reuse of a chunk costs in quality, and what computing some of it again brings back.

Tokens that are moved have attended to tokens that are gone. Nothing but computing them again removes that; how much it
matters is measured here, on a model and a text of one's own.
"""

from pykv.quality.cut import Cut, chunk_cut, shift_cut
from pykv.quality.distance import Agreement
from pykv.quality.measure import QualityReport, Run, measure

__all__ = ["Agreement", "Cut", "QualityReport", "Run", "chunk_cut", "measure", "shift_cut"]
