"""Declare what pykv calls: read the prototypes in cdef/, hand cffi the C preamble that must agree with them.

The preamble includes ggml's own headers first and then the same function prototypes again, so that any
drift between the two is a compile error instead of a silently narrowed integer.
"""

from __future__ import annotations

import re
from pathlib import Path

import cffi

HERE = Path(__file__).resolve().parent
CDEFS = sorted((HERE / "cdef").glob("*.h"))


def prototypes(text: str) -> str:
    """Return the function prototypes of a cdef fragment, without enums, structs, macros and callbacks."""
    text = re.sub(r"^#define.*$", "", text, flags=re.M)
    text = re.sub(r"(enum|struct) \w+ \{.*?\};", "", text, flags=re.S)
    return "\n".join(s.strip() + ";" for s in text.split(";") if "(" in s and "extern" not in s)


def preamble() -> str:
    headers = ["ggml.h", "ggml-alloc.h", "ggml-backend.h", "ggml-cpu.h", "gguf.h"]
    headers += ["shim.h", "fused_attention.h", "fused_attention_op.h"]
    includes = "\n".join(f"#include <{name}>" for name in headers)
    return includes + "\n" + "\n".join(prototypes(path.read_text()) for path in CDEFS)


def make_ffi() -> cffi.FFI:
    ffi = cffi.FFI()
    for path in CDEFS:
        ffi.cdef(path.read_text())
    ffi.set_source("pykv._native._pykv", preamble(), py_limited_api=True)
    return ffi


ffibuilder = make_ffi()
