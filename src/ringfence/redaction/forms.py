"""The forms in which a known value is searched: as text with its usual escapes, in hex, in base64, and reversed.

As text it is searched in capitals and small letters alike: names of headers are changed from one to the other.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ringfence.redaction.grammar import Part, either, literal, maybe, sequence, some

PIECE, OVERLAP = 128, 8
"""A longer value is searched in pieces, each enough by itself, so that no pattern grows without end."""

_NAMED = {"&": "amp", "<": "lt", ">": "gt", '"': "quot", "'": "apos"}
_LETTERS = {"\n": b"n", "\r": b"r", "\t": b"t", "\b": b"b", "\f": b"f"}
_ESCAPED = frozenset("\"\\/'`$!")
_SLASHES = some(r"\\", 1, None)
"""JSON within JSON doubles them."""
_PERCENT = (literal(b"%"), maybe(literal(b"25")), maybe(literal(b"25")))
# What is put between the bytes of a dump, or before each of them: one loop, since it stands in a pattern many times.
_BETWEEN = Part(
    r"(?:[ :._%=,;\r\n\t-]|\\+(?:x|u00)|0x)*",
    r"(?:[ :._%=,;\r\n\t-]|\\+(?:x|u00)|0x)*(?:[ :._%=,;\r\n\t-]|\\+(?:x|u(?:00?)?)?|0x?)",
    8,
)
# A line's end within base64, as it is or as JSON and URLs write it, and the indentation after it.
_WRAP = Part(
    r"(?:[\r\n\t ]|\\+[rn]|%0[aAdD])*",
    r"(?:[\r\n\t ]|\\+[rn]|%0[aAdD])*(?:[\r\n\t ]|\\+[rn]?|%(?:0[aAdD]?)?)",
    8,
)


@dataclass(frozen=True, slots=True)
class Form:
    """One form of a value."""

    parts: list[Part]

    @property
    def whole(self) -> str:
        return "".join(part.whole for part in self.parts)

    @property
    def longest(self) -> int:
        return sum(part.longest for part in self.parts)


def forms(value: str) -> Iterator[Form]:
    """Every form of the value."""
    for piece in _pieces(value):
        yield Form([_character(character) for character in piece])
        yield Form([_character(character) for character in reversed(piece)])
        data = piece.encode()
        yield Form(_hex(data))
        for alignment in range(3):
            yield Form(_base64(data, alignment))


def _pieces(value: str) -> Iterator[str]:
    if len(value) <= PIECE + PIECE // 2:
        yield value
        return
    step = PIECE - OVERLAP
    for start in range(0, len(value) - PIECE, step):
        yield value[start : start + PIECE]
    yield value[-PIECE:]


@lru_cache(maxsize=512)
def _character(character: str) -> Part:
    """A character as it stands, or as JSON, URLs, HTML or a program's source write it, in either case."""
    raw = character.encode()
    if raw.isalnum():
        return literal(raw, any_case=True)
    cases = dict.fromkeys((character, character.lower(), character.upper()))
    return either(*(way for case in cases for way in _ways(case)))


def _ways(character: str) -> list[Part]:
    raw = character.encode()
    ways = [literal(raw), sequence(*(sequence(*_PERCENT, *_digits(byte)) for byte in raw))]
    units = character.encode("utf-16-be")
    ways.append(sequence(*(sequence(_SLASHES, some("[uU]"), *_digits(a), *_digits(b)) for a, b in _pairs(units))))
    ways.append(sequence(*(sequence(_SLASHES, some("[xX]"), *_digits(byte)) for byte in raw)))
    if character == " ":
        ways.append(literal(b"+"))
    if character == "\n":
        ways.append(literal(b"\r\n"))
        ways.append(sequence(_SLASHES, some("[rR]"), _SLASHES, some("[nN]")))
        ways.append(sequence(*_PERCENT, literal(b"0d", any_case=True), *_PERCENT, literal(b"0a", any_case=True)))
    if character in _LETTERS:
        ways.append(sequence(_SLASHES, literal(_LETTERS[character], any_case=True)))
    if character in _ESCAPED:
        ways.append(sequence(_SLASHES, literal(raw)))
    if len(raw) == 1:
        ways.append(_entity(character))
    return ways


def _entity(character: str) -> Part:
    number = ord(character)
    digits = sequence(literal(b"#x", any_case=True), some("0", 0, 2), *_tight(number))
    forms = [literal(f"#{number}".encode()), digits]
    if character in _NAMED:
        forms.append(literal(_NAMED[character].encode(), any_case=True))
    return sequence(literal(b"&"), either(*forms), literal(b";"))


def _tight(number: int) -> list[Part]:
    return [literal(digit.encode(), any_case=True) for digit in f"{number:x}"]


def _digits(byte: int) -> tuple[Part, Part]:
    digits = f"{byte:02x}".encode()
    return literal(digits[:1], any_case=True), literal(digits[1:], any_case=True)


def _pairs(units: bytes) -> Iterator[tuple[int, int]]:
    return zip(units[::2], units[1::2], strict=True)


def _hex(data: bytes) -> list[Part]:
    first, *rest = data
    return [sequence(*_digits(first)), *(sequence(_BETWEEN, *_digits(byte)) for byte in rest)]


def _base64(data: bytes, alignment: int) -> list[Part]:
    """The characters that this value alone decides, at its place in whatever was encoded around it."""
    encoded = b64encode(bytes(alignment) + data)
    first, *rest = encoded[(0, 2, 3)[alignment] : (alignment + len(data)) * 8 // 6]
    return [_symbol(first), *(sequence(_WRAP, _symbol(byte)) for byte in rest)]


def _symbol(byte: int) -> Part:
    if byte == ord("+"):
        unit = sequence(_SLASHES, literal(b"u002b", any_case=True))  # as .NET's JSON has it
        return either(some("[+-]"), sequence(*_PERCENT, literal(b"2b", any_case=True)), unit)
    if byte == ord("/"):
        return either(some("[/_]"), sequence(_SLASHES, some("/")), sequence(*_PERCENT, literal(b"2f", any_case=True)))
    return literal(bytes((byte,)))
