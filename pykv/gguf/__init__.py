"""GGUF files over ggml's own reader."""

from pykv.gguf.reader import GGUFFile, Metadata, MetadataValue, TensorInfo

__all__ = ["GGUFFile", "Metadata", "MetadataValue", "TensorInfo"]
