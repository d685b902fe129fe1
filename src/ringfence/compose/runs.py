"""Runs of the local user: `ringfence run` and the SDK's boxes pass the same pipeline as an agent's calls.

The smaller half of the composition root: a store, a rulebook with our own tools, boxes. No servers and no front, so a
caller that only wants a box does not load them. `gateway` builds the whole gateway on top of it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence import identity
from ringfence.audit.signing import signing_key
from ringfence.compose.backends import boxes_stay, chosen_backend, level_of, make_backend, templates
from ringfence.compose.run_request import RunRequest
from ringfence.compose.secrets import ConfiguredSecrets, redacted_logs
from ringfence.config import paths
from ringfence.config.settings import (
    SANDBOX_NETWORK,
    Config,
    GatewaySettings,
    PolicySettings,
    SandboxSettings,
    sealed,
)
from ringfence.core import canonical
from ringfence.core.aio import finished, in_thread
from ringfence.core.box import MIB, Attached, Installs, Limits, OnOutput
from ringfence.core.errors import Refused, StoreError, Unavailable
from ringfence.core.model import (
    Call,
    Contract,
    Definition,
    Json,
    NetworkSpec,
    Origin,
    Outcome,
    Principal,
    Status,
    Transport,
)
from ringfence.core.ports import Channel, PackageInstaller, UpstreamRequest
from ringfence.core.record import dataclass
from ringfence.governance.approvals import Approvals
from ringfence.governance.budget import Budget
from ringfence.governance.contract import Catalog, Schemas, build, built_in
from ringfence.governance.contract import sealed as sealed_contract
from ringfence.governance.dispatch import Dispatcher, DispatchTargets
from ringfence.governance.guard import Guard
from ringfence.governance.pipeline import Pipeline
from ringfence.governance.policy import Policy
from ringfence.governance.rulebook import Rulebook
from ringfence.sandbox.tools import toolkit
from ringfence.sandbox.tools.executor import Executor
from ringfence.sandbox.tools.request import BoxContents, Provision, SessionLifetimes
from ringfence.sandbox.tools.toolkit import PROGRAMS, SERVER, definition
from ringfence.store import Store

if TYPE_CHECKING:
    from ringfence.compose.packages import PackageService
    from ringfence.governance.broker import VaultBroker
    from ringfence.governance.route import ConfiguredRouter
    from ringfence.sandbox.keeper.client import KeeperClient

log = logging.getLogger("ringfence")

_MAX_ARGUMENT_BYTES = 128 * MIB
_MAX_RESULT_BYTES = 2**31
"""The caller is in this process and set the limits of the box; a result is not cut a second time."""
_MAX_RESOURCE_BYTES = 16 * MIB


# ── What boxes a configuration gives ──────────────────────────────────────────────────────────────


def make_executor(settings: SandboxSettings, state: Path | None = None, *, keep_ready: int | None = None) -> Executor:
    """Our own tools over the backend that the configuration names, never another. Nothing is started yet.

    Sessions are those of the keeper of a state folder; without one, or where none may be, there are none. Raises
    Unavailable, naming what is missing.
    """
    backend = make_backend(settings, state, keep_ready=keep_ready)
    given = provision(settings)
    if state is None:
        executor = Executor(backend, replace(given, lives=None))
        executor.others = lambda: chosen_backend(settings, None, backend)
        return executor

    def keeper() -> KeeperClient:
        from ringfence.compose.keeper import keeper_of  # noqa: PLC0415 - a single run keeps no session

        return keeper_of(state, settings)

    @cache
    def installer() -> PackageService:
        from ringfence.compose.packages import PackageService  # noqa: PLC0415 - most runs install nothing

        return PackageService(state, backend, settings)

    executor = Executor(backend, given) if given.lives is None else Executor(backend, given, keeper)
    executor.others = lambda: chosen_backend(settings, state, backend)
    executor.installer = installer
    executor.images = lambda: installer().images
    return executor


def make_router(
    settings: Config,
    secrets: Callable[[], VaultBroker] | None = None,
    installer: Callable[[], PackageInstaller] | None = None,
) -> Callable[[], ConfiguredRouter]:
    """How boxes of this configuration reach the outside. Most never do, and load nothing of it."""

    @cache
    def made() -> ConfiguredRouter:
        from ringfence.governance.route import ConfiguredRouter, ProxyServer  # noqa: PLC0415 - most have no route

        broker = None if secrets is None else secrets()
        return ConfiguredRouter(settings.networks, ProxyServer(installer=installer), broker)

    return made


def provision(settings: SandboxSettings) -> Provision:
    """What boxes get where neither contract nor caller says more."""
    limits = Limits(
        wall_seconds=settings.default_timeout_seconds,
        cpu_cores=settings.max_cpu_cores,
        memory_bytes=settings.max_memory_mb * MIB,
        disk_bytes=settings.max_disk_mb * MIB,
        processes=settings.max_processes,
        output_bytes=settings.max_output_mb * MIB,
        capture_bytes=settings.capture_bytes,
    )
    lives = SessionLifetimes(
        lifetime_seconds=settings.session_lifetime_seconds,
        most_lifetime_seconds=settings.max_session_lifetime_seconds,
        idle_seconds=settings.session_idle_seconds,
        most_idle_seconds=settings.max_session_idle_seconds,
        retain_seconds=settings.session_retain_seconds,
    )
    there = boxes_stay(settings)
    why = "" if there else f": boxes of backend {settings.backend} do not stay"
    return Provision(
        limits,
        templates(settings),
        level=level_of(settings.backend),
        lives=lives if settings.max_sessions > 0 and there else None,
        no_sessions=f"there are no sessions here{why}",
        installs=settings.installs,
        image=settings.docker_image,
        installable=settings.allow_packages,
        inside=Installs(settings.allow_packages if settings.install_inside else (), settings.packages),
    )


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


def own_contracts(
    settings: Config, most_bytes: int | None = None, tools: Sequence[str] | None = None
) -> dict[str, Contract]:
    """The contracts of our own tools, all or some: those that are declared, and the built-in one of a tool that none is
    for."""
    declared = {n: c for n, c in settings.contracts.items() if c.transport is Transport.SANDBOXED_EXEC}
    if not settings.own_tools:
        return declared
    served = {contract.tool for contract in declared.values()} | set(settings.contracts)
    timeout = settings.sandbox.default_timeout_seconds
    wanted = PROGRAMS if settings.sandbox.max_sessions == 0 else toolkit.offered_tools() if tools is None else tools
    network = SANDBOX_NETWORK if settings.sandbox.network_enabled else "denied"
    return declared | {
        tool: _beside(built_in(tool, timeout, most_bytes, network), declared) for tool in wanted if tool not in served
    }


def _unshortened(contract: Contract) -> Contract:
    """The contract for a caller in this process, who is no model that pays for every character."""
    return sealed_contract(replace(contract, result=replace(contract.result, max_chars=None)))


def _beside(contract: Contract, declared: Mapping[str, Contract]) -> Contract:
    """What a declared contract redacts is redacted by the other tools of its session, too."""
    hidden = [pattern for each in declared.values() for pattern in each.redact]
    if contract.tool in PROGRAMS or not hidden:
        return contract
    return sealed_contract(replace(contract, redact=tuple(dict.fromkeys(hidden))))


def own_lists(settings: Config) -> Contract:
    """The contract for reading, as resources, the files that one's own sessions left."""
    given = {"transport": "sandboxed_exec", "tool": "resources/read", "mode": "read"}
    contract, _ = build(f"{SERVER}:lists", {**given, "result": {"max_bytes": _MAX_RESOURCE_BYTES}})
    declared = {n: c for n, c in settings.contracts.items() if c.transport is Transport.SANDBOXED_EXEC}
    return _beside(contract, declared)


def own_definitions(
    contracts: Mapping[str, Contract],
    given: Provision,
    networks: Mapping[str, NetworkSpec],
    *,
    wide: bool = False,
    missing: str | None = None,
) -> dict[str, Definition | Refused]:
    """What our own tools say of themselves, by capability; or, where boxes cannot be made, why."""
    out: dict[str, Definition | Refused] = {}
    for name, contract in contracts.items():
        if contract.transport is not Transport.SANDBOXED_EXEC:
            continue
        if missing is not None:
            text = f"The tool {name!r} is not available: {missing}"
            out[name] = Refused(Status.UNAVAILABLE, "no_backend", text)
        elif given.lives is None and contract.tool not in PROGRAMS:
            text = f"The tool {name!r} is not available: {given.no_sessions}"
            out[name] = Refused(Status.UNAVAILABLE, "no_session", text)
        else:
            packages = (*given.templates.get(contract.template, ()), *given.installs.get(contract.template, ()))
            inside = bool(given.inside.names)
            ready = BoxContents(packages, networks.get(contract.network), given.installable, inside)
            out[name] = definition(contract, given.limits, ready, given.lives, wide=wide)
    return out


# ── Runs ───────────────────────────────────────────────────────────────────────────────────────


class Runs:
    """Boxes of the local user: each run is a call of the local principal under a contract, by policy, and on record."""

    def __init__(self, settings: Config, store: Store, executor: Executor, secrets: ConfiguredSecrets) -> None:
        self._agent: Principal = identity.local_agent(settings.people, identity.os_user())
        self._settings = settings
        self.executor = executor
        executor.screens = secrets.screen
        broker = lambda: secrets.broker(lambda: self.pipeline.rules.policy, store)  # noqa: E731
        router = make_router(settings, broker, executor.installer)
        executor.router = executor.router or router
        executor.broker = executor.broker or router
        self._schemas = schemas = Schemas(most_bytes=_MAX_ARGUMENT_BYTES)
        self._names: dict[str, str] = {}
        rules = Rulebook(
            environment=settings.environment,
            catalog=self._catalog(PROGRAMS),
            policy=policy_of(settings),
            approvals=Approvals(
                store,
                settings.approvals,
                settings.people,
                wait_seconds=settings.gateway.approval_wait_seconds,
            ),
            servers={},
            prompts={},
            implicit={},
            label_seconds=settings.policy.label_seconds,
        )
        dispatcher = Dispatcher(NoServers(), DispatchTargets({}, settings.networks), executor)
        self.pipeline = Pipeline(
            store, rules, dispatcher, Guard(schemas.result_problem, secrets.shown), Budget(guard_loops=False)
        )

    def _catalog(self, tools: Sequence[str]) -> Catalog:
        given = own_contracts(self._settings, _MAX_RESULT_BYTES, tools)
        contracts = {name: _unshortened(contract) for name, contract in given.items()}
        self._names = {contract.tool: name for name, contract in reversed(contracts.items())}
        own = own_definitions(contracts, self.executor.provision, self._settings.networks, wide=True)
        return Catalog(contracts, {}, schemas=self._schemas, own=own)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: Config, executor: Executor | None = None, *, keep_ready: int | None = None
    ) -> AsyncIterator[Runs]:
        """`keep_ready`: boxes that are kept ready for further runs.

        Raises Unavailable where no box can be made here, StoreError where nothing could be recorded.
        """
        secrets = ConfiguredSecrets(settings)
        await secrets.load()
        executor = executor or make_executor(settings.sandbox, settings.gateway.state, keep_ready=keep_ready)
        keys = signing_key(paths.key_folder())
        store = await finished(in_thread(partial(Store.open, settings.gateway.state, keys)))
        try:
            async with redacted_logs(lambda: secrets):
                yield cls(settings, store, executor, secrets)
        finally:
            try:
                await finished(executor.close())
            finally:
                try:
                    store.close()  # here, not in a thread: at the end of a process none may be available
                except StoreError as exc:
                    log.error("the state could not be closed: %s", exc)

    async def run(
        self,
        wanted: RunRequest,
        *,
        origin: Origin,
        tell: OnOutput | None = None,
        channel: Channel | None = None,
    ) -> Outcome:
        """One run, in a box of its own. A refusal is an outcome too."""
        attached = Attached(wanted.inputs, wanted.stdin, wanted.output, tell)
        return await self.call(wanted.tool, wanted.arguments(), attached, origin=origin, channel=channel)

    def output_problem(self, place: Path) -> str | None:
        """Why what a program leaves is not copied to a folder: it must not replace what rules over it."""
        from ringfence.config.folders import governs  # noqa: PLC0415 - most copy nothing

        if (what := governs(place, self._settings)) is None:
            return None
        return f"what comes out of a box could replace {what}; name another folder that holds nothing of the kind"

    async def call(
        self,
        tool: str,
        arguments: Json,
        attached: Attached,
        *,
        origin: Origin,
        channel: Channel | None = None,
        parent: str | None = None,
    ) -> Outcome:
        """One of our own tools, in its wide form. A refusal is an outcome too."""
        if tool not in self._names and tool in toolkit.KIT:  # those of sessions are made ready when one is wanted
            self.pipeline.rules = replace(self.pipeline.rules, catalog=self._catalog(toolkit.all_tools()))
        call = Call(
            id=canonical.new_id("call"),
            principal=self._agent,
            tool=self._names.get(tool, tool),
            arguments=arguments,
            origin=origin,
            attached=attached,
            parent=parent,
        )
        return await self.pipeline.handle(call, channel or UNATTENDED)


def default_config() -> Config:
    """The configuration where the user wrote none."""
    return sealed(
        Config(
            path=Path("built-in"),
            environment="development",
            gateway=GatewaySettings("127.0.0.1", 0, paths.state_folder()),
            people={},
            servers={},
            contracts={},
            networks={},
            secrets={},
            approvals={},
            policy=PolicySettings(),
            sandbox=SandboxSettings(),
        )
    )


class NoServers:
    """The upstreams of a process without servers: every request is refused."""

    async def request(self, request: UpstreamRequest) -> Json:
        raise Unavailable("no_server", "there are no servers here")

    async def definitions(self, server: str, principal: Principal) -> list[Definition]:
        return []

    def isolation(self, server: str, *, fresh: bool = False, box: tuple[Principal, str] | None = None) -> Json:
        return {}


@dataclass(frozen=True, slots=True)
class UnattendedChannel:
    """The channel of a call whose caller cannot be asked."""

    capabilities: Json

    async def ask(self, questions: Mapping[str, Json]) -> Mapping[str, Json]:
        return {}

    async def notify(self, method: str, params: Json) -> None:
        return None


UNATTENDED = UnattendedChannel({})
