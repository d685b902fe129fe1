"""A server that runs as a command in a box, its own or that of a session. Its output is handed on as fast as it is
read, and no faster."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

from ringfence.core.box import BoxReport, Stream
from ringfence.core.errors import Refused, Unavailable, unknown_session
from ringfence.core.model import Json
from ringfence.core.quoting import whole_lines
from ringfence.core.sessions import Command, CommandRequest, Owner, StartedCommand, StayingBox
from ringfence.sandbox.servers.startup_diagnosis import MissingGrant, diagnose, explain, explain_to_callers

if TYPE_CHECKING:
    from ringfence.sandbox.sessions.service import SessionService

_LAST_WORDS = 16_384
_GRACE_SECONDS = 2.0
_SESSION_GRACE_SECONDS = 1.0
_HELD = 65_536
"""Bytes of a stream that may wait to be read; then the pipe fills, and the server waits."""


class StreamBuffer:
    """Output of a server that was not read yet. When it is full, the server waits."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._ended = False
        self._forgotten = False
        self._come = asyncio.Event()
        self._room: asyncio.Future[None] | None = None

    def put(self, chunk: bytes) -> Awaitable[None] | None:
        if self._forgotten:
            return None
        self._chunks.append(chunk)
        self._size += len(chunk)
        self._come.set()
        if self._size <= _HELD:
            return None
        self._room = asyncio.get_running_loop().create_future()
        return self._room

    async def get(self) -> bytes:
        while not self._chunks and not self._ended:
            self._come.clear()
            await self._come.wait()
        data = b"".join(self._chunks)
        self._chunks.clear()
        self._make_room()
        return data

    def end(self) -> None:
        self._ended = True
        self._come.set()

    def forget(self) -> None:
        """Stop reading: later output is discarded, so that the server can end."""
        self._forgotten = True
        self._chunks.clear()
        self._make_room()
        self.end()

    def _make_room(self) -> None:
        self._size = 0
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None


class ServerOutput:
    """Both streams of a server, and the last of its stderr. Implements `sessions.TellEnds`: what closes its output has
    ended for us, though it lives on."""

    def __init__(self) -> None:
        self._streams: dict[Stream, StreamBuffer] = {"stdout": StreamBuffer(), "stderr": StreamBuffer()}
        self._stderr = b""

    def __call__(self, stream: Stream, chunk: bytes, /) -> Awaitable[None] | None:
        if stream == "stderr":
            self._stderr = (self._stderr + chunk)[-_LAST_WORDS:]
        return self._streams[stream].put(chunk)

    def closed(self, stream: Stream) -> None:
        self._streams[stream].end()

    async def receive(self, stream: Stream) -> bytes:
        return await self._streams[stream].get()

    @property
    def last_stderr(self) -> str:
        return whole_lines(self._stderr, _LAST_WORDS)

    def end(self) -> None:
        for each in self._streams.values():
            each.end()

    def forget(self) -> None:
        """Stop reading: later output is discarded, so that the server can end."""
        for each in self._streams.values():
            each.forget()


class BoxedServer:
    """A command in a box of its own, or in one that several servers share. Implements `ports.Launched`."""

    def __init__(self, name: str, box: StayingBox, leave: Callable[[], Awaitable[None]]) -> None:
        """`leave` ends the box, unless other servers are still in it."""
        self._name = name
        self._box = box
        self._leave = leave
        self.network_since_start = box.network_meter()
        self._running: StartedCommand | None = None
        self._stdin = -1
        self._output = ServerOutput()
        self._over: asyncio.Task[BoxReport] | None = None
        self._stopped: asyncio.Task[None] | None = None
        self._asked = False
        """Whether we asked it to end."""

    @property
    def isolation(self) -> Json:
        return dict(self._box.isolation)

    def network_meter(self) -> Callable[[], Json | None]:
        return self._box.network_meter()

    async def start(self, command: Command) -> None:
        """Start the command. Without an input of its own, it reads what `send` sends. Raises Unavailable."""
        theirs, self._stdin = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._stdin, False)
        try:
            given = replace(command, stdin=theirs) if not isinstance(command.stdin, int) else command
            self._running = await self._box.command(given, self._output)
        finally:
            os.close(theirs)
        self._over = asyncio.get_running_loop().create_task(self._wait(self._running))

    async def _wait(self, running: StartedCommand) -> BoxReport:
        try:
            return await running.over()
        finally:
            self._output.end()

    # ── Streams ──

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if self._stdin < 0:
                raise BrokenPipeError(32, "its input is closed")
            try:
                view = view[os.write(self._stdin, view) :]
            except BlockingIOError:
                await anyio.wait_writable(self._stdin)

    async def receive(self, stream: Stream) -> bytes:
        return await self._output.receive(stream)

    def close_input(self) -> None:
        if self._stdin >= 0:
            anyio.notify_closing(self._stdin)
            os.close(self._stdin)
            self._stdin = -1

    # ── End ──

    @property
    def last_stderr(self) -> str:
        """The last of what it wrote to stderr."""
        return self._output.last_stderr

    def signal(self, number: int) -> None:
        if self._running is not None:
            self._running.signal(number)

    async def over(self) -> BoxReport:
        """Wait until it has ended; returns how."""
        assert self._over is not None
        return await asyncio.shield(self._over)

    async def stop(self) -> str:
        """Close its input and wait a moment; then ask it to end; then end its box."""
        over = self._over
        if self._stopped is None:
            self._asked = over is None or not over.done()
            self._stopped = asyncio.get_running_loop().create_task(self._stop())
        await asyncio.shield(self._stopped)
        how = "" if self._asked or over is None else _how(over.result())
        report = self._report()
        lacked = "" if report is None else explain_to_callers(self._name, report, self.last_stderr)
        return "; ".join(filter(None, (how, lacked)))

    @property
    def hint(self) -> str:
        return explain(self._name, self.lacked())

    def lacked(self) -> tuple[MissingGrant, ...]:
        """What it seems to have lacked, once it is over."""
        report = self._report()
        return () if report is None else diagnose(report, self.last_stderr)

    def _report(self) -> BoxReport | None:
        if self._over is None or not self._over.done() or self._over.cancelled() or self._over.exception() is not None:
            return None
        return self._over.result()

    async def _stop(self) -> None:
        self.close_input()
        self._output.forget()
        try:
            for number in (None, signal.SIGTERM):
                if self._over is None or self._over.done():
                    break
                if number is not None:
                    self.signal(number)
                await asyncio.wait({self._over}, timeout=_GRACE_SECONDS)
        finally:
            if self._running is not None and self._over is not None and not self._over.done():
                self._running.signal(signal.SIGKILL)
            await self._leave()
            if self._over is not None:
                await asyncio.wait({self._over})


def _how(report: BoxReport) -> str:
    if report.ended == "exited":
        return f"it ended with status {report.exit_status}"
    if report.ended == "signalled":
        return f"it was ended by signal {report.signal}"
    limit = f" (limit: {report.limit})" if report.limit is not None else ""
    return f"its box ended it: {report.ended}{limit}"


class SessionServer:
    """A command in the background of a session, beside what the agent runs. Implements `ports.Launched`.

    The agent can read it, change its files and end it, so its output is no more trustworthy than the agent.
    """

    def __init__(self, keeper: SessionService, owner: Owner, session: str) -> None:
        self._keeper = keeper
        self._owner = owner
        self._session = session
        self._process = 0
        self._output = ServerOutput()
        self._following: asyncio.Task[None] | None = None
        self.isolation: Json = {}
        self.hint = ""

    def network_meter(self) -> Callable[[], Json | None]:
        """The keeper knows what the session's box asks for, and the facts of the session's steps report it."""
        return lambda: None

    def network_since_start(self) -> Json | None:
        return None

    async def start(self, request: CommandRequest) -> None:
        """Raises Unavailable."""
        try:
            info = await self._keeper.info(self._owner, self._session)
            if info.opened_by is None:
                raise unknown_session(self._session)
            self._process = (await self._keeper.start(self._owner, self._session, request)).process
        except Refused as exc:
            raise Unavailable(exc.reason_code, exc.message) from None
        self.isolation = {**info.isolation, "session": self._session}
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def _follow(self) -> None:
        try:
            await self._keeper.follow(self._owner, self._session, self._process, (0, 0), self._output)
        except (Refused, Unavailable):
            return  # the session has ended, and so has the server
        finally:
            self._output.end()

    @property
    def last_stderr(self) -> str:
        return self._output.last_stderr

    async def send(self, data: bytes) -> None:
        try:
            await self._keeper.send(self._owner, self._session, self._process, data)
        except (Refused, Unavailable) as exc:
            raise BrokenPipeError(32, exc.message) from None

    async def receive(self, stream: Stream) -> bytes:
        return await self._output.receive(stream)

    async def stop(self) -> str:
        following = self._following
        self._output.forget()
        if following is None:
            return ""
        ended = following.done()
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if following.done():
                    break
                await self._keeper.signal(self._owner, self._session, self._process, number)
                await asyncio.wait({following}, timeout=_SESSION_GRACE_SECONDS)
        except (Refused, Unavailable):
            return "its session has ended"
        finally:
            following.cancel()
        return "it ended in its session" if ended else ""
