"""Who the local user is: a person, and the agent that their programs are."""

from __future__ import annotations

import os

import pytest

from ringfence import identity
from ringfence.core.model import EVERY_ROLE, AgentSpec, Person, Principal

PEOPLE = {
    "alice": Person("alice", frozenset({"manager"}), os_user="al"),
    "bob": Person("bob", frozenset({"auditor"})),
}


AGENTS = {
    "analyst": AgentSpec("analyst", roles=frozenset({"reader"}), os_user="al"),
    "robot": AgentSpec("robot", tenant="acme", person="bob"),
}


def test_this_account_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert identity.os_user()
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    assert identity.os_user() == "uid-4000000"


def test_without_people_the_local_user_has_every_role() -> None:
    person = identity.person_of({}, "carol")
    assert person == Person("carol", EVERY_ROLE, "carol")
    assert person.holds(("manager", "auditor|director"))


def test_with_people_only_those_named_are_anybody() -> None:
    assert identity.person_of(PEOPLE, "al") == PEOPLE["alice"]
    assert identity.person_of(PEOPLE, "alice") is None, "the account counts, not the name"
    assert identity.person_of(PEOPLE, "bob") is None, "bob has no account here"


@pytest.mark.parametrize(("people", "user", "person"), [({}, "al", "al"), (PEOPLE, "al", "alice"), (PEOPLE, "x", "x")])
def test_the_local_agent_acts_for_whoever_runs_the_gateway(people: dict[str, Person], user: str, person: str) -> None:
    agent = identity.local_agent(people, user)
    assert (agent.agent, agent.person, agent.kind, agent.roles) == ("local", person, "agent", frozenset())


def test_a_declared_agent_is_the_one_that_names_the_account_or_that_was_named() -> None:
    analyst = Principal("analyst", "local", "alice", frozenset({"reader"}))
    assert identity.local_agent(PEOPLE, "al", AGENTS) == analyst
    assert identity.local_agent(PEOPLE, "al", AGENTS, "robot") == Principal("robot", "acme", "bob")
    assert identity.local_agent({}, "al", AGENTS).person is None, "without people: nobody is said to be behind it"


def test_who_is_none_of_the_declared_agents_is_the_local_one_that_may_call_nothing() -> None:
    for named in (None, "nobody"):
        found = identity.local_agent(PEOPLE, "x", AGENTS, named)
        assert found.agent == identity.LOCAL_AGENT and found.agent not in AGENTS


def test_nobody_acts_for_a_person_of_another_tenant() -> None:
    foreign = AgentSpec("foreign", tenant="acme", os_user="al")
    assert identity.as_principal(foreign, PEOPLE) == Principal("foreign", "acme")


def test_who_is_alone_here_answers_for_every_tenant_and_others_for_their_own() -> None:
    alone = identity.person_of({}, "carol")
    assert alone is not None and alone.answers_for("acme") and alone.answers_for("local")
    assert PEOPLE["alice"].answers_for("local") and not PEOPLE["alice"].answers_for("acme")
