"""Saved states of a context: files and bytes, in llama.cpp's forms, with notes of pykv's own."""

from pykv.runtime.states.compare import compare
from pykv.runtime.states.convert import convert
from pykv.runtime.states.describe import describe
from pykv.runtime.states.saved_file import SavedFile, open_state

__all__ = ["SavedFile", "compare", "convert", "describe", "open_state"]
