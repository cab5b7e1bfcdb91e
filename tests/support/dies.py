"""A worker that dies of what a wrong lifetime would cause."""

import ctypes

ctypes.string_at(0)
