"""What goes on with the files of a guest in the event loop: files that are written as their contents come, and changes
that are reported as they happen."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Iterator
from typing import Any

from ringfence.core.box import MIB
from ringfence.core.box_files import Changed
from ringfence.core.errors import Unavailable
from ringfence.sandbox.files.paths import DEEPEST, full_path, parts_of, shown
from ringfence.sandbox.guests.files_call import (
    WayToFiles,
    decoded,
    lost,
    malformed_unless,
    opened,
    pack_record,
    refused,
    stalled,
)
from ringfence.sandbox.guests.files_tree import is_name, sliced
from ringfence.sandbox.guests.link import GuestGone, GuestOrder

_BEGIN_SECONDS = 60.0
_END_SECONDS = 60.0
_CHANGES = ("created", "modified", "removed", "renamed", "lost")


class GuestSpool:
    """A file that is written as its contents come."""

    def __init__(self, channel: GuestOrder) -> None:
        self._channel = channel
        self._said = bytearray()
        channel.on_output = self._hear
        self._last: asyncio.Future[Any] | None = None

    def _hear(self, kind: bytes, data: bytes) -> None:
        if kind == b"1" and len(self._said) < MIB:
            self._said += data

    def write(self, data: bytes) -> Awaitable[None]:
        self._last = asyncio.ensure_future(self._write(self._last, b"".join(_records_of(data))))
        return self._last

    async def _write(self, before: asyncio.Future[Any] | None, data: bytes) -> None:
        if before is not None:
            await before
        await self._channel.write(data)

    def drop(self) -> None:
        self._last = asyncio.ensure_future(self._finish(self._last, b""))

    async def _finish(self, before: asyncio.Future[Any] | None, last: bytes) -> bool:
        """Whether the guest was done with it in time: it may take nothing more, and say nothing."""
        try:
            async with asyncio.timeout(_END_SECONDS):
                await self._write(before, last)
                self._channel.end()
                await asyncio.shield(self._channel.result)
        except (GuestGone, TimeoutError):
            self._channel.kill()
            return False
        return True

    async def close(self) -> bool:
        return await self._finish(self._last, pack_record(b".", b"")) and bytes(self._said[:1]) == b"."


def _records_of(data: bytes) -> Iterator[bytes]:
    return (pack_record(b"D", part) for part in sliced(data))


class GuestWatcher:
    """Changes in a guest's folders, as an asynchronous iterator."""

    def __init__(self, way: WayToFiles, path: str) -> None:
        self._way = way
        self._path = path
        self._parts = parts_of(path)
        self._held = bytearray()
        self._waiting: deque[tuple[bytes, asyncio.Future[None]]] = deque()
        self._more = asyncio.Event()
        self._changes: deque[Changed] = deque()
        self._closed = False
        self._channel: GuestOrder

    @classmethod
    async def begun(cls, way: WayToFiles, order: dict[str, Any], path: str) -> GuestWatcher:
        """Returns when changes are reported. Raises Refused and Unavailable."""
        made = cls(way, path)
        await way.begin()  # later it need not be awake: while its programs stand still, nothing changes
        try:
            kind, data = await made._begin(order)
        finally:
            await way.rest()
        if kind == b"E":
            told = decoded(data)
            malformed_unless(isinstance(told, dict))
            raise refused(told, path)
        return made

    async def _begin(self, order: dict[str, Any]) -> tuple[bytes, bytes]:
        self._channel = opened(self._way.link, order)
        self._channel.on_output = self._take
        self._channel.result.add_done_callback(lambda _: self._more.set())
        try:
            async with asyncio.timeout(_BEGIN_SECONDS):
                return await self._record()
        except BaseException as problem:
            self.close()
            if isinstance(problem, TimeoutError):
                raise stalled() from None
            raise

    def _take(self, kind: bytes, data: bytes) -> Awaitable[None] | None:
        if kind != b"1" or self._closed:
            return None
        taken = self._way.loop.create_future()
        self._waiting.append((data, taken))
        self._more.set()
        return taken

    async def _record(self) -> tuple[bytes, bytes]:
        """Raises Unavailable where there is no more."""
        while True:
            if len(self._held) >= 5:
                size = int.from_bytes(self._held[1:5], "big")
                malformed_unless(size <= MIB)
                if len(self._held) >= 5 + size:
                    kind, data = bytes(self._held[:1]), bytes(self._held[5 : 5 + size])
                    del self._held[: 5 + size]
                    return kind, data
            if self._waiting:
                data, taken = self._waiting.popleft()
                self._held += data
                if not taken.done():
                    taken.set_result(None)
            elif self._closed or self._channel.result.done():
                raise lost(self._channel)
            else:
                self._more.clear()
                await self._more.wait()

    def close(self) -> None:
        """Ends the iteration for a waiting caller."""
        if self._closed:
            return
        self._closed = True
        self._channel.kill()
        self._channel.on_output = lambda kind, data: None
        for _, taken in self._waiting:
            if not taken.done():
                taken.set_result(None)
        self._more.set()

    def __enter__(self) -> GuestWatcher:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def __aiter__(self) -> GuestWatcher:
        return self

    async def __anext__(self) -> Changed:
        if self._closed:
            raise StopAsyncIteration
        try:
            kind, data = await self._record()
        except Unavailable:
            raise StopAsyncIteration from None
        malformed_unless(kind == b"J")
        told = decoded(data)
        malformed_unless(isinstance(told, list) and len(told) == 3 and told[0] in _CHANGES)
        return Changed(told[0], self._shown(told[1]), None if told[2] is None else self._shown(told[2]))

    def _shown(self, names: Any) -> str:
        malformed_unless(isinstance(names, list) and len(names) <= 2 * DEEPEST and all(map(is_name, names)))
        return full_path((*self._parts, *map(shown, names)))
