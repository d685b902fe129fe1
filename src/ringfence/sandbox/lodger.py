"""A server that lives in an agent's own box: a command in the background of a session, beside whatever the agent runs.

The agent can look at it, change what it reads and end it, so what it says is the agent's word.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable

from ringfence.box import Stream
from ringfence.errors import Refused, Unavailable
from ringfence.model import Json
from ringfence.sandbox.flow import Flow
from ringfence.sandbox.verbs import Keeping
from ringfence.sessions import CommandRequest, Owner

_GRACE_SECONDS = 1.0


class Lodger:
    """Implements `ports.Launched`."""

    def __init__(self, keeper: Keeping, owner: Owner, session: str) -> None:
        self._keeper = keeper
        self._owner = owner
        self._session = session
        self._process = 0
        self._streams: dict[Stream, Flow] = {"stdout": Flow(), "stderr": Flow()}
        self._following: asyncio.Task[None] | None = None
        self.isolation: Json = {}

    def asking(self) -> Callable[[], Json | None]:
        """What its session's box asks for, its keeper knows; the facts of the session's steps tell."""
        return lambda: None

    async def start(self, request: CommandRequest) -> None:
        """Raises Unavailable."""
        try:
            info = await self._keeper.info(self._owner, self._session)
            self._process = (await self._keeper.start(self._owner, self._session, request)).process
        except Refused as exc:
            raise Unavailable(exc.reason_code, exc.message) from None
        self.isolation = {**info.isolation, "session": self._session}
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def _follow(self) -> None:
        try:
            await self._keeper.follow(self._owner, self._session, self._process, (0, 0), self._tell)
        except (Refused, Unavailable):
            return  # the session has ended, and so has the server
        finally:
            for flow in self._streams.values():
                flow.end()

    def _tell(self, stream: Stream, chunk: bytes) -> Awaitable[None] | None:
        return self._streams[stream].put(chunk)

    async def send(self, data: bytes) -> None:
        try:
            await self._keeper.send(self._owner, self._session, self._process, data)
        except (Refused, Unavailable) as exc:
            raise BrokenPipeError(32, exc.message) from None

    async def receive(self, stream: Stream) -> bytes:
        return await self._streams[stream].get()

    async def stop(self) -> str:
        following = self._following
        for flow in self._streams.values():
            flow.forget()
        if following is None:
            return ""
        ended = following.done()
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if following.done():
                    break
                await self._keeper.signal(self._owner, self._session, self._process, number)
                await asyncio.wait({following}, timeout=_GRACE_SECONDS)
        except (Refused, Unavailable):
            return "its session has ended"
        finally:
            following.cancel()
        return "it ended in its session" if ended else ""
