"""How a context lays out its memory: where each layer goes, in what types, and for which kind of attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from pykv.errors import ParamError
from pykv.ggml import BufferType, Device, cpu_device
from pykv.memory import AttentionPath, AttentionPlan, KVSettings, MemoryPlan, MemorySettings, MemorySpec, memory_plan
from pykv.memory.attention_choice import AttentionChoice
from pykv.memory.attention_probe import ProbeShape, measured_choice
from pykv.memory.fused_support import fused_misfit
from pykv.runtime.params import ContextParams, ResolvedParams, resolve

if TYPE_CHECKING:
    from pykv.models import Architecture, HParams, Placement


class PlacedModel(Protocol):
    """What the layout of a memory depends on: a model, loaded or only looked at."""

    @property
    def hparams(self) -> HParams:
        """Its sizes."""
        ...

    @property
    def placement(self) -> Placement:
        """Which device holds which layer."""
        ...

    @property
    def architecture(self) -> Architecture:
        """Its family."""
        ...


def plan_of(model: PlacedModel, params: ContextParams) -> MemoryPlan:
    """Return what the memory of a context takes, without allocating it."""
    resolved = resolve(params, model.hparams)
    spec = model.architecture.memory_spec(resolved.rope)
    # rows of equal width take the same bytes in both layouts: no need to measure which one it will be
    is_even = len({layer.n_embd_v for layer in spec.layers if layer.n_head_kv}) == 1
    if is_even and resolved.attention in ("auto", "flash"):
        attention = AttentionPlan.of(AttentionPath.FLASH)
    else:
        attention = attention_choice(model, resolved, spec).plan
    return memory_plan(spec, memory_settings(resolved, attention), kv_places(model, resolved))


def kv_places(model: PlacedModel, params: ResolvedParams) -> Callable[[int], BufferType]:
    """Return where each layer's K and V go: beside the layer's weights."""
    return lambda il: kv_device(model, params, il).buffer_type


def kv_device(model: PlacedModel, params: ResolvedParams, il: int) -> Device:
    """Return where a layer's K and V go."""
    return model.placement.layers[il] if params.offload_kqv else cpu_device()


def memory_settings(params: ResolvedParams, attention: AttentionPlan) -> MemorySettings:
    """Return sizes, types and layout."""
    kv = KVSettings(
        n_cells=params.n_ctx_seq,
        n_seq_max=params.n_seq_max,
        unified=params.kv_unified,
        type_k=params.type_k,
        type_v=params.type_v,
        v_trans=attention.transpose_from == 0,
        # as llama.cpp's is with the same parameters, whose "auto" is flash attention, so that each reads the other's
        v_trans_in_states=params.attention == "matmul",
        reference_moves=params.reference_moves,
    )
    return MemorySettings(kv, params.n_ubatch, params.swa_full, params.n_rs_seq)


def attention_choice(
    model: PlacedModel, params: ResolvedParams, spec: MemorySpec, recorded: AttentionPlan | None = None
) -> AttentionChoice:
    """Return how attention is computed: as recorded, as asked for, or as measured.

    Raises
    ------
    ParamError : the fused path is asked for, but does not serve such K and V, or not where they lie.
    """
    if not any(layer.n_head_kv for layer in spec.layers):
        return AttentionChoice(AttentionPlan.of(AttentionPath.FLASH), "the model has no attention")
    refusal = fused_refusal(model, params, spec)
    if recorded is not None:
        return _recorded(recorded, refusal)
    if params.attention == "fused" and refusal is not None:
        raise ParamError(f"attention='fused': {refusal}")
    if params.attention != "auto":
        plan = AttentionPlan.of(AttentionPath(params.attention))
        return AttentionChoice(plan, f"{params.attention} was asked for")
    # differs from llama.cpp: "auto" is decided by measuring, where there it means "flash wherever it can run", because
    # that is the slower one on many CPUs; V follows, so its layout is no property of the parameters
    il, others = _probed(model, spec)
    choice = measured_choice(*_probe(model, params, spec, il), refusal is None)
    remarks = [choice.reason]
    if others:
        remarks.append(f"layer {il} was measured, other heads have {_listed(others)}")
    if refusal is not None:
        remarks.append(refusal)
    return replace(choice, reason="; ".join(remarks))


def fused_refusal(model: PlacedModel, params: ResolvedParams, spec: MemorySpec) -> str | None:
    """Return why the fused path cannot be taken, None if it can."""
    shapes = _shapes(model, spec)
    for il in shapes:
        device = kv_device(model, params, il)
        if device.kind != "cpu":
            return f"K and V of layer {il} lie on {device.name}, where the fused kernel does not run"
    for il in sorted({shape: il for il, shape in shapes.items()}.values()):  # one layer of each shape
        misfit = fused_misfit(shapes[il][0], spec.layers[il], params.type_k, params.type_v)
        if misfit is not None:
            same = [other for other, shape in shapes.items() if shape == shapes[il]]
            where = f" in {_listed(same)}" if len(same) < len(shapes) else ""
            return f"the fused kernel does not cover {misfit}{where}"
    return None


_Heads = tuple[int, int, int, int]
"""Query heads, KV heads, and the widths of K and V."""


def _shapes(model: PlacedModel, spec: MemorySpec) -> dict[int, _Heads]:
    """Return the heads of each layer that attends."""
    heads = model.hparams.n_head_by_layer
    return {
        il: (heads[il], layer.n_head_kv, layer.n_embd_head_k, layer.n_embd_head_v)
        for il, layer in enumerate(spec.layers)
        if layer.n_head_kv
    }


def _probed(model: PlacedModel, spec: MemorySpec) -> tuple[int, list[int]]:
    """Return the layer to measure, and those that have other heads.

    It is the first of those with the most common heads, of the layers without a window if there are such: they look at
    the most cells.
    """
    shapes = _shapes(model, spec)
    deep = [il for il in shapes if not spec.layers[il].is_swa] or list(shapes)
    counts = Counter(shapes[il] for il in deep)
    il = max(deep, key=lambda il: counts[shapes[il]])
    return il, [other for other, shape in shapes.items() if shape != shapes[il]]


def _listed(layers: list[int]) -> str:
    """Return numbers of layers in words, at most a few of them."""
    shown = ", ".join(map(str, layers[:4]))
    return f"{'layer' if len(layers) == 1 else 'layers'} {shown}{' and others' if len(layers) > 4 else ''}"


def _recorded(plan: AttentionPlan, refusal: str | None) -> AttentionChoice:
    if (plan.few is AttentionPath.FUSED or plan.fuse_from is not None) and refusal is not None:
        return AttentionChoice(replace(plan, few=AttentionPath.FLASH, fuse_from=None), f"recorded, but {refusal}")
    return AttentionChoice(plan, "recorded")


def _probe(model: PlacedModel, params: ResolvedParams, spec: MemorySpec, il: int) -> tuple[Device, int, ProbeShape]:
    """Return what to measure of a layer."""
    layer = spec.layers[il]
    shape = ProbeShape(
        n_head=model.hparams.n_head_by_layer[il],
        n_head_kv=layer.n_head_kv,
        n_embd_head_k=layer.n_embd_head_k,
        n_embd_head_v=layer.n_embd_head_v,
        n_cells=params.n_ctx_seq,
        type_k=params.type_k,
        type_v=params.type_v,
    )
    return kv_device(model, params, il), params.n_threads, shape
