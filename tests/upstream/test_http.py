"""A server behind a URL: what its answers mean, however they arrive, and how much of them is taken."""

from __future__ import annotations

import errno
import json
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from ringfence.audit.explain import explain
from ringfence.core.errors import OutcomeUnknown, Refused, Unavailable
from ringfence.core.model import Json, Status
from ringfence.core.ports import UpstreamRequest
from ringfence.upstream import http
from ringfence.upstream.http import HttpLink, _Events
from ringfence.upstream.link import AnswerUnusable, InFlight, RpcError
from tests import tooling
from tests.faking import Said, Way, chunked, contract, governed

pytestmark = pytest.mark.anyio

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OLD = {"mcp-protocol-version": "2025-11-25"}

# ── Events ──

plain = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1, max_size=20)
pieces = st.lists(plain, min_size=1, max_size=3)


@given(st.lists(pieces, max_size=5), st.sampled_from([b"\n", b"\r\n"]), st.lists(st.integers(0, 300), max_size=15))
def test_events_are_the_same_however_they_arrive(events: list[list[str]], end: bytes, cuts: list[int]) -> None:
    data = b": a comment" + end + end
    for event in events:
        data += b"id: 1" + end + b"event: message" + end
        data += b"".join(b"data: " + piece.encode() + end for piece in event) + b"retry: 5" + end + end
    reader = _Events(10_000)
    read = [one for chunk in chunked(data, cuts) for one in reader.feed(chunk)]
    assert read == ["\n".join(event).encode() for event in events]


@pytest.mark.parametrize(
    ("data", "events"),
    [
        (b"data:x\n\n", [b"x"]),
        (b"data:  x\n\n", [b" x"]),
        (b"data\n\n", []),
        (b"data:\n\n", []),
        (b"data: \n\n", []),
        (b"\n\n\n", []),
        (b"data: x", []),
        (b"data: x\n", []),
        (b"data: x\n\ndata: y\n\n", [b"x", b"y"]),
        (b"datum: x\n\ndata: y\n\n", [b"y"]),
        (b"data: a\rb\n\n", [b"a\rb"]),
    ],
)
def test_events(data: bytes, events: list[bytes]) -> None:
    assert _Events(100).feed(data) == events


@pytest.mark.parametrize("data", [b"data: " + b"x" * 100, b"x" * 101, b"data: 12345678\n" * 10, b"data:\n" * 50])
def test_an_event_that_is_too_long_is_not_taken(data: bytes) -> None:
    for size in (1, 7, len(data)):
        reader = _Events(100)
        chunks = chunked(data, list(range(0, len(data), size)))
        with pytest.raises(RpcError, match="more than 100 bytes"):
            list(map(reader.feed, chunks))
        assert len(reader._buffer) + sum(map(len, reader._data)) <= 100 + len(data)


# ── A server ──


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/mcp", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        with anyio.CancelScope(shield=True):
            await runner.cleanup()


@asynccontextmanager
async def linked(url: str, told: list[tuple[str, Json]] | None = None) -> AsyncIterator[HttpLink]:
    link = HttpLink("far", url)
    ready = anyio.Event()

    async def tell(method: str, params: Json) -> None:
        if told is not None:
            told.append((method, params))

    async with anyio.create_task_group() as group:
        group.start_soon(link.run, ready.set, tell)
        await ready.wait()
        yield link
        group.cancel_scope.cancel()


def talk(ask: Any = None, told: list[tuple[str, Json]] | None = None) -> InFlight:
    async def tell(method: str, params: Json) -> None:
        if told is not None:
            told.append((method, params))

    return InFlight(ask=ask, tell=tell, headers=OLD)


async def nobody(method: str, params: Json) -> Any:
    return None


def answering(**more: Any) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return web.Response(status=405)
        asked = await request.json()
        given = dict(more)
        if given.pop("echo", False):
            given["text"] = json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": {"asked": asked}})
        return web.Response(**{"content_type": "application/json", **given})

    return handler


async def test_a_plain_answer() -> None:
    async with serving(answering(echo=True)) as url, linked(url) as link:
        asked = (await link.request("tools/call", {"name": "x", "_meta": {"a": 1}}, talk()))["asked"]
        assert asked["method"] == "tools/call"
        assert asked["params"] == {"name": "x", "_meta": {"a": 1, "progressToken": asked["id"]}}


ANSWERS: dict[str, tuple[dict[str, Any], type[Exception], str | int]] = {
    "an error": ({"text": '{"id": 1, "error": {"code": -32602, "message": "no", "data": 1}}'}, RpcError, -32602),
    "an error in a refusal": ({"status": 400, "text": '{"error": {"code": -32022}}'}, RpcError, -32022),
    "an error without a code": ({"text": '{"id": 1, "error": {"code": "x"}}'}, AnswerUnusable, -32001),
    "no JSON": ({"text": "{"}, AnswerUnusable, -32001),
    "a list": ({"text": "[]"}, AnswerUnusable, -32001),
    "duplicate keys": ({"text": '{"id": 1, "id": 1, "result": {}}'}, AnswerUnusable, -32001),
    "another id": ({"text": '{"id": 99, "result": {}}'}, AnswerUnusable, -32001),
    "no object": ({"text": '{"id": 1, "result": 5}'}, AnswerUnusable, -32001),
    "a page": ({"text": "<html>", "content_type": "text/html"}, AnswerUnusable, -32001),
    "too much": ({"text": '{"id": 1, "result": {"x": "' + "x" * 3000 + '"}}'}, AnswerUnusable, -32001),
    "bad gateway": ({"status": 502}, OutcomeUnknown, "server_error"),
    "internal error": ({"status": 500, "text": "{}"}, OutcomeUnknown, "server_error"),
    **{f"status {status}": ({"status": status}, OutcomeUnknown, "server_refused") for status in http._TURNED_AWAY},
    "a redirect": ({"status": 307, "headers": {"location": "http://127.0.0.1:1/"}}, OutcomeUnknown, "server_refused"),
}


@pytest.mark.parametrize("case", ANSWERS)
async def test_what_an_answer_means(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, kind, code = ANSWERS[case]
    monkeypatch.setattr(http, "MAX_MESSAGE_BYTES", 2000)
    monkeypatch.setattr(http._read_bounded, "__defaults__", (2000,))
    async with serving(answering(**given)) as url, linked(url) as link:
        with pytest.raises(kind) as raised:
            await link.request("tools/call", {}, talk())
    assert code == (raised.value.code if isinstance(raised.value, RpcError) else raised.value.reason_code)  # type: ignore[attr-defined]


async def test_nobody_there_is_unavailable() -> None:
    async with linked(f"http://127.0.0.1:{tooling.free_port()}/mcp") as link:
        with pytest.raises(Unavailable) as refused:
            await link.request("tools/call", {}, talk())
    assert refused.value.reason_code == "server_unreachable"
    with pytest.raises(Unavailable):
        await link.request("tools/call", {}, talk())


SECRET = b"s3cr3t-Value-0123456789abcdef"
OK = b"HTTP/1.1 200 OK\r\n"
STREAM = OK + b"content-type: text/event-stream\r\nconnection: close\r\n\r\nid: 1\nretry: 1\ndata:\n\n"
ODD = {
    "a long header": OK + b"x-echo: " + b"a" * 72 + SECRET + b"b" * 9000 + b"\r\n\r\n",
    "a long status": b"HTTP/1.1 200 " + b"a" * 72 + SECRET + b"b" * 9000 + b"\r\n\r\n",
    "no header": OK + b"a" * 72 + SECRET + b"\x01\r\n\r\n",
    "no status": b"HTTP/1.1 " + SECRET + b"\r\n\r\n",
    "no chunk": OK + b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n" + SECRET + b"\r\n",
    "no end": OK + b"x-echo: " + SECRET,
}


@pytest.mark.parametrize("first", [b"", STREAM], ids=["at once", "when it is resumed"])
@pytest.mark.parametrize("said", ODD.values(), ids=list(ODD))
async def test_no_words_of_a_library_tell_what_a_server_sent(
    said: bytes, first: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A library cuts what it quotes, and part of a secret is not recognised as one."""
    caplog.set_level("DEBUG")
    answers = [answer for answer in (first, said) if answer]

    async def answer(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(answers.pop(0) if len(answers) > 1 else answers[0])

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, answer)
        async with linked(f"http://127.0.0.1:{port}/mcp") as link:
            with pytest.raises(OutcomeUnknown) as lost:
                await link.request("tools/call", {}, talk())
            await link.notify("notifications/initialized", None)
        group.cancel_scope.cancel()
    assert lost.value.reason_code == "answer_lost"
    for told in (lost.value.message, caplog.text):
        assert SECRET.decode()[:8] not in told
        assert "aaaa" not in told


def test_why_a_server_was_not_reached_is_told_in_words_of_ours_or_the_systems() -> None:
    key: Any = None
    refused = aiohttp.ClientConnectorError(key, OSError(errno.ECONNREFUSED, "s3cr3t"))
    tls = aiohttp.ClientConnectorSSLError(key, ssl.SSLError(1, "s3cr3t"))
    unresolved = OSError("s3cr3t")
    unresolved.__cause__ = Unavailable("resolve", "far.example has no address")
    assert http.reason_of(refused) == os.strerror(errno.ECONNREFUSED)
    assert http.reason_of(aiohttp.ClientConnectorDNSError(key, unresolved)) == "far.example has no address"
    assert http.reason_of(tls) == "there is no TLS to be had with it"
    assert http.reason_of(Refused(Status.DENIED, "no", "our own words")) == "our own words"
    for kind in (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, aiohttp.ClientError, TimeoutError):
        assert "s3cr3t" not in http.reason_of(kind("s3cr3t"))


async def test_a_secret_that_can_stand_in_no_header_is_never_sent() -> None:
    async def credentials() -> dict[str, str]:
        return {"Authorization": "Bearer one\ntwo"}

    async with serving(answering(echo=True)) as url, linked(url) as link:
        link._credentials = credentials
        with pytest.raises(Unavailable, match="header Authorization"):
            await link.request("tools/call", {}, talk())
        await link.notify("notifications/x", None)


HALF = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{"


@pytest.mark.parametrize("said", [b"", HALF, b"garbage\r\n\r\n"])
async def test_a_connection_that_breaks_leaves_an_unknown_outcome(said: bytes) -> None:
    async def break_off(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            if said:
                await stream.send(said)

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, break_off)
        async with linked(f"http://127.0.0.1:{port}/mcp") as link:
            with pytest.raises(OutcomeUnknown) as lost:
                await link.request("tools/call", {}, talk())
        assert lost.value.reason_code == "answer_lost"
        group.cancel_scope.cancel()


def event(**message: Any) -> bytes:
    return b"data: " + json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n\n"


async def test_a_stream_tells_asks_and_answers() -> None:
    answers: list[Json] = []
    answered = anyio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return web.Response(status=405)
        asked = await request.json()
        if "method" not in asked:
            answers.append(asked)
            if len(answers) == 4:
                answered.set()
            return web.Response(status=202)
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        note = {"progressToken": asked["params"]["_meta"]["progressToken"], "progress": 1}
        await stream.write(event(method="notifications/progress", params=note))
        await stream.write(event(method=5) + event(method=[], id=9))
        for ident, method in enumerate(("ping", "elicitation/create", "sampling/createMessage", "roots/list")):
            await stream.write(event(id=f"q{ident}", method=method, params={"n": ident}))
        await answered.wait()
        await stream.write(event(id=asked["id"], result={"content": []}))
        return stream

    async def ask(method: str, params: Json) -> Json:
        if method == "sampling/createMessage":
            raise RpcError(-32600, "denied", {"why": 1})
        if method == "roots/list":
            raise Refused(Status.FAILED, "client_refused", "the client went away")
        return {"action": "accept", "n": params["n"]}

    told: list[tuple[str, Json]] = []
    async with serving(handler) as url, linked(url) as link:
        with anyio.fail_after(tooling.PATIENCE):
            assert await link.request("tools/call", {}, talk(ask, told)) == {"content": []}
        assert told == [("notifications/progress", {"progress": 1})]
        by_id = {answer["id"]: answer for answer in answers}
        assert by_id["q0"]["result"] == {}
        assert by_id["q1"]["result"] == {"action": "accept", "n": 1}
        assert by_id["q2"]["error"] == {"code": -32600, "message": "denied", "data": {"why": 1}}
        assert by_id["q3"]["error"]["code"] == -32603, "whatever the client says, the connection stays"
        with anyio.fail_after(tooling.PATIENCE):
            assert await link.request("tools/call", {}, talk(ask)) == {"content": []}


async def test_a_stream_that_ends_without_an_answer_is_lost() -> None:
    handler = answering(body=event(method="notifications/message"), content_type="text/event-stream")
    async with serving(handler) as url, linked(url) as link:
        with pytest.raises(OutcomeUnknown):
            await link.request("tools/call", {}, talk())


# ── Sessions ──


async def test_a_session_is_kept_told_of_cancelling_and_ended() -> None:
    seen: list[tuple[str, Any, Any]] = []
    forgotten = False
    scope = anyio.CancelScope()

    async def handler(request: web.Request) -> web.StreamResponse:
        asked = await request.json() if request.method == "POST" else {}
        seen.append((request.method, asked.get("method"), request.headers.get("mcp-session-id")))
        if request.method == "GET":
            return web.Response(body=event(method="notifications/tools/list_changed"), content_type="text/event-stream")
        if request.method == "DELETE" or "id" not in asked:
            return web.Response(status=202)
        if forgotten:
            return web.Response(status=404)
        if asked["method"] == "tools/call":
            scope.cancel()
            await anyio.sleep(600)
        headers = {"mcp-session-id": "s1"} if asked["method"] == "initialize" else {}
        return web.json_response({"id": asked["id"], "result": {}}, headers=headers)

    told: list[tuple[str, Json]] = []
    async with serving(handler) as url:
        async with linked(url, told) as link:
            await link.request("initialize", {}, talk())
            await link.notify("notifications/initialized", None, OLD)
            with scope:
                await link.request("tools/call", {}, talk())
            await tooling.until(lambda: told and ("POST", "notifications/cancelled", "s1") in seen)
            assert told[0] == ("notifications/tools/list_changed", {})
        assert ("POST", "notifications/cancelled", "s1") in seen
        assert seen[-1] == ("DELETE", None, "s1")

        async with linked(url) as link:
            await link.request("initialize", {}, talk())
            forgotten = True
            with pytest.raises(OutcomeUnknown) as refused:
                await link.request("tools/call", {}, talk())
            assert (refused.value.reason_code, refused.value.answered) == ("session_lost", 404)
            with anyio.fail_after(tooling.PATIENCE):
                while link._client is not None:
                    await anyio.sleep(0.01)


async def test_closing_the_stream_is_how_a_modern_call_is_cancelled() -> None:
    seen: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append((await request.json())["method"])
        scope.cancel()
        await anyio.sleep(600)
        return web.Response()

    scope = anyio.CancelScope()
    async with serving(handler) as url, linked(url) as link:
        with scope:
            await link.request(
                "tools/call", {}, InFlight(ask=nobody, tell=nobody, headers={"mcp-protocol-version": "2026-07-28"})
            )
        await anyio.sleep(0.1)
    assert seen == ["tools/call"]


# ── A status is the server's word alone ──


@asynccontextmanager
async def answered(
    folder: Path, status: int, session: bool = False, **said: Any
) -> AsyncIterator[tuple[Way, list[Json]]]:
    """The way of a call to a server that acts, and then answers this status and nothing else."""
    acted: list[Json] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked = await request.json() if request.method == "POST" else {}
        if asked.get("method") == "initialize":
            return web.json_response({"id": asked["id"], "result": {}}, headers={"mcp-session-id": "s1"})
        if asked.get("method") == "tools/call":
            acted.append(asked["params"])
        return web.Response(status=status, headers={"location": "http://127.0.0.1:1/"} if status < 400 else {})

    async with serving(handler) as url, linked(url) as link:
        if session:
            await link.request("initialize", {}, talk())

        async def asked(request: UpstreamRequest) -> Json:
            return await link.request(request.method, request.params, talk())

        async with governed(folder, Said(contracts=(contract("echo", **said),)), [asked]) as way:
            yield way, acted


TURNED_AWAY = [(status, False) for status in (300, 301, 303, 304, 308, *http._TURNED_AWAY)] + [(404, True)]


@pytest.mark.parametrize(("status", "session"), TURNED_AWAY)
async def test_of_a_write_a_status_proves_nothing(tmp_path: Path, status: int, session: bool) -> None:
    async with answered(tmp_path, status, session, mode="write") as (way, acted):
        outcome = await way.call(idempotency_key="k", id="call_1")
        reason = "session_lost" if session else "server_refused"
        assert (outcome.status, outcome.reason_code) == (Status.UNKNOWN, reason)
        assert f"answered HTTP {status}" in outcome.message
        assert outcome.message.endswith("; whether it had an effect is not known")
        assert outcome.facts["effect"] == "unknown"
        assert outcome.facts["explanation"].startswith(f"the server answered HTTP {status} after ")
        assert outcome.facts["explanation"].endswith("; whether it took effect is unknown")
        said = explain([record.body for record in way.store.reader().records(call_id="call_1")])
        assert "never ran" not in said and "whether it changed anything outside is unknown" in said
        again = await way.call(idempotency_key="k")
        assert (again.status, again.reason_code) == (Status.UNKNOWN, "key_unknown")
        assert len(acted) == 1, "it may have run, so it is not run again"


@pytest.mark.parametrize("session", [False, True])
async def test_what_its_contract_lets_be_repeated_is_and_stays_unknown(tmp_path: Path, session: bool) -> None:
    async with answered(tmp_path, 404, session, mode="write", idempotent=True) as (way, acted):
        outcome = await way.call()
        assert (outcome.status, outcome.facts["effect"]) == (Status.UNKNOWN, "unknown")
        assert len(acted) == (1 if session else 3), "the link of a session that is lost is not used again"


async def test_a_read_that_was_turned_away_is_unavailable(tmp_path: Path) -> None:
    async with answered(tmp_path, 503) as (way, acted):
        outcome = await way.call()
        assert (outcome.status, outcome.reason_code) == (Status.UNAVAILABLE, "server_refused")
        assert (outcome.facts["effect"], len(acted)) == ("none", 3)
        assert outcome.facts["effect_basis"] == "declared"
        assert "it is declared a read" in outcome.facts["explanation"]


async def test_who_cannot_be_reached_again_was_reached_all_the_same() -> None:
    async def handler(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
            await stream.send(head + b"id: 1\nretry: 1\ndata:\n\n")
            await listener.aclose()  # which ends this, too

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)

    async def serve() -> None:
        try:
            await listener.serve(handler)
        except* anyio.ClosedResourceError:
            pass

    async with anyio.create_task_group() as group:
        group.start_soon(serve)
        async with linked(f"http://127.0.0.1:{port}/mcp") as link:
            with pytest.raises(OutcomeUnknown) as lost:
                await link.request("tools/call", {}, talk())
        assert lost.value.reason_code == "answer_lost" and os.strerror(errno.ECONNREFUSED) in lost.value.message
        group.cancel_scope.cancel()
