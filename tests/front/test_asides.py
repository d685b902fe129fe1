"""Requests beside calls that reach a server: each goes the way of a call, or is answered here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.shared.exceptions import MCPError

from ringfence.core.model import Json, Principal, ServerSpec
from ringfence.front import mcp as mcp_front
from ringfence.front.inbound import ClientRequest, Inbound
from ringfence.front.mcp import McpFront
from tests import tooling
from tests.faking import Reply, Said, Way, governed
from tests.making import policy, rule

pytestmark = pytest.mark.anyio

ALICE = Principal("alice")
DOCS = ServerSpec("desk", url="http://127.0.0.1:9101/mcp", resources=("doc:*",))
PUBLIC, SECRET = "doc:public", "doc:secret"
NO_SECRET = rule("deny", id="no-secret", tool_patterns=("doc:secret",))


class Connected:
    """The part of a pool that only knows who is connected. It has no way to send anything."""

    def logging(self, principal: Principal) -> list[str]:
        return ["desk"]

    def release(self, session: str) -> None:
        return None


class Outbound:
    async def notify(self, method: str, params: Any) -> None:
        return None

    async def progress(self, *args: Any) -> None:
        return None


@asynccontextmanager
async def fronted(folder: Path, *rules: Any, replies: list[Reply] | None = None) -> AsyncIterator[tuple[McpFront, Way]]:
    said = Said(rules=rules, server=DOCS)
    async with governed(folder, said, replies or [{}]) as way, anyio.create_task_group() as group:
        front = McpFront(way.pipeline, Connected(), group, "0")  # type: ignore[arg-type]
        yield front, way
        front.close()
        group.cancel_scope.cancel()


def inbound() -> Inbound:
    made = Inbound(ALICE, "mcp-http", session="s1")
    made.outbound = Outbound()  # type: ignore[assignment]
    return made


async def ask(front: McpFront, method: str, by: Inbound | None = None, **params: Any) -> Json:
    return await front.answer(ClientRequest(method, params, "2025-11-25", by or inbound(), {}))


def told(way: Way) -> list[tuple[str, str, str, str]]:
    return [(r["call"]["kind"], r["call"]["method"], r["call"]["tool"], r["status"]) for r in way.finished()]


def sent(way: Way) -> list[tuple[str, Json]]:
    return [(request.method, request.params) for request in way.servers.requests]


async def test_a_subscription_is_a_call(tmp_path: Path) -> None:
    async with fronted(tmp_path, NO_SECRET) as (front, way):
        client = inbound()
        assert await ask(front, "resources/subscribe", client, uri=PUBLIC) == {}
        assert sent(way) == [("resources/subscribe", {"uri": PUBLIC})]
        with pytest.raises(MCPError, match="no-secret"):
            await ask(front, "resources/subscribe", client, uri=SECRET)
        with pytest.raises(MCPError):
            await ask(front, "resources/subscribe", client, uri="file:///etc/passwd")
        assert len(sent(way)) == 1
        assert client.watching.uris == {PUBLIC}
        assert await ask(front, "resources/unsubscribe", client, uri=PUBLIC) == {}
        assert sent(way)[1:] == [("resources/unsubscribe", {"uri": PUBLIC})]
        assert told(way) == [
            ("resource", "resources/subscribe", PUBLIC, "success"),
            ("resource", "resources/subscribe", SECRET, "denied"),
            ("resource", "resources/subscribe", "file:///etc/passwd", "validation_failure"),
            ("resource", "resources/unsubscribe", PUBLIC, "success"),
        ]


async def test_a_session_is_subscribed_to_a_bounded_number_of_resources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_front, "MAX_WATCHED", 2)
    async with fronted(tmp_path) as (front, _):
        client = inbound()
        for name in ("doc:a", "doc:b", "doc:a"):
            await ask(front, "resources/subscribe", client, uri=name)
        with pytest.raises(MCPError, match="can be subscribed to"):
            await ask(front, "resources/subscribe", client, uri="doc:c")
        await ask(front, "resources/unsubscribe", client, uri="doc:a")
        await ask(front, "resources/subscribe", client, uri="doc:c")


async def test_a_second_session_is_judged_too(tmp_path: Path) -> None:
    async with fronted(tmp_path) as (front, way):
        first, second = inbound(), inbound()
        await ask(front, "resources/subscribe", first, uri=PUBLIC)
        way.pipeline.rules = replace(way.pipeline.rules, policy=policy(rule("deny")))
        with pytest.raises(MCPError):
            await ask(front, "resources/subscribe", second, uri=PUBLIC)
        assert second.watching.uris == set()


async def test_a_subscription_is_compared_and_sent_in_one_form(tmp_path: Path) -> None:
    async with fronted(tmp_path) as (front, way):
        client = inbound()
        await ask(front, "resources/subscribe", client, uri="DOC:%61")
        assert (sent(way), client.watching.uris) == ([("resources/subscribe", {"uri": "doc:a"})], {"doc:a"})
        with pytest.raises(MCPError):
            await ask(front, "resources/subscribe", client, uri="doc:a/.\t./b")
        await ask(front, "resources/unsubscribe", client, uri="doc:a")
        assert client.watching.uris == set()


async def test_a_subscription_that_is_made_twice_at_the_same_time_is_ended(tmp_path: Path) -> None:
    async with fronted(tmp_path) as (front, way):
        client = inbound()
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(partial(ask, front, "resources/subscribe", client, uri=PUBLIC))
        assert (client.watching.uris, front._watchers) == ({PUBLIC}, {(ALICE.key, PUBLIC): 1})
        await front.ended("s1", ALICE, client.watching)
        assert told(way)[-1] == ("resource", "resources/unsubscribe", PUBLIC, "success")
        assert not front._watchers


async def test_a_subscription_that_outlives_its_session_is_ended(tmp_path: Path) -> None:
    begun, ended = anyio.Event(), anyio.Event()

    async def slow(request: Any) -> Json:
        begun.set()
        await ended.wait()
        return {}

    async with fronted(tmp_path, replies=[slow, {}]) as (front, way):
        client = inbound()
        async with anyio.create_task_group() as group:
            group.start_soon(partial(ask, front, "resources/subscribe", client, uri=PUBLIC))
            await begun.wait()
            await front.ended("s1", ALICE, client.watching)
            ended.set()
        assert [method for method, _ in sent(way)] == ["resources/subscribe", "resources/unsubscribe"]
        assert not front._watchers and not client.watching.uris


async def test_a_subscription_that_its_client_takes_back_is_ended(tmp_path: Path) -> None:
    begun = anyio.Event()

    async def endless(request: Any) -> Json:
        begun.set()
        await anyio.sleep_forever()
        return {}

    async with fronted(tmp_path, replies=[endless, {}]) as (front, way):
        async with anyio.create_task_group() as group:
            group.start_soon(partial(ask, front, "resources/subscribe", inbound(), uri=PUBLIC))
            await begun.wait()
            group.cancel_scope.cancel()
        assert [method for method, _ in sent(way)] == ["resources/subscribe", "resources/unsubscribe"]
        assert not front._watchers


async def test_no_person_is_asked_for_the_end_of_a_subscription(tmp_path: Path) -> None:
    async with fronted(tmp_path) as (front, way):
        client = inbound()
        await ask(front, "resources/subscribe", client, uri=PUBLIC)
        way.pipeline.rules = replace(way.pipeline.rules, policy=policy(rule("ask")))
        await front.ended("s1", ALICE, client.watching)
        assert told(way)[-1] == ("resource", "resources/unsubscribe", PUBLIC, "success")
        assert way.store.reader().approvals() == []
        with pytest.raises(MCPError, match="A person must approve"):
            await ask(front, "resources/subscribe", client, uri=PUBLIC)
        (question,) = way.store.reader().approvals()
        assert question.summary["method"] == "resources/subscribe", "a person sees that it is no read"


async def test_changes_are_heard_from_the_server_that_was_subscribed_at_alone(tmp_path: Path) -> None:
    async with fronted(tmp_path) as (front, _):
        client = inbound()
        assert not front.hears(ALICE, PUBLIC, "desk")
        await ask(front, "resources/subscribe", client, uri=PUBLIC)
        assert front.hears(ALICE, PUBLIC, "desk")
        assert not front.hears(ALICE, PUBLIC, "other") and not front.hears(Principal("bob"), PUBLIC, "desk")
        await ask(front, "resources/unsubscribe", client, uri=PUBLIC)
        assert not front.hears(ALICE, PUBLIC, "desk") and not front._watched_at


async def test_the_end_of_a_session_is_on_record_too(tmp_path: Path) -> None:
    async with fronted(tmp_path) as (front, way):
        client = inbound()
        await ask(front, "resources/subscribe", client, uri=PUBLIC)
        await front.ended("s1", ALICE, client.watching)
        assert told(way)[-1] == ("resource", "resources/unsubscribe", PUBLIC, "success")


async def test_a_log_level_is_a_call_to_each_server(tmp_path: Path) -> None:
    async with fronted(tmp_path) as (front, way):
        client = inbound()
        assert await ask(front, "logging/setLevel", client, level="error") == {}
        assert sent(way) == [("logging/setLevel", {"level": "error"})]
        assert told(way) == [("logging", "logging/setLevel", "logging/setLevel", "success")]
        with pytest.raises(MCPError):
            await ask(front, "logging/setLevel", client, level="loud; rm -rf")
        assert (len(sent(way)), client.log_level) == (1, ["error"])


@pytest.mark.parametrize("action", ["deny", "ask"])
async def test_a_log_level_that_policy_refuses_stays_here(action: str, tmp_path: Path) -> None:
    """A person is not bothered for it, and what the client hears is cut here anyway."""
    strict = rule(action, tool_patterns=("logging/.*",))
    async with fronted(tmp_path, strict) as (front, way):
        client = inbound()
        assert await ask(front, "logging/setLevel", client, level="error") == {}
        assert (sent(way), client.log_level) == ([], ["error"])
        assert [r["status"] for r in way.finished()] == ["denied"]
        assert way.store.reader().approvals() == []


@pytest.mark.parametrize(
    ("method", "key", "item"),
    [
        ("resources/list", "resources", {"uri": "doc:1", "name": "one"}),
        ("resources/templates/list", "resourceTemplates", {"uriTemplate": "doc:{id}", "name": "some"}),
    ],
)
async def test_a_listing_is_a_call_to_each_server(method: str, key: str, item: Json, tmp_path: Path) -> None:
    async with fronted(tmp_path, replies=[{key: [item, {"uri": "file:///etc"}, "text"]}]) as (front, way):
        assert await ask(front, method) == {key: [item]}
        assert sent(way) == [(method, {})]
        assert told(way) == [("listing", method, method, "success")]
        assert way.finished()[0]["call"]["origin"] == "mcp-http"


async def test_a_listing_that_policy_refuses_is_empty(tmp_path: Path) -> None:
    async with fronted(tmp_path, rule("deny", tool_patterns=("resources/list",))) as (front, way):
        assert await ask(front, "resources/list") == {"resources": []}
        assert (sent(way), told(way)[0][3]) == ([], "denied")


WITHDRAWN: dict[str, tuple[dict[str, Any], str, str]] = {
    "tools/call": ({"name": "echo", "arguments": {"text": "x"}}, "tool", "echo"),
    "resources/read": ({"uri": PUBLIC}, "resource", PUBLIC),
    "resources/subscribe": ({"uri": PUBLIC}, "resource", PUBLIC),
    "prompts/get": ({"name": "greet"}, "prompt", "greet"),
    "completion/complete": ({"ref": {"type": "ref/prompt", "name": "greet"}}, "completion", "greet"),
}


@pytest.mark.parametrize("method", WITHDRAWN)
async def test_a_call_that_is_taken_back_while_servers_start_is_on_record(tmp_path: Path, method: str) -> None:
    params, kind, named = WITHDRAWN[method]
    async with fronted(tmp_path) as (front, way):
        begun = anyio.Event()

        async def starting() -> None:
            begun.set()
            await anyio.sleep_forever()

        front.settled = starting
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: ask(front, method, **params))
            await begun.wait()
            group.cancel_scope.cancel()
        assert told(way) == [(kind, method, named, "killed")]
        assert (way.finished()[0]["reason_code"], sent(way)) == ("cancelled", [])


async def test_a_call_that_is_taken_back_while_it_runs_is_on_record_once(tmp_path: Path) -> None:
    async with fronted(tmp_path) as (front, way):
        way.servers.hold = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: ask(front, "resources/read", uri=PUBLIC))
            await tooling.until(lambda: way.servers.requests)
            group.cancel_scope.cancel()
        assert told(way) == [("resource", "resources/read", PUBLIC, "killed")]


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("prompts/get", {"name": "greet", "arguments": ["x"]}),
        ("prompts/get", {"name": "greet", "arguments": "x"}),
        ("prompts/get", {"name": "greet", "_meta": "x"}),
        ("prompts/get", {"name": "greet", "_meta": []}),
        ("resources/read", {"uri": PUBLIC, "inputResponses": 0}),
        ("resources/read", {"uri": PUBLIC, "inputResponses": ["x"]}),
    ],
)
async def test_what_is_no_object_is_refused_and_not_left_out(tmp_path: Path, method: str, params: Any) -> None:
    async with fronted(tmp_path) as (front, way):
        with pytest.raises(MCPError, match="must be an object"):
            await ask(front, method, **params)
        assert (way.finished()[0]["reason_code"], sent(way)) == ("bad_request", [])
