"""Memories: what outlives batches. Built from a `MemorySpec`, never from a model."""

from pykv.memory.attention import AttentionPath, AttentionPlan
from pykv.memory.attention_mass import AttentionMass, MassWatch
from pykv.memory.base import Memory, MemoryContext, UpdateStatus
from pykv.memory.kv_cache import KVCache
from pykv.memory.kv_graph import KVGraph, KVShape
from pykv.memory.kv_plan import KVPlan
from pykv.memory.kv_settings import KV_TYPES, KVSettings
from pykv.memory.spec import LayerSpec, MemorySpec

__all__ = [
    "KV_TYPES",
    "AttentionMass",
    "AttentionPath",
    "AttentionPlan",
    "KVCache",
    "KVGraph",
    "KVPlan",
    "KVSettings",
    "KVShape",
    "LayerSpec",
    "MassWatch",
    "Memory",
    "MemoryContext",
    "MemorySpec",
    "UpdateStatus",
]
