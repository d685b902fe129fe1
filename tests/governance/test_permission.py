"""What an agent may call at all: what it names, in its environments, within its quota; nobody else calls anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from ringfence import identity
from ringfence.core.errors import Refused
from ringfence.core.model import Action as Act
from ringfence.core.model import AgentSpec, Person, Principal, Rate, Rule, ServerSpec, Status
from ringfence.governance.approvals import answer, find, objection
from ringfence.governance.permission import EVERYTHING, Permissions
from tests import tooling
from tests.faking import Said, contract, governed

pytestmark = pytest.mark.anyio

ANALYST, FOREIGN = Principal("analyst", person="alice"), Principal("analyst", "acme", "alice")
DESK = ServerSpec("desk", resources=("file:///*",), prompts=("*",))
SAID = Said(
    contracts=(contract("search_docs", tool="echo"), contract("delete_docs", tool="echo")),
    agents={
        "analyst": AgentSpec("analyst", capabilities=("search_*",), resources=("file:///open/*",), prompts=("hi",))
    },
    server=DESK,
)


def agents(**changed: Any) -> dict[str, AgentSpec]:
    return {"analyst": replace(SAID.agents["analyst"], **changed)}


async def test_an_agent_calls_what_it_names_and_a_refusal_is_on_record_with_its_reason(tmp_path: Path) -> None:
    async with governed(tmp_path, SAID) as way:
        assert (await way.call("search_docs")).ok
        refused = await way.call("delete_docs")
        assert (refused.status, refused.reason_code) == (Status.DENIED, "not_for_agent")
        assert "'analyst' may not call the tool 'delete_docs'" in refused.text
        record = next(each for each in way.finished() if each["status"] == "denied")
        assert (record["reason_code"], record["call"]["tool"]) == ("not_for_agent", "delete_docs")
        assert record["call"]["principal"]["agent"] == "analyst"
        assert len(way.servers.requests) == 1


async def test_a_name_that_is_nearly_right_is_told_from_what_the_agent_may_call(tmp_path: Path) -> None:
    async with governed(tmp_path, SAID) as way:
        invented = await way.call("serch_docs")
        assert (invented.reason_code, invented.text) == (
            "unknown_tool", "There is no tool 'serch_docs'. Did you mean 'search_docs'?"
        )  # fmt: skip
        assert (await way.call("delet_docs")).text == "There is no tool 'delet_docs'.", (
            "what it may not call is not named"
        )


@pytest.mark.parametrize(
    "who", [Principal("robot"), Principal("local"), FOREIGN, Principal("analyst", "other")], ids=lambda who: who.key
)
async def test_who_is_not_declared_or_of_another_tenant_calls_nothing(tmp_path: Path, who: Principal) -> None:
    async with governed(tmp_path, SAID) as way:
        for tool in ("search_docs", "delete_docs", "nothing"):
            refused = await way.call(tool, principal=who)
            assert (refused.status, refused.reason_code) == (Status.DENIED, "unknown_agent")
        read = await way.call(
            "file:///open/a", {"uri": "file:///open/a"}, kind="resource", server="desk", principal=who
        )
        assert read.reason_code == "unknown_agent"
        assert way.servers.requests == []


@pytest.mark.parametrize(
    ("kind", "name", "arguments", "allowed"),
    [
        ("resource", "file:///open/a", {"uri": "file:///open/a"}, True),
        ("resource", "file:///shut/a", {"uri": "file:///shut/a"}, False),
        ("resource", "file:///open/%2e%2e/shut/a", {"uri": "file:///open/%2e%2e/shut/a"}, False),
        ("prompt", "hi", {"name": "hi"}, True),
        ("prompt", "ho", {"name": "ho"}, False),
        (
            "completion",
            "hi",
            {"ref": {"type": "ref/prompt", "name": "hi"}, "argument": {"name": "a", "value": ""}},
            True,
        ),
        (
            "completion",
            "ho",
            {"ref": {"type": "ref/prompt", "name": "ho"}, "argument": {"name": "a", "value": ""}},
            False,
        ),
    ],
)
async def test_resources_prompts_and_completions_are_held_to_it_as_well(
    tmp_path: Path, kind: Any, name: str, arguments: dict[str, Any], allowed: bool
) -> None:
    async with governed(tmp_path, SAID) as way:
        outcome = await way.call(name, arguments, kind=kind, server="desk")
        # A prompt that was not accepted is refused for that, later.
        reached = outcome.reason_code in ("ok", "not_pinned")
        assert reached is allowed, outcome.text
        assert allowed or outcome.reason_code in ("not_for_agent", "unknown_resource")


async def test_a_subscription_can_be_ended_by_whoever_may_not_read_any_more(tmp_path: Path) -> None:
    async with governed(tmp_path, SAID) as way:
        asked = {"kind": "resource", "server": "desk"}
        uri = {"uri": "file:///shut/a"}
        begun = await way.call("file:///shut/a", uri, method="resources/subscribe", **asked)
        ended = await way.call("file:///shut/a", uri, method="resources/unsubscribe", **asked)
    assert (begun.reason_code, ended.reason_code) == ("not_for_agent", "ok")


async def test_a_server_is_not_asked_for_a_list_of_which_nothing_would_be_shown(tmp_path: Path) -> None:
    async with governed(tmp_path, replace(SAID, agents=agents(resources=()))) as way:
        found = await way.call("resources/list", kind="listing", server="desk", method="resources/list")
        assert found.reason_code == "not_for_agent" and way.servers.requests == []


async def test_an_agent_calls_nothing_in_an_environment_that_is_not_its_own(tmp_path: Path) -> None:
    said = replace(SAID, agents=agents(environments=("production",)))
    async with governed(tmp_path, said) as way:
        refused = await way.call("search_docs")
        assert refused.reason_code == "unknown_agent" and "in the environment 'development'" in refused.text
    async with governed(tmp_path / "there", replace(said, environment="production")) as way:
        assert (await way.call("search_docs")).ok


async def test_a_quota_is_of_all_its_calls_together_and_of_nobody_else(tmp_path: Path) -> None:
    both = {**agents(quota=Rate(per_day=2)), "robot": AgentSpec("robot", capabilities=("*",))}
    async with governed(tmp_path, replace(SAID, agents=both)) as way:
        codes = [(await way.call("search_docs", {"n": n})).reason_code for n in range(3)]
        assert codes == ["ok", "ok", "quota"]
        assert (await way.call("search_docs", principal=Principal("robot"))).ok


async def test_a_quota_of_a_minute_and_of_places(tmp_path: Path) -> None:
    said = replace(SAID, agents=agents(quota=Rate(per_minute=1), capabilities=("*",)))
    async with governed(tmp_path, said) as way:
        assert (await way.call("search_docs")).ok
        refused = await way.call("delete_docs")
        assert refused.reason_code == "throttled" and "the agent analyst is limited to 1 calls a minute" in refused.text
    async with governed(tmp_path / "places", replace(SAID, agents=agents(quota=Rate(concurrent=1)))) as way:
        way.servers.hold = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(way.call, "search_docs", {"n": 1})
            await tooling.until(lambda: way.servers.requests)
            assert "limited to 1 at a time" in (await way.call("search_docs", {"n": 2})).text
            way.servers.hold.set()
        way.servers.hold = None
        assert (await way.call("search_docs", {"n": 3})).ok, "the place was given back"


@pytest.mark.parametrize(
    "now", [{"capabilities": ()}, {"tenant": "acme"}, {"roles": frozenset({"other"})}, {"person": "bob"}, None], ids=str
)
async def test_a_call_that_waits_does_not_begin_once_its_agent_is_another(tmp_path: Path, now: Any) -> None:
    said = replace(SAID, rules=(Rule("ask", Act.ASK),), wait=30.0)
    async with governed(tmp_path, said) as way:
        outcomes: list[Any] = []

        async def call() -> None:
            outcomes.append(await way.call("search_docs", wait_seconds=30))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await tooling.until(lambda: way.store.reader().approvals())
            (asked,) = way.store.reader().approvals()
            later = {"other": AgentSpec("other")} if now is None else agents(**now)
            way.pipeline.rules = replace(way.pipeline.rules, permissions=Permissions(later, "development"))
            person = Person("carol", frozenset({"*"}))
            await anyio.to_thread.run_sync(lambda: answer(way.store, asked.id, person, approve=True))
        assert (outcomes[0].status, outcomes[0].reason_code) == (Status.DENIED, "rules_changed")
        assert way.servers.requests == []


async def test_a_person_answers_for_agents_of_their_own_tenant_alone(tmp_path: Path) -> None:
    people = {"alice": Person("alice", os_user=identity.os_user(), tenant="acme"), "bob": Person("bob")}
    said = replace(SAID, rules=(Rule("ask", Act.ASK),), people=people, agents=agents(tenant="acme"))
    async with governed(tmp_path, said) as way:
        asked = await way.call("search_docs", principal=Principal("analyst", "acme"))
        assert asked.approval_id is not None
        question = find(way.store, asked.approval_id)
        assert objection(question, people["bob"]) == "the agent that asks is of the tenant acme, and bob is not"
        with pytest.raises(Refused, match="of the tenant acme"):
            answer(way.store, question.id, people["bob"], approve=True)
        answer(way.store, question.id, people["alice"], approve=True)
        assert (await way.call("search_docs", principal=Principal("analyst", "acme"))).ok


async def test_an_answer_from_another_tenant_counts_for_nothing_even_if_it_was_written(tmp_path: Path) -> None:
    people = {"alice": Person("alice", tenant="acme")}
    said = replace(SAID, rules=(Rule("ask", Act.ASK),), people=people)
    async with governed(tmp_path, said) as way:
        asked = await way.call("search_docs")
        assert asked.approval_id is not None
        way.store.write_sync(lambda tx: tx.answer_approval(asked.approval_id or "", "alice", True, 0.0))
        refused = await way.call("search_docs")
        assert refused.reason_code == "approval_unproven" and "alice may not answer it" in refused.text


def test_without_agents_everything_is_left_to_contracts_and_policy() -> None:
    permission = EVERYTHING.of(Principal("anybody"))
    assert (
        permission.calls("x") and permission.reads("file:///a") and permission.uses("s", "p") and not permission.narrows
    )


def test_what_callers_invent_is_remembered_within_bounds() -> None:
    permission = Permissions(SAID.agents, "development").of(ANALYST)
    for number in range(5000):
        permission.calls(f"made_up_{number}")
    assert not permission.calls("x" * 10_000) and permission.calls("search_" + "x" * 10_000)
    assert len(permission._known) <= 4096


def test_a_prompt_is_named_with_or_without_its_server() -> None:
    named = Permissions(agents(prompts=("desk.hi",)), "development").of(ANALYST)
    assert named.uses("desk", "hi") and not named.uses("other", "hi")


def test_the_gateway_itself_is_no_agent() -> None:
    starts = Principal("system", kind="system")
    assert Permissions(SAID.agents, "development").of(starts).calls("anything")
