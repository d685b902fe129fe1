"""Ports of a session's box, shown to its owner on this host's loopback, and to nobody else.

What listens in a box is in a network of its own, and nobody gets in. A door is a listener of ours outside; of whoever
comes there the kernel is asked who it is, and what is said goes through a socket in the box's network that its zygote
made for us.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable

from ringfence.errors import Unavailable
from ringfence.sandbox.beneath import refusal
from ringfence.sandbox.life import Life, Peer
from ringfence.sandbox.waiting import shielded

log = logging.getLogger(__name__)

MOST_DOORS = 16
_MOST_VISITORS = 64
_CONNECT_SECONDS = 5.0
_PIECE = 65536
_TOLD_SECONDS = 60.0


class Doors:
    """Of one session."""

    def __init__(self, life: Life, peer: Peer | None) -> None:
        self._life = life
        self._peer = peer
        self._open: dict[int, _Door] = {}
        self._untold = 0
        life.on_end.append(self.close)

    async def show(self, wanted: int | str) -> int:
        """Where this port of the box is on the host's loopback, from now until the session ends."""
        if self._peer is None:
            raise Unavailable("no_ports", "no port of a session can be shown here")
        self._life.check_there()
        port = self._port(wanted)
        found = self._open.get(port)
        if found is None:
            if len(self._open) >= MOST_DOORS:
                raise refusal("too_many_ports", f"session {self._life.id} shows {MOST_DOORS} ports already")
            found = self._open[port] = _Door(port, self._life, self._peer, self._count)
        return await found.opened()

    def _count(self) -> None:
        self._untold += 1

    def refused(self) -> int:
        """How many connections of strangers there were since this was asked last."""
        refused, self._untold = self._untold, 0
        return refused

    def _port(self, wanted: int | str) -> int:
        listening, id_ = self._life.spec.stay.listening, self._life.id
        if not listening.allowed:
            text = f"nothing may listen in session {id_}, so no port of it can be shown: open one whose contract, or"
            raise refusal("listen_denied", f"{text} whose maker, says listen: allowed, or names ports under listen")
        named = dict(listening.ports or ())
        if listening.ports is None and isinstance(wanted, int):
            if not 0 < wanted < 65536:
                raise refusal("bad_port", f"{wanted} is not a port")
            return wanted
        found = named.get(wanted) if isinstance(wanted, str) else wanted if wanted in named.values() else None
        if found is None:
            known = ", ".join(f"{name} ({port})" for name, port in named.items()) or "none has a name"
            raise refusal("bad_port", f"{str(wanted)[:80]!r} is no port of session {id_} that can be shown: {known}")
        return found

    def close(self) -> None:
        for door in self._open.values():
            door.close()
        self._open.clear()


class _Door:
    def __init__(self, port: int, life: Life, peer: Peer, count: Callable[[], None]) -> None:
        self._port = port
        self._count = count
        self._life = life
        self._peer = peer
        self._opening = asyncio.ensure_future(asyncio.start_server(self._come, "127.0.0.1", 0))
        self._visitors: set[asyncio.Task[None]] = set()
        self._strangers = 0
        self._told_until = 0.0

    async def opened(self) -> int:
        try:
            server = await shielded(self._opening)
        except OSError as error:
            raise Unavailable("no_ports", f"no port of this host is to be had: {error}") from error
        return int(server.sockets[0].getsockname()[1])

    def close(self) -> None:
        self._opening.add_done_callback(_shut)
        for visitor in list(self._visitors):
            visitor.cancel()

    async def _come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        uid = self._peer(writer.get_extra_info("socket"))
        if uid != os.getuid():
            self._refused(uid)
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._visitors.add(task)
        try:
            if len(self._visitors) <= _MOST_VISITORS:
                with self._life.in_use:
                    await self._through(reader, writer)
        except (OSError, Unavailable, asyncio.CancelledError):
            pass  # nobody listens there, or the session ended: the visitor sees that it is over
        finally:
            self._visitors.discard(task)
            writer.transport.abort()

    def _refused(self, uid: int | None) -> None:
        """Counted for the session's next record; told in the keeper's log, and of many at once: what strangers do must
        not fill it."""
        self._count()
        self._strangers += 1
        now = time.monotonic()
        if now >= self._told_until:
            whose = "of nobody who can be told" if uid is None else f"of user {uid}"
            text = "%d connections to port %d of session %s were refused since the last word of it; this one is %s"
            log.warning(text, self._strangers, self._port, self._life.id, whose)
            self._strangers, self._told_until = 0, now + _TOLD_SECONDS

    async def _through(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._life.awake()
        way = await self._life.box.reach()
        try:
            way.setblocking(False)
            async with asyncio.timeout(_CONNECT_SECONDS):
                await asyncio.get_running_loop().sock_connect(way, ("127.0.0.1", self._port))
            inside, into = await asyncio.open_connection(sock=way)
        except BaseException:
            way.close()
            raise
        try:
            await asyncio.gather(_carry(reader, into), _carry(inside, writer))
        finally:
            into.transport.abort()


def _shut(opening: asyncio.Future[asyncio.Server]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


async def _carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(_PIECE):
        target.write(data)
        await target.drain()
    with contextlib.suppress(OSError, RuntimeError):
        target.write_eof()
