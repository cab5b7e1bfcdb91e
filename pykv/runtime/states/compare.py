"""Two saved states compared without a model: who is in them, and how far their rows are apart."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pykv.errors import ParamError, StateError
from pykv.ggml.types import BY_NUMBER
from pykv.memory.state_convert import Form
from pykv.memory.state_runs import chunks
from pykv.runtime.states.comparison import CellsApart, Comparison, TensorApart, TokensApart, Two
from pykv.runtime.states.examine import Examined, examined
from pykv.runtime.states.matched_cells import Pairs, match, places
from pykv.runtime.states.read_state import (
    ReadState,
    Rotation,
    StoredRows,
    cells_of,
    checked_widths,
    filled,
    form_of,
    width_of,
)
from pykv.runtime.states.saved_file import named
from pykv.state_format import KVSection, RowsRecord, Section, StreamRecords, type_name
from pykv.typing import AnyArray, F32Array

OnProgress = Callable[[int, int], object]
"""Takes the tensors that are done, and all."""


def compare(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    seq_id: int | None = None,
    rotation: Rotation | None = None,
    on_progress: OnProgress | None = None,
) -> Comparison:
    """Compare two saved states, row by row by sequence and position.

    One sequence's state is compared with that sequence in a state of all, and the others there are a difference; of two
    sequences' states, numbers do not matter.

    Parameters
    ----------
    seq_id : which sequence of a state of all is compared, and no other: the rest is left out on both sides.
    rotation : by which widths quantised K and V are rotated, in a state that does not say so.

    Raises
    ------
    ParamError : no such sequence, or something must be said.
    StateError : one of them is no saved state, or ends early. Checksums that do not fit are a warning.
    OSError : one of them cannot be read.
    """
    given = checked_widths(rotation)
    with examined(first) as one, examined(second) as other:
        for path, found in ((first, one), (second, other)):
            if found.is_cut:
                raise named(StateError(found.faults[0].what, offset=found.faults[0].offset), path)
        compared = _Compared((one.state, other.state), seq_id, given, tuple(map(os.fsdecode, (first, second))))
        result = compared.result(on_progress or _ignore)
        result.warnings += _warnings((first, one), (second, other))
        if given is not None and not any(map(_needs_rotation, (one.state, other.state))):
            result.warnings.append(f"rotation={given[0]},{given[1]}: not needed, both files say it or store no blocks")
        return result


def _warnings(*pairs: tuple[str | os.PathLike[str], Examined]) -> Iterator[str]:
    for path, found in pairs:
        yield from (str(named(StateError(fault.what), path)) for fault in found.faults)


def _needs_rotation(state: ReadState) -> bool:
    """Return whether rows may be rotated by widths that the state does not say."""
    streams = (stream for section in state.sections if isinstance(section, KVSection) for stream in filled(section))
    return any(one.rot is None and any(BY_NUMBER[rows.dtype].is_quantized for rows in one.k + one.v) for one in streams)


class _Tensor(NamedTuple):
    section: str
    kind: str
    layer: int
    pairs: Sequence[Pairs]
    sections: tuple[Section, Section]


_Stored = tuple[RowsRecord, StreamRecords | None, int]
"""A tensor's record, its stream if it is one of K or V, and its rows."""


class _Compared:
    """Two states, and what has been found out about them."""

    def __init__(
        self,
        states: tuple[ReadState, ReadState],
        seq_id: int | None,
        rotation: Rotation | None,
        paths: tuple[str, ...],
    ) -> None:
        self._states, self._paths = states, paths
        self._data = states[0].data, states[1].data
        self._rotation = rotation
        self._only = _only(states, seq_id, paths)
        self._found = Comparison(seq_id=seq_id)
        if seq_id is None and self._only is not None:
            self._found.differences += _others(states, self._only)

    def result(self, on_progress: OnProgress) -> Comparison:
        """Compare everything."""
        self._compare_heads()
        tensors: list[_Tensor] = []
        one, other = self._states
        if one.names != other.names:
            names = (", ".join(state.names) for state in self._states)
            self._found.differences.append(Two("sections", *names))
        else:
            for name, *pair in zip(one.names, one.sections, other.sections, strict=True):
                tensors += self._compare_cells(name, (pair[0], pair[1]))
        for i, tensor in enumerate(tensors):
            self._found.tensors.append(self._compare_rows(tensor))
            on_progress(i + 1, len(tensors))
        return self._found

    def _compare_heads(self) -> None:
        a, b = (state.saved.container for state in self._states)
        otherwise = self._found.stored_otherwise
        for what, x, y in (("kind", a.kind.value, b.kind.value), ("dialect", *map(_dialect, self._states))):
            if x != y:
                otherwise.append(Two(what, x, y))
        if a.arch is not None and b.arch is not None and a.arch != b.arch:
            self._found.differences.append(Two("architecture", a.arch, b.arch))
        if a.tokens is not None and b.tokens is not None:
            n = min(a.tokens.size, b.tokens.size)
            unlike = np.flatnonzero(a.tokens[:n] != b.tokens[:n])
            if unlike.size or a.tokens.size != b.tokens.size:
                at = int(unlike[0]) if unlike.size else n
                self._found.tokens = TokensApart((a.tokens.size, b.tokens.size), unlike.size, at)

    def _compare_cells(self, name: str, sections: tuple[Section, Section]) -> Iterator[_Tensor]:
        """Compare who is there; yield the tensors whose rows can be compared."""
        found = [
            places(section, is_whole=state.is_whole, only=self._only)
            for section, state in zip(sections, self._states, strict=True)
        ]
        matched = match(found[0], found[1])
        n_cells = found[0].n_cells, found[1].n_cells
        apart = CellsApart(name, n_cells, matched.n_both, matched.only, matched.n_ext_differ)
        self._found.cells.append(apart)
        self._found.stored_otherwise += _forms(name, sections)
        if not matched.pairs:
            return
        tensors = [_tensors(section) for section in sections]
        for kind in tensors[0]:
            widths = [tuple(width_of(rows) for rows in one[kind]) for one in tensors]
            if widths[0] != widths[1]:
                self._found.differences.append(Two(f"{name}: widths of {kind}", *(_spelt(each) for each in widths)))
                continue
            for layer, width in enumerate(widths[0]):
                if width:
                    yield _Tensor(name, kind, layer, matched.pairs, sections)

    def _compare_rows(self, tensor: _Tensor) -> TensorApart:
        tally = _Tally()
        for pairs in tensor.pairs:
            one, other = self._stored(tensor, pairs)
            tally.add(one, other, pairs)
        return TensorApart(
            tensor.section, tensor.kind, tensor.layer, tally.n_rows, tally.n_differ, tally.nmse, tally.max_abs
        )

    def _stored(self, tensor: _Tensor, pairs: Pairs) -> tuple[StoredRows, StoredRows]:
        """Return one tensor of a stream of each state."""
        a, b = (
            _one_tensor(section, stream, tensor) for section, stream in zip(tensor.sections, pairs.streams, strict=True)
        )
        forms = self._forms(a, b, tensor.kind == "V")
        one = StoredRows(a[0], a[2], forms[0], self._data[0])
        return one, StoredRows(b[0], b[2], forms[1], self._data[1])

    def _forms(self, a: _Stored, b: _Stored, is_v: bool) -> tuple[Form, Form]:
        """Return what both rows mean. If both are quantised, one that does not say its rotation has the other's."""
        if a[1] is None or b[1] is None:
            return Form(BY_NUMBER[a[0].dtype]), Form(BY_NUMBER[b[0].dtype])
        given = self._rotation
        if given is None and all(BY_NUMBER[one[0].dtype].is_quantized for one in (a, b)):
            given = a[1].rot or b[1].rot or (0, 0)
        one, other = self._paths
        return form_of(a[0], a[1], is_v, given, one), form_of(b[0], b[1], is_v, given, other)


@dataclass
class _Tally:
    """Distances of rows, added up."""

    n_rows: int = 0
    n_differ: int = 0
    max_abs: float = 0.0
    off: float = 0.0
    size: float = 0.0

    @property
    def nmse(self) -> float:
        if self.off == 0:
            return 0.0
        return self.off / self.size if 0 < self.size < np.inf else np.inf

    def add(self, one: StoredRows, other: StoredRows, pairs: Pairs) -> None:
        """Compare rows, chunk by chunk."""
        for a, b in chunks(0, pairs.rows[0].size, 4 * one.width):
            raws = one.raw(pairs.rows[0][a:b]), other.raw(pairs.rows[1][a:b])
            self.n_rows += b - a
            is_like = one.form == other.form
            if is_like:
                self.n_differ += int((raws[0] != raws[1]).any(axis=1).sum())
            x, y = one.form.values(raws[0]), other.form.values(raws[1])
            distance = _distance(x, y)
            self.n_differ += 0 if is_like else int(distance.any(axis=1).sum())
            self.max_abs = max(self.max_abs, float(distance.max(initial=0.0)))
            with np.errstate(all="ignore"):
                self.off += float(np.square(distance).sum())
                self.size += float(np.square(x, dtype=np.float64).sum())


def _distance(x: F32Array, y: F32Array) -> AnyArray:
    """Return (k, width) distances: 0 where both are the same or no number, infinite where only one is none."""
    with np.errstate(all="ignore"):
        distance = np.abs(x.astype(np.float64) - y)
    distance[(x == y) | (np.isnan(x) & np.isnan(y))] = 0
    distance[np.isnan(distance)] = np.inf
    return distance


def _only(states: tuple[ReadState, ReadState], seq_id: int | None, paths: tuple[str, ...]) -> int | None:
    """Return the only sequence that is compared; None = all."""
    pairs = list(zip(states, paths, strict=True))
    wholes = [(state, path) for state, path in pairs if state.is_whole]
    if seq_id is not None and not wholes:
        raise ParamError(f"seq_id={seq_id}: {paths[0]} and {paths[1]} hold one sequence each; leave it out")
    if len(wholes) == 1 and seq_id is None:
        single, path = next((state, path) for state, path in pairs if not state.is_whole)
        candidates = single.sequences() or wholes[0][0].sequences()
        if len(candidates) != 1:
            there = _numbers(wholes[0][0])
            raise ParamError(
                f"seq_id: {path} does not say which sequence it is of; say it: {wholes[0][1]} holds {there}"
            )
        seq_id = candidates[0]
    for state, path in wholes if seq_id is not None else ():
        if seq_id not in state.sequences():
            raise ParamError(f"seq_id={seq_id}: no such sequence; {path} holds {_numbers(state)}")
    return seq_id


def _others(states: tuple[ReadState, ReadState], seq_id: int) -> Iterator[Two]:
    """Yield what a state of all holds beside the one sequence that it is compared in."""
    told = [_numbers(state) if state.is_whole else str(seq_id) for state in states]
    if told[0] != told[1]:
        yield Two("sequences", *told)


def _numbers(state: ReadState) -> str:
    return ", ".join(map(str, state.sequences())) or "none"


def _dialect(state: ReadState) -> str:
    return str(state.dialect)


def _forms(name: str, sections: tuple[Section, Section]) -> Iterator[Two]:
    """Yield how two sections store otherwise what may be the same."""
    told = [_form(section) for section in sections]
    for what in told[0]:
        if told[0][what] != told[1].get(what):
            yield Two(f"{name}: {what}", told[0][what], told[1].get(what, ""))


def _form(section: Section) -> dict[str, str]:
    if not isinstance(section, KVSection):
        return {}
    stream = next(iter(filled(section)), None)
    told = {"streams": str(len(section.streams))}
    if stream is not None:
        told |= {"K": _types(stream.k), "V": _types(stream.v)}
        told["V lies by"] = "channel" if stream.v_trans else "cell"
        told["rotation of K and V"] = "not said" if stream.rot is None else f"{stream.rot[0]}, {stream.rot[1]}"
    return told


def _types(rows: Sequence[RowsRecord]) -> str:
    return ", ".join(sorted({type_name(one.dtype) for one in rows})) or "none"


def _spelt(widths: Sequence[int]) -> str:
    if widths and len(set(widths)) == 1:
        return f"{len(widths)} of {widths[0]}"
    return ", ".join(map(str, widths)) or "none"


def _tensors(section: Section) -> dict[str, tuple[RowsRecord, ...]]:
    if isinstance(section, KVSection):
        stream = filled(section)[0]
        return {"K": stream.k, "V": stream.v}
    return {"R": section.r, "S": section.s}


def _one_tensor(section: Section, stream: int, tensor: _Tensor) -> _Stored:
    """Return a tensor's record, its stream if it is one of K or V, and its rows."""
    if isinstance(section, KVSection):
        found = section.streams[stream]
        return (found.v if tensor.kind == "V" else found.k)[tensor.layer], found, found.cells.n
    return (section.s if tensor.kind == "S" else section.r)[tensor.layer], None, cells_of(section)[0].n


def _ignore(n_done: int, n_all: int) -> None:
    return
