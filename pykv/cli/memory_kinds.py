"""What a model's layers remember, counted by kind, and in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pykv.cli.console import size

if TYPE_CHECKING:
    from pykv.memory import MemorySpec


@dataclass(frozen=True)
class MemoryKinds:
    """Layers by what they remember; one that attends may have a state too.

    Attributes
    ----------
    n_full : layers that attend to everything.
    n_window : layers that attend within a window.
    window, window_kind : tokens of the window, and which one it is: "standard", "chunked" or "symmetric"; 0 and None
        without.
    n_state : layers with a recurrent state.
    state_nbytes : bytes of all states of one sequence, the latest only.
    n_reuse : layers, of those that attend, that read K and V of another one and store none.
    n_k_only : layers whose V is a part of K, and not stored again.
    """

    n_full: int
    n_window: int
    window: int
    window_kind: str | None
    n_state: int
    state_nbytes: int
    n_reuse: int
    n_k_only: int

    @classmethod
    def of(cls, spec: MemorySpec) -> MemoryKinds:
        """Count the layers of a model."""
        from pykv.memory.kinds import is_windowed

        attending = [layer for layer in spec.layers if layer.n_head_kv]
        states = [layer.state for layer in spec.layers if layer.state is not None]
        has_window = spec.window.kind != "full"
        n_window = sum(layer.is_swa for layer in attending) if is_windowed(spec) else len(attending) * has_window
        return cls(
            n_full=len(attending) - n_window,
            n_window=n_window,
            window=spec.window.n_swa if n_window else 0,
            window_kind=spec.window.kind if n_window else None,
            n_state=len(states),
            state_nbytes=sum(state.nbytes for state in states),
            n_reuse=len(spec.reuse),
            n_k_only=sum(layer.k_only for layer in attending),
        )

    def __str__(self) -> str:
        return "; ".join(self._said()) or "none"

    def _said(self) -> Iterator[str]:
        seen = {"everything": self.n_full, _WINDOWS.get(self.window_kind or "", "").format(self.window): self.n_window}
        if attending := [f"{n} to {what}" for what, n in seen.items() if n]:
            yield f"layers that attend: {', '.join(attending)}"
        if self.n_reuse:
            yield f"{self.n_reuse} of them with the K and V of another one"
        if self.n_k_only:
            some = "" if self.n_k_only == self.n_full + self.n_window else f" in {self.n_k_only} of them"
            yield f"V is a part of K{some}"
        if self.n_state:
            yield f"layers with a state: {self.n_state}, {size(self.state_nbytes)} a sequence"


_WINDOWS = {
    "standard": "the last {} tokens",
    "chunked": "chunks of {} tokens",
    "symmetric": "{} tokens around each",
}
