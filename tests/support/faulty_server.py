"""The other end of a `Link` that does wrong what it is asked for."""

from __future__ import annotations

import marshal
import os
import socket
import sys

from support import raw_ggml

from pykv.isolation import Service


def main(talk: int, control: int, region: int, parent: int) -> None:
    """Serve; each request is the name of a fault."""

    def handle(fault: str) -> object:
        end = socket.socket(fileno=os.dup(talk))
        if fault == "abort":
            print("a line of a library's own", flush=True)
            raw_ggml.tensor(raw_ggml.context(1), raw_ggml.F32, 1, 1, 1, 1, 1)  # a dimension too many
        elif fault == "exit":
            os._exit(3)
        elif fault == "words":
            os.write(2, b"a line\n\n" * 100 + b"\xff the last one\n")
            os._exit(3)
        elif fault == "nonsense":
            end.sendall(b"\1" * 4000)
        elif fault == "cut off":
            end.sendall((100).to_bytes(8, "little") + b"abc")
            os._exit(0)
        elif fault == "no message":
            body = marshal.dumps(7)
            end.sendall(len(body).to_bytes(8, "little") + body)
        elif fault == "a class of others":
            body = marshal.dumps((False, ("=", (Ellipsis, "record", "subprocess", "Popen", {}))))
            end.sendall(len(body).to_bytes(8, "little") + body)
        elif fault == "own exception":
            raise type("OwnError", (KeyError,), {})("of a class that is not known elsewhere")
        elif fault == "exit in Python":
            sys.exit(5)
        return fault

    Service(talk, control, region, parent, lambda ref: ref).run(handle, lambda number: None)
