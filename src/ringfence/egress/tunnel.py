"""A tunnel through the proxy: bytes in both directions, unread but for the TLS ClientHello.

The hello must be for the host of the tunnel. Its parser is bounded, strict and without I/O. `HelloGuard` lets nothing
through before it has seen the hello, and looks again at the second hello that a server may ask for.
"""

from __future__ import annotations

import asyncio
import contextlib

from ringfence.core.record import dataclass
from ringfence.egress import names
from ringfence.egress.gate import Gate
from ringfence.egress.ledger import Forbidden, LedgerEntry, RuleMeter, Stopped
from ringfence.egress.names import Host
from ringfence.egress.wire import Closed, HttpWire, OutsideWire, ProxyLimits

_MAX_HELLO = 32 * 1024
_MAX_RECORD = 16 * 1024
_MAX_RECORDS = 64
_MAX_LENGTH = 131396
"""The longest hello that OpenSSL reads."""
_CHANGE_CIPHER = 20
_ALERT = 21
_HANDSHAKE = 22
_APPLICATION_DATA = 23
_CLIENT_HELLO = 1
_SERVER_NAME = 0
_EARLY_DATA = 42
_ENCRYPTED_HELLO = 0xFE0D

ACCESS_DENIED = bytes((21, 3, 3, 0, 2, 2, 49))
"""The alert that tells a TLS client that it was refused."""


class BadHello(Exception):
    """A hello that may not pass. The text is the reason's code."""


@dataclass(frozen=True, slots=True)
class ClientHello:
    name: str | None
    encrypted: bool
    """It carries a second hello inside, or pretends to, for a name that cannot be seen."""
    early_data: bool
    size: int
    """Bytes that it takes on the wire, record headers included."""


def parse_hello(data: bytes | bytearray) -> ClientHello | None:
    """The hello at the beginning of `data`; None while it is not all there. Raises BadHello."""
    message = bytearray()
    at = 0
    for _ in range(_MAX_RECORDS):
        if bytes(data[at : at + 2]) not in (b"", b"\x16", b"\x16\x03"):
            raise BadHello("not_tls")
        if len(data) < at + 5:
            return None
        length = int.from_bytes(data[at + 3 : at + 5])
        if not 0 < length <= _MAX_RECORD:
            raise BadHello("bad_hello")
        message += data[at + 5 : at + 5 + length]
        if message and message[0] != _CLIENT_HELLO:
            raise BadHello("not_tls")
        wanted = 4 + int.from_bytes(message[1:4]) if len(message) >= 4 else _MAX_HELLO
        if wanted > _MAX_HELLO or len(message) > wanted:
            raise BadHello("bad_hello")
        at += 5 + length
        if len(message) == wanted and len(data) >= at:
            return _hello(bytes(message[4:]), at)
        if len(data) < at:
            return None
    raise BadHello("bad_hello")


class _Cursor:
    """Reads what TLS calls vectors; running out of bytes is a bad hello."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        piece = self._data[self._at : self._at + size]
        if len(piece) != size:
            raise BadHello("bad_hello")
        self._at += size
        return piece

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def vector(self, size: int, least: int, most: int) -> bytes:
        length = self.number(size)
        if not least <= length <= most:
            raise BadHello("bad_hello")
        return self.take(length)

    @property
    def over(self) -> bool:
        return self._at == len(self._data)


def _hello(body: bytes, size: int) -> ClientHello:
    cursor = _Cursor(body)
    if cursor.number(1) != 3:
        raise BadHello("bad_hello")
    cursor.take(1 + 32)
    cursor.vector(1, 0, 32)
    cursor.vector(2, 2, 0xFFFE)
    cursor.vector(1, 1, 255)
    if cursor.over:
        return ClientHello(None, False, False, size)
    inner = _Cursor(cursor.vector(2, 0, 0xFFFF))
    if not cursor.over:
        raise BadHello("bad_hello")
    extensions: dict[int, bytes] = {}
    while not inner.over:
        kind = inner.number(2)
        content = inner.vector(2, 0, 0xFFFF)
        # Two of one kind, and two readers may believe different ones.
        if extensions.setdefault(kind, content) is not content:
            raise BadHello("bad_hello")
    name = _server_name(extensions[_SERVER_NAME]) if _SERVER_NAME in extensions else None
    return ClientHello(name, _ENCRYPTED_HELLO in extensions, _EARLY_DATA in extensions, size)


def _server_name(content: bytes) -> str:
    outer = _Cursor(content)
    entries = _Cursor(outer.vector(2, 4, 0xFFFF))
    if not outer.over or entries.number(1) != 0:
        raise BadHello("bad_sni")
    name = entries.vector(2, 1, 255)
    if not entries.over or not name.isascii():
        raise BadHello("bad_sni")
    return name.decode("ascii")


def check_hello(hello: ClientHello, expected: Host) -> None:
    """Raises BadHello unless the hello is for this host. An address is dialled as such and needs no name."""
    if hello.name is None:
        if expected.address is None:
            raise BadHello("sni_missing")
        return
    try:
        name = names.host(hello.name)
    except names.BadName as error:
        raise BadHello("bad_sni") from error
    if name != expected:
        raise BadHello("sni_mismatch")


class HelloGuard:
    """Lets the bytes of a client through once they are known to be for the host of the tunnel.

    After the first hello a server may ask for another one; a client that answers with another name would be let in
    under it by some servers. So the guard stays until a record comes that no hello can follow: other messages of the
    handshake, or data. What servers pass over (changes of cipher, warnings) passes and opens nothing; what no client
    sends here ends the tunnel, since some server might pass over that as well.
    """

    def __init__(self, expected: Host) -> None:
        self._expected = expected
        self._held = bytearray()
        self._hellos = 0
        self._early_data = False
        self._passing = 0
        """Bytes left of a record that is let through as it is."""
        self._wants_hello = True
        self.open = False

    def feed(self, data: bytes) -> bytes:
        """What may go on by now. Raises BadHello."""
        if self.open:
            return data
        self._held += data
        ready = bytearray()
        while self._held and not self.open:
            if self._passing:
                piece = self._held[: self._passing]
                del self._held[: len(piece)]
                self._passing -= len(piece)
                ready += piece
            elif not (self._hello(ready) if self._wants_hello else self._record()):
                break
        if self.open:
            ready += self._held
            self._held.clear()
        return bytes(ready)

    def _hello(self, ready: bytearray) -> bool:
        hello = parse_hello(self._held)
        if hello is None:
            return False
        if hello.encrypted:
            raise BadHello("encrypted_hello")
        check_hello(hello, self._expected)
        self._hellos += 1
        if self._hellos > 2:
            raise BadHello("bad_hello")
        self._early_data = self._early_data or hello.early_data
        ready += self._held[: hello.size]
        del self._held[: hello.size]
        self._wants_hello = False
        return True

    def _record(self) -> bool:
        """Looks at the next record's header. False while too little of it is there."""
        kind = self._held[0]
        if kind not in (_CHANGE_CIPHER, _ALERT, _HANDSHAKE, _APPLICATION_DATA):
            raise BadHello("bad_hello")
        if len(self._held) < 5:
            return False
        length = int.from_bytes(self._held[3:5])
        if kind == _HANDSHAKE:
            if length == 0:
                raise BadHello("bad_hello")
            if len(self._held) < 7:
                return False
            # After a change of cipher TLS 1.2 sends noise here: a hello has a length that some server takes.
            split = length < 2
            if self._held[5] == _CLIENT_HELLO and (split or self._held[6] <= _MAX_LENGTH >> 16):
                self._wants_hello = True
            else:
                self.open = True
        elif kind == _APPLICATION_DATA and not self._early_data:
            self.open = True
        else:
            self._passing = 5 + length
        return True


# ── The tunnel ───────────────────────────────────────────────────────────────────────────────────


class Tunnel:
    """One tunnel, from the client's hello to the end of both sides."""

    def __init__(
        self, client: HttpWire, outside: OutsideWire, meter: RuleMeter, entry: LedgerEntry, gate: Gate
    ) -> None:
        self._gate = gate
        self._client = client
        self._outside = outside
        self._meter = meter
        self._entry = entry
        self._moved = 0

    async def run(self, host: Host, limits: ProxyLimits) -> None:
        """Relay until both sides have ended. Raises Forbidden, after the client got its answer."""
        guard = HelloGuard(host)
        for wire in (self._client, self._outside):
            wire.wait_at_most(None)  # One direction may be silent as long as the other is not.
        try:
            try:
                async with asyncio.timeout(limits.head_seconds):
                    await self._greet(guard)
            except TimeoutError:
                raise Forbidden(self._entry.rule, "sni_missing", "no TLS hello came") from None
            await self._relay(guard, limits)
        except BadHello as error:
            with contextlib.suppress(Closed):
                await self._client.send(ACCESS_DENIED)
            raise Forbidden(self._entry.rule, str(error)) from error
        except Closed:
            pass
        finally:
            await self._outside.close()

    async def _greet(self, guard: HelloGuard) -> None:
        while not (ready := guard.feed(await self._read_client())):
            pass
        await self._send_out(ready)

    async def _read_client(self) -> bytes:
        data = await self._client.some()
        if not data:
            raise Closed
        return data

    async def _send_out(self, data: bytes) -> None:
        await self._gate.passed()
        self._meter.outward(len(data), self._entry)
        await self._outside.send(data)

    async def _relay(self, guard: HelloGuard, limits: ProxyLimits) -> None:
        both = {asyncio.create_task(self._outward(guard)), asyncio.create_task(self._inward())}
        try:
            seen = -1
            waiting = both
            while waiting and seen != self._moved:
                seen = self._moved
                done, waiting = await asyncio.wait(
                    waiting, timeout=limits.idle_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                self._moved += len(done)
                for task in done:
                    task.result()
        except (Stopped, BadHello, Closed):
            self._outside.abort()
            raise
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _outward(self, guard: HelloGuard) -> None:
        while data := await self._client.some():
            self._moved += 1
            ready = data if guard.open else guard.feed(data)
            if ready:
                await self._send_out(ready)
        await self._outside.finish()

    async def _inward(self) -> None:
        while data := await self._outside.some():
            self._moved += 1
            self._meter.inward(len(data), self._entry)
            await self._client.send(data)
        await self._client.finish()
