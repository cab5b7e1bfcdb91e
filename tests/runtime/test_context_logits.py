"""Rows of logits by the token that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.tiny_gguf import TinyModel
from support.twin import EXACT, TOKENS

import pykv
from pykv.errors import ParamError


def test_a_row_is_found_by_its_token(write_tiny: Callable[[TinyModel], Path]) -> None:
    with pykv.Model.load(write_tiny(TinyModel(seed=84))) as model, model.context(n_ctx=256, **EXACT) as context:
        with pytest.raises(ParamError, match="nothing has been decoded"):
            context.logits_at(0)
        wanted = [i in (1, 4, 5) for i in range(7)]
        context.decode(pykv.Batch(TOKENS[:7], logits=wanted))
        for row, i in enumerate((1, 4, 5)):
            assert np.array_equal(context.logits_at(i), context.logits[row])
            assert np.array_equal(context.logits_at(row - 3), context.logits[row])
        for i in (0, 6):
            with pytest.raises(ParamError, match=f"i={i}: the token was not an output"):
                context.logits_at(i)
        for i in (7, -4, True, 1.0, None):
            with pytest.raises(ParamError, match=f"i={i}"):
                context.logits_at(i)
