"""From a name to a connection: one resolution, every answer checked, and the checked address is the one dialled."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ringfence.core.aio import shielded
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.model import Status
from ringfence.egress import names
from ringfence.egress.gate import Gate
from ringfence.egress.ledger import Failed, Forbidden, LedgerEntry
from ringfence.egress.names import Address, Endpoint, Host, Range, address_refusal, canonical_address
from ringfence.egress.wire import OutsideWire, ProxyLimits

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""A name to the addresses behind it. Raises OSError."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Dial = Callable[[str, int, ssl.SSLContext | None, str | None], Awaitable[Streams]]
"""Opens a connection to an address in numbers and a port; with TLS, for a server of this name. Raises OSError."""

_MAX_TRIED = 4
_MAX_LOOKUPS = 4
_BUFFER = 128 * 1024


# Threads of their own: names that are slow to resolve must not hold up whatever else waits for a thread.
_RESOLVERS = ThreadPoolExecutor(16, "lookup")


async def system_resolve(name: str) -> Sequence[str]:
    ask = partial(socket.getaddrinfo, name, None, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_RESOLVERS, ask)
    return [str(answer[4][0]) for answer in found]


async def system_dial(address: str, port: int, tls: ssl.SSLContext | None, name: str | None) -> Streams:
    return await asyncio.open_connection(address, port, ssl=tls, server_hostname=name, limit=_BUFFER)


class Dialler:
    """One for each box, so that the lookups of one cannot crowd out those of another."""

    def __init__(
        self, resolve: Resolve, limits: ProxyLimits, dial: Dial = system_dial, gate: Gate | None = None
    ) -> None:
        """Nothing is looked up or dialled while the gate is shut."""
        self._gate = gate or Gate()
        self._resolve = resolve
        self._limits = limits
        self._dial = dial
        self._lookups = asyncio.Semaphore(_MAX_LOOKUPS)

    async def addresses(self, host: Host, named: Iterable[Range], rule: str = "") -> list[Address]:
        """What may be dialled for this host; one answer that may not refuses all of them. Raises Forbidden, Failed."""
        answers = [host.address] if host.address is not None else await self._lookup(host)
        ranges = tuple(named)
        for address in answers:
            if kind := address_refusal(address, ranges):
                # Not which one: a box has no business with the names of an inner network.
                raise Forbidden(rule, f"address_{kind}", f"no rule names the address of {host}")
        return answers

    async def _lookup(self, host: Host) -> list[Address]:
        try:
            lookup = await self._begin_lookup(host)
            async with asyncio.timeout(self._limits.resolve_seconds):
                found = await shielded(lookup)
        # A name that cannot be encoded for DNS is no less unknown than one that is not there.
        except (OSError, UnicodeError) as error:
            raise Failed("resolve", f"{host} cannot be resolved") from error
        answers = [canonical_address(ipaddress.ip_address(text)) for text in dict.fromkeys(found)]
        if not answers:
            raise Failed("resolve", f"{host} has no address")
        return answers

    async def _begin_lookup(self, host: Host) -> asyncio.Future[Sequence[str]]:
        """It keeps its place until it is over, and not only for as long as it is waited for: a thread cannot be called
        back, and all boxes share them."""
        await self._lookups.acquire()
        try:
            await self._gate.passed()
        except BaseException:
            self._lookups.release()
            raise
        lookup = asyncio.ensure_future(self._resolve(host.text))
        lookup.add_done_callback(lambda _: self._lookups.release())
        return lookup

    async def connect(
        self, place: Endpoint, addresses: Sequence[Address], entry: LedgerEntry, tls: ssl.SSLContext | None = None
    ) -> OutsideWire:
        """Connect to the first of them that answers, within the time for all. Raises Failed."""
        problem: Exception | None = None
        clock = asyncio.get_running_loop().time
        left = self._limits.dial_seconds
        for address in addresses[:_MAX_TRIED]:
            await self._gate.passed()
            began = clock()
            try:
                async with asyncio.timeout(left):
                    return await self._open(place, address, entry, tls)
            except ssl.SSLCertVerificationError as error:
                raise Failed("upstream_certificate", error.verify_message) from error
            except ssl.SSLError as error:
                raise Failed("upstream_tls", error.reason or "") from error
            except OSError as error:
                problem = error
            left -= clock() - began
            if left <= 0:
                break
        raise Failed("connect", f"{place.host} port {place.port} does not answer") from problem

    async def _open(
        self, place: Endpoint, address: Address, entry: LedgerEntry, tls: ssl.SSLContext | None
    ) -> OutsideWire:
        # An address in numbers is never looked up again.
        name = place.host.text if tls is not None else None
        made = OutsideWire(*await self._dial(str(address), place.port, tls, name), entry)
        entry.sent |= tls is not None  # the handshake names the host
        return made


async def check_url(text: str, named: Iterable[str] = (), resolve: Resolve = system_resolve) -> list[str]:
    """Where a request of our own to this URL may be dialled: the same check that the boxes' requests pass.

    `named` are the addresses and ranges that the operator allows for it. Raises Refused, Unavailable.
    """
    try:
        host = names.url(text).endpoint.host
        ranges = tuple(ipaddress.ip_network(entry) for entry in named)
        return [str(address) for address in await Dialler(resolve, ProxyLimits()).addresses(host, ranges)]
    except ValueError as error:
        raise Refused(Status.DENIED, "bad_url", str(error)) from error
    except Forbidden as denied:
        raise Refused(Status.DENIED, denied.reason, denied.detail) from denied
    except Failed as failed:
        raise Unavailable(failed.reason, failed.detail) from failed
