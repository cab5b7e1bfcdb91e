"""The part of a model's graph that belongs to a KV cache: store K and V, read them, attend.

Source: spec kv_cache.md sections 8 to 10.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from pykv.batch import UBatch
from pykv.cells import MaskRule, SlotInfo, element_indices, fill_mask, row_indices
from pykv.errors import ParamError
from pykv.ggml import DType, Graph, GraphInput, Tensor, ops
from pykv.memory.attention import AttentionParams, AttentionPath, KVView, attend
from pykv.memory.attention_mass import MassWatch
from pykv.memory.hadamard import hadamard, rotate
from pykv.memory.kv_views import Cells, Heads, by_channel, by_row
from pykv.memory.mass_graph import MassGraph
from pykv.memory.memory_graph import MemoryGraph
from pykv.typing import BoolArray

if TYPE_CHECKING:
    from pykv.memory.kv_cache import KVCache


@dataclass(frozen=True)
class KVShape:
    """What a graph is built for; it serves every ubatch of equal shape.

    Attributes
    ----------
    n_tokens : tokens of the ubatch.
    n_kv : cells to look at, per stream.
    s0, n_stream : the run of streams that is read.
    """

    n_tokens: int
    n_kv: int
    s0: int = 0
    n_stream: int = 1


class KVGraph(MemoryGraph):
    """Nodes and inputs of one cache in one graph.

    Parameters
    ----------
    watches : the layers whose attention is observed, see `masses`.
    """

    def __init__(
        self,
        graph: Graph,
        cache: KVCache,
        shape: KVShape,
        path: AttentionPath,
        causal: bool = True,
        watches: Sequence[MassWatch] = (),
    ) -> None:
        self.cache, self.shape, self.path = cache, shape, path
        self._graph, self._arena = graph, graph.arena
        self._rule = MaskRule(causal=causal, window=cache.spec.window, alibi=cache.spec.alibi_max_bias > 0)
        n, s = shape.n_tokens, shape.n_stream
        self._store = cache.store
        n_values = n * self._store.n_embd_v_max if self._store.v_trans else 0  # 0 also where no layer stores V
        self._k_rows = self._input(DType.I64, (n,), "k_rows")
        self._v_rows = self._input(DType.I64, (n_values,), "v_rows") if n_values else self._k_rows
        self._mask: GraphInput | None = None  # a part that is only stored and read needs none
        self._rot_k = self._rotation(self._store.rot_k, "rot_k")
        self._rot_v = self._rotation(self._store.rot_v, "rot_v")
        self._observed = MassGraph(graph, path, watches, n // s, s) if watches else None

    @property
    def kv(self) -> KVGraph:
        """The graph itself."""
        return self

    @property
    def inputs(self) -> tuple[GraphInput, ...]:
        """The inputs that `fill` writes, each once."""
        wanted = (self._k_rows, self._v_rows, self._mask, self._rot_k, self._rot_v)
        own = tuple(dict.fromkeys(i for i in wanted if i is not None))
        return own if self._observed is None else own + self._observed.inputs

    def observes(self, il: int) -> bool:
        """Whether a layer is observed."""
        return self._observed is not None and self._observed.observes(il)

    @property
    def masses(self) -> tuple[Mapping[int, Tensor], ...]:
        """For each watch, layer → the attention that each cell received, [n_kv, n_head_kv or 1, n_stream] f32."""
        return () if self._observed is None else tuple(map(MappingProxyType, self._observed.masses))

    def fill(self, slot: SlotInfo, ubatch: UBatch, chosen: Sequence[BoolArray] | None = None) -> None:
        """Write the inputs for a ubatch whose bookkeeping has been applied.

        `chosen` says for each watch which tokens count, (n_tokens,); None = as it has it for this ubatch alone.
        """
        streams, n_cells = self.cache.streams, self.cache.n_cells
        self._k_rows.write(row_indices(slot, n_cells))
        if self._v_rows is not self._k_rows:
            self._v_rows.write(element_indices(slot, n_cells, self._store.n_embd_v_max))
        if self._mask is not None:
            fill_mask(self._mask.array[:, 0], streams, slot, ubatch, self._rule)
            self._mask.commit()
        for rotation in (self._rot_k, self._rot_v):
            if rotation is not None:
                rotation.write(hadamard(rotation.tensor.ne[0]))
        if self._observed is not None:
            if chosen is None:
                chosen = [watch.what.chosen(ubatch.seq_ids) for watch in self._observed.watches]
            self._observed.fill(chosen)

    def store(self, il: int, k: Tensor, v: Tensor | None = None) -> None:
        """Add nodes that write `k` [Dk, Hk, n_tokens] and `v` [Dv, Hk, n_tokens] to the ubatch's cells.

        There is no `v` for layers that read V out of K.
        """
        arena, (k_all, v_all) = self._arena, self._store.tensors(il)
        if (v is None) != (v_all is None):
            raise ParamError(f"v: layer {il} {'stores no V' if v_all is None else 'needs V'} beside K")
        if self._rot_k is not None:
            k = rotate(arena, k, self._rot_k.tensor)
        self._scatter(k_all, self._by_row(k), self._k_rows.tensor)
        if v is None or v_all is None:
            return
        if self._rot_v is not None:
            v = rotate(arena, v, self._rot_v.tensor)
        if self._store.v_trans:
            self._scatter_values(v_all, v)
        else:
            self._scatter(v_all, self._by_row(v), self._v_rows.tensor)

    def attend(self, il: int, q: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """Return attention outputs [Dv, H, n_tokens] of queries `q` [Dk, H, n_tokens] over the stored cells.

        Call it after `store` of the same layer, so that a token sees itself.
        """
        spec = self.cache.spec
        params = AttentionParams(scale, spec.alibi_max_bias, spec.logit_softcap, sinks)
        if self._rot_k is not None:
            q = rotate(self._arena, q, self._rot_k.tensor)
        in_k = self.cache.spec.layers[il].k_only
        kv = KVView(self.get_k(il), self.get_v(il), self._store.v_trans and not in_k)
        if self._observed is not None and self._observed.observes(il):
            out = self._observed.attend(il, q, kv, self._mask_tensor(), params)
        else:
            out = attend(self._arena, self.path, q, kv, self._mask_tensor(), params)
        return out if in_k or self._rot_v is None else rotate(self._arena, out, self._rot_v.tensor)

    def get_k(self, il: int) -> Tensor:
        """Return a view of the stored keys, [Dk, Hk, n_kv, S]."""
        layer = self.cache.spec.layers[il]
        return by_row(self._arena, self._store.tensors(il)[0], Heads(layer.n_head_kv, layer.n_embd_head_k), self._cells)

    def get_v(self, il: int) -> Tensor:
        """Return a view of the stored values, [Dv, Hk, n_kv, S], or [n_kv, Hk, Dv, S] where stored transposed."""
        (k, v), layer = self._store.tensors(il), self.cache.spec.layers[il]
        if v is None:
            in_keys = Heads(layer.n_head_kv, layer.n_embd_head_v, layer.n_embd_head_k)
            return by_row(self._arena, k, in_keys, self._cells)
        view = by_channel if self._store.v_trans else by_row
        return view(self._arena, v, Heads(layer.n_head_kv, layer.n_embd_head_v), self._cells)

    @property
    def _cells(self) -> Cells:
        return Cells(self.shape.n_kv, self.shape.s0, self.shape.n_stream)

    def _by_row(self, x: Tensor) -> Tensor:
        """Return [D, H, n_tokens] as [D*H, n_tokens]."""
        if not x.is_contiguous:
            x = ops.cont(self._arena, x)
        return ops.reshape(self._arena, x, x.ne[0] * x.ne[1], x.ne[2])

    def _scatter(self, target: Tensor, rows: Tensor, index: Tensor) -> None:
        flat = ops.reshape(self._arena, target, target.ne[0], target.ne[1] * target.ne[2])
        self._graph.expand(ops.set_rows(self._arena, flat, rows, index))

    def _scatter_values(self, target: Tensor, v: Tensor) -> None:
        """Write each value to a place of its own: transposed, a token's values lie far apart."""
        arena, rows = self._arena, self._by_row(v)
        if rows.ne[0] < target.ne[0]:
            rows = ops.pad(arena, rows, target.ne[0] - rows.ne[0])
        single = ops.reshape(arena, target, 1, target.n_elements)
        values = ops.reshape(arena, rows, 1, rows.n_elements)
        self._graph.expand(ops.set_rows(arena, single, values, self._v_rows.tensor))

    def _input(self, dtype: DType, ne: tuple[int, ...], name: str) -> GraphInput:
        return GraphInput(self._arena.tensor(dtype, ne, name))

    def _mask_tensor(self) -> Tensor:
        if self._mask is None:
            n, n_kv, s = self.shape.n_tokens, self.shape.n_kv, self.shape.n_stream
            self._mask = self._input(self.path.mask_dtype, (n_kv, n // s, 1, s), "kq_mask")
        return self._mask.tensor

    def _rotation(self, n: int, name: str) -> GraphInput | None:
        return self._input(DType.F32, (n, n), name) if n else None
