"""Whether a KV cache can look at the cells of another one and read its tensors.

Source: spec kv_cache.md section 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pykv.errors import ParamError
from pykv.memory.hadamard import rotation_sizes

if TYPE_CHECKING:
    from pykv.ggml import Tensor
    from pykv.memory.kv_plan import KVPlan
    from pykv.memory.kv_store import KVStore


def shared_tensors(plan: KVPlan, other: KVStore | None) -> dict[int, tuple[Tensor, Tensor | None]]:
    """Return the K and V that layers read from the other cache.

    Raises
    ------
    ParamError : the other cache stores something else than these layers would.
    """
    if other is None:
        if plan.shared:
            raise ParamError("share: there is no other cache to share with")
        return {}
    _check_cells(plan, other)
    return {il: _tensors_for(plan, il, other, source) for il, source in plan.shared.items()}


def shared_rotation(plan: KVPlan, other: KVStore | None) -> tuple[int, int]:
    """Return the block sizes by which K and V are rotated, which all layers of a cache have in common.

    Raises
    ------
    ParamError : the layers that are read from the other cache are rotated by other blocks than the rest.
    """
    own = rotation_sizes(plan.spec, plan)
    if other is None or not plan.shared:
        return own
    theirs = (other.rot_k, other.rot_v)
    if plan.layers and own != theirs:
        raise ParamError(f"share: rotates K and V by blocks of {theirs}, the cache's own layers by {own}")
    return theirs


def _check_cells(plan: KVPlan, other: KVStore) -> None:
    # differs from llama.cpp: sizes must agree (there: the other's are taken, with a warning)
    # and what a verb on the cells means must be the same for both
    for mine_of, theirs_of, names in (
        (plan.settings, other.plan.settings, ("n_cells", "n_stream", "n_seq_max", "reference_moves")),
        (plan.spec, other.plan.spec, ("n_pos_per_embd", "absolute_positions")),
    ):
        for name in names:
            mine, theirs = getattr(mine_of, name), getattr(theirs_of, name)
            if mine != theirs:
                raise ParamError(f"{name}={mine} differs from the shared cache's {theirs}")


def _tensors_for(plan: KVPlan, il: int, other: KVStore, source: int) -> tuple[Tensor, Tensor | None]:
    k, v = other.tensors(source)
    for name, mine, theirs in (
        ("type_k", plan.type_k, k.dtype),
        ("type_v", plan.type_v, other.plan.type_v),
        ("v_trans", plan.settings.v_trans, other.v_trans),
    ):
        if mine != theirs:
            raise ParamError(f"share: {name} differs between layer {il} and the other cache's layer {source}")
    if not plan.spec.layers[il].fits(other.plan.spec.layers[source]):
        raise ParamError(f"share: layer {il} cannot read layer {source}, whose heads are different")
    return k, v
