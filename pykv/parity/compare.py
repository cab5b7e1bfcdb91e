"""Compare: runs a program on several devices in step, and tells how far they lie apart."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

from pykv.errors import ParamError
from pykv.gguf import GGUFFile
from pykv.parity import program as programs
from pykv.parity.distances import Distances
from pykv.parity.program import Decode, Program
from pykv.parity.report import ParityReport
from pykv.parity.side import Side
from pykv.parity.tolerance import limit
from pykv.runtime.trace.file import read_trace

N_UBATCH, OTHER_UBATCH = 64, 24
"""Tokens at once on every device, and on the reference once more: what another split of the same batch changes."""

_PAD = 256


def compare(
    path: str | bytes | os.PathLike[str],
    devices: Sequence[str],
    *,
    tokens: Sequence[int] | None = None,
    trace: str | os.PathLike[str] | None = None,
    tolerance: float | None = None,
    on_step: Callable[[int, int], None] | None = None,
    **params: Any,
) -> ParityReport:
    """Run the same tokens, verbs and shifts on several devices, and compare each with the first.

    After each step K, V and states are compared by sequence and position, and what attention gave and the logits
    token by token. The reference runs once more with other ubatches, which shows what rounding alone makes.

    Parameters
    ----------
    path : the GGUF file. Its matrices are used as they are in it, nothing is repacked.
    devices : names as of `Model.load`, the reference first; "A+B" shares the layers out over two.
    tokens : what is said; None = ids from all over the vocabulary, always the same.
    trace : a recorded trace that is run instead of the program that is made up.
    tolerance : NMSE up to which a difference is rounding; None = what the types of weights, K and V explain.
    on_step : called with steps done and all there are.
    params : of the contexts, see `Model.context`. Sizes follow from the program unless they are given.

    Raises
    ------
    ParamError : less than two devices, an argument that is none, or a trace that cannot be run here.
    GGUFError, TraceError, AllocError, UnsupportedOpError : as loading and decoding raise them.
    BackendLost : a remote device has gone.
    """
    names = _names(devices)
    if tokens is not None and trace is not None:
        raise ParamError("tokens: the trace says already what is decoded; give one of the two")
    with ExitStack() as stack:

        def side(name: str, device: str, **more: Any) -> Side:
            return stack.enter_context(closing(Side(name, path, device.split("+"), {**settings, **more})))

        program, settings = _program(path, names[0], tokens, trace, params)
        reference = side(names[0], names[0])
        split = side(f"{names[0]}, {OTHER_UBATCH} at once", names[0], n_ubatch=OTHER_UBATCH)
        others = [side(name, name) for name in names[1:]]
        distances = [Distances() for _ in (split, *others)]
        for number, step in enumerate(program, start=1):
            expected = reference.do(step)
            for one, found in zip((split, *others), distances, strict=True):
                found.compare(number, str(step), expected, one.do(step))
            if on_step is not None:
                on_step(number, len(program))
        most = _limit(tolerance, path, reference)
        reports = [
            found.report(one.name, one.attention, most, None if one is split else distances[0])
            for one, found in zip((split, *others), distances, strict=True)
        ]
        return ParityReport(reference.name, len(program), reports[0], tuple(reports[1:]))


def _names(devices: object) -> list[str]:
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not all(isinstance(d, str) for d in devices):
        raise ParamError(f"devices={devices!r} must be a list of names of devices")
    if len(devices) < 2:
        raise ParamError(f"devices={list(devices)} must be at least two: the first is what the others are held against")
    return list(devices)


def _program(
    path: str | bytes | os.PathLike[str],
    device: str,
    tokens: Sequence[int] | None,
    trace: str | os.PathLike[str] | None,
    params: dict[str, Any],
) -> tuple[Program, dict[str, Any]]:
    """Return what is done, and the contexts that it is done in."""
    small = {"n_ctx": _PAD, "n_seq_max": programs.N_SEQ, "n_ubatch": N_UBATCH, **params}
    probe = Side(device, path, device.split("+"), {**small, "n_ctx": _PAD})
    with closing(probe):
        n_vocab = probe.model.hparams.n_vocab
        if trace is None:
            can_shift = bool(probe.context.memory.can_shift())
            program = programs.made_up(probe.spec, can_shift, n_vocab, tokens)
            n_tokens = sum(len(step.tokens) for step in program if isinstance(step, Decode))
            return program, {**small, "n_ctx": params.get("n_ctx", 2 * n_tokens)}
    file = read_trace(trace)
    asked = file.header.params
    settings: dict[str, Any] = {"n_ctx": asked.n_ctx, "n_seq_max": asked.n_seq_max, "kv_unified": asked.kv_unified}
    settings |= {"type_k": asked.type_k, "type_v": asked.type_v, "swa_full": asked.swa_full, "n_rs_seq": asked.n_rs_seq}
    return programs.recorded(file, n_vocab), {**settings, "n_ubatch": N_UBATCH, **params}


def _limit(tolerance: float | None, path: str | bytes | os.PathLike[str], reference: Side) -> float:
    if tolerance is not None:
        if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not tolerance >= 0:
            raise ParamError(f"tolerance={tolerance!r} must be a number, not negative")
        return float(tolerance)
    with GGUFFile(path) as file:
        matrices = {info.dtype for info in file.tensors.values() if info.ne[1] > 1}
    resolved = reference.context.params
    return limit(matrices, resolved.type_k, resolved.type_v)
