"""What a context did, written down: a header, then every batch and verb, one JSON object a line."""

from pykv.runtime.trace.file import TraceFile, read_trace
from pykv.runtime.trace.header import TraceHeader
from pykv.runtime.trace.recording import Trace
from pykv.runtime.trace.step import DecodeStep, VerbStep

__all__ = ["DecodeStep", "Trace", "TraceFile", "TraceHeader", "VerbStep", "read_trace"]
