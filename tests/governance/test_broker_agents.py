"""Whose use of a secret it is: rules see the agent as it is declared now, and one that is not any more has nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence.audit.keys import load_or_create
from ringfence.core.brokering import OutboundRequest
from ringfence.core.errors import Refused
from ringfence.core.model import Action, AgentSpec, Rule, SecretSpec
from ringfence.core.ports import Access
from ringfence.governance.broker import PolicyJudge
from ringfence.governance.permission import Permissions
from ringfence.governance.policy import Policy
from ringfence.store import Store

pytestmark = pytest.mark.anyio

SPEC = SecretSpec("desk", "env", {"name": "X"}, hosts=("desk.example",), header="Authorization")
INTERNS = Rule("no-interns", Action.DENY, when='"intern" in agent.roles || agent.person == "mallory"')


@pytest.mark.parametrize(
    ("agent", "code"),
    [
        (AgentSpec("robot"), None),
        (AgentSpec("robot", roles=frozenset({"intern"})), "policy"),
        (AgentSpec("robot", person="mallory"), "policy"),
        (AgentSpec("robot", tenant="acme"), "unknown_agent"),
        (AgentSpec("other"), "unknown_agent"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
async def test_the_use_of_a_secret_is_judged_as_its_agents(tmp_path: Path, agent: AgentSpec, code: str | None) -> None:
    store = Store.open(tmp_path / "state", load_or_create(tmp_path / "keys"))
    policy = Policy([INTERNS], preset="permissive", environment="development")
    known = Permissions({agent.name: agent}, "development")
    judge = PolicyJudge(lambda: policy, store, lambda: known)
    asked = OutboundRequest("https", "desk.example", 443, "GET", "/", (), "r")
    access = Access(secrets=("desk",), tenant="local", agent="robot", capability="c", call_id="call_1")
    try:
        if code is None:
            await judge(SPEC, asked, access)
        else:
            with pytest.raises(Refused) as caught:
                await judge(SPEC, asked, access)
            assert caught.value.reason_code == code
        (record,) = [each.body for each in store.reader().records(kind="brokered")]
        assert (record["allowed"], record["principal"]["agent"]) == (code is None, "robot")
    finally:
        await store.aclose()
