"""The numbers that a context's limits are made of."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.batch import BatchLimits
from pykv.errors import ParamError

LEAST = {"n_tokens_max": 1, "n_vocab": 0, "n_seq_max": 1, "n_pos_per_embd": 1, "n_embd_inp": 0, "n_embd_inp_enc": 0}
MOST = dict.fromkeys(LEAST, 2**31 - 1) | {"n_seq_max": 256, "n_pos_per_embd": 4}


@pytest.mark.parametrize("name", LEAST)
def test_limits_that_no_batch_can_keep_were_taken(name: str) -> None:
    for value in (None, "8", 1.5, True, np.float64(1), LEAST[name] - 1, MOST[name] + 1):
        with pytest.raises(ParamError, match=rf"{name}=.* must be a whole number in {LEAST[name]}\.\.{MOST[name]}"):
            BatchLimits(**(LEAST | {name: value}))


def test_the_least_and_the_most_are_taken() -> None:
    assert BatchLimits(**LEAST).n_tokens_max == 1
    assert BatchLimits(**MOST).n_seq_max == 256


def test_numbers_of_numpy_are_stored_as_pythons() -> None:
    limits = BatchLimits(np.int64(8), np.uint32(100), np.int8(2))
    assert limits == BatchLimits(8, 100, 2)
    assert {type(limits.n_tokens_max), type(limits.n_vocab), type(limits.n_seq_max)} == {int}
