"""What a server asks of the client during a call: allowed, labelled, and put to the one whose call it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp.shared.exceptions import MCPError

from ringfence import config
from ringfence.audit.keys import load_or_create
from ringfence.core.model import EVERY_ROLE, Person
from ringfence.governance import approvals
from ringfence.store import Store
from tests import tooling
from tests.mcp import gateway
from tests.mcp.gateway import ERAS, JSON, MODERN, Gateway, RawHttp, about, text_of

pytestmark = pytest.mark.anyio
eras = pytest.mark.parametrize("mode", ERAS)
upstreams = pytest.mark.parametrize("upstream", ["handshake", "modern"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, hostile_command: list[str]) -> Iterator[Gateway]:
    """For each revision a server that may ask, one that may not, and one that needs a person's leave to sample."""
    commands = {
        "handshake": hostile_command,
        "modern": tooling.fixture_command("everything_server.py", "--stdio", "--era", "modern"),
    }
    own_names = {
        "handshake": {"ask": "ask", "sample": "sample"},
        "modern": {"ask": "test_elicitation", "sample": "test_sampling"},
    }
    settings = {
        "free": {"elicitation": "ask", "sampling": "allow"},
        "mute": {"elicitation": "deny", "sampling": "deny"},
        "guarded": {"sampling": "ask"},
    }
    servers: dict[str, JSON] = {}
    contracts: dict[str, JSON] = {}
    for era, command in commands.items():
        for kind, allowed in settings.items():
            name = f"{era}-{kind}"
            servers[name] = {"command": command, "pins": "first_use", **allowed}
            for verb, tool in own_names[era].items():
                contract = {"transport": "mcp", "server": name, "tool": tool, "mode": "read", "timeout_seconds": 120}
                contracts[f"{era}-{kind}-{verb}"] = contract
    whole = gateway.configuration(servers, contracts, gateway={"approval_wait_seconds": 120})
    with gateway.serve(tmp_path_factory.mktemp("questions"), whole) as running:
        yield running


def accepted(name: str) -> types.ElicitResult:
    """An answer that fits what either server asks."""
    return types.ElicitResult(action="accept", content={"answer": name, "username": name, "email": "a@example.org"})


class Answers:
    """Both callbacks of a client: what it was asked, and what it says."""

    def __init__(self, name: str = "ann") -> None:
        self.name = name
        self.asked: list[str] = []
        self.sampled: list[types.CreateMessageRequestParams] = []

    async def elicit(self, context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        self.asked.append(params.message)
        return accepted(self.name)

    async def sample(self, context: Any, params: types.CreateMessageRequestParams) -> types.CreateMessageResult:
        self.sampled.append(params)
        content = types.TextContent(type="text", text=f"{self.name} says so")
        return types.CreateMessageResult(role="assistant", content=content, model="test")

    @property
    def options(self) -> JSON:
        return {"elicitation_callback": self.elicit, "sampling_callback": self.sample}


@eras
@upstreams
async def test_question_reaches_the_user_under_the_servers_name(served: Gateway, mode: str, upstream: str) -> None:
    answers = Answers()
    async with served.client(mode, **answers.options) as client:
        result = await client.call_tool(f"{upstream}-free-ask", {"message": "Who is there?"})
    assert answers.asked == [f"[{upstream}-free] Who is there?"]
    assert not result.is_error and "ann" in text_of(result)
    assert served.finished(about(result)["call_id"])["status"] == "success"


@upstreams
def test_question_carries_the_servers_name_for_programs(served: Gateway, upstream: str) -> None:
    with RawHttp(served) as raw:
        message = gateway.call(f"{upstream}-free-sample", {"prompt": "Hm?"})
        asked = raw.modern(message, {"sampling": {}}).json()["result"]
    assert asked["resultType"] == "input_required"
    (question,) = asked["inputRequests"].values()
    assert question["method"] == "sampling/createMessage"
    assert question["params"]["_meta"]["ringfence/server"] == f"{upstream}-free"


@eras
@upstreams
async def test_sampling_where_it_is_allowed(served: Gateway, mode: str, upstream: str) -> None:
    answers = Answers()
    async with served.client(mode, **answers.options) as client:
        result = await client.call_tool(f"{upstream}-free-sample", {"prompt": "Is it so?"})
    assert "ann says so" in text_of(result)
    assert [block.content.text for block in answers.sampled[0].messages] == ["Is it so?"]  # type: ignore[union-attr]


@eras
@upstreams
@pytest.mark.parametrize("verb", ["ask", "sample"])
async def test_denied_question_never_reaches_the_client(served: Gateway, mode: str, upstream: str, verb: str) -> None:
    answers = Answers()
    arguments = {"message": "Password?"} if verb == "ask" else {"prompt": "Password?"}
    async with served.client(mode, **answers.options) as client:
        if upstream == "modern":
            # It is told that the client cannot be asked, and says that it needs one that can.
            with pytest.raises(MCPError) as refused:
                await client.call_tool(f"modern-mute-{verb}", arguments)
            assert refused.value.error.code == types.MISSING_REQUIRED_CLIENT_CAPABILITY
        else:
            result = await client.call_tool(f"handshake-mute-{verb}", arguments)
            assert "is denied for server handshake-mute" in text_of(result)
    assert (answers.asked, answers.sampled) == ([], [])


@eras
async def test_client_that_offers_nothing_is_asked_nothing(served: Gateway, mode: str) -> None:
    async with served.client(mode) as client:
        result = await client.call_tool("handshake-free-ask", {"message": "Anybody?"})
        assert "the client does not support elicitation" in text_of(result)
        with pytest.raises(MCPError) as refused:
            await client.call_tool("modern-free-ask", {"message": "Anybody?"})
    assert refused.value.error.code == types.MISSING_REQUIRED_CLIENT_CAPABILITY


def answer_waiting(served: Gateway, tool: str, client: Answers, *, approve: bool) -> bool:
    """Answer the question that waits about this tool, as a person with a store of their own does; False if none."""
    store = Store.open(served.state, load_or_create(config.key_folder()))
    try:
        waiting = [asked for asked in store.reader().approvals() if asked.tool == tool]
        if waiting:
            assert client.sampled == [], "nothing is asked of the client before the person agrees"
            approvals.answer(store, waiting[0].id, Person("tester", EVERY_ROLE), approve=approve)
        return bool(waiting)
    finally:
        store.close()


@eras
@upstreams
@pytest.mark.parametrize("approve", [True, False], ids=["agreed", "refused"])
async def test_sampling_with_a_persons_leave(served: Gateway, mode: str, upstream: str, approve: bool) -> None:
    answers = Answers()
    tool = f"{upstream}-guarded:sampling/createMessage"
    ended: list[types.CallToolResult] = []
    async with served.client(mode, **answers.options) as client, anyio.create_task_group() as group:

        async def call() -> None:
            prompt = {"prompt": f"{mode} {approve}"}
            ended.append(await client.call_tool(f"{upstream}-guarded-sample", prompt))

        group.start_soon(call)
        with anyio.fail_after(tooling.PATIENCE):
            while not await anyio.to_thread.run_sync(lambda: answer_waiting(served, tool, answers, approve=approve)):
                await anyio.sleep(0.1)
    assert len(answers.sampled) == (1 if approve else 0)
    if approve:
        assert "ann says so" in text_of(ended[0])
    else:
        assert "ann says so" not in text_of(ended[0])


# ── whose question it was ─────────────────────────────────────────────────────────────────────────


@upstreams
@pytest.mark.parametrize("modes", [("legacy",) * 3, (MODERN,) * 3, ("legacy", MODERN)], ids=["2025", "2026", "mixed"])
async def test_each_client_gets_its_own_question(served: Gateway, upstream: str, modes: tuple[str, ...]) -> None:
    """All ask at once; nobody answers before everybody was asked."""
    everybody = anyio.Event()
    seen: dict[str, list[str]] = {}
    results: dict[str, str] = {}

    async def run(mode: str, name: str) -> None:
        async def elicit(context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
            seen.setdefault(name, []).append(params.message)
            if len(seen) == len(modes):
                everybody.set()
            await everybody.wait()
            return accepted(name)

        async with served.client(mode, elicitation_callback=elicit) as client:
            result = await client.call_tool(f"{upstream}-free-ask", {"message": f"Are you {name}?"})
            results[name] = text_of(result)

    with anyio.fail_after(tooling.PATIENCE):
        async with anyio.create_task_group() as group:
            for number, mode in enumerate(modes):
                group.start_soon(run, mode, f"client-{number}")
    for name, asked in seen.items():
        assert asked == [f"[{upstream}-free] Are you {name}?"]
        assert name in results[name]
        others = set(seen) - {name}
        assert not [other for other in others if other in results[name]]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"action": "accept"', b'"action": "decline", "action": "accept"'),
        (b'"answer": "x"', b'"answer": "x\xff"'),
        (b'"answer": "x"', b'"answer": NaN'),
        (b'"answer": "x"', b'"answer": ' + b"[" * 80 + b"]" * 80),
    ],
    ids=["key twice", "no UTF-8", "not a number", "depth"],
)
def test_answers_in_a_request_that_is_at_fault_are_not_given(served: Gateway, before: bytes, after: bytes) -> None:
    with RawHttp(served) as raw:
        first = gateway.modern(gateway.call("handshake-free-ask", {"message": "One?"}), {"elicitation": {}})
        headers = gateway.modern_headers(first)

        def send(message: bytes) -> JSON:
            return gateway.read_answer(raw.http.post(served.url, content=message, headers=headers))["result"]

        state = send(json.dumps(first).encode())["requestState"]
        answers = {"question": {"action": "accept", "content": {"answer": "x"}}}
        again = {**first, "params": {**first["params"], "inputResponses": answers, "requestState": state}}
        whole = json.dumps(again).encode()
        refused = about(send(whole.replace(before, after)))
        assert (refused["status"], refused["reason_code"]) == ("validation_failure", "bad_request")
        assert about(send(whole))["status"] == "success", "the call still waits for its answer"


def test_answers_to_another_principals_state_are_refused(served: Gateway) -> None:
    """A handle is good for its own request alone, once."""
    with RawHttp(served) as raw:
        first = gateway.call("handshake-free-ask", {"message": "One?"})
        state = raw.modern(first, {"elicitation": {}}).json()["result"]["requestState"]
        answers = {"question": {"action": "accept", "content": {"answer": "x"}}}

        def retry(message: JSON, handle: str) -> JSON:
            again = json.loads(json.dumps(message))
            again["params"] |= {"inputResponses": answers, "requestState": handle}
            return gateway.read_answer(raw.modern(again, {"elicitation": {}}))

        other = retry(gateway.call("handshake-free-ask", {"message": "Two?"}), state)
        assert other["error"]["code"] == types.INVALID_PARAMS
        assert retry(first, state + "x")["error"]["code"] == types.INVALID_PARAMS
        assert about(retry(first, state)["result"])["status"] == "success"
        assert retry(first, state)["error"]["code"] == types.INVALID_PARAMS
