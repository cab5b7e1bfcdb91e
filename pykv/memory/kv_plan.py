"""KVPlan: the tensors of a KV cache and the bytes they take, known before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pykv.errors import ParamError
from pykv.ggml import Arena, BufferType, DType, Tensor
from pykv.memory.kv_settings import KVSettings, kv_type
from pykv.memory.memory_buffers import TensorPlan, home_of
from pykv.memory.spec import LayerSpec, MemorySpec, layer_map


@dataclass(frozen=True)
class LayerPlan:
    """One K and one V tensor `[n_embd, n_cells, n_stream]`, and where they go; `n_embd_v` is 0 without the latter."""

    il: int
    n_embd_k: int
    n_embd_v: int
    buffer_type: BufferType


@dataclass(frozen=True)
class KVPlan(TensorPlan[LayerPlan]):
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
        object.__setattr__(self, "share", layer_map("share", self.share))
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
        widest = max((_stored_v(layer) for _, layer in chosen), default=0)

        def width_v(layer: LayerSpec) -> int:
            return widest if self.settings.v_trans and not layer.k_only else _stored_v(layer)

        return tuple(LayerPlan(il, layer.n_embd_k, width_v(layer), home_of(il, self.place)) for il, layer in chosen)

    @property
    def reused(self) -> dict[int, int]:
        """Layers that read the tensors of another layer of this cache: layer → that layer."""
        return {il: source for il, source in self.spec.reuse.items() if self._is_wanted(il)}

    @property
    def shared(self) -> dict[int, int]:
        """Layers that read the tensors of another cache: layer → the layer there."""
        return {il: source for il, source in self.share.items() if self._is_wanted(il)}

    @property
    def purpose(self) -> str:
        """What the memory is for."""
        return f"KV cache of n_ctx={self.settings.n_cells} x {self.settings.n_stream} streams"

    @property
    def nbytes_per_layer(self) -> dict[int, int]:
        """Bytes of each layer's K and V over all streams, without alignment."""
        n_cells = self.settings.n_cells * self.settings.n_stream
        return {
            layer.il: n_cells * (self.type_k.row_size(layer.n_embd_k) + self.type_v.row_size(layer.n_embd_v))
            for layer in self.layers
        }

    def make_tensors(self, layers: tuple[LayerPlan, ...]) -> tuple[Arena, list[tuple[Tensor, Tensor | None]]]:
        """Return an arena with the K and V headers of some layers, and these in pairs; V is None where K holds it."""
        arena = Arena(2 * len(layers))
        size, tag = (self.settings.n_cells, self.settings.n_stream), self.settings.tag

        def headers(layer: LayerPlan) -> tuple[Tensor, Tensor | None]:
            k = arena.tensor(self.type_k, (layer.n_embd_k, *size), f"cache_{tag}k_l{layer.il}")
            if not layer.n_embd_v:
                return k, None
            return k, arena.tensor(self.type_v, (layer.n_embd_v, *size), f"cache_{tag}v_l{layer.il}")

        return arena, [headers(layer) for layer in layers]

    def _owns(self, il: int, layer: LayerSpec) -> bool:
        borrows = il in self.spec.reuse or il in self.share
        return layer.n_head_kv > 0 and not borrows and self._is_wanted(il)

    def _is_wanted(self, il: int) -> bool:
        return self.settings.layers is None or il in self.settings.layers


def _stored_v(layer: LayerSpec) -> int:
    """Return the elements of one cell's V row, as far as they are stored beside K."""
    return 0 if layer.k_only else layer.n_embd_v


def _check_types(spec: MemorySpec, settings: KVSettings, type_k: DType, type_v: DType) -> None:
    if settings.v_trans and type_v.is_quantized:
        raise ParamError(f"type_v={type_v.label!r} stores blocks, which cannot be transposed: turn flash_attn on")
    if settings.v_by_channel_in_states and type_v.is_quantized:
        raise ParamError(f"type_v={type_v.label!r} stores blocks: v_trans_in_states=True is not possible")
    for il, layer in enumerate(spec.layers):
        if layer.n_head_kv and layer.k_only and type_k != type_v:
            raise ParamError(
                f"type_v={type_v.label!r} differs from type_k={type_k.label!r}, but layer {il} reads V out of K"
            )
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
    for name, ids in (("layers", settings.layers or ()), ("reuse", plan.spec.reuse), ("share", plan.share)):
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
