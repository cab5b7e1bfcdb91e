"""Half-open ranges of positions, as every sequence verb takes them.

Source: spec kv_cache.md section 6; llama.cpp writes the same two lines at the top of each verb.
"""

from __future__ import annotations

from pykv.cells.arguments import integer
from pykv.typing import POS_INF


def clip_range(p0: int, p1: int) -> tuple[int, int]:
    """Resolve the open ends of ``[p0, p1)``.

    A negative `p0` is the beginning, a negative `p1` the end. ``p0 >= p1`` afterwards means an empty range.

    Raises
    ------
    ParamError : one of them is no integer.
    """
    p0, p1 = integer("p0", p0), integer("p1", p1)
    return max(p0, 0), POS_INF if p1 < 0 else min(p1, POS_INF)
