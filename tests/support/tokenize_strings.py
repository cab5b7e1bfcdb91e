"""Strings that are hard to tokenize: the scripts of the world, invisible characters, runs, code, bytes that are no text.

`tricky_strings(n, seed)` is the same list for the same arguments, on every machine.
"""

# ruff: noqa: E501, RUF001  (tables of strings)

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Maker = Callable[[random.Random], "str | bytes"]

SCRIPTS = (
    (0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x24F), (0x250, 0x2AF), (0x370, 0x3FF), (0x400, 0x52F), (0x531, 0x586),
    (0x5D0, 0x5EA), (0x620, 0x64A), (0x710, 0x72F), (0x904, 0x939), (0x985, 0x9B9), (0xA05, 0xA39), (0xB85, 0xBB9),
    (0xC05, 0xC39), (0xD05, 0xD39), (0xE01, 0xE3A), (0xE81, 0xEB0), (0xF40, 0xF6C), (0x1000, 0x102A),
    (0x10D0, 0x10FF), (0x1100, 0x1112), (0x1200, 0x1248), (0x13A0, 0x13F4), (0x1401, 0x1480), (0x1780, 0x17B3),
    (0x1820, 0x1877), (0x1E00, 0x1EFF), (0x1F00, 0x1FFC), (0x3041, 0x3096), (0x30A1, 0x30FA), (0x4E00, 0x9FFF),
    (0xA000, 0xA48C), (0xAC00, 0xD7A3), (0x10330, 0x1034A), (0x10400, 0x1044F), (0x12000, 0x12399),
    (0x13000, 0x1342E), (0x1D400, 0x1D7FF), (0x1E900, 0x1E943), (0x20000, 0x2A6DF),
)  # fmt: skip
DIGITS = (0x30, 0x660, 0x6F0, 0x966, 0x9E6, 0xE50, 0xFF10, 0x1D7CE, 0x1E950)
MARKS = (0x300, 0x301, 0x308, 0x327, 0x338, 0x489, 0x5B0, 0x64B, 0x93C, 0x94D, 0xE31, 0x20E3, 0xFE0F, 0x1D165)
SPACES = " \t\n\r\v\f\x1c\x1f\x85\xa0\u1680\u2003\u2028\u2029\u202f\u205f\u3000"
INVISIBLE = "\x00\x01\x04\x06\x13\x7f\xad\u200b\u200c\u200d\u200e\u202e\u2060\ufeff\ufff9\ufffd\ue000\U000e0041"
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~¡«»…—“”„‚、。！？「」٪؟؛।״§¶†€₹£±×÷≤∑√∞→⇒■●★☃"
NEWER = "\u1c89\u0897\U00010d40\U00010d50\U000116d0\U0001cc00\U0001fae9\U00016d40\U00011f5a"
EMOJI = (
    "😀", "🤦🏽‍♂️", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f", "🇩🇪🇫🇷", "🇺", "1️⃣", "❤️‍🔥",
    "👩🏻‍🚀", "©️", "☎️", "🧑‍⚖", "🦩", "🫠", "🪿",
)  # fmt: skip
CONTRACTIONS = (
    "I'm", "you're", "they'll", "we've", "it's", "can't", "he'd", "I'M", "YOU'RE", "'tis", "rock'n'roll", "’s", "'ſ",
    "don't've", "''s", "'S 'T 'd 'D", " 's 't", "o'clock",
)  # fmt: skip
CODE = (
    "def f(x):\n    return x ** 2  # café\n", "for(int i=0;i<10;++i){\n\tprintf(\"%d\\n\", i);\n}\n",
    "SELECT * FROM t WHERE a='b' AND c <> 3;", "<div class=\"a\">\n  <h1>Hi&nbsp;there</h1>\n</div>", "{\"a\": [1, 2.5e-7, null]}",
    "https://example.org/a_b/c-d?e=f&g=%20#h", "x = 0xDEADBEEF + 1_000_000;", "\\frac{a}{b} \\\\ $$x^2$$", "a->b::c<T>&&d||!e",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case", "\tif True:\n\t\tpass\r\n\r\n", "C:\\Users\\n\\t",
)  # fmt: skip
WORDS = (
    "the", "The", "THE", " and", "hello", "Hello", "world", "tokenization", "antidisestablishmentarianism", "ﬁne", "naïve",
    "Straße", "İstanbul", "ǅ", "größer", "Привет", "мир", "Καλημέρα", "你好", "世界", "こんにちは", "カタカナ", "안녕하세요",
    "नमस्ते", "สวัสดี", "مرحبا", "שלום", "xin chào", "▁", "▁▁", "Ġ", "Ċ", "aaaa", "ab", "zzzz", "1st", "3.14159", "1,000",
)  # fmt: skip
SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<gh_stars>",
    "<issue_start>", "<jupyter_code>", "<empty_output>", "<bos>", "<eos>", "<pad>", "<unk>", "<mask>", "<start_of_turn>",
    "<end_of_turn>", "<unused0>", "<unused42>", "<unused99>", "[multimodal]", "<start_of_image>", "<end_of_image>", "<h1>", "</h1>",
    "<table>", "<blockquote>", "<code>", "</code>", "<0x0A>", "<0x41>", "<0xFF>", "<s>", "</s>", "<|", "|>", "<|im_start", "im_end|>",
    "<|im_<|im_end|>start|>", "<<bos>>", "<unused", "<start_of_turn>user\n", "<|im_start|>system\n",
)  # fmt: skip
BAD_BYTES = (
    b"\x80", b"\xbf", b"\xc0", b"\xc0\x80", b"\xc1\xbf", b"\xc2", b"\xc3(", b"\xe0\x80\x80", b"\xe0\x9f\xbf", b"\xe2", b"\xe2\x96",
    b"\xe2(\xa1", b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xee\x80\x80", b"\xf0", b"\xf0\x9f", b"\xf0\x9f\x98", b"\xf0\x80\x80\x80",
    b"\xf0(\x8c\xbc", b"\xf5", b"\xf8\x88\x80\x80\x80", b"\xfe", b"\xff", b"\xff\xfe", b"\xe2\x96\x81\x81", b"\xf4\x8f\xbf\xbf",
)  # fmt: skip


def tricky_strings(n: int, seed: int, specials: Sequence[str] = SPECIALS) -> list[str | bytes]:
    """Return `n` texts, some of them bytes that are not UTF-8; the first ones are fixed edge cases."""
    rng = random.Random(seed)
    fixed: list[str | bytes] = [
        "", " ", "  ", "\n", "\n\n\n", "\t", "\r\n", "a", " a", "a ", "\x00", "▁", "'", "''", "\u0301", "\ufeff", *specials,
        *BAD_BYTES, *EMOJI, *CONTRACTIONS, *CODE, *NEWER, *(char * 3000 for char in "a 0\n▁é中-"), " a" * 1500,
        "\n " * 700, "ab\t" * 500, "🤦🏽‍♂️" * 200, "\u0301" * 500, b"\xff" * 300, b"\xe2\x96" * 200,
    ]  # fmt: skip
    makers: list[Maker] = [
        _words, _script, _mixture, _digits, _spaces, _code, _with_specials(specials), _marked, _any_code_points,
        _runs, _bad_bytes, _bad_bytes, _mutilated, _with_specials(specials),
    ]  # fmt: skip
    return (fixed + [rng.choice(makers)(rng) for _ in range(n)])[:n]


def _pick(rng: random.Random, choices: Sequence[str], most: int) -> list[str]:
    return [rng.choice(choices) for _ in range(rng.randint(1, most))]


def _words(rng: random.Random) -> str:
    return rng.choice((" ", "", "  ", ", ")).join(_pick(rng, WORDS + CONTRACTIONS, 12))


def _script(rng: random.Random) -> str:
    low, high = rng.choice(SCRIPTS)
    words = ("".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 9))) for _ in range(rng.randint(1, 6)))
    return rng.choice((" ", "", "\u3000", "، ")).join(words)


def _mixture(rng: random.Random) -> str:
    return "".join(
        rng.choice((_words, _script, _digits, _spaces, _marked, _punctuation, _emoji))(rng)
        for _ in range(rng.randint(2, 7))
    )


def _punctuation(rng: random.Random) -> str:
    return "".join(_pick(rng, PUNCTUATION, 8))


def _emoji(rng: random.Random) -> str:
    return "".join(_pick(rng, EMOJI, 4))


def _digits(rng: random.Random) -> str:
    zero = rng.choice(DIGITS)
    number = "".join(chr(zero + rng.randint(0, 9)) for _ in range(rng.randint(1, 12)))
    return rng.choice(("", " ", "-", "$", "x")) + number + rng.choice(("", "%", "½", "²", "Ⅷ", "st", ".5", " "))


def _spaces(rng: random.Random) -> str:
    return "".join(rng.choice(SPACES) * rng.choice((1, 1, 2, 3, 17, 40)) for _ in range(rng.randint(1, 5)))


def _code(rng: random.Random) -> str:
    return "".join(_pick(rng, CODE, 4))


def _marked(rng: random.Random) -> str:
    return "".join(rng.choice("aeo nक한") + "".join(chr(mark) for mark in rng.choices(MARKS, k=3)) for _ in range(4))


def _any_code_points(rng: random.Random) -> str:
    top = rng.choice((0x7F, 0x2FF, 0xFFFF, 0x10FFFF))
    codes = (rng.randint(0, top) for _ in range(rng.randint(1, 30)))
    return "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000) + rng.choice(INVISIBLE)


def _runs(rng: random.Random) -> str:
    chars = rng.choices(SPACES + INVISIBLE + PUNCTUATION + "aA0é中", k=rng.randint(1, 4))
    return "".join(char * rng.choice((1, 2, 5, 30, 200)) for char in chars)


def _with_specials(specials: Sequence[str]) -> Maker:
    def make(rng: random.Random) -> str:
        between = (_words, _spaces, _punctuation, lambda _: "", lambda _: " ", lambda _: "\n")
        return "".join(rng.choice(between)(rng) + rng.choice(specials) for _ in range(rng.randint(1, 5))) + _words(rng)

    return make


def _bad_bytes(rng: random.Random) -> bytes:
    parts = ((_words, _spaces, _with_specials(SPECIALS), _digits), BAD_BYTES)
    return b"".join(
        rng.choice(parts[0])(rng).encode() if rng.random() < 0.5 else rng.choice(parts[1])
        for _ in range(rng.randint(1, 8))
    )  # fmt: skip


def _mutilated(rng: random.Random) -> bytes:
    """Cut or flip bytes of a valid text; never into a code above U+10FFFF, which ends llama.cpp's process."""
    raw = bytearray(_mixture(rng).encode())
    for _ in range(rng.randint(1, 3)):
        i = rng.randrange(len(raw) + 1)
        raw[i : i + rng.randint(0, 2)] = bytes(rng.choice((b"", b"\x80", b"\xe4", b"\xc3", b"\xf0", b" ")))
    return bytes(raw)
