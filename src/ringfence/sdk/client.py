"""A session from its caller's side: everything that is asked of it is a governed call of one of our own tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ringfence.core.box import Attached
from ringfence.core.errors import SandboxStopped, TimedOut, Unavailable
from ringfence.core.model import Json, Outcome, Status
from ringfence.sdk import engine
from ringfence.sdk.execution import value
from ringfence.sdk.once import seconds

CallTool = Callable[[str, Json, Attached], Coroutine[Any, Any, Outcome]]
"""Calls a tool: by its name, its arguments, and what is sent beside them."""

REQUEST_SECONDS = 60.0
NOTHING = Attached()


async def call_by_engine(tool: str, arguments: Json, attached: Attached) -> Outcome:
    """Call a tool by the engine of this process, which stays open."""
    return await engine.elsewhere(engine.engine().call(tool, arguments, attached))


def given(**arguments: Any) -> Json:
    """The arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


async def ask(call_tool: CallTool, tool: str, arguments: Json, patience: float = REQUEST_SECONDS) -> Json:
    """What a tool that answers at once gave back. Raises its error, or TimedOut after `patience` seconds."""
    if call_tool is call_by_engine and not engine.engine().is_ready:
        await engine.elsewhere(engine.engine().ready())  # not the tool's time: a slow machine takes long to start
    try:
        async with asyncio.timeout(patience):
            return value(await call_tool(tool, arguments, NOTHING))
    except TimedOut:
        raise
    except TimeoutError:
        of = f" of sandbox {arguments['session']}" if "session" in arguments else ""
        text = f"{tool}{of} had no answer after {patience:g} s (request_timeout) and was given up"
        raise TimedOut("request_timeout", f"{text}; ask for its state, and try again") from None


class SessionClient:
    """One session. It is opened by the first call, unless it was opened elsewhere."""

    def __init__(self, call_tool: CallTool, opening: Mapping[str, Any] | None, *, id: str | None = None) -> None:
        self.call_tool = call_tool
        self.patience = REQUEST_SECONDS
        self.limits: Json = {}
        """The limits of a step that names no others."""
        self.attached = NOTHING
        """What is sent beside the arguments that open it."""
        self._opening = dict(opening or {})
        self._id = id
        self._turn = asyncio.Lock()
        self._killed = self._ended = False

    @property
    def id(self) -> str:
        if self._id is None:
            raise Unavailable("not_open", "the sandbox has no id before it is used: use it, or make it with create()")
        return self._id

    async def open(self) -> str:
        """Open it, if it is not open yet, and return its id. Raises the error if it cannot be opened."""
        if self._id is not None:
            return self._id
        async with self._turn:
            if self._killed:
                text = "the sandbox was killed before it was used; make another"
                raise SandboxStopped(Status.VALIDATION_FAILURE, "session_stopped", text)
            if self._id is None:
                self._id = str(value(await self.call_tool("open_session", self._opening, self.attached))["session"])
        return self._id

    async def kill(self) -> Json | None:
        """Close it, and return its last state; None if it was never opened (and now never will be) or is closed."""
        async with self._turn:
            self._killed = True
        if self._id is None or self._ended:
            return None
        reply = await self.ask("close_session")
        self._ended = True
        return reply

    async def ask(self, tool: str, **arguments: Any) -> Json:
        """Call a tool that answers at once, within `patience` seconds."""
        return await ask(self.call_tool, tool, {"session": await self.open(), **given(**arguments)}, self.patience)

    async def outcome(self, tool: str, arguments: Json, attached: Attached = NOTHING) -> Outcome:
        """Call a tool that may take as long as it needs, and return its outcome."""
        return await self.call_tool(tool, {"session": await self.open(), **arguments}, attached)

    def step_limits(self, timeout: float | None) -> Json | None:
        """The limits of one step: the usual ones, with its own timeout if it has one."""
        return (self.limits if timeout is None else {**self.limits, "wall_seconds": seconds(timeout)}) or None

    async def work(self, tool: str, arguments: Json, attached: Attached = NOTHING) -> Json:
        """Call a tool that may take as long as it needs, and return what it gave back. Raises its error."""
        return value(await self.outcome(tool, arguments, attached))
