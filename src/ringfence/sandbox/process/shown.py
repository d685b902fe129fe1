"""What a program that ran once has shown: it is read from a file of its box, which has ended. The format: `guest.once`.

The program can write anything there, as it can print anything. Only a plain file is read, up to a size, and what is in
it is as trusted as any claim: not at all.
"""

from __future__ import annotations

import asyncio
import os
import stat
from contextlib import suppress

from ringfence.core.box import Shown
from ringfence.sandbox.process.untrusted_reply import MAX_BYTES, Claims

_FOLDER = "tmp"
_NAME = ".shown"
_LENGTH = 4
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CELL = 1
_MUCH = 262_144


async def by_program(workspace: int) -> tuple[Shown, ...]:
    """The values that a program in this workspace showed; everything that ran there is gone."""
    data = b""
    with suppress(OSError):  # it showed nothing
        data = _read(workspace)
    # In a thread: the program decided how much there is, and other callers would wait meanwhile.
    return await asyncio.to_thread(_parsed, data) if len(data) > _MUCH else _parsed(data)


def _parsed(data: bytes) -> tuple[Shown, ...]:
    claims = Claims(_CELL)
    at = 0
    while at < len(data) and not claims.done and claims.broken is None:
        size = int.from_bytes(data[at : at + _LENGTH], "big")
        at += _LENGTH + size
        claims.feed(data[at - size : at])
    return tuple(claims.results)


def _read(workspace: int) -> bytes:
    folder = os.open(_FOLDER, _READ | os.O_DIRECTORY, dir_fd=workspace)
    try:
        file = os.open(_NAME, _READ, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        found = os.fstat(file)
        return os.pread(file, MAX_BYTES, 0) if stat.S_ISREG(found.st_mode) else b""
    finally:
        os.close(file)
