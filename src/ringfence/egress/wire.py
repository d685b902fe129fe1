"""The bytes of one connection: read with limits, kept when read too far, written with back-pressure."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl

from ringfence.core.record import dataclass
from ringfence.egress.ledger import LedgerEntry, Malformed

_PIECE = 64 * 1024
_STUCK_SECONDS = 300.0
"""As long as the other side may refuse to take what is sent."""
_GOODBYE_SECONDS = 1.0
_BARE_LF = re.compile(rb"(?<!\r)\n")
_METHOD_START = re.compile(rb"[A-Z]")


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """What one box may ask of the proxy, and for how long."""

    connections: int = 256
    head_bytes: int = 32 * 1024
    head_seconds: float = 15.0
    """From the first byte of a request, or of a TLS hello, to its last."""
    idle_seconds: float = 300.0
    """Without a byte in either direction."""
    resolve_seconds: float = 5.0
    dial_seconds: float = 10.0
    answer_seconds: float = 300.0
    """From the end of a request to the head of its answer."""


class Closed(Exception):
    """The other side is gone."""


class HttpWire:
    """A plain connection. All that is read comes through here, so what was read too far is never lost."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._buffer = bytearray()
        self._patience: float | None = None

    def wait_at_most(self, seconds: float | None) -> None:
        """Set the time without a byte after which the other side counts as gone."""
        self._patience = seconds

    async def head(self, most: int, *, request: bool = False) -> bytes:
        """Up to and with an empty line; b"" where the other side ended before the first byte. Raises Malformed."""
        buffer = self._buffer
        seen = 0
        while True:
            end = buffer.find(b"\r\n\r\n", max(0, seen - 3))
            if 0 <= end <= most - 4:
                taken = bytes(buffer[: end + 4])
                del buffer[: end + 4]
                return taken
            if len(buffer) >= most:
                raise Malformed("head_too_large", f"at most {most} bytes", 431)
            # Said at once, since the empty line that it stands for would never come.
            if _BARE_LF.search(buffer, seen):
                raise Malformed("bare_lf", "lines end with CR LF")
            if request and buffer and not _METHOD_START.match(buffer):
                raise Malformed("request_line", "not an HTTP/1.1 request line")
            seen = len(buffer)
            if not await self.more():
                if buffer:
                    raise Closed
                return b""

    async def line(self, most: int) -> bytes:
        """Up to CR LF, without it. Raises Malformed, Closed."""
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > most:
                raise Malformed("chunk_syntax", "a line is too long")
            if not await self.more():
                raise Closed
        if end > most or self._buffer[end - 1 : end] != b"\r":
            raise Malformed("chunk_syntax", "lines end with CR LF")
        taken = bytes(self._buffer[: end - 1])
        del self._buffer[: end + 1]
        return taken

    async def some(self, most: int = _PIECE) -> bytes:
        """What there is, at least a byte; b"" at the end."""
        if not self._buffer:
            data = await self._receive()
            if len(data) <= most:
                return data
            self._buffer += data
        taken = bytes(self._buffer[:most])
        del self._buffer[:most]
        return taken

    async def more(self) -> bool:
        """Waits for further bytes. False at the end."""
        data = await self._receive()
        self._buffer += data
        return bool(data)

    @property
    def pending(self) -> bytes:
        """What was received and not yet taken."""
        return bytes(self._buffer)

    @property
    def ended(self) -> bool:
        """The other side has closed, or spoke when it was not asked."""
        return bool(self._buffer) or self._reader.at_eof() or self._writer.is_closing()

    async def _receive(self) -> bytes:
        try:
            if self._patience is None:
                return await self._reader.read(_PIECE)
            async with asyncio.timeout(self._patience):
                return await self._reader.read(_PIECE)
        except (OSError, ssl.SSLError):
            return b""

    async def send(self, data: bytes) -> None:
        """Raises Closed."""
        try:
            self._writer.write(data)
            if self._writer.transport.get_write_buffer_size():
                async with asyncio.timeout(_STUCK_SECONDS):
                    await self._writer.drain()
        except (OSError, ssl.SSLError, RuntimeError) as error:
            raise Closed from error

    async def finish(self) -> None:
        """Close the sending side; the other side may go on."""
        with contextlib.suppress(OSError, RuntimeError):
            if self._writer.can_write_eof():
                self._writer.write_eof()

    def abort(self) -> None:
        """Close at once, so that the other side sees that the message is not complete."""
        with contextlib.suppress(AttributeError):  # of TLS in early releases of Python 3.11, where it has ended already
            self._writer.transport.abort()

    async def leave(self) -> None:
        """What was said still goes out, and TLS says goodbye; to a side that does not take it, not for long."""
        self._writer.close()
        try:
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await self._writer.wait_closed()
        except (OSError, ssl.SSLError):
            pass  # it is gone, or it was too slow
        finally:
            self.abort()

    async def close(self) -> None:
        self._writer.close()


class OutsideWire(HttpWire):
    """A connection to a host outside: what is written to it is known of the request that it carries."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, entry: LedgerEntry) -> None:
        super().__init__(reader, writer)
        self.entry = entry
        """Whose bytes these are; another's once it carries the next request."""

    async def send(self, data: bytes) -> None:
        if data:
            self.entry.sent = True
        await super().send(data)


class ServedTls(HttpWire):
    """A connection whose TLS ends here. It begins with bytes that were already read."""

    def __init__(self, inner: HttpWire, context: ssl.SSLContext) -> None:
        super().__init__(inner._reader, inner._writer)
        self._inner = inner
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)

    def wait_at_most(self, seconds: float | None) -> None:
        self._inner.wait_at_most(seconds)

    async def handshake(self) -> None:
        """Raises Closed where the client does not accept us or leaves."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                data = await self._inner.some()
                if not data:
                    raise Closed from None
                self._in.write(data)
            except ssl.SSLError as error:
                with contextlib.suppress(Closed):
                    await self._flush()
                raise Closed from error
            else:
                await self._flush()
                return

    @property
    def ended(self) -> bool:
        return bool(self._buffer) or self._inner.ended

    async def _receive(self) -> bytes:
        while True:
            try:
                return self._tls.read(_PIECE)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                return b""
            # Reading may have made an answer of TLS itself, such as a new key.
            if self._out.pending:
                await self._flush()
            data = await self._inner.some()
            if not data:
                return b""
            self._in.write(data)

    async def send(self, data: bytes) -> None:
        try:
            self._tls.write(data)
        except ssl.SSLError as error:
            raise Closed from error
        await self._flush()

    async def finish(self) -> None:
        with contextlib.suppress(ssl.SSLError, Closed):
            # Says that we are done, and does not wait for the client to say the same.
            with contextlib.suppress(ssl.SSLWantReadError):
                self._tls.unwrap()
            await self._flush()
        await self._inner.finish()

    async def _flush(self) -> None:
        if self._out.pending:
            await self._inner.send(self._out.read())
