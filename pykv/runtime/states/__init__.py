"""Saved states of a context: files and bytes, in llama.cpp's forms, with notes of pykv's own."""
