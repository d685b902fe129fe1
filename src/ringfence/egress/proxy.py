"""The proxy of a box: HTTP/1.1 on the box's own listener. The listener is the identity.

egress = Egress()
attached = await egress.attach(listener, rules, on_fact)
…                                  the box runs; attached.authority.pem is what it has to trust
facts = await attached.close()
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from ringfence.core.box import NetworkRule
from ringfence.core.errors import Unavailable
from ringfence.egress import names, tunnel
from ringfence.egress.dial import Dial, Dialler, Resolve, system_dial, system_resolve
from ringfence.egress.exchange import EgressContext, ProxyExchange
from ringfence.egress.gate import Gate
from ringfence.egress.http1 import HttpRequest
from ringfence.egress.ledger import (
    EgressFact,
    EgressLedger,
    Failed,
    Forbidden,
    LedgerEntry,
    Malformed,
    RuleMeter,
    Stopped,
)
from ringfence.egress.names import BadName, Endpoint
from ringfence.egress.rules import DENIED, Rules
from ringfence.egress.substitution import Substitute
from ringfence.egress.tls import Authority, outside
from ringfence.egress.tunnel import ACCESS_DENIED, BadHello, Tunnel, parse_hello
from ringfence.egress.wire import Closed, HttpWire, ProxyLimits, ServedTls

_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
_BUFFER = 128 * 1024


class Egress:
    """What all boxes share: how names are resolved, whom outside we trust, what a box may ask of us."""

    def __init__(
        self,
        resolve: Resolve = system_resolve,
        trust: ssl.SSLContext | None = None,
        limits: ProxyLimits | None = None,
        dial: Dial = system_dial,
    ) -> None:
        self._resolve = resolve
        self._dial = dial
        self._limits = limits or ProxyLimits()
        self._trust = trust or outside()

    async def attach(
        self,
        listener: socket.socket,
        rules: Rules,
        on_fact: Callable[[EgressFact], None],
        authority: Authority | None = None,
        substitute: Substitute | None = None,
    ) -> BoxProxy:
        """Serves this listener until closed; it belongs to us from here on. Raises Unavailable."""
        signing = authority or (Authority() if any(rule.inspects for rule in rules.all) else None)
        if signing is not None:
            signing.check()
        meters = {rule.name: RuleMeter(rule) for rule in rules.all}
        gate = Gate()
        context = EgressContext(
            rules=rules,
            meters=meters,
            ledger=EgressLedger(on_fact),
            dialler=Dialler(self._resolve, self._limits, self._dial, gate),
            limits=self._limits,
            authority=signing,
            trust=self._trust,
            gate=gate,
            substitute=substitute,
        )
        attached = BoxProxy(context)
        await attached.listen(listener)
        return attached


class BoxProxy:
    """The proxy of one box."""

    def __init__(self, context: EgressContext) -> None:
        self._context = context
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def authority(self) -> Authority | None:
        """The certificates of the authority, where TLS ends at the proxy."""
        return self._context.authority

    def facts(self) -> list[EgressFact]:
        """The facts so far."""
        return self._context.ledger.facts()

    def hold(self) -> None:
        """Let nothing more out until `go_on`: what the box asks for waits."""
        self._context.gate.shut()

    def go_on(self) -> None:
        self._context.gate.open()

    @property
    def waiting(self) -> int:
        """How many requests and pieces of them are held."""
        return self._context.gate.waiting

    async def listen(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._accepted, sock=listener, limit=_BUFFER)

    async def close(self) -> list[EgressFact]:
        """Ends all connections, and tells what there was."""
        if self._server is not None:
            self._server.close()
            self._server = None
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        return self._context.ledger.facts()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        # The loop does it only for sockets of which it knows that they are TCP.
        accepted = writer.get_extra_info("socket")
        if accepted.family != socket.AF_UNIX:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = HttpWire(reader, writer)
        self._serving.add(task)
        try:
            if self._server is None:
                return
            if len(self._serving) > self._context.limits.connections:
                full = Malformed("connections", "too many at once", 503)
                await ProxyExchange(self._context, wire).refuse(full, LedgerEntry(inspected=False))
                return
            request = await ProxyExchange(self._context, wire).serve()
            if request is not None:
                await self._connect(request, wire)
        except asyncio.CancelledError:
            # Only `close` cancels, and it waits for nothing but the end.
            wire.abort()
        finally:
            self._serving.discard(task)
            await wire.close()

    async def _connect(self, request: HttpRequest, wire: HttpWire) -> None:
        entry = self._context.ledger.open(inspected=False)
        try:
            place = _tunnel_to(request, entry)
            secured = await self._through(place, wire, entry)
        except Stopped as stopped:
            # Once the tunnel was promised the client expects TLS, and got the refusal in TLS.
            if entry.promised:
                entry.stop(stopped)
            else:
                await ProxyExchange(self._context, wire).refuse(stopped, entry)
            secured = None
        except Closed:
            entry.reason = "client_left"
            secured = None
        except asyncio.CancelledError:
            entry.reason = "ended"
            raise
        else:
            # Where TLS ends here, each request has a record of its own.
            entry.closed = secured is not None
        finally:
            self._context.ledger.close(entry)
        if secured is not None:
            await ProxyExchange(self._context, secured, place).serve()
            await secured.finish()

    async def _through(self, place: Endpoint, wire: HttpWire, entry: LedgerEntry) -> ServedTls | None:
        """A tunnel to its end, or the client's side of TLS that ends here. Raises Stopped, Closed."""
        candidates = self._context.rules.reaching(place)
        if not candidates:
            raise Forbidden(DENIED, "host", f"no rule names {place.host} port {place.port}")
        entry.rule = candidates[0].name
        if candidates[0].installs is not None:
            raise Forbidden(entry.rule, "no_tunnel", "the index of packages has no tunnel: use plain HTTP")
        if any(rule.inspects for rule in candidates):
            entry.inspected = True
            return await self._terminate(place, wire, entry)
        opened = await self._open(place, candidates[0], wire, entry)
        entry.promised = True
        await wire.send(_ESTABLISHED)
        await opened.run(place.host, self._context.limits)
        return None

    async def _open(self, place: Endpoint, rule: NetworkRule, wire: HttpWire, entry: LedgerEntry) -> Tunnel:
        meter = self._context.meters[rule.name]
        await self._context.gate.passed()
        meter.admit()
        entry.allow(rule.name)
        outside = await self._context.connect(place, rule, entry, tls=False)
        return Tunnel(wire, outside, meter, entry, self._context.gate)

    async def _terminate(self, place: Endpoint, wire: HttpWire, entry: LedgerEntry) -> ServedTls:
        """Raises Forbidden where the hello is for another host, Failed where the client does not believe us."""
        try:
            assert self._context.authority is not None
            context = self._context.authority.context(place.host)
        except Unavailable as error:
            raise Failed(error.reason_code, error.message) from error
        entry.promised = True
        await wire.send(_ESTABLISHED)
        try:
            async with asyncio.timeout(self._context.limits.head_seconds):
                while (greeting := parse_hello(wire.pending)) is None:
                    if not await wire.more():
                        raise Closed
                tunnel.check_hello(greeting, place.host)
                secured = ServedTls(wire, context)
                try:
                    await secured.handshake()
                except Closed as error:
                    raise Failed("client_tls", "the client ended the handshake") from error
                return secured
        except BadHello as error:
            with contextlib.suppress(Closed):
                await wire.send(ACCESS_DENIED)
            raise Forbidden(entry.rule, str(error)) from error
        except TimeoutError:
            raise Forbidden(entry.rule, "sni_missing", "no TLS hello came") from None


def _tunnel_to(request: HttpRequest, entry: LedgerEntry) -> Endpoint:
    try:
        place = names.endpoint(request.target)
        entry.aim(place)
        hosts = request.values("host")
        if len(hosts) > 1:
            raise Malformed("host_repeated", "one Host header, once")
        if hosts and names.endpoint(hosts[0], place.port) != place:
            raise Forbidden("protocol", "host_mismatch", "Host is not the host of the tunnel")
        return place
    except BadName as error:
        raise Malformed("target", str(error)) from error
