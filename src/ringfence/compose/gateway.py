"""The gateway, put together: with the rest of this folder, the only place that names implementations."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.abc
from mcp.server.subscriptions import (
    PromptsListChanged,
    ResourcesListChanged,
    ResourceUpdated,
    ServerEvent,
    ToolsListChanged,
)

from ringfence import __version__, config, identity
from ringfence.compose import servers
from ringfence.compose.evidence import key_of
from ringfence.compose.hooks import HookMaker
from ringfence.compose.packages import verify
from ringfence.compose.runs import (
    contracts_of,
    make_executor,
    make_router,
    own_contracts,
    own_definitions,
    own_lists,
    policy_of,
    provision,
)
from ringfence.compose.secrets import ConfiguredSecrets, redacted_logs
from ringfence.compose.telemetry import tracing_of
from ringfence.compose.witness import Witnesses
from ringfence.config import Config
from ringfence.core import canonical
from ringfence.core.box import BoxSpec, Program
from ringfence.core.errors import ConfigError, Refused, RingfenceError, StoreError, Unavailable
from ringfence.core.model import Call, Contract, Definition, GuardedText, Issuer, Json, Outcome, Principal, ServerSpec
from ringfence.core.ports import Channel, UpstreamRequest, WarmableBackend
from ringfence.front import entries
from ringfence.front.mcp import McpFront
from ringfence.front.refusals import Refusals
from ringfence.front.request_state import RequestStates
from ringfence.front.stdio import StdioFront
from ringfence.governance import approvals, asking
from ringfence.governance.approvals import ALWAYS, Approvals, QuestionPlaces, Requirement
from ringfence.governance.budget import Budget
from ringfence.governance.contract import Catalog, Schemas
from ringfence.governance.dispatch import Dispatcher, DispatchTargets
from ringfence.governance.guard import Guard, signed
from ringfence.governance.permission import Permissions
from ringfence.governance.pins import DefinitionPins
from ringfence.governance.pipeline import Pipeline
from ringfence.governance.rulebook import Rulebook, implicit_contract
from ringfence.governance.uris import normal_uri
from ringfence.hooks.runner import HookRunner
from ringfence.sandbox.tools.executor import Executor
from ringfence.sandbox.tools.toolkit import SERVER
from ringfence.store import SentBefore, Store, Transaction, Unproven
from ringfence.store.clock import Leap, farthest
from ringfence.telemetry.metrics import GatewayMetrics
from ringfence.telemetry.watch import CallWatcher
from ringfence.upstream.pool import ConnectionPool, ServerAccess

if TYPE_CHECKING:
    from ringfence.front.http import HttpFront
    from ringfence.identity.oidc import TokenReader
    from ringfence.telemetry.traces import Tracing

log = logging.getLogger("ringfence")

_RETAIN_SECONDS = 3600.0
_LEAPT = (
    "the clock is far past the newest record: nothing is pruned by gateway.retention until this gateway has run for a"
    " day. If the time is right, `ringfence audit prune --before TIME` need not wait"
)
_WATCH_SECONDS = 2.0
_KNOWN_SECONDS = 20.0
"""How long after its start a gateway lets requests wait for servers of which nothing was accepted before."""


class App:
    """One gateway: a configuration in force, its state, its servers, and the one pipeline through them."""

    def __init__(
        self,
        settings: Config,
        store: Store,
        group: anyio.abc.TaskGroup,
        secrets: ConfiguredSecrets,
        agent: str | None = None,
    ) -> None:
        """`agent` is the declared one that calls of the local user are made as."""
        self.config = settings
        self.store = store
        self.secrets = secrets
        self._named = agent
        self.directory = identity.Directory(settings.agents, settings.people)
        self._issued: tuple[Issuer, TokenReader] | None = None
        self.tokens = identity.TokenCheck(lambda ident: self.store.token(ident))
        self.agent: Principal = self._local_agent(settings)
        self._schemas = Schemas()
        self._places = QuestionPlaces()
        self._doubts: frozenset[str] = frozenset()
        """What the operator was told of tools that several servers have."""
        self.pool = ConnectionPool(
            settings.servers,
            ServerAccess(),
            self._consent,
            self._on_event,
            starting=self._starting,
            changed=self._lists_changed,
            on_idle_network=self._on_idle_network,
            circuit=self._circuit,
            clean=lambda text: self._guard.message(text),
        )
        self._executor: Executor | None = None
        self._no_boxes: str | None = None
        """Why no boxes can be made; None: they can."""
        self._executors: list[Executor] = []
        self.dispatcher = Dispatcher(self.pool, DispatchTargets(settings.servers, settings.networks))
        self._provide_boxes(settings)
        self._guard = Guard(self._schemas.result_problem, self.secrets.shown)
        self.pins = DefinitionPins(store, self._guard, lambda each: entries.problem(each.kind, each.body))
        self.pins.use(settings.servers, settings.contracts)
        maker = HookMaker(lambda: self.config, lambda: self.secrets, lambda: self._executor, self._hook_sent)
        self._hooks = HookRunner(store, maker.make, partial(asking.put, lambda: self.config.people))
        self.watcher = CallWatcher(self._metrics(), tracing_of(settings.telemetry))
        self.watcher.is_tool = lambda name: name in self.pipeline.rules.catalog
        rules = self._rulebook(settings)
        self.pipeline = Pipeline(store, rules, self.dispatcher, self._guard, Budget(), self.watcher)
        self.front = McpFront(self.pipeline, self.pool, group, __version__)
        self.front.paused.states = RequestStates(store.sealing)
        self.front.paused.spend = self._spend
        self.front.refusals = Refusals(store)
        self.front.refusals.seen = self.watcher.metrics.refused_request
        self.front.listing.has_sessions = lambda: self._executor is not None and self._executor.keeper is not None
        self.front.left_files = lambda principal: self._tell(principal, "notifications/resources/list_changed", {})
        self.http: HttpFront | None = None
        self.stdio: StdioFront | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: Config,
        *,
        servers: Collection[str] | None = None,
        at_once: bool = False,
        agent: str | None = None,
    ) -> AsyncIterator[App]:
        """A running gateway without a front; its servers are started and their definitions compared with the pins.

        `servers`: only these are started now, the others when they are needed. `at_once`: they are started while the
        gateway serves already; what was accepted of them before is offered meanwhile. `agent`: the declared one that
        calls of the local user are made as.
        Raises ConfigError for a secret that cannot be kept.
        """
        started = [name for name in settings.servers if servers is None or name in servers]
        secrets = ConfiguredSecrets(settings)
        await secrets.load()
        keys = await anyio.to_thread.run_sync(key_of, settings.audit)
        store = await anyio.to_thread.run_sync(Store.open, settings.gateway.state, keys)
        told = settings.audit.witness
        witnesses = None if told is None else Witnesses(told, settings.gateway.state, keys.public)
        try:
            async with anyio.create_task_group() as group:
                app = cls(settings, store, group, secrets, agent)
                async with redacted_logs(lambda: app.secrets), app.pool.running():
                    if at_once:
                        group.start_soon(app.connect_meanwhile, started)
                    else:
                        await app.connect(started)
                    group.start_soon(app.front.refusals.run)
                    if witnesses is not None:
                        group.start_soon(witnesses.run)
                    try:
                        yield app
                    finally:
                        app.front.close()
                        app.pool.close()
                        with anyio.CancelScope(shield=True):
                            await app.front.refusals.flush()
                            await app.pins.record_counted_changes()
                            await app.end_boxes()
                            await app._trace_by(None)
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                try:
                    await store.aclose()
                except StoreError as exc:
                    log.error("the state could not be closed: %s", exc)
                if witnesses is not None:
                    await anyio.to_thread.run_sync(witnesses.tell)  # where its own chain has ended

    def issued(self) -> TokenReader | None:
        """What reads tokens of the identity provider, if there is one. The same one, and its keys, while that is."""
        issuer = self.config.gateway.oidc
        if issuer is None:
            return None
        if self._issued is None or self._issued[0] != issuer:
            from ringfence.compose.oidc import token_reader  # noqa: PLC0415 - few gateways have an identity provider

            self._issued = (issuer, token_reader(issuer))
        return self._issued[1]

    def _local_agent(self, settings: Config) -> Principal:
        return identity.local_agent(settings.people, identity.os_user(), settings.agents, self._named)

    def clean(self, text: str, most: int) -> GuardedText:
        """A text from outside, as it may be shown and kept."""
        return self._guard.message(text, most=most)

    async def _hook_sent(self, name: str, network: Json) -> None:
        """Put on record what the box of a hook asked of the network; the hosts may be of its program's choice."""
        body = {"hook": name, **self._guard.facts({"network": network})}
        await self.store.write(lambda tx: tx.append("hook_network", None, body))

    async def handle(self, call: Call, channel: Channel) -> Outcome:
        return await self.pipeline.handle(call, channel)

    # ── what operators see ────────────────────────────────────────────────────────────────────────

    def _metrics(self) -> GatewayMetrics:
        """The metrics, with those that other parts of the gateway know the values of."""
        found = GatewayMetrics()
        store = self.store
        written = "Records that this process wrote to its chain of the log."
        found.read("counter", "audit_records_total", written, read=lambda: float(store.records))
        found.read("gauge", "audit_queue", "Writes that wait for a commit.", read=lambda: float(store.waiting))
        asked = "Open questions, of all gateways with this state."
        found.read("gauge", "approvals_waiting", asked, read=lambda: float(len(store.reader().pending())))
        clients = "Sessions of MCP clients over HTTP."
        found.read("gauge", "mcp_sessions", clients, read=lambda: float(len(self.http.sessions)) if self.http else 0.0)
        connected = "Connections to servers."
        found.read("gauge", "server_connections", connected, "server", read=self.pool.connected)
        given = "Records that hooks took."
        found.read("counter", "hook_records_total", given, "hook", read=self._hooks.taken)
        found.read("counter", "hook_failures_total", "Times that a hook failed.", "hook", read=self._hooks.failures)
        found.read("gauge", "hook_behind", "Records that wait for a hook.", "hook", read=self._hooks.behind)
        return found

    async def _trace_by(self, tracing: Tracing | None) -> None:
        """Make spans by this from now on. What another one has queued is sent first."""
        before, self.watcher.tracing = self.watcher.tracing, tracing
        if before is not None:
            await anyio.to_thread.run_sync(before.close)

    async def metrics_text(self) -> str:
        """What `/metrics` has now."""
        return self.watcher.metrics.text()

    async def run_hooks(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Tell the hooks of the configuration in force of calls that end, and of questions, until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(asking.Escalations(self.store).run)
            await self._hooks.run(self.config.hooks, task_status=task_status)

    # ── servers and their definitions ─────────────────────────────────────────────────────────────

    async def connect(self, servers: Iterable[str]) -> None:
        """Start each of these once and see what it offers; one that fails is reported and tried again on demand."""
        async with anyio.create_task_group() as group:
            for name in servers:
                group.start_soon(self._look_at, name)
        await self._enforce()

    async def connect_meanwhile(self, servers: Iterable[str]) -> None:
        """The same while requests are answered: those wait a while for servers of which nothing is known yet."""
        unknown = {name for name in servers if not self.pins.accepted(name)}
        known = anyio.Event()
        # From now on, not from each request: a server that does not come up must not slow down every one of them.
        until = anyio.current_time() + _KNOWN_SECONDS

        async def wait() -> None:
            with anyio.CancelScope(deadline=until):
                await known.wait()

        async def look_at(server: str) -> None:
            await self._look_at(server)
            unknown.discard(server)
            await self.refresh()
            if not unknown:
                known.set()

        if unknown:
            self.front.settled = wait
        async with anyio.create_task_group() as group:
            for name in servers:
                group.start_soon(look_at, name)

    async def _look_at(self, server: str) -> None:
        try:
            await self.pins.learn(server, await self.pool.definitions(server, self.agent))
        except RingfenceError as exc:
            log.warning("server %s is not available: %s", server, exc)

    async def _starting(self, spec: ServerSpec, principal: Principal, start: Callable[[], Awaitable[None]]) -> None:
        if spec.url is None and spec.placement == "unsafe_host":
            log.warning(
                "server %s runs on this host without a box (isolation: none): %s", spec.name, " ".join(spec.command)
            )
        if spec.packages is not None:
            await anyio.to_thread.run_sync(verify, spec, self.config.path)
        await self.pipeline.server_start(spec, principal, start)

    async def _circuit(self, server: str, principal: Principal, change: Json) -> None:
        await self.pipeline.server_circuit(server, principal, change)

    async def _on_idle_network(self, spec: ServerSpec, principal: Principal, network: Json) -> None:
        await self.pipeline.server_network(spec, principal, network)

    # ── boxes ─────────────────────────────────────────────────────────────────────────────────────

    def _provide_boxes(self, settings: Config) -> None:
        """Make boxes from now on as the configuration says. Boxes that run stay as they are."""
        try:
            self._executor = make_executor(settings.sandbox, settings.gateway.state)
            self._no_boxes = None
            self._executor.screens = lambda: self.secrets.screen()
            self._executors.append(self._executor)
        except Unavailable as exc:
            self._executor = None
            self._no_boxes = exc.message
        self.dispatcher.executor = self._executor
        self._provide_ways(settings)

    def hand_over(self, session: str) -> None:
        """Let agents of this gateway use a session that a program of the user's opened."""
        if self._executor is not None:
            self._executor.handed_over |= {session}

    def _provide_ways(self, settings: Config) -> None:
        """Networks and secrets of this configuration, for boxes, servers, and requests of our own."""
        secrets = self.secrets
        installer = None if self._executor is None else self._executor.installer
        policy, permissions = lambda: self.pipeline.rules.policy, lambda: self.pipeline.rules.permissions
        router = make_router(settings, lambda: secrets.broker(policy, self.store, permissions), installer)
        if self._executor is not None:
            self._executor.router = self._executor.broker = router
            contracts = contracts_of(settings)
            self._executor.networks = {name: contract.network for name, contract in contracts.items()}
        self.pool.use(servers.access(settings, self._executor or str(self._no_boxes), router))
        self.dispatcher.targets = DispatchTargets(settings.servers, settings.networks, router)

    async def warm(self) -> None:
        """Prepare boxes before the first call; where none can be made, our own tools are no longer offered."""
        executor = self._executor
        if executor is None or not isinstance(executor.backend, WarmableBackend) or not own_contracts(self.config):
            return
        try:
            await executor.backend.warm(BoxSpec(Program("python"), executor.provision.limits))
            for sentence in executor.backend.weaker():
                log.warning("%s", sentence)
        except Unavailable as exc:
            log.warning("tools that need a box are not offered: %s", exc)
            if self._executor is executor:
                self._no_boxes = exc.message
                await self.refresh()

    @property
    def boxes(self) -> Json:
        """What makes boxes here, for people."""
        executor = self._executor
        backend = None if executor is None else executor.backend
        return {
            "backend": self.config.sandbox.backend if backend is None else backend.name,
            "level": "none" if executor is None else executor.provision.level,
            "weaker": list(backend.weaker()) if isinstance(backend, WarmableBackend) else [],
            "missing": self._no_boxes,
        }

    async def end_boxes(self) -> None:
        for executor in self._executors:
            await executor.close()

    # ── the configuration in force ────────────────────────────────────────────────────────────────

    async def _enforce(self) -> None:
        """Put in force what the configuration, the pins and the servers say now, on record where a tool came to a
        server."""
        rules = self._rulebook(self.config)
        if rules.catalog.bindings:
            await self.pins.bind(rules.catalog.bindings)
            rules = self._rulebook(self.config)  # another process may have been faster
        for doubt in rules.catalog.doubts:
            if doubt not in self._doubts:
                log.warning("%s", doubt)
        self._doubts = frozenset(rules.catalog.doubts)
        self.pipeline.rules = rules

    def _rulebook(self, settings: Config) -> Rulebook:
        pinned = self.pins.pinned()
        contracts = contracts_of(settings)
        given = provision(settings.sandbox) if self._executor is None else self._executor.provision
        own = own_definitions(contracts, given, settings.networks, missing=self._no_boxes)
        return Rulebook(
            environment=settings.environment,
            catalog=Catalog(
                contracts,
                pinned.tools,
                live=pinned.live,
                schemas=self._schemas,
                own=own,
                standing=pinned.standing,
                unseen=pinned.unseen,
            ),
            policy=policy_of(settings),
            approvals=Approvals(
                self.store,
                settings.approvals,
                settings.people,
                wait_seconds=settings.gateway.approval_wait_seconds,
                places=self._places,
            ),
            servers=settings.servers,
            prompts=pinned.prompts,
            implicit={
                **{name: implicit_contract(spec) for name, spec in settings.servers.items()},
                SERVER: own_lists(settings),
            },
            permissions=Permissions(settings.agents, settings.environment, settings.gateway.step_up, settings.budgets),
            label_seconds=settings.policy.label_seconds,
        )

    async def refresh(self) -> None:
        """Rebuild what is offered and tell clients if it is different."""
        before = await self.front.listing.digest()
        await self._enforce()
        if await self.front.listing.digest() != before:
            await self._tell(None, "notifications/tools/list_changed", {})
            await self._tell(None, "notifications/prompts/list_changed", {})

    async def apply(self, settings: Config, cause: str) -> None:
        """Put a new configuration in force, on record. Raises ConfigError for a secret that cannot be kept."""
        secrets = ConfiguredSecrets(settings, self.secrets)
        await secrets.load()
        tracing = self.watcher.tracing
        if settings.telemetry != self.config.telemetry:
            tracing = tracing_of(settings.telemetry)
        body = {"cause": cause, "digest": settings.digest, "before": self.config.digest}
        await self.store.write(lambda tx: tx.append("reload", None, body), durable=True)
        before = await self.front.listing.digest()
        self.secrets = secrets
        self._guard.redactor = secrets.shown
        if settings.telemetry != self.config.telemetry:
            await self._trace_by(tracing)
        if settings.sandbox != self.config.sandbox:
            self._provide_boxes(settings)
        else:
            self._provide_ways(settings)
        self.config = settings
        await self._hooks.use(settings.hooks)
        self.agent = self._local_agent(settings)
        self.directory = identity.Directory(settings.agents, settings.people)
        self.pool.replace_servers(settings.servers)
        self.pins.use(settings.servers, settings.contracts)
        # In force at once: what was tightened must not wait for a server that is slow to start.
        self.pipeline.rules = self._rulebook(settings)
        if self._executor is not None:
            await self._executor.hold_tightened(self._executors)
        await self.connect(settings.servers)
        if await self.front.listing.digest() != before:
            await self._tell(None, "notifications/tools/list_changed", {})
        log.info("configuration reloaded (%s)", cause)

    async def reload(self, *, asked: bool) -> None:
        """Read the file again. A broken one changes nothing; one that loosens anything waits for SIGHUP."""
        try:
            await self._reload(asked)
        except StoreError as exc:
            log.error("the reload could not be recorded, so the old configuration stays in force: %s", exc)

    async def _reload(self, asked: bool) -> None:
        try:
            fresh = config.load(self.config.path)
        except ConfigError as exc:
            await self._refuse(exc)
            return
        if fresh.digest == self.config.digest:
            return
        loosened = [] if asked else config.loosens(self.config, fresh)
        if loosened:
            log.warning("the new configuration loosens something; send SIGHUP to apply it:\n%s", "\n".join(loosened))
            body = {"loosens": loosened, "digest": fresh.digest}
            await self.store.write(lambda tx: tx.append("reload_waiting", None, body), durable=True)
            return
        try:
            await self.apply(fresh, "SIGHUP" if asked else "file changed")
        except (ConfigError, Unavailable) as exc:
            await self._refuse(exc)

    async def _refuse(self, exc: ConfigError | Unavailable) -> None:
        log.error("the new configuration is broken; the old one stays in force:\n%s", exc)
        problems = [str(p) for p in exc.problems] if isinstance(exc, ConfigError) else [exc.message]
        await self.store.write(lambda tx: tx.append("reload_refused", None, {"problems": problems}), durable=True)

    async def watch(self) -> None:
        """Reload when a file of the configuration changes; look again when an operator accepts a definition."""
        files = self.config.files
        seen = _stamps(files)
        pinned = self.store.reader().pin_stamp()
        while True:
            await anyio.sleep(_WATCH_SECONDS)
            now = _stamps(self.config.files)
            # Other files than before may have changed since they were read, so they are read once more.
            if now != seen or self.config.files != files:
                files = self.config.files
                seen = now
                await self.reload(asked=False)
            try:
                stamp = self.store.reader().pin_stamp()
                if stamp != pinned:
                    pinned = stamp
                    await self.refresh()
            except StoreError as exc:
                log.error("the accepted definitions cannot be read: %s", exc)

    async def retain(self) -> None:
        """Prune what is older than the configuration keeps, again and again, once the time of day can be believed."""
        leap: Leap | None = None
        warned = False
        while True:
            kept = self.config.gateway.retention_seconds
            if kept is not None:
                now = time.time()
                before = now - kept
                try:
                    if leap is None:
                        leap = Leap(self.store.reader().before_leap(farthest(kept)))
                    if leap.waits(now, kept):
                        if not warned:
                            warned = True
                            log.warning("%s", _LEAPT)
                            await self.store.write(lambda tx: tx.append("retention_waits", None, {"message": _LEAPT}))
                        await anyio.sleep(_RETAIN_SECONDS)
                        continue
                    warned = False
                    gone = await anyio.to_thread.run_sync(
                        self.store.prune, before, "gateway.retention", abandon_on_cancel=True
                    )
                    if gone.records:
                        log.info("pruned %d records that are older than gateway.retention", gone.records)
                except StoreError as exc:
                    log.error("what is older than gateway.retention could not be pruned: %s", exc)
            await anyio.sleep(_RETAIN_SECONDS)

    async def draft(self, contract: Callable[[str, Json], Contract]) -> None:
        """Contracts for a gateway without a file: one for every tool that a server shows, or showed before it was down.

        Of one name the first server of the configuration has it, whichever was the first to answer."""
        contracts: dict[str, Contract] = {}
        for server in self.config.servers:
            shown = self.pins.shown(server)
            for definition in self.store.reader().pins(server) if shown is None else shown:
                if definition.kind == "tool":
                    contracts.setdefault(definition.name, contract(server, definition.body))
        self.config = replace(self.config, contracts=contracts)
        self.pins.use(self.config.servers, contracts)
        for server in self.config.servers:
            if (shown := self.pins.shown(server)) is not None:
                await self.pins.learn(server, shown)
        await self._enforce()

    # ── what servers send by themselves ───────────────────────────────────────────────────────────

    async def _on_event(self, server: str, principal: Principal, method: str, params: Json) -> None:
        if method in (
            "notifications/resources/list_changed",
            "notifications/resources/updated",
            "notifications/message",
        ):
            contract = self.pipeline.rules.implicit.get(server)
            if contract is None:
                return
            if method == "notifications/resources/updated":
                uri = normal_uri(str(params.get("uri")))
                if uri is None or not self.front.hears(principal, uri, server):
                    return  # no one has asked this server for it
                if not self.pipeline.rules.permissions.of(principal).reads(uri):
                    return  # it may not read it any more
                params = {**params, "uri": uri}
            try:
                shown = await self._guard.said(contract, signed(method, params, server))
            except Refused as exc:
                log.warning("server %s: its %s is not passed on: %s", server, method, exc)
                return
            await self._tell(principal, method, shown)

    async def _lists_changed(self, server: str, definitions: list[Definition]) -> None:
        known = self.pins.shown(server)
        if known is not None and {(d.kind, d.digest) for d in known} == {(d.kind, d.digest) for d in definitions}:
            return  # "changed", says the server, and nothing did
        try:
            await self.pins.learn(server, definitions)
            await self.refresh()
        except RingfenceError as exc:
            # Calls compare what the server shows with the pin anyway; the gateway must not end for this.
            log.error("the changed definitions of server %s could not be read: %s", server, exc)

    async def _tell(self, principal: Principal | None, method: str, params: Json) -> None:
        if self.http is not None:
            await self.http.sessions.tell(principal, method, params)
        if self.stdio is not None:
            await self.stdio.tell(method, params)
        events: dict[str, ServerEvent] = {
            "notifications/tools/list_changed": ToolsListChanged(),
            "notifications/prompts/list_changed": PromptsListChanged(),
            "notifications/resources/list_changed": ResourcesListChanged(),
        }
        if method in events:
            await self.front.publish(principal, events[method])
        elif method == "notifications/resources/updated" and isinstance(params.get("uri"), str):
            await self.front.publish(principal, ResourceUpdated(uri=params["uri"]))

    async def _spend(self, principal: Principal, approval: str, handle: str) -> None:
        """A client comes back with what it held while its person was asked: once. Raises Conflict and RowNotFound."""
        try:
            await self.store.write(lambda tx: tx.use_state(approval, handle), durable=True)
        except SentBefore:
            asked = approvals.find(self.store, approval, brief=True)
            said = {"why": "replayed"}
            await self.store.write(lambda tx: tx.refuse_answer(asked, principal.person, handle, said), durable=True)
            raise

    async def _consent(self, request: UpstreamRequest, method: str, params: Json) -> bool:
        """A person's approval for a server to use the client's model."""
        asked = self.pipeline.rules.approvals
        requirement = Requirement(("always",), (), ALWAYS.expires_seconds, not self.config.people, 1)
        call = Call(canonical.new_id("call"), request.principal, f"{request.server}:{method}", params)
        digest = canonical.digest([request.principal.key, call.tool, params, asked.terms(requirement)])
        shown: Json = {"tool": call.tool, "server": request.server, "agent": request.principal.agent}

        def use(tx: Transaction) -> bool:
            used = tx.consume_approval(digest, call.id, time.time())
            if used is not None and used.proof is not None and (problem := asked.doubt(used.proof)) is not None:
                raise Unproven(used.id, problem)
            return used is not None

        try:
            summary = lambda: {**shown, "arguments": self._guard.listed(params)}  # noqa: E731
            await asked.obtain(call, digest, requirement, summary, request.channel)
            return await self.store.write(use, durable=True)
        except Refused:
            return False
        except Unproven as exc:
            log.error("a server's question is refused: %s", exc)
            return False


def _stamps(files: tuple[Path, ...]) -> list[tuple[int, int] | None]:
    out: list[tuple[int, int] | None] = []
    for file in files:
        try:
            status = file.stat()
            out.append((status.st_mtime_ns, status.st_size))
        except OSError:
            out.append(None)
    return out
