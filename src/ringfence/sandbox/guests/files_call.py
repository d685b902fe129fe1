"""One piece of work on the files of a guest: ordered from a thread, done by a child of the agent, spoken to over the
link. `agent_files` describes the records.

What comes is data: it has an upper limit in every respect, and what the agent would not send ends the work.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future as ThreadFuture
from contextlib import contextmanager, suppress
from dataclasses import field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ringfence.core.aio import begun
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.model import Json, Status
from ringfence.core.record import plain
from ringfence.sandbox.files.archive import in_the_way, mounted
from ringfence.sandbox.files.paths import LONGEST_PATH, changing, disk_full, explained, refusal, shown, too_long
from ringfence.sandbox.files.walk import closed, filled, too_deep, too_large, too_many
from ringfence.sandbox.guests.link import GuestGone, GuestOrder, Link

T = TypeVar("T")
PIECE = 256 * 1024
_HEADER = struct.Struct(">cI")
_LONGEST = 1024 * 1024
_LONGEST_TOLD = 256 * 1024
_FULL = (28, 122)
"""ENOSPC and EDQUOT."""
_STALLED_SECONDS = 120.0
"""Programs can stop the child that does the work: then nobody waits for it any longer than that."""
_KILL_SECONDS = 20.0


async def _at_once() -> None:
    """A guest that is always awake."""


@plain
class WayToFiles:
    """How the files of a guest are reached."""

    link: Link
    loop: asyncio.AbstractEventLoop
    base: str = "/"
    """The folder of the guest that its paths begin at."""
    beneath: bool = False
    """Whether that stands for /workspace alone, and links lead out of it; else for the root."""
    wake: Callable[[], Awaitable[None]] = _at_once
    """Before each piece of work: from then on the guest's agent answers, though programs may stand still. Raises
    OSError and Unavailable."""
    doze: Callable[[], Awaitable[None]] = _at_once
    """After it."""
    end: Callable[[], None] = lambda: None
    """Ends the guest, where its agent does not end work when it must."""
    resting: set[asyncio.Task[None]] = field(default_factory=set)

    def order(self, what: str, **more: Any) -> Json:
        return {"do": "files", "what": what, "base": self.base, "beneath": self.beneath, **more}

    async def ordered(self, order: Mapping[str, Any]) -> GuestOrder:
        """A piece of work that was ordered; the guest is awake until it is over. Raises Unavailable."""
        await self.begin()
        try:
            channel = opened(self.link, order)
        except BaseException:
            await self.rest()
            raise
        channel.result.add_done_callback(self._over)
        return channel

    async def begin(self) -> None:
        """Raises Unavailable."""
        try:
            await self.wake()
        except OSError as problem:
            raise Unavailable("guest_failed", f"the box cannot go on for its files: {problem}") from problem

    async def rest(self) -> None:
        with suppress(OSError, Unavailable):  # it is woken again for what is asked next
            await self.doze()

    def _over(self, _: object) -> None:
        task = begun(self.rest())
        self.resting.add(task)
        task.add_done_callback(self.resting.discard)

    def wait_for(self, work: Coroutine[Any, Any, T], seconds: float | None = _STALLED_SECONDS) -> T:
        """Have it done in the loop, from a thread. Raises Unavailable where it takes too long."""
        future: ThreadFuture[T] = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            raise stalled() from None


class GuestCall:
    """A piece of work, as a thread sees it."""

    def __init__(self, way: WayToFiles, what: str, about: str, **order: Any) -> None:
        """`about`: the path that errors are about, as the caller wrote it. Raises Unavailable."""
        self.begun: bool | None = None
        """Whether anything had begun to change, as far as the guest says; None while that is not known."""
        self._about = about
        self._target = str(order.pop("target", about))
        """Of a rename."""
        self._way = way
        self._come: SimpleQueue[tuple[bytes, asyncio.Future[None]] | None] = SimpleQueue()
        self._held = bytearray()
        self._over = False
        self._channel: GuestOrder = way.wait_for(self._open(way.order(what, **order)))

    async def _open(self, order: Mapping[str, Any]) -> GuestOrder:
        channel = await self._way.ordered(order)
        channel.on_output = self._take
        channel.result.add_done_callback(self._end)
        return channel

    def _take(self, kind: bytes, data: bytes) -> Awaitable[None] | None:
        if kind != b"1" or self._over:
            return None
        taken = self._way.loop.create_future()
        self._come.put((data, taken))
        return taken

    def _end(self, _: object) -> None:
        self._over = True
        self._come.put(None)

    # ── In ──

    def send(self, kind: bytes, data: bytes) -> bool:
        """A record for the guest. False where it takes no more, since the work is over."""
        if self._over:
            return False
        self._way.wait_for(self._channel.write(_HEADER.pack(kind, len(data)) + data))
        return not self._over

    def finish(self, *, whole: bool = True) -> None:
        """There is no more; `whole`: and that was all."""
        if whole:
            self.send(b".", b"")
        self._way.loop.call_soon_threadsafe(self._channel.end)

    # ── Out ──

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        """What the guest says, until it says that all is done. Raises Refused and Unavailable."""
        try:
            while True:
                kind, data = self._record()
                if kind == b".":
                    self.begun = _told(data).get("begun") is not False
                    return
                if kind == b"E":
                    told = _told(data)
                    self.begun = told.get("begun") is not False
                    raise self._refused(told)
                yield kind, data
        finally:
            self.leave()

    def done(self) -> Json:
        """Wait for the end of work that has one thing to say at most."""
        said: Json = {}
        for kind, data in self.records():
            if kind == b"J":
                said = _told(data)
        return said

    def leave(self) -> None:
        """Take nothing more of it. Work that goes on is ended."""
        with suppress(RuntimeError):  # the loop is closed, and the guest with it
            self._way.loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        self._channel.on_output = _ignore
        if not self._over:
            self._over = True
            self._channel.kill()
        if not self._channel.result.done():
            late = self._way.loop.call_later(_KILL_SECONDS, self._way.end)
            self._channel.result.add_done_callback(lambda _: late.cancel())
        with suppress(Empty):
            while (entry := self._come.get_nowait()) is not None:
                _set(entry[1])

    def _record(self) -> tuple[bytes, bytes]:
        while len(self._held) < _HEADER.size:
            self._more()
        kind, size = _HEADER.unpack_from(self._held)
        if kind not in (b"J", b"D", b".", b"E") or size > _LONGEST:
            raise _malformed()
        end = _HEADER.size + size
        while len(self._held) < end:
            self._more()
        body = bytes(memoryview(self._held)[_HEADER.size : end])
        del self._held[:end]
        return kind, body

    def _more(self) -> None:
        try:
            entry = self._come.get(timeout=_STALLED_SECONDS)
        except Empty:
            raise stalled() from None
        if entry is None:
            raise lost(self._channel)
        data, taken = entry
        self._held += data
        self._way.loop.call_soon_threadsafe(_set, taken)

    # ── Words ──

    def _refused(self, told: Json) -> Refused | Unavailable:
        return refused(told, self._target if told.get("about") == "to" else self._about)


def opened(link: Link, order: Mapping[str, Any]) -> GuestOrder:
    """In the loop. Raises Unavailable."""
    try:
        return link.open(order)
    except GuestGone as gone:
        raise Unavailable("no_box", f"the box is gone, and its files with it: {gone}") from None


def refused(told: Json, path: str) -> Refused | Unavailable:
    """In words, what a guest says of why something was not done."""
    number = told.get("errno")
    if number in _FULL:
        room = told.get("room")
        if isinstance(room, list) and len(room) == 3 and all(isinstance(each, int) for each in room):
            return disk_full(path, *room)
        return disk_full(path, 0, 0, 1)
    if isinstance(number, int) and 0 < number < 4096:
        return explained(number, path)
    word = told.get("refused")
    inner = told.get("path")
    where = "/" + shown(inner[:LONGEST_PATH]).lstrip("/") if isinstance(inner, str) else path
    named = shown(inner[:LONGEST_PATH]) if isinstance(inner, str) else path
    number = _number(told.get("most"))
    words: Mapping[str, Callable[[], Refused | Unavailable]] = {
        "too_many": lambda: too_many(number),
        "too_deep": lambda: too_deep(where, number),
        "no_permission": lambda: closed(where),
        "changing": lambda: changing(where),
        "too_large": too_large,
        "filled": filled,
        "in_the_way": lambda: in_the_way(named, folder=told.get("folder") is True),
        "mounted": lambda: mounted(named),
        "long": lambda: too_long(path, _number(told.get("size")), number),
        "other_disk": lambda: refusal("other_disk", path),
        "cut": lambda: Refused(Status.FAILED, "changing", f"{path!r} was not written: its bytes did not come"),
        "many_folders": lambda: refusal(
            "too_many", f"there are more than {number} folders to watch; name one below, or watch it alone"
        ),
        "watches": lambda: Unavailable("watches", "nothing can be watched in this box; stop other watchers of it"),
        "not_watched": lambda: Unavailable("watches", f"{where!r} cannot be watched; watch fewer folders"),
    }
    made = words.get(word) if isinstance(word, str) else None
    return made() if made is not None else _malformed()


def _number(said: object) -> int:
    return said if isinstance(said, int) and abs(said) < 2**63 else 0


def lost(channel: GuestOrder) -> Unavailable:
    """Why work ended before it said so."""
    if not channel.result.done() or channel.result.exception() is not None:
        return Unavailable("no_box", "the box has ended, and its files are gone with it")
    return Unavailable("guest_failed", "a program in the box ended the work on its files, or there was no room for it")


def stalled() -> Unavailable:
    return Unavailable("guest_failed", "the box does nothing about its files: it is paused, or a program stops it")


def _malformed() -> Unavailable:
    return Unavailable("guest_failed", "the box said of its files what its agent never says")


def _told(data: bytes) -> Json:
    """A JSON object of the guest's. Raises Unavailable."""
    told = decoded(data)
    if not isinstance(told, dict):
        raise _malformed()
    return told


def decoded(data: bytes) -> Any:
    if len(data) > _LONGEST_TOLD:
        raise _malformed()
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise _malformed() from None


def pack_record(kind: bytes, data: bytes) -> bytes:
    return _HEADER.pack(kind, len(data)) + data


@contextmanager
def leaving(call: GuestCall) -> Iterator[Iterator[tuple[bytes, bytes]]]:
    """What a guest says, for a reader that may find it malformed, or go no further."""
    try:
        yield call.records()
    finally:
        call.leave()


def malformed_unless(holds: object) -> None:
    """Raises Unavailable."""
    if not holds:
        raise _malformed()


def _set(taken: asyncio.Future[None]) -> None:
    if not taken.done():
        taken.set_result(None)


def _ignore(kind: bytes, data: bytes) -> None:
    """For what nobody waits for any longer."""
