"""Calls, contracts and policies for tests, with as little said as possible."""

from __future__ import annotations

from typing import Any

from ringfence.core import canonical
from ringfence.core.model import Action, Call, Contract, Decision, Definition, Json, Mode, Principal, Rule
from ringfence.governance.policy import Policy

ANALYST = Principal(agent="analyst", roles=frozenset({"reader"}))
READ = Contract(name="search_docs", server="docs", tool="search_docs", mode=Mode.READ)
WRITE = Contract(name="create_ticket", server="helpdesk", tool="create_ticket", mode=Mode.WRITE)


def call(tool: str = "create_ticket", arguments: Json | None = None, **more: Any) -> Call:
    return Call(id="call_1", principal=more.pop("principal", ANALYST), tool=tool, arguments=arguments or {}, **more)


def definition(name: str = "create_ticket", server: str = "helpdesk", **body: Any) -> Definition:
    whole = {"name": name, "inputSchema": {"type": "object"}, **body}
    return Definition(server, name, canonical.definition_digest(whole), whole)


def rule(action: str, id: str = "r", **more: Any) -> Rule:
    return Rule(id=id, action=Action(action), **more)


def policy(*rules: Rule, preset: str = "none", **more: Any) -> Policy:
    return Policy(rules, preset=preset, environment=more.pop("environment", "development"), **more)


def decide(*rules: Rule, arguments: Json | None = None, contract: Contract = WRITE, **more: Any) -> Decision:
    return policy(*rules, **more).decide(call(contract.name, arguments), contract)
