"""A server that was started by us and speaks JSON lines.

The SDK's dispatcher does the correlation; the reading is ours, because a server may hang, flood, send a
20 MB line, garbage or nothing, and must harm only the call that it was answering.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
import anyio.abc
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.dispatcher import CallOptions, DispatchContext
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp.shared.message import SessionMessage
from mcp.shared.transport_context import TransportContext
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
)

from ringfence.core import canonical
from ringfence.core.errors import OutcomeUnknown, Unavailable
from ringfence.core.model import Json, ServerSpec
from ringfence.core.ports import Launched
from ringfence.upstream.link import MAX_MESSAGE_BYTES, AnswerUnusable, InFlight, RpcError, read_message
from ringfence.upstream.pacing import LONG_BYTES, MAX_QUESTIONS, MAX_VALUES_TOLD, PIECE_BYTES, Floods, Intake

log = logging.getLogger("ringfence.upstream")

_STDERR_BYTES_PER_SECOND = 64_000
_LONGEST_STDERR_LINE = 16_384
_MAX_LAST_LINES = 10
_STUCK_SECONDS = 60.0
_COMPLAINT_SECONDS = 1.0
_BEGINNING = ("initialize", "server/discover")
_EDGE = 4096
_ID = re.compile(rb'"id"\s*:\s*(\d+)')

Tell = Callable[[str, Json], Awaitable[None]]


class StdioLink:
    """One server process. Single use: when it ends, make another."""

    def __init__(
        self, spec: ServerSpec, launch: Callable[[], Awaitable[Launched]], floods: Floods | None = None
    ) -> None:
        self._spec = spec
        self._launch = launch
        self._intake = Intake(floods)
        self.isolation: Json | None = None
        self.network_meter: Callable[[], Callable[[], Json | None]] = lambda: lambda: None
        self.network_since_start: Callable[[], Json | None] = lambda: None
        """Of what really runs, once it does."""
        self.ending = ""
        """Why it ended, and what it seems to have lacked, where it ended by itself."""
        self.hint = ""
        self.last_words: tuple[str, ...] = ()
        self.unowned: Callable[[str, Json], Awaitable[Json]] | None = None
        self._dispatcher: JSONRPCDispatcher[TransportContext] | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self._exchanges: list[InFlight] = []
        self._standing: InFlight | None = None
        """Who hears what belongs to no request."""
        self._next_id = 0
        self._open: set[str] = set()
        """Ids of requests that the server owes an answer."""
        self._errors: dict[str, RpcError] = {}
        """Answers that are errors, by the id of their request, until it has ended."""

    # ── sending ───────────────────────────────────────────────────────────────────────────────────

    async def request(self, method: str, params: Json, exchange: InFlight) -> Json:
        if self._dispatcher is None:
            raise Unavailable("server_down", f"server {self._spec.name} is not running")
        self._next_id += 1
        ident = self._next_id
        options: CallOptions = {"request_id": ident, "cancel_on_abandon": False}
        if method not in _BEGINNING:

            async def on_progress(progress: float, total: float | None, message: str | None) -> None:
                note: Json = {"progress": progress}
                if total is not None:
                    note["total"] = total
                if message is not None:
                    note["message"] = message
                await exchange.hear("notifications/progress", note)

            options["on_progress"] = on_progress
        if method != "subscriptions/listen":
            self._exchanges.append(exchange)
        self._open.add(str(ident))
        try:
            return await self._dispatcher.send_raw_request(method, params, options)
        except anyio.get_cancelled_exc_class():
            # In a task of its own: a server that reads nothing must not hold up callers that gave up waiting for it.
            if method not in _BEGINNING and self._group is not None:
                note = {"requestId": ident, "reason": "cancelled"}
                self._group.start_soon(self.notify, "notifications/cancelled", note)
            raise
        except MCPError:
            # The dispatcher's own codes are codes that servers send, too: an error is the server's if we read it.
            if (answer := self._errors.get(str(ident))) is not None:
                raise answer from None
            raise OutcomeUnknown("server_died", f"server {self._spec.name} ended without an answer") from None
        finally:
            self._open.discard(str(ident))
            self._errors.pop(str(ident), None)
            if exchange in self._exchanges:
                self._exchanges.remove(exchange)

    async def notify(self, method: str, params: Json | None, headers: Mapping[str, str] | None = None) -> None:
        if self._dispatcher is not None:
            await self._dispatcher.notify(method, params)

    # ── receiving ─────────────────────────────────────────────────────────────────────────────────

    def _owner(self) -> InFlight | None:
        """The exchange that a message without an address belongs to: only when there is no doubt whose it is."""
        waiting = self._exchanges
        if len(waiting) == 1:
            return waiting[0]
        # Two requests of one client may be confused without harm; requests without a session may be any client's.
        if waiting and waiting[-1].client is not None and all(e.client == waiting[-1].client for e in waiting):
            return waiting[-1]
        return None

    async def _on_request(
        self, dctx: DispatchContext[TransportContext], method: str, params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        if method == "ping":
            return {}
        owner = self._owner()
        ask = self.unowned if owner is None else owner.ask
        if ask is None:
            raise MCPError(METHOD_NOT_FOUND, f"{method}: no single call in progress that this could belong to")
        try:
            answer = await self._intake.thought(ask, method, dict(params or {}))
        except RpcError as exc:
            raise MCPError(exc.code, exc.message, exc.data) from None
        if answer is None:
            raise MCPError(INVALID_REQUEST, f"{method}: {MAX_QUESTIONS} questions of this server wait already")
        return answer

    async def _on_notify(
        self, dctx: DispatchContext[TransportContext], method: str, params: Mapping[str, Any] | None
    ) -> None:
        if method in ("notifications/progress", "notifications/cancelled"):
            return  # the dispatcher has applied both
        owner = self._owner() if method == "notifications/message" else None
        exchange = owner or self._standing
        if exchange is not None:
            await exchange.hear(method, dict(params or {}))

    async def run(self, ready: Callable[[], object], tell: Tell) -> None:
        self._standing = InFlight(ask=_unasked, tell=tell)
        server = await self._launch()
        self.isolation = server.isolation
        self.network_meter = server.network_meter
        self.network_since_start = server.network_since_start
        try:
            await self._serve(server, ready)
        finally:
            with anyio.CancelScope(shield=True):
                self.ending = await server.stop()
                self.hint = server.hint
                self.last_words = _last_lines(server.last_stderr)

    async def _serve(self, server: Launched, ready: Callable[[], object]) -> None:
        inbound_send, inbound = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outbound, outbound_receive = anyio.create_memory_object_stream[SessionMessage](0)
        dispatcher: JSONRPCDispatcher[TransportContext] = JSONRPCDispatcher(inbound, outbound)
        async with anyio.create_task_group() as group:
            self._group = group
            group.start_soon(self._read, server, inbound_send)
            group.start_soon(self._write, server, outbound_receive, group.cancel_scope)
            group.start_soon(_drain_stderr, server, self._spec.name)

            async def serve(*, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
                try:
                    await dispatcher.run(self._on_request, self._on_notify, task_status=task_status)
                finally:
                    self._group = self._dispatcher = None  # from now on nothing can be sent
                    group.cancel_scope.cancel()

            await group.start(serve)
            self._dispatcher = dispatcher
            ready()

    async def _write(
        self, server: Launched, source: MemoryObjectReceiveStream[SessionMessage], life: anyio.CancelScope
    ) -> None:
        async with source:
            async for item in source:
                data = item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
                try:
                    with anyio.fail_after(_STUCK_SECONDS):
                        await server.send(data)
                except TimeoutError:
                    log.warning("server %s reads nothing any more; it is ended", self._spec.name)
                    life.cancel()
                    return
                except OSError:
                    return  # the reader sees the end of the process, and ends every request
                if isinstance(item.message, JSONRPCResponse | JSONRPCError):
                    self._intake.answered(item.message.id)

    async def _read(self, server: Launched, out: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        """Lines to messages: bounded in length and in rate, each bad line alone."""
        complaints = _Complaints(self._spec.name)
        async with out:
            lines = Lines(MAX_MESSAGE_BYTES)
            while True:
                chunk = await server.receive("stdout")
                if not chunk:
                    return
                try:
                    for start in range(0, len(chunk), PIECE_BYTES):
                        piece = chunk[start : start + PIECE_BYTES]
                        found = lines.feed(piece)
                        await self._intake.reading(piece, lines.wasted)
                        for line in found:
                            await self._take(line, complaints, out)
                except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                    return

    async def _take(
        self, line: bytes | TooLong, complaints: _Complaints, out: MemoryObjectSendStream[SessionMessage | Exception]
    ) -> None:
        if isinstance(line, bytes):
            message = await self._parsed(line, complaints)
            data = line
        else:
            message = _unusable(line.request_id, line.problem)
            data = b""  # paid for while it was thrown away
        if message is None:
            await self._intake.notification(data)
        elif await self._admits(message, data):
            await out.send(SessionMessage(message))

    async def _parsed(self, line: bytes, complaints: _Complaints) -> JSONRPCMessage | None:
        if len(line) < LONG_BYTES:
            return _parse(line, complaints.add)
        problems: list[object] = []
        message = await self._intake.floods.aside(lambda: _parse(line, problems.append))
        for problem in problems:
            complaints.add(problem)
        return message

    async def _admits(self, message: JSONRPCMessage, data: bytes) -> bool:
        """Whether it goes on to the dispatcher, when its time has come."""
        if isinstance(message, JSONRPCRequest):
            await self._intake.question(data)
            return self._intake.asked(message.id)
        if isinstance(message, JSONRPCNotification):
            if message.method == "notifications/cancelled":
                ident = (message.params or {}).get("requestId")
                if isinstance(ident, int | str):
                    self._intake.answered(ident)
        elif (ident := str(message.id)) in self._open:
            self._open.discard(ident)
            if isinstance(message, JSONRPCError):
                self._errors[ident] = _error_of(message)
            return True
        await self._intake.notification(data)
        # What answers nothing goes nowhere.
        return isinstance(message, JSONRPCNotification) and canonical.values_at_most(data) <= MAX_VALUES_TOLD


class TooLong:
    """Stands for a line that was thrown away while it was read."""

    def __init__(self, request_id: int | None, size: int) -> None:
        self.request_id = request_id
        self.problem = f"an answer of more than {size} bytes"


class Lines:
    """Splits a byte stream at newlines, holding at most `limit` bytes of one line."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._searched = 0
        self._skipping: bytes | None = None
        """Head of the line that is being thrown away."""
        self.wasted = 0
        """Bytes that the last chunk made us throw away."""

    def feed(self, chunk: bytes) -> list[bytes | TooLong]:
        out: list[bytes | TooLong] = []
        self.wasted = 0
        self._buffer += chunk
        while True:
            end = self._buffer.find(b"\n", self._searched)
            if end < 0:
                self._searched = len(self._buffer)
                if len(self._buffer) > self._limit:
                    if self._skipping is None:
                        self._skipping = bytes(self._buffer[:_EDGE])
                    self.wasted += len(self._buffer) - _EDGE
                    del self._buffer[:-_EDGE]
                    self._searched = len(self._buffer)
                return out
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._searched = 0
            if self._skipping is not None or len(line) > self._limit:
                head = self._skipping if self._skipping is not None else line[:_EDGE]
                out.append(TooLong(_find_id(head, line[-_EDGE:]), self._limit))
                self._skipping = None
                self.wasted += len(line)
            elif line.strip():
                out.append(line)


def _find_id(head: bytes, tail: bytes) -> int | None:
    """Our ids are plain integers; look for one at either end of a message that is too long to parse."""
    first = _ID.search(head)
    if first is not None and head.find(b'"result"') in (-1, *range(first.end(), len(head))):
        return int(first.group(1))
    found = _ID.findall(tail)
    return int(found[-1]) if found else None


class _Complaints:
    """Lines that are not usable, on our log: one a second, however many there are."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._unsaid = 0
        self._last = float("-inf")

    def add(self, problem: object) -> None:
        now = anyio.current_time()
        if now - self._last < _COMPLAINT_SECONDS:
            self._unsaid += 1
            return
        more = f" (and {self._unsaid} before it)" if self._unsaid else ""
        log.warning("a line from server %s is not usable: %s%s", self._name, problem, more)
        self._unsaid = 0
        self._last = now


def _parse(line: bytes, complain: Callable[[object], None] = log.debug) -> JSONRPCMessage | None:
    try:
        value = read_message(line)
    except canonical.NotCanonical as exc:
        complain(exc)
        if exc.value is None and isinstance(exc, canonical.TooMuch):
            return _unusable(_find_id(line[:_EDGE], line[-_EDGE:]), str(exc))
        if not isinstance(exc.value, dict) or "method" in exc.value:
            return None
        return _unusable(exc.value.get("id"), str(exc))
    return to_message(value)


def to_message(value: Any) -> JSONRPCMessage | None:
    """A JSON-RPC message from parsed JSON, without copying its payload; None if it is none."""
    if not isinstance(value, dict) or value.get("jsonrpc") != "2.0":
        return None
    method = value.get("method")
    ident = value.get("id")
    params = value.get("params")
    if isinstance(ident, bool) or not isinstance(ident, int | str | None):
        return None
    if isinstance(method, str):
        if params is not None and not isinstance(params, dict):
            return None
        if ident is None:
            if method == "notifications/progress" and not _is_measurable(params or {}):
                return None
            return JSONRPCNotification(jsonrpc="2.0", method=method, params=params)
        return JSONRPCRequest(jsonrpc="2.0", id=ident, method=method, params=params)
    if ident is None:
        return None
    error = value.get("error")
    if error is not None and value.get("result") is not None:
        return _unusable(ident, "both a result and an error")
    if isinstance(value.get("result"), dict):
        return JSONRPCResponse.model_construct(jsonrpc="2.0", id=ident, result=value["result"])
    if isinstance(error, dict) and isinstance(error.get("code"), int) and isinstance(error.get("message"), str):
        data = ErrorData(code=error["code"], message=error["message"], data=error.get("data"))
        return JSONRPCError(jsonrpc="2.0", id=ident, error=data)
    return _unusable(ident, "neither a result object nor an error")


def _is_measurable(progress: Json) -> bool:
    """Whether the dispatcher can read it: it makes floats of numbers, and JSON has larger ones. One that it stumbles
    over would end the connection, with every call on it."""
    try:
        for name in ("progress", "total"):
            if isinstance(number := progress.get(name), int | float):
                float(number)
    except OverflowError:
        return False
    return True


async def _unasked(method: str, params: Json) -> Json:
    raise RpcError(METHOD_NOT_FOUND, f"{method} belongs to no call in progress")


class UnusableAnswer(JSONRPCError):
    """Stands for an answer that cannot be used, in our own words."""


def _unusable(request_id: Any, problem: str) -> UnusableAnswer | None:
    if isinstance(request_id, bool) or not isinstance(request_id, int | str):
        return None
    told = ErrorData(code=INTERNAL_ERROR, message=f"the server sent {problem}")
    return UnusableAnswer(jsonrpc="2.0", id=request_id, error=told)


def _error_of(answer: JSONRPCError) -> RpcError:
    told = answer.error
    if isinstance(answer, UnusableAnswer):
        return AnswerUnusable(told.message)
    return RpcError(told.code, told.message, told.data)


def _last_lines(text: str) -> tuple[str, ...]:
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return tuple(lines[-_MAX_LAST_LINES:])


async def _drain_stderr(server: Launched, name: str) -> None:
    """A server's stderr goes to our log, up to a rate; the rest is counted, never kept."""
    lines = _StderrLines(name)
    budget = _STDERR_BYTES_PER_SECOND
    window = anyio.current_time()
    try:
        while chunk := await server.receive("stderr"):
            now = anyio.current_time()
            if now - window > 1.0:
                lines.tell_dropped()
                budget = _STDERR_BYTES_PER_SECOND
                window = now
            if len(chunk) > budget:
                lines.drop(len(chunk))
            else:
                budget -= len(chunk)
                lines.add(chunk)
    finally:
        lines.end()


class _StderrLines:
    """What a server writes to its stderr, on our log by whole lines: secrets are looked for in one record at a time,
    and a part of one is not recognised."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = bytearray()
        self._torn = False
        """Whether the line that has begun lacks something, so that the rest of it is dropped, too."""
        self._dropped = 0

    def add(self, chunk: bytes) -> None:
        if self._torn:
            lost, end, chunk = chunk.partition(b"\n")
            self._dropped += len(lost)
            self._torn = not end
        whole, end, rest = chunk.rpartition(b"\n")
        if end:
            self._log(self._begun + whole)
            self._begun.clear()
        self._begun += rest
        if len(self._begun) > _LONGEST_STDERR_LINE:
            self.drop(0)

    def drop(self, size: int) -> None:
        """So many bytes are missing here."""
        self._dropped += len(self._begun) + size
        self._begun.clear()
        self._torn = True

    def tell_dropped(self) -> None:
        if self._dropped:
            log.warning("server %s: %d bytes of stderr dropped", self._name, self._dropped)
            self._dropped = 0

    def end(self) -> None:
        self._log(self._begun)

    def _log(self, data: bytes | bytearray) -> None:
        for line in data.split(b"\n"):
            if len(line) > _LONGEST_STDERR_LINE:
                self._dropped += len(line)
                continue
            for part in line.decode("utf-8", "replace").splitlines():
                log.info("server %s: %s", self._name, part.rstrip())
