"""Who may call, by the configuration in force: agents and people by name, and by the accounts of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ringfence.core import system
from ringfence.core.model import AgentSpec, IssuedToken, Person, Principal, TokenClaims
from ringfence.identity.local import as_principal
from ringfence.identity.tokens import NotAdmitted


class Directory:
    """Never changes; a new configuration makes another."""

    def __init__(self, agents: Mapping[str, AgentSpec], people: Mapping[str, Person]) -> None:
        self._principals = {name: as_principal(agent, people) for name, agent in agents.items()}
        self._clients = {
            (agent.oidc_client, _subject(people, agent.person)): name
            for name, agent in agents.items()
            if agent.oidc_client is not None and (agent.person is None or _subject(people, agent.person) is not None)
        }
        accounts = ((system.user_id(agent.os_user), name) for name, agent in agents.items() if agent.os_user)
        self._accounts = {uid: self._principals[name] for uid, name in accounts if uid is not None}

    @property
    def tells_apart(self) -> bool:
        """Whether agents are declared, so that callers must say which they are."""
        return bool(self._principals)

    def agent(self, name: str) -> Principal | None:
        return self._principals.get(name)

    def of_account(self, uid: int | None) -> Principal | None:
        """The agent that programs of an account are."""
        return None if uid is None else self._accounts.get(uid)

    def of_claims(self, claims: TokenClaims) -> Principal:
        """The agent that a client of the identity provider is, for the user that it acts for. Raises NotAdmitted."""
        name = self._clients.get((claims.client, claims.subject))
        if name is None:
            whom = "for itself" if claims.subject is None else "for this user"
            text = f"no agent is declared for the client of this token when it acts {whom} (oidc_client, oidc_subject)"
            raise NotAdmitted(403, "unknown_agent", text)
        found = self._principals[name]
        return replace(found, roles=found.roles | claims.roles, scopes=claims.scopes)

    def holder(self, token: IssuedToken) -> Principal:
        """The agent that a token is for. Raises NotAdmitted where it is a person's, or nobody's any more."""
        if token.kind != "agent":
            text = "this token is a person's, and only agents make calls: ringfence token create --agent NAME"
            raise NotAdmitted(403, "person_token", text)
        found = self._principals.get(token.name)
        if found is None or found.tenant != token.tenant:
            text = f"the agent {token.name} of tenant {token.tenant}, whom this token is for, is not declared any more"
            raise NotAdmitted(403, "unknown_agent", text)
        return found


def _subject(people: Mapping[str, Person], name: str | None) -> str | None:
    person = people.get(name or "")
    return None if person is None else person.oidc_subject
