"""Ringfence from Python: a gateway inside your own process.

async with Gateway(upstream=[["python", "server.py"]], policy="standard") as gateway:
    outcome = await gateway.call_tool("echo", {"text": "hi"})
    print(outcome.status, outcome.text, outcome.facts["explanation"])
"""

from __future__ import annotations

import asyncio
import copy
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio

from ringfence import config
from ringfence.compose.gateway import App
from ringfence.compose.runs import UNATTENDED
from ringfence.config import Config, GatewaySettings, PolicySettings, SandboxSettings
from ringfence.config.writing import draft_contract
from ringfence.core import canonical
from ringfence.core.errors import ConfigError, Problem, Unavailable
from ringfence.core.model import Call, Contract, Json, Outcome, ServerSpec
from ringfence.governance.contract import build
from ringfence.governance.policy import PRESETS

Upstream = str | Sequence[str] | Mapping[str, Any]
"""A URL, a command as a list of words, or a mapping with the keys of a server in `ringfence.yaml` and `name`."""


class Gateway:
    """Governs calls to the servers given: contracts are drafted, definitions pinned on first use, calls recorded."""

    def __init__(
        self,
        upstream: Sequence[Upstream] = (),
        policy: str = "strict",
        sandbox: bool = True,
        *,
        state: str | Path | None = None,
        approval_wait_seconds: float = 30.0,
    ) -> None:
        if policy not in PRESETS:
            known = ", ".join(PRESETS)
            raise ConfigError([Problem("policy", 1, 1, f"there is no preset {policy!r}; there are: {known}")])
        self._upstream = tuple(upstream)
        self._policy = policy
        self._sandbox = sandbox
        self._state = Path(state) if state is not None else None
        self._wait = approval_wait_seconds
        self._settings: Config | None = None
        self._app: App | None = None
        self._task: asyncio.Task[None] | None = None
        self._down: asyncio.Event | None = None

    @classmethod
    def from_config(cls, path: str | Path) -> Self:
        """The gateway that a `ringfence.yaml` describes. Raises ConfigError with every problem."""
        gateway = cls()
        gateway._settings = config.load(Path(path))
        return gateway

    async def start(self) -> None:
        """Open the state and start the servers. Without a configuration file, draft a contract for each tool."""
        if self._task is not None:
            raise Unavailable("started", "the gateway is running already")
        drafting = self._settings is None
        settings = self._settings or self._draft()
        bare = [s.name for s in settings.servers.values() if s.command and s.placement == "unsafe_host"]
        if bare:
            text = f"{', '.join(bare)}: run on this host without a box; facts say isolation: none"
            warnings.warn(text, stacklevel=2)
        # In a task of its own, so that start() and stop() may be called from different ones.
        up = asyncio.Event()
        self._down = asyncio.Event()
        self._task = asyncio.create_task(self._run(settings, drafting, up, self._down))
        waiting = asyncio.create_task(up.wait())
        await asyncio.wait({self._task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not up.is_set():
            waiting.cancel()
            task, self._task = self._task, None
            await task  # raises what went wrong

    async def _run(self, settings: Config, drafting: bool, up: asyncio.Event, down: asyncio.Event) -> None:
        async with App.open(settings) as app, anyio.create_task_group() as group:
            if drafting:
                await app.draft(_contract)
            await group.start(app.run_hooks)
            self._app = app
            up.set()
            await down.wait()
            self._app = None
            group.cancel_scope.cancel()

    async def stop(self) -> None:
        """End the servers and close the state."""
        task, self._task = self._task, None
        if task is not None and self._down is not None:
            self._down.set()
            await task

    async def list_tools(self) -> list[Json]:
        """The tools that may be called: MCP definitions, by the names of their contracts."""
        app = self._running()
        return copy.deepcopy(app.front.listing.tools(principal=app.agent))

    async def call_tool(self, name: str, args: Mapping[str, Any] | None = None, **options: Any) -> Outcome:
        """One governed call. A refusal is an outcome, not an exception. `idempotency_key=` may be given."""
        app = self._running()
        call = Call(
            id=canonical.new_id("call"),
            principal=app.agent,
            tool=name,
            arguments=dict(args or {}),
            origin="sdk",
            idempotency_key=options.pop("idempotency_key", None),
        )
        if options:
            raise TypeError(f"call_tool takes no option {', '.join(options)}")
        return await app.handle(call, UNATTENDED)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _running(self) -> App:
        if self._app is None:
            raise Unavailable("not_started", "the gateway is not running: use `async with` or call start()")
        return self._app

    def _draft(self) -> Config:
        servers: dict[str, ServerSpec] = {}
        for index, given in enumerate(self._upstream):
            spec = _server(given, f"server{index + 1}")
            if not self._sandbox and spec.command:
                spec = replace(spec, placement="unsafe_host")
            if spec.name in servers:
                raise ConfigError([Problem("upstream", 1, index + 1, f"two servers are named {spec.name!r}")])
            servers[spec.name] = spec
        state = self._state.absolute() if self._state is not None else config.state_folder()
        return config.sealed(
            Config(
                path=Path("upstream"),
                environment="development",
                gateway=GatewaySettings("127.0.0.1", 0, state, self._wait),
                people={},
                servers=servers,
                contracts={},
                networks={},
                secrets={},
                approvals={},
                policy=PolicySettings(preset=self._policy),
                sandbox=SandboxSettings(),
                own_tools=False,
            )
        )


def _server(given: Upstream, name: str) -> ServerSpec:
    """Read like a configuration, so that no key that is wrong or not built is accepted. Raises ConfigError."""
    if isinstance(given, str):
        keys: dict[str, Any] = {"url": given}
    elif isinstance(given, Mapping):
        keys = dict(given)
    else:
        keys = {"command": list(given)}
    if not isinstance(keys.get("command", []), str):
        keys = {k: [str(word) for word in v] if k == "command" else v for k, v in keys.items()}
    named = str(keys.pop("name", name))
    text = json.dumps({"servers": {named: {"pins": "first_use", **keys}}}, ensure_ascii=False)
    return config.loads(text, file=f"upstream {named}", base=Path.cwd()).servers[named]


def _contract(server: str, definition: Json) -> Contract:
    """A cautious draft, from the server's hints, which policy never sees."""
    contract, _ = build(str(definition["name"]), {"transport": "mcp", "server": server, **draft_contract(definition)})
    return contract
