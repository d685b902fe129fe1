"""The local user: the agent that programs of this account are, and the person behind it.

The caller over the gateway is an *agent*; only a *person* approves. On one machine both belong to one account, so
a caller on loopback must be of the gateway's own user; it is then the local agent. On Linux the kernel tells whose a
connection is; elsewhere a client proves it by knowing what only that user can read. Where the configuration declares
agents, the local user's programs are the agent that names this account, and else none.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from ringfence.audit.keys import kept
from ringfence.core import system
from ringfence.core.errors import StoreError
from ringfence.core.model import EVERY_ROLE, AgentSpec, Person, Principal

LOCAL_AGENT = "local"
TOKEN = "local-token"  # noqa: S105 - the name of its file
_MIN_TOKEN = 40


def os_user() -> str:
    """Name of the account that this process runs as."""
    return system.user_name()


def person_of(people: Mapping[str, Person], user: str) -> Person | None:
    """The person behind an account. Without `people:` the local user has every role."""
    if not people:
        return Person(name=user, roles=EVERY_ROLE, os_user=user)
    return next((p for p in people.values() if p.os_user == user), None)


def agent_of(agents: Mapping[str, AgentSpec], user: str) -> AgentSpec | None:
    """The agent that programs of an account are."""
    return next((agent for agent in agents.values() if agent.os_user == user), None)


def as_principal(agent: AgentSpec, people: Mapping[str, Person]) -> Principal:
    """A declared agent as the principal of its calls."""
    person = agent.person
    if person is None and agent.os_user is not None and people:
        behind = person_of(people, agent.os_user)
        person = behind.name if behind is not None and behind.tenant == agent.tenant else None
    return Principal(agent=agent.name, tenant=agent.tenant, person=person, roles=agent.roles)


def local_agent(
    people: Mapping[str, Person], user: str, agents: Mapping[str, AgentSpec] | None = None, named: str | None = None
) -> Principal:
    """The agent of the user who runs the gateway: the one that was named, or that names this account. Where agents are
    declared and none of them is, it may call nothing."""
    declared = None if not agents else agent_of(agents, user) if named is None else agents.get(named)
    if declared is not None:
        return as_principal(declared, people)
    person = person_of(people, user)
    return Principal(agent=LOCAL_AGENT, person=person.name if person is not None else user)


def local_token(folder: Path) -> str:
    """What a caller of our own user proves itself by where the kernel tells nothing: made once, for its owner to read.

    Raises StoreError for one that others can reach.
    """
    made = kept(folder, TOKEN, lambda: secrets.token_urlsafe(32).encode())
    if len(made) < _MIN_TOKEN or not made.isascii():
        raise StoreError(f"{folder / TOKEN} holds no token; remove it and start again")
    return made.decode("ascii").strip()


def known_token(folder: Path) -> str | None:
    """The token of this user, if there is one."""
    return local_token(folder) if (folder / TOKEN).exists() else None
