"""How many bytes a cache takes, told beforehand, and which settings are refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest

from pykv.errors import AllocError, ParamError
from pykv.ggml import Buffer, BufferType, DType, cpu_device
from pykv.memory import KV_TYPES, KVCache, KVPlan, KVSettings, LayerSpec, MemorySpec, memory_buffers
from pykv.memory.kv_settings import kv_type

BLOCKS = {"f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "q8_0": (32, 34), "q5_1": (32, 24), "q5_0": (32, 22)}
BLOCKS |= {"q4_1": (32, 20), "q4_0": (32, 18), "iq4_nl": (32, 18)}
"""Elements and bytes of one block, as the formats are defined."""


def row(dtype: str, n: int) -> int:
    elements, size = BLOCKS[dtype]
    assert n % elements == 0
    return n // elements * size


WIDE, NARROW = LayerSpec(4, 64, 64), LayerSpec(2, 64, 32)
NO_KV = LayerSpec(0, 64, 64)
SPECS = {
    "equal layers": (WIDE, WIDE),
    "two widths": (NARROW, WIDE, NARROW),
    "one without K and V": (WIDE, NO_KV, WIDE),
}
TYPES = [("f16", "f16"), ("f32", "f16"), ("q8_0", "f32"), ("bf16", "bf16"), ("q4_1", "f16")]


def expected_nbytes(layers: dict[int, LayerSpec], settings: KVSettings) -> int:
    """params.md 7: a K and a V row for each cell of each stream; transposed, every layer has the widest V row."""
    n_stream = 1 if settings.unified else settings.n_seq_max
    widest = max((layer.n_head_kv * layer.n_embd_head_v for layer in layers.values()), default=0)
    return sum(
        n_stream
        * settings.n_cells
        * (
            row(settings.type_k, layer.n_head_kv * layer.n_embd_head_k)
            + row(settings.type_v, widest if settings.v_trans else layer.n_head_kv * layer.n_embd_head_v)
        )
        for layer in layers.values()
    )


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("unified", "v_trans"), list(product((True, False), repeat=2)))
def test_memory_estimate_was_wrong_for_some_settings(name: str, unified: bool, v_trans: bool) -> None:
    """What is planned is what a formula says and what is allocated: 60 settings in all. Case A20."""
    spec = MemorySpec(SPECS[name])
    for type_k, type_v in TYPES:
        settings = KVSettings(64, n_seq_max=3, unified=unified, v_trans=v_trans, type_k=type_k, type_v=type_v)
        plan = KVCache.plan(spec, settings)
        owned = {il: layer for il, layer in enumerate(spec.layers) if layer.n_head_kv}
        assert plan.nbytes == expected_nbytes(owned, settings)
        assert plan.nbytes_per_buffer_type == {cpu_device().buffer_type.name: plan.nbytes}
        assert sum(plan.nbytes_per_layer.values()) == plan.nbytes
        with KVCache(spec, settings) as cache:
            assert cache.nbytes == plan.nbytes
            assert all(k.dtype.label == type_k and v.dtype.label == type_v for k, v in map(cache.tensors, owned))


@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize(
    ("layers", "reuse", "owned"),
    [
        (frozenset({1}), {}, {1}),
        (frozenset({0, 2}), {}, {0, 2}),
        (frozenset(), {}, set()),
        (None, {2: 0}, {0, 1}),
        (None, {1: 0, 2: 0}, {0}),
        (frozenset({0, 1}), {2: 1}, {0, 1}),
    ],
)
def test_filtered_and_borrowing_layers_take_nothing(layers, reuse, owned: set[int], v_trans: bool) -> None:
    is_even = 1 in reuse or 1 in reuse.values()
    spec = MemorySpec((WIDE,) * 3 if is_even else (WIDE, NARROW, WIDE), reuse=reuse)
    settings = KVSettings(32, v_trans=v_trans, layers=layers)
    plan = KVCache.plan(spec, settings)
    assert plan.nbytes == expected_nbytes({il: spec.layers[il] for il in owned}, settings)
    assert set(plan.nbytes_per_layer) == owned
    with KVCache(spec, settings) as cache:
        assert cache.nbytes == plan.nbytes


@pytest.mark.parametrize(("n_embd", "dtype", "nbytes"), [(256, "q8_0", 272), (256, "q4_0", 144), (256, "f16", 512)])
def test_bytes_of_one_row(n_embd: int, dtype: str, nbytes: int) -> None:
    spec = MemorySpec((LayerSpec(1, n_embd, n_embd),))
    plan = KVCache.plan(spec, KVSettings(1, type_k=dtype, type_v=dtype))
    assert plan.nbytes_per_layer == {0: 2 * nbytes}


@pytest.mark.parametrize(
    ("n_cells", "n_seq_max", "unified", "mib"), [(4096, 4, True, 8), (1024, 4, False, 8), (1536, 3, False, 9)]
)
def test_full_layers_of_the_reported_model(n_cells: int, n_seq_max: int, unified: bool, mib: int) -> None:
    """Two layers, K and V 256 wide, f16: 2 KiB a cell. The full part of case A20."""
    spec = MemorySpec.uniform(2, LayerSpec(1, 256, 256))
    assert KVCache.plan(spec, KVSettings(n_cells, n_seq_max, unified)).nbytes == mib << 20


@pytest.mark.parametrize("n_cells", [1, 3, 7])
def test_alignment_counts(n_cells: int) -> None:
    """Sizes that no alignment divides: what was planned is still what is allocated, and not less than the rows."""
    spec = MemorySpec((LayerSpec(1, 3, 5), LayerSpec(3, 1, 1)))
    settings = KVSettings(n_cells, type_k="f16", type_v="f32")
    with KVCache(spec, settings) as cache:
        planned = KVCache.plan(spec, settings).nbytes
        assert cache.nbytes == planned
        payload = expected_nbytes(dict(enumerate(spec.layers)), settings)
        assert payload < planned < payload + 4 * 64


# where layers go


@dataclass(frozen=True)
class Named(BufferType):
    """The CPU's memory under another name."""

    label: str = ""

    @property
    def name(self) -> str:
        return self.label


def named(label: str) -> Named:
    return Named(cpu_device().buffer_type.ptr, label=label)


def test_one_allocation_for_each_buffer_type_in_the_order_of_names() -> None:
    homes = {0: named("b"), 1: named("B"), 2: named("a"), 3: named("b")}
    spec = MemorySpec((WIDE, NARROW, NARROW, WIDE))
    settings = KVSettings(16, type_v="f32")
    plan = KVCache.plan(spec, settings, place=homes.__getitem__)
    assert [(kind.name, [layer.il for layer in layers]) for kind, layers in plan.by_buffer_type] == [
        ("B", [1]),
        ("a", [2]),
        ("b", [0, 3]),
    ]
    wide, narrow = (expected_nbytes({0: layer}, settings) for layer in (WIDE, NARROW))
    assert plan.nbytes_per_buffer_type == {"B": narrow, "a": narrow, "b": 2 * wide}
    with KVCache(spec, settings, place=homes.__getitem__) as cache:
        assert [owner.nbytes for owner in cache.owners] == [narrow, narrow, 2 * wide]
        assert cache.tensors(0)[0].owner is cache.tensors(3)[1].owner is cache.owners[2]
        assert cache.nbytes == plan.nbytes


# what is refused

SPEC = MemorySpec((LayerSpec(2, 64, 64), LayerSpec(2, 48, 48)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_cells": 0}, "n_cells=0"),
        ({"n_cells": -8}, "n_cells=-8"),
        ({"n_cells": 2.5}, "n_cells=2.5"),
        ({"n_cells": True}, "n_cells=True"),
        ({"n_cells": "8"}, "n_cells='8'"),
        ({"n_cells": 2**31}, "n_cells=2147483648"),
        ({"n_seq_max": 0}, "n_seq_max=0"),
        ({"n_seq_max": 257}, "n_seq_max=257"),
        ({"n_seq_max": 1.0}, r"n_seq_max=1\.0"),
        ({"unified": "no"}, "unified='no'"),
        ({"v_trans": 1}, "v_trans=1"),
        ({"v_trans_in_states": 1}, "v_trans_in_states=1"),
        ({"n_cells": np.True_}, "n_cells="),
        ({"unified": None}, "unified=None"),
        ({"layers": 0}, "layers=0 must be a set of layers, or None for all"),
        ({"layers": [0]}, r"layers=\[0\] must be a set"),
        ({"layers": frozenset({"0"})}, "layers: '0' is no layer"),
        ({"tag": None}, "tag=None must be a str"),
        ({"tag": "a\ud800"}, r"tag='a\\ud800' must be text that UTF-8 can hold"),
        ({"tag": "a\0b"}, "tag='a.x00b' must be text"),
        ({"type_k": "f8"}, "type_k='f8' is no element type; known: f32"),
        ({"type_v": None}, "type_v=None"),
        ({"type_k": "i32"}, "type_k='i32' cannot store K or V; known: f32, f16, bf16, q8_0"),
        ({"type_v": DType.Q4_K}, "type_v='q4_K' cannot store"),
        ({"type_k": "q8_0"}, r"type_k='q8_0'.*block of 32.*head of 48 in layer 1"),
        ({"type_v": "q4_0"}, r"type_v='q4_0'.*head of 48 in layer 1"),
        ({"type_v": "q8_0", "v_trans": True}, "type_v='q8_0' stores blocks.*flash_attn"),
        ({"type_v": "q8_0", "v_trans_in_states": True}, "type_v='q8_0' stores blocks.*v_trans_in_states"),
        ({"layers": frozenset({2})}, "layers: 2 is no layer; there are 2"),
        ({"layers": frozenset({-1})}, "layers: -1"),
        ({"reuse": {2: 0}}, "reuse: 2 is no layer"),
        ({"reuse": {1: 7}}, "reuse: layer 7, which layer 1 reads, has no cache"),
        ({"reuse": {1: -1}}, "reuse: layer -1"),
        ({"reuse": {1: 1}}, "reuse: layer 1, which layer 1 reads, has no cache"),
        ({"reuse": {1: 0}}, "reuse: layer 1 cannot read layer 0, whose heads are different"),
        ({"reuse": {1: 0}, "layers": frozenset({1})}, "reuse: layer 0, which layer 1 reads, has no cache"),
    ],
)
def test_settings_that_cannot_be_honoured(settings: dict, message: str) -> None:
    wanted = {"n_cells": 8} | settings
    spec = replace(SPEC, reuse=wanted.pop("reuse", {}))
    for make in (KVCache.plan, KVCache):
        with pytest.raises(ParamError, match=message):
            make(spec, KVSettings(**wanted))


@pytest.mark.parametrize("make", [KVPlan, KVCache, KVCache.plan])
def test_what_is_no_spec_and_what_are_no_settings(make) -> None:
    for spec in (None, (WIDE,), WIDE, "llama"):
        with pytest.raises(ParamError, match=r"spec=.* must be a MemorySpec"):
            make(spec, KVSettings(8))
    for settings in (8, "q8_0", {"n_cells": 8}):
        with pytest.raises(ParamError, match=r"settings=.* must be KVSettings"):
            make(SPEC, settings)


@pytest.mark.parametrize("make", [KVCache, KVCache.plan])
def test_places_that_are_none_ended_in_an_attribute_error(make) -> None:
    with pytest.raises(ParamError, match="place: None, given for layer 0, must be a BufferType"):
        make(SPEC, KVSettings(8), place=lambda il: None)
    with pytest.raises(ParamError, match="place='CPU' must be a function"):
        make(SPEC, KVSettings(8), place="CPU")


def test_what_maps_no_layers_to_layers_of_another_cache() -> None:
    with pytest.raises(ParamError, match=r"share=\[0\] must map"):
        KVPlan(SPEC, KVSettings(8), share=[0])
    with pytest.raises(ParamError, match="share: 'a' is no layer"):
        KVPlan(SPEC, KVSettings(8), share={0: "a"})


def test_bytes_beyond_an_int64_ended_in_an_error_about_tensors() -> None:
    spec = MemorySpec.uniform(2, LayerSpec(1, 2**31 - 1, 1))
    settings = KVSettings(2**31 - 1, 256, unified=False, type_k="f32")
    with pytest.raises(ParamError, match=r"n_cells=2147483647 x 256 streams: \d{22} bytes are more than an int64"):
        KVCache.plan(spec, settings)


def test_settings_keep_what_they_were_given() -> None:
    layers = {np.int64(0)}
    settings = KVSettings(np.int64(8), np.int32(2), np.bool_(False), layers=layers)
    layers.clear()
    assert settings == KVSettings(8, 2, False, layers=frozenset({0}))
    assert (type(settings.n_cells), type(settings.n_seq_max), type(settings.unified)) == (int, int, bool)


def test_reuse_of_reusing_layers_is_refused() -> None:
    with pytest.raises(ParamError, match="reuse: layer 1, which layer 2 reads, has no cache of its own"):
        KVPlan(MemorySpec.uniform(3, WIDE, reuse={1: 0, 2: 1}), KVSettings(8))


def test_layers_without_k_and_v_may_have_any_head() -> None:
    spec = MemorySpec((LayerSpec(2, 64, 64), LayerSpec(0, 48, 48)))
    with (
        KVCache(spec, KVSettings(8, type_k="q8_0", type_v="q4_0")) as cache,
        pytest.raises(ParamError, match=r"il=1: this cache holds no K and V for it; it has \[0\]"),
    ):
        cache.tensors(1)


@pytest.mark.parametrize("dtype", KV_TYPES)
def test_types_by_name_and_by_value(dtype: DType) -> None:
    assert kv_type(dtype.label, "type_k") is kv_type(dtype.label.upper(), "type_k") is kv_type(dtype, "type_k")
    assert dtype.label in BLOCKS


def test_more_cells_than_there_is_memory_for() -> None:
    """The refusal comes before anything is allocated: no tensor of this cache exists."""
    spec = MemorySpec.uniform(64, LayerSpec(8, 128, 128))
    settings = KVSettings(2**31 - 1)
    assert KVCache.plan(spec, settings).nbytes == (2**31 - 1) * 64 * 2 * 8 * 128 * 2
    with pytest.raises(AllocError, match=r"n_ctx=2147483647 x 1 streams needs 562949953\d+ bytes .* bytes free"):
        KVCache(spec, settings)


class NoMemory:
    """What a BLAS library looks like: it works in the CPU's memory and has none of its own."""

    buffer_type = cpu_device().buffer_type
    memory_total = memory_free = 0


def test_helper_devices_that_report_no_memory_hid_what_the_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_buffers, "devices", lambda: (cpu_device(), NoMemory()))
    with KVCache(SPEC, KVSettings(8)) as cache:
        assert cache.nbytes > 0


def test_the_first_buffer_stayed_allocated_when_the_second_did_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Buffer] = []

    class Scarce:
        @staticmethod
        def allocate(arena, kind, purpose):
            if made:
                raise AllocError("no more")
            made.append(Buffer.allocate(arena, kind, purpose))
            return made[-1]

    monkeypatch.setattr(memory_buffers, "Buffer", Scarce)
    homes = {0: named("a"), 1: named("b")}
    with pytest.raises(AllocError, match="no more"):
        KVCache(SPEC, KVSettings(8), place=homes.__getitem__)
    assert made[0].closed
