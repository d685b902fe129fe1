"""The folders that a client says it works on, for servers that ask for them in no call's course.

They are passed on as the client tells them, and are no boundary: what a server can reach is what its box shows it. A
client can only be asked while a call of its own is under way, so it is asked when a connection is opened for it, and
again with the first call after it said that they changed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from ringfence.errors import Refused
from ringfence.model import Json
from ringfence.ports import UpstreamRequest
from ringfence.upstream.link import RpcError

METHOD, CHANGED = "roots/list", "notifications/roots/list_changed"
_METHOD_NOT_FOUND = -32601
_ASK_SECONDS = 10.0
_HEAR_SECONDS = 1.0
_SETTLE_SECONDS = 0.05
"""A server looks at the folders before it goes by them, and does not say when it has."""


async def asked(request: UpstreamRequest) -> Json | None:
    """What the client of a call tells; None where it does not."""
    question: Json = {"method": METHOD, "params": {"_meta": {"ringfence/server": request.server}}}
    with anyio.move_on_after(_ASK_SECONDS):
        try:
            answer = (await request.channel.ask({"roots": question})).get("roots")
        except Refused:
            return None
        return answer if isinstance(answer, dict) else None
    return None


async def first_told(request: UpstreamRequest, capabilities: Json) -> Roots:
    """For a connection that is opened for this call's client alone; what others share knows nobody's."""
    return Roots(await asked(request) if "roots" in capabilities and request.session is not None else None)


class Roots:
    """Of one connection."""

    def __init__(self, told: Json | None = None) -> None:
        self._told = told
        self._stale = False
        self._heard = anyio.Event()
        self._wanted = False
        self._at = float("-inf")

    def change(self) -> None:
        """The client said that they are others now."""
        self._stale = self._told is not None

    def answer(self) -> Json:
        """To a server that asks. Raises RpcError where nothing was told."""
        if self._told is None:
            raise RpcError(_METHOD_NOT_FOUND, f"{METHOD} belongs to no call in progress")
        self._wanted, self._at = True, anyio.current_time()
        self._heard.set()
        return self._told

    async def settle(self, request: UpstreamRequest, notify: Callable[[str, Json | None], Awaitable[None]]) -> None:
        """Before a call goes to the server: what changed is passed on, and the server has a moment to look at it."""
        if self._stale:
            self._stale = False
            self._told = await asked(request) or self._told
            self._heard = anyio.Event()
            await notify(CHANGED, None)
            if self._wanted:
                with anyio.move_on_after(_HEAR_SECONDS):
                    await self._heard.wait()
        left = self._at + _SETTLE_SECONDS - anyio.current_time()
        if left > 0:
            await anyio.sleep(left)
