"""Arena: a ggml context that holds tensor headers, never data, with a budget that cannot be overrun.

It also knows what its tensors stand on: operands borrowed from other arenas, and who gave them memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pykv._native import ffi, lib
from pykv.errors import TensorError, UseAfterCloseError
from pykv.ggml.grant import Grant
from pykv.ggml.owner import Owner
from pykv.ggml.pools import pool
from pykv.ggml.row_index import RowIndex
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType

if TYPE_CHECKING:
    from pykv.ggml.buffer import Buffer

_MAX_COUNT = 2**31 - 1  # ggml counts nodes in an int
_ALIGNMENT = 64


class Arena(Owner):
    """Room for `n_tensors` tensor headers and, if `graph_size` is given, one graph of that many nodes.

    Tensors keep their arena alive. ggml would end the process when its pool overflows; an arena raises.

    With `is_repacked` its tensors are matrices for memory that lays them out anew (`Device.repack_type`): they can
    be multiplied with, and nothing else can read them.

    Attributes
    ----------
    n_used : tensors made so far.
    epoch : how often `reset` was called; tensors of an earlier one are gone.
    has_graph : whether its one graph was made.
    grant : the scheduler's memory that tensors outside buffers lie in, None before there is one.
    """

    def __init__(self, n_tensors: int, graph_size: int = 0, *, is_repacked: bool = False) -> None:
        if not 1 <= n_tensors <= _MAX_COUNT or not 0 <= graph_size <= _MAX_COUNT:
            raise TensorError(f"n_tensors={n_tensors} and graph_size={graph_size} must lie in 1..{_MAX_COUNT}")
        if is_repacked and graph_size:
            raise TensorError(f"graph_size={graph_size}: an arena of repacked matrices holds no graph")
        n_bytes = n_tensors * lib.ggml_tensor_overhead()
        if graph_size:
            n_bytes += lib.ggml_graph_overhead_custom(graph_size, False)
        memory = pool(n_bytes + _ALIGNMENT, f"an arena of {n_tensors} tensors")
        start = -int(ffi.cast("uintptr_t", memory)) % _ALIGNMENT
        params = {"mem_size": n_bytes, "mem_buffer": memory + start, "no_alloc": True}

        def free(context: Any, memory: Any = memory) -> None:
            # the memory is named here to outlive the context
            lib.ggml_free(context)

        self.n_tensors, self.graph_size, self.epoch = n_tensors, graph_size, 0
        self.is_repacked = is_repacked
        self._clear()
        self._own(lib.ggml_init(ffi.new("struct ggml_init_params *", params)[0]), free)

    def _clear(self) -> None:
        self.n_used = self.n_leaves = self.n_placed = 0
        self.has_graph = False
        self.grant: Grant | None = None
        self._n_allocated = 0
        self._buffers: list[weakref.ref[Buffer]] = []
        self._borrowed: dict[Tensor, None] = {}
        self._indices: dict[RowIndex, None] = {}
        self._kept: list[Any] = []

    # tensors

    def tensor(self, dtype: DType, ne: Sequence[int], name: str = "") -> Tensor:
        """Return a new tensor without data, `[ne0, ne1, ne2, ne3]`, trailing ones left out at will.

        Raises
        ------
        TensorError : a dim below one, more than four dims, more bytes than an int64 counts, or a first dim that is
            no whole number of blocks.
        """
        if not 1 <= len(ne) <= 4 or min(ne) < 1:
            raise TensorError(f"ne={list(ne)}: one to four dims, each at least 1")
        dtype.check_size(ne)
        self._check_room()
        raw = lib.ggml_new_tensor(self.ptr, dtype, len(ne), ffi.new("int64_t[4]", list(ne)))
        self.n_used += 1
        self.n_leaves += 1
        tensor = Tensor(raw, self)
        return tensor.named(name) if name else tensor

    def node(
        self,
        function: Callable[..., Any],
        operands: Sequence[Tensor | None],
        *numbers: float,
        view_of: Tensor | None = None,
        n_nodes: int = 1,
        matrix: Tensor | None = None,
    ) -> Tensor:
        """Return the tensor that a C function of ggml makes of operands, then numbers. The operands were checked.

        `view_of` is the operand whose memory the result shares, `n_nodes` how many tensors the function makes,
        `matrix` the operand that it multiplies with, which alone may be repacked.

        Raises
        ------
        TensorError : the arena is full, or an operand is repacked or computed in another arena.
        """
        pointers = [ffi.NULL if operand is None else operand.ptr for operand in operands]
        self._check_room(n_nodes)
        if self.is_repacked:
            raise TensorError("an arena of repacked matrices holds nothing that is computed")
        for operand in operands:
            if operand is not None and operand.arena is not self:
                if operand is not matrix:
                    operand.check_layout()
                self.borrow(operand)
        raw = function(self.ptr, *pointers, *numbers)
        self.n_used += n_nodes
        return Tensor(raw, self, view_of, is_node=True)

    def reset(self) -> None:
        """Forget all tensors and the graph, keep the memory. Tensors made before refuse further use."""
        lib.ggml_reset(self.ptr)
        self.epoch += 1
        self._clear()

    def keep(self, data: Any) -> None:
        """Keep C data that nodes here point to, until `reset`."""
        self._kept.append(data)

    def _check_room(self, n: int = 1) -> None:
        if self.n_used + n > self.n_tensors:
            raise TensorError(f"the arena is full: its budget is {self.n_tensors} tensors")

    # what the tensors stand on

    def borrow(self, tensor: Tensor) -> None:
        """Note that nodes here read a tensor of another arena; keeps it alive.

        Raises
        ------
        TensorError : it is computed there; the nodes of a graph share one arena.
        """
        if tensor.is_node:
            raise TensorError(f"{tensor!r} is computed in another arena; all nodes of a graph share one")
        self._borrowed[tensor] = None

    def note_index(self, index: Tensor, n_rows: int) -> None:
        """Note that nodes here read rows by a tensor's values, which must lie below `n_rows`; computed ones do."""
        home = index.base or index
        if home.is_node:
            return
        if home.row_index is None:
            home.row_index = RowIndex(home, n_rows)
            home.as_output()  # or a scheduler would use its memory for other values
        home.row_index.below = min(home.row_index.below, n_rows)
        self._indices[home.row_index] = None

    @property
    def indices(self) -> tuple[RowIndex, ...]:
        """What names rows that nodes here read or write."""
        return tuple(self._indices)

    @property
    def n_borrowed(self) -> int:
        """Tensors of other arenas that nodes here read."""
        return len(self._borrowed)

    def check_borrowed(self) -> list[Owner]:
        """Return the arenas and buffers of everything borrowed, and the buffers here.

        Raises
        ------
        UseAfterCloseError : one of them is closed.
        TensorError : a borrowed tensor has no data.
        """
        lenders = dict.fromkeys(tensor.arena for tensor in self._borrowed)
        incomplete = [arena for arena in lenders if arena.n_placed < arena.n_used]
        for tensor in self._borrowed:
            _ = tensor.ptr
            if tensor.arena in incomplete:
                tensor.check_data()
        buffers = [buffer for arena in (self, *lenders) for buffer in arena.open_buffers()]
        return [*lenders, *buffers]

    def note_buffer(self, buffer: Buffer) -> None:
        """Note a buffer that holds, or will hold, data of tensors here. Does not keep it alive."""
        self._buffers.append(weakref.ref(buffer))

    def note_allocated(self) -> None:
        """Note that all tensors made so far have their data in buffers."""
        self.n_placed = self._n_allocated = self.n_used

    def open_buffers(self) -> list[Buffer]:
        """Return the buffers noted.

        Raises
        ------
        UseAfterCloseError : one of them is closed or gone.
        """
        found = []
        for ref in self._buffers:
            buffer = ref()
            if buffer is None or buffer.closed:
                raise UseAfterCloseError("the buffer that holds the arena's tensors is closed")
            found.append(buffer)
        return found

    def check_home(self, tensor: Tensor) -> None:
        """Raise unless the memory of a tensor made here is still there.

        Raises
        ------
        UseAfterCloseError : its buffer or scheduler is closed.
        TensorError : the scheduler has given the memory away.
        """
        self.open_buffers()
        grant = self.grant_of(tensor)
        if grant is not None:
            grant.check()

    def grant_of(self, tensor: Tensor) -> Grant | None:
        """Return what a scheduler has promised of the memory of a tensor made here, None if it lies in a buffer."""
        in_buffer = tensor.owner is not None or tensor.index < self._n_allocated
        return None if in_buffer else self.grant
