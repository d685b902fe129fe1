"""A sandbox from its caller's side: all that is asked of it is a governed call of one of our own tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ringfence.box import Attached
from ringfence.errors import SandboxStopped, TimedOut, Unavailable
from ringfence.model import Json, Outcome, Status
from ringfence.sdk import engine
from ringfence.sdk.execution import value
from ringfence.sdk.once import seconds

Way = Callable[[str, Json, Attached], Coroutine[Any, Any, Outcome]]
"""How a tool is called: its name, its arguments, and what goes beside them."""

REQUEST_SECONDS = 60.0
NOTHING = Attached()


async def by_engine(tool: str, arguments: Json, attached: Attached) -> Outcome:
    """The way of this process, kept open."""
    return await engine.elsewhere(engine.engine().call(tool, arguments, attached))


def given(**arguments: Any) -> Json:
    """Those arguments that say something."""
    return {name: value for name, value in arguments.items() if value is not None}


async def asked(way: Way, tool: str, arguments: Json, patience: float = REQUEST_SECONDS) -> Json:
    """What a tool that is done in a moment gave back. Raises what says why not; TimedOut after so many seconds."""
    try:
        async with asyncio.timeout(patience):
            return value(await way(tool, arguments, NOTHING))
    except TimedOut:
        raise
    except TimeoutError:
        of = f" of sandbox {arguments['session']}" if "session" in arguments else ""
        text = f"{tool}{of} had no answer after {patience:g} s (request_timeout) and was given up"
        raise TimedOut("request_timeout", f"{text}; ask for its state, and try again") from None


class Link:
    """One sandbox. It is opened when something is first asked of it, or was opened by somebody else."""

    def __init__(self, way: Way, opening: Mapping[str, Any] | None, *, id: str | None = None) -> None:
        self.way = way
        self.patience = REQUEST_SECONDS
        self.limits: Json = {}
        """What one step may use, where it says nothing else."""
        self.attached = NOTHING
        """What goes beside the arguments that it is opened with."""
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
        """Its id. Raises whatever says why there is no such sandbox."""
        if self._id is not None:
            return self._id
        async with self._turn:
            if self._killed:
                text = "the sandbox was killed before it was used; make another"
                raise SandboxStopped(Status.VALIDATION_FAILURE, "session_stopped", text)
            if self._id is None:
                self._id = str(value(await self.way("open_session", self._opening, self.attached))["session"])
        return self._id

    async def kill(self) -> Json | None:
        """What it was like at its end; None where it was never opened, and never will be, or was killed before."""
        async with self._turn:
            self._killed = True
        if self._id is None or self._ended:
            return None
        told = await self.ask("close_session")
        self._ended = True
        return told

    async def ask(self, tool: str, **arguments: Any) -> Json:
        """Something that is done in a moment."""
        return await asked(self.way, tool, {"session": await self.open(), **given(**arguments)}, self.patience)

    async def outcome(self, tool: str, arguments: Json, attached: Attached = NOTHING) -> Outcome:
        """Something that takes the time that it takes."""
        return await self.way(tool, {"session": await self.open(), **arguments}, attached)

    def step_limits(self, timeout: float | None) -> Json | None:
        """For one step: these, with another clock where it has one."""
        return (self.limits if timeout is None else {**self.limits, "wall_seconds": seconds(timeout)}) or None

    async def work(self, tool: str, arguments: Json, attached: Attached = NOTHING) -> Json:
        return value(await self.outcome(tool, arguments, attached))
