"""KVStore: the K and V tensors of a KV cache. Knows rows and layouts, but neither positions nor sequences.

K  [n_embd_k, n_cells, n_stream]          a cell is a row
V  [n_embd_v, n_cells, n_stream]          likewise, or transposed: a channel's cells are contiguous
"""

from __future__ import annotations

from pykv.cells.arguments import shown
from pykv.errors import ParamError
from pykv.ggml import Tensor
from pykv.ggml.owner import Owner
from pykv.memory.kv_plan import KVPlan
from pykv.memory.kv_sharing import shared_rotation, shared_tensors
from pykv.memory.memory_buffers import allocate
from pykv.memory.v_layout import turn_v


class KVStore:
    """Tensors as a plan lays them out, in zeroed buffers.

    Attributes
    ----------
    plan : what was allocated.
    rot_k, rot_v : block sizes by which K and V are rotated before they are stored, 0 where they are not.
    v_trans : whether V is stored transposed now.
    n_embd_v_max : elements of the widest V row; the scatter indices of transposed V are made for it.

    Parameters
    ----------
    other : the store whose tensors shared layers read.

    Raises
    ------
    ParamError : what the other store holds does not fit.
    AllocError : more bytes than a device has; nothing stays allocated.
    """

    def __init__(self, plan: KVPlan, other: KVStore | None = None) -> None:
        self.plan, self._other = plan, other
        self._tensors = shared_tensors(plan, other)
        self.rot_k, self.rot_v = shared_rotation(plan, other)
        self._buffers, own = allocate(plan)
        self._tensors.update({il: (k, v) for il, (k, v) in own.items() if k is not None})
        self._tensors.update({il: self._tensors[source] for il, source in plan.reused.items()})
        self.n_embd_v_max = max((v.ne[0] for _, v in self._tensors.values() if v is not None), default=0)
        self.v_trans = plan.settings.v_trans
        self._is_shared = other is not None
        if other is not None and plan.shared:
            other._is_shared = True

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, without those of the other store."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def owners(self) -> tuple[Owner, ...]:
        """What a graph that reads these tensors stands on."""
        own: tuple[Owner, ...] = tuple(self._buffers)
        return own + (self._other.owners if self._other is not None else ())

    def tensors(self, il: int) -> tuple[Tensor, Tensor | None]:
        """Return the K and V tensors that a layer reads; V is None where it is the front of K's heads.

        Raises
        ------
        ParamError : the layer has none here.
        """
        if il not in self._tensors:
            raise ParamError(f"il={shown(il)}: this cache holds no K and V for it; it has {sorted(self._tensors)}")
        return self._tensors[il]

    def own_tensors(self) -> tuple[tuple[int, Tensor, Tensor | None], ...]:
        """Return (layer, K, V) of every tensor pair in the buffers, each once."""
        return tuple((layer.il, *self._tensors[layer.il]) for layer in self.plan.layers)

    @property
    def can_turn_v(self) -> bool:
        """Whether `turn_v` can change the layout."""
        widths = {layer.n_embd_v for layer in self.plan.layers} - {0}
        return not self._is_shared and len(widths) == 1 and not self.plan.type_v.is_quantized

    def turn_v(self, n_used: int, transposed: bool) -> None:
        """Lay out V the other way; the same values in the same bytes, of the first `n_used` cells.

        Raises
        ------
        ParamError : V is quantised, layers differ in width, or another cache shares cells or layers with this one.
        """
        if not self.can_turn_v:
            raise ParamError(f"transposed={transposed}: the V of this cache can only lie as it was made")
        turn_v([v for _, _, v in self.own_tensors() if v is not None], n_used, transposed)
        self.v_trans = transposed

    def check(self) -> None:
        """Verify that the tensors are as planned; raises AssertionError."""
        size = (self.plan.settings.n_cells, self.plan.settings.n_stream)
        for layer, (il, k, v) in zip(self.plan.layers, self.own_tensors(), strict=True):
            for name, tensor, width in (("K", k, layer.n_embd_k), ("V", v, layer.n_embd_v)):
                if tensor is None:
                    assert width == 0, f"{name} of layer {il} is missing, planned {width} x {size}"
                    continue
                assert tensor.ne[:3] == (width, *size), f"{name} of layer {il} is {tensor!r}, planned {width} x {size}"
                tensor.check_data()

    def clear(self) -> None:
        """Zero the buffers."""
        for buffer in self._buffers:
            buffer.clear()

    def close(self) -> None:
        """Free the buffers. Graphs that still stand on them keep them until they go."""
        for buffer in self._buffers:
            buffer.close()
