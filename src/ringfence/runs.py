"""Runs of one's own: `ringfence run` and the SDK's boxes go the same governed way as an agent's calls.

The smaller half of the composition root: a store, a rulebook with our own tools, boxes. No servers and no front, so
whoever only wants a box does not load them. `app` builds the whole gateway on top of it.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from ringfence import canonical, identity
from ringfence.approval import Approvals
from ringfence.audit.keys import load_or_create
from ringfence.box import MIB, Attached, Input, Layout, Limits, Stream
from ringfence.budget import Budget
from ringfence.config import paths
from ringfence.config.settings import Config, GatewaySettings, PolicySettings, SandboxSettings, sealed
from ringfence.contract import Catalog, Schemas, built_in
from ringfence.dispatch import Dispatcher, Surroundings
from ringfence.errors import Refused, StoreError, Unavailable
from ringfence.guard import Guard
from ringfence.model import Call, Contract, Definition, Json, Origin, Outcome, Principal, Status, Transport
from ringfence.pipeline import Pipeline
from ringfence.policy import Policy
from ringfence.ports import Channel, UpstreamRequest
from ringfence.rulebook import Rulebook
from ringfence.sandbox.executor import Executor, Provision
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.host import Host
from ringfence.sandbox.tools import EXECUTE_PYTHON, RUN_SHELL, TEMPLATES, TOOLS, definition
from ringfence.store import Store

log = logging.getLogger("ringfence")

BACKENDS = ("process", "wasm", "oci", "gvisor", "docker", "microvm", "firecracker", "microsandbox", "auto")
_MOST_ARGUMENT_BYTES = 128 * MIB
_MOST_RESULT_BYTES = 2**31
"""The caller is in this process and set the limits of the box; a result is not cut a second time."""


# ── What boxes a configuration gives ──────────────────────────────────────────────────────────────


def make_executor(settings: SandboxSettings) -> Executor:
    """Our own tools over the backend that the configuration names, never another. Nothing is started yet.

    Raises Unavailable, naming what is missing.
    """
    if settings.backend != "process":
        what = (
            "is not built yet" if settings.backend in BACKENDS else f"does not exist; there are {', '.join(BACKENDS)}"
        )
        raise Unavailable("no_backend", f"sandbox backend {settings.backend} {what}")
    if sys.platform != "linux":
        raise Unavailable("no_backend", f"sandbox backend process needs Linux, and this is {sys.platform}")
    Host.detect().require(settings.accept_missing)
    backend = ProcessBackend(accept_missing=settings.accept_missing, templates=templates(settings))
    return Executor(backend, provision(settings))


def templates(settings: SandboxSettings) -> Mapping[str, tuple[str, ...]]:
    return {**TEMPLATES, **settings.templates}


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
    return Provision(limits, templates(settings))


def own_contracts(settings: Config, most_bytes: int | None = None) -> dict[str, Contract]:
    """The contracts of our own tools: those that are declared, and the built-in one of a tool that none is for."""
    declared = {n: c for n, c in settings.contracts.items() if c.transport is Transport.SANDBOXED_EXEC}
    if not settings.own_tools:
        return declared
    served = {contract.tool for contract in declared.values()} | set(settings.contracts)
    timeout = settings.sandbox.default_timeout_seconds
    return declared | {tool: built_in(tool, timeout, most_bytes) for tool in TOOLS if tool not in served}


def own_definitions(
    contracts: Mapping[str, Contract], given: Provision, *, wide: bool = False, missing: str | None = None
) -> dict[str, Definition | Refused]:
    """What our own tools say of themselves, by capability; or, where boxes cannot be made, why."""
    out: dict[str, Definition | Refused] = {}
    for name, contract in contracts.items():
        if contract.transport is not Transport.SANDBOXED_EXEC:
            continue
        if missing is not None:
            text = f"The tool {name!r} is not available: {missing}"
            out[name] = Refused(Status.UNAVAILABLE, "no_backend", text)
        else:
            packages = given.templates.get(contract.template, ())
            out[name] = definition(contract, given.limits, packages, wide=wide)
    return out


# ── What is wanted ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Wanted:
    """A run as its caller wants it. What is left out, the configuration says."""

    code: str | None = None
    """Python source; without it, `command` or `argv` is run."""
    command: str | None = None
    argv: tuple[str, ...] = ()
    name: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, float | int] = field(default_factory=dict)
    inputs: tuple[Input, ...] = ()
    stdin: bytes | int = b""
    """Bytes, or the reading end of a pipe."""
    output: Path | None = None
    trees: tuple[Path, ...] = ()
    template: str | None = None
    layout: Layout | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def tool(self) -> str:
        return RUN_SHELL if self.code is None else EXECUTE_PYTHON

    def arguments(self) -> Json:
        """All of it that is decided upon: what is validated, seen by policy, digested and approved."""
        given: Json = {
            "code": self.code,
            "command": self.command,
            "argv": list(self.argv) or None,
            "name": self.name,
            "env": dict(self.env),
            "limits": dict(self.limits),
            "inputs": [_named(each) for each in self.inputs],
            "stdin": "stream" if isinstance(self.stdin, int) else _digest(self.stdin) if self.stdin else None,
            "output": None if self.output is None else str(self.output),
            "trees": [str(tree) for tree in self.trees],
            "template": self.template,
            "memory_layout": self.layout,
            "metadata": dict(self.metadata),
        }
        said = ("code", "command")
        return {name: value for name, value in given.items() if value or (value is not None and name in said)}


def _named(given: Input) -> Json:
    if isinstance(given.source, bytes):
        return {"name": given.name, **_digest(given.source)}
    try:
        with open(given.source, "rb") as file:
            found = hashlib.file_digest(file, "sha256")
            return {"name": given.name, "bytes": file.tell(), "sha256": found.hexdigest()}
    except OSError as exc:
        raise Unavailable("no_input", f"input {given.source}: {exc.strerror or exc}") from None


def _digest(data: bytes) -> Json:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


# ── The way ───────────────────────────────────────────────────────────────────────────────────────


class Runs:
    """Boxes of one's own: each run is a call of the local principal under a contract, by policy, and on record."""

    def __init__(self, settings: Config, store: Store, executor: Executor) -> None:
        self._agent: Principal = identity.local_agent(settings.people, identity.os_user())
        contracts = own_contracts(settings, _MOST_RESULT_BYTES)
        self._names = {contract.tool: name for name, contract in reversed(contracts.items())}
        schemas = Schemas(most_bytes=_MOST_ARGUMENT_BYTES)
        rules = Rulebook(
            environment=settings.environment,
            catalog=Catalog(
                contracts, {}, schemas=schemas, own=own_definitions(contracts, executor.provision, wide=True)
            ),
            policy=Policy(
                settings.policy.rules,
                preset=settings.policy.preset,
                default=settings.policy.default,
                environment=settings.environment,
            ),
            approvals=Approvals(
                store,
                settings.approvals,
                wait_seconds=settings.gateway.approval_wait_seconds,
                single_user=not settings.people,
            ),
            servers={},
            prompts={},
            implicit={},
        )
        dispatcher = Dispatcher(NoServers(), Surroundings({}, settings.networks), executor)
        self._pipeline = Pipeline(store, rules, dispatcher, Guard(schemas.result_problem), Budget(guard_loops=False))
        self._executor = executor

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: Config, executor: Executor | None = None) -> AsyncIterator[Runs]:
        """Raises Unavailable where no box can be made here, StoreError where nothing could be recorded."""
        executor = executor or make_executor(settings.sandbox)
        keys = load_or_create(paths.key_folder())
        store = await anyio.to_thread.run_sync(Store.open, settings.gateway.state, keys)
        try:
            yield cls(settings, store, executor)
        finally:
            with anyio.CancelScope(shield=True):
                await executor.backend.close()
                try:
                    store.close()  # here, not in a thread: at the end of a process there may be none to be had
                except StoreError as exc:
                    log.error("the state could not be closed: %s", exc)

    async def run(
        self,
        wanted: Wanted,
        *,
        origin: Origin,
        tell: Callable[[Stream, bytes], None] | None = None,
        channel: Channel | None = None,
    ) -> Outcome:
        """One run, in a box of its own. A refusal is an outcome too."""
        call = Call(
            id=canonical.new_id("call"),
            principal=self._agent,
            tool=self._names.get(wanted.tool, wanted.tool),
            arguments=wanted.arguments(),
            origin=origin,
            attached=Attached(wanted.inputs, wanted.stdin, wanted.output, tell),
        )
        return await self._pipeline.handle(call, channel or NOBODY)


def unwritten() -> Config:
    """The configuration of somebody who wrote none."""
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
    """Stands where a gateway has its servers."""

    async def request(self, request: UpstreamRequest) -> Json:
        raise Unavailable("no_server", "there are no servers here")

    async def definitions(self, server: str, principal: Principal) -> list[Definition]:
        return []

    def isolation(self, server: str) -> Json:
        return {}


@dataclass(frozen=True, slots=True)
class Silent:
    """The channel of a call whose caller cannot be asked."""

    capabilities: Json

    async def ask(self, questions: Mapping[str, Json]) -> Mapping[str, Json]:
        return {}

    async def notify(self, method: str, params: Json) -> None:
        return None


NOBODY = Silent({})
