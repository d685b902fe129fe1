"""Scenarios of the corpus, played through the way of a call: real rules and a real store, servers that answer as the
corpus says, and a person who agrees to everything but what a rule about data flow brings before them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ringfence.audit.keys import load_or_create
from ringfence.core import canonical
from ringfence.core.model import (
    EVERY_ROLE,
    Call,
    Contract,
    Definition,
    Json,
    Outcome,
    Person,
    Principal,
    ServerSpec,
    Status,
)
from ringfence.core.ports import UpstreamRequest
from ringfence.governance.approvals import Approvals, answer
from ringfence.governance.budget import Budget
from ringfence.governance.contract import Catalog, Schemas, build
from ringfence.governance.dispatch import Dispatcher, DispatchTargets
from ringfence.governance.guard import Guard
from ringfence.governance.permission import Permissions
from ringfence.governance.pipeline import Pipeline
from ringfence.governance.policy import PRESETS, Policy, of_flow
from ringfence.governance.rulebook import Rulebook
from ringfence.store import Store
from tests.dataflow.scenarios import Scenario, ScenarioStep, tools
from tests.faking import Client

PRESET = "strict"
FLOW_RULES = frozenset(rule.id for rule in PRESETS[PRESET] if of_flow(rule))


@cache
def contracts() -> Mapping[str, Contract]:
    """As an operator would declare the tools of the corpus."""
    made = {}
    for name, declared in tools().items():
        given = {key: value for key, value in declared.items() if key != "args"}
        built, problems = build(name, {"mode": "read", "server": name.partition(".")[0], **given})
        assert problems == [], (name, problems)
        made[name] = built
    return made


@dataclass(slots=True)
class _Table:
    """The servers: each call gets the answer of the step that makes it."""

    step: ScenarioStep | None = None

    async def request(self, request: UpstreamRequest) -> Json:
        assert self.step is not None
        return {"content": [{"type": "text", "text": self.step.back}]}

    async def definitions(self, server: str, principal: Principal) -> list[Definition]:
        return []

    def isolation(self, server: str, *, fresh: bool = False, box: tuple[Principal, str] | None = None) -> Json:
        return {"backend": "host", "level": "none", "protections": {}}


def _rulebook(store: Store) -> Rulebook:
    named = contracts()
    definitions = {}
    for name, each in named.items():
        body = {"name": name, "inputSchema": {"type": "object"}}
        assert each.server is not None
        definitions[each.server, name] = Definition(each.server, name, canonical.definition_digest(body), body)
    names = {str(each.server) for each in named.values()}
    return Rulebook(
        environment="production",
        catalog=Catalog(named, definitions, schemas=Schemas()),
        policy=Policy((), preset=PRESET, environment="production"),
        approvals=Approvals(store, {}, {}, wait_seconds=0.0),
        servers={name: ServerSpec(name, url="http://127.0.0.1:9101/mcp") for name in names},
        prompts={},
        implicit={},
        permissions=Permissions({}, "production"),
    )


@asynccontextmanager
async def _gateway(folder: Path, table: _Table) -> AsyncIterator[tuple[Pipeline, Store]]:
    store = Store.open(folder / "state", load_or_create(folder / "keys"))
    try:
        rules = _rulebook(store)
        dispatcher = Dispatcher(table, DispatchTargets(rules.servers, {}))
        yield Pipeline(store, rules, dispatcher, Guard(Schemas().result_problem), Budget()), store
    finally:
        await store.aclose()


async def _made(pipeline: Pipeline, store: Store, step: ScenarioStep) -> Outcome:
    """The call of a step; repeated once if a person agrees to it."""

    def call() -> Call:
        principal = Principal(step.agent, person="alice")
        return Call(canonical.new_id("call"), principal, step.tool, dict(step.arguments), session=step.session)

    outcome = await pipeline.handle(call(), Client())
    if outcome.status is not Status.APPROVAL_REQUIRED or FLOW_RULES.intersection(outcome.facts["rules"]):
        return outcome
    assert outcome.approval_id is not None
    answer(store, outcome.approval_id, Person("bob", EVERY_ROLE), approve=True)
    return await pipeline.handle(call(), Client())


async def play(folder: Path, scenario: Scenario) -> list[tuple[ScenarioStep, Outcome]]:
    """Every step, and how it ended: an attacker goes on after a refusal."""
    folder.mkdir()
    played: list[tuple[ScenarioStep, Outcome]] = []
    table = _Table()
    left = list(scenario.steps)
    while left:
        async with _gateway(folder, table) as (pipeline, store):
            while left:
                table.step = left.pop(0)
                played.append((table.step, await _made(pipeline, store, table.step)))
                if left and left[0].restart:
                    break
    return played


def succeeded(played: list[tuple[ScenarioStep, Outcome]]) -> bool:
    """Whether data reached the attacker."""
    return any(step.leak and outcome.ok for step, outcome in played)


def held_up(played: list[tuple[ScenarioStep, Outcome]]) -> list[str]:
    """The tools of the steps that were not carried out."""
    return [step.tool for step, outcome in played if not outcome.ok]
