"""RemoteObject: what all stand-ins for objects in the process of a model have in common."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Any

from pykv.isolation import Link, Ref, Remote


class RemoteObject(Remote):
    """An object in the process of the model: its methods are called and its attributes read there.

    It is let go there when nobody holds this one any more.
    """

    def _bind(self, link: Link, ref: Ref) -> None:
        self.home: Link = link
        self.ref = ref
        weakref.finalize(self, link.drop, ref.number).atexit = False

    def _call(self, name: str, *args: Any, **more: Any) -> Any:
        return self.home.ask("call", self.ref.number, name, args, more, None)

    def _call_on_files(self, name: str, *args: Any, **more: Any) -> Any:
        """Call a method that takes a path: a relative one means what it means in this process now."""
        folder = None
        with suppress(OSError):
            folder = os.getcwd()
        return self.home.ask("call", self.ref.number, name, args, more, folder)

    def _get(self, name: str) -> Any:
        return self.home.ask("get", self.ref.number, name)
