"""Calls that wait for answers of their clients, where others need the server: who gives way, and for whom."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import anyio.abc
import pytest

from ringfence.core.errors import OutcomeUnknown, Unavailable
from ringfence.core.model import Json, Principal, ServerSpec
from ringfence.core.ports import UpstreamRequest
from ringfence.upstream import pool
from tests import tooling
from tests.faking import OK, Client, far_end
from tests.upstream.test_pool import DESK, ELICITS, LODGER, Yard, yard

pytestmark = pytest.mark.anyio

FORM: Json = {"mode": "form", "message": "Who?", "requestedSchema": {"type": "object", "properties": {}}}


class Away(Client):
    """A client that answers when it is back."""

    def __init__(self) -> None:
        super().__init__(ELICITS, {"question": {"action": "decline"}})
        self.back = anyio.Event()
        self.ended = ""

    async def ask(self, questions: Any) -> Any:
        answers = await super().ask(questions)
        await self.back.wait()
        return answers


class Hall:
    """A pool of a few connections to a server that asks, and calls on it."""

    def __init__(self, made: Yard, group: anyio.abc.TaskGroup) -> None:
        self.made = made
        self.work = anyio.Event()
        self._group = group
        made.answer = far_end(tools_call=self._serve)

    async def _serve(self, params: Json, exchange: Any) -> Json:
        if params["arguments"].get("works"):
            await self.work.wait()
        elif params["arguments"].get("asks"):
            await exchange.ask("elicitation/create", FORM)
        return OK

    async def request(self, client: Client, agent: str, arguments: Json, **more: Any) -> Json:
        params = {"name": "echo", "arguments": arguments}
        asked = UpstreamRequest("desk", Principal(agent), "tools/call", params, client, 60.0, **more)
        return await self.made.pool.request(asked)

    async def _ending(self, client: Away, agent: str, arguments: Json, more: Json) -> None:
        try:
            await self.request(client, agent, arguments, **more)
            client.ended = "ok"
        except OutcomeUnknown as exc:
            client.ended = exc.reason_code

    async def waits(self, agent: str, **more: Any) -> Away:
        """A call that waits for its client."""
        client = Away()
        self._group.start_soon(self._ending, client, agent, {"asks": True}, more)
        await tooling.until(lambda: client.asked)
        return client

    async def works(self, agent: str, **more: Any) -> Away:
        """A call that its server works on."""
        client, before = Away(), self.calls
        self._group.start_soon(self._ending, client, agent, {"works": True}, more)
        await tooling.until(lambda: self.calls > before)
        return client

    @property
    def calls(self) -> int:
        return sum(wire.methods.count("tools/call") for wire in self.made.wires)

    async def passes(self, agent: str, **more: Any) -> None:
        """Another call gets its answer at once."""
        assert await self.request(Client(ELICITS), agent, {}, **more) == OK

    async def refused(self, agent: str, **more: Any) -> str:
        with pytest.raises(Unavailable) as refused:
            await self.request(Client(ELICITS), agent, {}, **more)
        return refused.value.reason_code

    async def ends(self, *clients: Away) -> list[str]:
        """How the calls end once their clients answer."""
        for client in clients:
            client.back.set()
        self.work.set()
        await tooling.until(lambda: all(client.ended for client in clients))
        return [client.ended for client in clients]


@asynccontextmanager
async def hall(monkeypatch: pytest.MonkeyPatch, spec: ServerSpec = DESK, most: int = 4) -> AsyncIterator[Hall]:
    monkeypatch.setattr(pool, "MAX_PER_SERVER", most)
    async with yard(monkeypatch, spec) as made, anyio.create_task_group() as group:
        yield Hall(made, group)
        group.cancel_scope.cancel()


MODES: dict[str, tuple[ServerSpec, list[Json]]] = {
    "without sessions": (DESK, [{}] * 4),
    "in sessions of clients": (DESK, [{"session": str(number)} for number in range(4)]),
    "on the host": (replace(DESK, placement="unsafe_host"), [{}] * 4),
    "in boxes of the agent": (LODGER, [{"box": f"box {number}"} for number in range(4)]),
    "in fresh boxes": (DESK, [{"fresh": True}] * 4),
}


@pytest.mark.parametrize("mode", MODES)
async def test_who_waits_with_all_connections_gives_one_to_another(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    spec, calls = MODES[mode]
    async with hall(monkeypatch, spec) as it:
        greedy = [await it.waits("greedy", **more) for more in calls]
        await it.passes("other", **({"box": "another"} if spec is LODGER else {}))
        await tooling.until(lambda: greedy[0].ended)
        assert [client.ended for client in greedy] == ["gave_way", "", "", ""], "the one that waited longest"
        assert await it.ends(*greedy[1:]) == ["ok", "ok", "ok"]
        assert [health.failures for health in it.made.pool._health.values() if health.failures] == []


async def test_the_one_with_the_most_gives_way_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hall(monkeypatch) as it:
        few = await it.waits("few")
        many = [await it.waits("many") for _ in range(3)]
        await it.passes("other")
        await tooling.until(lambda: many[0].ended)
        assert await it.ends(few, *many) == ["ok", "gave_way", "ok", "ok"]


async def test_who_has_no_more_than_its_share_gives_way_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hall(monkeypatch) as it:
        working = [await it.works("greedy") for _ in range(3)]
        modest = await it.waits("modest")
        assert await it.refused("other") == "server_busy"
        assert await it.refused("greedy") == "server_busy"
        assert await it.ends(modest, *working) == ["ok"] * 4


async def test_who_has_its_share_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hall(monkeypatch) as it:
        clients = [await it.waits(agent) for agent in ("a", "b", "a", "b")]
        assert [await it.refused(agent) for agent in ("a", "b")] == ["server_busy", "server_busy"]
        assert await it.ends(*clients) == ["ok"] * 4


async def test_clients_of_one_principal_have_shares_of_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hall(monkeypatch) as it:
        modest = await it.waits("a", session="modest")
        greedy = [await it.waits("a") for _ in range(3)]
        await it.passes("a", session="other")
        await tooling.until(lambda: greedy[0].ended)
        assert await it.ends(modest, *greedy) == ["ok", "gave_way", "ok", "ok"]


async def test_a_principal_below_its_share_does_not_pay_for_the_work_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hall(monkeypatch, most=8) as it:
        working = [await it.works("greedy") for _ in range(5)]
        modest = [await it.waits("modest") for _ in range(3)]
        assert await it.refused("modest", session="other") == "server_busy"
        assert await it.ends(*modest, *working) == ["ok"] * 8


async def test_a_shared_connection_is_not_given_up_while_a_call_on_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hall(monkeypatch) as it:
        waiting = [await it.waits("a", session=str(number)) for number in range(4)]
        working = await it.works("a", session="0")
        await it.passes("b")
        await tooling.until(lambda: waiting[1].ended)
        assert await it.ends(*waiting, working) == ["ok", "gave_way", "ok", "ok", "ok"]


async def test_all_calls_that_wait_on_a_shared_connection_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hall(monkeypatch) as it:
        shared = [await it.waits("a", session="0") for _ in range(2)]
        others = [await it.waits("a", session=str(number)) for number in range(1, 4)]
        await it.passes("b")
        await tooling.until(lambda: all(client.ended for client in shared))
        assert await it.ends(*shared, *others) == ["gave_way", "gave_way", "ok", "ok", "ok"]


async def test_a_call_that_was_cancelled_while_it_waited_does_not_make_another_give_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A question outlives its call where the server does not take it back."""
    async with hall(monkeypatch) as it:
        left = Away()
        async with anyio.create_task_group() as asking:

            async def aside(params: Json, exchange: Any) -> Json:
                if params["arguments"].get("asks"):
                    asking.start_soon(exchange.ask, "elicitation/create", FORM)
                    await anyio.sleep_forever()
                return await it._serve(params, exchange)

            it.made.answer = far_end(tools_call=aside)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(lambda: it.request(left, "a", {"asks": True}, session="0"))
                    await tooling.until(lambda: left.asked)
                    scope.cancel()
            clients = [await it.works("a", session=str(number)) for number in range(4)]
            assert await it.refused("b") == "server_busy"
            assert await it.ends(*clients) == ["ok"] * 4
            left.back.set()
