"""The way out of a box: an HTTP/1.1 proxy on the box's own listener. The listener is the identity.

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

from ringfence.box import NetworkRule
from ringfence.egress import hello, names
from ringfence.egress.dial import Dial, Dialler, Resolve, system_dial, system_resolve
from ringfence.egress.exchange import Exchange
from ringfence.egress.http1 import Request
from ringfence.egress.ledger import Entry, Fact, Ledger
from ringfence.egress.meter import Meter
from ringfence.egress.names import BadName, Endpoint
from ringfence.egress.refusal import Denied, Failed, Malformed, Stopped
from ringfence.egress.rules import DENIED, Rules
from ringfence.egress.scope import Broker, Scope
from ringfence.egress.tls import Authority, outside
from ringfence.egress.tunnel import Tunnel
from ringfence.egress.wire import Closed, Limits, ServedTls, Wire
from ringfence.errors import Unavailable

_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
_BUFFER = 128 * 1024


class Egress:
    """What all boxes share: how names are resolved, whom outside we trust, what a box may ask of us."""

    def __init__(
        self,
        resolve: Resolve = system_resolve,
        trust: ssl.SSLContext | None = None,
        limits: Limits | None = None,
        dial: Dial = system_dial,
    ) -> None:
        self._resolve = resolve
        self._dial = dial
        self._limits = limits or Limits()
        self._trust = trust or outside()

    async def attach(
        self,
        listener: socket.socket,
        rules: Rules,
        on_fact: Callable[[Fact], None],
        authority: Authority | None = None,
        broker: Broker | None = None,
    ) -> Attached:
        """Serves this listener until closed; it belongs to us from here on. Raises Unavailable."""
        signing = authority or (Authority() if any(rule.inspects for rule in rules.all) else None)
        if signing is not None:
            signing.check()
        meters = {rule.name: Meter(rule) for rule in rules.all}
        scope = Scope(
            rules=rules,
            meters=meters,
            ledger=Ledger(on_fact),
            dialler=Dialler(self._resolve, self._limits, self._dial),
            limits=self._limits,
            authority=signing,
            trust=self._trust,
            broker=broker,
        )
        attached = Attached(scope)
        await attached.listen(listener)
        return attached


class Attached:
    """One box's way out."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def authority(self) -> Authority | None:
        """Where TLS ends here."""
        return self._scope.authority

    def facts(self) -> list[Fact]:
        """So far."""
        return self._scope.ledger.facts()

    async def listen(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._accepted, sock=listener, limit=_BUFFER)

    async def close(self) -> list[Fact]:
        """Ends all connections, and tells what there was."""
        if self._server is not None:
            self._server.close()
            self._server = None
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        return self._scope.ledger.facts()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        # The loop does it only for sockets of which it knows that they are TCP.
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = Wire(reader, writer)
        self._serving.add(task)
        try:
            if self._server is None:
                return
            if len(self._serving) > self._scope.limits.connections:
                full = Malformed("connections", "too many at once", 503)
                await Exchange(self._scope, wire).refuse(full, Entry(inspected=False))
                return
            request = await Exchange(self._scope, wire).serve()
            if request is not None:
                await self._connect(request, wire)
        except asyncio.CancelledError:
            # Only `close` cancels, and it waits for nothing but the end.
            wire.abort()
        finally:
            self._serving.discard(task)
            await wire.close()

    async def _connect(self, request: Request, wire: Wire) -> None:
        entry = self._scope.ledger.open(inspected=False)
        try:
            place = _tunnel_to(request, entry)
            secured = await self._through(place, wire, entry)
        except Stopped as stopped:
            # Once the tunnel was promised the client expects TLS, and was told in its terms.
            if entry.promised:
                entry.stop(stopped)
            else:
                await Exchange(self._scope, wire).refuse(stopped, entry)
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
            self._scope.ledger.close(entry)
        if secured is not None:
            await Exchange(self._scope, secured, place).serve()
            await secured.finish()

    async def _through(self, place: Endpoint, wire: Wire, entry: Entry) -> ServedTls | None:
        """A tunnel to its end, or the client's side of TLS that ends here. Raises Stopped, Closed."""
        candidates = self._scope.rules.reaching(place)
        if not candidates:
            raise Denied(DENIED, "host", f"no rule names {place.host} port {place.port}")
        entry.rule = candidates[0].name
        if candidates[0].installs is not None:
            raise Denied(entry.rule, "no_tunnel", "there is no tunnel to what is ours: ask over plain HTTP")
        if any(rule.inspects for rule in candidates):
            entry.inspected = True
            return await self._terminate(place, wire, entry)
        tunnel = await self._open(place, candidates[0], wire, entry)
        entry.promised = True
        await wire.send(_ESTABLISHED)
        await tunnel.run(place.host, self._scope.limits)
        return None

    async def _open(self, place: Endpoint, rule: NetworkRule, wire: Wire, entry: Entry) -> Tunnel:
        meter = self._scope.meters[rule.name]
        meter.admit()
        entry.allow(rule.name)
        return Tunnel(wire, await self._scope.connect(place, rule, entry, tls=False), meter, entry)

    async def _terminate(self, place: Endpoint, wire: Wire, entry: Entry) -> ServedTls:
        """Raises Denied where the hello is for another host, Failed where the client does not believe us."""
        try:
            assert self._scope.authority is not None
            context = self._scope.authority.context(place.host)
        except Unavailable as error:
            raise Failed(error.reason_code, error.message) from error
        entry.promised = True
        await wire.send(_ESTABLISHED)
        try:
            async with asyncio.timeout(self._scope.limits.head_seconds):
                while (greeting := hello.parse(wire.pending)) is None:
                    if not await wire.more():
                        raise Closed
                hello.check(greeting, place.host)
                secured = ServedTls(wire, context)
                try:
                    await secured.handshake()
                except Closed as error:
                    raise Failed("client_tls", "the client ended the handshake") from error
                return secured
        except hello.BadHello as error:
            with contextlib.suppress(Closed):
                await wire.send(hello.ACCESS_DENIED)
            raise Denied(entry.rule, str(error)) from error
        except TimeoutError:
            raise Denied(entry.rule, "sni_missing", "no TLS hello came") from None


def _tunnel_to(request: Request, entry: Entry) -> Endpoint:
    try:
        place = names.endpoint(request.target)
        entry.aim(place)
        hosts = request.values("host")
        if len(hosts) > 1:
            raise Malformed("host_repeated", "one Host header, once")
        if hosts and names.endpoint(hosts[0], place.port) != place:
            raise Denied("protocol", "host_mismatch", "Host is not whom the tunnel is for")
        return place
    except BadName as error:
        raise Malformed("target", str(error)) from error
