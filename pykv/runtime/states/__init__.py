"""Saved states of a context: files and bytes, in llama.cpp's forms, with notes of pykv's own."""

from pykv.runtime.states.compare import compare
from pykv.runtime.states.convert import convert
from pykv.runtime.states.describe import describe

__all__ = ["compare", "convert", "describe"]
