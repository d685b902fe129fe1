"""Ports of a session's box, forwarded to this host's loopback for its owner alone.

A box has a network of its own that cannot be entered from outside. For each forwarded port the supervisor listens on
the loopback, asks the kernel which user connects, and carries the bytes through a socket in the box's network that the
box's zygote made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable

from ringfence.core import own_ports
from ringfence.core.aio import shielded
from ringfence.core.box import Listening
from ringfence.core.errors import Unavailable
from ringfence.core.quoting import quoted
from ringfence.sandbox.files.paths import refusal
from ringfence.sandbox.sessions.concurrency import UseCounter

log = logging.getLogger(__name__)

MAX_PORTS = 16
_MAX_CONNECTIONS = 64
_TRIES = 5
_SILENCE_SECONDS = 60.0
"""For so long a client that has closed its side may wait for the next word from the box."""
_PIECE = 65536
_LOG_SECONDS = 60.0

Peer = Callable[[socket.socket], int | None]
"""The user at the far end of a connection within this host; None where there is any doubt."""
Connect = Callable[[int], Awaitable[socket.socket]]
"""A connection to a port in the box's network; a paused session is resumed for it."""


class PortForwards:
    """All forwarded ports of one session."""

    def __init__(
        self, session: str, listening: Listening, in_use: UseCounter, connect: Connect, peer: Peer | None
    ) -> None:
        """`in_use` is entered while a connection is open; without `peer` no port can be forwarded."""
        self._session = session
        self._listening = listening
        self._in_use = in_use
        self._connect = connect
        self._peer = peer
        self._open: dict[int, _Forward] = {}
        self._unreported = 0

    async def open(self, wanted: int | str) -> int:
        """Where this port of the box is on the host's loopback, from now until the session ends."""
        if self._peer is None:
            raise Unavailable("no_ports", "no port of a session can be shown here")
        port = self._port(wanted)
        found = self._open.get(port)
        if found is None:
            if len(self._open) >= MAX_PORTS:
                raise refusal("too_many_ports", f"session {self._session} shows {MAX_PORTS} ports already")
            found = self._open[port] = _Forward(
                port, self._session, self._in_use, self._connect, self._peer, self._count
            )
        try:
            return await found.opened()
        except Unavailable:
            if self._open.get(port) is found:
                del self._open[port]  # the next one may have more luck
            raise

    def _count(self) -> None:
        self._unreported += 1

    def refused(self) -> int:
        """How many connections of other users were refused since this was last asked."""
        refused, self._unreported = self._unreported, 0
        return refused

    def _port(self, wanted: int | str) -> int:
        listening = self._listening
        id_ = self._session
        if not listening.allowed:
            text = (
                f"session {id_} shows no ports: open one with `ringfence box create --listen`, or set `listen: allowed`"
            )
            raise refusal("listen_denied", f"{text} in the contract of open_session")
        named = dict(listening.ports or ())
        if listening.ports is None and isinstance(wanted, int):
            if not 0 < wanted < 65536:
                raise refusal("bad_port", f"{wanted} is not a port")
            return wanted
        found = named.get(wanted) if isinstance(wanted, str) else wanted if wanted in named.values() else None
        if found is None:
            known = ", ".join(f"{name} ({port})" for name, port in named.items()) or "none has a name"
            raise refusal("bad_port", f"{quoted(wanted)} is no port of session {id_} that can be shown: {known}")
        return found

    def close(self) -> None:
        for forward in self._open.values():
            forward.close()
        self._open.clear()


class _Forward:
    def __init__(
        self,
        port: int,
        session: str,
        in_use: UseCounter,
        connect: Connect,
        peer: Peer,
        count: Callable[[], None],
    ) -> None:
        self._port = port
        self._session = session
        self._in_use = in_use
        self._connect = connect
        self._peer = peer
        self._count = count
        self._opening = asyncio.ensure_future(self._listen())
        self._mark: socket.socket | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._unlogged = 0
        self._silent_until = 0.0

    async def opened(self) -> int:
        try:
            server = await shielded(self._opening)
        except OSError as error:
            raise Unavailable("no_ports", f"no free port on this host: {error}") from error
        return int(server.sockets[0].getsockname()[1])

    async def _listen(self) -> asyncio.Server:
        """On a port that other boxes are kept from. Raises OSError, Unavailable."""
        problem: Unavailable | None = None
        for _ in range(_TRIES):
            server = await asyncio.start_server(self._connected, "127.0.0.1", 0, start_serving=False)
            try:
                self._mark = own_ports.announce(*server.sockets[0].getsockname()[:2])
            except Unavailable as exc:
                server.close()
                problem = exc
                continue
            await server.start_serving()
            return server
        assert problem is not None
        raise problem

    def close(self) -> None:
        self._opening.add_done_callback(self._shut)
        for connection in list(self._connections):
            connection.cancel()

    def _shut(self, opening: asyncio.Future[asyncio.Server]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            opening.result().close()
        if self._mark is not None:
            self._mark.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        uid = self._peer(writer.get_extra_info("socket"))
        if uid != os.getuid():
            self._refused(uid)
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if len(self._connections) <= _MAX_CONNECTIONS:
                with self._in_use:
                    await self._carry(reader, writer)
        except (OSError, Unavailable, asyncio.CancelledError):
            pass  # nothing listens there, or the session ended: the client sees a closed connection
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    def _refused(self, uid: int | None) -> None:
        """Counted for the session's next record, and logged at most once a minute: other users must not be able to fill
        the log."""
        self._count()
        self._unlogged += 1
        now = time.monotonic()
        if now >= self._silent_until:
            whose = "of an unknown user" if uid is None else f"of user {uid}"
            text = "%d connections to port %d of session %s were refused since the last message; this one is %s"
            log.warning(text, self._unlogged, self._port, self._session, whose)
            self._unlogged = 0
            self._silent_until = now + _LOG_SECONDS

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        way = await self._connect(self._port)
        try:
            inside, into = await asyncio.open_connection(sock=way)
        except BaseException:
            way.close()
            raise
        answered = 0

        def count(size: int) -> None:
            nonlocal answered
            answered += size

        sending = asyncio.ensure_future(_copy(reader, into))
        answering = asyncio.ensure_future(_copy(inside, writer, count))
        try:
            done, _ = await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
            for copying in done:
                copying.result()
            if answering in done:
                await sending
            # A client that has said all may wait for an answer, or be gone; the kernel does not tell which.
            before = -1
            while not answering.done() and answered != before:
                before = answered
                await asyncio.wait({answering}, timeout=_SILENCE_SECONDS)
        finally:
            into.transport.abort()
            for copying in (sending, answering):
                copying.cancel()
            await asyncio.gather(sending, answering, return_exceptions=True)


async def _copy(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, tell: Callable[[int], object] = lambda size: None
) -> None:
    while data := await source.read(_PIECE):
        tell(len(data))
        target.write(data)
        await target.drain()
    with contextlib.suppress(OSError, RuntimeError):
        target.write_eof()
