"""No public member of a model, a context or what they give out is missing in an isolated one, unless declared."""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest

from pykv.cells import CellsView, RecurrentView
from pykv.memory import HybridMemory, ISWACache, KVCache, Memory
from pykv.memory.recurrent import RecurrentMemory
from pykv.memory.snapshot import Snapshot
from pykv.memory.twin import TwinCache
from pykv.runtime import Context, Model
from pykv.runtime.isolated import absent
from pykv.runtime.isolated.cells import IsolatedCells
from pykv.runtime.isolated.context import IsolatedContext
from pykv.runtime.isolated.given import IsolatedObserver, IsolatedSnapshot, IsolatedTrace
from pykv.runtime.isolated.memory import IsolatedMemory
from pykv.runtime.isolated.model import IsolatedModel
from pykv.runtime.observe import Observer
from pykv.runtime.trace import Trace

INHERITED = {
    Context: {"logits", "logits_at", "n_batch", "n_ctx", "n_ctx_seq", "__enter__", "__exit__"},
    Model: {"load", "tokenizer", "chat_template", "context", "fingerprint", "nbytes", "__enter__", "__exit__"},
}
"""Members that stand on nothing but what an isolated one has too."""

INNER = {
    Snapshot: {"fitting"},
    Observer: {"end", "widest", "watches", "hear"},
    Trace: {"end", "hear_decode"},
}
"""What serves contexts and memories in their own process."""


def members(kind: type) -> set[str]:
    """Return the public members of a class: its own, those of its bases, and the attributes that its code sets."""
    found = set(dir(kind)).union(*(assigned(each) | set(getattr(each, "__annotations__", {})) for each in kind.__mro__))
    special = {"__enter__", "__exit__", "__iter__", "__len__"}
    return {name for name in found if name in special or not name.startswith("_")}


def assigned(kind: type) -> set[str]:
    """Return the attributes that a class's `__init__` sets."""
    if not inspect.isfunction(vars(kind).get("__init__")):
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(vars(kind)["__init__"])))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


@pytest.mark.parametrize(
    ("kind", "isolated", "declared"),
    [
        (Model, IsolatedModel, absent.MODEL),
        (Memory, IsolatedMemory, absent.MEMORY),
        (KVCache, IsolatedMemory, absent.MEMORY),
        (ISWACache, IsolatedMemory, absent.MEMORY),
        (RecurrentMemory, IsolatedMemory, absent.MEMORY),
        (HybridMemory, IsolatedMemory, absent.MEMORY),
        (TwinCache, IsolatedMemory, absent.MEMORY),
        (Context, IsolatedContext, {}),
        (CellsView, IsolatedCells, {}),
        (RecurrentView, IsolatedCells, {}),
        (Snapshot, IsolatedSnapshot, {}),
        (Observer, IsolatedObserver, {}),
        (Trace, IsolatedTrace, {}),
    ],
)
def test_every_public_member_is_there_or_declared(kind: type, isolated: type, declared: dict[str, str]) -> None:
    own = {name for each in isolated.__mro__ if each not in kind.__mro__ for name in {*vars(each), *assigned(each)}}
    allowed = INHERITED.get(kind, set()) | INNER.get(kind, set()) | set(declared)
    missing = members(kind) - own - allowed
    assert not missing


@pytest.mark.parametrize(
    ("kind", "isolated"),
    [(Context, IsolatedContext), (Model, IsolatedModel), (KVCache, IsolatedMemory), (CellsView, IsolatedCells)],
)
def test_methods_take_the_same_arguments(kind: type, isolated: type) -> None:
    shared = [name for name in members(kind) & set(vars(isolated)) if inspect.isfunction(vars(isolated)[name])]
    assert shared
    for name in shared:
        theirs, ours = (list(inspect.signature(getattr(each, name)).parameters.values()) for each in (kind, isolated))
        assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs], name


def test_no_reason_is_left_over() -> None:
    """What is declared to be absent exists where memories are in this process, and not here."""
    kinds = (KVCache, ISWACache, RecurrentMemory, HybridMemory, TwinCache)
    there = set().union(*map(members, kinds))
    assert set(absent.MEMORY) - there == set()
    assert set(absent.MEMORY) & set(dir(IsolatedMemory)) == set()
    assert set(absent.MODEL) <= members(Model)
