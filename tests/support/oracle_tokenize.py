"""Tokenizes with llama.cpp, in a process of its own and by another Python: JSON lines in, JSON lines out.

The first argument is the GGUF file, of which only the vocabulary is loaded. Requests:

    {"encode": base64, "variants": [[add_special, parse_special], ...]}  ->  [[id, ...], ...]
    {"decode": [id, ...], "special": bool}                               ->  base64
    {"info": true}                                                       ->  {"bos": ..., "eog": [...], ...}
"""

from __future__ import annotations

import base64
import ctypes
import json
import sys
from typing import Any

import llama_cpp


class Vocabulary:
    """llama.cpp's vocabulary of one file."""

    def __init__(self, path: str) -> None:
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)

    def encode(self, raw: bytes, add_special: bool, parse_special: bool) -> list[int]:
        room = 4 * len(raw) + 8  # a stray byte becomes three, an escaped space too
        ids = (llama_cpp.llama_token * room)()
        n = llama_cpp.llama_tokenize(self._vocab, raw, len(raw), ids, room, add_special, parse_special)
        assert n >= 0, n
        return list(ids[:n])

    def decode(self, tokens: list[int], special: bool) -> bytes:
        ids = (llama_cpp.llama_token * max(1, len(tokens)))(*tokens)
        room = 1024 + 256 * len(tokens)
        text = ctypes.create_string_buffer(room)
        n = llama_cpp.llama_detokenize(self._vocab, ids, len(tokens), text, room, False, special)
        assert n >= 0, n
        return text.raw[:n]

    def info(self) -> dict[str, Any]:
        names = ("bos", "eos", "pad", "get_add_bos", "get_add_eos")
        found = {name: getattr(llama_cpp, f"llama_vocab_{name}")(self._vocab) for name in names}
        n_vocab = llama_cpp.llama_vocab_n_tokens(self._vocab)
        eog = [token for token in range(n_vocab) if llama_cpp.llama_vocab_is_eog(self._vocab, token)]
        return {**found, "n_vocab": n_vocab, "eog": eog}

    def answer(self, request: dict[str, Any]) -> Any:
        if "encode" in request:
            raw = base64.b64decode(request["encode"])
            return [self.encode(raw, *variant) for variant in request["variants"]]
        if "decode" in request:
            return base64.b64encode(self.decode(request["decode"], request["special"])).decode()
        return self.info()


def main() -> None:
    vocabulary = Vocabulary(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(vocabulary.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
