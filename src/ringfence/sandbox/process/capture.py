"""A stream of output, kept in bounded memory: its head, its tail, and a digest of all of it."""

from __future__ import annotations

import hashlib

from ringfence.core.box import Captured


class Capture:
    """Takes a stream in pieces and keeps at most `limit` bytes of it: the first half of them and the last."""

    def __init__(self, limit: int) -> None:
        self._limit = max(0, limit)
        self._tail_size = self._limit // 2
        self._head_size = self._limit - self._tail_size
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0
        self._digest = hashlib.sha256()

    @property
    def total(self) -> int:
        """How many bytes have come."""
        return self._total

    def feed(self, chunk: bytes | memoryview) -> None:
        self._total += len(chunk)
        self._digest.update(chunk)
        room = self._head_size - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        if len(chunk) >= self._tail_size:
            self._tail[:] = chunk[len(chunk) - self._tail_size :]
            return
        self._tail += chunk
        # Cut at twice the size, so that each byte is moved once at most, however small the pieces are.
        if len(self._tail) > 2 * self._tail_size:
            del self._tail[: -self._tail_size]

    def done(self) -> Captured:
        digest = self._digest.hexdigest()
        if self._total <= self._limit:
            return Captured(bytes(self._head + self._tail), b"", self._total, digest)
        tail = bytes(self._tail[len(self._tail) - self._tail_size :])
        return Captured(bytes(self._head), tail, self._total, digest)
