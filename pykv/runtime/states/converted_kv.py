"""Plans the conversion of one KV section: its streams, the order of V, element types and rotations."""

from __future__ import annotations

from collections.abc import Sequence

from pykv.errors import ParamError, StateError
from pykv.ggml import DType
from pykv.ggml.types import BY_NUMBER
from pykv.memory.state_arrange import Arranged, Share
from pykv.memory.state_convert import Form
from pykv.runtime.states.arrange import Aim, arrange_kv, n_without_owner
from pykv.runtime.states.conversion_plan import ConversionPlan, Wanted
from pykv.runtime.states.moved_rows import MovedRows, Taken
from pykv.runtime.states.read_state import (
    SAY_ROTATION,
    StoredRows,
    checked_rotation,
    filled,
    form_of,
    width_of,
)
from pykv.state_format import (
    KVLayout,
    KVSection,
    RowsRecord,
    StreamRecords,
    kv_section_head,
    kv_stream_heads,
)
from pykv.typing import AnyArray


class ConvertedKV:
    """One KV section of a source and what it becomes.

    Parameters
    ----------
    data : (n,) uint8, the source.
    """

    def __init__(self, section: KVSection, data: AnyArray, wanted: Wanted, plan: ConversionPlan) -> None:
        self._section, self._data = section, data
        self._wanted, self._plan = wanted, plan
        streams = filled(section)
        self._first = streams[0] if streams else None
        self._n_stream = wanted.n_stream or len(section.streams)
        shapes = {(tuple(map(width_of, one.k)), tuple(map(width_of, one.v))) for one in streams}
        if len(shapes) > 1:
            raise StateError("streams of one section with unlike tensors", offset=section.span.start)

    def add(self, aim: Aim) -> None:
        """Put the section's bytes into the plan, and say what is changed."""
        self._note_streams(aim)
        self._plan.pieces.append(kv_section_head(self._n_stream))
        by_channel = self._by_channel()
        for arranged in arrange_kv(self._section, aim, self._n_stream):
            self._add_stream(arranged, by_channel)

    def _note_streams(self, aim: Aim) -> None:
        n_before, n_free = len(self._section.streams), n_without_owner(self._section)
        if self._n_stream != n_before:
            self._plan.note(f"{n_before} {'stream' if n_before == 1 else 'streams'} → {self._n_stream}")
            if n_free and self._n_stream > 1 and aim.number is None:
                self._plan.note(
                    f"{n_free} {'cell' if n_free == 1 else 'cells'} of no sequence left out", is_lossless=False
                )

    def _by_channel(self) -> bool:
        """Return whether V of the result lies by channel."""
        if self._first is None:
            return False
        have, asked = bool(self._first.v_trans), self._wanted.by_channel
        in_blocks = self._v_in_blocks()
        if in_blocks and asked:
            raise ParamError(
                f"v_layout=channel: {in_blocks.label} is stored in blocks, which lie by cell; leave it out"
            )
        want = False if in_blocks else have if asked is None else asked
        if want != have and self._first.v:
            self._plan.note(f"V by {_order(have)} → by {_order(want)}")
        return want

    def _v_in_blocks(self) -> DType | None:
        """Return a type of V in the result that stores blocks, if there is one."""
        types = (self._type(rows, is_v=True) for stream in filled(self._section) for rows in stream.v)
        return next((dtype for dtype in types if dtype.block_size > 1), None)

    def _add_stream(self, arranged: Arranged, by_channel: bool) -> None:
        k = self._moved(arranged.shares, is_v=False, by_channel=False)
        v = self._moved(arranged.shares, is_v=True, by_channel=by_channel)
        layout = KVLayout(
            n_stream=self._n_stream,
            n_cells=arranged.cells.n,
            n_seq_max=arranged.cells.n,
            k=tuple(one.layout for one in k),
            v=tuple(one.layout for one in v),
            v_trans=by_channel,
            rot=(self._rotation(k, is_v=False), self._rotation(v, is_v=True)),
            has_ext=arranged.cells.ext is not None,
        )
        heads = kv_stream_heads(arranged.cells, layout, self._plan.dialect)
        self._plan.pieces.append(heads.first)
        for head, moved in zip(heads.rows, k + v if heads.rows else (), strict=True):
            self._plan.pieces += [head, moved]

    def _rotation(self, moved: Sequence[MovedRows], *, is_v: bool) -> int:
        """Return the width that the result says; of tensors that are not there, that of the source."""
        if moved:
            return moved[0].form.rot
        return (self._first.rot or (0, 0))[is_v] if self._first else 0

    def _moved(self, shares: Sequence[Share], *, is_v: bool, by_channel: bool) -> list[MovedRows]:
        """Return all tensors of K, or of V, of one stream of the result."""
        streams = [self._section.streams[share.stream] for share in shares]
        columns = zip(*((one.v if is_v else one.k) for one in streams), strict=True)
        return [self._one_moved(records, streams, shares, is_v, by_channel) for records in columns]

    def _one_moved(
        self,
        records: Sequence[RowsRecord],
        streams: Sequence[StreamRecords],
        shares: Sequence[Share],
        is_v: bool,
        by_channel: bool,
    ) -> MovedRows:
        forms = [self._have(record, one, is_v) for record, one in zip(records, streams, strict=True)]
        moved = MovedRows([], self._want(records[0], forms[0], is_v), by_channel)
        moved.sources = [
            Taken(StoredRows(record, one.cells.n, form, self._data), share.picked)
            for record, one, form, share in zip(records, streams, forms, shares, strict=True)
        ]
        for have in forms:
            if have != moved.form:
                self._plan.moved.setdefault(_changed("KV"[is_v], have, moved.form), []).append(moved)
        return moved

    def _have(self, rows: RowsRecord, stream: StreamRecords, is_v: bool) -> Form:
        given, is_kept = self._wanted.rotation, self._type(rows, is_v) == rows.dtype
        if given is None and is_kept and not self._plan.dialect.says_rotation:
            given = (0, 0)  # whatever it is, it stays so
        if given is not None and stream.rot is None and BY_NUMBER[rows.dtype].is_quantized:
            self._plan.uses_rotation = True
        return form_of(rows, stream, is_v, given)

    def _type(self, rows: RowsRecord, is_v: bool) -> DType:
        """Return the element type of the result."""
        asked = self._wanted.types[is_v]
        return BY_NUMBER[rows.dtype] if asked is None else asked

    def _want(self, rows: RowsRecord, have: Form, is_v: bool) -> Form:
        """Return how the result stores rows: only quantised ones are rotated."""
        dtype, given = self._type(rows, is_v), self._wanted.rotation
        if width_of(rows) % dtype.block_size:
            option = f"type_{'kv'[is_v]}={dtype.label}"
            raise ParamError(f"{option}: rows of {width_of(rows)} elements are no whole blocks of {dtype.block_size}")
        if dtype.is_quantized and given is not None:
            self._plan.uses_rotation = True
            return Form(dtype, checked_rotation(given[is_v], rows))
        if dtype == have.dtype:
            return have
        if not dtype.is_quantized:
            return Form(dtype)
        if not have.dtype.is_quantized:
            name = "KV"[is_v]
            raise ParamError(
                f"{name} {have.dtype.label} → {dtype.label}: who reads it expects it rotated; {SAY_ROTATION}"
            )
        return Form(dtype, have.rot)


def _order(by_channel: bool) -> str:
    return "channel" if by_channel else "cell"


def _changed(name: str, have: Form, want: Form) -> str:
    if have.dtype != want.dtype:
        return f"{name} {have.dtype.label} → {want.dtype.label}"
    return f"{name} rotated by {have.rot} → {want.rot}"
