"""Requests of one connection, one after the other: read, judged, written anew, answered.

The same for plain HTTP, where each request says whom it is for, and for TLS that ends here, where CONNECT has said it.
A request that comes before the last one was answered waits in the buffer; none is ever sent ahead of its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ringfence.core import own_ports
from ringfence.core.box import NetworkRule, Reply
from ringfence.core.brokering import OutboundRequest
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.record import dataclass
from ringfence.egress import http1, names
from ringfence.egress.dial import Dialler
from ringfence.egress.gate import Gate
from ringfence.egress.http1 import NO_BODY, Framing, HttpRequest, HttpResponse, frame, frame_end, read_body
from ringfence.egress.ledger import EgressLedger, Failed, Forbidden, LedgerEntry, Malformed, RuleMeter, Stopped
from ringfence.egress.names import BadName, Endpoint
from ringfence.egress.rules import DENIED, Rules, judge
from ringfence.egress.substitution import CHUNKED, Substitute, Substitution, WordScan, cleaned, cleaned_head
from ringfence.egress.tls import Authority
from ringfence.egress.wire import Closed, HttpWire, OutsideWire, ProxyLimits

_MAX_HEADS = 8
_LINGER_BYTES = 256 * 1024
_LINGER_SECONDS = 1.0
_UPLOAD_SECONDS = 1.0
_BODILESS = ("GET", "HEAD", "OPTIONS", "TRACE")
"""Methods whose bodies servers do not expect, and many do not read."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True, slots=True)
class EgressContext:
    """What all connections of one box share."""

    rules: Rules
    meters: Mapping[str, RuleMeter]
    ledger: EgressLedger
    dialler: Dialler
    limits: ProxyLimits
    authority: Authority | None
    """None where no rule has TLS end here."""
    trust: ssl.SSLContext
    gate: Gate
    substitute: Substitute | None = None

    async def connect(self, place: Endpoint, rule: NetworkRule, entry: LedgerEntry, *, tls: bool) -> OutsideWire:
        """Raises Forbidden, Failed."""
        named = self.rules.named(rule, place.port)
        addresses = await self.dialler.addresses(place.host, named, rule.name)
        if any(own_ports.is_ours(str(address), place.port) for address in addresses):
            raise Forbidden(rule.name, "own_port", f"Ringfence itself listens on {place.host} port {place.port}")
        return await self.dialler.connect(place, addresses, entry, self.trust if tls else None)


@dataclass(frozen=True, slots=True)
class _Sending:
    """A request that may go, as it goes."""

    request: HttpRequest
    place: Endpoint
    rule: NetworkRule
    head: bytes
    meter: RuleMeter
    entry: LedgerEntry
    given: Substitution


class ProxyExchange:
    """One connection of a client."""

    def __init__(self, context: EgressContext, wire: HttpWire, inside: Endpoint | None = None) -> None:
        self._context = context
        self._wire = wire
        self._inside = inside
        self._scheme = "http" if inside is None else "https"
        self._outside: OutsideWire | None = None
        self._outside_for: tuple[Endpoint, str] | None = None
        self._answering = False

    async def serve(self) -> HttpRequest | None:
        """Serve the client until it leaves or is refused. A CONNECT goes back to the caller, which opens the tunnel."""
        try:
            while (request := await self._next()) is not None:
                if request.method == "CONNECT" and self._inside is None:
                    return request
                if not await self._one(request):
                    return None
            return None
        except asyncio.CancelledError:
            await self._leave(abort=True)
            raise
        finally:
            await self._leave()

    async def _next(self) -> HttpRequest | None:
        limits = self._context.limits
        self._wire.wait_at_most(limits.idle_seconds)
        try:
            if not self._wire.pending and not await self._wire.more():
                return None
            try:
                async with asyncio.timeout(limits.head_seconds):
                    head = await self._wire.head(limits.head_bytes, request=True)
            except TimeoutError:
                raise Malformed("head_timeout", "the request was not complete", 408) from None
            return http1.request(head) if head else None
        except Closed:
            return None
        except Malformed as stopped:
            entry = LedgerEntry(inspected=True)
            if self._inside is not None:
                entry.aim(self._inside)
            await self.refuse(stopped, entry)
            return None

    async def refuse(self, stopped: Stopped, entry: LedgerEntry, *, keep: bool = False) -> None:
        """Answers and records; unless kept, nothing that still comes is taken for a request."""
        entry.stop(stopped)
        self._context.ledger.close(entry)
        with contextlib.suppress(Closed):
            answer = http1.refusal(stopped.status, entry.rule, stopped.reason, stopped.detail, not keep)
            await self._wire.send(answer)
            if not keep:
                await self._linger()

    async def _linger(self) -> None:
        # Closing with bytes unread would take the answer away from under the client.
        await self._wire.finish()
        left = _LINGER_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while left > 0 and (data := await self._wire.some()):
                    left -= len(data)

    async def _one(self, request: HttpRequest) -> bool:
        """True where the connection can take another request."""
        entry = self._context.ledger.open(inspected=True)
        self._answering = False
        try:
            sending = await self._prepare(request, entry)
            whole = await (self._carry(sending) if sending.rule.installs is None else self._answer(sending))
            self._context.ledger.close(entry)
            if not whole:
                await self._linger()
            return whole and not request.close
        except Stopped as stopped:
            keep = request.framing == NO_BODY and not request.close
            if not self._answering:
                await self.refuse(stopped, entry, keep=keep)
                return keep
            entry.stop(stopped)
            self._wire.abort()
        except Closed:
            entry.reason = "client_left"
        except asyncio.CancelledError:
            entry.reason = "ended"
            raise
        finally:
            self._context.ledger.close(entry)
        return False

    # ── before it leaves ─────────────────────────────────────────────────────────────────────────

    async def _prepare(self, request: HttpRequest, entry: LedgerEntry) -> _Sending:
        place, target = self._aim(request, entry)
        candidates = self._context.rules.reaching(place)
        if not candidates:
            raise Forbidden(DENIED, "host", f"no rule names {place.host} port {place.port}")
        verdict = judge(candidates, request.method, target, (name.lower() for name, _ in request.headers))
        entry.rule = verdict.rule
        if verdict.granted is None:
            raise Forbidden(verdict.rule, verdict.reason or "denied")
        rule = verdict.granted
        if request.framing != NO_BODY and request.method in _BODILESS and self._must_be_one(rule):
            raise Forbidden(rule.name, "body", f"a {request.method} request has no body here")
        meter = self._context.meters[rule.name]
        meter.admit(request.framing.length)
        await self._context.gate.passed()  # a broker that is asked has that on record
        given = await self._given(request, place, target, rule)
        without = given.strip | {name.lower() for name in given.put} | {"host", "expect"}
        kept = http1.end_to_end(request.headers, without)
        headers = (("Host", place.header(self._scheme)), *kept, *given.put.items())
        if is_last(request):
            headers = (*headers, ("Connection", "close"))
        head = http1.write_request(request.method, target, headers, request.framing)
        await self._context.gate.passed()
        entry.allow(rule.name)
        return _Sending(request, place, rule, head, meter, entry, given)

    def _must_be_one(self, rule: NetworkRule) -> bool:
        """Whether it matters that the other side takes it for one request: a rule looks at requests, or secrets are put
        into them."""
        return rule.methods is not None or rule.paths is not None or self._context.substitute is not None

    def _aim(self, request: HttpRequest, entry: LedgerEntry) -> tuple[Endpoint, str]:
        """Whom it is for, said twice and both times the same."""
        hosts = request.values("host")
        try:
            if self._inside is not None:
                place = self._inside
                target = request.target
                entry.aim(place)
            else:
                url = names.url(request.target)
                if url.scheme != "http":
                    raise Malformed("https_target", "https goes through CONNECT")
                place = url.endpoint
                target = url.target
                entry.aim(place)
            if len(hosts) != 1:
                raise Malformed("host_repeated" if hosts else "host_missing", "one Host header, once")
            if names.endpoint(hosts[0], names.default_port(self._scheme)) != place:
                raise Forbidden("protocol", "host_mismatch", "Host is not the host of the request")
        except BadName as error:
            raise Malformed("target", str(error)) from error
        return place, http1.origin_form(target)

    async def _given(self, request: HttpRequest, place: Endpoint, target: str, rule: NetworkRule) -> Substitution:
        given = Substitution()
        if self._context.substitute is not None:
            asked = OutboundRequest(
                scheme=self._scheme,
                host=place.host.text,
                port=place.port,
                method=request.method,
                path=target,
                headers=request.headers,
                rule=rule.name,
            )
            try:
                given = await self._context.substitute(asked)
            except Refused as error:
                raise Forbidden(rule.name, error.reason_code, error.message) from error
            except Unavailable as error:
                raise Failed(error.reason_code, error.message) from error
        if given.put and self._scheme != "https":
            raise Forbidden(rule.name, "secret_in_clear", "a secret goes over TLS alone")
        if not all(http1.is_header(name, value) for name, value in given.put.items()):
            raise Failed("bad_secret", "a value cannot stand in a header")
        return given

    async def _answer(self, sending: _Sending) -> bool:
        """Answer the request here: nothing leaves. Raises Stopped, and Closed for the client."""
        request = sending.request
        index = self._context.rules.index
        if request.method not in ("GET", "HEAD") or request.framing != NO_BODY:
            raise Forbidden(sending.rule.name, "method", "there is nothing to be sent here")
        if index is None:
            raise Failed("no_index", "there is no index here")
        reply = await index.answer(self._aim(request, sending.entry)[1])
        if reply.refused:
            sending.entry.verdict = "denied"
            sending.entry.reason = reply.refused
        self._answering = True
        async for piece in write_reply(reply, request):
            await self._wire.send(piece)
        return True

    # ── to the outside and back ──────────────────────────────────────────────────────────────────

    async def _carry(self, sending: _Sending) -> bool:
        """True where the whole request was taken from the client. Raises Stopped, and Closed for the client."""
        request = sending.request
        outside, reused = await self._reach(sending)
        upload: asyncio.Task[bool] | None = None
        kept = whole = False
        try:
            await self._context.gate.passed()
            sending.meter.outward(len(sending.head), sending.entry, sum(map(len, sending.given.put.values())))
            with contextlib.suppress(Closed):
                await outside.send(sending.head)
            if request.framing != NO_BODY:
                if request.expects_continue:
                    await self._wire.send(_CONTINUE)
                upload = asyncio.create_task(self._upload(sending, outside))
            answer = await self._answered(outside, request.method, upload)
            if answer is not None:
                await self._download(sending, outside, answer)
                whole = await _finished(upload)
                kept = whole and not answer.close and not is_last(request)
            _raise_first(upload)
        except Failed:
            _raise_first(upload)
            raise
        finally:
            if upload is not None:
                upload.cancel()
                await asyncio.gather(upload, return_exceptions=True)
            if not kept:
                await self._leave(abort=not whole)
        if answer is not None:
            return whole
        # A connection that was kept may end just when it is used again: what has no effect is then sent once more.
        if reused and upload is None and request.method in ("GET", "HEAD"):
            return await self._carry(sending)
        raise Failed("no_answer", "the connection ended before an answer")

    async def _reach(self, sending: _Sending) -> tuple[OutsideWire, bool]:
        key = (sending.place, sending.rule.name)
        if self._outside is not None and self._outside_for == key and not self._outside.ended:
            self._outside.entry = sending.entry
            return self._outside, True
        await self._leave()
        tls = self._inside is not None
        self._outside = await self._context.connect(sending.place, sending.rule, sending.entry, tls=tls)
        self._outside.wait_at_most(self._context.limits.idle_seconds)
        self._outside_for = key
        return self._outside, False

    async def _leave(self, *, abort: bool = False) -> None:
        outside, self._outside, self._outside_for = self._outside, None, None
        if outside is not None and abort:
            outside.abort()
        elif outside is not None:
            await outside.leave()

    async def _upload(self, sending: _Sending, outside: OutsideWire) -> bool:
        """True where all of it went out; False where the other side takes no more, since it may have answered first.

        Raises Malformed, Forbidden, and Closed where the client leaves: then the request must not look whole.
        """
        framing = sending.request.framing
        watch = WordScan(sending.given.forbid)
        try:
            async for piece in read_body(self._wire, framing):
                if (word := watch.sees(piece)) is not None:
                    await self._caught(sending, word)
                data = frame(piece, framing)
                await self._context.gate.passed()
                sending.meter.outward(len(data), sending.entry)
                if not await _sent(outside, data):
                    return False
            await self._context.gate.passed()
            return await _sent(outside, frame_end(framing))
        except Stopped:
            outside.abort()
            raise

    async def _caught(self, sending: _Sending, word: bytes) -> NoReturn:
        """A placeholder stands in a body: on record first, where there is a record. Raises Forbidden."""
        if sending.given.caught is not None:
            with contextlib.suppress(Refused, Unavailable):
                await sending.given.caught(word)
        raise Forbidden(
            sending.rule.name, "placeholder", "the placeholder of a secret may stand only in the header that it is for"
        )

    async def _answered(
        self, outside: OutsideWire, method: str, upload: asyncio.Task[bool] | None
    ) -> HttpResponse | None:
        """The head of the answer, or None where the other side ended without one. Raises Failed."""
        seconds = self._context.limits.answer_seconds
        outside.wait_at_most(seconds)
        if upload is None:
            return await self._response(outside, method)
        # The answer is not late while the request still goes out.
        outside.wait_at_most(None)
        reading = asyncio.create_task(self._response(outside, method))
        try:
            await asyncio.wait({reading, upload}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await upload
            async with asyncio.timeout(seconds):
                return await reading
        except TimeoutError:
            raise Failed("timeout", "no answer in time") from None
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            outside.wait_at_most(seconds)

    async def _response(self, outside: OutsideWire, method: str) -> HttpResponse | None:
        for _ in range(_MAX_HEADS):
            try:
                head = await outside.head(self._context.limits.head_bytes)
            except (Malformed, Closed) as error:
                raise Failed("bad_response", str(error)) from error
            if not head:
                return None
            answer = http1.response(head, method)
            if answer.status >= 200:
                return answer
        raise Failed("bad_response", "too many interim answers")

    async def _download(self, sending: _Sending, outside: OutsideWire, answer: HttpResponse) -> None:
        clean = sending.given.clean
        if clean is not None:
            answer = cleaned_head(answer, clean)
        framing = answer.framing
        entry = sending.entry
        incoming = _incoming(outside, framing, sending.meter, entry if clean is None else None)
        if clean is not None and framing != NO_BODY:
            # What is removed from it changes its length, and no record tells what that was.
            framing, incoming = CHUNKED, cleaned(incoming, clean())
            answer = replace(answer, framing=framing)
        waiting = http1.write_response(answer, sending.request.method, sending.request.close)
        sending.meter.inward(len(waiting), entry)
        async with contextlib.aclosing(incoming):
            async for piece in incoming:
                if clean is not None:
                    entry.bytes_in += len(piece)
                self._answering = True
                await self._wire.send(waiting + frame(piece, framing))
                waiting = b""
        waiting += frame_end(framing)
        if waiting:
            self._answering = True
            await self._wire.send(waiting)


async def _incoming(
    outside: OutsideWire, framing: Framing, meter: RuleMeter, entry: LedgerEntry | None
) -> AsyncGenerator[bytes]:
    try:
        async for piece in read_body(outside, framing, extensions=True):
            meter.inward(len(piece), entry)
            yield piece
    except Malformed as error:
        raise Failed("bad_response", error.reason) from error
    except Closed as error:
        raise Failed("bad_response", "the body ended too early") from error


async def _sent(outside: OutsideWire, data: bytes) -> bool:
    try:
        await outside.send(data)
    except Closed:
        return False
    return True


def _raise_first(upload: asyncio.Task[bool] | None) -> None:
    """What ended the request, where that is why there is no answer, or no whole one."""
    if upload is not None and upload.done() and (error := upload.exception()) is not None:
        raise error


async def _finished(upload: asyncio.Task[bool] | None) -> bool:
    """Whether the whole request went out. An answer may come before that, and then nothing else can follow it."""
    if upload is None:
        return True
    await asyncio.wait({upload}, timeout=_UPLOAD_SECONDS)
    return upload.done() and upload.exception() is None and upload.result()


# ── Our own answers ──────────────────────────────────────────────────────────────────────────────

_PIECE = 1024 * 1024


async def write_reply(reply: Reply, request: HttpRequest) -> AsyncIterator[bytes]:
    """Send a reply to the client, piece by piece. Raises Failed."""
    length = len(reply.body) if isinstance(reply.body, bytes) else await asyncio.to_thread(_size, reply.body)
    headers = (("Content-Type", reply.content_type), ("Content-Length", str(length)))
    whole = request.method == "GET" and length > 0
    framing = Framing("length", length) if whole else http1.NO_BODY
    head = HttpResponse(reply.status, reply.phrase, headers, framing, request.close)
    yield http1.write_response(head, request.method, request.close)
    if not whole:
        return
    if isinstance(reply.body, bytes):
        yield reply.body
        return
    with reply.body.open("rb") as stream:
        while length > 0 and (piece := await asyncio.to_thread(stream.read, min(length, _PIECE))):
            length -= len(piece)
            yield piece
    if length:
        raise Failed("no_answer", "the file to be sent is shorter than before")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        raise Failed("no_answer", "the file to be sent is gone") from None


def is_last(request: HttpRequest) -> bool:
    """Whether nothing may follow it on its connection. A server that does not read a body takes it for the next
    requests; so there are none after one: it is told to close, and what comes next goes another way."""
    return request.framing != NO_BODY
