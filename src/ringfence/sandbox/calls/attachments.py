"""Bytes that go beside the arguments of a call, which name them by digest: what comes must be what was named."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

from ringfence.box import MIB
from ringfence.errors import Refused
from ringfence.model import Status
from ringfence.sandbox.calls.task import Task

PIECE = MIB
_MOST = 64 * MIB


def _changed() -> Refused:
    text = "what was to be written changed after it was named, so nothing was written"
    return Refused(Status.FAILED, "input_changed", text)


async def data_of(task: Task) -> bytes:
    """All of it at once. Raises Refused where it is not what was named."""
    if task.given["data"]["bytes"] > _MOST:
        raise Refused(Status.VALIDATION_FAILURE, "too_large", f"no more than {_MOST} bytes can be sent at once")
    return b"".join([piece async for piece in pieces_of(task)])


async def pieces_of(task: Task) -> AsyncIterator[bytes]:
    """Piece by piece; at the end Refused is raised where they were not what was named."""
    named, given = task.given["data"], task.attached.data
    size, digest = 0, hashlib.sha256()
    async for piece in _cut(given) if isinstance(given, bytes) else given:
        size += len(piece)
        digest.update(piece)
        if size > named["bytes"]:
            raise _changed()
        yield piece
    if size != named["bytes"] or digest.hexdigest() != named["sha256"]:
        raise _changed()


async def _cut(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), PIECE):
        yield data[at : at + PIECE]
