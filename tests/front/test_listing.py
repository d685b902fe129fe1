"""What is offered: tools by their contracts, resources and prompts by their servers' lists, each under one name."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from ringfence.core import canonical
from ringfence.core.box import Limits
from ringfence.core.errors import Unavailable
from ringfence.core.model import AgentSpec, Definition, Json, Principal, ServerSpec
from ringfence.core.ports import UpstreamRequest
from ringfence.core.secret import Secret
from ringfence.front import entries
from ringfence.front.listing import Listing
from ringfence.governance.contract import Catalog, built_in
from ringfence.governance.dispatch import DispatchTargets
from ringfence.governance.permission import Permissions
from ringfence.governance.rulebook import Rulebook, implicit_contract
from ringfence.sandbox.tools.request import BoxContents, SessionLifetimes
from ringfence.sandbox.tools.toolkit import PROGRAMS
from ringfence.sandbox.tools.toolkit import definition as own_definition
from ringfence.secrets.redaction import TenantRedactor
from tests.faking import Said, contract, definition, governed, rulebook
from tests.making import rule
from tests.sandbox.tools.calling import LISTS

pytestmark = pytest.mark.anyio

ALICE, BOB = Principal("alice"), Principal("bob")
HEADER = {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}


class Lists:
    """The part of a pool that lists resources: by server, by principal, or not at all."""

    def __init__(self, **listed: Any) -> None:
        self.listed = listed
        self.asked = 0

    async def request(self, request: UpstreamRequest) -> Json:
        self.asked += 1
        assert request.method == "resources/list"
        found = self.listed.get(request.server, [])
        if isinstance(found, Exception):
            raise found
        items = found.get(request.principal.agent, []) if isinstance(found, dict) else found
        return {"resources": [{"name": "n", **item} for item in items]}


@asynccontextmanager
async def shelved(folder: Path, said: Said, lists: Lists | None = None) -> AsyncIterator[Any]:
    async with governed(folder, said) as way:
        way.servers.replies = [(lists or Lists()).request]
        way.pipeline._dispatcher.targets = DispatchTargets({name: ServerSpec(name) for name in "abc"}, {})
        yield Listing(way.pipeline), way


def prompt(server: str, name: str, **body: Any) -> Definition:
    whole = {"name": name, **body}
    return Definition(server, name, canonical.definition_digest(whole), whole, "prompt")


def swapped(rules: Rulebook, *specs: ServerSpec, prompts: tuple[Definition, ...] = ()) -> Rulebook:
    implicit = {spec.name: implicit_contract(spec) for spec in specs}
    known = {(p.server, p.name): p for p in prompts}
    return replace(rules, servers={spec.name: spec for spec in specs}, prompts=known, implicit=implicit)


async def test_a_tool_is_shown_under_its_contracts_name_and_otherwise_as_the_server_has_it(tmp_path: Path) -> None:
    own = definition("echo", description="own", outputSchema={"type": "object"}, **{"x-vendor": [1]})
    contracts = (
        contract("echo"),
        contract("talk", tool="echo", description="ours"),
        contract("part", tool="echo", result={"fields": ["a"]}),
        contract("production_only", tool="echo", environments=["production"]),
        contract("missing", tool="gone"),
    )
    async with shelved(tmp_path, Said(contracts=contracts, definitions=(own,))) as (shelf, way):
        rules = way.pipeline.rules
        way.pipeline.rules = replace(rules, catalog=type(rules.catalog)(
            {c.name: c for c in contracts}, {("desk", "echo"): own}
        ))  # fmt: skip
        tools = {tool["name"]: tool for tool in shelf.tools()}
    assert list(tools) == ["echo", "talk", "part"]
    assert tools["echo"] == own.body
    assert tools["talk"] == {**own.body, "name": "talk", "description": "ours"}
    assert "outputSchema" not in tools["part"], "what is left of the result is not what the server promises"
    assert own.body["name"] == "echo"


async def test_what_nobody_sees_in_a_definition_is_escaped(tmp_path: Path) -> None:
    hidden = "add\U000e0069\U000e0067 \u200bnow\ufe01"
    schema = {"type": "object", "properties": {f"to{hidden}": {"type": "string", "title": hidden}}}
    own = definition("echo", description=hidden, title=hidden, inputSchema=schema)
    async with shelved(tmp_path, Said(contracts=(contract("echo"),), definitions=(own,))) as (shelf, way):
        (tool,) = shelf.tools()
        rules = swapped(way.pipeline.rules, ServerSpec("desk", prompts=("*",)), prompts=(
            prompt("desk", "fine", description=hidden), prompt("desk", f"odd{hidden}")
        ))  # fmt: skip
        way.pipeline.rules = rules
        prompts = shelf.prompts()
    shown = r"add\u{e0069}\u{e0067} \u{200b}now\u{fe01}"
    assert (tool["description"], tool["title"]) == (shown, shown)
    assert tool["inputSchema"]["properties"] == {f"to{shown}": {"type": "string", "title": shown}}
    assert prompts == [{"name": "fine", "description": shown}]


async def test_a_definition_with_keys_that_would_look_the_same_is_not_offered(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a\u200b": {}, r"a\u{200b}": {}}}
    odd, fine = definition("odd", inputSchema=schema), definition("fine")
    said = Said(contracts=(contract("odd", tool="odd"), contract("fine", tool="fine")), definitions=(odd, fine))
    async with shelved(tmp_path, said) as (shelf, _):
        assert [tool["name"] for tool in shelf.tools()] == ["fine"]


async def test_a_new_rulebook_shows_at_once(tmp_path: Path) -> None:
    async with shelved(tmp_path, Said()) as (shelf, way):
        before = await shelf.digest()
        assert shelf.tools() is shelf.tools(), "made once per rulebook"
        way.pipeline.rules = rulebook(Said(contracts=(contract("echo"), contract("more"))), way.store)
        assert [tool["name"] for tool in shelf.tools()] == ["echo", "more"]
        changed = await shelf.digest()
        assert changed != before
        way.pipeline.rules = rulebook(Said(), way.store)
        assert await shelf.digest() == before


async def test_only_tools_that_want_headers_have_a_header_schema(tmp_path: Path) -> None:
    said = Said(contracts=(contract("echo"), contract("far")), definitions=(definition("far", inputSchema=HEADER),))
    async with shelved(tmp_path, said) as (shelf, _):
        assert shelf.header_schema("far") == HEADER
        assert shelf.header_schema("echo") is None
        assert shelf.header_schema("nobody") is None


async def test_a_prompt_whose_name_is_a_secret_is_not_offered(tmp_path: Path) -> None:
    secret = "s3cr3t-Tok3n-value-ABCDEFGH-9876543210"
    async with shelved(tmp_path, Said()) as (shelf, way):
        known_now = (Secret("token", secret),)
        way.pipeline._guard.redactor = TenantRedactor(lambda: known_now)
        known = (prompt("desk", "fine"), prompt("desk", f"leak-{secret}"), prompt("desk", "said", title=secret))
        way.pipeline.rules = swapped(way.pipeline.rules, ServerSpec("desk", prompts=("*",)), prompts=known)
        assert shelf.prompts() == [{"name": "fine"}, {"name": "said", "title": "[redacted]"}]
        assert shelf.prompt(f"leak-{secret}") is None


async def test_prompts_are_cleaned_once_beside_the_loop_and_again_when_there_is_a_new_secret(tmp_path: Path) -> None:
    async with shelved(tmp_path, Said()) as (shelf, way):
        looked: list[str] = []
        known_now: tuple[Secret, ...] = (Secret("token", "s3cr3t-Tok3n-value-ABCDEFGH-9876543210"),)

        class Watched(TenantRedactor):
            def matches(self, data: bytes) -> bool:
                looked.append(threading.current_thread().name)
                return super().matches(data)

        way.pipeline._guard.redactor = Watched(lambda: known_now)
        known = (prompt("desk", "one"), prompt("desk", "two", title="a-second-secret-0123456789"))
        way.pipeline.rules = swapped(way.pipeline.rules, ServerSpec("desk", prompts=("*",)), prompts=known)
        await shelf.prepare_prompts()
        seen = len(looked)
        assert seen and threading.main_thread().name not in looked
        assert [shelf.prompts()[1], shelf.prompt("two")] == [known[1].body, ("desk", "two")]
        await shelf.prepare_prompts()
        assert len(looked) == seen
        known_now = (*known_now, Secret("other", "a-second-secret-0123456789"))
        assert shelf.prompts()[1]["title"] == "[redacted]"


async def test_a_prompt_that_two_servers_have_is_preceded_by_its_servers_name(tmp_path: Path) -> None:
    async with shelved(tmp_path, Said()) as (shelf, way):
        a, b = ServerSpec("a", prompts=("greet", "only_*")), ServerSpec("b", prompts=("*",))
        prompts = (prompt("a", "greet"), prompt("a", "hidden"), prompt("a", "only_a", title="t"), prompt("b", "greet"))
        way.pipeline.rules = swapped(way.pipeline.rules, a, b, prompts=(*prompts, prompt("gone", "greet")))
        assert [one["name"] for one in shelf.prompts()] == ["a.greet", "only_a", "b.greet"]
        assert shelf.prompts()[1] == {"name": "only_a", "title": "t"}
        assert shelf.prompt("a.greet") == ("a", "greet")
        assert shelf.prompt("only_a") == ("a", "only_a")
        assert [shelf.prompt(name) for name in ("greet", "hidden", "gone.greet")] == [None, None, None]


@pytest.mark.parametrize("turned", [False, True])
async def test_no_server_takes_the_name_of_another_servers_prompt(tmp_path: Path, turned: bool) -> None:
    offers = {
        "desk": ("shared", "own"),
        "other": ("shared", "desk.shared", "desk.own", "desk.new", "plain.dots", "other.mine"),
        "other.more": ("shared",),
        "more": ("shared", "more.shared"),
    }
    expected = {
        **{"desk.shared": ("desk", "shared"), "own": ("desk", "own"), "other.shared": ("other", "shared")},
        **{f"other.desk.{name}": ("other", f"desk.{name}") for name in ("shared", "own", "new")},
        **{"plain.dots": ("other", "plain.dots"), "other.mine": ("other", "other.mine")},
        **{"other.more.shared": ("other.more", "shared"), "more.shared": ("more", "shared")},
        **{"more.more.shared": ("more", "more.shared")},
    }
    async with shelved(tmp_path, Said()) as (shelf, way):
        named = [prompt(server, name) for server, names in offers.items() for name in names]
        specs = [ServerSpec(server, prompts=("*",)) for server in offers]
        prompts = tuple(reversed(named)) if turned else tuple(named)
        way.pipeline.rules = swapped(way.pipeline.rules, *specs, prompts=prompts)
        assert {one["name"]: shelf.prompt(one["name"]) for one in shelf.prompts()} == expected


async def test_prompts_of_like_spelling_are_preceded_by_their_servers_names(tmp_path: Path) -> None:
    async with shelved(tmp_path, Said()) as (shelf, way):
        specs = [ServerSpec(server, prompts=("*",)) for server in ("desk", "other")]
        prompts = (
            *(prompt("desk", "review"), prompt("desk", "sum_up"), prompt("desk", "own")),
            *(prompt("other", "Review"), prompt("other", "sum-up"), prompt("other", "r\u0435view")),
            *(prompt("other", "Desk.own"), prompt("other", "ringfence.help"), prompt("other", "R1ngfence.help")),
        )
        way.pipeline.rules = swapped(way.pipeline.rules, *specs, prompts=prompts)
        assert [one["name"] for one in shelf.prompts()] == [
            *("desk.review", "desk.sum_up", "own"),
            *("other.Review", "other.sum-up", "other.r\u0435view"),
            *("other.Desk.own", "other.ringfence.help", "other.R1ngfence.help"),
        ]
        assert shelf.prompt("other.Review") == ("other", "Review")


async def test_a_resource_is_listed_by_the_server_that_it_is_read_from(tmp_path: Path) -> None:
    lists = Lists(a=[{"uri": "doc:1", "title": "a"}], b=[{"uri": "doc:1", "title": "b"}, {"uri": "doc:2"}])
    async with shelved(tmp_path, Said(), lists) as (shelf, way):
        specs = [ServerSpec(name, resources=("doc:*",)) for name in ("a", "b")]
        way.pipeline.rules = swapped(way.pipeline.rules, *specs)
        found = await shelf.resources(ALICE, templates=False)
        assert [(each["uri"], each.get("title")) for each in found] == [("doc:1", "a"), ("doc:2", None)]
        way.pipeline.rules = swapped(way.pipeline.rules, specs[1])
        found = await shelf.resources(ALICE, templates=False)
        assert [(each["uri"], each.get("title")) for each in found] == [("doc:1", "b"), ("doc:2", None)]


OURS = ("ringfence://session/a", "ringfence:other", "RINGFENCE:x", "r1ngfence:x", "ring-fence:x")


@pytest.mark.parametrize("uri", OURS)
async def test_what_is_in_our_scheme_or_looks_like_it_is_no_servers(tmp_path: Path, uri: str) -> None:
    async with shelved(tmp_path, Said(), Lists(a=[{"uri": uri}, {"uri": "fine:x"}])) as (shelf, way):
        way.pipeline.rules = swapped(way.pipeline.rules, ServerSpec("a", resources=("*",)))
        assert [each["uri"] for each in await shelf.resources(ALICE, templates=False)] == ["fine:x"]
        assert await shelf.resource_server(ALICE, uri) != "a"


async def test_a_prompt_whose_full_name_would_be_another_servers_is_not_offered(tmp_path: Path) -> None:
    async with shelved(tmp_path, Said()) as (shelf, way):
        specs = [ServerSpec(server, prompts=("*",)) for server in ("a", "a.b", "c")]
        prompts = (prompt("a", "b.x"), prompt("c", "b.x"), prompt("a.b", "x"), prompt("c", "x"))
        way.pipeline.rules = swapped(way.pipeline.rules, *specs, prompts=prompts)
        assert {one["name"] for one in shelf.prompts()} == {"c.b.x", "a.b.x", "c.x"}
        assert shelf.prompt("a.b.x") == ("a.b", "x")


async def test_resources_are_those_that_their_servers_list_allows(tmp_path: Path) -> None:
    lists = Lists(
        a=[{"uri": "doc:1", "x": 1}, {"uri": "secret:1"}, {"uri": 5}, {}, {"uri": "doc:../../etc"}],
        b=Unavailable("server_down", "down"),
        c=[{"uri": "doc:3"}],
    )
    async with shelved(tmp_path, Said(), lists) as (shelf, way):
        specs = [ServerSpec(name, resources=("doc:*",)) for name in ("a", "b")] + [ServerSpec("c")]
        way.pipeline.rules = swapped(way.pipeline.rules, *specs)
        assert await shelf.resources(ALICE, templates=False) == [{"name": "n", "uri": "doc:1", "x": 1}]


async def test_what_servers_list_is_checked_beside_the_loop_and_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: list[int] = []
    really = entries.as_listed

    def checked(*given: Any) -> Json:
        where.append(threading.get_ident())
        return really(*given)

    monkeypatch.setattr(entries, "as_listed", checked)
    turns: list[int] = []
    apart = anyio.to_thread.run_sync

    async def run_sync(work: Any, *given: Any, **how: Any) -> Any:
        before = len(where)
        done = await apart(work, *given, **how)
        turns.append(len(where) - before)
        return done

    monkeypatch.setattr(anyio.to_thread, "run_sync", run_sync)
    lists = Lists(a=[{"uri": f"doc:{number}"} for number in range(1_100)])
    async with shelved(tmp_path, Said(), lists) as (shelf, way):
        way.pipeline.rules = swapped(way.pipeline.rules, ServerSpec("a", resources=("doc:*",)))
        assert len(await shelf.resources(ALICE, templates=False)) == 1_100
    assert len(where) == 1_100 and threading.get_ident() not in where
    assert max(turns) <= 500, "others have a turn in between"


async def test_what_sessions_left_comes_after_the_servers_lists_and_is_nobody_elses(tmp_path: Path) -> None:
    own = "ringfence://session/box_1/output/a"
    async with shelved(tmp_path, Said(), Lists(a=[{"uri": "doc:1"}, {"uri": own}])) as (shelf, way):
        way.pipeline.rules = swapped(way.pipeline.rules, ServerSpec("a", resources=("*",)))
        found = [{"name": "n", "uri": "doc:1"}]
        assert await shelf.resources(ALICE, templates=False) == found, "no server can claim one of ours"
        shelf.has_sessions = lambda: True
        way.pipeline.rules = replace(way.pipeline.rules, implicit={**way.pipeline.rules.implicit, "ringfence": LISTS})
        assert await shelf.resources(ALICE, templates=False) == found, "others are listed where that is not available"
        assert [body["call"]["tool"] for body in way.finished()][-1] == "resources/list", "it is a call, on record"
        assert await shelf.resource_server(ALICE, own) == "ringfence"


async def test_one_that_lists_very_many_takes_over_nothing_of_another(tmp_path: Path) -> None:
    many = [{"uri": f"doc:{n}"} for n in range(1, 7_000)]
    async with shelved(tmp_path, Said(), Lists(a=[{"uri": "doc:1"}], b=many)) as (shelf, way):
        specs = [ServerSpec(name, resources=("doc:*",)) for name in ("a", "b")]
        way.pipeline.rules = swapped(way.pipeline.rules, *specs)
        for _ in range(2):
            await shelf.resources(ALICE, templates=False)
            assert await shelf.resource_server(ALICE, "doc:1") == "a"


async def test_only_tools_of_ours_take_a_session(tmp_path: Path) -> None:
    contracts = {tool: built_in(tool, 30) for tool in ("execute_python", "open_session", "read_file")}
    own = {name: own_definition(one, Limits(), BoxContents(), SessionLifetimes()) for name, one in contracts.items()}
    async with shelved(tmp_path, Said()) as (shelf, way):
        assert not shelf.takes_session("echo")
        way.pipeline.rules = replace(way.pipeline.rules, catalog=Catalog(contracts, {}, own=own))
        assert [name for name in contracts if shelf.takes_session(name)] == ["execute_python", "read_file"]


async def test_a_resource_belongs_to_the_only_server_that_may_have_it_or_to_the_one_that_lists_it(
    tmp_path: Path,
) -> None:
    lists = Lists(a={"alice": [{"uri": "doc:1"}]}, b={"alice": [{"uri": "doc:2"}], "bob": [{"uri": "doc:1"}]})
    async with shelved(tmp_path, Said(), lists) as (shelf, way):
        a, b = ServerSpec("a", resources=("doc:*", "own:*")), ServerSpec("b", resources=("doc:*",))
        way.pipeline.rules = swapped(way.pipeline.rules, a, b)
        assert await shelf.resource_server(ALICE, "own:1") == "a"
        assert await shelf.resource_server(ALICE, "other:1") is None
        assert lists.asked == 0, "no need to ask"
        assert [await shelf.resource_server(ALICE, uri) for uri in ("doc:1", "doc:2")] == ["a", "b"]
        assert await shelf.resource_server(BOB, "doc:1") == "b", "what another was shown is no matter"
        assert await shelf.resource_server(BOB, "doc:9") == "a"
        way.pipeline.rules = swapped(way.pipeline.rules, a)
        assert await shelf.resource_server(BOB, "doc:1") == "a", "nor is what is no longer there"


async def test_what_is_learnt_is_bounded(tmp_path: Path) -> None:
    async with shelved(tmp_path, Said()) as (shelf, _):
        for number in range(25_000):
            shelf._learn(ALICE, f"doc:{number}", "a")
        assert len(shelf._owners) <= 10_001


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (Said(preset="standard"), ["execute_python", "run_shell"]),
        (Said(preset="strict"), ["execute_python", "run_shell"]),
        (Said(preset="none"), []),
        (Said(preset="standard", rules=(rule("deny", tool_patterns=("run_.*",)),)), ["execute_python"]),
        (Said(preset="standard", rules=(rule("deny", when="call.origin == 'cli'"),)), ["execute_python", "run_shell"]),
    ],
)
async def test_a_tool_of_our_own_is_shown_where_policy_can_allow_it(
    tmp_path: Path, said: Said, shown: list[str]
) -> None:
    contracts = {tool: built_in(tool, 30) for tool in PROGRAMS}
    own = {name: own_definition(one, Limits(), BoxContents()) for name, one in contracts.items()}
    async with shelved(tmp_path, said) as (shelf, way):
        way.pipeline.rules = replace(way.pipeline.rules, catalog=Catalog(contracts, {}, own=own))
        assert [tool["name"] for tool in shelf.tools()] == shown
        assert all("Limits: 30 s, 256 MiB" in tool["description"] for tool in shelf.tools())


async def test_each_agent_is_shown_what_it_may_call_and_nothing_else(tmp_path: Path) -> None:
    names = ("search_docs", "create_ticket", "delete_all")
    said = Said(
        contracts=tuple(contract(name, tool="echo") for name in names),
        agents={
            "alice": AgentSpec("alice", capabilities=("search_*", "create_ticket"), prompts=("one",)),
            "bob": AgentSpec("bob", capabilities=("delete_all",), resources=("test://b/*",)),
        },
    )
    lists = Lists(a=[{"uri": "test://a/1"}, {"uri": "test://b/1"}])
    async with shelved(tmp_path, said, lists) as (shelf, way):
        spec = ServerSpec("a", resources=("test://*",), prompts=("*",))
        way.pipeline.rules = swapped(way.pipeline.rules, spec, prompts=(prompt("a", "one"), prompt("a", "two")))

        def shown(who: Principal) -> list[str]:
            return [tool["name"] for tool in shelf.tools(principal=who)]

        assert shown(ALICE) == ["search_docs", "create_ticket"] == shown(ALICE)
        assert shown(BOB) == ["delete_all"]
        assert shown(Principal("carol")) == [] == shown(Principal("alice", "acme"))
        assert [tool["name"] for tool in shelf.tools()] == list(names), "to the operator all of them are named"
        assert [each["name"] for each in shelf.prompts(principal=ALICE)] == ["one"]
        assert shelf.prompts(principal=BOB) == []
        assert await shelf.resources(ALICE, templates=False) == [] and lists.asked == 0
        assert [item["uri"] for item in await shelf.resources(BOB, templates=False)] == ["test://b/1"]
        before = await shelf.digest()
        fewer = {**said.agents, "bob": AgentSpec("bob")}
        way.pipeline.rules = replace(way.pipeline.rules, permissions=Permissions(fewer, "development"))
        assert shown(BOB) == [] and await shelf.digest() != before


async def test_a_rule_about_one_agent_takes_our_own_tool_off_its_list_alone(tmp_path: Path) -> None:
    own = {"run_shell": own_definition(built_in("run_shell", 1.0), Limits(), BoxContents())}
    everything = {name: AgentSpec(name, capabilities=("*",)) for name in ("alice", "bob")}
    said = Said(rules=(rule("deny", agents=("bob",), tool_patterns=("run_.*",)),), agents=everything)
    async with shelved(tmp_path, said) as (shelf, way):
        catalog = Catalog({"run_shell": built_in("run_shell", 1.0)}, {}, own=own)
        way.pipeline.rules = replace(way.pipeline.rules, catalog=catalog)
        assert [tool["name"] for tool in shelf.tools(principal=ALICE)] == ["run_shell"]
        assert shelf.tools(principal=BOB) == []
