"""Model: a GGUF file made ready to run. Contexts are made from it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pykv.errors import ChatTemplateError, ParamError, UseAfterCloseError
from pykv.ggml import Device
from pykv.ggml.owner import Owner
from pykv.gguf import GGUFFile, Metadata
from pykv.memory import AttentionPlan, MemoryPlan
from pykv.models import Architecture, HParams, Keys, Placement, Weights, build_architecture, find_architecture
from pykv.models.weights import Progress
from pykv.runtime.context import Context
from pykv.runtime.isolated.where import Isolate, is_isolated
from pykv.runtime.memory_layout import plan_of
from pykv.runtime.params import Attention, ContextParams, FlashAttn, context_params
from pykv.runtime.placing import Overrides, PlacementWish
from pykv.runtime.states.identity import fingerprint

if TYPE_CHECKING:
    from pykv.runtime.chat_template import ChatTemplate
    from pykv.runtime.tokenizer import Tokenizer


class Model:
    """Weights, hyperparameters and vocabulary of one GGUF file.

    Attributes
    ----------
    path : the file.
    hparams : sizes of the model.
    metadata : all keys of the file.
    placement : which device holds which part.
    """

    def __init__(self, file: GGUFFile, placement: Placement, progress: Progress | None, *, repack: bool) -> None:
        self._file = file
        self.path: Path = file.path
        self.metadata: Metadata = file.metadata
        self.placement = placement
        self.hparams = HParams.from_gguf(file)
        weights = Weights(file, placement, repack=repack)
        self.architecture: Architecture = build_architecture(self.hparams, weights, Keys(file))
        self._buffers = weights.load(progress)
        self._closed = False

    @classmethod
    def load(
        cls,
        path: str | bytes | os.PathLike[str],
        devices: Sequence[str | Device] | str | Device | None = None,
        n_gpu_layers: int = -1,
        tensor_split: Sequence[float] | None = None,
        overrides: Overrides | None = None,
        *,
        progress: Progress | None = None,
        repack: bool = True,
        isolate: Isolate = "auto",
    ) -> Model:
        """Open a GGUF file and place its weights.

        Parameters
        ----------
        devices : names, such as ``["CUDA0"]``, or ``["rpc://host:port"]`` for all that an RPC server lends and
            ``["rpc://host:port/0"]`` for its first; None = all GPUs if there are any, else the CPU.
        n_gpu_layers : layers that go to the devices, from the last one down, the output counting as one; -1 = all.
        tensor_split : how much of them each device takes, such as ``[3, 1]``; None = all the same.
        overrides : what lies elsewhere: a layer or a range of layers → device, such as ``{3: "CPU"}``, with K and V;
            or a regular expression over names of tensors → device, such as ``{r"ffn_.*_exps": "CPU"}``, for tensors
            alone, whatever layer they are in. Of several that fit, the first decides.
        progress : called with bytes done and bytes in all while weights are uploaded or repacked.
        repack : lay matrices out anew where this CPU multiplies faster so, as it does with ``q4_0``, ``q4_K`` and
            ``iq4_nl`` on most, and with ``q5_0`` kept as ``q8_0`` where measuring says so; others stay mapped. That
            takes about a second for each gigabyte of them, and memory of the process's own for a copy, where a mapped
            file takes none. It is left out if the file does not fit into free memory once more, or other devices
            take part. Repacked matrices round otherwise; ``q8_0`` gives what ``q5_0`` does, to the bit.
        isolate : hold the model in a process of its own, whose end is an exception, `BackendLost`, in this one: see
            `IsolatedModel`. ggml ends the process when it loses a server; "auto" = where a device is another machine's.

        Raises
        ------
        GGUFError : not a GGUF file, damaged, cut off, or something missing or of the wrong shape.
        UnknownArchitectureError : a family that pykv does not build.
        ParamError : no such device, an override that is about nothing, or an argument that is none; the message
            names it.
        AllocError : a device has no room.
        BackendLost : the process of an isolated model has ended.
        """
        if progress is not None and not callable(progress):
            raise ParamError(f"progress={progress!r} must be a function of the bytes done and the bytes in all")
        if not isinstance(repack, bool):
            raise ParamError(f"repack={repack!r} must be True or False")
        if is_isolated(isolate, devices, overrides):
            from pykv.runtime.isolated.model import IsolatedModel

            return IsolatedModel(path, (devices, n_gpu_layers, tensor_split, overrides), progress, repack=repack)
        wish = PlacementWish.of(devices, n_gpu_layers, tensor_split, overrides)
        file = GGUFFile(path)
        find_architecture(file.metadata.typed("general.architecture", str))
        placement = wish.over(file.tensors, HParams.from_gguf(file).n_layer)
        return cls(file, placement, progress, repack=repack)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary; read from the file when first asked for."""
        from pykv.runtime.tokenizer import Tokenizer

        self._require_open()
        return Tokenizer.from_metadata(self.metadata)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """How the model wants conversations written.

        Raises
        ------
        ChatTemplateError : the file has none.
        """
        from pykv.runtime.chat_template import ChatTemplate

        tokens = self.tokenizer
        if tokens.chat_template is None:
            raise ChatTemplateError(f"{self.path}: the file has no chat template (tokenizer.chat_template)")

        def text(token: int | None) -> str:
            return "" if token is None else tokens.token_text(token)

        return ChatTemplate(tokens.chat_template, bos_token=text(tokens.bos_id), eos_token=text(tokens.eos_id))

    def context(
        self,
        n_ctx: int = 0,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        kv_unified: bool = True,
        type_k: str = "f16",
        type_v: str = "f16",
        flash_attn: FlashAttn = "auto",
        swa_full: bool = False,
        n_threads: int | None = None,
        attention: Attention = "auto",
        **more: Any,
    ) -> Context:
        """Return a context; see `ContextParams` for what the parameters mean and which more there are.

        Where attention, or writing K and V, runs on another device than where they lie, a `FallbackWarning` says so.

        Raises
        ------
        ParamError : a parameter that cannot be honoured.
        AllocError : more memory than there is.
        """
        self._require_open()
        return self.make_context(
            context_params(
                n_ctx=n_ctx,
                n_batch=n_batch,
                n_ubatch=n_ubatch,
                n_seq_max=n_seq_max,
                kv_unified=kv_unified,
                type_k=type_k,
                type_v=type_v,
                flash_attn=flash_attn,
                swa_full=swa_full,
                n_threads=n_threads,
                attention=attention,
                **more,
            )
        )

    def make_context(self, params: ContextParams, attention: AttentionPlan | None = None) -> Context:
        """Return a context of these parameters, which follows a plan of attention that was recorded, if there is one.

        Raises as `context`.
        """
        return Context(self, params, attention)

    def memory_plan(self, **params: Any) -> MemoryPlan:
        """Return what the KV cache of a context with these parameters takes, without allocating it."""
        self._require_open()
        return plan_of(self, context_params(**params))

    @cached_property
    def fingerprint(self) -> str:
        """What tells this model from others, 32 characters: of its tensor table and a few bytes of each tensor."""
        self._require_open()
        return fingerprint(self._file)

    @property
    def owners(self) -> tuple[Owner, ...]:
        """What a graph that reads the weights stands on."""
        return self._buffers

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._file.nbytes

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Let go of the weights. Contexts of it refuse further use; their memory goes when they are closed."""
        self._closed = True
        for buffer in self._buffers:
            buffer.close()
        self._file.close()

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise UseAfterCloseError("the model is closed")
