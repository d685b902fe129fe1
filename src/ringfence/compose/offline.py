"""What can be told of a configuration without running it: for verbs that explain and test it."""

from __future__ import annotations

from functools import partial

from ringfence import identity
from ringfence.compose.runs import NoServers, contracts_of, own_definitions, policy_of, provision
from ringfence.config.settings import Config
from ringfence.core.model import Contract, Principal
from ringfence.core.record import dataclass
from ringfence.governance.approvals import ApprovalTerms
from ringfence.governance.contract import Catalog, Standing
from ringfence.governance.dispatch import Dispatcher, DispatchTargets
from ringfence.governance.foresight import Foresight
from ringfence.governance.permission import Permissions
from ringfence.store import PinRow, Reader
from ringfence.store.schema import DATABASE


def foresight_of(settings: Config, environment: str | None = None) -> Foresight:
    """What a configuration would make of calls."""
    terms = ApprovalTerms(settings.approvals, settings.people)
    return Foresight(contracts_of(settings), settings.servers, policy_of(settings, environment), terms)


def principal_of(settings: Config, agent: str) -> Principal:
    """The agent of this name, as a call of it comes. One that is not declared has no roles."""
    if agent in settings.agents:
        return identity.as_principal(settings.agents[agent], settings.people)
    local = identity.local_agent(settings.people, identity.os_user())
    return local if agent == local.agent else Principal(agent)


def permissions_of(settings: Config) -> Permissions:
    """What each agent may call at all."""
    return Permissions(settings.agents, settings.environment, settings.gateway.step_up, settings.budgets)


@dataclass(frozen=True, slots=True)
class AcceptedTools:
    """The accepted definitions of tools, as the state has them now."""

    rows: tuple[PinRow, ...] = ()

    def of(self, contract: Contract) -> bool:
        """Whether a definition of the contract's tool is accepted."""
        return any(
            row.definition.kind == "tool"
            and row.definition.name == contract.tool
            and contract.server in (None, row.definition.server)
            for row in self.rows
        )


def pins_of(settings: Config) -> AcceptedTools:
    """Read from the state folder, if there is one. Raises StoreError."""
    if not (settings.gateway.state / DATABASE).is_file():
        return AcceptedTools()
    reader = Reader.open(settings.gateway.state)
    try:
        return AcceptedTools(tuple(reader.accepted(settings.servers)))
    finally:
        reader.close()


def dispatcher_of(settings: Config) -> Dispatcher:
    """What would carry calls out, without any server or box behind it: for its checks alone."""
    return Dispatcher(NoServers(), DispatchTargets(settings.servers, settings.networks))


def catalog_of(settings: Config, pins: AcceptedTools) -> Catalog:
    """The capabilities with the definitions that are accepted. What servers show now is not known."""
    contracts = contracts_of(settings)
    tools = {(row.definition.server, row.definition.name): row for row in pins.rows if row.definition.kind == "tool"}
    return Catalog(
        contracts,
        {key: row.definition for key, row in tools.items()},
        own=own_definitions(contracts, provision(settings.sandbox), settings.networks),
        standing={key: Standing(row.by_person, row.bound) for key, row in tools.items()},
        unseen=settings.servers.keys() - {server for server, _ in tools},
    )


class Environments:
    """Foresight by environment, made once for each."""

    def __init__(self, settings: Config) -> None:
        self._make = partial(foresight_of, settings)
        self._made: dict[str | None, Foresight] = {}

    def __call__(self, environment: str | None) -> Foresight:
        if environment not in self._made:
            self._made[environment] = self._make(environment)
        return self._made[environment]
