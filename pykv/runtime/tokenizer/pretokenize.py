"""How byte-level BPE cuts text into words before it merges: the patterns behind each `tokenizer.ggml.pre`.

The patterns of one entry run one after the other, each on the pieces that the one before left; a match is a
piece, and so is what lies between two matches. The words are those of `llm_tokenizer_bpe` and unicode.cpp in
llama.cpp, also where a model's own tokenizer cuts a little differently.
"""

# ruff: noqa: RUF001  (the look-alike characters are the models' own)

from __future__ import annotations

import re
from dataclasses import dataclass

_UNICODE_16 = (
    r"\x{897}\x{1B4E}-\x{1B4F}\x{1B7F}\x{1C89}-\x{1C8A}\x{2427}-\x{2429}\x{31E4}-\x{31E5}\x{A7CB}-\x{A7CD}"
    r"\x{A7DA}-\x{A7DC}\x{105C0}-\x{105F3}\x{10D40}-\x{10D8F}\x{10EC2}-\x{10EFC}\x{11380}-\x{113E2}"
    r"\x{116D0}-\x{116E3}\x{11BC0}-\x{11BF9}\x{11F5A}\x{13460}-\x{143FA}\x{16100}-\x{16139}\x{16D40}-\x{16D79}"
    r"\x{18CFF}\x{1CC00}-\x{1CEB3}\x{1E5D0}-\x{1E5FF}\x{1F8B2}-\x{1F8C1}\x{1FA89}-\x{1FA8F}\x{1FABE}\x{1FAC6}"
    r"\x{1FADC}-\x{1FADF}\x{1FAE9}\x{1FBCB}-\x{1FBEF}"
)
"""Code points assigned by Unicode 16, which the regex engine knows and llama.cpp's tables (15.1) do not."""


def engine_pattern(pattern: str) -> str:
    """Return a pattern for the regex engine whose Unicode classes end where llama.cpp's do."""
    return re.sub(r"\\p\{[A-Z]\}", lambda found: rf"[{found[0]}&&[^{_UNICODE_16}]]", pattern)


@dataclass(frozen=True)
class PreTokenizer:
    """One family's rules.

    `ignore_merges`: a word that is a token is that token, however the merges would build it. `add_bos`: the
    family begins with BOS unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


def _any(*alternatives: str) -> str:
    return "|".join(alternatives)


_SUFFIX = "'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE_SUFFIX = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
_SYMBOLS_AND_LINES = _SYMBOLS + r"[\r\n]*"
_SYMBOLS_AND_PATHS = _SYMBOLS + r"[\r\n/]*"
_LINES = r"\s*[\r\n]+"
_SPACES = (r"\s+(?!\S)", r"\s+")
_DIGIT = r"\p{N}"
_THREE_DIGITS = r"\p{N}{1,3}"
# note: text before a number joins its first group, since llama.cpp cuts only behind groups
_THREE_DIGITS_FROM_RIGHT = r"[^\p{N}]*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_ASCII_PUNCTUATED = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_CJK = "[一-龥぀-ゟ゠-ヿ]+"
# note: llama.cpp hides white space beyond ASCII from patterns without a Unicode class
_CJK_AND_HANGUL = r"[[一-龥ࠀ-一가-퟿]&&[^\s]]+"
_PER_LINE = r"[^\n]+|[\n]+"

_GPT2 = _any(_SUFFIX, r" ?\p{L}+", r" ?\p{N}+", _SYMBOLS, r"\s+(?!\S)")
_LLAMA3 = _any(_ANY_CASE_SUFFIX, _WORD, _THREE_DIGITS, _SYMBOLS_AND_LINES, _LINES, *_SPACES)
_QWEN2 = _any(_ANY_CASE_SUFFIX, _WORD, _DIGIT, _SYMBOLS_AND_LINES, _LINES, *_SPACES)
_QWEN35 = _any(
    _ANY_CASE_SUFFIX,
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    _DIGIT,
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    _LINES,
    *_SPACES,
)
_DEEPSEEK3 = _any(_ASCII_PUNCTUATED, _MARKED_WORD, r" ?[\p{P}\p{S}]+[\r\n]*", _LINES, *_SPACES)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

_LEAD = r"[^\r\n\p{L}\p{N}]?"


def _cased(upper: str, lower: str, suffix: str) -> tuple[str, str]:
    """Return the two kinds of word that end where capitals begin again: lower-case letters needed, or not."""
    return f"{_LEAD}{upper}*{lower}+{suffix}", f"{_LEAD}{upper}+{lower}*{suffix}"


# note: beyond ASCII every letter counts as a capital and as a small one
_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_MARKED_UPPER, _MARKED_LOWER = r"[[\p{L}\p{M}]&&[^a-z]]", r"[[\p{L}\p{M}]&&[^A-Z]]"
_OPTIONAL_SUFFIX = f"(?:{_ANY_CASE_SUFFIX})?"
_TEKKEN = _any(*_cased(_UPPER, _LOWER, ""), _DIGIT, _SYMBOLS_AND_PATHS, _LINES, *_SPACES)
_GPT4O = _any(*_cased(_UPPER, _LOWER, _OPTIONAL_SUFFIX), _THREE_DIGITS, _SYMBOLS_AND_PATHS, _LINES, *_SPACES)
_GRANITE_EMBEDDING = _any(
    *_cased(_MARKED_UPPER, _MARKED_LOWER, _OPTIONAL_SUFFIX),
    _THREE_DIGITS,
    _SYMBOLS_AND_PATHS,
    _LINES,
    *_SPACES,
)
_CASELESS = _cased(r"[\p{L}\p{M}]", r"[\p{L}\p{M}]", _OPTIONAL_SUFFIX)

_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽ"
    "ᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ"
    "\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮ\u2cf2ⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗ"
    "Ａ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_AFMOE_SCRIPTS = "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"
_YOUTU_SCRIPTS = r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"
_JAIS2_SPACES = tuple(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))

_NUMBERS_THEN_GPT2 = PreTokenizer((_DIGIT, _GPT2))
_FAMILIES: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt olmo jais "
    "trillion granite-docling exaone4 jina-v1-en jina-v2-code roberta-bpe": PreTokenizer((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": _NUMBERS_THEN_GPT2,
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "glm4 glm5": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,)),
    "laguna": PreTokenizer((_PER_LINE, _QWEN2)),
    "ufakzeka": PreTokenizer((_any(_WORD, _DIGIT, _SYMBOLS_AND_LINES, _LINES, *_SPACES),)),
    "seed-coder": PreTokenizer((_any(_ANY_CASE_SUFFIX, _WORD, _DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+", _LINES, *_SPACES),)),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer(
        (
            _any(
                "'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])",
                _WORD,
                _DIGIT,
                _SYMBOLS_AND_LINES,
                r"\s*[\r\n]",
                *_SPACES,
            ),
        )
    ),
    "exaone-moe": PreTokenizer(
        (
            _any(
                _ANY_CASE_SUFFIX,
                _LEAD + r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                _DIGIT,
                _SYMBOLS + r"[\r\n/]?",
                r"\s*[\r\n]",
                *_SPACES,
            ),
        )
    ),
    "minicpm5": PreTokenizer(
        (_THREE_DIGITS, _any(_ANY_CASE_SUFFIX, _WORD, r"\p{N}+", _SYMBOLS_AND_LINES, _LINES, *_SPACES)),
        ignore_merges=True,
    ),
    "jais-2": PreTokenizer(
        (
            _any(
                _ANY_CASE_SUFFIX,
                _WORD,
                _THREE_DIGITS,
                _SYMBOLS_AND_LINES,
                _LINES,
                *_JAIS2_SPACES,
                r"\s{1,2}(?!\S)",
                r"\s{1}",
            ),
        )
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_GPT4O,)),
    "granite-embed-multi-97m": PreTokenizer((_GRANITE_EMBEDDING,), ignore_merges=True),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "tiny_aya cohere2moe": PreTokenizer(
        (
            _THREE_DIGITS_FROM_RIGHT,
            _any(*_CASELESS, _THREE_DIGITS, _SYMBOLS_AND_PATHS, _LINES, *_SPACES),
        )
    ),
    "youtu": PreTokenizer(
        (_YOUTU_SCRIPTS, _any(*_CASELESS, _DIGIT, _SYMBOLS_AND_PATHS, _LINES, *_SPACES)), ignore_merges=True
    ),
    "afmoe": PreTokenizer((_THREE_DIGITS_FROM_RIGHT, _AFMOE_SCRIPTS, _DEEPSEEK3)),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(?:[0-9]{3})+(?![0-9]))")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "bloom poro-chat gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, _DIGIT)),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            _DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟、-。]+",
            r"\s+\z",
            _CJK_AND_HANGUL,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_HANGUL, _DIGIT)),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer((_THREE_DIGITS, _CJK, _DEEPSEEK3)),
    "spark2_5": PreTokenizer(
        (
            _THREE_DIGITS,
            _CJK,
            _any(_ASCII_PUNCTUATED, _MARKED_WORD, r" ?[\p{P}\p{S}]+", r"[\r\n]", *_SPACES),
            _DIGIT,
        )
    ),
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: rules for names, rules in _FAMILIES.items() for name in names.split()}
"""Rules by the name that a file's `tokenizer.ggml.pre` gives."""
