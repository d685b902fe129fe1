"""A server that runs as a command in a box: what it writes is handed on as fast as it is taken, and no faster."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace

import anyio

from ringfence.box import BoxReport, Stream
from ringfence.model import Json
from ringfence.sandbox.flow import Flow
from ringfence.sandbox.wants import Want, sentence, wants
from ringfence.sessions import Command, Commanding, Living

_LAST_WORDS = 16_384
_GRACE_SECONDS = 2.0


class BoxedServer:
    """Implements `ports.Launched`."""

    def __init__(self, name: str, box: Living, leave: Callable[[], Awaitable[None]]) -> None:
        """`leave` ends the box, or lets it be where others are in it."""
        self._name = name
        self._box = box
        self._leave = leave
        self._running: Commanding | None = None
        self._stdin = -1
        self._streams: dict[Stream, Flow] = {"stdout": Flow(), "stderr": Flow()}
        self._said = bytearray()
        self._over: asyncio.Task[BoxReport] | None = None
        self._stopped: asyncio.Task[None] | None = None
        self._asked = False
        """Whether it was us who wanted it to end."""

    @property
    def isolation(self) -> Json:
        return dict(self._box.isolation)

    def asking(self) -> Callable[[], Json | None]:
        return self._box.asking()

    async def start(self, command: Command) -> None:
        """Raises Unavailable. Without an input of its own, it gets what is sent."""
        theirs, self._stdin = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._stdin, False)
        try:
            given = replace(command, stdin=theirs) if not isinstance(command.stdin, int) else command
            self._running = await self._box.command(given, self._tell)
        finally:
            os.close(theirs)
        self._over = asyncio.get_running_loop().create_task(self._wait(self._running))

    async def _wait(self, running: Commanding) -> BoxReport:
        try:
            return await running.over()
        finally:
            for flow in self._streams.values():
                flow.end()

    # ── Its streams ──

    def _tell(self, stream: Stream, chunk: bytes) -> Awaitable[None] | None:
        if stream == "stderr":
            self._said = (self._said + chunk)[-_LAST_WORDS:]
        return self._streams[stream].put(chunk)

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
        return await self._streams[stream].get()

    def close_input(self) -> None:
        if self._stdin >= 0:
            anyio.notify_closing(self._stdin)
            os.close(self._stdin)
            self._stdin = -1

    # ── Its end ──

    @property
    def said(self) -> str:
        """The last of what it wrote to stderr."""
        return self._said.decode("utf-8", "replace")

    def signal(self, number: int) -> None:
        if self._running is not None:
            self._running.signal(number)

    async def over(self) -> BoxReport:
        """How it ended."""
        assert self._over is not None
        return await asyncio.shield(self._over)

    async def stop(self) -> str:
        """Close its input and wait a moment; ask; then end its box."""
        over = self._over
        if self._stopped is None:
            self._asked = over is None or not over.done()
            self._stopped = asyncio.get_running_loop().create_task(self._stop())
        await asyncio.shield(self._stopped)
        how = "" if self._asked or over is None else _how(over.result())
        return "; ".join(filter(None, (how, sentence(self._name, self.lacked()))))

    def lacked(self) -> tuple[Want, ...]:
        """Once it is over."""
        if self._over is None or not self._over.done() or self._over.cancelled() or self._over.exception() is not None:
            return ()
        return wants(self._over.result(), self.said)

    async def _stop(self) -> None:
        self.close_input()
        for flow in self._streams.values():
            flow.forget()
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
