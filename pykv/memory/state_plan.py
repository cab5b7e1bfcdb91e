"""StatePlan: the tensors of a recurrent memory and the bytes they take, known before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from pykv.errors import ParamError
from pykv.ggml import Arena, BufferType, DType, Tensor
from pykv.memory.memory_buffers import TensorPlan, home_of
from pykv.memory.spec import MemorySpec, StateSpec
from pykv.typing import MAX_SEQ, as_int


@dataclass(frozen=True)
class StateLayerPlan:
    """The state of one layer, and where it goes."""

    il: int
    state: StateSpec
    buffer_type: BufferType


@dataclass(frozen=True)
class StatePlan(TensorPlan[StateLayerPlan]):
    """What a `RecurrentMemory` consists of: per layer up to two f32 tensors `[n_embd, n_seq_max * n_planes]`.

    Attributes
    ----------
    n_seq_max : sequences.
    n_rs_seq : states that are kept of each beside the latest.

    Raises
    ------
    ParamError : names the argument, its value and the limit.
    """

    spec: MemorySpec
    n_seq_max: int = 1
    n_rs_seq: int = 0
    place: Callable[[int], BufferType] | None = None

    def __post_init__(self) -> None:
        for name, least, most in (("n_seq_max", 1, MAX_SEQ), ("n_rs_seq", 0, 2**16)):
            value = as_int(getattr(self, name))
            if value is None or not least <= value <= most:
                raise ParamError(f"{name}={getattr(self, name)!r} must be a whole number in {least}..{most}")
            object.__setattr__(self, name, value)

    @property
    def n_rows(self) -> int:
        """Rows of each tensor."""
        return self.n_seq_max * (1 + self.n_rs_seq)

    @cached_property
    def layers(self) -> tuple[StateLayerPlan, ...]:
        """The layers that have a state, in order."""
        return tuple(
            StateLayerPlan(il, layer.state, home_of(il, self.place))
            for il, layer in enumerate(self.spec.layers)
            if layer.state is not None
        )

    @property
    def purpose(self) -> str:
        """What the memory is for."""
        return f"states of n_seq_max={self.n_seq_max} sequences, {1 + self.n_rs_seq} of each"

    @property
    def nbytes_per_layer(self) -> dict[int, int]:
        """Bytes of each layer's states, without alignment."""
        return {layer.il: self.n_rows * layer.state.nbytes for layer in self.layers}

    def make_tensors(
        self, layers: tuple[StateLayerPlan, ...]
    ) -> tuple[Arena, list[tuple[Tensor | None, Tensor | None]]]:
        """Return an arena with the R and S headers of some layers, and these in pairs."""
        arena = Arena(2 * len(layers))

        def header(kind: str, il: int, width: int) -> Tensor | None:
            return arena.tensor(DType.F32, (width, self.n_rows), f"cache_{kind}_l{il}") if width else None

        return arena, [
            (header("r", one.il, one.state.n_embd_r), header("s", one.il, one.state.n_embd_s)) for one in layers
        ]
