"""The patterns by which secrets are found: the forms of a known value, and the shapes of tokens, keys and headers.

A stream is cut anywhere, so beside the pattern of a whole match it needs the pattern of every beginning of one. Both
are built here from the same parts, in the syntax of RE2, on bytes.

A known value is searched as text with its usual escapes, in hex, in base64, and reversed. As text it is searched in
capitals and small letters alike: names of headers are changed from one to the other. A shape must be rare in honest
text: words that merely stand near a value (`password = …`) are no shape, since programs and documents are full of them.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, reduce
from typing import Any

import re2

from ringfence.core.record import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a pattern."""

    whole: str
    begun: str
    """What matches every beginning of it that is not empty, itself included."""
    longest: int = 1
    """In bytes; what has no end counts as `_RUN`."""
    loose: str = ""
    """The whole without counting far, for beginnings: to wait once too often costs less than to count backwards."""


_RUN = 8


def some(kind: str, least: int = 1, most: int | None = 1) -> Part:
    """The pattern of so many bytes of one kind: a class, or a single byte as RE2 writes it. None: any number."""
    if (least, most) == (1, 1):
        return Part(kind, kind)
    upper = "" if most is None else str(most)
    begun = f"{kind}+" if most is None or most > _RUN else f"{kind}{{1,{most}}}"
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    whole = kind + (short or f"{{{least},{upper}}}")
    loose = whole if max(least, most or 0) <= _RUN else kind + ("+" if least else "*")
    return Part(whole, begun, max(least, _RUN if most is None else most), loose)


def literal(data: bytes, *, any_case: bool = False) -> Part:
    """Exactly these bytes."""
    return sequence(*(some(_byte(byte, any_case=any_case)) for byte in data))


def sequence(*parts: Part) -> Part:
    """The pattern of one after the other."""
    return reduce(lambda rest, part: _joined(part, rest), reversed(parts[:-1]), parts[-1])


def either(*parts: Part) -> Part:
    """The pattern of any one of them."""
    if len(parts) == 1:
        return parts[0]
    whole = "|".join(part.whole for part in parts)
    begun = "|".join(part.begun for part in parts)
    loose = "|".join(map(loosened, parts))
    return Part(f"(?:{whole})", f"(?:{begun})", max(part.longest for part in parts), f"(?:{loose})")


def maybe(*parts: Part) -> Part:
    """All of them in sequence, or nothing."""
    inner = sequence(*parts)
    return Part(f"(?:{inner.whole})?", inner.begun, inner.longest, f"(?:{loosened(inner)})?")


def secret(part: Part) -> Part:
    """The piece of a match that goes; without one it is the whole."""
    return Part(f"({part.whole})", part.begun, part.longest, loosened(part))


def word(part: Part) -> Part:
    """The same, where a word begins."""
    return Part(rf"\b{part.whole}", rf"\b{part.begun}", part.longest, rf"\b{loosened(part)}")


def loosened(part: Part) -> str:
    """A pattern that matches all that the whole does, and more: it does not count far."""
    return part.loose or part.whole


def _joined(part: Part, rest: Part) -> Part:
    begun = f"(?:{part.begun}|{loosened(part)}{rest.begun})"
    return Part(part.whole + rest.whole, begun, part.longest + rest.longest, loosened(part) + loosened(rest))


def _byte(byte: int, *, any_case: bool = False) -> str:
    letter = bytes((byte,))
    if any_case and letter.isalpha():
        return f"[{letter.lower().decode()}{letter.upper().decode()}]"
    return letter.decode() if letter.isalnum() else f"\\x{byte:02x}"


_MEMORY = 64 << 20
_MEMORY_PER_CHARACTER = 384
"""The most that an automaton may take. It grows as texts need it; with too little it is given up, and all is slow."""


def compiled(pattern: str) -> Any:
    """Compile a pattern for bytes of any kind; the longest of the leftmost matches counts."""
    return re2._Regexp(
        pattern.encode("ascii"), options(len(pattern))
    )  # past the cache of `re2.compile`: patterns hold values


def union(patterns: Iterable[str]) -> Any:
    """Any of them; nothing at all where there are none."""
    return compiled("|".join(patterns) or r"[^\x00-\xff]")


def options(size: int = 0) -> Any:
    chosen = re2.Options()
    chosen.encoding = re2.Options.Encoding.LATIN1
    chosen.longest_match = True
    chosen.log_errors = False
    chosen.max_mem = max(_MEMORY, _MEMORY_PER_CHARACTER * size)
    return chosen


# ── The forms of a known value ───────────────────────────────────────────────────────────────────

PIECE = 128
OVERLAP = 8
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


# ── Shapes ───────────────────────────────────────────────────────────────────────────────────────

_ALNUM = "[A-Za-z0-9]"
_WORD = "[A-Za-z0-9_]"
_URLSAFE = "[A-Za-z0-9_-]"
_HEX = "[0-9a-f]"
_VALUE = "[A-Za-z0-9._~+/=-]"
_SPACE = r"[ \t]"
_QUOTE = r"[\x22\x27]"


def _text(word: str, *, any_case: bool = False) -> Part:
    return literal(word.encode(), any_case=any_case)


def _words(*words: str) -> Part:
    return either(*map(_text, words))


def _prefixed(prefix: Part | str, kind: str, least: int) -> Part:
    """A prefix that says what it is, at the start of a word, and at least so many characters."""
    start = _text(prefix) if isinstance(prefix, str) else prefix
    return word(sequence(start, some(kind, least, None)))


def _clouds() -> Mapping[str, Part]:
    account = sequence(_text("AccountKey="), secret(sequence(some("[A-Za-z0-9+/]", 86, None), some("=", 0, 2))))
    amazon = sequence(
        some("[Ss]"),
        *(_text("ecret", any_case=True), some("[_ ]", 0, 1), _text("access", any_case=True), some("[_ ]", 0, 1)),
        *(_text("key", any_case=True), some(_QUOTE, 0, 1), some(_SPACE, 0, 4), some("[:=]")),
        *(some(_SPACE, 0, 4), some(_QUOTE, 0, 1), secret(some("[A-Za-z0-9/+]", 40, None))),
    )
    return {
        "aws_access_key": _prefixed(_words("AKIA", "ASIA", "ABIA", "ACCA"), "[A-Z2-7]", 16),
        "aws_secret_key": amazon,
        "google_api_key": _prefixed("AIza", _URLSAFE, 35),
        "google_oauth": either(_prefixed("ya29.", _URLSAFE, 20), _prefixed("GOCSPX-", _URLSAFE, 28)),
        "azure_account_key": account,
        "digitalocean_token": _prefixed(_words("dop_v1_", "doo_v1_", "dor_v1_"), _HEX, 64),
        "hashicorp_token": _prefixed(_words("hvs.", "hvb.", "hvr."), _URLSAFE, 24),
        "databricks_token": _prefixed("dapi", _HEX, 32),
    }


def _forges() -> Mapping[str, Part]:
    kinds = ("glpat-", "gldt-", "glrt-", "glft-", "glptt-", "glcbt-", "glsoat-", "gloas-")
    index = "AgEIcHlwaS5vcmc"  # the name of the index, as the token writes it
    return {
        "github_token": _prefixed(_words("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), _WORD, 36),
        "github_pat": _prefixed("github_pat_", _WORD, 60),
        "gitlab_token": _prefixed(_words(*kinds), _URLSAFE, 20),
        "npm_token": _prefixed("npm_", _ALNUM, 36),
        "pypi_token": _prefixed(_words(f"pypi-{index}", "pypi-AgENdGVzdC5weXBpLm9yZ"), _URLSAFE, 50),
        "docker_token": _prefixed(_words("dckr_pat_", "dckr_oat_"), _URLSAFE, 20),
        "atlassian_token": _prefixed("ATATT3", "[A-Za-z0-9_=-]", 60),
    }


def _services() -> Mapping[str, Part]:
    slack = some("[0-9]", 1, 13)
    hook = sequence(_text("hooks.slack.com/services/T"), secret(some("[A-Za-z0-9/]", 30, None)))
    grid = sequence(_text("SG."), some(_URLSAFE, 16, 32), _text("."), some(_URLSAFE, 30, None))
    bot = sequence(some("[0-9]", 8, 10), _text(":AA"), some(_URLSAFE, 33, None))
    return {
        "slack_token": either(
            _prefixed(sequence(_text("xox"), some("[abeoprs]"), _text("-"), slack, _text("-")), "[A-Za-z0-9-]", 10),
            _prefixed(sequence(_text("xapp-"), slack, _text("-")), "[A-Za-z0-9-]", 20),
        ),
        "slack_webhook": hook,
        "openai_key": _prefixed(_words("sk-proj-", "sk-svcacct-", "sk-admin-"), _URLSAFE, 40),
        "anthropic_key": _prefixed("sk-ant-", _URLSAFE, 40),
        "model_key": _prefixed("sk-", _ALNUM, 40),
        "huggingface_token": _prefixed("hf_", _ALNUM, 34),
        "stripe_key": _prefixed(_words("sk_live_", "rk_live_", "sk_test_", "rk_test_", "whsec_"), _ALNUM, 24),
        "sendgrid_key": word(grid),
        "shopify_token": _prefixed(_words("shpat_", "shpca_", "shppa_", "shpss_"), "[0-9a-fA-F]", 32),
        "telegram_token": word(bot),
        "grafana_token": _prefixed(_words("glsa_", "glc_"), _WORD, 32),
        "age_key": _prefixed("AGE-SECRET-KEY-1", "[A-Z0-9]", 58),
    }


def _jwt() -> Part:
    piece = sequence(_text("eyJ"), some(_URLSAFE, 10, None), _text("."))
    return word(sequence(piece, piece, some(_URLSAFE, 10, None)))


def _private_key() -> Part:
    """A block in PEM, also with its lines' ends written as in JSON, also without its end."""
    label = sequence(some("[A-Z0-9 ]", 0, 20), _text("PRIVATE KEY"), maybe(_text(" BLOCK")), _text("-----"))
    end = either(some(r"[\r\n]"), sequence(some(r"\\", 1, 7), some("[rn]")))
    header = sequence(some("[A-Z]"), some("[A-Za-z-]", 3, 20), _text(": "), some(r"[^\r\n\\]", 1, 200))
    return sequence(
        *(_text("-----BEGIN "), label, end, maybe(end)),
        *(maybe(header, end, maybe(end)), maybe(header, end, maybe(end)), maybe(end)),
        some(r"[A-Za-z0-9+/=\r\n\t \\]", 60, None),
        maybe(_text("-----END "), label),
    )


def _authorization() -> Part:
    """A header that authorizes, as it goes over the wire or stands in JSON and in source."""
    named = either(
        *(_text(word, any_case=True) for word in ("authorization", "x-api-key", "x-auth-token", "private-token")),
        _text("x-vault-token", any_case=True),
    )
    schemes = either(*(_text(word, any_case=True) for word in ("bearer", "basic", "token", "apikey", "digest")))
    header = sequence(
        named,
        *(some(r"\\", 0, 3), some(_QUOTE, 0, 1), some(_SPACE, 0, 4), some("[:=]"), some(_SPACE, 0, 4)),
        *(some(r"\\", 0, 3), some(_QUOTE, 0, 1)),
        *(maybe(schemes, some(" ", 1, 4)), secret(some(_VALUE, 20, None))),
    )
    bare = sequence(some("[Bb]"), _text("earer "), secret(some(_VALUE, 32, None)))
    return either(header, word(bare))


def _connection() -> Part:
    """A password within a URL, or between the semicolons of a connection string."""
    user = some(r"[A-Za-z0-9._%+~-]", 0, 64)
    password = secret(some(r"[A-Za-z0-9._%+~!#&*,;:?^=-]", 6, 200))
    url = sequence(some("[a-z0-9]", 2, 2), _text("://"), user, _text(":"), password, _text("@"), some(r"[A-Za-z0-9\[]"))
    names = either(_text("Password", any_case=True), _text("Pwd", any_case=True))
    listed = sequence(
        _text(";"), some(" ", 0, 1), names, _text("="), secret(some(r"[^;\s\x22\x27{}<>$%]", 6, 200)), _text(";")
    )
    return either(url, listed)


def shapes() -> Mapping[str, Part]:
    """Every shape by the name of its rule."""
    return {
        **_clouds(),
        **_forges(),
        **_services(),
        "ringfence_token": _prefixed("rft_", _URLSAFE, 64),
        "jwt": _jwt(),
        "private_key": _private_key(),
        "authorization": _authorization(),
        "connection_string": _connection(),
    }
