"""Windows: the rule of kv_cache.md section 2, and the run of positions that stands for it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.naive_cells import masked_swa

from pykv.cells import NO_WINDOW, SwaType, Window, clip_range
from pykv.errors import ParamError

POS = np.arange(40)


@given(kind=st.sampled_from(list(SwaType)), n=st.integers(1, 12))
def test_a_window_hides_what_its_definition_says(kind: SwaType, n: int) -> None:
    hidden = Window(n, kind).masked(POS[None, :], POS[:, None])
    assert hidden.tolist() == [[masked_swa(n, kind.name, p0, p1) for p0 in range(40)] for p1 in range(40)]


@given(kind=st.sampled_from(list(SwaType)), n=st.integers(1, 12))
def test_what_a_window_shows_is_one_run_of_positions(kind: SwaType, n: int) -> None:
    for p1 in range(40):
        lo, hi = Window(n, kind).span(p1)
        assert [lo <= p0 <= hi for p0 in range(40)] == [not masked_swa(n, kind.name, p0, p1) for p0 in range(40)]


@given(kind=st.sampled_from(list(SwaType)), n=st.integers(1, 12))
def test_from_where_on_a_position_is_hidden(kind: SwaType, n: int) -> None:
    for p0 in range(20):
        behind = range(p0 + 1, 40)
        assert [p1 >= Window(n, kind).hides_from(p0) for p1 in behind] == [
            masked_swa(n, kind.name, p0, p1) for p1 in behind
        ]


@pytest.mark.parametrize(
    ("window", "kind"),
    [
        (NO_WINDOW, "full"),
        (Window(4), "full"),
        (Window(4, SwaType.STANDARD), "standard"),
        (Window(4, SwaType.CHUNKED), "chunked"),
        (Window(4, SwaType.SYMMETRIC), "symmetric"),
    ],
)
def test_what_a_layer_with_a_window_is_called(window: Window, kind: str) -> None:
    assert window.kind == kind


@pytest.mark.parametrize("kind", [SwaType.STANDARD, SwaType.CHUNKED, SwaType.SYMMETRIC])
def test_a_window_of_nothing_is_refused(kind: SwaType) -> None:
    with pytest.raises(ParamError, match="n_swa = 0"):
        Window(0, kind)


def test_no_window_hides_nothing() -> None:
    assert Window() == NO_WINDOW
    assert NO_WINDOW.masked(np.arange(3)[None], np.arange(2)[:, None]).tolist() == [[False] * 3] * 2


@pytest.mark.parametrize(
    ("given_range", "meant"),
    [
        ((-1, -1), (0, 2**31 - 1)),
        ((-5, 3), (0, 3)),
        ((2, -1), (2, 2**31 - 1)),
        ((4, 2), (4, 2)),
        ((0, 2**40), (0, 2**31 - 1)),
    ],
)
def test_open_ends_of_a_range(given_range: tuple[int, int], meant: tuple[int, int]) -> None:
    assert clip_range(*given_range) == meant
