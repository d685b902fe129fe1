"""The channels back to a client: questions, progress, log lines, and a client that does not answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.shared.exceptions import MCPError, NoBackChannelError

from ringfence.core.errors import Refused
from ringfence.core.model import Call, Json, Principal, Status
from ringfence.front import inbound
from ringfence.front.inbound import LOG_LEVELS, ClientChannel, PausableChannel, Watching, loud_enough, wants

pytestmark = pytest.mark.anyio

FORM = {"method": "elicitation/create", "params": {"message": "Well?"}}


class Outbound:
    """The SDK's way back, as a list of what went over it."""

    def __init__(self, reply: Any = None) -> None:
        self.reply = reply
        self.sent: list[tuple[Any, ...]] = []

    async def send_raw_request(self, method: str, params: Mapping[str, Any] | None) -> Json:
        self.sent.append((method, params))
        if isinstance(self.reply, Exception):
            raise self.reply
        if self.reply is None:
            await anyio.sleep_forever()
        return dict(self.reply)

    async def notify(self, method: str, params: Any) -> None:
        self.sent.append((method, params))

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        self.sent.append(("progress", progress, total, message))


def channel(reply: Any = None, level: str | None = "info") -> tuple[ClientChannel, Outbound]:
    outbound = Outbound(reply)
    return ClientChannel(outbound, {"elicitation": {}}, level), outbound  # type: ignore[arg-type]


async def test_questions_are_requests_and_answers_come_by_key() -> None:
    client, outbound = channel({"action": "accept"})
    assert await client.ask({"a": FORM, "b": FORM}) == {"a": {"action": "accept"}, "b": {"action": "accept"}}
    assert outbound.sent == [(FORM["method"], FORM["params"])] * 2
    assert client.capabilities == {"elicitation": {}}


@pytest.mark.parametrize("reply", [MCPError(-32600, "no"), NoBackChannelError("x")], ids=str)
async def test_a_client_that_refuses_ends_the_question(reply: Exception) -> None:
    client, _ = channel(reply)
    with pytest.raises(Refused) as refused:
        await client.ask({"a": FORM})
    assert (refused.value.status, refused.value.reason_code) == (Status.FAILED, "client_refused")


async def test_a_client_that_went_away_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbound, "ANSWER_SECONDS", 0.05)
    client, _ = channel(None)
    with anyio.fail_after(60), pytest.raises(Refused, match="in time"):
        await client.ask({"a": FORM})


async def test_calls_that_wait_for_their_clients_are_bounded_in_number_and_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def call(session: str, size: int = 0) -> Call:
        return Call("call_1", Principal("p"), "t", {"x": [{}] * size}, session=session)

    monkeypatch.setattr(inbound, "MAX_PLACES", 4)
    monkeypatch.setattr(inbound, "MAX_WEIGHT", 10_000)
    places = inbound.WaitingForClients()
    held = [places.take(call("a")) for _ in range(3)]
    assert held[0] is not None and held[1] is not None and held[2] is None, "as many as are left for others"
    assert places.take(call("b")) is not None
    refusing = ClientChannel(Outbound(), {}, None, lambda: places.take(call("a")))  # type: ignore[arg-type]
    with pytest.raises(Refused, match="too many calls wait"):
        await refusing.ask({"a": FORM})
    held[0]()
    assert places.take(call("b", 1000)) is None, "it is too heavy"
    answered = ClientChannel(Outbound({"action": "accept"}), {}, None, lambda: places.take(call("c")))  # type: ignore[arg-type]
    for _ in range(10):
        await answered.ask({"a": FORM})
    assert places._calls.total() == 2, "what is answered waits no more"


async def test_progress_and_words_reach_the_client() -> None:
    client, outbound = channel(level="warning")
    await client.notify("notifications/progress", {"progress": 1, "total": 2, "message": "m"})
    await client.notify("notifications/message", {"level": "info", "data": "too quiet"})
    await client.notify("notifications/message", {"level": "error", "data": "loud"})
    await client.notify("notifications/other", {"x": 1})
    assert outbound.sent == [
        ("progress", 1, 2, "m"),
        ("notifications/message", {"level": "error", "data": "loud"}),
        ("notifications/other", {"x": 1}),
    ]


@given(st.sampled_from(LOG_LEVELS), st.sampled_from(LOG_LEVELS))
def test_a_line_is_loud_enough_from_its_level_up(level: str, wanted: str) -> None:
    assert loud_enough({"level": level}, wanted) == (LOG_LEVELS.index(level) >= LOG_LEVELS.index(wanted))


@pytest.mark.parametrize(
    ("level", "wanted"), [("info", None), (None, "info"), ("x", "info"), ("info", "x"), ([], "info")]
)
def test_what_has_no_level_or_was_not_asked_for_is_not_loud(level: Any, wanted: str | None) -> None:
    assert not loud_enough({"level": level}, wanted)


def test_a_session_is_told_only_what_it_wants() -> None:
    updated = "notifications/resources/updated"
    assert wants(updated, {"uri": "a"}, Watching({"a"}), "debug")
    assert not wants(updated, {"uri": "b"}, Watching({"a"}), "debug")
    assert not wants(updated, {}, Watching({"a"}), "debug")
    assert wants("notifications/tools/list_changed", {}, Watching(), "emergency")
    assert not wants("notifications/message", {"level": "info"}, Watching(), "error")


# ── pausing ──


async def test_a_question_waits_for_the_next_request() -> None:
    client = PausableChannel({"elicitation": {}})
    answers: list[Any] = []

    async def ask() -> None:
        answers.append(await client.ask({"a": FORM}))
        answers.append(await client.ask({"b": FORM}))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        for key in ("a", "b"):
            await client.moved.wait()
            assert client.questions == {key: FORM}
            client.answer({key: {"action": "accept"}})
            assert client.questions is None
            assert not client.moved.is_set()
    assert answers == [{"a": {"action": "accept"}}, {"b": {"action": "accept"}}]


async def test_between_two_requests_nothing_is_told() -> None:
    client = PausableChannel({})
    await client.notify("notifications/progress", {"progress": 1})
    outbound = Outbound()
    client.outbound, client.log_level = outbound, "info"  # type: ignore[assignment]
    await client.notify("notifications/progress", {"progress": 2})
    await client.notify("notifications/message", {"level": "debug"})
    await client.notify("notifications/message", {"level": "info"})
    assert outbound.sent == [("progress", 2, None, None), ("notifications/message", {"level": "info"})]
