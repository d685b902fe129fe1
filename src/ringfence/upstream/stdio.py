"""The link to a server that we started and that speaks lines of JSON.

The dispatcher of the MCP SDK matches answers with requests. The reading is our own: a server may hang, flood us, send a
line of 20 MB, garbage or nothing, and only the call that it was answering may fail by that.
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
_MAX_STDERR_LINE = 16_384
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
        """These three are those of the server that runs, once it does."""
        self.ending = ""
        self.hint = ""
        self.last_words: tuple[str, ...] = ()
        self.unowned: Callable[[str, Json], Awaitable[Json]] | None = None
        self._dispatcher: JSONRPCDispatcher[TransportContext] | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self._exchanges: list[InFlight] = []
        self._standing: InFlight | None = None
        """Gets the notifications that belong to no request."""
        self._next_id = 0
        self._open: set[str] = set()
        """Ids of requests that the server has not answered yet."""
        self._errors: dict[str, RpcError] = {}
        """Errors that the server answered with, by the id of the request, until that has ended."""

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
                await exchange.notify("notifications/progress", note)

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
            # Servers may send the codes that the dispatcher uses for its own errors, so the code does not tell whose
            # error it is. It is the server's if we have read it.
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
        """The request that a message of the server belongs to, which does not say so itself; None where that is not
        certain."""
        waiting = self._exchanges
        if len(waiting) == 1:
            return waiting[0]
        # Requests of one client may be confused without harm. Requests without a session may be of different clients.
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
            answer = await self._intake.answer_to(ask, method, dict(params or {}))
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
            await exchange.notify(method, dict(params or {}))

    async def run(self, ready: Callable[[], object], tell: Tell) -> None:
        self._standing = InFlight(ask=_no_such_request, tell=tell)
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
                    self._group = None
                    self._dispatcher = None  # from now on nothing can be sent
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
                    log.warning(
                        "server %s has read nothing for %g s, so it is stopped", self._spec.name, _STUCK_SECONDS
                    )
                    life.cancel()
                    return
                except OSError:
                    return  # `_read` sees the end of the process too, and ends every request
                if isinstance(item.message, JSONRPCResponse | JSONRPCError):
                    self._intake.answered(item.message.id)

    async def _read(self, server: Launched, out: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        """Turn lines into messages, with bounds on their length and rate. A bad line harms no other."""
        bad_lines = _BadLineLog(self._spec.name)
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
                            await self._take(line, bad_lines, out)
                except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                    return

    async def _take(
        self, line: bytes | TooLong, bad_lines: _BadLineLog, out: MemoryObjectSendStream[SessionMessage | Exception]
    ) -> None:
        if isinstance(line, bytes):
            message = await self._parsed(line, bad_lines)
            data = line
        else:
            message = _unusable_answer(line.request_id, line.problem)
            data = b""  # its bytes were charged as they were thrown away
        if message is None:
            await self._intake.notification(data)
        elif await self._admit(message, data):
            await out.send(SessionMessage(message))

    async def _parsed(self, line: bytes, bad_lines: _BadLineLog) -> JSONRPCMessage | None:
        if len(line) < LONG_BYTES:
            return _parse(line, bad_lines.add)
        problems: list[object] = []
        message = await self._intake.floods.in_thread(lambda: _parse(line, problems.append))
        for problem in problems:
            bad_lines.add(problem)
        return message

    async def _admit(self, message: JSONRPCMessage, data: bytes) -> bool:
        """Wait until the pace allows this message, and note which request it is or answers. Returns whether the
        dispatcher gets it."""
        if isinstance(message, JSONRPCRequest):
            await self._intake.question(data)
            return self._intake.admit_request(message.id)
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
        # An answer to no request of ours is dropped.
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
        """The begin of the line that is being thrown away."""
        self.wasted = 0
        """How many bytes were thrown away with the last chunk."""

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
    """The id of a message that is too long to parse, looked for at either end of it. Our ids are plain integers."""
    first = _ID.search(head)
    if first is not None and b'"result"' not in head[: first.end()]:
        return int(first.group(1))
    last = _ID.findall(tail)
    return int(last[-1]) if last else None


class _BadLineLog:
    """Logs lines that cannot be used, one a second, however many there are."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._unlogged = 0
        self._last = float("-inf")

    def add(self, problem: object) -> None:
        now = anyio.current_time()
        if now - self._last < _COMPLAINT_SECONDS:
            self._unlogged += 1
            return
        more = f" (and {self._unlogged} before it)" if self._unlogged else ""
        log.warning("a line of server %s cannot be used: %s%s", self._name, problem, more)
        self._unlogged = 0
        self._last = now


def _parse(line: bytes, report: Callable[[object], None] = log.debug) -> JSONRPCMessage | None:
    try:
        value = read_message(line)
    except canonical.NotCanonical as exc:
        report(exc)
        if exc.value is None and isinstance(exc, canonical.TooMuch):
            return _unusable_answer(_find_id(line[:_EDGE], line[-_EDGE:]), str(exc))
        if not isinstance(exc.value, dict) or "method" in exc.value:
            return None
        return _unusable_answer(exc.value.get("id"), str(exc))
    return to_message(value)


def to_message(value: Any) -> JSONRPCMessage | None:
    """The JSON-RPC message in parsed JSON, whose payload is not copied; None if it is no message."""
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
        return _unusable_answer(ident, "both a result and an error")
    if isinstance(value.get("result"), dict):
        return JSONRPCResponse.model_construct(jsonrpc="2.0", id=ident, result=value["result"])
    if isinstance(error, dict) and isinstance(error.get("code"), int) and isinstance(error.get("message"), str):
        data = ErrorData(code=error["code"], message=error["message"], data=error.get("data"))
        return JSONRPCError(jsonrpc="2.0", id=ident, error=data)
    return _unusable_answer(ident, "neither a result object nor an error")


def _is_measurable(progress: Json) -> bool:
    """Whether the dispatcher can read the numbers: it converts them to floats, and JSON has larger ones. A number that
    it fails at would end the connection, with every call on it."""
    try:
        for name in ("progress", "total"):
            if isinstance(number := progress.get(name), int | float):
                float(number)
    except OverflowError:
        return False
    return True


async def _no_such_request(method: str, params: Json) -> Json:
    raise RpcError(METHOD_NOT_FOUND, f"{method} belongs to no call in progress")


class UnusableAnswer(JSONRPCError):
    """Stands for an answer that cannot be used, in our own words."""


def _unusable_answer(request_id: Any, problem: str) -> UnusableAnswer | None:
    if isinstance(request_id, bool) or not isinstance(request_id, int | str):
        return None
    error = ErrorData(code=INTERNAL_ERROR, message=f"the server sent {problem}")
    return UnusableAnswer(jsonrpc="2.0", id=request_id, error=error)


def _error_of(answer: JSONRPCError) -> RpcError:
    error = answer.error
    if isinstance(answer, UnusableAnswer):
        return AnswerUnusable(error.message)
    return RpcError(error.code, error.message, error.data)


def _last_lines(text: str) -> tuple[str, ...]:
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return tuple(lines[-_MAX_LAST_LINES:])


async def _drain_stderr(server: Launched, name: str) -> None:
    """Write a server's stderr to our log, up to a rate; the rest is counted and dropped."""
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
    """Writes a server's stderr to our log by whole lines: the log is searched for secrets record by record, and half a
    secret is not recognised."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = bytearray()
        self._torn = False
        """Whether a part of the current line was dropped, so that the rest of it must be, too."""
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
        if len(self._begun) > _MAX_STDERR_LINE:
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
            if len(line) > _MAX_STDERR_LINE:
                self._dropped += len(line)
                continue
            for part in line.decode("utf-8", "replace").splitlines():
                log.info("server %s: %s", self._name, part.rstrip())
