"""The listening socket: uvicorn, with the kernel's word on who connected."""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import ClassVar

import uvicorn
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ringfence import system
from ringfence.errors import Unavailable
from ringfence.front.http import HttpFront, Identify
from ringfence.identity import peer_uid
from ringfence.model import Principal

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
_BACKLOG = 2048
_TELLS = system.tells_peers()


class PeerProtocol(HttpToolsProtocol):
    """Remembers, for as long as a connection lives, which user made it; where the kernel does not tell, nobody."""

    uids: ClassVar[dict[tuple[str, int], int | None]] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if _TELLS and self.client is not None and self.server is not None and self.server[1] is not None:
            self.uids[self.client] = peer_uid(self.client, (self.server[0], self.server[1]))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.client is not None:
            self.uids.pop(self.client, None)
        super().connection_lost(exc)


def same_user(agent: Callable[[], Principal], token: str | None = None) -> Identify:
    """An identifier of callers: whoever is of our own user is the local agent; nobody else is anybody.

    With a token a caller shows it; without one the kernel says whose the connection is.
    """
    return _by_uid(agent) if token is None else _by_token(agent, f"Bearer {token}".encode())


def _by_token(agent: Callable[[], Principal], expected: bytes) -> Identify:
    def identify(scope: Scope) -> Principal | None:
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        return agent() if len(shown) == 1 and hmac.compare_digest(shown[0], expected) else None

    return identify


def _by_uid(agent: Callable[[], Principal]) -> Identify:
    mine = os.getuid()

    def identify(scope: Scope) -> Principal | None:
        client = scope.get("client")
        return agent() if client is not None and PeerProtocol.uids.get(tuple(client)) == mine else None

    return identify


def open_socket(host: str, port: int) -> socket.socket:
    """Listen before anything is announced: a taken port is a clear error, port 0 gets its number, and whoever comes
    at once waits in the queue instead of being refused."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named TCP, or the event loop does not switch Nagle off and every answer waits for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
        listener.listen(_BACKLOG)
    except OSError as exc:
        listener.close()
        raise Unavailable("listen", f"cannot listen on {host}:{port}: {exc.strerror}") from None
    listener.set_inheritable(False)
    return listener


class Site:
    """The paths that we serve. A plain ASGI application: `/mcp` is the hot one, and there are three others."""

    def __init__(self, mcp: HttpFront) -> None:
        self._mcp = mcp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == "/mcp":
            await self._mcp(scope, receive, send)
        elif path == "/healthz":
            await JSONResponse({"status": "ok"})(scope, receive, send)
        elif path == "/console" or path.startswith("/console/"):
            await PlainTextResponse(_NO_CONSOLE, 501)(scope, receive, send)
        else:
            await PlainTextResponse("not found", 404)(scope, receive, send)


_NO_CONSOLE = """The console is not part of this version. Answer approvals in a terminal:

    ringfence approvals list
    ringfence approvals approve ID
"""


class Listener(uvicorn.Server):
    """uvicorn without its own signal handling: the caller decides when to stop."""

    def __init__(self, app: Site) -> None:
        self._stopping = asyncio.Event()
        super().__init__(
            uvicorn.Config(
                app,
                http=PeerProtocol,
                log_level="warning",
                access_log=False,
                lifespan="off",
                proxy_headers=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=3,
                server_header=False,
                date_header=False,
                limit_concurrency=2000,
                h11_max_incomplete_event_size=64 * 1024,
            )
        )

    def capture_signals(self) -> AbstractAsyncContextManager[None]:  # type: ignore[override]
        return _no_capture()  # type: ignore[return-value]

    async def main_loop(self) -> None:
        """Until somebody says so, or cancels it; uvicorn would look ten times a second whether anybody did."""
        self.server_state.default_headers = list(self.config.encoded_headers)
        await self._stopping.wait()

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    async def run_on(self, sockets: Iterable[socket.socket]) -> None:
        await self.serve(sockets=list(sockets))


class _no_capture:
    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...
