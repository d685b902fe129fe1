"""What plays the outside: servers on loopback, names that lead to them, and clients that say exactly what they mean."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from ringfence.core.box import NetworkRule
from ringfence.egress import names
from ringfence.egress.ledger import EgressFact
from ringfence.egress.proxy import BoxProxy, Egress
from ringfence.egress.rules import Rules
from ringfence.egress.substitution import Substitute
from ringfence.egress.tls import Authority
from ringfence.egress.wire import ProxyLimits
from tests import tooling

NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Trusts nobody, which is quicker to make than the system's store."""
LOOPBACK = ("127.0.0.0/8",)
OPEN = NetworkRule("open", ("api.example", "other.example"), addresses=LOOPBACK)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def trusting(authority: Authority | None) -> ssl.SSLContext:
    assert authority is not None, "no rule has TLS end here"
    return ssl.create_default_context(cadata=authority.pem.decode())


@dataclass
class Server:
    """Keeps every request that came, and answers each with the same."""

    answer: bytes = OK
    closes: bool = False
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    port: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ssl.SSLError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.requests.append(head + await _body(reader, head))
                writer.write(self.answer)
                await writer.drain()
                if self.closes:
                    break
        writer.close()


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    lines = head.decode("latin-1").lower().split("\r\n")
    length = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length:")), 0)
    if "transfer-encoding: chunked" not in lines:
        return await reader.readexactly(length)
    body = b""
    while not body.endswith(b"0\r\n\r\n"):
        body += await reader.readuntil(b"\r\n")
    return body


@contextlib.asynccontextmanager
async def serving(handler: Handler, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    tasks: set[asyncio.Task[None]] = set()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await handler(reader, writer)
        except asyncio.CancelledError:
            pass
        finally:
            tasks.discard(task)
            with contextlib.suppress(AttributeError):  # in Python 3.11, where it is closed already
                writer.transport.abort()

    server = await asyncio.start_server(accepted, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def answering(server: Server, context: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    async with serving(server.handle, context) as server.port:
        yield server


class Names:
    """A resolver that knows what it was told, and counts what it is asked."""

    def __init__(self, **known: Sequence[str]) -> None:
        self.known = {name.replace("_", "."): list(answers) for name, answers in known.items()}
        self.asked: list[str] = []

    async def __call__(self, name: str) -> Sequence[str]:
        self.asked.append(name)
        if name not in self.known:
            raise OSError(f"{name} is not known")
        return self.known[name]


LOCAL = Names(api_example=["127.0.0.1"], other_example=["127.0.0.1"])


@dataclass
class Box:
    """A box's side of the proxy."""

    attached: BoxProxy
    port: int
    facts: list[EgressFact]
    clients: list[Client] = field(default_factory=list)

    async def open(self) -> Client:
        self.clients.append(Client(*await asyncio.open_connection("127.0.0.1", self.port)))
        return self.clients[-1]

    async def say(self, data: bytes) -> bytes:
        """All that comes back until the proxy closes, or is silent for a while."""
        client = await self.open()
        client.writer.write(data)
        return await client.rest(bodiless=data.startswith(b"HEAD "))


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def rest(self, *, bodiless: bool = False) -> bytes:
        got = b""
        with contextlib.suppress(TimeoutError, OSError):
            # Behind a whole answer nothing is to come, or it comes at once; for the rest of one we wait.
            while data := await asyncio.wait_for(
                self.reader.read(65536), 0.1 if _whole(got, bodiless) else tooling.PATIENCE
            ):
                got += data
        return got

    async def ask(self, data: bytes) -> bytes:
        """One request, one answer with a length."""
        self.writer.write(data)
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), tooling.PATIENCE)
        lengths = [
            int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
        ]
        return head + await self.reader.readexactly(lengths[0] if lengths else 0)

    async def connect(self, place: str) -> bytes:
        self.writer.write(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
        return await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), tooling.PATIENCE)

    async def tls(self, context: ssl.SSLContext, name: str | None) -> None:
        await asyncio.wait_for(self.writer.start_tls(context, server_hostname=name), tooling.PATIENCE)


def _whole(answer: bytes, bodiless: bool) -> bool:
    """As far as its head tells how long it is."""
    head, ended, body = answer.lower().partition(b"\r\n\r\n")
    if bodiless:
        return bool(ended)
    if b"transfer-encoding:" in head:
        return body.endswith(b"0\r\n\r\n")
    lengths = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(ended) and len(body) >= (lengths[0] if lengths else 0)


@contextlib.asynccontextmanager
async def box(
    rules: Sequence[NetworkRule] | Rules,
    resolve: Names | None = None,
    trust: ssl.SSLContext | None = None,
    limits: ProxyLimits | None = None,
    substitute: Substitute | None = None,
) -> AsyncIterator[Box]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    facts: list[EgressFact] = []
    egress = Egress(resolve or Names(), trust or NOBODY, limits)
    compiled = rules if isinstance(rules, Rules) else Rules(rules)
    attached = await egress.attach(listener, compiled, facts.append, substitute=substitute)
    inside = Box(attached, port, facts)
    try:
        yield inside
    finally:
        for client in inside.clients:
            client.writer.transport.abort()
        await attached.close()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def reason(answer: bytes) -> str:
    lines = answer.split(b"\r\n\r\n")[0].split(b"\r\n")
    return next(line.split(b": ")[1].decode() for line in lines if line.startswith(b"X-Ringfence-Reason"))


def host_context(authority: Authority, name: str) -> ssl.SSLContext:
    return authority.context(names.host(name))


def get(port: int, path: str = "/", host: str = "api.example", extra: str = "") -> bytes:
    """A request to a proxy."""
    return f"GET http://{host}:{port}{path} HTTP/1.1\r\nHost: {host}:{port}\r\n{extra}\r\n".encode()
