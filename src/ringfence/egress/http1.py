"""HTTP/1.1: heads are read strictly and written anew, bodies are read by their framing and framed anew.

What reaches the other side is never what was received but what was understood: two parsers that disagree about where a
message ends are how requests are smuggled. Heads are parsed without I/O; only `read_body` reads from a connection.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable
from typing import Literal

from ringfence.core.record import dataclass
from ringfence.egress.ledger import Failed, Malformed
from ringfence.egress.wire import Closed, HttpWire

Headers = tuple[tuple[str, str], ...]

_REQUEST = re.compile(rb"([A-Z][A-Z0-9-]{0,31}) ([!-~]+) HTTP/([0-9])\.([0-9])")
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([\t -~\x80-\xff]*))?")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[\t -~\x80-\xff]*")
_LENGTH = re.compile(r"[0-9]{1,18}")
_ORIGIN = re.compile(r"/[!\"$-\[\]-~]*")
_MAX_HEADERS = 128

HOP_BY_HOP = frozenset(
    (
        *("connection", "proxy-connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
        *("proxy-authorization", "proxy-authenticate", "content-length"),
    )
)
_CONNECTION_OPTIONS = frozenset(("close", "keep-alive", "te", "proxy-connection", ""))


@dataclass(frozen=True, slots=True)
class Framing:
    """Where a body ends."""

    kind: Literal["none", "length", "chunked", "close"]
    length: int = 0


NO_BODY = Framing("none")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    method: str
    target: str
    minor: int
    headers: Headers
    framing: Framing
    close: bool
    expects_continue: bool

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    phrase: str
    headers: Headers
    framing: Framing
    close: bool


def request(head: bytes) -> HttpRequest:
    """The head of a request, up to and with its empty line. Raises Malformed."""
    first, *rest = _lines(head)
    match = _REQUEST.fullmatch(first)
    if match is None:
        raise Malformed("request_line", "not an HTTP/1.1 request line")
    if match[3] != b"1" or match[4] not in (b"0", b"1"):
        reason = "http2" if match[1] == b"PRI" else "http_version"
        raise Malformed(reason, "only HTTP/1.1 is spoken here", 505)
    headers = _headers(rest)
    method = match[1].decode()
    target = match[2].decode()
    minor = int(match[4])
    # A 1.0 client may open a tunnel; for requests its framing is not ours.
    if minor == 0 and method != "CONNECT":
        raise Malformed("http_version", "only HTTP/1.1 is spoken here", 505)
    if method in ("TRACE", "TRACK"):
        raise Malformed("trace", f"{method} would echo what was added on the way", 501)
    options = _options(headers)
    named = {name.lower() for name, _ in headers}
    if "upgrade" in named or "upgrade" in options or "http2-settings" in named:
        raise Malformed("upgrade", "a change of protocol is not supported", 501)
    if not options <= _CONNECTION_OPTIONS:
        raise Malformed("connection_option", "Connection may say close, keep-alive or te")
    expect = [value.lower() for name, value in headers if name.lower() == "expect"]
    if expect not in ([], ["100-continue"]):
        raise Malformed("expect", "only 100-continue can be expected", 417)
    framing = _framing(headers)
    if method == "CONNECT" and framing != NO_BODY:
        raise Malformed("connect_body", "CONNECT has no body")
    return HttpRequest(method, target, minor, headers, framing, "close" in options, bool(expect))


def origin_form(target: str) -> str:
    """A path with its query, as servers expect it. Raises Malformed."""
    if not _ORIGIN.fullmatch(target):
        raise Malformed("target", "the target must be a path")
    return target


def response(head: bytes, method: str) -> HttpResponse:
    """The head of an answer to a request with that method. Raises Failed."""
    try:
        first, *rest = _lines(head)
        match = _STATUS.fullmatch(first)
        if match is None:
            raise Malformed("status_line")
        headers = _headers(rest)
        status = int(match[2])
        framing = _framing(headers)
    except Malformed as error:
        raise Failed("bad_response", error.reason) from error
    if status == 101:
        raise Failed("bad_response", "switched protocols unasked")
    options = _options(headers)
    if method == "HEAD" or status < 200 or status in (204, 304):
        if framing.kind == "chunked" and method != "HEAD" and status != 304:
            raise Failed("bad_response", "a body where none may be")
        framing = NO_BODY
    elif framing == NO_BODY and not any(name.lower() == "content-length" for name, _ in headers):
        framing = Framing("close")
    kept = "keep-alive" in options if match[1] == b"0" else "close" not in options
    phrase = (match[3] or b"").decode("latin-1")
    return HttpResponse(status, phrase, headers, framing, not kept or framing.kind == "close")


def write_request(method: str, target: str, headers: Headers, framing: Framing) -> bytes:
    return _write(f"{method} {target} HTTP/1.1", headers, framing)


def write_response(answer: HttpResponse, method: str, close: bool) -> bytes:
    """The head for the client: a body that ended with the connection is sent in chunks."""
    extra: Headers = (("Connection", "close"),) if close else ()
    framing = Framing("chunked") if answer.framing.kind == "close" else answer.framing
    headers = end_to_end(answer.headers)
    if framing == NO_BODY and (method == "HEAD" or answer.status == 304):
        headers += tuple((n, v) for n, v in answer.headers if n.lower() == "content-length")
    elif framing == NO_BODY and answer.status >= 200 and answer.status != 204:
        headers += (("Content-Length", "0"),)
    return _write(f"HTTP/1.1 {answer.status} {answer.phrase}", headers + extra, framing)


def refusal(status: int, rule: str, reason: str, detail: str, close: bool) -> bytes:
    """Our own answer, in words that a program and a person can read."""
    phrase = {400: "Bad Request", 403: "Forbidden", 417: "Expectation Failed", 431: "Request Header Fields Too Large"}
    phrase |= {408: "Request Timeout", 501: "Not Implemented", 502: "Bad Gateway", 503: "Unavailable"}
    phrase |= {505: "HTTP Version Not Supported"}
    text = f"ringfence: {'failed' if status == 502 else 'refused'}: {reason}"
    text += f" (rule {rule})" if rule else ""
    text += f": {detail}" if detail else ""
    body = text.encode("ascii", "backslashreplace").replace(b"\r", b" ").replace(b"\n", b" ") + b"\n"
    headers: Headers = (("Content-Type", "text/plain; charset=utf-8"), ("X-Ringfence-Reason", reason))
    headers += (("X-Ringfence-Rule", rule),) if rule else ()
    headers += (("Connection", "close"),) if close else ()
    head = _write(f"HTTP/1.1 {status} {phrase.get(status, 'Refused')}", headers, Framing("length", len(body)))
    return head + body


def is_header(name: str, value: str) -> bool:
    """Whether these stand on one line, and on no other."""
    try:
        return bool(_NAME.fullmatch(name.encode("ascii")) and _VALUE.fullmatch(value.encode("latin-1")))
    except UnicodeError:
        return False


def end_to_end(headers: Iterable[tuple[str, str]], without: frozenset[str] = frozenset()) -> Headers:
    """Headers that are meant for the other end. Applications that get headers as variables take `_` and `-` for the
    same, so neither spelling of a name in `without` is one."""
    without = frozenset(as_variable(name) for name in without)
    return tuple((n, v) for n, v in headers if n.lower() not in HOP_BY_HOP and as_variable(n.lower()) not in without)


def as_variable(name: str) -> str:
    """The name of a header, in lower case, with the two characters in one spelling that applications cannot tell apart
    when they get headers as variables."""
    return name.replace("_", "-")


def _write(first: str, headers: Headers, framing: Framing) -> bytes:
    lines = [first, *(f"{name}: {value}" for name, value in headers)]
    if framing.kind == "length":
        lines.append(f"Content-Length: {framing.length}")
    elif framing.kind == "chunked":
        lines.append("Transfer-Encoding: chunked")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _lines(head: bytes) -> list[bytes]:
    lines = head[:-4].split(b"\r\n")
    if len(lines) > _MAX_HEADERS + 1:
        raise Malformed("too_many_headers", f"at most {_MAX_HEADERS}", 431)
    if any(b"\n" in line for line in lines):
        raise Malformed("bare_lf", "lines end with CR LF")
    return lines


def _headers(lines: list[bytes]) -> Headers:
    headers = []
    for line in lines:
        if line[:1] in (b" ", b"\t"):
            raise Malformed("obs_fold", "a header stands on one line")
        name, colon, value = line.partition(b":")
        if not colon or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise Malformed("header_syntax")
        headers.append((name.decode("ascii"), value.strip(b" \t").decode("latin-1")))
    return tuple(headers)


def _options(headers: Headers) -> frozenset[str]:
    named = (value for name, value in headers if name.lower() in ("connection", "proxy-connection"))
    return frozenset(option.strip().lower() for value in named for option in value.split(","))


def _framing(headers: Headers) -> Framing:
    lengths = [value for name, value in headers if name.lower() == "content-length"]
    encodings = [value for name, value in headers if name.lower() == "transfer-encoding"]
    if lengths and encodings:
        raise Malformed("te_and_cl", "Transfer-Encoding and Content-Length together")
    if encodings:
        if len(encodings) > 1 or encodings[0].lower() != "chunked":
            raise Malformed("transfer_encoding", "only chunked, once", 501)
        return Framing("chunked")
    if lengths:
        if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
            raise Malformed("content_length", "one number, once")
        return Framing("length", int(lengths[0])) if int(lengths[0]) else NO_BODY
    return NO_BODY


# ── Bodies ───────────────────────────────────────────────────────────────────────────────────────

_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")
_MAX_LINE = 256
_MAX_TRAILERS = 32
_MAX_TRAILER = 8192


async def read_body(wire: HttpWire, framing: Framing, *, extensions: bool = False) -> AsyncIterator[bytes]:
    """The body, piece by piece, without trailers. With `extensions` those of chunks are dropped, else refused.

    Raises Malformed, and Closed where the connection ends before the body does.
    """
    if framing.kind == "length":
        async for piece in _so_many(wire, framing.length):
            yield piece
    elif framing.kind == "chunked":
        async for piece in _chunks(wire, extensions):
            yield piece
    elif framing.kind == "close":
        while piece := await wire.some():
            yield piece


async def _so_many(wire: HttpWire, left: int) -> AsyncIterator[bytes]:
    while left:
        piece = await wire.some(min(left, 65536))
        if not piece:
            raise Closed
        left -= len(piece)
        yield piece


async def _chunks(wire: HttpWire, extensions: bool) -> AsyncIterator[bytes]:
    while True:
        size, semicolon, _ = (await wire.line(_MAX_LINE)).partition(b";")
        if semicolon and not extensions:
            raise Malformed("chunk_extension", "chunks have no extensions here")
        if not _SIZE.fullmatch(size.rstrip(b" \t") if extensions else size):
            raise Malformed("chunk_syntax")
        left = int(size, 16)
        if left == 0:
            break
        async for piece in _so_many(wire, left):
            yield piece
        if await wire.line(_MAX_LINE) != b"":
            raise Malformed("chunk_syntax", "a chunk is longer than it says")
    for _ in range(_MAX_TRAILERS):
        if not await wire.line(_MAX_TRAILER):
            return
    raise Malformed("too_many_headers", "too many trailers")


def frame(piece: bytes, framing: Framing) -> bytes:
    """A piece as it goes to the other side, which knows no connection that just ends."""
    if framing.kind in ("chunked", "close"):
        return b"%x\r\n%b\r\n" % (len(piece), piece)
    return piece


def frame_end(framing: Framing) -> bytes:
    return b"0\r\n\r\n" if framing.kind in ("chunked", "close") else b""
