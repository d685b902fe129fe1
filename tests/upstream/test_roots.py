"""What a client tells of its folders, for servers that ask for it at no call's time."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from ringfence.errors import Refused
from ringfence.model import Json, Principal, Status
from ringfence.ports import UpstreamRequest
from ringfence.upstream import roots as roots_of_clients
from ringfence.upstream.link import RpcError
from ringfence.upstream.roots import CHANGED, Roots, first_told

pytestmark = pytest.mark.anyio

FIRST: Json = {"roots": [{"uri": "file:///a"}]}
SECOND: Json = {"roots": [{"uri": "file:///b"}]}


class Client:
    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.capabilities: Json = {"roots": {}}

    async def ask(self, questions: Any) -> Any:
        assert questions["roots"]["method"] == "roots/list"
        answer = self.answers.pop(0)
        if answer is None:
            raise Refused(Status.FAILED, "client_refused", "no")
        return {"roots": answer}

    async def notify(self, method: str, params: Json) -> None:
        return None


def call(client: Client, session: str | None = "mine") -> UpstreamRequest:
    return UpstreamRequest("desk", Principal("ann", "local"), "tools/call", {}, client, 5.0, session=session)


@pytest.mark.parametrize(
    ("client", "session", "capabilities", "told"),
    [
        (Client(FIRST), "mine", {"roots": {}}, FIRST),
        (Client(), None, {"roots": {}}, None),
        (Client(), "mine", {}, None),
        (Client(None), "mine", {"roots": {}}, None),
        (Client("nonsense"), "mine", {"roots": {}}, None),
    ],
)
async def test_only_a_client_of_its_own_is_asked(
    client: Client, session: str | None, capabilities: Json, told: Json | None
) -> None:
    roots = await first_told(call(client, session), capabilities)
    if told is None:
        with pytest.raises(RpcError, match="no call in progress"):
            roots.answer()
    else:
        assert roots.answer() == told


async def test_a_change_is_passed_on_with_the_next_call_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots_of_clients, "_HEAR_SECONDS", 60.0)  # however slow the server is
    roots = Roots(FIRST)
    told: list[Any] = []
    assert roots.answer() == FIRST

    async def notify(method: str, params: Json | None) -> None:
        told.append(method)
        group.start_soon(server)

    async def server() -> None:
        await anyio.sleep(0.01)
        told.append(roots.answer())

    async with anyio.create_task_group() as group:
        await roots.settle(call(Client()), notify)
        assert told == []
        roots.change()
        began = anyio.current_time()
        await roots.settle(call(Client(SECOND)), notify)
        # A timer may go off as much too early as the clock is coarse.
        assert told == [CHANGED, SECOND] and anyio.current_time() - began >= 0.049
        # A client that does not tell leaves what it told before.
        roots.change()
        await roots.settle(call(Client(None)), notify)
        assert told[2:] == [CHANGED, SECOND]


async def test_a_server_that_never_asked_is_told_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots_of_clients, "_HEAR_SECONDS", 600.0)
    roots = Roots(FIRST)
    told: list[Any] = []

    async def notify(method: str, params: Json | None) -> None:
        told.append(method)

    roots.change()
    with anyio.fail_after(60):
        await roots.settle(call(Client(SECOND)), notify)
    assert told == [CHANGED]
