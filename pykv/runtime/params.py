"""Context parameters: what a caller may ask for, what is refused, and what follows from it.

Source: spec params.md sections 1 to 3.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pykv.errors import ParamError
from pykv.ggml import DType, usable_cores
from pykv.ggml.backend import MAX_THREADS
from pykv.log import logger
from pykv.memory.kv_settings import kv_type
from pykv.models import ContextRope, HParams, RopeRequest, derive_rope
from pykv.typing import MAX_SEQ, as_bool, as_int

_LOG = logger(__name__)

CONTEXT_PAD = 256
"""A sequence's share of the context is a multiple of this many tokens."""

FlashAttn = bool | Literal["auto"]
Attention = Literal["auto", "fused", "flash", "matmul"]
ATTENTION: tuple[Attention, ...] = ("auto", "fused", "flash", "matmul")


@dataclass(frozen=True)
class ContextParams:
    """What a caller asks for. Numbers and bools may be numpy's; Python's are stored.

    Attributes
    ----------
    n_ctx : tokens in all sequences together, rounded up to a multiple of 256; 0 = the model's training context.
    n_batch : most tokens in one `decode`.
    n_ubatch : most tokens computed at once; 0 = `n_batch`.
    n_seq_max : sequences; ids lie below it.
    kv_unified : one pool of cells that all sequences share, instead of an equal part for each.
    type_k, type_v : element types of stored K and V, such as "f16" or "q8_0".
    attention : "fused" = pykv's kernel, on the CPU; "flash" = ggml's; "matmul" = multiplied matrices; "auto" =
        whichever is fastest here, for generation and for prompts. See `Context.attention_path`.
    flash_attn : the bool True for attention="flash", False for "matmul", or "auto" = as `attention` says.
    swa_full : keep all cells of sliding-window layers, not only the window.
    n_threads : CPU threads; None = all cores this process may use. ggml's threads wait for one another by spinning:
        where other programs keep the cores busy, or several contexts compute at once, all cores are slower than fewer.
    n_outputs_max : most rows of logits in one `decode`; 0 = `n_batch`.
    n_rs_seq : states kept of each sequence beside the latest, in recurrent layers: by so many tokens it can be cut.
        Without such layers it does nothing.
    offload_kqv : keep K and V on the device of their layer, else in host memory.
    reference_moves : move positions as llama.cpp does, see `KVSettings`.
    rope : changes to the rotary settings.

    Raises
    ------
    ParamError : names the parameter, its value and the limit.
    """

    n_ctx: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    # differs from llama.cpp: unified, so that forks share cells, and only the window, which is all that is ever read
    kv_unified: bool = True
    type_k: str | DType = "f16"
    type_v: str | DType = "f16"
    flash_attn: FlashAttn = "auto"
    attention: Attention = "auto"
    swa_full: bool = False
    n_rs_seq: int = 0
    n_threads: int | None = None
    n_outputs_max: int = 0
    offload_kqv: bool = True
    reference_moves: bool = False
    rope: RopeRequest = field(default_factory=RopeRequest)

    def __post_init__(self) -> None:
        for name in ("n_ctx", "n_batch", "n_ubatch", "n_outputs_max", "n_seq_max", "n_rs_seq"):
            self._take_whole(name)
        for name in ("kv_unified", "swa_full", "offload_kqv", "reference_moves"):
            self._take_bool(name)
        if self.n_batch == 0 and self.n_ubatch == 0:
            raise ParamError("n_batch=0 and n_ubatch=0: one of them must be positive")
        if self.n_seq_max > MAX_SEQ:
            raise ParamError(f"n_seq_max={self.n_seq_max} must be at most {MAX_SEQ}")
        threads = as_int(self.n_threads)
        if self.n_threads is not None and (threads is None or not 1 <= threads <= MAX_THREADS):
            raise ParamError(f"n_threads={self.n_threads!r} must be a whole number in 1..{MAX_THREADS}, or None")
        object.__setattr__(self, "n_threads", threads)
        self._take_attention()
        if not isinstance(self.rope, RopeRequest):
            raise ParamError(f"rope={self.rope!r} must be a RopeRequest")

    def _take_whole(self, name: str) -> None:
        value = as_int(getattr(self, name))
        if value is None or not 0 <= value < 2**31 - CONTEXT_PAD:
            raise ParamError(
                f"{name}={getattr(self, name)!r} must be a whole number, not negative, below 2^31 - {CONTEXT_PAD}"
            )
        object.__setattr__(self, name, value)

    def _take_attention(self) -> None:
        flash = self.flash_attn if isinstance(self.flash_attn, str) else as_bool(self.flash_attn)
        if flash is None or flash not in (True, False, "auto"):
            raise ParamError(f"flash_attn={self.flash_attn!r} must be True, False or 'auto'; True and False as bools")
        object.__setattr__(self, "flash_attn", flash)
        if not isinstance(self.attention, str) or self.attention not in ATTENTION:
            raise ParamError(f"attention={self.attention!r} must be one of {', '.join(map(repr, ATTENTION))}")
        if flash != "auto" and self.attention not in ("auto", _meaning(flash)):
            raise ParamError(f"flash_attn={flash} means attention={_meaning(flash)!r}, not {self.attention!r}")

    def _take_bool(self, name: str) -> None:
        value = as_bool(getattr(self, name))
        if value is None:
            raise ParamError(f"{name}={getattr(self, name)!r} must be True or False")
        object.__setattr__(self, name, value)


def context_params(**params: Any) -> ContextParams:
    """Return context parameters by name.

    Raises
    ------
    ParamError : there is no such parameter, or a value cannot be honoured.
    """
    known = ContextParams.__dataclass_fields__
    for name in params:
        if name not in known:
            raise ParamError(f"{name}: no such context parameter; known: {', '.join(known)}")
    return ContextParams(**params)


@dataclass(frozen=True)
class ResolvedParams:
    """What a context works with; nothing is left open but `attention`, which measuring may decide.

    Attributes
    ----------
    n_ctx_seq : cells per stream: what one sequence can hold at most.
    """

    n_ctx: int
    n_ctx_seq: int
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    n_outputs_max: int
    n_threads: int
    kv_unified: bool
    type_k: DType
    type_v: DType
    attention: Attention
    swa_full: bool
    n_rs_seq: int
    offload_kqv: bool
    reference_moves: bool
    rope: ContextRope

    @property
    def widest_ubatch(self) -> tuple[int, int]:
        """Tokens that are computed at once at most, and rows of logits among them."""
        n_tokens = min(self.n_ctx, self.n_ubatch)
        return n_tokens, min(n_tokens, self.n_outputs_max)


def resolve(params: ContextParams, hparams: HParams) -> ResolvedParams:
    """Hold the parameters against a model and derive what follows.

    Raises
    ------
    ParamError : they do not go together, or not with the model; names the parameter, its value and the limit.
    """
    type_k, type_v = kv_type(params.type_k, "type_k"), kv_type(params.type_v, "type_v")
    n_seq_max = max(1, params.n_seq_max)
    n_ctx = params.n_ctx or hparams.n_ctx_train
    # note: the order matters; a batch is limited by the context before that is padded
    # differs from llama.cpp: n_batch=0 means n_ubatch, because no batch at all is of no use
    n_batch = min(n_ctx, params.n_batch or params.n_ubatch)
    n_ubatch = min(n_batch, params.n_ubatch or params.n_batch)
    n_ctx = _pad(n_ctx)
    n_ctx_seq = n_ctx
    if not params.kv_unified:
        n_ctx_seq = _pad(n_ctx // n_seq_max)
        if n_ctx_seq == 0:
            raise ParamError(f"n_ctx={n_ctx} leaves nothing for each of n_seq_max={n_seq_max} sequences")
        if n_ctx != n_ctx_seq * n_seq_max:
            _LOG.warning("n_ctx=%d becomes %d: %d tokens for each sequence", n_ctx, n_ctx_seq * n_seq_max, n_ctx_seq)
            n_ctx = n_ctx_seq * n_seq_max
    # differs from llama.cpp: YaRN at another scale than the model's leaves its n_ctx_train alone (there: replaced
    # after creation), because a context does not change its model, which other contexts use too
    if n_ctx_seq > hparams.n_ctx_train:
        _LOG.warning("a sequence may grow to %d tokens, the model was trained at %d", n_ctx_seq, hparams.n_ctx_train)
    n_outputs_max = params.n_outputs_max or n_batch
    if n_outputs_max < n_seq_max:
        # differs from llama.cpp: an error here, where it aborts in the constructor
        raise ParamError(
            f"n_seq_max={n_seq_max} sequences cannot each have an output: n_batch={n_batch} and "
            f"n_outputs_max={n_outputs_max} must be at least as many"
        )
    return ResolvedParams(
        n_ctx=n_ctx,
        n_ctx_seq=n_ctx_seq,
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        n_seq_max=n_seq_max,
        n_outputs_max=n_outputs_max,
        n_threads=params.n_threads if params.n_threads is not None else usable_cores(),
        kv_unified=params.kv_unified,
        type_k=type_k,
        type_v=type_v,
        attention=_attention(params, type_v),
        swa_full=params.swa_full,
        n_rs_seq=params.n_rs_seq,
        offload_kqv=params.offload_kqv,
        reference_moves=params.reference_moves,
        rope=derive_rope(hparams, params.rope, n_ctx_seq),
    )


def _pad(n: int) -> int:
    return -(-n // CONTEXT_PAD) * CONTEXT_PAD


def _meaning(flash_attn: bool) -> Attention:
    return "flash" if flash_attn else "matmul"


def _attention(params: ContextParams, type_v: DType) -> Attention:
    """Return what both parameters come to. Quantised V can only be read by the fused and the flash path."""
    asked = params.attention if params.flash_attn == "auto" else _meaning(params.flash_attn)
    if asked == "matmul" and type_v.is_quantized:
        given = "attention='matmul'" if params.flash_attn == "auto" else "flash_attn=False"
        raise ParamError(f"type_v={type_v.label!r} needs flash attention, but {given}")
    return asked
