"""The listening socket: uvicorn, with the kernel's word on who connected."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import os
import socket
import ssl
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httptools
import uvicorn
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ringfence.core import system
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json, Principal
from ringfence.core.record import dataclass
from ringfence.front.answers import ANSWERS
from ringfence.front.http import HttpFront, Identify, MetricsPage
from ringfence.front.identify import METADATA, PEER, RESOURCE, metadata
from ringfence.front.refusals import Refusal, Refusals
from ringfence.identity import peer_uid

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
AT_A_SOCKET = frozenset({"localhost"})
"""What clients of a unix socket call us."""
_BACKLOG = 2048
_LOCK_SECONDS = 5.0
_TELLS = system.tells_peers()


@dataclass(frozen=True, slots=True)
class _Terms:
    """What a client may send before it has made a request."""

    head_bytes: int
    """Of a request: its line and its headers."""
    head_seconds: float
    """For these to come."""
    once: bool = False
    """They are heard once, and not for long."""


OWN_TERMS = _Terms(head_bytes=64 * 1024, head_seconds=30.0)
STRANGE_TERMS = _Terms(head_bytes=8 * 1024, head_seconds=10.0, once=True)
_CONTENT_PAYS = 5
"""A byte of a body stands for itself and four around it: chunks are small where a client writes little at a time."""
MAX_OWN = 2000
MAX_STRANGERS = 128
MAX_OF_A_STRANGER = 32
"""Connections at a time."""
MAX_HOLDERS = 2000
MAX_OF_A_HOLDER = 200
"""The same of those who may show a token."""


class Admission:
    """Connections, counted by user before a byte of them is read: what others take is never taken from our own user.

    Without an owner no client is a stranger: so it is where the kernel does not tell whose a connection is.
    """

    def __init__(
        self, refusals: Refusals, owner: int | None, *, tokens: bool = False, only: Sequence[str] = ()
    ) -> None:
        """`tokens`: others than our own user may show one, so they are heard as our own user is; they are still counted
        apart, each account or address by itself. `only`: addresses and ranges of a proxy; nobody else is let in."""
        self._only = [ipaddress.ip_network(each) for each in only]
        self.refusals = refusals
        self._owner = owner
        self._tokens = tokens
        self._here: Counter[int | str | None] = Counter()
        self._strangers = 0

    def is_heard(self, uid: int | None) -> bool:
        """Whether a whole request of this user is read."""
        return self._tokens or self.is_own(uid)

    def is_own(self, uid: int | None) -> bool:
        if self._tokens:
            return uid is not None and uid == self._owner
        return self._owner is None or uid == self._owner

    def enter(self, uid: int | None, address: str = "") -> bool:
        who = _who(uid, address)
        if self._only and not _is_in(address, self._only):
            self.refused(uid, "not_the_proxy")
            return False
        if self.is_own(uid):
            admitted = self._here[who] < MAX_OWN
        else:
            each = MAX_HOLDERS if self._only else MAX_OF_A_HOLDER if self._tokens else MAX_OF_A_STRANGER
            admitted = self._here[who] < each and self._strangers < (MAX_HOLDERS if self._tokens else MAX_STRANGERS)
            self._strangers += admitted
        self._here[who] += admitted
        if not admitted:
            self.refused(uid, "too_many_connections")
        return admitted

    def leave(self, uid: int | None, address: str = "") -> None:
        who = _who(uid, address)
        self._strangers -= not self.is_own(uid)
        self._here[who] -= 1
        if not self._here[who]:
            del self._here[who]

    def refused(self, uid: int | None, reason: str) -> None:
        self.refusals.count(Refusal("mcp-http", reason, uid))


def _is_in(address: str, networks: Sequence[_Network]) -> bool:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return any((mapped or found) in network for network in networks)


def _who(uid: int | None, address: str) -> int | str | None:
    """What connections are counted by: an account of this machine, else where they come from."""
    return uid if uid is not None or not address else address


class PeerProtocol(HttpToolsProtocol):
    """One connection: the kernel says whose it is, and until its request is there it is bounded in time and size."""

    def __init__(self, admission: Admission, **given: Any) -> None:
        super().__init__(**given)
        self._admission = admission
        self._terms = OWN_TERMS
        self._uid: int | None = None
        self._address = ""
        self._admitted = False
        self._in_head = True
        self._begun = False
        """A request whose headers are still to come."""
        self._head_bytes = 0
        """Since the last request was complete."""
        self._wrapping = 0
        """Bytes of a body that are none of what it holds: sizes of its chunks, fields after its end."""
        self._clock: asyncio.TimerHandle | None = None
        """While nothing is being served."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._uid = peer_uid(transport.get_extra_info("socket")) if _TELLS else None
        far = transport.get_extra_info("peername")
        self._address = str(far[0]) if isinstance(far, tuple) else ""
        self._admitted = self._admission.enter(self._uid, self._address)
        own = self._admission.is_heard(self._uid)
        if not self._admitted:
            self.transport = transport
            if own:
                transport.write(_answer(503, "too many connections are open"))
                transport.close()
            else:
                transport.abort()
            return
        self._terms = OWN_TERMS if own else STRANGE_TERMS
        super().connection_made(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._admitted:
            return
        self._stop_clock()
        self._admission.leave(self._uid, self._address)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data and not self.transport.is_closing():
            piece, data = data, b""
            if self._in_head:
                room = self._terms.head_bytes - self._head_bytes
                if room <= 0:
                    self._refuse(431, "head_too_large", f"a request begins with {self._terms.head_bytes} bytes at most")
                    return
                piece, data = piece[:room], piece[room:]
                self._head_bytes += len(piece)
            elif self._terms.once:
                return
            else:
                self._wrapping += len(piece)
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserError:
                self._refuse(400, "bad_http", "this is not HTTP/1.1")
                return
            except httptools.HttpParserUpgrade:
                break  # nothing else is spoken here: the request is served as it is
            if self._wrapping > self._terms.head_bytes:
                self._refuse(431, "head_too_large", f"{self._terms.head_bytes} bytes around a body are the most")
                return
        self._start_clock()

    def on_message_begin(self) -> None:
        self._begun = True
        super().on_message_begin()
        self.scope[PEER] = self._uid  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        self._in_head = self._begun = False
        super().on_headers_complete()
        self.headers = []  # fields that follow the body are no headers of the request
        if self._terms.once:
            self.cycle.keep_alive = False
        else:
            self._stop_clock()

    def on_body(self, body: bytes) -> None:
        self._wrapping -= _CONTENT_PAYS * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._head_bytes = self._wrapping = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()  # requests wait already: no more of them are taken in
        if self._begun and not self.transport.is_closing():
            self._start_clock()

    @property
    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_clock(self) -> None:
        if self._clock is None and not self._is_serving:
            self._clock = self.loop.call_later(self._terms.head_seconds, self._too_slow)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _too_slow(self) -> None:
        self._clock = None
        if self._terms.once:
            self._admission.refused(self._uid, "too_slow")
            self.transport.abort()
        elif self._begun:
            self._refuse(408, "too_slow", f"a request must begin within {self._terms.head_seconds:g} s")
        else:
            self.transport.close()  # nothing was asked

    def _refuse(self, status: int, reason: str, text: str) -> None:
        self._admission.refused(self._uid, reason)
        if not self._is_serving:
            self.transport.write(_answer(status, text))
        self.transport.close()


def _answer(status: int, text: str) -> bytes:
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
    return f"{head}content-length: {len(text)}\r\nconnection: close\r\n\r\n{text}".encode("ascii")


def same_user(agent: Callable[[], Principal], token: str | None = None) -> Identify:
    """Identifies callers: a process of our own user is the local agent; all others are unknown.

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
        return agent() if scope.get(PEER) == mine else None

    return identify


def open_socket(host: str, port: int) -> socket.socket:
    """Listen before anything is announced: a taken port is a clear error, port 0 gets its number, and a client that
    comes at once waits in the queue instead of being refused."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named TCP, or the event loop does not switch Nagle off and every answer waits for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
        listener.listen(_BACKLOG)
    except OSError as exc:
        listener.close()
        why = exc.strerror or str(exc)
        if exc.errno == errno.EADDRINUSE:
            why += "; another gateway may be running: end it, or take another port with --port N (0: a free one)"
        raise Unavailable("listen", f"cannot listen on {host}:{port}: {why}") from None
    listener.set_inheritable(False)
    return listener


@contextlib.contextmanager
def unix_socket(path: Path) -> Iterator[socket.socket]:
    """Listen at a path where no other user can put anything, for our own user alone. Raises Unavailable.

    What a gateway left that did not end well is cleared away; whatever else is there stays.
    """
    if not _TELLS:
        raise Unavailable("listen", "a unix socket to listen on needs Linux, where the kernel says who connects to it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            with _locked(path):
                _clear(path)
                os.fchmod(listener.fileno(), 0o600)  # what it is bound to has this from its first moment
                listener.bind(str(path))
                made = path.lstat()
                listener.listen(_BACKLOG)
        except OSError as exc:
            raise Unavailable("listen", f"cannot listen on unix:{path}: {exc.strerror or exc}") from None
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(made, path.lstat()):
                    path.unlink()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """For a socket in a folder in which only our user and root can put and remove things, made where there is none. Who
    else starts to listen there at this moment waits, and then finds us listening."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        info = os.fstat(folder)
        if info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022 or system.open_place(path.parent):
            text = f"others can write to {path.parent}, and could put a socket of theirs in the place of ours"
            raise Unavailable("listen", f"{text}: name a socket in a folder of your own")
        # A file of our own: the folder itself can be locked by every user who may look into it.
        name = f"{path.name}.lock"
        lock = _own_lock(folder, name, path)
        try:
            yield
        finally:
            os.unlink(name, dir_fd=folder)
            os.close(lock)
    finally:
        os.close(folder)


def _own_lock(folder: int, name: str, path: Path) -> int:
    until = time.monotonic() + _LOCK_SECONDS
    while True:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        with contextlib.suppress(FileNotFoundError):  # who had it before us has removed it meanwhile
            if system.lock(lock) and os.path.samestat(os.fstat(lock), os.stat(name, dir_fd=folder)):
                return lock
        os.close(lock)
        if time.monotonic() > until:
            raise Unavailable("listen", f"another process has locked {path}: end it, or name another socket")
        time.sleep(0.02)


def _clear(path: Path) -> None:
    try:
        info = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(info.st_mode) or info.st_uid != os.geteuid():
        raise Unavailable("listen", f"{path} exists already, and is not a socket of yours: remove it, or name another")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        if probe.connect_ex(str(path)) != errno.ECONNREFUSED:
            raise Unavailable("listen", f"something listens on unix:{path} already: end it, or name another socket")
    path.unlink()


def tls_context(cert: Path, key: Path) -> ssl.SSLContext:
    """What proves to clients who we are. Raises Unavailable."""
    try:
        info = key.stat()
        if system.open_to_others(info, 0o027):
            raise Unavailable("listen", f"others can read gateway.tls.key, or write to it; run: chmod 600 {key}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(cert, key)
    except ssl.SSLError as exc:
        why = exc.reason or "they are no certificate and its key"
        raise Unavailable("listen", f"gateway.tls: {cert} and {key} cannot be used: {why}") from None
    except OSError as exc:
        raise Unavailable("listen", f"gateway.tls: {exc.filename or key} cannot be read: {exc.strerror}") from None
    return context


class GatewayApp:
    """The paths that we serve. A plain ASGI application: `/mcp` is the hot one, and there are few others."""

    def __init__(
        self,
        mcp: HttpFront,
        published: Callable[[], Json | None] = lambda: None,
        metrics: MetricsPage | None = None,
        console: ASGIApp | None = None,
        answers: ASGIApp | None = None,
    ) -> None:
        """`published` is what RFC 9728 has clients know of us; None where they need no token. `console`: for people;
        `answers`: for what they signed elsewhere."""
        self._mcp = mcp
        self._metrics = metrics
        self._published = published
        self._console = console
        self._answers = answers
        self.refusals = mcp.refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == "/mcp":
            await self._mcp(scope, receive, send)
        elif path == "/metrics" and self._metrics is not None:
            await self._mcp.metrics(self._metrics, scope, receive, send)
        elif await self._mcp.refuses(scope, receive, send):
            return
        elif path in (METADATA, f"{METADATA}{RESOURCE}") and (published := self._published()) is not None:
            shown = metadata(self._mcp.base(scope), published)
            await JSONResponse(shown, headers={"cache-control": "no-store"})(scope, receive, send)
        elif path == "/healthz":
            await JSONResponse({"status": "ok"})(scope, receive, send)
        elif self._answers is not None and path == ANSWERS:
            await self._answers(scope, receive, send)
        elif self._console is not None and (path == "/console" or path.startswith("/console/")):
            await self._console(scope, receive, send)
        else:
            self.refusals.count(Refusal("mcp-http", "unknown_path", scope.get(PEER)))
            await PlainTextResponse("not found", 404)(scope, receive, send)


class Listener(uvicorn.Server):
    """uvicorn without its own signal handling: the caller decides when to stop."""

    def __init__(
        self, app: GatewayApp, *, tokens: bool = False, only: Sequence[str] = (), tls: ssl.SSLContext | None = None
    ) -> None:
        """`tokens`: who connects may show one, and is no stranger before that was looked at; `only`: see Admission."""
        self._stopping = asyncio.Event()
        admission = Admission(app.refusals, os.getuid() if _TELLS else None, tokens=tokens, only=only)
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(PeerProtocol, admission),  # type: ignore[arg-type]
                ws="none",
                log_level="warning",
                access_log=False,
                lifespan="off",
                proxy_headers=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=3,
                server_header=False,
                ssl_context_factory=None if tls is None else lambda _config, _usual: tls,
                date_header=False,
            )
        )

    def capture_signals(self) -> AbstractAsyncContextManager[None]:  # type: ignore[override]
        return _no_capture()  # type: ignore[return-value]

    async def main_loop(self) -> None:
        """Wait until it has to stop or is cancelled; uvicorn would poll ten times a second."""
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
