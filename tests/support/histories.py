"""Random histories of three sequences in a memory of any kind."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from support.kv_scene import plan_batch, run

from pykv.errors import BatchError, NoSlotError, ShiftUnsupported

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["decode", "cp", "rm", "cut", "add", "keep"]),
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(1, 7),
    ),
    min_size=1,
    max_size=12,
)
"""Each what is done, two sequences, and how much."""


def live(memory: Any, steps: list[tuple[str, int, int, int]]) -> None:
    """Let a memory do what it can of a history."""
    for what, s, d, n in steps:
        try:
            if what == "decode":
                plan = plan_batch(memory, run(s, range(memory.pos_max(s) + 1, memory.pos_max(s) + 1 + n)), 8)
                for i in range(0 if plan is None else len(plan.ubatches)):
                    plan.apply(i)
            elif what == "cp":
                memory.seq_cp(s, d)
            elif what == "rm":
                memory.seq_rm(s)
            elif what == "cut":
                memory.seq_rm(s, max(1, memory.pos_max(s) + 1 - n))
            elif what == "add":
                memory.seq_add(s, 0, -1, n - 3)
            else:
                memory.seq_keep(s)
        except (BatchError, NoSlotError, ShiftUnsupported):
            continue
