"""One HTTP request and its answer: plain where that is all, a stream once there is more to say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.shared.exceptions import NoBackChannelError

from ringfence.front import exchange as exchanges
from ringfence.front.exchange import Exchange, encode, event
from ringfence.model import Json
from tests import tooling

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
    async def ask(self, exchange: Exchange, method: str, params: Mapping[str, Any] | None) -> Json:
        return {"asked": method}


def made(params: Any = None, asks: Any = None) -> tuple[Exchange, Sent]:
    sent = Sent()
    return Exchange(7, params, asks, sent), sent


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


@pytest.mark.parametrize(
    "params", [None, [], {}, {"_meta": 1}, {"_meta": {"progressToken": True}}, {"_meta": {"progressToken": {}}}]
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
    monkeypatch.setattr(exchanges, "PING_SECONDS", 0.05)
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
    assert json.loads(encode(message).decode("utf-8", "surrogatepass")) == message
