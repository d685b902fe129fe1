"""JSON read strictly, written in one form, and named by its digest.

Two readers of the same bytes must agree, or what was checked is not what is sent: duplicate keys, NaN and
infinities, invalid UTF-8, lone surrogates and absurd nesting are refused, never repaired.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 64
_SHORT_DIGITS = 640
"""So many digits every Python reads, whatever limit it is set to."""
_CONTAINERS = (dict, list, tuple)


class NotCanonical(ValueError):
    """Bytes that are no JSON, or JSON that two readers could read differently.

    `value` holds a best-effort reading where the text is well-formed JSON, so that the caller can tell which
    request it refuses; it must never be acted upon.
    """

    def __init__(self, problem: str, value: Any = None) -> None:
        super().__init__(problem)
        self.value = value


class TooMuch(NotCanonical):
    """JSON that is nested too deeply, or has too many values to be read."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise NotCanonical(f"duplicate key {key!r}")
            seen.add(key)
    return out


def _no_constant(name: str) -> Any:
    raise NotCanonical(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise NotCanonical("a number is out of range")
    return number


def _whole(text: str) -> int:
    # Python's own limit is a setting, and below it the time still grows with the square of the digits.
    if len(text) > _SHORT_DIGITS:
        raise NotCanonical("a number is out of range")
    return int(text)


STRICT: dict[str, Any] = {
    "object_pairs_hook": _unique,
    "parse_constant": _no_constant,
    "parse_float": _finite,
    "parse_int": _whole,
}
"""How the library reads what two readers must not read differently."""
_decoder = json.JSONDecoder(**STRICT)


def loads(data: bytes | str, *, max_depth: int = MAX_DEPTH) -> Any:
    """Read one JSON value strictly. Raises NotCanonical."""
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
    except UnicodeDecodeError as exc:
        guess = _lenient(exc.object.decode("utf-8", "replace"))
        raise NotCanonical(f"invalid UTF-8 at byte {exc.start}", guess) from None
    try:
        value = _decoder.decode(text)
        # A cheap bound first: only text with enough brackets can be nested deeply.
        if text.count("[") + text.count("{") > max_depth and depth(value) > max_depth:
            raise TooMuch(f"nested deeper than {max_depth} levels")
        if "\\u" in text or "\\U" in text:
            _encodable(value)
    except NotCanonical as exc:
        exc.value = _lenient(text)
        raise
    except RecursionError:
        raise TooMuch(f"nested deeper than {max_depth} levels") from None
    except json.JSONDecodeError as exc:
        raise NotCanonical(f"not JSON: {exc}") from None
    return value


def values_at_most(data: bytes) -> int:
    """No fewer than there are values in this JSON, but for one; found without reading it, which is what they cost."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def has_more_values(data: bytes, most: int) -> bool:
    """Whether this JSON has more than `most` values, and so would take too long to read."""
    if len(data) <= most or values_at_most(data) <= most:
        return False
    # Text has commas and brackets too, so they are counted between strings. What is not JSON may be miscounted, but
    # only behind the place where its reader stops.
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 4 * most:  # a key and a text for each value, with two marks each
        return True
    return values_at_most(b"".join(bare.split(b'"')[::2])) > most


def _lenient(text: str) -> Any:
    try:
        return json.loads(text, parse_int=_short)
    except (ValueError, RecursionError):
        return None


def _short(text: str) -> int | None:
    return int(text) if len(text) <= _SHORT_DIGITS else None


def _encodable(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise NotCanonical("a lone surrogate is not text") from None


def depth(value: Any) -> int:
    """Nesting of `value`, without recursion."""
    levels = 0
    layer = [value] if isinstance(value, _CONTAINERS) else []
    while layer:
        levels += 1
        inside = [item.values() if isinstance(item, dict) else item for item in layer]
        layer = [item for items in inside for item in items if isinstance(item, _CONTAINERS)]
    return levels


class Written:
    """Part of a value, with its canonical form at hand: it is the same in many values, and large."""

    __slots__ = ("text",)

    def __init__(self, value: Any) -> None:
        self.text = _sorted(value)


class Shared:
    """Part of many values that is kept once, and named in each of them by its digest."""

    __slots__ = ("digest", "text")

    def __init__(self, value: Any) -> None:
        self.text = _sorted(value)
        self.digest = hashlib.sha256(self.text.encode("utf-8")).hexdigest()


class _Met(threading.local):
    def __init__(self) -> None:
        self.parts: list[str] = []
        """Those that stand in what is being written, in their order."""


_met = _Met()
_MARK = os.urandom(16).hex()
"""Where such a part goes. It is random and never leaves this process, so it stands for nothing else."""


def _default(value: Any) -> Any:
    if isinstance(value, Written):
        _met.parts.append(value.text)
        return _MARK
    if isinstance(value, Shared):
        return value.digest
    raise TypeError(f"{type(value).__name__} is not JSON")


def _filled(text: str, parts: list[str]) -> str:
    pieces = text.split(f'"{_MARK}"')
    return "".join(word for pair in zip(pieces, [*parts, ""], strict=True) for word in pair)


def writer(*, sort_keys: bool = False, allow_nan: bool = False, ascii_only: bool = False) -> Callable[[Any], str]:
    """What writes JSON without spaces, and is made once for all values."""
    # What is no tree ends in a RecursionError either way; looking for circles costs a tenth of every digest.
    encoder = json.JSONEncoder(
        sort_keys=sort_keys,
        allow_nan=allow_nan,
        separators=(",", ":"),
        ensure_ascii=ascii_only,
        check_circular=False,
        default=_default,
    )
    # The library makes its encoder in C anew for every value, which is half the cost of a small one.
    make = getattr(json.encoder, "c_make_encoder", None)
    quote = json.encoder.encode_basestring_ascii if ascii_only else json.encoder.encode_basestring
    in_c = make and make(None, _default, quote, None, ":", ",", sort_keys, False, allow_nan)

    def write(value: Any) -> str:
        parts = _met.parts
        try:
            text = "".join(in_c(value, 0)) if in_c else encoder.encode(value)
            return _filled(text, parts) if parts else text
        finally:
            parts.clear()

    return write


def reader(**how: Any) -> Callable[[str], Any]:
    """What reads one JSON value without anything around it, and raises ValueError; the options are the library's."""
    decode = json.JSONDecoder(**how).raw_decode

    def read(text: str) -> Any:
        value, end = decode(text)
        if end != len(text):
            raise ValueError("more than one value")
        return value

    return read


_sorted = writer(sort_keys=True)
_as_given = writer(allow_nan=True)


def dumps(value: Any) -> bytes:
    """The one form of a JSON value: keys sorted, no spaces, UTF-8."""
    return _sorted(value).encode("utf-8")


def message(value: Any, errors: str = "strict") -> bytes:
    """A JSON value for the wire: no spaces, its keys as they stand. No digest is taken of this form."""
    return _as_given(value).encode("utf-8", errors)


def reply(value: Any) -> bytes:
    """As `message`; halves of surrogate pairs, which a request may have and UTF-8 has not, are escaped."""
    try:
        return message(value)
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode("ascii")


def digest(value: Any) -> str:
    """`sha256:…` of the canonical form."""
    return "sha256:" + hashlib.sha256(dumps(value)).hexdigest()


def definition_digest(body: Any) -> str:
    """The digest that pins a server's description of a tool or prompt.

    Every field counts: name, title, description, schemas, annotations, `_meta`, icons, and those that we do not know,
    since whatever a server adds can reach a model. Order of keys does not; an explicit null is the same as none.
    """
    if isinstance(body, dict):
        return digest({key: value for key, value in body.items() if value is not None})
    return digest(body)


def salted_bytes(text: bytes, salt: bytes) -> str:
    """A digest that says nothing about a guessable value to one who lacks the salt."""
    return "sha256:" + hashlib.sha256(salt + text).hexdigest()


def object_at(value: Any, *path: str) -> dict[str, Any]:
    """The object under these names of a parsed document; empty where there is none, as in a record that was edited."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def new_id(prefix: str) -> str:
    """A fresh unguessable id, `prefix_…`. It begins with the time, so that indexes grow at their end."""
    return f"{prefix}_{time.time_ns() // 1_000_000:011x}{os.urandom(8).hex()}"


_LISTS = (list, tuple)


def is_light(value: Any, most: int) -> bool:
    """Whether a JSON value has at most so many characters, each value and key in it counted as 32 more. However heavy
    it is, no more of it than that is looked at."""
    return weight(value, most) < most


def weight(value: Any, most: int) -> int:
    """How heavy a JSON value is, as `is_light` counts; `most` or more for whatever is heavier."""
    left = most
    stack = [value]
    while stack and left > 0:
        item = stack.pop()
        left -= 16
        if isinstance(item, str):
            left -= len(item)
        elif isinstance(item, dict):
            left -= 16 * len(item)
            if left > 0:
                stack += item
                stack += item.values()
        elif isinstance(item, _LISTS):
            left -= 16 * len(item)
            if left > 0:
                stack += item
    return most - left
