"""One HTTP request and its answer: plain where that is all, a stream once there is more to say."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.shared.exceptions import MCPError, NoBackChannelError

from ringfence.core.model import Json, Principal
from ringfence.front import http
from ringfence.front.http import HttpExchange, HttpSession, HttpSessions, encode, event
from ringfence.front.mcp import McpFront
from tests import tooling
from tests.faking import governed

pytestmark = pytest.mark.anyio


class Sent(list[Any]):
    """An ASGI `send` that keeps what it is given."""

    async def __call__(self, message: Any) -> None:
        self.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self if message["type"] == "http.response.body"]

    @property
    def heads(self) -> list[dict[bytes, bytes]]:
        return [dict(message["headers"]) for message in self if message["type"] == "http.response.start"]


class Asks:
    async def ask(self, exchange: HttpExchange, method: str, params: Mapping[str, Any] | None) -> Json:
        return {"asked": method}


def made(params: Any = None, asks: Any = None) -> tuple[HttpExchange, Sent]:
    sent = Sent()
    return HttpExchange(7, params, asks, sent), sent


async def test_a_call_that_just_ends_is_one_plain_answer() -> None:
    exchange, sent = made()
    exchange.headers.append((b"mcp-session-id", b"s"))
    await exchange.finish({"id": 7, "result": {"ü": 1}}, 200)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    body = '{"id":7,"result":{"ü":1}}'.encode()
    assert sent.heads == [
        {b"content-type": b"application/json", b"content-length": str(len(body)).encode(), b"mcp-session-id": b"s"}
    ]
    assert sent[1] == {"type": "http.response.body", "body": body, "more_body": False}


async def test_once_there_is_more_to_say_it_is_a_stream() -> None:
    exchange, sent = made({"_meta": {"progressToken": "t"}})
    await exchange.progress(1, 2, "half")
    await exchange.notify("notifications/message", {"level": "info"})
    await exchange.notify("notifications/x", None)
    await exchange.finish({"id": 7, "result": {}}, 404)
    assert len(sent.heads) == 1
    assert sent[0]["status"] == 200
    assert sent.heads[0][b"content-type"] == b"text/event-stream"
    told = [json.loads(body.split(b"data: ")[1]) for body in sent.bodies]
    assert told[0]["params"] == {"progressToken": "t", "progress": 1, "total": 2, "message": "half"}
    assert told[2] == {"jsonrpc": "2.0", "method": "notifications/x"}
    assert told[3] == {"id": 7, "result": {}}
    assert [message.get("more_body") for message in sent[1:]] == [True, True, True, False]


NO_TOKENS: list[Any] = [True, {}, "t" * 1001]


@pytest.mark.parametrize(
    "params",
    [None, [], {}, {"_meta": 1}, *({"_meta": {"progressToken": token}} for token in NO_TOKENS)],
)
async def test_progress_nobody_asked_for_is_not_told(params: Any) -> None:
    exchange, sent = made(params)
    await exchange.progress(1)
    assert sent == []


async def test_after_its_end_nothing_is_sent() -> None:
    exchange, sent = made({"_meta": {"progressToken": 1}}, Asks())
    assert exchange.can_send_request
    assert await exchange.send_raw_request("ping", None) == {"asked": "ping"}
    await exchange.finish({"id": 7}, 200)
    count = len(sent)
    await exchange.progress(1)
    await exchange.notify("x", {})
    await exchange.finish({"id": 7}, 200)
    assert len(sent) == count
    assert not exchange.can_send_request
    with pytest.raises(NoBackChannelError):
        await exchange.send_raw_request("ping", None)


async def test_without_a_session_nothing_can_be_asked() -> None:
    exchange, _ = made()
    assert not exchange.can_send_request
    with pytest.raises(NoBackChannelError):
        await exchange.send_raw_request("ping", None)


class Client:
    """An ASGI `receive` of a client that goes away when told to."""

    def __init__(self) -> None:
        self.gone = anyio.Event()

    async def __call__(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def test_a_silent_stream_is_pinged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PING_SECONDS", 0.05)
    exchange, sent = made()
    with exchange.attended(Client(), None):
        await tooling.until(lambda: len(sent.bodies) >= 2)
        await exchange.finish({"id": 7}, 200)
    await anyio.sleep(0.1)
    assert sent.bodies[:2] == [b": ping\r\n\r\n"] * 2
    assert sent.bodies[-1] == event({"id": 7}), "and nothing comes after the answer"


@pytest.mark.parametrize("era", ["modern", "handshake"])
async def test_a_client_that_goes_away_cancels_where_that_is_its_word_for_it(era: str) -> None:
    exchange, sent = made()
    client = Client()
    with anyio.CancelScope() as scope, exchange.attended(client, scope if era == "modern" else None):
        client.gone.set()
        await tooling.until(lambda: exchange._over)
        await anyio.sleep(0.05)
    assert scope.cancelled_caught == exchange.cancel_requested.is_set() == (era == "modern")
    await exchange.finish({"id": 7}, 200)
    assert sent == [], "nobody is there to read it"


async def test_going_away_after_the_answer_cancels_nothing() -> None:
    exchange, _ = made()
    client = Client()
    with anyio.CancelScope() as scope, exchange.attended(client, scope):
        await exchange.finish({"id": 7}, 200)
        client.gone.set()
        await anyio.sleep(0.02)
    assert not scope.cancel_called


texts = st.text(max_size=20)


@given(st.dictionaries(texts, st.none() | st.integers() | texts | st.lists(texts, max_size=3), max_size=4))
def test_an_event_is_one_line_of_data_whatever_it_holds(message: dict[str, Any]) -> None:
    raw = event(message)
    assert raw.count(b"\n") == 3
    assert raw.startswith(b"event: message\r\ndata: ")
    assert raw.endswith(b"\r\n\r\n")
    assert json.loads(encode(message).decode("utf-8")) == message


def test_an_id_that_utf8_has_not_is_answered_in_json() -> None:
    assert encode({"id": "\ud800é"}) == b'{"id":"\\ud800\\u00e9"}'


# ── Sessions of handshake-era clients: whose they are, what is under way in them, what they ar ──


ALICE, BOB = Principal("alice"), Principal("bob")


class NoPool:
    """No server has anything to say here."""

    def release(self, session: str) -> None:
        return None


@asynccontextmanager
async def fronted(folder: Path) -> AsyncIterator[HttpSessions]:
    async with governed(folder) as way, anyio.create_task_group() as group:
        front = McpFront(way.pipeline, NoPool(), group, "0")  # type: ignore[arg-type]
        made = HttpSessions(front)
        try:
            yield made
        finally:
            for session in list(made._sessions.values()):
                await session.close()
            front.close()
            group.cancel_scope.cancel()


def opened(made: HttpSessions, principal: Principal = ALICE) -> HttpSession:
    session = made.create(principal)
    assert session is not None
    made.keep(session)
    return session


class Browser:
    """An ASGI client with a standing stream."""

    def __init__(self) -> None:
        self.sent: list[Json] = []
        self.gone = anyio.Event()

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def told(self) -> list[Json]:
        bodies = [message.get("body", b"") for message in self.sent]
        return [json.loads(body.split(b"data: ")[1]) for body in bodies if b"data: " in body]


async def test_a_session_belongs_to_its_principal(tmp_path: Path) -> None:
    async with fronted(tmp_path) as made:
        session = opened(made)
        assert made.get(session.id, ALICE) is session
        assert made.get(session.id, BOB) is None
        assert made.get("guess", ALICE) is None
        assert len(session.id) == 32
        inbound = session.inbound("a fault")
        assert (inbound.principal, inbound.session, inbound.fault, inbound.origin) == (
            ALICE, session.id, "a fault", "mcp-http",
        )  # fmt: skip
        await made.end(session)
        assert made.get(session.id, ALICE) is None


async def test_there_are_only_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_SESSIONS", 2)
    async with fronted(tmp_path) as made:
        first, second = opened(made), opened(made)
        first.busy = second.busy = 1
        assert made.create(ALICE) is None
        await made.end(first)
        opened(made)


async def test_whoever_has_most_sessions_makes_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_SESSIONS", 4)
    async with fronted(tmp_path) as made:
        bob = opened(made, BOB)
        bob.last_used -= 100
        one, two, three = opened(made), opened(made), opened(made)
        one.busy = 1
        two.last_used -= 10
        three.last_used -= 20
        new = opened(made, BOB)
        assert [made.get(each.id, each.principal) is not None for each in (bob, one, two, three, new)] == [
            *(True, True, True),
            *(False, True),
        ], "of the one with most, the one that is not in use for longest"
        await tooling.until(lambda: three._outbox.statistics().open_send_streams == 0)


async def test_a_session_that_nobody_uses_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_sleep = anyio.sleep
    async with fronted(tmp_path) as made:
        idle, busy, used = opened(made), opened(made), opened(made)
        busy.busy = 1
        for each in (idle, busy, used):
            each.last_used -= http.IDLE_SECONDS + 1  # as if that much time had passed
        made.get(used.id, ALICE)
        monkeypatch.setattr(anyio, "sleep", lambda _: real_sleep(0.01))
        async with anyio.create_task_group() as group:
            group.start_soon(made.sweep)
            await tooling.until(lambda: idle.id not in made._sessions)
            await real_sleep(0.1)
            group.cancel_scope.cancel()
        assert [made.get(one.id, ALICE) is not None for one in (idle, busy, used)] == [False, True, True]


# ── questions ──


async def asked(session: HttpSession, reply: Json) -> Any:
    """What a question comes to when the client posts this in answer."""
    browser = Browser()
    exchange = HttpExchange(1, None, session, browser.send)
    out: list[Any] = []

    async def ask() -> None:
        try:
            out.append(await exchange.send_raw_request("elicitation/create", {"message": "Well?"}))
        except MCPError as exc:
            out.append(exc)

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await tooling.until(lambda: browser.told)
        (question,) = browser.told
        assert (question["method"], question["params"]) == ("elicitation/create", {"message": "Well?"})
        session.answered({"id": "nobody asked", "result": {}})
        session.answered({"id": question["id"], **reply})
        session.answered({"id": question["id"], "result": {"late": True}})
    assert session._questions == {}
    return out[0]


async def test_an_answer_finds_its_question(tmp_path: Path) -> None:
    async with fronted(tmp_path) as made:
        session = opened(made)
        assert await asked(session, {"result": {"action": "accept"}}) == {"action": "accept"}
        for reply, code in (
            ({"error": {"code": -1, "message": "no", "data": 5}}, -1),
            ({"error": {"code": "x"}}, -32603),
            ({"error": {}}, -32603),
            ({"result": 5}, -32603),
            ({}, -32603),
        ):
            error = await asked(session, reply)
            assert isinstance(error, MCPError)
            assert error.code == code
        with pytest.raises(NoBackChannelError):
            await session.send_raw_request("ping", None)


async def test_a_question_ends_with_the_stream_on_which_its_answer_was_to_be_waited_for(tmp_path: Path) -> None:
    async with fronted(tmp_path) as made:
        session, browser, client = opened(made), Browser(), Client()
        exchange = HttpExchange(1, None, session, browser.send)
        out: list[MCPError] = []

        async def ask() -> None:
            with pytest.raises(MCPError) as ended:
                await exchange.send_raw_request("elicitation/create", {"message": "Well?"})
            out.append(ended.value)

        with exchange.attended(client, None):
            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                group.start_soon(ask)
                await tooling.until(lambda: len(browser.told) == 2)
                client.gone.set()
        assert [str(each) for each in out] == ["it closed the stream of its call"] * 2
        assert (session._questions, exchange.to_tell) == ({}, set())


async def test_a_call_is_cancelled_by_its_own_id(tmp_path: Path) -> None:
    async with fronted(tmp_path) as made:
        session = opened(made)
        exchange = HttpExchange(5, None, session, Browser().send)
        scope = anyio.CancelScope()
        session.in_flight[5] = (scope, exchange)
        odd: list[Any] = [6, None, [], {}, "5"]
        for ident in odd:
            session.cancel(ident)
        assert not scope.cancel_called
        session.cancel(5)
        assert scope.cancel_called
        assert exchange.cancel_requested.is_set()


async def test_the_end_of_a_session_ends_what_is_under_way(tmp_path: Path) -> None:
    async with fronted(tmp_path) as made:
        session = opened(made)
        scope = anyio.CancelScope()
        session.in_flight[5] = (scope, HttpExchange(5, None, session, Browser().send))
        await made.end(session)
        assert scope.cancel_called
        await session.notify("notifications/x", {})  # and what comes too late is dropped


# ── what it is told unasked ──


async def test_the_standing_stream_carries_what_belongs_to_no_call(tmp_path: Path) -> None:
    async with fronted(tmp_path) as made:
        alice, bob = opened(made), opened(made, BOB)
        browser, other = Browser(), Browser()
        await made.tell(None, "notifications/tools/list_changed", {})
        async with anyio.create_task_group() as group:
            group.start_soon(alice.stream, browser.receive, browser.send)
            await tooling.until(lambda: browser.told)
            assert await alice.stream(other.receive, other.send) is False, "one stream a session"
            alice.watching.uris.add("doc:1")
            await made.tell(ALICE, "notifications/resources/updated", {"uri": "doc:1"})
            await made.tell(ALICE, "notifications/resources/updated", {"uri": "doc:2"})
            await made.tell(BOB, "notifications/resources/list_changed", {})
            await tooling.until(lambda: len(browser.told) == 2)
            browser.gone.set()
        assert [(note["method"], note.get("params")) for note in browser.told] == [
            ("notifications/tools/list_changed", None),
            ("notifications/resources/updated", {"uri": "doc:1"}),
        ]
        async with anyio.create_task_group() as group:
            group.start_soon(bob.stream, other.receive, other.send)
            await tooling.until(lambda: len(other.told) == 2)
            await made.end(bob)
        assert [note["method"] for note in other.told] == [
            "notifications/tools/list_changed", "notifications/resources/list_changed",
        ]  # fmt: skip
        assert other.sent[-1]["more_body"] is False


async def test_a_client_that_never_listens_loses_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_BACKLOG", 3)
    async with fronted(tmp_path) as made:
        session = opened(made)
        for number in range(10):
            await session.notify("notifications/x", {"n": number})
        browser = Browser()
        async with anyio.create_task_group() as group:
            group.start_soon(session.stream, browser.receive, browser.send)
            await tooling.until(lambda: len(browser.told) == 3)
            browser.gone.set()
        assert [note["params"]["n"] for note in browser.told] == [7, 8, 9]
