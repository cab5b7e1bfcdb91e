"""GGUF files over ggml's own reader."""

from pykv.gguf.metadata import Metadata, MetadataValue
from pykv.gguf.reader import GGUFFile, TensorInfo

__all__ = ["GGUFFile", "Metadata", "MetadataValue", "TensorInfo"]
