"""Characters that a reader does not see: which they are, which of them honest text needs, and how the rest is shown.

A model reads what a person cannot see, so text can say one thing to each of them. Unicode lists such characters as
`Default_Ignorable_Code_Point`. Scripts and emoji need some of them, one at a time and in certain places: only those are
*kept*. All others are *hidden*, and are removed, or escaped as `\\u{…}` where it matters that they were there.

Every list of invisible, formatting or control characters that Ringfence has is here. The tables are those of Unicode
15.0.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from typing import Any

# ── Tables ────────────────────────────────────────────────────────────────────────────────────────

RANGES: tuple[tuple[int, int], ...] = (
    (0x00AD, 0x00AD),  # soft hyphen
    (0x034F, 0x034F),  # combining grapheme joiner
    (0x061C, 0x061C),  # Arabic letter mark
    (0x115F, 0x1160),  # Hangul fillers
    (0x17B4, 0x17B5),  # Khmer inherent vowels
    (0x180B, 0x180F),  # Mongolian variation selectors and vowel separator
    (0x200B, 0x200F),  # zero width space, joiners, directional marks
    (0x202A, 0x202E),  # bidirectional embeddings and overrides
    (0x2060, 0x206F),  # word joiner, invisible operators, bidirectional isolates, deprecated formats
    (0x3164, 0x3164),  # Hangul filler
    (0xFE00, 0xFE0F),  # variation selectors 1 to 16
    (0xFEFF, 0xFEFF),  # byte order mark
    (0xFFA0, 0xFFA0),  # halfwidth Hangul filler
    (0xFFF0, 0xFFF8),  # reserved
    (0x1BCA0, 0x1BCA3),  # shorthand formats
    (0x1D173, 0x1D17A),  # musical formats
    (0xE0000, 0xE0FFF),  # tags, variation selectors 17 to 256, and all that is reserved beside them
)
"""Unicode's Default_Ignorable_Code_Point, which Python's `unicodedata` does not have."""

UNSEEN: tuple[tuple[int, int], ...] = (
    *RANGES,
    (0xFFF9, 0xFFFB),  # interlinear annotation
    (0xFDD0, 0xFDEF),  # no characters
    *((plane + 0xFFFE, plane + 0xFFFF) for plane in range(0, 0x110000, 0x10000)),  # nor these
)
"""With what Unicode does not list there, because it is not to be ignored, but displays do not show either."""

IGNORABLE = "".join(chr(first) if first == last else f"{chr(first)}-{chr(last)}" for first, last in UNSEEN)
"""The same, as it stands between the brackets of a pattern."""
CONTROLS = "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"
"""C0 but tab, newline and return; DEL; C1: as they stand between the brackets of a pattern."""

_RUN = re.compile(f"[{IGNORABLE}]+")
_SUSPECT = re.compile(f"[{CONTROLS}{IGNORABLE}]")
_CONTROL = re.compile(f"[{CONTROLS}]")
_SEQUENCE = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*+[ -/]*+[@-~]"  # a terminal's control sequence
    # A string for the terminal. What begins one cannot stand in another: each would be searched to the end of the text.
    "|(?:\x1b[\\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\x9d\x90\x98\x9e\x9f]*+(?:\x07|\x1b\\\\|\x9c)"
    f"|\x1b[@-Z\\\\-_]|[{CONTROLS}]"
)

_ZERO_WIDTH_SPACE = "\u200b"
_NON_JOINER = "\u200c"
_JOINER = "\u200d"
_VOWEL_SEPARATOR = "\u180e"
_BYTE_ORDER_MARK = "\ufeff"
_AS_TEXT = "\ufe0e"
_AS_EMOJI = "\ufe0f"
_FLAGS = frozenset(
    "".join(chr(0xE0000 + ord(letter)) for letter in region) + "\U000e007f" for region in ("gbeng", "gbsct", "gbwls")
)
"""What follows a black flag, in tags: the regions whose flags are emoji. Any other letters would be hidden text."""
_BLACK_FLAG = "\U0001f3f4"
_LONGEST_KEPT = 6
_SKIN_TONES = "1F3FB-1F3FF"
_IDEOGRAPHIC = ("\U000e0100", "\U000e011f")
"""The selectors under which ideographs have registered variants. Which ideograph has how many is not looked up."""

_IDEOGRAPHS = "3400-4DBF 4E00-9FFF F900-FAFF 20000-2FA1F 30000-323AF"
_JOINING = """
    0600-06FF 0700-074F 0750-077F 07C0-07FF 0840-085F 0860-08FF FB50-FDFF FE70-FEFC 10AC0-10AFF 10B80-10BAF 10D00-10D3F
    10F30-10F6F 1E900-1E95F
    0900-0DFF 1000-109F 1780-17FF 1800-18AF 1A20-1AAF 1B00-1BFF 1C00-1C4F 1CD0-1CFF A800-A82F A840-A8FF A980-A9FF
    AA60-AA7F AAE0-AAFF ABC0-ABFF 11000-11FFF
"""
"""Blocks of scripts that join letters, of Arabic's kind first, then those of India and its neighbours."""
_UNSPACED = """
    0E00-0EFF 0F00-0FFF 1000-109F 1780-17FF 1950-19FF 1A20-1AAF 1B00-1B7F A980-A9FF AA00-AADF 11700-1174F
"""
"""Blocks of scripts that put no space between words."""
_MONGOLIAN = "1820-1842 1843-18AA"

_EMOJI = """
    23 2A 30-39 A9 AE 203C 2049 2122 2139 2194-2199 21A9-21AA 231A-231B 2328 23CF 23E9-23EA 23ED-23EF 23F1-23F3
    23F8-23FA 24C2 25AA-25AB 25B6 25C0 25FB-25FE 2600-2604 260E 2611 2614-2615 2618 261D 2620 2622-2623 2626 262A
    262E-262F 2638-263A 2640 2642 2648-2653 265F-2660 2663 2665-2666 2668 267B 267E-267F 2692-2697 2699 269B-269C
    26A0-26A1 26A7 26AA-26AB 26B0-26B1 26BD-26BE 26C4-26C5 26C8 26CF 26D1 26D3-26D4 26E9-26EA 26F0-26F5 26F7-26FA
    26FD 2702 2708-2709 270C-270D 270F 2712 2714 2716 271D 2721 2733-2734 2744 2747 2753 2757 2763-2764 27A1
    2934-2935 2B05-2B07 2B1B-2B1C 2B50 2B55 3030 303D 3297 3299 1F004 1F170-1F171 1F17E-1F17F 1F202 1F21A 1F22F
    1F237 1F30D-1F30F 1F315 1F31C 1F321 1F324-1F32C 1F336 1F378 1F37D 1F393 1F396-1F397 1F399-1F39B 1F39E-1F39F
    1F3A7 1F3AC-1F3AE 1F3C2 1F3C4 1F3C6 1F3CA-1F3CE 1F3D4-1F3E0 1F3ED 1F3F3 1F3F5 1F3F7 1F408 1F415 1F41F 1F426
    1F43F 1F441-1F442 1F446-1F449 1F44D-1F44E 1F453 1F46A 1F47D 1F4A3 1F4B0 1F4B3 1F4BB 1F4BF 1F4CB 1F4DA 1F4DF
    1F4E4-1F4E6 1F4EA-1F4ED 1F4F7 1F4F9-1F4FB 1F4FD 1F508 1F50D 1F512-1F513 1F549-1F54A 1F550-1F567 1F56F-1F570
    1F573-1F579 1F587 1F58A-1F58D 1F590 1F5A5 1F5A8 1F5B1-1F5B2 1F5BC 1F5C2-1F5C4 1F5D1-1F5D3 1F5DC-1F5DE 1F5E1
    1F5E3 1F5E8 1F5EF 1F5F3 1F5FA 1F610 1F687 1F68D 1F691 1F694 1F698 1F6AD 1F6B2 1F6B9-1F6BA 1F6BC 1F6CB
    1F6CD-1F6CF 1F6E0-1F6E5 1F6E9 1F6F0 1F6F3
"""
"""What may be followed by a selector of emoji or text."""
_PICTOGRAPHS = """
    A9 AE 203C 2049 2122 2139 2194-2199 21A9-21AA 231A-231B 2328 2388 23CF 23E9-23F3 23F8-23FA 24C2 25AA-25AB 25B6
    25C0 25FB-25FE 2600-2605 2607-2612 2614-2685 2690-2705 2708-2712 2714 2716 271D 2721 2728 2733-2734 2744 2747
    274C 274E 2753-2755 2757 2763-2767 2795-2797 27A1 27B0 27BF 2934-2935 2B05-2B07 2B1B-2B1C 2B50 2B55 3030 303D
    3297 3299 1F000-1F0FF 1F10D-1F10F 1F12F 1F16C-1F171 1F17E-1F17F 1F18E 1F191-1F19A 1F1AD-1F1E5 1F201-1F20F 1F21A
    1F22F 1F232-1F23A 1F23C-1F23F 1F249-1F3FA 1F400-1F53D 1F546-1F64F 1F680-1F6FF 1F774-1F77F 1F7D5-1F7FF
    1F80C-1F80F 1F848-1F84F 1F85A-1F85F 1F888-1F88F 1F8AE-1F8FF 1F90C-1F93A 1F93C-1F945 1F947-1FAFF 1FC00-1FFFD
"""
"""Extended_Pictographic: what a joiner joins in emoji."""
_VARIANTS = {
    "\u180b": """
        1820-1826 1828 182A 182C-182D 1830 1832-1833 1835-1836 1838 1844-1849 184D-184E 185D-185E 1860 1863 1868-1869
        186F 1873-1874 1876 1880-1881 1887-1888 188A
    """,
    "\u180c": """
        1820 1825-1826 1828 182C-182D 1830 1836 1847 185E 1868 1873-1874 1887
    """,
    "\u180d": """
        1828 182C-182D 1873-1874 1887
    """,
    "\ufe00": """
        30 1000 1002 1004 1010-1011 1015 1019-101A 101C-101D 1022 1031 1075 1078 107A 1080 210B 2110 2112 211B 212C
        2130-2131 2133 2205 2229-222A 2268-2269 2272-2273 228A-228B 2293-2295 2297 229C 22DA-22DB 2A3C-2A3D 2A9D-2A9E
        2AAC-2AAD 2ACB-2ACC 3001-3002 A856 A85C A85E-A860 A868 AA60-AA66 AA6B-AA6C AA6F AA7A FF01 FF0C FF0E FF10
        FF1A-FF1B FF1F 10AC5-10AC6 10AD6-10AD7 10AE1 13091-13092 1310F 1311C 13121 13127 13139 131A0 131B1 131B8-131B9
        131CB 131F9-131FA 1327F 13285 1328C 132AA 132CB 132DC 132E7 13307 1331B 13322 1333B-1333C 13377-13378
        13399-1339A 133D3 133F2 133F5-133F6 13403 13416 13419-1341A 13423 13443-13446 1D49C 1D49E-1D49F 1D4A2
        1D4A5-1D4A6 1D4A9-1D4AC 1D4AE-1D4B5
    """,
    "\ufe01": """
        210B 2110 2112 211B 212C 2130-2131 2133 3001-3002 FF01 FF0C FF0E FF1A-FF1B FF1F 13093 130A9 13187 131B1 131EE
        131F8-131FA 13257 1327F 132A4 13308 13312-13314 1331B 13321-13322 13331 13419 1D49C 1D49E-1D49F 1D4A2
        1D4A5-1D4A6 1D4A9-1D4AC 1D4AE-1D4B5
    """,
    "\ufe02": """
        13117 13139 13183 131A0 131BA 131EE 13216 1327B 132A4 132E7 132E9 132F8 132FD 13302-13303 13310-13314 1331C
        13321 13331 1334A 13361 13373 1337D 13385 133AF-133B0 133BF 133DD 13419 1342C 1342E
    """,
}
"""Which selector may follow what, beside emoji and the variants that stand for compatibility ideographs."""

# ── What is hidden ────────────────────────────────────────────────────────────────────────────────


def suspect(text: str) -> bool:
    """Whether there is anything here that the functions below might change. Cheap for what nearly all text is."""
    if text.isascii():
        return not text.isprintable() and _SUSPECT.search(text) is not None
    return _SUSPECT.search(text) is not None


def bare(text: str) -> str:
    """The text without any ignorable character, the kept ones included: for comparing, not for showing."""
    return text if text.isascii() else _RUN.sub("", text)


def without_controls(text: str) -> tuple[str, int]:
    """The text without control characters and whatever a terminal would obey; and how many were removed."""
    return _SEQUENCE.subn("", text)


def without_hidden(text: str) -> tuple[str, int]:
    """The text without hidden characters; and how many were removed."""
    if text.isascii():
        return text, 0
    parts = list(_parts(text))
    gone = sum(len(part) for part, hidden in parts if hidden)
    return ("".join(part for part, hidden in parts if not hidden), gone) if gone else (text, 0)


def escaped(text: str) -> str:
    """The text with control and hidden characters escaped: a reader sees all of it, and nothing else changes."""
    if not suspect(text):
        return text
    clean = "".join("".join(map(_escape, part)) if hidden else part for part, hidden in _parts(text))
    return _CONTROL.sub(lambda match: _escape(match[0]), clean)


def name(text: str) -> str:
    """A key or a name, escaped: no two that differ look the same for what is in them and cannot be seen."""
    clean = escaped(text)
    return _escape(_BYTE_ORDER_MARK) + clean[1:] if clean.startswith(_BYTE_ORDER_MARK) else clean


def visible(text: str, *, lines: bool = False) -> str:
    """The text with everything escaped that a terminal could act upon or that a reader would not see.

    `lines` keeps newlines and tabs, for text that may span several lines.
    """
    if text.isascii() and text.isprintable():
        return text
    return _each(text, escape, "\n\t" if lines else "")


def quotable(text: str, escape: Callable[[str], str], plain: str = "") -> str:
    """The same in the syntax of some language, by whatever escapes one character in it."""
    return text if text.isascii() and text.isprintable() else _each(text, escape, plain)


def json_text(value: Any, *, indent: int | None = 2) -> str:
    """JSON that reads the same to a program, and in which a person sees every character."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    # Only strings can hold what is escaped, and inside them an escape means the same.
    return quotable(text, lambda character: json.dumps(character)[1:-1], "\n")


def _each(text: str, escape: Callable[[str], str], plain: str) -> str:
    out: list[str] = []
    for place, (part, hidden) in enumerate(_parts(text)):
        if hidden or (place == 0 and part == _BYTE_ORDER_MARK):
            out.extend(map(escape, part))
        elif _RUN.fullmatch(part):
            out.append(part)
        else:
            out.extend(c if c.isprintable() or c in plain else escape(c) for c in part)
    return "".join(out)


def _escape(character: str) -> str:
    return f"\\u{{{ord(character):x}}}"


def escape(character: str) -> str:
    """One character, as `visible` writes it."""
    if character in "\n\t\r":
        return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}[character]
    number = ord(character)
    return f"\\x{number:02x}" if number < 0xA0 else _escape(character)


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """The text in pieces, each with whether it is hidden. Ignorable characters that are kept are pieces, too."""
    end = 0
    for run in _RUN.finditer(text):
        start, stop = run.span()
        if start > end:
            yield text[end:start], False
        before = text[start - 1] if start else ""
        after = text[stop] if stop < len(text) else ""
        yield run[0], len(run[0]) > _LONGEST_KEPT or not _kept(run[0], before, after)
        end = stop
    if end < len(text):
        yield text[end:], False


@lru_cache(maxsize=1024)
def _kept(run: str, before: str, after: str) -> bool:
    """Whether a script or an emoji uses these characters, which nothing visible divides, between those two."""
    if not before:
        return run == _BYTE_ORDER_MARK
    if run == _AS_EMOJI + _JOINER:
        return before in _set(_EMOJI) and after in _set(_PICTOGRAPHS)
    if len(run) > 1:
        return before == _BLACK_FLAG and run in _FLAGS
    if run in (_JOINER, _NON_JOINER):
        return _joined(run, before, after)
    if run == _ZERO_WIDTH_SPACE:
        return _written_in(_UNSPACED, before) and _written_in(_UNSPACED, after)
    if run == _VOWEL_SEPARATOR:
        return before in _set(_MONGOLIAN) and after in _set(_MONGOLIAN)
    return _varies(before, run)


def _joined(run: str, before: str, after: str) -> bool:
    if run == _JOINER and (before in _set(_PICTOGRAPHS) or before in _set(_SKIN_TONES)):
        return after in _set(_PICTOGRAPHS)
    # A joiner may end a word, to show the form that a letter has before another; a non-joiner stands between two.
    return _written_in(_JOINING, before) and (run == _JOINER or _written_in(_JOINING, after))


def _varies(base: str, selector: str) -> bool:
    if selector in (_AS_TEXT, _AS_EMOJI):
        return base in _set(_EMOJI)
    if _IDEOGRAPHIC[0] <= selector <= _IDEOGRAPHIC[1]:
        return base in _set(_IDEOGRAPHS)
    return base in _set(_VARIANTS.get(selector, "")) or selector in _compatible().get(base, "")


def _written_in(blocks: str, character: str) -> bool:
    return character in _set(blocks) and unicodedata.category(character)[0] in "LM"


class _Ranges:
    """Characters by ranges; `in` is all that it is for."""

    def __init__(self, table: str) -> None:
        pairs = [entry.partition("-") for entry in table.split()]
        self._ranges = [(int(first, 16), int(last or first, 16)) for first, _, last in pairs]

    def __contains__(self, character: str) -> bool:
        return bool(character) and any(first <= ord(character) <= last for first, last in self._ranges)


_set = cache(_Ranges)


@cache
def _compatible() -> dict[str, str]:
    """The selectors of ideographs that have compatibility ideographs: one for each, in their order."""
    found: dict[str, str] = {}
    for number in (*range(0xF900, 0xFB00), *range(0x2F800, 0x2FA20)):
        base = unicodedata.normalize("NFD", chr(number))
        if base != chr(number):
            found[base] = found.get(base, "") + chr(0xFE00 + len(found.get(base, "")))
    return found


_ELLIPSIS = "\u2026"
_BLANKS = "\x0b\x0c\x1c\x1d\x1e\x1f\x85\u1680\u2028\u2029"
"""What readers take for space between words, beside what NFKC makes a space, and tab, newline and return."""
_UNTYPED = {
    **dict.fromkeys((*range(9), *range(14, 28), *range(127, 160))),
    **{ord(blank): " " for blank in _BLANKS},
}


def _nfkc(text: str) -> str:
    """The form NFKC, in time that grows with the length alone: marks on one character are put in order, which takes
    the square of their number, so a run of them that no language has is cut (as Unicode's stream-safe form does)."""
    pieces, begin = [], 0
    for run in _many_marks().finditer(text):
        pieces.append(text[begin : run.end()])
        begin = run.end()
    return "".join(unicodedata.normalize("NFKC", piece) for piece in (*pieces, text[begin:]))


@cache
def _many_marks() -> re.Pattern[str]:
    every = map(chr, range(0x300, 0x1F000))
    marks = (each for each in every if unicodedata.combining(unicodedata.normalize("NFKD", each)[0]))
    return re.compile(f"[{''.join(marks)}]{{30}}")


_PIECE = 4096
_BEFORE = 32


def folded(text: str, most: int = sys.maxsize) -> str:
    """The text in Unicode's form NFKC, without ignorable and control characters: what looks alike is alike.

    An ellipsis stays one character: as three dots, every shortened sentence would look like a path that climbs.
    Raises ValueError where more than `most` characters come of it: one character can become eighteen.
    """
    if text.isascii() and text.isprintable():
        return text
    done, length = [], 0
    for piece in _pieces(text):
        done.append(_folded(piece))
        length += len(done[-1])
        if length > most:
            raise ValueError(f"more than {most} characters")
    return "".join(done)


def _pieces(text: str) -> Iterator[str]:
    """Between two of them other threads get the interpreter, which a single long text would have to itself."""
    begin = 0
    while len(text) - begin > _PIECE:
        most = begin + _PIECE
        end = next((end for end in range(most, begin + _PIECE // 2, -1) if _is_apart(text, end)), most)
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _is_apart(text: str, place: int) -> bool:
    """Whether what stands there has the same form with and without what stands before it."""
    there = text[place]
    if ord(there) in _UNTYPED or _RUN.match(there):
        return False  # it will be gone, and what follows it meets what stands before
    if there.isascii():
        return True
    if unicodedata.combining(unicodedata.normalize("NFKD", there)[0]):
        return False
    before = bare(text[place - _BEFORE : place].translate(_UNTYPED))
    form = partial(unicodedata.normalize, "NFKC")
    return form(before + there) == form(before) + form(there)


def _folded(text: str) -> str:
    if not text.isprintable():
        text = text.translate(_UNTYPED)
    if text.isascii():
        return text
    parts = [_nfkc(part) for part in bare(text).split(_ELLIPSIS)]
    return bare(_ELLIPSIS.join(parts))  # the form of a filler is another filler


# ── Names that look alike ─────────────────────────────────────────────────────────────────────────

_TWINS = {
    "a": "\u0430\u03b1\u0251",
    "b": "\u044c",
    "c": "\u0441\u03f2",
    "d": "\u0501",
    "e": "\u0435\u0451\u03b5\u0454",
    "g": "\u0261\u0581",
    "h": "\u04bb",
    "j": "\u0458\u03f3",
    "k": "\u043a\u03ba",
    "l": "i1|\u0456\u03b9\u0131\u04cf\u0457",
    "m": "\u043c",
    "n": "\u0578\u03b7",
    "o": "0\u043e\u03bf\u0585",
    "p": "\u0440\u03c1",
    "q": "\u051b",
    "r": "\u0433\u2c85",
    "s": "\u0455",
    "t": "\u0442\u03c4",
    "u": "\u03c5\u057d",
    "v": "\u03bd\u0475",
    "w": "\u051d\u03c9",
    "x": "\u0445\u03c7",
    "y": "\u0443\u03b3",
}
"""Of small letters and digits, those of this and other scripts that are told apart by a careful look at most."""
_ALIKE = str.maketrans({other: one for one, others in _TWINS.items() for other in others})
_JOINTS = str.maketrans("", "", "-_.@ ")


def alike(text: str) -> str:
    """The same for all names that a reader may take for one another: whatever their case, their script, or the joints
    between their words."""
    return folded(text).casefold().translate(_ALIKE).translate(_JOINTS)
