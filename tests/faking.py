"""Stand-ins at the ports: whoever is behind `Upstreams`, `Channel` and `Link` is played by a few lines of a test."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import anyio.abc

from ringfence.audit.keys import load_or_create
from ringfence.core import canonical, system
from ringfence.core.model import (
    AgentSpec,
    ApprovalRule,
    Call,
    Contract,
    Definition,
    Json,
    NetworkSpec,
    Outcome,
    Person,
    Principal,
    ServerSpec,
)
from ringfence.core.ports import UpstreamRequest
from ringfence.governance.approvals import Approvals
from ringfence.governance.budget import Budget
from ringfence.governance.contract import Catalog, Schemas, build
from ringfence.governance.dispatch import Dispatcher, DispatchTargets
from ringfence.governance.guard import Guard
from ringfence.governance.permission import Permissions
from ringfence.governance.pipeline import Pipeline
from ringfence.governance.policy import Policy
from ringfence.governance.rulebook import Rulebook, implicit_contract
from ringfence.store import Store
from ringfence.upstream.link import InFlight, RpcError

Reply = Json | Exception | Callable[["UpstreamRequest"], Awaitable[Json]]
OK: Json = {"content": [{"type": "text", "text": "done"}]}


@contextmanager
def answering_as(account: str) -> Iterator[None]:
    """Answers to approvals come from another account, as far as the kernel can tell."""
    with mock.patch.object(system, "account", return_value={"name": account, "uid": None}):
        yield


@dataclass(slots=True)
class Client:
    """A `Channel`: what it was told and asked, and what it answers."""

    capabilities: Json = field(default_factory=dict)
    answers: Json = field(default_factory=dict)
    told: list[tuple[str, Json]] = field(default_factory=list)
    asked: list[Mapping[str, Json]] = field(default_factory=list)

    async def ask(self, questions: Mapping[str, Json]) -> Mapping[str, Json]:
        self.asked.append(questions)
        return {key: self.answers[key] for key in questions}

    async def notify(self, method: str, params: Json) -> None:
        self.told.append((method, params))


@dataclass(slots=True)
class Servers:
    """`Upstreams` that answer from a list, the last entry again and again; each request is remembered."""

    replies: list[Reply] = field(default_factory=lambda: [OK])
    requests: list[UpstreamRequest] = field(default_factory=list)
    hold: anyio.Event | None = None
    """Set to make every request wait for it."""

    async def request(self, request: UpstreamRequest) -> Json:
        self.requests.append(request)
        if self.hold is not None:
            await self.hold.wait()
        reply = self.replies[min(len(self.requests), len(self.replies)) - 1]
        if isinstance(reply, Exception):
            raise reply
        return await reply(request) if callable(reply) else reply

    async def definitions(self, server: str, principal: Principal) -> list[Definition]:
        return []

    def isolation(self, server: str, *, fresh: bool = False, box: tuple[Principal, str] | None = None) -> Json:
        return {"backend": "host", "level": "none", "protections": {}}


@dataclass(slots=True)
class Wire:
    """A `Link` whose far end is a function of (method, params)."""

    answer: Callable[[str, Json, InFlight], Awaitable[Json]]
    requests: list[tuple[str, Json, Mapping[str, str]]] = field(default_factory=list)
    notes: list[tuple[str, Json | None]] = field(default_factory=list)
    end: anyio.Event = field(default_factory=anyio.Event)
    tell: Callable[[str, Json], Awaitable[None]] | None = None
    isolation: Json | None = None
    ending: str = ""
    hint: str = ""
    last_words: tuple[str, ...] = ()
    unowned: Callable[[str, Json], Awaitable[Json]] | None = None

    def network_meter(self) -> Callable[[], Json | None]:
        return lambda: {"allowed": [], "denied": [], "bytes_in": 0, "bytes_out": 0}

    def network_since_start(self) -> Json | None:
        return self.network_meter()()

    async def request(self, method: str, params: Json, exchange: InFlight) -> Json:
        self.requests.append((method, params, exchange.headers))
        return await self.answer(method, params, exchange)

    async def notify(self, method: str, params: Json | None, headers: Mapping[str, str] | None = None) -> None:
        self.notes.append((method, params))

    async def run(self, ready: Callable[[], object], tell: Callable[[str, Json], Awaitable[None]]) -> None:
        self.tell = tell
        ready()
        await self.end.wait()

    @property
    def methods(self) -> list[str]:
        return [method for method, _, _ in self.requests]


def far_end(tools: list[Json] | None = None, **methods: Any) -> Callable[[str, Json, InFlight], Awaitable[Json]]:
    """A server of the handshake era; `methods` are further results, errors or functions by name, `_` for `/`."""
    found: dict[str, Any] = {
        "initialize": {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}},
        "tools/list": {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}] if tools is None else tools},
        "tools/call": OK,
        **{name.replace("_", "/"): value for name, value in methods.items()},
    }

    async def answer(method: str, params: Json, exchange: InFlight) -> Json:
        reply = found.get(method, RpcError(-32601, f"Method not found: {method}"))
        if callable(reply):
            reply = await reply(params, exchange)
        if isinstance(reply, Exception):
            raise reply
        return dict(reply)

    return answer


def contract(name: str, **given: Any) -> Contract:
    built, problems = build(name, {"server": "desk", "mode": "read", **given})
    assert problems == []
    return built


ECHO = contract("echo")


def definition(name: str, **body: Any) -> Definition:
    whole = {"name": name, "inputSchema": {"type": "object"}, **body}
    return Definition("desk", name, canonical.definition_digest(whole), whole)


@dataclass(slots=True)
class Way:
    """A pipeline with a real store and fake servers."""

    pipeline: Pipeline
    store: Store
    servers: Servers
    budget: Budget
    client: Client = field(default_factory=Client)

    async def call(self, tool: str = "echo", arguments: Json | None = None, **more: Any) -> Outcome:
        return await self.pipeline.handle(make_call(tool, arguments, **more), self.client)

    def finished(self, call_id: str | None = None) -> list[Json]:
        return [r.body for r in self.store.reader().records(kind="finished", call_id=call_id)]

    def kinds(self, call_id: str) -> list[str]:
        return [record.kind for record in self.store.reader().records(call_id=call_id)]


DESK = ServerSpec("desk", url="http://127.0.0.1:9101/mcp", resources=("doc:*",), prompts=("greet",))
SHUT_IN = replace(DESK, url=None, command=("x",))
"""The same in a box that reaches nothing."""


def make_call(tool: str = "echo", arguments: Json | None = None, **more: Any) -> Call:
    principal = more.pop("principal", Principal("analyst", person="alice"))
    return Call(more.pop("id", canonical.new_id("call")), principal, tool, arguments or {}, **more)


@dataclass(frozen=True, slots=True)
class Said:
    """What a configuration would say; everything has a default."""

    contracts: tuple[Contract, ...] = (ECHO,)
    rules: tuple[Any, ...] = ()
    preset: str = "permissive"
    approvals: Mapping[str, ApprovalRule] = field(default_factory=dict)
    people: Mapping[str, Person] = field(default_factory=dict)
    agents: Mapping[str, AgentSpec] = field(default_factory=dict)
    networks: Mapping[str, NetworkSpec] = field(default_factory=dict)
    server: ServerSpec = DESK
    definitions: tuple[Definition, ...] = ()
    prompts: tuple[Definition, ...] = ()
    environment: str = "development"
    wait: float = 0.0


def rulebook(said: Said, store: Store) -> Rulebook:
    own = {("desk", c.tool): definition(c.tool) for c in said.contracts}
    own |= {("desk", d.name): d for d in said.definitions}
    return Rulebook(
        environment=said.environment,
        catalog=Catalog({c.name: c for c in said.contracts}, own, schemas=Schemas()),
        policy=Policy(said.rules, preset=said.preset, environment=said.environment),
        approvals=Approvals(store, said.approvals, said.people, wait_seconds=said.wait),
        servers={"desk": said.server},
        prompts={("desk", d.name): d for d in said.prompts},
        implicit={"desk": implicit_contract(said.server)},
        permissions=Permissions(said.agents, said.environment),
    )


@asynccontextmanager
async def governed(folder: Path, said: Said | None = None, replies: list[Reply] | None = None) -> AsyncIterator[Way]:
    """The way of a call, from the contract to the audit log, in a folder of its own."""
    said = said or Said()
    store = Store.open(folder / "state", load_or_create(folder / "keys"))
    try:
        servers = Servers(replies or [OK])
        dispatcher = Dispatcher(servers, DispatchTargets({"desk": said.server}, said.networks))
        schemas = Schemas()
        limits = Budget()
        pipeline = Pipeline(store, rulebook(said, store), dispatcher, Guard(schemas.result_problem), limits)
        yield Way(pipeline, store, servers, limits)
    finally:
        with anyio.CancelScope(shield=True):
            await store.aclose()


def chunked(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    """The same bytes in pieces, cut at these places."""
    places = sorted({min(cut, len(data)) for cut in cuts})
    for start, end in zip([0, *places], [*places, len(data)], strict=True):
        if data[start:end]:
            yield data[start:end]


async def broken(way: Way, kind: str) -> None:
    """From now on no record of this kind can be written."""
    with sqlite3.connect(way.store.folder / "ringfence.db") as database:
        (last,) = database.execute("SELECT coalesce(max(id), 0) FROM records").fetchone()
        # A kind is no JSON.
        database.execute(f"CREATE INDEX broken ON records(json(kind)) WHERE kind = '{kind}' AND id > {last}")
    database.close()
