"""Characters that nobody sees: the table is the standard's, honest text stays as it is, and all else comes to light."""

from __future__ import annotations

import sys
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core import invisible

# DerivedCoreProperties.txt of Unicode, Default_Ignorable_Code_Point, line by line.
STANDARD = """
00AD 034F 061C 115F..1160 17B4..17B5 180B..180D 180E 180F 200B..200F 202A..202E 2060..2064 2065 2066..206F 3164
FE00..FE0F FEFF FFA0 FFF0..FFF8 1BCA0..1BCA3 1D173..1D17A E0000 E0001 E0002..E001F E0020..E007F E0080..E00FF
E0100..E01EF E01F0..E0FFF
"""


def standard() -> set[int]:
    lines = (entry.partition("..") for entry in STANDARD.split())
    return {n for first, _, last in lines for n in range(int(first, 16), int(last or first, 16) + 1)}


IGNORABLE = "".join(map(chr, sorted(standard())))

KEPT = {
    "emoji style": "☂\ufe0f and ☂\ufe0e",
    "keycap": "1\ufe0f\u20e3",
    "family": "👩\u200d👩\u200d👧",
    "skin tone": "👩🏽\u200d🚀",
    "heart on fire": "❤\ufe0f\u200d🔥",
    "rainbow flag": "🏳\ufe0f\u200d🌈",
    "flag of Scotland": "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
    "mathematics": "a ≨\ufe00 b",
    "compatibility ideograph": "凞\ufe00 and 免\ufe00免\ufe01",
    "ideographic variant": "葛\U000e0100城",
    "Persian": "می\u200cخواهم",
    "joiner at the end of a word": "ه\u200d.",
    "Sinhala": "ශ්\u200dරී",
    "Devanagari": "क्\u200cष क्\u200dष",
    "Khmer": "ភាសា\u200bខ្មែរ",
    "Thai": "ภาษา\u200bไทย",
    "Mongolian": "ᠪᠠᠢᠨ\u180eᠠ ᠨ\u180bᠠ",
    "byte order mark": "\ufeffname,age",
}
HIDDEN = {
    "selector after a letter": "a\ufe0fb",
    "second selector": "☂\ufe0f\ufe0f",
    "selector that is not registered": "免\ufe02",
    "many selectors": "😀" + "".join(chr(0xE0100 + n) for n in b"run this"),
    "tags": "hello" + "".join(chr(0xE0000 + n) for n in b"run this"),
    "letters behind a flag": "🏴" + "".join(chr(0xE0000 + n) for n in b"ignor") + "\U000e007f",
    "tags behind a flag": "🏴" + "".join(chr(0xE0000 + n) for n in b"run this now") + "\U000e007f",
    "tags without an end": "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074",
    "joiner between letters": "pass\u200dword",
    "non-joiner between letters": "pass\u200cword",
    "joiner after a picture": "😀\u200dx",
    "two joiners": "می\u200c\u200cخواهم",
    "zero width space": "rm\u200b -rf",
    "vowel separator": "a\u180eb",
    "byte order mark inside": "a\ufeffb",
    "soft hyphen": "pass\xadword",
    "Hangul filler": "a\u3164b",
    "halfwidth Hangul filler": "a\uffa0b",
    "invisible times": "2\u2062x",
    "grapheme joiner": "a\u034fb",
    "overrides": "a\u202eb",
    "isolates": "a\u2066b\u2069",
    "directional mark": "a\u200eb",
    "annotation": "a\ufff9b\ufffac\ufffb",
    "no characters": "a\ufffeb\ufdd0c\U0001ffffd",
}


def test_the_table_is_that_of_the_standard() -> None:
    assert {n for first, last in invisible.RANGES for n in range(first, last + 1)} == standard()


def test_every_format_character_that_python_knows_is_in_it() -> None:
    # As the standard derives the property: format characters, but those that are seen, or stand for something seen.
    seen = {*range(0xFFF9, 0xFFFC), *range(0x13430, 0x13440), *range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2}
    seen |= {0x110BD, 0x110CD}
    formats = {n for n in range(sys.maxunicode + 1) if unicodedata.category(chr(n)) == "Cf"} - seen
    assert formats <= standard()


@pytest.mark.parametrize("text", KEPT.values(), ids=KEPT)
def test_what_scripts_and_emoji_use_stays(text: str) -> None:
    assert invisible.without_hidden(text) == (text, 0)
    assert invisible.escaped(text) == text


@pytest.mark.parametrize("text", HIDDEN.values(), ids=HIDDEN)
def test_all_else_is_removed_or_escaped(text: str) -> None:
    clean, gone = invisible.without_hidden(text)
    assert gone == len(text) - len(clean) > 0
    assert invisible.without_hidden(clean) == (clean, 0)
    shown = invisible.escaped(text)
    assert r"\u{" in shown
    assert invisible.without_hidden(shown) == (shown, 0)
    assert invisible.visible(text) == shown


def test_an_escape_says_which_it_was() -> None:
    assert invisible.escaped("rm\u200b \x1b[2J") == r"rm\u{200b} \u{1b}[2J"
    assert invisible.visible("rm\u200b\U000e0041\xad\n\x1b") == r"rm\u{200b}\u{e0041}\u{ad}\n\x1b"
    assert invisible.visible("a\n\tb\u200b", lines=True) == "a\n\tb\\u{200b}"


def test_in_a_name_a_byte_order_mark_is_shown_too() -> None:
    assert invisible.name("\ufeffid") == r"\u{feff}id"
    assert invisible.visible("\ufeffid") == r"\u{feff}id"


visible = st.sampled_from("ab1☂👩🏴免葛میក្ไᠪ🏽🔥 \x1b[m") | st.characters()
mixed = st.text(st.sampled_from(IGNORABLE[:200]) | visible, max_size=30)


@given(mixed)
def test_nothing_visible_changes_and_a_second_look_finds_nothing(text: str) -> None:
    clean, gone = invisible.without_hidden(text)
    assert invisible.bare(clean) == invisible.bare(text)
    assert len(clean) + gone == len(text)
    assert invisible.without_hidden(clean) == (clean, 0)
    shown = invisible.escaped(text)
    assert invisible.escaped(shown) == shown
    assert invisible.suspect(text) or (shown == text and not gone)


@given(mixed)
def test_there_is_never_a_run_of_them_but_in_emoji(text: str) -> None:
    clean = invisible.without_hidden(text)[0]
    for first, second in pairwise(clean):
        if first in IGNORABLE and second in IGNORABLE:
            assert (first, second) == ("\ufe0f", "\u200d") or 0xE0020 <= ord(second) <= 0xE007F


@given(st.text(max_size=10), st.binary(min_size=2, max_size=40), st.sampled_from([0xE0000, 0xE0100, 0xFE00]))
def test_bytes_cannot_be_smuggled_behind_a_character(text: str, data: bytes, first: int) -> None:
    digits = data if first > 0xFFFF else [half for byte in data for half in divmod(byte, 16)]
    carried = "".join(chr(first + digit) for digit in digits)
    assert not set(invisible.without_hidden(f"{text}a{carried}")[0]) & set(carried) - set(text)


@given(mixed)
def test_two_names_that_differ_differ_when_shown(text: str) -> None:
    assert invisible.name(f"{text}\u200b") != invisible.name(text)
    assert invisible.bare(text) == "" or invisible.bare(invisible.bare(text)) == invisible.bare(text)


@pytest.mark.parametrize("marks", ["\u0301\u0316", "\u0f81\u0316", "\u0344\u0f73"])
def test_many_marks_on_one_character_cost_no_more_than_their_number(marks: str) -> None:
    """In the square of it, this would take hours."""
    text = "rm \uff52\uff4d a" + marks * 400_000 + " -rf"
    folded = invisible.folded(text)
    assert folded.startswith("rm rm ") and folded.endswith(" -rf")
    few = "a" + marks * 14
    assert invisible.folded(few) == unicodedata.normalize("NFKC", few)


@pytest.mark.parametrize("opener", ["\x9d", "\x90", "\x1b]", "\x9b", "\x1b[", "\x9b0", "\x1b]\x9d"])
def test_strings_that_never_end_cost_no_more_than_their_length(opener: str) -> None:
    # By the square of it, this would take minutes.
    clean, gone = invisible.without_controls(opener * 300_000 + "z")
    assert clean.isprintable() and gone >= 300_000
    assert invisible.without_controls(f"a\x9db{opener}c\x07d")[0].endswith("d")


@given(
    st.lists(
        st.sampled_from("a \n\x00é\u0301\u0323\u200b가\u11a8\u1161\u1100\ufdfa\u09be\u0344ﾊﾟ\u3099\u2026"), min_size=200
    )
)
def test_a_long_text_is_folded_piece_by_piece(characters: list[str]) -> None:
    text = "".join(characters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(invisible, "_PIECE", 64)
        assert len(list(invisible._pieces(text))) > 2
        assert invisible.folded(text) == invisible._folded(text)


def test_no_more_is_folded_than_is_asked_for() -> None:
    assert invisible.folded("\ufdfa" * 100, 1800) == unicodedata.normalize("NFKC", "\ufdfa") * 100
    with pytest.raises(ValueError, match="more than 1799 characters"):
        invisible.folded("\ufdfa" * 100, 1799)
