"""Everything pykv raises on purpose.

Each error is also the builtin that a caller would guess, so ``except ValueError`` works without knowing pykv.
A message names the argument, the value it had and the limit it broke; when one is raised, nothing has changed.
"""

from __future__ import annotations


class PykvError(Exception):
    """Base of all errors raised by pykv."""


class ParamError(PykvError, ValueError):
    """A parameter of a model, context or memory that cannot be honoured."""


class BatchError(PykvError, ValueError):
    """A batch that is malformed or does not continue what is stored.

    Attributes
    ----------
    seq_id : the sequence at fault, or None where no single one is.
    last : last stored position of that sequence (-1 = empty), or None.
    first : first offered position of that sequence, or None.
    """

    def __init__(
        self, message: str, *, seq_id: int | None = None, last: int | None = None, first: int | None = None
    ) -> None:
        super().__init__(message)
        self.seq_id = seq_id
        self.last = last
        self.first = first


class SequenceError(PykvError, IndexError, ValueError):
    """A sequence id outside the ids that this memory accepts."""


class NoSlotError(PykvError, RuntimeError):
    """No free cells for the batch; the memory is byte for byte as before. A smaller batch may fit."""


class ContextLengthExceeded(NoSlotError, ValueError):
    """More tokens than a sequence's share of the context can ever hold; no smaller batch helps."""


class ShiftUnsupported(PykvError, NotImplementedError):
    """Positions cannot be moved.

    Attributes
    ----------
    reason : why, as one word: "multi_dim_positions", "absolute_positions", "shared_cells",
        "recurrent_state".
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"positions cannot be moved ({reason}): {detail}")
        self.reason = reason


class GGUFError(PykvError, ValueError):
    """A GGUF file that cannot be read, or lacks or mistypes something."""


class UnknownArchitectureError(GGUFError):
    """A model family that pykv does not build; the message lists those it does."""


class TokenizerError(PykvError, ValueError):
    """A vocabulary or a token id that cannot be used."""


class ChatTemplateError(PykvError, ValueError):
    """A chat template that is missing, broken, or refuses the messages."""


class ComputeError(PykvError, RuntimeError):
    """The backend failed while computing a graph."""


class ComputeCancelled(PykvError, RuntimeError):
    """The caller cancelled the computation; the memory is as after the last whole ubatch."""


class UnsupportedOpError(PykvError, NotImplementedError):
    """No backend at hand can run an operation of the graph.

    Attributes
    ----------
    limit : the limit of a backend that was met, by its name in `pykv.ggml.limits`; None where the backend says itself
        that it has no such operation.
    """

    def __init__(self, message: str, *, limit: str | None = None) -> None:
        super().__init__(message)
        self.limit = limit


class TensorError(PykvError, ValueError):
    """Operands whose shape, type or layout an operation does not take."""


class AllocError(PykvError, MemoryError):
    """A buffer that cannot be had; the message names its purpose and its size."""


class UseAfterCloseError(PykvError, RuntimeError):
    """An object that has been closed, or whose owner has been."""


class ConcurrentUseError(PykvError, RuntimeError):
    """An object that serves one call at a time was entered by a second: another thread's, or a signal handler's."""


class BackendLost(PykvError, ConnectionError):
    """The process that held a model has ended, as it does when ggml loses a device; what the model held is gone.

    Attributes
    ----------
    devices : names of the devices that it computed on.
    last_words : the last lines that it wrote, ggml's reason among them; empty where it wrote none.
    """

    def __init__(self, message: str, *, devices: tuple[str, ...] = (), last_words: str = "") -> None:
        super().__init__(message)
        self.devices = devices
        self.last_words = last_words


class FallbackWarning(RuntimeWarning):
    """An operation on stored tensors that does not run on the device where they lie; the message names it."""


class DownloadError(PykvError, OSError):
    """A model file that could not be fetched or failed its checksum."""


class TraceError(PykvError, ValueError):
    """A recorded trace that cannot be written, read or run again; the message names file, line and fault."""


class StateError(PykvError, ValueError):
    """A saved state that is damaged, of another kind of memory or model, or of a dialect that is not known.

    Attributes
    ----------
    offset : the byte where what was expected was not found, or None where there is no such place.
    """

    def __init__(self, message: str, *, offset: int | None = None) -> None:
        super().__init__(message)
        self.offset = offset


class AttachmentError(PykvError, KeyError):
    """A saved state has no attachment of that name; the message names those it has."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # a KeyError's is a repr
