"""Reads what the interpreter in a box claims about a cell, without trusting it. The format: `guest.claims`.

Any bytes may come, in any order. A claim in another format is not taken; it is noted as `broken`, and nothing more is
read. What was read is plain text that can be encoded, and bounded. None of it is a fact.
"""

from __future__ import annotations

import binascii
from typing import Any

from ringfence.core import canonical
from ringfence.core.box import Shown
from ringfence.core.sessions import Failure

MAX_BYTES = 10 * 1024 * 1024
"""An honest interpreter sends less about a cell."""
_MESSAGE = 65_536
_PER_CLAIM = 512
_PER_FORM = 256
"""The cost of reading and keeping a claim beyond its text: what an interpreter may say bounds our work for it."""
_PER_PIECE = 128
"""That of a message that has nothing but a piece of a text."""
_MAX_FORMS = 64
_MAX_LEFT_OUT = 2**53
_read = canonical.reader(**canonical.STRICT)
_TEXT = frozenset((str,))
_MIME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!#$&-^_.+")
"""The characters of the two names of a MIME type (RFC 6838); each begins with a letter or a digit."""
_PARAMETERS = _MIME | frozenset('=; "')
_ERROR = frozenset(("name", "value", "traceback"))
_OF_DONE = frozenset(("t", "id", "ok", "left_out"))
_OF_OTHERS = frozenset(("t", "id", "main", "data", "parts", "cut"))
"""A claim has no other fields: their values would be read for nothing, and without a charge."""


class Claims:
    """The claims about one cell; feed it every message that the interpreter sends."""

    def __init__(self, cell: int, most_bytes: int = MAX_BYTES) -> None:
        self.results: list[Shown] = []
        self.error: Failure | None = None
        self.done = False
        """The cell has ended, and all that it printed is written."""
        self.left_out = 0
        """Results for which there was no room."""
        self.broken: str | None = None
        """What is wrong with the claims, if anything is. The interpreter must not be used any more."""
        self._cell = cell
        self._left = most_bytes
        self._head: dict[str, Any] | None = None
        """A claim whose parts are still coming."""
        self._texts: dict[str, str] = {}
        self._parts: list[tuple[str, int]] = []
        self._part = bytearray()

    def feed(self, message: bytes) -> list[Shown | Failure]:
        """Take a message. Returns the values and errors that it completes."""
        found: list[Shown | Failure] = []
        try:
            if not self.done and self.broken is None:
                self._charge(len(message))
                if len(message) > _MESSAGE:
                    raise _NonsenseError("it said too much at once")
                self._take(message, found)
        except _NonsenseError as exc:
            self.broken = str(exc)
            self._head = None
            self._texts = {}
            self._part = bytearray()
        return found

    def _take(self, message: bytes, found: list[Shown | Failure]) -> None:
        if self._head is not None:
            self._charge(_PER_PIECE)
            claim = self._go_on(message)
            if claim is not None:
                found.append(claim)
            return
        for line in message.split(b"\n"):
            if self.done:
                return
            if self._head is not None:
                raise _NonsenseError("it did not say what it announced")
            claim = self._begin(line)
            if claim is not None:
                found.append(claim)

    def _charge(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise _NonsenseError("it said too much")

    def _begin(self, message: bytes) -> Shown | Failure | None:
        self._charge(_PER_CLAIM)
        head = _object(message)
        number = head.get("id")
        if type(number) is not int or number > self._cell:
            raise _NonsenseError("it spoke of a cell that does not run")
        if head.get("t") == "done" and head.keys() <= _OF_DONE:
            self._finish(head, is_late=number < self._cell)
            return None
        if head.get("t") not in ("result", "error") or not head.keys() <= _OF_OTHERS:
            raise _NonsenseError("it said something unknown")
        if number < self._cell:
            raise _NonsenseError("it showed something of a cell that is over")
        self._texts = _texts(head.get("data"))
        self._parts = self._announced(head.get("parts", []))
        names = self._texts.keys() | {name for name, _ in self._parts} if self._parts else self._texts
        count = len(self._texts) + len(self._parts)
        if len(names) != count or count > _MAX_FORMS:
            raise _NonsenseError("it gave a form twice, or too many")
        self._charge(_PER_FORM * count)
        self._head = head
        return self._complete()

    def _announced(self, parts: object) -> list[tuple[str, int]]:
        if not isinstance(parts, list):
            raise _NonsenseError("it announced parts that are none")
        found = []
        for part in parts:
            match part:
                case [str() as name, int() as size] if not isinstance(size, bool) and 0 < size <= self._left:
                    found.append((_encodable(name), size))
                case _:
                    raise _NonsenseError("it announced parts that are none, or too long")
        return found

    def _go_on(self, message: bytes) -> Shown | Failure | None:
        name, size = self._parts[0]
        if message[:1] != b"+" or len(message) < 2 or len(self._part) + len(message) - 1 > size:
            raise _NonsenseError("it did not say what it announced")
        self._part += message[1:]
        if len(self._part) < size:
            return None
        try:
            self._texts[name] = self._part.decode("utf-8")
        except UnicodeDecodeError:
            raise _NonsenseError("it sent something that is not text") from None
        self._part = bytearray()
        del self._parts[0]
        return self._complete()

    def _complete(self) -> Shown | Failure | None:
        if self._head is None or self._parts:
            return None
        head = self._head
        texts = self._texts
        self._head = None
        self._texts = {}
        if head["t"] == "error":
            if self.error is not None or texts.keys() != _ERROR:
                raise _NonsenseError("it reported something that is not an error, or a second error")
            self.error = Failure(**texts)
            return self.error
        main = head.get("main", False)
        if not isinstance(main, bool) or not texts or not all(_is_form(mime, text) for mime, text in texts.items()):
            raise _NonsenseError("it showed a value that is none")
        cut = _lengths(head.get("cut", {}))
        self._charge(_PER_FORM * len(cut))
        result = Shown(texts, main, cut)
        self.results.append(result)
        return result

    def _finish(self, head: dict[str, Any], *, is_late: bool) -> None:
        """`is_late`: it is about an earlier cell, which may have claimed before that it was done."""
        left_out = head.get("left_out", 0)
        if type(left_out) is not int or not 0 <= left_out <= _MAX_LEFT_OUT:
            raise _NonsenseError("it left out what cannot be counted")
        if is_late and isinstance(head.get("ok"), bool):
            return
        if head.get("ok") is not (self.error is None):
            raise _NonsenseError("it said that the cell failed, but not how, or the other way round")
        self.done = True
        self.left_out = left_out


class _NonsenseError(Exception):
    """Raised and caught in this module only."""


def _object(message: bytes) -> dict[str, Any]:
    try:
        # Text first: from bytes, `json` would guess an encoding.
        found = _read(message.decode("utf-8"))
    except (ValueError, RecursionError):
        raise _NonsenseError("it sent something that is not JSON") from None
    if not isinstance(found, dict):
        raise _NonsenseError("it sent something that is not a claim")
    return found


def _texts(data: object) -> dict[str, str]:
    if not isinstance(data, dict) or not {*map(type, data.values())} <= _TEXT:
        raise _NonsenseError("it gave data that are no texts")
    return {_encodable(name): _encodable(text) for name, text in data.items()}


def _lengths(cut: object) -> dict[str, int]:
    if cut == {}:
        return {}
    if not isinstance(cut, dict) or len(cut) > _MAX_FORMS:
        raise _NonsenseError("it cut what is none")
    if not all(_is_mime(mime) and type(size) is int and 0 <= size <= _MAX_LEFT_OUT for mime, size in cut.items()):
        raise _NonsenseError("it cut what is none")
    return cut


def _encodable(text: str) -> str:
    """Half of a surrogate pair has no UTF-8 encoding."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _is_mime(name: str) -> bool:
    """A name that is no path, since values may be stored under it."""
    kind, _, rest = name.partition("/")
    form, _, parameters = rest.partition(";")
    if not (3 <= len(name) <= 100 and kind[:1].isalnum() and form[:1].isalnum()):
        return False
    return _MIME.issuperset(kind + form) and _PARAMETERS.issuperset(parameters)


def _is_form(mime: str, text: str) -> bool:
    if not _is_mime(mime):
        return False
    if mime == "application/pdf" or (mime.startswith(("image/", "audio/", "video/")) and not mime.endswith("+xml")):
        try:
            binascii.a2b_base64(text, strict_mode=True)
        except ValueError:  # not ASCII, or not base64
            return False
    return True
