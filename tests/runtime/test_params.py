"""Context parameters: the tables of params.md, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.tiny_gguf import RopeScaling as RopeStretch
from support.tiny_gguf import TinyModel

import pykv
from pykv.errors import AllocError, ParamError
from pykv.ggml import Buffer, DType
from pykv.models import HParams, RopeRequest
from pykv.models.hparams import RopeScaling
from pykv.runtime.params import ContextParams, resolve, usable_cores

HP = HParams(
    architecture="llama", n_layer=2, n_embd=64, n_vocab=8, n_ctx_train=2048, n_head_by_layer=(1, 1),
    n_head_kv_by_layer=(1, 1), n_ff_by_layer=(64, 64), n_embd_head_k=64, n_embd_head_v=64, n_rot=64,
    norm_rms_eps=1e-5, rope_freq_base=1e4, rope_scaling=RopeScaling(), attention_scale=0.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(write_tiny: Callable[[TinyModel], Path]) -> Iterator[pykv.Model]:
    with pykv.Model.load(write_tiny(TinyModel())) as loaded:
        yield loaded


# the worked values


@pytest.mark.parametrize(
    ("n_ctx", "n_seq_max", "unified", "n_batch", "expected"),
    [
        (100, 1, False, 2048, (256, 256, 100, 100)),
        (512, 3, False, 2048, (768, 256, 512, 512)),
        (4096, 4, False, 2048, (4096, 1024, 2048, 512)),
        (4096, 4, True, 2048, (4096, 4096, 2048, 512)),
        (1000, 2, False, 64, (1024, 512, 64, 64)),
        # shares are cut from what has been rounded up already
        (513, 2, False, 2048, (1024, 512, 513, 512)),
        # and of case A20: shares are rounded up to 256
        (1024, 3, False, 2048, (1536, 512, 1024, 512)),
        (1024, 4, False, 2048, (1024, 256, 1024, 512)),
        # 0 = as trained; the batch is limited before n_ctx is rounded up
        (0, 1, True, 4096, (2048, 2048, 2048, 512)),
        (1, 1, True, 2048, (256, 256, 1, 1)),
        (256, 256, False, 2048, (65536, 256, 256, 256)),
    ],
)
def test_worked_values(n_ctx: int, n_seq_max: int, unified: bool, n_batch: int, expected: tuple) -> None:
    params = ContextParams(n_ctx=n_ctx, n_seq_max=n_seq_max, kv_unified=unified, n_batch=n_batch)
    found = resolve(params, HP)
    assert (found.n_ctx, found.n_ctx_seq, found.n_batch, found.n_ubatch) == expected


@pytest.mark.parametrize(
    ("n_batch", "n_ubatch", "expected"),
    [(2048, 0, (512, 512)), (0, 64, (64, 64)), (100, 200, (100, 100)), (256, 32, (256, 32))],
)
def test_batch_and_ubatch(n_batch: int, n_ubatch: int, expected: tuple[int, int]) -> None:
    found = resolve(ContextParams(n_ctx=512, n_batch=n_batch, n_ubatch=n_ubatch), HP)
    assert (found.n_batch, found.n_ubatch) == expected


def test_outputs_are_as_many_as_the_batch_unless_asked() -> None:
    assert resolve(ContextParams(n_ctx=512, n_batch=64), HP).n_outputs_max == 64
    assert resolve(ContextParams(n_ctx=512, n_batch=64, n_outputs_max=7), HP).n_outputs_max == 7
    # not limited by the batch
    assert resolve(ContextParams(n_ctx=512, n_batch=64, n_outputs_max=1000), HP).n_outputs_max == 1000


def test_no_sequences_means_one() -> None:
    assert resolve(ContextParams(n_ctx=512, n_seq_max=0), HP).n_seq_max == 1


def test_threads_are_the_cores_unless_asked() -> None:
    assert resolve(ContextParams(n_ctx=512), HP).n_threads == usable_cores() >= 1
    assert resolve(ContextParams(n_ctx=512, n_threads=3), HP).n_threads == 3


def test_a_context_longer_than_the_training_is_told(caplog: pytest.LogCaptureFixture) -> None:
    resolve(ContextParams(n_ctx=2048), HP)
    assert not caplog.records
    resolve(ContextParams(n_ctx=2304), HP)
    assert "2304 tokens, the model was trained at 2048" in caplog.text


def test_a_context_that_grows_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pykv"):
        resolve(ContextParams(n_ctx=512, n_seq_max=3, kv_unified=False), HP)
    assert "n_ctx=512 becomes 768: 256 tokens for each sequence" in caplog.text


@pytest.mark.parametrize("type_v", ["f16", "q8_0"])
@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ({}, "auto"),
        ({"flash_attn": True}, "flash"),
        ({"attention": "flash"}, "flash"),
        ({"attention": "fused"}, "fused"),
        ({"flash_attn": True, "attention": "flash"}, "flash"),
        ({"flash_attn": False}, "matmul"),
        ({"attention": "matmul"}, "matmul"),
        ({"flash_attn": False, "attention": "matmul"}, "matmul"),
    ],
    ids=str,
)
def test_two_parameters_name_the_path_of_attention(asked: dict, meant: str, type_v: str) -> None:
    params = ContextParams(n_ctx=512, type_v=type_v, **asked)
    if (meant, type_v) != ("matmul", "q8_0"):
        assert resolve(params, HP).attention == meant
        return
    given = "flash_attn=False" if "flash_attn" in asked else "attention='matmul'"
    with pytest.raises(ParamError, match=f"type_v='q8_0' needs flash attention, but {given}"):
        resolve(params, HP)


def test_rope_is_derived_for_what_one_sequence_can_hold() -> None:
    long = replace(HP, rope_scaling=RopeScaling(kind="longrope", n_ctx_orig=512))
    params = ContextParams(n_ctx=1024, n_seq_max=2, kv_unified=False)
    assert not resolve(params, long).rope.is_long
    assert resolve(replace(params, kv_unified=True), long).rope.is_long


# what is refused

REFUSED = [
    ({"n_ctx": -1}, "n_ctx=-1"),
    ({"n_ctx": 2**31}, "n_ctx=2147483648"),
    ({"n_ctx": 1.5}, r"n_ctx=1\.5"),
    ({"n_ctx": True}, "n_ctx=True"),
    ({"n_ctx": "512"}, "n_ctx='512'"),
    ({"n_ctx": None}, "n_ctx=None"),
    ({"n_batch": -1}, "n_batch=-1"),
    ({"n_batch": 0, "n_ubatch": 0}, "n_batch=0 and n_ubatch=0"),
    ({"n_ubatch": 2.0}, r"n_ubatch=2\.0"),
    ({"n_seq_max": -1}, "n_seq_max=-1"),
    ({"n_seq_max": 257}, "n_seq_max=257 must be at most 256"),
    ({"n_seq_max": False}, "n_seq_max=False"),
    ({"n_seq_max": 65, "n_batch": 64}, "n_seq_max=65.*n_batch=64"),
    ({"n_seq_max": 3, "n_outputs_max": 2}, "n_seq_max=3.*n_outputs_max=2"),
    ({"n_ctx": 1, "n_seq_max": 2}, "n_seq_max=2.*n_batch=1"),
    ({"n_outputs_max": -2}, "n_outputs_max=-2"),
    ({"n_threads": 0}, "n_threads=0"),
    ({"n_threads": 513}, "n_threads=513"),
    ({"n_threads": 2.5}, r"n_threads=2\.5"),
    ({"n_threads": True}, "n_threads=True"),
    ({"n_threads": "4"}, "n_threads='4'"),
    ({"n_ctx": np.True_}, "n_ctx="),
    ({"n_ctx": np.float64(64)}, "n_ctx="),
    ({"n_batch": np.array([64])}, "n_batch="),
    ({"kv_unified": np.int64(1)}, "kv_unified="),
    ({"swa_full": "yes"}, "swa_full='yes'"),
    ({"flash_attn": None}, "flash_attn=None"),
    ({"flash_attn": np.array([True])}, "flash_attn="),
    ({"kv_unified": "no"}, "kv_unified='no' must be True or False"),
    ({"swa_full": 1}, "swa_full=1"),
    ({"offload_kqv": None}, "offload_kqv=None"),
    ({"flash_attn": 0}, "flash_attn=0 must be True, False or 'auto'"),
    ({"flash_attn": "on"}, "flash_attn='on'"),
    ({"attention": "grouped"}, "attention='grouped' must be one of 'auto', 'fused', 'flash', 'matmul'"),
    ({"attention": True}, "attention=True must be one of"),
    ({"attention": "fused", "flash_attn": True}, "flash_attn=True means attention='flash', not 'fused'"),
    ({"attention": "matmul", "flash_attn": True}, "flash_attn=True means attention='flash', not 'matmul'"),
    ({"attention": "flash", "flash_attn": False}, "flash_attn=False means attention='matmul', not 'flash'"),
    ({"attention": "matmul", "type_v": "q8_0"}, "type_v='q8_0' needs flash attention, but attention='matmul'"),
    ({"type_v": "q8_0", "flash_attn": False}, "type_v='q8_0' needs flash attention, but flash_attn=False"),
    ({"type_k": "f8"}, "type_k='f8' is no element type"),
    ({"type_k": 1}, "type_k=1 is no element type"),
    ({"type_k": "i32"}, "type_k='i32' cannot store K or V"),
    ({"type_v": DType.Q6_K}, "type_v='q6_K' cannot store K or V"),
    ({"rope": None}, "rope=None must be a RopeRequest"),
    ({"rope": {"freq_base": 1.0}}, "rope="),
]


@pytest.mark.parametrize(("params", "message"), REFUSED)
def test_what_cannot_be_honoured(model: pykv.Model, params: dict, message: str) -> None:
    """With the cells' type i32 the measuring of attention paths used to end the process."""
    for make in (model.context, model.memory_plan):
        with pytest.raises(ParamError, match=message):
            make(**({"n_ctx": 256} | params))


@pytest.mark.parametrize("whole", [np.int64, np.uint16, np.int32])
def test_numbers_of_numpy_were_refused(whole: type) -> None:
    sizes = {"n_ctx": 512, "n_batch": 64, "n_ubatch": 32, "n_seq_max": 2, "n_outputs_max": 8, "n_threads": 1}
    flags = {"kv_unified": False, "swa_full": True, "offload_kqv": False, "flash_attn": True}
    params = ContextParams(
        **{name: whole(n) for name, n in sizes.items()}, **{name: np.bool_(flag) for name, flag in flags.items()}
    )
    assert params == ContextParams(**sizes, **flags)
    assert {type(getattr(params, name)) for name in sizes} == {int}
    assert {type(getattr(params, name)) for name in flags} == {bool}


def test_a_context_does_not_change_its_model(write_tiny: Callable[[TinyModel], Path]) -> None:
    """With YaRN at a scale of its own; params.md 2."""
    tiny = TinyModel(seed=51, rope_scaling=RopeStretch("yarn", 4.0, orig_ctx=128))
    with pykv.Model.load(write_tiny(tiny)) as model:
        with model.context(n_ctx=256, n_threads=1, flash_attn=True, rope=RopeRequest(freq_scale=0.125)):
            pass
        assert model.hparams.n_ctx_train == tiny.n_ctx_train == 512


def test_unknown_parameters_are_named(model: pykv.Model) -> None:
    for make in (model.context, model.memory_plan):
        with pytest.raises(ParamError, match=r"n_cxt: no such context parameter; known: n_ctx, n_batch"):
            make(n_cxt=512)


def test_a_model_that_tells_no_context_length(write_tiny: Callable[[TinyModel], Path]) -> None:
    """Check 3 cannot happen: a file without one is refused when it is loaded."""
    with pytest.raises(pykv.PykvError, match="context_length=0"):
        pykv.Model.load(write_tiny(TinyModel(n_ctx_train=0)))


@pytest.mark.parametrize("type_k", ["q8_0", "q4_0"])
@pytest.mark.parametrize("flash", [True, False, "auto"])
def test_blocks_must_divide_the_head(write_tiny: Callable[[TinyModel], Path], type_k: str, flash: bool) -> None:
    tiny = TinyModel(seed=50, head_dim=48, n_head=2, n_head_kv=2)
    with (
        pykv.Model.load(write_tiny(tiny)) as model,
        pytest.raises(ParamError, match=f"type_k='{type_k}'.*block of 32.*head of 48 in layer 0"),
    ):
        model.context(n_ctx=256, type_k=type_k, flash_attn=flash)


def test_more_context_than_memory(model: pykv.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is allocated before the refusal: not one buffer, not the bookkeeping of two milliard cells."""
    made = []
    monkeypatch.setattr(Buffer, "allocate", lambda *args: made.append(args))
    with pytest.raises(AllocError, match=r"n_ctx=2147483136 x 1 streams needs \d{13} bytes in CPU"):
        model.context(n_ctx=2**31 - 512, flash_attn=True)
    assert not made


def test_a_plan_allocates_nothing(model: pykv.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buffer, "allocate", lambda *args: pytest.fail("allocated"))
    per_cell = 2 * 2 * 2 * 32 * 2  # layers, K and V, heads, head, f16
    assert model.memory_plan(n_ctx=2**31 - 512).nbytes == (2**31 - 512) * per_cell


@pytest.mark.parametrize(
    "params",
    [
        {"n_ctx": 300},
        {"n_ctx": 1024, "n_seq_max": 3, "kv_unified": False},
        {"n_ctx": 512, "type_k": "q8_0"},
        {"n_ctx": 512, "type_k": "q4_0", "type_v": "iq4_nl"},
        {"n_ctx": 512, "flash_attn": False, "type_v": "f32"},
        {"n_ctx": 512, "offload_kqv": False, "rope": RopeRequest(freq_base=5e5)},
    ],
)
def test_what_is_planned_is_what_is_allocated(model: pykv.Model, params: dict) -> None:
    with model.context(n_threads=1, **params) as context:
        assert context.memory.nbytes == model.memory_plan(**params).nbytes
        assert context.memory.n_cells == context.n_ctx_seq
        assert context.compute_nbytes > 0
