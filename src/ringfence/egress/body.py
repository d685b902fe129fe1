"""Bodies: read piece by piece by their framing, and framed anew."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from ringfence.egress.http1 import Framing
from ringfence.egress.refusal import Malformed
from ringfence.egress.wire import Closed, Wire

_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")
_LINE_MOST = 256
_TRAILERS_MOST = 32
_TRAILER_MOST = 8192


async def pieces(wire: Wire, framing: Framing, *, extensions: bool = False) -> AsyncIterator[bytes]:
    """What the body consists of. Extensions of chunks are dropped where they are let pass at all, trailers always.

    Raises Malformed, and Closed where the body ends before its end.
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


async def _so_many(wire: Wire, left: int) -> AsyncIterator[bytes]:
    while left:
        piece = await wire.some(min(left, 65536))
        if not piece:
            raise Closed
        left -= len(piece)
        yield piece


async def _chunks(wire: Wire, extensions: bool) -> AsyncIterator[bytes]:
    while True:
        size, semicolon, _ = (await wire.line(_LINE_MOST)).partition(b";")
        if semicolon and not extensions:
            raise Malformed("chunk_extension", "chunks have no extensions here")
        if not _SIZE.fullmatch(size.rstrip(b" \t") if extensions else size):
            raise Malformed("chunk_syntax")
        left = int(size, 16)
        if left == 0:
            break
        async for piece in _so_many(wire, left):
            yield piece
        if await wire.line(_LINE_MOST) != b"":
            raise Malformed("chunk_syntax", "a chunk is longer than it says")
    for _ in range(_TRAILERS_MOST):
        if not await wire.line(_TRAILER_MOST):
            return
    raise Malformed("too_many_headers", "too many trailers")


def framed(piece: bytes, framing: Framing) -> bytes:
    """A piece as it goes to the other side, which knows no connection that just ends."""
    if framing.kind in ("chunked", "close"):
        return b"%x\r\n%b\r\n" % (len(piece), piece)
    return piece


def ending(framing: Framing) -> bytes:
    return b"0\r\n\r\n" if framing.kind in ("chunked", "close") else b""
