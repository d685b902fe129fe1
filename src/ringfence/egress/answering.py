"""Answers of our own, to a box that asks for what is ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from ringfence.box import Reply
from ringfence.egress import http1
from ringfence.egress.http1 import Framing, Request, Response
from ringfence.egress.refusal import Failed

_PIECE = 1024 * 1024


async def written(reply: Reply, request: Request) -> AsyncIterator[bytes]:
    """As it goes to the client, piece by piece. Raises Failed."""
    length = len(reply.body) if isinstance(reply.body, bytes) else await asyncio.to_thread(_size, reply.body)
    headers = (("Content-Type", reply.kind), ("Content-Length", str(length)))
    whole = request.method == "GET" and length > 0
    framing = Framing("length", length) if whole else http1.NO_BODY
    head = Response(reply.status, reply.words, headers, framing, request.close)
    yield http1.write_response(head, request.method, request.close)
    if not whole:
        return
    if isinstance(reply.body, bytes):
        yield reply.body
        return
    with reply.body.open("rb") as stream:
        while length > 0 and (piece := await asyncio.to_thread(stream.read, min(length, _PIECE))):
            length -= len(piece)
            yield piece
    if length:
        raise Failed("no_answer", "what was to be sent is shorter than it was")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        raise Failed("no_answer", "what was to be sent is gone") from None
