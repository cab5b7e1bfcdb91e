"""State files and the states kept in memory, from llama.cpp to pykv and back: tokens, bytes, and what is said next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import state_pairs
from support.oracle import OracleBatch
from support.paired import Pair
from support.state_io import without_rows
from support.state_pairs import TOKENS, Setting, greedy, lived

import pykv
from pykv.state_format import Dialect, parse_state, side_car
from pykv.state_format.containers import read_container

N_NEXT = 50
NEXT = 7
"""The token from which both sides go on."""

DIALECT = "10/3"
"""What the llama.cpp of the tests writes and reads."""

KINDS = [
    "wide",
    "bloom-3l-4heads",
    "mpt-2l-positions",
    "deepseek2-3l",
    "qwen2vl-3l",
    "gemma3-4l-w16-every2",
    "gpt-oss-4l-w32",
    "llama4-4l",
    "mamba-4l",
    "mamba2-4l",
    "rwkv7-3l",
    "falcon-h1-3l",
    "jamba-4l",
    "qwen3next-4l",
    "lfm2-4l",
    "lfm2-4l-w16",
]
"""Plain caches (rotated keys, slopes, embedded positions), keys alone, several axes; windows (with sinks, in chunks);
states; states beside plain caches, and beside windows."""

TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"]

SETTINGS = [
    *(Setting(model) for model in KINDS),
    *(Setting(model, flash=False, unified=False) for model in KINDS),
    Setting("gemma3n-22l-w32-f32"),
    *(Setting("wide", one, one, unified=i % 2 == 0) for i, one in enumerate(TYPES) if one != "f16"),
    *(Setting("gemma2-3l-wide-w16", one, one, unified=i % 2 == 1) for i, one in enumerate(TYPES)),
    Setting("wide", "q8_0", "q4_0"),
    Setting("wide", "f16", "q5_1", unified=False),
    *(Setting("wide", one, "f16", flash=False, unified=i % 2 == 0) for i, one in enumerate(TYPES) if one != "f16"),
    *(Setting("gemma2-3l-wide-w16", "q8_0", one, flash=False) for one in ("f32", "bf16")),
    Setting("gemma3-4l-w16-every2", swa_full=True),
    Setting("lfm2-4l", n_rs_seq=4),
    Setting("lfm2-4l-w16", unified=False, n_rs_seq=3),
]


pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore:.* tokens are noted"),  # they are not what was decoded
    pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name),
]
contexts = state_pairs.contexts


@pytest.fixture
def files(tmp_path: Path) -> Callable[[str, int], Path]:
    """Return where a side writes a sequence, or with -1 its session."""
    return lambda side, seq_id: tmp_path / f"{side}-{'session' if seq_id == -1 else f'sequence-{seq_id}'}"


def noted(seq_id: int) -> list[int]:
    """Return the tokens to note in a file: none with sequence 2, a list for itself with each other."""
    return [] if seq_id == 2 else TOKENS[: 12 + seq_id]


def our_file(context: pykv.Context, path: Path, seq_id: int) -> int:
    if seq_id == -1:
        return context.save_session(path, noted(seq_id), dialect=DIALECT)
    return context.save_sequence(path, seq_id, noted(seq_id), dialect=DIALECT)


def check_bytes(context: pykv.Context, setting: Setting, ours: bytes, theirs: bytes, *, partial: bool = False) -> None:
    """Compare two saved states, and the rows in them where both sides compute the same bits."""
    both = []
    for data in (ours, theirs):
        found = read_container(data)
        sections, end = parse_state(
            data, found.state.start, context.memory.state_layouts(partial), whole=found.kind.whole, dialect=Dialect.S10
        )
        assert end == len(data)
        both.append(data if setting.has_same_bits else without_rows(data, sections))
    assert both[0] == both[1]


def test_equal_histories_give_equal_files_and_bytes(
    contexts: Callable[..., Pair], setting: Setting, files: Callable[[str, int], Path]
) -> None:
    pair = contexts()
    lived(pair, setting)
    context = pair.ours
    for seq_id in (-1, 0, 1, 2):
        paths = [files(side, seq_id) for side in ("pykv", "llama")]
        nbytes = our_file(context, paths[0], seq_id)
        pair.theirs.save_file(paths[1], noted(seq_id), seq_id)
        ours, theirs = (path.read_bytes() for path in paths)
        assert nbytes == len(ours)
        if seq_id == -1:
            assert side_car(paths[0]).is_file()
        else:  # pykv's notes follow
            assert len(ours) > len(theirs)
            ours = ours[: len(theirs)]
        check_bytes(context, setting, ours, theirs)
        which = None if seq_id == -1 else seq_id
        kept = bytes(context.state_bytes(which, dialect=DIALECT))
        check_bytes(context, setting, kept, pair.theirs.state_data(seq_id))
    for seq_id in (0, 1, 2):
        part = bytes(context.state_bytes(seq_id, partial=True, dialect=DIALECT))
        check_bytes(context, setting, part, pair.theirs.state_data(seq_id, partial=True), partial=True)


def test_both_go_on_with_the_others_session(
    contexts: Callable[..., Pair], setting: Setting, files: Callable[[str, int], Path]
) -> None:
    """File and bytes, into another number of cells, of which some are taken."""
    first, other = contexts(), contexts(1536)
    lived(first, setting)
    ours, theirs = files("pykv", -1), files("llama", -1)
    our_file(first.ours, ours, -1)
    first.theirs.save_file(theirs, noted(-1))
    kept = {"ours": bytes(first.ours.state_bytes(dialect=DIALECT)), "theirs": first.theirs.state_data()}
    other.decode(OracleBatch.of(TOKENS[:30], 0, 1))

    with pytest.warns(RuntimeWarning, match="nothing says which model"):
        assert other.ours.load_session(theirs) == noted(-1)
    assert other.theirs.load_file(ours) == (1, noted(-1))
    check_held(other, setting, -1)
    other.decode(OracleBatch.of(TOKENS[:30], other.ours.memory.pos_max(1) + 1, 1))
    other.ours.load_state_bytes(kept["theirs"])
    assert other.theirs.state_set(kept["ours"]) == len(kept["ours"])
    check_held(other, setting, -1)
    for seq_id in (2, 0, 1):
        check_next(first, other, (seq_id, seq_id))


def check_held(pair: Pair, setting: Setting, seq_id: int) -> None:
    """Compare what both sides hold of a sequence, or with -1 of all, each of the other's making."""
    pair.ours.memory.check()
    which = None if seq_id == -1 else seq_id
    kept = bytes(pair.ours.state_bytes(which, dialect=DIALECT))
    check_bytes(pair.ours, setting, kept, pair.theirs.state_data(seq_id))


def check_next(first: Pair, other: Pair, seq_ids: tuple[int, int]) -> None:
    """Let all four go on, a sequence of the first two and one of the others; all must say the same."""
    p = first.ours.memory.pos_max(seq_ids[0]) + 1
    expected, _ = first.theirs.greedy(OracleBatch.of([NEXT], p, seq_ids[0]), N_NEXT)
    said = {
        "pykv": greedy(first.ours, NEXT, p, seq_ids[0], N_NEXT),
        "pykv with llama.cpp's state": greedy(other.ours, NEXT, p, seq_ids[1], N_NEXT),
        "llama.cpp with pykv's state": other.theirs.greedy(OracleBatch.of([NEXT], p, seq_ids[1]), N_NEXT)[0],
    }
    assert said == dict.fromkeys(said, expected)


def test_both_go_on_with_the_others_sequences(
    contexts: Callable[..., Pair], setting: Setting, files: Callable[[str, int], Path]
) -> None:
    """One from a file, one from bytes, each as another sequence, beside one whose cells lie here and there."""
    first, other = contexts(), contexts(1536)
    lived(first, setting)
    for i in range(0, 40, 4):
        other.decode(OracleBatch.of(TOKENS[100 + i : 104 + i], i, 0))
        other.decode(OracleBatch.of(TOKENS[200 + i : 203 + i], i // 4 * 3, 2))
    other.edit("seq_rm", 2, -1, -1)
    kept = bytes(first.ours.state_bytes(1, dialect=DIALECT)), first.theirs.state_data(1)
    ours, theirs = files("pykv", 0), files("llama", 0)
    our_file(first.ours, ours, 0)
    first.theirs.save_file(theirs, noted(0), 0)

    with pytest.warns(RuntimeWarning, match="nothing says which model"):
        assert other.ours.load_sequence(theirs, 1) == noted(0)
    assert other.theirs.load_file(ours, 1) == (theirs.stat().st_size, noted(0))
    other.ours.load_state_bytes(kept[1], 2)
    assert other.theirs.state_set(kept[0], 2) == len(kept[0])
    for seq_id in (1, 2):
        check_held(other, setting, seq_id)
    check_next(first, other, (0, 1))
    check_next(first, other, (1, 2))


def test_both_go_back_with_the_others_partial_state(contexts: Callable[..., Pair], setting: Setting) -> None:
    """What a cut cannot bring back was taken before an answer, and is loaded to cut that off again."""
    pair = contexts()
    lived(pair, setting)
    p = pair.ours.memory.pos_max(0) + 1
    ours = bytes(pair.ours.state_bytes(0, partial=True, dialect=DIALECT))
    theirs = pair.theirs.state_data(0, partial=True)
    expected, _ = pair.theirs.greedy(OracleBatch.of([NEXT], p, 0), N_NEXT)
    assert greedy(pair.ours, NEXT, p, 0, N_NEXT) == expected
    pair.ours.load_state_bytes(theirs, 0, partial=True)
    assert pair.theirs.state_set(ours, 0, partial=True) == len(ours)
    pair.edit("seq_rm", 0, p, -1)
    check_held(pair, setting, 0)
    assert greedy(pair.ours, NEXT, p, 0, N_NEXT) == expected
    assert pair.theirs.greedy(OracleBatch.of([NEXT], p, 0), N_NEXT)[0] == expected
