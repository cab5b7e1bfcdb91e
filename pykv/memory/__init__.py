"""Memories: what outlives batches. Built from a `MemorySpec`, never from a model."""

from pykv.memory.attention import AttentionPath, AttentionPlan
from pykv.memory.attention_mass import AttentionMass, MassWatch
from pykv.memory.base import Memory, MemoryContext, UpdateStatus
from pykv.memory.device_support import KVSupport, device_support
from pykv.memory.hybrid import HybridMemory
from pykv.memory.iswa import ISWACache
from pykv.memory.kinds import MemoryPlan, MemorySettings, make_memory, memory_plan
from pykv.memory.kv_cache import KVCache
from pykv.memory.kv_graph import KVGraph, KVShape
from pykv.memory.kv_plan import KVPlan
from pykv.memory.kv_settings import KV_TYPES, KVSettings
from pykv.memory.recurrent import RecurrentMemory
from pykv.memory.resumable import Resumable
from pykv.memory.snapshot import Snapshot
from pykv.memory.spec import LayerSpec, MemorySpec, StateSpec
from pykv.memory.state_files import StateImage
from pykv.memory.state_part import Converted

__all__ = [
    "KV_TYPES",
    "AttentionMass",
    "AttentionPath",
    "AttentionPlan",
    "Converted",
    "HybridMemory",
    "ISWACache",
    "KVCache",
    "KVGraph",
    "KVPlan",
    "KVSettings",
    "KVShape",
    "KVSupport",
    "LayerSpec",
    "MassWatch",
    "Memory",
    "MemoryContext",
    "MemoryPlan",
    "MemorySettings",
    "MemorySpec",
    "RecurrentMemory",
    "Resumable",
    "Snapshot",
    "StateImage",
    "StateSpec",
    "UpdateStatus",
    "device_support",
    "make_memory",
    "memory_plan",
]
