"""KVPlan: the tensors of a KV cache and the bytes they take, known before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pykv.errors import ParamError
from pykv.ggml import Arena, BufferType, DType, Tensor, cpu_device
from pykv.memory.spec import LayerSpec, MemorySpec
from pykv.typing import MAX_SEQ, POS_INF, as_bool, as_int

KV_TYPES = (
    DType.F32,
    DType.F16,
    DType.BF16,
    DType.Q8_0,
    DType.Q5_1,
    DType.Q5_0,
    DType.Q4_1,
    DType.Q4_0,
    DType.IQ4_NL,
)
"""Element types that K and V can be stored in."""


@dataclass(frozen=True)
class KVSettings:
    """How much to store, and how. Numbers and bools may be numpy's; Python's are stored.

    Attributes
    ----------
    n_cells : tokens per stream.
    n_seq_max : sequences.
    unified : one stream that all sequences share, or one for each.
    type_k, type_v : element types, named as in ``"q8_0"``.
    v_trans : store V transposed, so that a channel's cells are contiguous; not for quantised V.
    layers : the layers that are cached; None = all that have K and V.
    reference_moves : `seq_add` and `seq_div` as llama.cpp has them: they move shared cells for all their owners, and
        `seq_div` turns keys the wrong way.
    reuse : layer → earlier layer whose K and V it reads instead of its own.
    tag : goes into the tensors' names.

    Raises
    ------
    ParamError : no such setting whatever the layers are; the message names it.
    """

    n_cells: int
    n_seq_max: int = 1
    unified: bool = True
    type_k: str | DType = "f16"
    type_v: str | DType = "f16"
    v_trans: bool = False
    reference_moves: bool = False
    layers: frozenset[int] | None = None
    reuse: Mapping[int, int] = field(default_factory=dict)
    tag: str = ""

    def __post_init__(self) -> None:
        for name, most in (("n_cells", POS_INF), ("n_seq_max", MAX_SEQ)):
            self._take_size(name, most)
        for name in ("unified", "v_trans", "reference_moves"):
            flag = as_bool(getattr(self, name))
            if flag is None:
                raise ParamError(f"{name}={getattr(self, name)!r} must be True or False")
            object.__setattr__(self, name, flag)
        if self.layers is not None:
            object.__setattr__(self, "layers", _layer_set(self.layers))
        object.__setattr__(self, "reuse", _layer_map("reuse", self.reuse))
        _check_tag(self.tag)

    def _take_size(self, name: str, most: int) -> None:
        size = as_int(getattr(self, name))
        if size is None or not 1 <= size <= most:
            raise ParamError(f"{name}={getattr(self, name)!r} must be a whole number in 1..{most}")
        object.__setattr__(self, name, size)

    @classmethod
    def of(cls, **keywords: Any) -> KVSettings:
        """Return settings from keywords.

        Raises
        ------
        ParamError : there is no such setting, or `n_cells` is missing.
        """
        known = cls.__dataclass_fields__
        for name in keywords:
            if name not in known:
                raise ParamError(f"{name}: no such setting of a KV cache; known: {', '.join(known)}")
        if "n_cells" not in keywords:
            raise ParamError("n_cells is missing: how many tokens shall a stream hold?")
        return cls(**keywords)

    @property
    def n_stream(self) -> int:
        return 1 if self.unified else self.n_seq_max


@dataclass(frozen=True)
class LayerPlan:
    """One K and one V tensor `[n_embd, n_cells, n_stream]`, and where they go."""

    il: int
    n_embd_k: int
    n_embd_v: int
    buffer_type: BufferType


@dataclass(frozen=True)
class KVPlan:
    """What a `KVCache` of these settings consists of. Nothing is allocated.

    Raises
    ------
    ParamError : a setting that the layers cannot honour; the message names it.
    """

    spec: MemorySpec
    settings: KVSettings
    place: Callable[[int], BufferType] | None = None
    share: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.spec, MemorySpec):
            raise ParamError(f"spec={self.spec!r} must be a MemorySpec")
        if not isinstance(self.settings, KVSettings):
            raise ParamError(f"settings={self.settings!r} must be KVSettings")
        if self.place is not None and not callable(self.place):
            raise ParamError(f"place={self.place!r} must be a function of the layer, or None")
        object.__setattr__(self, "share", _layer_map("share", self.share))
        _check_types(self.spec, self.settings, self.type_k, self.type_v)
        _check_layers(self)
        _check_bytes(self)

    @cached_property
    def type_k(self) -> DType:
        return kv_type(self.settings.type_k, "type_k")

    @cached_property
    def type_v(self) -> DType:
        return kv_type(self.settings.type_v, "type_v")

    @cached_property
    def layers(self) -> tuple[LayerPlan, ...]:
        """The layers that own tensors, in order."""
        chosen = [(il, layer) for il, layer in enumerate(self.spec.layers) if self._owns(il, layer)]
        # one index list serves all layers, so transposed rows are padded to the widest
        widest = max((layer.n_embd_v for _, layer in chosen), default=0)
        return tuple(
            LayerPlan(il, layer.n_embd_k, widest if self.settings.v_trans else layer.n_embd_v, self._home(il))
            for il, layer in chosen
        )

    @property
    def reused(self) -> dict[int, int]:
        """Layers that read the tensors of another layer of this cache: layer → that layer."""
        return {il: source for il, source in self.settings.reuse.items() if self._is_wanted(il)}

    @property
    def shared(self) -> dict[int, int]:
        """Layers that read the tensors of another cache: layer → the layer there."""
        return {il: source for il, source in self.share.items() if self._is_wanted(il)}

    @cached_property
    def by_buffer_type(self) -> tuple[tuple[BufferType, tuple[LayerPlan, ...]], ...]:
        """Layers grouped by where they go, ordered by the buffer type's name."""
        kinds = sorted({layer.buffer_type for layer in self.layers}, key=lambda kind: kind.name)
        return tuple((kind, tuple(layer for layer in self.layers if layer.buffer_type == kind)) for kind in kinds)

    @property
    def nbytes_per_layer(self) -> dict[int, int]:
        """Bytes of each layer's K and V over all streams, without alignment."""
        n_cells = self.settings.n_cells * self.settings.n_stream
        return {
            layer.il: n_cells * (self.type_k.row_size(layer.n_embd_k) + self.type_v.row_size(layer.n_embd_v))
            for layer in self.layers
        }

    @property
    def nbytes_per_stream(self) -> int:
        """Bytes of one stream over all layers."""
        return sum(self.nbytes_per_layer.values()) // self.settings.n_stream

    @cached_property
    def nbytes_per_buffer_type(self) -> dict[str, int]:
        """Bytes that allocation takes in each buffer type, alignment included."""
        return {kind.name: kind.alloc_size(self.make_tensors(layers)[0]) for kind, layers in self.by_buffer_type}

    @property
    def nbytes(self) -> int:
        """Bytes that allocation takes in all."""
        return sum(self.nbytes_per_buffer_type.values())

    def make_tensors(self, layers: tuple[LayerPlan, ...]) -> tuple[Arena, list[tuple[Tensor, Tensor]]]:
        """Return an arena with the K and V headers of some layers, and these in pairs."""
        arena = Arena(2 * len(layers))
        size, tag = (self.settings.n_cells, self.settings.n_stream), self.settings.tag
        return arena, [
            (
                arena.tensor(self.type_k, (layer.n_embd_k, *size), f"cache_{tag}k_l{layer.il}"),
                arena.tensor(self.type_v, (layer.n_embd_v, *size), f"cache_{tag}v_l{layer.il}"),
            )
            for layer in layers
        ]

    def _owns(self, il: int, layer: LayerSpec) -> bool:
        borrows = il in self.settings.reuse or il in self.share
        return layer.n_head_kv > 0 and not borrows and self._is_wanted(il)

    def _is_wanted(self, il: int) -> bool:
        return self.settings.layers is None or il in self.settings.layers

    def _home(self, il: int) -> BufferType:
        if self.place is None:
            return cpu_device().buffer_type
        kind = self.place(il)
        if not isinstance(kind, BufferType):
            raise ParamError(f"place: {kind!r}, given for layer {il}, must be a BufferType")
        return kind


def kv_type(name: str | DType, argument: str) -> DType:
    """Return the element type of that name, if K and V can be stored in it.

    Raises
    ------
    ParamError : they cannot, or there is none; the message names `argument`.
    """
    dtype = DType.parse(name, argument)
    if dtype not in KV_TYPES:
        known = ", ".join(kind.label for kind in KV_TYPES)
        raise ParamError(f"{argument}={dtype.label!r} cannot store K or V; known: {known}")
    return dtype


def _layer_set(layers: object) -> frozenset[int]:
    if not isinstance(layers, Set):
        raise ParamError(f"layers={layers!r} must be a set of layers, or None for all")
    return frozenset(_layer("layers", il) for il in layers)


def _layer_map(name: str, borrowed: object) -> dict[int, int]:
    if not isinstance(borrowed, Mapping):
        raise ParamError(f"{name}={borrowed!r} must map layers to the layers whose K and V they read")
    return {_layer(name, il): _layer(name, source) for il, source in borrowed.items()}


def _layer(name: str, il: object) -> int:
    index = as_int(il)
    if index is None:
        raise ParamError(f"{name}: {il!r} is no layer")
    return index


def _check_tag(tag: object) -> None:
    """Names of tensors are UTF-8 that ends at a zero byte."""
    if not isinstance(tag, str):
        raise ParamError(f"tag={tag!r} must be a str")
    if "\0" in tag or any("\ud800" <= letter <= "\udfff" for letter in tag):
        raise ParamError(f"tag={tag!r} must be text that UTF-8 can hold, without a zero byte")


def _check_types(spec: MemorySpec, settings: KVSettings, type_k: DType, type_v: DType) -> None:
    if settings.v_trans and type_v.is_quantized:
        raise ParamError(f"type_v={type_v.label!r} stores blocks, which cannot be transposed: turn flash_attn on")
    for il, layer in enumerate(spec.layers):
        for argument, dtype, head in (("type_k", type_k, layer.n_embd_head_k), ("type_v", type_v, layer.n_embd_head_v)):
            # differs from llama.cpp: asked of K without flash attention too (there: skipped, and a row that does not
            # end with a block is met much later or not at all), because such a head cannot be stored either way
            if layer.n_head_kv and head % dtype.block_size:
                raise ParamError(
                    f"{argument}={dtype.label!r}: its block of {dtype.block_size} elements does not divide "
                    f"the head of {head} in layer {il}"
                )


def _check_layers(plan: KVPlan) -> None:
    """Check which layers own tensors and which read those of others."""
    layers, settings = plan.spec.layers, plan.settings
    for name, ids in (("layers", settings.layers or ()), ("reuse", settings.reuse), ("share", plan.share)):
        for il in ids:
            if not 0 <= il < len(layers):
                raise ParamError(f"{name}: {il} is no layer; there are {len(layers)}")
    for il, source in plan.reused.items():
        if il in plan.share:
            raise ParamError(f"reuse: layer {il} cannot read layer {source} and a shared cache")
        if not 0 <= source < len(layers) or not plan._owns(source, layers[source]):
            raise ParamError(f"reuse: layer {source}, which layer {il} reads, has no cache of its own")
        if not layers[il].fits(layers[source]):
            raise ParamError(f"reuse: layer {il} cannot read layer {source}, whose heads are different")


def _check_bytes(plan: KVPlan) -> None:
    n_bytes = sum(plan.nbytes_per_layer.values())
    if n_bytes >= 2**63:
        settings = plan.settings
        raise ParamError(
            f"n_cells={settings.n_cells} x {settings.n_stream} streams: {n_bytes} bytes are more than an int64 counts"
        )
