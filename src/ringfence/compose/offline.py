"""What can be told of a configuration without running it: for verbs that explain and test it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ringfence import identity
from ringfence.compose.runs import own_contracts
from ringfence.config.settings import Config
from ringfence.core.model import Contract, Principal
from ringfence.governance.approvals import ApprovalTerms
from ringfence.governance.foresight import Foresight
from ringfence.governance.policy import Policy


def contracts_of(settings: Config) -> Mapping[str, Contract]:
    """Every contract in force: those of the file, and the built-in ones of our own tools."""
    return {**settings.contracts, **own_contracts(settings)}


def policy_of(settings: Config, environment: str | None = None) -> Policy:
    """The policy of a configuration, in its own environment or in another."""
    return Policy(
        settings.policy.rules,
        preset=settings.policy.preset,
        default=settings.policy.default,
        environment=environment or settings.environment,
    )


def foresight_of(settings: Config, environment: str | None = None) -> Foresight:
    """What a configuration would make of calls."""
    terms = ApprovalTerms(settings.approvals, settings.people)
    return Foresight(contracts_of(settings), settings.servers, policy_of(settings, environment), terms)


def principal_of(settings: Config, agent: str) -> Principal:
    """The agent of this name, as a call of it comes. Only the local user's agent can call yet; of any other nothing is
    declared, so it has no roles."""
    local = identity.local_agent(settings.people, identity.os_user())
    return local if agent == local.agent else Principal(agent)


class Environments:
    """Foresight by environment, made once for each."""

    def __init__(self, settings: Config) -> None:
        self._make = partial(foresight_of, settings)
        self._made: dict[str | None, Foresight] = {}

    def __call__(self, environment: str | None) -> Foresight:
        if environment not in self._made:
            self._made[environment] = self._make(environment)
        return self._made[environment]
