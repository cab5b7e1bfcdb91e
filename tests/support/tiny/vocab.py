"""The vocabulary of tiny models: 256 bytes, two-letter tokens, three control tokens, in GPT-2's form."""

from __future__ import annotations

from itertools import islice, product

import gguf

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Control tokens at the end of the vocabulary: end of text (also begin), and the two ends of a turn."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_letters() -> list[str]:
    """Return the printable letter that GPT-2's vocabulary uses for each of the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (chr(0x100 + i) for i in range(256 - len(printable)))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


def vocabulary(n_vocab: int) -> tuple[list[str], list[str]]:
    """Return (tokens, merges): 256 bytes, as many two-letter tokens as fit, then `SPECIALS`."""
    n_merges = n_vocab - 256 - len(SPECIALS)
    pairs = list(islice(product("Ġetaoinshrdlu", "etaoinshrdlucmfwyp"), n_merges))
    if n_merges < 0 or len(pairs) < n_merges:
        raise ValueError(f"n_vocab={n_vocab} does not fit: 259 to {259 + 13 * 18} tokens")
    tokens = [*byte_letters(), *("".join(pair) for pair in pairs), *SPECIALS]
    return tokens, [" ".join(pair) for pair in pairs]


def write_vocabulary(writer: gguf.GGUFWriter, n_vocab: int, pre: str) -> None:
    """Write the tokenizer's metadata; `pre` names the rule that splits text into words."""
    tokens, merges = vocabulary(n_vocab)
    n_plain = n_vocab - len(SPECIALS)
    kinds = [gguf.TokenType.NORMAL] * n_plain + [gguf.TokenType.CONTROL] * len(SPECIALS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(n_plain)
    writer.add_eos_token_id(n_plain + 2)
    writer.add_pad_token_id(n_plain)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
