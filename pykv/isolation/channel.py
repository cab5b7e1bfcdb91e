"""Channel: one end of the conversation between a program and the process of its model.

A message is eight bytes of length and what `marshal` makes of an encoded value: one send, and mostly one receive.
Large arrays go before it through the shared region, piece by piece, each of which the other side takes out at once.
"""

from __future__ import annotations

import marshal
import socket
from collections.abc import Callable
from typing import Any

import numpy as np

from pykv.isolation.codec import Decoder, Encoder, Ref
from pykv.isolation.region import Region
from pykv.typing import AnyArray

PIECE = 64 * 2**20
"""Most bytes that are in the region at once, of an array that is on its way."""

_HEAD = 8
_MOST_READ = 2**18
_MOST_SAID = 2**28
_TAKEN = b"taken"

Packed = tuple[bytes, list[AnyArray]]
"""A message, and the arrays that go before it."""


class Channel:
    """Sends and receives values; both sides take turns.

    Attributes
    ----------
    region : shared memory, whose content belongs to the side that speaks.
    """

    def __init__(
        self, sock: socket.socket, region: Region, home: object = None, resolve: Callable[[Ref], Any] = lambda ref: ref
    ) -> None:
        self._sock, self.region, self._home, self._resolve = sock, region, home, resolve
        self._read = bytearray()

    def send(self, value: Any) -> None:
        """Send a value; see `packed` and `post`."""
        self.post(self.packed(value))

    def packed(self, value: Any) -> Packed:
        """Return a value ready to be sent, with room in the region for what goes through it.

        Raises
        ------
        AllocError : there is none; nothing has been said yet.
        """
        encoder = Encoder(self._home)
        body = _message_of(False, encoder.encode(value))
        if encoder.large:
            self.region.view(min(PIECE, max(array.size for array in encoder.large)))
        return body, encoder.large

    def post(self, packed: Packed) -> None:
        """Send what is ready; waits while the other side takes out large arrays.

        Raises
        ------
        EOFError, OSError : the other side is gone.
        """
        body, large = packed
        for array in large:
            self._send_large(array)
        self._sock.sendall(body)

    def receive(self) -> Any:
        """Wait for a value.

        Raises
        ------
        EOFError, OSError : the other side is gone, or says what makes no sense.
        """
        large: list[AnyArray] = []
        while True:
            is_large, body = self._message()
            if not is_large:
                return Decoder(large, self._resolve).decode(body)
            large.append(self._receive_large(body))

    def settimeout(self, seconds: float | None) -> None:
        """Let each wait raise `TimeoutError`, an `OSError`, after so long; None = wait without end."""
        self._sock.settimeout(seconds)

    def _send_large(self, array: AnyArray) -> None:
        self._say(array.size)
        room = min(array.size, PIECE)
        for start in range(0, array.size, room):
            piece = array[start : start + room]
            np.frombuffer(self.region.view(piece.size), np.uint8)[...] = piece
            self._say(piece.size)
            if self._message() != (True, _TAKEN):
                raise EOFError("expected a word that a piece was taken")

    def _receive_large(self, size: int) -> AnyArray:
        array, at = np.empty(size, np.uint8), 0
        while at < size:
            _, n = self._message()
            array[at : at + n] = np.frombuffer(self.region.view(n), np.uint8)
            at += n
            self._say(_TAKEN)
        return array

    def _say(self, what: int | bytes) -> None:
        self._sock.sendall(_message_of(True, what))

    def _message(self) -> tuple[bool, Any]:
        read = self._read
        while len(read) < _HEAD:
            self._more()
        end = _HEAD + int.from_bytes(read[:_HEAD], "little")
        if end > _MOST_SAID:
            raise EOFError(f"a message of {end} bytes, which makes no sense")
        while len(read) < end:
            self._more()
        try:
            is_large, body = marshal.loads(bytes(read[_HEAD:end]))
        except (ValueError, TypeError, EOFError) as error:
            raise EOFError(f"a message that makes no sense: {error}") from error
        del read[:end]
        return is_large, body

    def _more(self) -> None:
        data = self._sock.recv(_MOST_READ)
        if not data:
            raise EOFError("the other side is gone")
        self._read += data


def _message_of(is_about_array: bool, what: Any) -> bytes:
    body = marshal.dumps((is_about_array, what))
    return len(body).to_bytes(_HEAD, "little") + body
