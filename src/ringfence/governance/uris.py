"""URIs in one form: what is compared is what is sent, and no other spelling of it passes a rule by."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import lru_cache
from urllib.parse import quote, unquote

from ringfence.core.invisible import folded, without_hidden

_LONGEST = 8192
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):(.*)", re.DOTALL)
_LIKE_THE_WEB = frozenset({"http", "https", "ws", "wss", "ftp", "file"})
"""Schemes for which readers take a backslash for a slash, and whose hosts have no case."""
_AUTHORITY = re.compile(r"//([^/?#]*)(.*)", re.DOTALL)
_ENCODED = re.compile(r"%([0-9A-Fa-f]{2})")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_OVERLONG = re.compile(r"%(?:c[01]%[89ab]|e0%[89]|f0%8|u[0-9a-f]{4})", re.IGNORECASE)
"""Bytes that are no UTF-8, and escapes that are none of URIs, which a careless reader takes for a dot or a slash."""
_HOST = re.compile(r"(?:https?|wss?|ftp)://([^/?#]*)")
_PLACE_OF_HOST = re.compile(r"[^/]*://([^/]*)")
_PLAIN_HOST = re.compile(r"(?:[A-Za-z0-9._~-]*|\[[0-9A-Fa-f:.]*\])(?::[0-9]*)?")
_FILE = re.compile(r"(?://(?:localhost)?)?(/.*)", re.DOTALL | re.IGNORECASE)
"""A file of this machine, in all the ways in which that is written."""
_PLAIN_FILE = re.compile(r"file://(?:/(?:(?!%(?:25)*(?:2F|5C))[^/?#])+)*/?", re.IGNORECASE)
"""Readers of files drop what follows a mark or hash, and take two slashes for one, or for the beginning of a path. An
encoded slash is one to them."""
_PORTS = {"http": ":80", "ws": ":80", "https": ":443", "wss": ":443", "ftp": ":21"}
_ROUNDS = 8


def normal_uri(uri: str) -> str | None:
    """The URI in the form in which it is compared and sent; None where two readers could take it for different ones.

    Scheme, percent-encoding, and of schemes like those of the web the host and the slashes, are written in one way.
    Whatever steps out of a path, however it is spelled, has no such form, and neither has a control character or one
    that cannot be seen: readers drop it, or end there.
    """
    if len(uri) > _LONGEST or uri != uri.strip() or _CONTROL.search(uri) is not None:
        return None
    form = _written(uri)
    return None if form is None or _evades(form) or _is_read_in_two_ways(form) else form


def spellings(uri: str) -> tuple[str, ...]:
    """How else a URI in its normal form may be written: with nothing encoded in it, and with all that can be. A server
    may take them for the same, so a rule that restricts one restricts the others."""
    plain = uri
    for _ in range(_ROUNDS):
        decoded = unquote(plain)
        if decoded == plain:
            break
        plain = decoded
    encoded = quote(plain, safe="/:?#[]@!$&'()*+,;=~")
    return tuple(dict.fromkeys(each for each in (plain, encoded) if each != uri))


def fits(uri: str, pattern: str) -> bool:
    """Whether a pattern covers a URI. What it has in the place of a host covers a host, and no path that ends alike."""
    pattern = _normal_pattern(pattern)
    if not fnmatchcase(uri, pattern):
        return False
    host = _HOST.match(uri)
    place = _PLACE_OF_HOST.match(pattern)
    return host is None or place is None or fnmatchcase(host[1], place[1])


def _is_read_in_two_ways(uri: str) -> bool:
    if uri.startswith("file:"):
        return _PLAIN_FILE.fullmatch(uri) is None
    host = _HOST.match(uri)
    return host is not None and _PLAIN_HOST.fullmatch(host[1]) is None


@lru_cache(maxsize=1024)
def _normal_pattern(pattern: str) -> str:
    return _written(pattern) or pattern


def _written(uri: str) -> str | None:
    found = _SCHEME.fullmatch(uri)
    scheme, rest = (found[1].lower(), found[2]) if found is not None else ("", uri)
    for _ in range(_ROUNDS):
        plain = _ENCODED.sub(_decoded, rest)
        if plain == rest:
            break
        rest = plain
    else:
        return None
    if found is None:
        return rest
    if scheme in _LIKE_THE_WEB:
        rest = rest.replace("\\", "/")
    if scheme == "file":
        local = _FILE.fullmatch(rest)
        rest = rest if local is None else f"//{local[1]}"
    elif scheme in _LIKE_THE_WEB:
        parts = _AUTHORITY.fullmatch(rest)
        if parts is not None:
            host = parts[1]
            if "@" in host or "%" in host or not host.isascii():
                return None
            host = (host if "[" in host else host.lower()).removesuffix(_PORTS[scheme]).removesuffix(":")
            rest = f"//{host}{parts[2]}"
    return f"{scheme}:{rest}"


def _decoded(match: re.Match[str]) -> str:
    character = chr(int(match[1], 16))
    return character if character in _UNRESERVED else match[0].upper()


def _evades(uri: str) -> bool:
    """Whether a path steps out of itself or hides something, in whatever way that is encoded: a pattern would not see
    it."""
    for _ in range(_ROUNDS):
        if _CONTROL.search(uri) is not None or _OVERLONG.search(uri) is not None:
            return True
        if without_hidden(uri)[1]:
            return True
        if any(map(_is_dots, re.split(r"[/\\?#:]", folded(uri)))):
            return True
        decoded = unquote(uri)
        if decoded == uri:
            return False
        uri = decoded
    return True


def _is_dots(segment: str) -> bool:
    """`..`, also with what some readers drop: parameters, and spaces."""
    plain = "".join(segment.partition(";")[0].split())
    return bool(plain) and not plain.strip(".")
