"""A model without weights and a context without memory: everything is where it would be, and can be measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pykv.errors import AllocError
from pykv.ggml import Backend, BufferType, Device, cpu_device
from pykv.gguf import GGUFFile
from pykv.memory import AttentionPlan, Memory, MemorySpec, make_memory, memory_plan
from pykv.memory.kinds import has_states
from pykv.models import Architecture, HParams, Keys, Placement, Weights, build_architecture
from pykv.models.weights import ImaginedWeights
from pykv.runtime.compute import Compute
from pykv.runtime.memory_layout import attention_choice, kv_device, kv_places, memory_settings
from pykv.runtime.params import ContextParams, ResolvedParams, resolve


@dataclass(frozen=True)
class ImaginedModel:
    """A model of which only the head of the file was read."""

    hparams: HParams
    placement: Placement
    architecture: Architecture
    weights: tuple[ImaginedWeights, ...]

    @classmethod
    def of(cls, file: GGUFFile, placement: Placement, *, repack: bool) -> ImaginedModel:
        """Lay out the weights of a file as `Model.load` would."""
        hparams, weights = HParams.from_gguf(file), Weights(file, placement, repack=repack)
        architecture = build_architecture(hparams, weights, Keys(file))
        return cls(hparams, placement, architecture, weights.imagine())

    @property
    def compute_devices(self) -> tuple[Device, ...]:
        """The devices of its graphs, the CPU last."""
        return (*(device for device in self.placement.devices if device.kind != "cpu"), cpu_device())


@dataclass(frozen=True)
class ContextNeeds:
    """What a context takes, in bytes by device.

    Attributes
    ----------
    kv_by_buffer_type : bytes of K, V and states by device and name of the memory.
    """

    params: ResolvedParams
    attention: str
    plan: AttentionPlan
    kv: Counter[Device]
    states: Counter[Device]
    kv_by_buffer_type: dict[Device, Counter[str]]
    compute: dict[Device, int]


def context_needs(model: ImaginedModel, asked: ContextParams, attention: AttentionPlan | None = None) -> ContextNeeds:
    """Measure a context that is only imagined; `attention` is the way to take, if that is known.

    With attention="auto" the paths are timed as a context does it, once in a process: that alone allocates, and gives
    back, one layer's K and V of 16384 cells at most.

    Raises
    ------
    ParamError : a parameter that cannot be honoured.
    UnsupportedOpError : an operation that none of the devices has.
    AllocError : not even the bookkeeping of the cells finds room, which is real.
    """
    params = resolve(asked, model.hparams)
    spec = model.architecture.memory_spec(params.rope)
    choice = attention_choice(model, params, spec, attention)
    settings, place = memory_settings(params, choice.plan), kv_places(model, params)
    kv, states = Counter[Device](), Counter[Device]()
    by_type: dict[Device, Counter[str]] = {}
    devices = [kv_device(model, params, il) for il in range(len(spec.layers))]
    homes = {device.buffer_type.name: device for device in devices}
    for name, part in memory_plan(spec, settings, place).parts.items():
        for kind, n_bytes in part.nbytes_per_buffer_type.items():
            (states if name == "states" else kv)[homes[kind]] += n_bytes
            by_type.setdefault(homes[kind], Counter())[kind] += n_bytes

    def imagined_place(il: int) -> BufferType:
        return place(il).imagined()

    try:
        memory = make_memory(spec, settings, imagined_place, params.n_threads)
    except MemoryError as error:
        raise AllocError(f"n_ctx={params.n_ctx}: no host memory for the bookkeeping of so many cells") from error
    try:
        with _compute(model, params, spec, memory, choice.plan) as compute:
            sizes = compute.reserve_nbytes(*params.widest_ubatch)
    finally:
        memory.close()
    return ContextNeeds(params, choice.reason, choice.plan, kv, states, by_type, sizes)


@contextmanager
def _compute(
    model: ImaginedModel, params: ResolvedParams, spec: MemorySpec, memory: Memory, attention: AttentionPlan
) -> Iterator[Compute]:
    """Open what a context computes with."""
    backends = [Backend(device, params.n_threads) for device in model.compute_devices]
    try:
        owners = tuple(one.buffer for one in model.weights)
        n_rs_seq = params.n_rs_seq if has_states(spec) else 0
        compute = Compute(model.architecture, memory, attention, backends, owners, n_rs_seq)
        try:
            yield compute
        finally:
            compute.close()
    finally:
        for backend in backends:
            backend.close()
