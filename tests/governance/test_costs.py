"""Cost units: what a call costs is spent from the budgets of its agent and of its tenant, or it does not begin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from ringfence import config
from ringfence.core.model import AgentSpec, CostBudget, Principal
from ringfence.governance import budget
from ringfence.governance.permission import Permissions
from tests.faking import Said, Way, contract, governed, rulebook

pytestmark = pytest.mark.anyio

YEAR = 31_536_000.0
"""A window that no test outlives."""
SAID = Said(contracts=(contract("echo", cost=3), contract("cheap"), contract("free", cost=0)))
EVERY = ("*",)
AGENTS = {
    "analyst": AgentSpec("analyst", "acme", capabilities=EVERY, budget=CostBudget(7, YEAR)),
    "other": AgentSpec("other", "acme", capabilities=EVERY),
    "third": AgentSpec("third", "beta", capabilities=EVERY),
}
ANALYST, OTHER, THIRD = (Principal(name, agent.tenant) for name, agent in AGENTS.items())


def budgeted(way: Way, **tenants: int) -> None:
    budgets = {name: CostBudget(units, YEAR) for name, units in tenants.items()}
    permissions = Permissions(AGENTS, "development", budgets=budgets)
    way.pipeline.rules = replace(rulebook(SAID, way.store), permissions=permissions)


async def spend(way: Way, who: Principal, *tools: str) -> list[str]:
    return [(await way.call(tool, {"n": number}, principal=who)).reason_code for number, tool in enumerate(tools)]


async def test_a_call_spends_what_its_capability_costs_until_too_little_is_left(tmp_path: Path) -> None:
    async with governed(tmp_path, SAID) as way:
        budgeted(way)
        codes = await spend(way, ANALYST, "echo", "echo", "echo", "cheap", "cheap", "free")
        assert codes == ["ok", "ok", "quota", "ok", "quota", "ok"]
        refused = await way.call("echo", {"last": 1}, principal=ANALYST)
        assert "The agent analyst may spend 7 units" in refused.text and "this call costs 3" in refused.text
        assert await spend(way, OTHER, "echo", "echo", "echo") == ["ok"] * 3
        assert len(way.servers.requests) == 7, "what was refused reached no server"


async def test_all_agents_of_a_tenant_spend_from_one_and_no_other_tenant_does(tmp_path: Path) -> None:
    async with governed(tmp_path, SAID) as way:
        budgeted(way, acme=6)
        assert await spend(way, OTHER, "echo") == ["ok"]
        assert await spend(way, ANALYST, "echo", "cheap") == ["ok", "quota"]
        assert await spend(way, OTHER, "cheap") == ["quota"]
        assert await spend(way, THIRD, "echo", "echo", "echo") == ["ok"] * 3


async def test_what_a_tenant_refuses_costs_the_agent_nothing(tmp_path: Path) -> None:
    async with governed(tmp_path, SAID) as way:
        budgeted(way, acme=0)
        assert await spend(way, ANALYST, "echo", "echo", "echo") == ["quota"] * 3
        budgeted(way)
        assert await spend(way, ANALYST, "echo", "echo") == ["ok", "ok"]


async def test_calls_at_once_spend_no_more_than_there_is(tmp_path: Path) -> None:
    async with governed(tmp_path, SAID) as way:
        budgeted(way)
        codes: list[str] = []

        async def one(number: int) -> None:
            codes.append((await way.call("cheap", {"n": number}, principal=ANALYST)).reason_code)

        async with anyio.create_task_group() as group:
            for number in range(12):
                group.start_soon(one, number)
        assert sorted(codes) == ["ok"] * 7 + ["quota"] * 5


async def test_what_was_spent_outlives_a_restart(tmp_path: Path) -> None:
    for expected in (["ok", "ok", "quota"], ["quota"]):
        async with governed(tmp_path, SAID) as way:
            budgeted(way)
            assert await spend(way, ANALYST, *["echo"] * len(expected)) == expected


def test_windows_begin_at_whole_multiples_and_sort_by_time() -> None:
    hour = CostBudget(1, 3600)
    assert budget.window(hour, 3599.9)[0] != budget.window(hour, 3600.0)[0] == budget.window(hour, 7199.9)[0]
    assert budget.window(hour, 0.0) == ("1970-01-01T00:00:00/3600", "1970-01-01 01:00:00 UTC")
    names = [budget.window(hour, at * 3600.0)[0] for at in range(50)]
    assert names == sorted(names)


def test_more_to_spend_or_a_lower_cost_loosens(tmp_path: Path) -> None:
    def load(agent: str, tenant: str, cost: int) -> config.Config:
        text = f"""
agents: {{a: {{capabilities: ["*"], tenant: acme, budget: {agent}}}}}
tenants: {{acme: {{budget: {tenant}}}}}
servers: {{s: {{url: "http://127.0.0.1:1/mcp"}}}}
capabilities: {{c: {{server: s, mode: read, cost: {cost}}}}}
"""
        return config.loads(text, file="f", base=tmp_path)

    less, more, other = "{units: 5, seconds: 60}", "{units: 6, seconds: 60}", "{units: 5, seconds: 61}"
    old = load(less, less, 2)
    assert old.agents["a"].budget == CostBudget(5, 60) and old.budgets == {"acme": CostBudget(5, 60)}
    assert config.loosens(old, load(less, less, 3)) == []
    for looser in (load(more, less, 2), load(other, less, 2), load(less, more, 2), load(less, other, 2)):
        assert len(config.loosens(old, looser)) == 1
    assert len(config.loosens(old, load(less, less, 1))) == 1
    assert len(config.loosens(old, load("null", "null", 2))) == 2
    assert config.loosens(load("null", "null", 2), old) == []
