"""The few requests of the Docker Engine API that boxes need, over a unix socket or a loopback port.

A client of our own: one request is one connection, and `attach` is the connection itself, which no HTTP library hands
out. What the engine sends is its word; only what a container writes is nobody's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from ringfence.core.errors import Unavailable
from ringfence.core.model import Json

OLDEST = (1, 40)
NEWEST = (1, 47)
"""Versions of the API that this is written for; the engine and we use the newest that both have."""
_ANSWER_SECONDS = 120.0
_LONGEST_LINE = 64 * 1024
_LONGEST_ANSWER = 64 * 1024 * 1024
_LONGEST_FRAME = 16 * 1024 * 1024
_SWITCHED = (101, 200)
"""What engines answer where the connection is no longer one of HTTP."""


class DockerGone(Exception):
    """Nobody answers at the socket, or what answers is no engine."""

    denied = False
    """This user may not use it."""

    @classmethod
    def of(cls, problem: Exception) -> DockerGone:
        if isinstance(problem, EOFError):
            return cls("the connection broke")
        if isinstance(problem, OSError):
            gone = cls(problem.strerror or str(problem) or "the connection broke")
            gone.denied = isinstance(problem, PermissionError)
            return gone
        return cls(f"it answers with {problem}")


class DockerRefused(Exception):
    """The engine says no."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class DockerApi:
    """One engine."""

    def __init__(self, address: str) -> None:
        """`address`: `unix://PATH` or `tcp://HOST:PORT`. Raises Unavailable."""
        self.address = address
        self._place = _place(address)
        self._version = ""

    def speak(self, version: str) -> None:
        """The newest version of the API that the engine knows. Raises Unavailable."""
        known = tuple(int(part) for part in version.split(".") if part.isdecimal())
        if known < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            text = (
                f"the engine at {self.address} knows version {version} of the Docker API; {oldest} or later is needed"
            )
            raise Unavailable("no_backend", text)
        self._version = "/v" + ".".join(map(str, min(known, NEWEST)))

    async def ask(
        self, method: str, path: str, body: Json | None = None, *, seconds: float = _ANSWER_SECONDS, **params: Any
    ) -> Any:
        """What the engine answers, read as JSON. In names of `params`, `_` stands for `-`. Raises DockerGone,
        DockerRefused."""
        data = b"" if body is None else json.dumps(body).encode()
        try:
            async with asyncio.timeout(seconds):
                reader, writer = await self._connect()
                try:
                    headers = {"Content-Type": "application/json", "Content-Length": str(len(data))}
                    writer.write(_head(method, self._version + path, params, headers) + data)
                    return _told(await _answer(reader))
                finally:
                    writer.close()
        except TimeoutError:
            raise DockerGone(f"the engine has not answered for {seconds:g} seconds") from None
        except (OSError, EOFError, ValueError) as problem:
            raise DockerGone.of(problem) from None

    async def put(self, path: str, pieces: AsyncIterator[bytes], **params: Any) -> None:
        """Send a file. Raises DockerGone, DockerRefused, and what `pieces` raises."""
        try:
            reader, writer = await self._connect()
            try:
                headers = {"Content-Type": "application/x-tar", "Transfer-Encoding": "chunked"}
                writer.write(_head("POST", self._version + path, params, headers))
                async for piece in pieces:
                    writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
                answer = await _answer(reader)
            finally:
                writer.close()
        except (OSError, EOFError, ValueError) as problem:
            raise DockerGone.of(problem) from None
        for line in answer.splitlines():  # an import that fails says so in the middle of its answer
            told = json.loads(line) if line.startswith(b"{") else {}
            if "error" in told:
                raise DockerRefused(500, str(told["error"]))

    async def events(self, **params: Any) -> AsyncIterator[Json]:
        """What happens, until the engine is gone. Raises DockerGone, DockerRefused."""
        try:
            reader, writer = await self._connect()
            try:
                writer.write(_head("GET", self._version + "/events", params, {}))
                status, headers = await _begun(reader)
                if status != 200:
                    raise DockerRefused(status, _words(await _body(reader, headers)))
                rest = b""
                async for piece in _pieces(reader, headers):
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in filter(None, lines):
                        yield json.loads(line)
            finally:
                writer.close()
        except (OSError, EOFError, ValueError) as problem:
            raise DockerGone.of(problem) from None
        raise DockerGone("the engine has ended")

    async def attach(self, container: str) -> tuple[StreamReader, StreamWriter]:
        """The standard input and output of a container. Raises DockerGone, DockerRefused."""
        params = {"stream": 1, "stdin": 1, "stdout": 1, "stderr": 1}
        path = f"{self._version}/containers/{container}/attach"
        try:
            reader, writer = await self._connect()
            try:
                writer.write(_head("POST", path, params, {"Upgrade": "tcp", "Content-Length": "0"}, "Upgrade"))
                status, headers = await _begun(reader)
                if status not in _SWITCHED:
                    raise DockerRefused(status, _words(await _body(reader, headers)))
            except BaseException:
                writer.close()
                raise
        except (OSError, EOFError, ValueError) as problem:
            raise DockerGone.of(problem) from None
        return reader, writer

    async def _connect(self) -> tuple[StreamReader, StreamWriter]:
        if isinstance(self._place, str):
            return await asyncio.open_unix_connection(self._place, limit=_LONGEST_LINE)
        return await asyncio.open_connection(*self._place, limit=_LONGEST_LINE)


class AttachedStream:
    """The stream of an attached container, as a socket: what the container writes to its standard output comes there,
    and what is written there goes to its standard input. What it writes to standard error is kept, as its last words.
    """

    def __init__(self, reader: StreamReader, writer: StreamWriter, last_words: int = 2000) -> None:
        self.ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._reader = reader
        self._writer = writer
        self._most = last_words
        self.words = bytearray()
        self._copying = asyncio.get_running_loop().create_task(self._copy())

    async def _copy(self) -> None:
        into = asyncio.get_running_loop().create_task(self._in())
        try:
            with contextlib.suppress(OSError, EOFError, ValueError):
                await self._out()
        finally:
            self._writer.close()
            with contextlib.suppress(OSError):
                self._theirs.shutdown(socket.SHUT_RDWR)
            into.cancel()
            await asyncio.gather(into, return_exceptions=True)
            self._theirs.close()

    async def _out(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            kind, size = _frame(await self._reader.readexactly(8))
            while size:
                data = await self._reader.read(min(size, _LONGEST_LINE))
                if not data:
                    return
                size -= len(data)
                if kind == 1:
                    await loop.sock_sendall(self._theirs, data)
                else:
                    self.words += data
                    del self.words[: -self._most]

    async def _in(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(self._theirs, _LONGEST_LINE):
                self._writer.write(data)
                await self._writer.drain()
        self._writer.close()

    async def over(self) -> None:
        """Returns when the container's end of it is closed, or ours."""
        await asyncio.wait([self._copying])

    async def close(self) -> None:
        self._copying.cancel()
        await asyncio.wait([self._copying])


# ── HTTP ──────────────────────────────────────────────────────────────────────────────────────────


def _place(address: str) -> str | tuple[str, int]:
    """Raises Unavailable."""
    parts = urlsplit(address)
    if parts.scheme == "unix" and parts.path and hasattr(asyncio, "open_unix_connection"):
        return parts.netloc + parts.path
    if parts.scheme in ("tcp", "http") and parts.hostname and parts.port:
        if parts.hostname == "localhost" or _is_loopback(parts.hostname):
            return parts.hostname, parts.port
        why = "whoever listens there or in between could read boxes and change them"
    else:
        why = "only unix://PATH and tcp://127.0.0.1:PORT can be used"
    remedy = "forward its socket: ssh -L /path/of/docker.sock:/var/run/docker.sock HOST"
    raise Unavailable("no_backend", f"backend docker cannot use the engine at {address}: {why}; {remedy}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _head(
    method: str, path: str, params: Mapping[str, Any], headers: Mapping[str, str], connection: str = "close"
) -> bytes:
    named = {
        name.replace("_", "-"): json.dumps(value) if isinstance(value, dict) else str(value)
        for name, value in params.items()
    }
    query = f"?{urlencode(named)}" if named else ""
    lines = [f"{method} {quote(path)}{query} HTTP/1.1", "Host: docker", f"Connection: {connection}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


async def _begun(reader: StreamReader) -> tuple[int, dict[str, str]]:
    """Raises OSError, EOFError, ValueError."""
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise ValueError("a head that is too long") from None
        first, *lines = head.decode("latin-1").split("\r\n")
        protocol, _, rest = first.partition(" ")
        if not protocol.startswith("HTTP/1."):
            raise ValueError("no answer of HTTP")
        status = int(rest.partition(" ")[0])
        if status != 100:
            pairs = (line.partition(":") for line in lines if line)
            return status, {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _pieces(reader: StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    elif "content-length" in headers:
        yield await reader.readexactly(min(int(headers["content-length"]), _LONGEST_ANSWER))
    else:
        while data := await reader.read(_LONGEST_LINE):
            yield data


async def _body(reader: StreamReader, headers: Mapping[str, str]) -> bytes:
    data = b""
    async for piece in _pieces(reader, headers):
        data += piece
        if len(data) > _LONGEST_ANSWER:
            raise ValueError("an answer that is too long")
    return data


async def _answer(reader: StreamReader) -> bytes:
    status, headers = await _begun(reader)
    data = b"" if status in (204, 304) else await _body(reader, headers)
    if status >= 400:
        raise DockerRefused(status, _words(data))
    return data


def _told(data: bytes) -> Any:
    return json.loads(data) if data.strip() else None


def _words(data: bytes) -> str:
    try:
        told = json.loads(data)
    except ValueError:
        told = None
    words = told.get("message") if isinstance(told, dict) else data.decode("utf-8", "replace")
    return str(words).strip()


def _frame(head: bytes) -> tuple[int, int]:
    """Raises ValueError."""
    size = int.from_bytes(head[4:], "big")
    if head[0] not in (1, 2) or size > _LONGEST_FRAME:
        raise ValueError("no frame of a stream")
    return head[0], size
