"""Eight servers that we did not write, boxed: they do their work within their mounts, and get at nothing else.

Behind a gateway, and by `ringfence wrap` under a client that knows nothing of us.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from mcp import Client, StdioServerParameters

from tests.mcp import boxed, gateway
from tests.mcp.boxed import SERVERS, Outside, Server
from tests.mcp.gateway import JSON, Gateway, facts

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("server", SERVERS, ids=[server.name for server in SERVERS])]
NAMES = [server.name for server in SERVERS]


@pytest.fixture(scope="module")
def beyond(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    with boxed.outside(tmp_path_factory.mktemp("outside")) as made:
        yield made


def entry(server: Server, beyond: Outside) -> JSON:
    share = {"host": str(beyond.share), "at": str(beyond.share), "mode": "rw"}
    return {
        "command": server.command(beyond),
        "pins": "first_use",
        "start_timeout_seconds": 300,
        "env": server.env(beyond),
        "mounts": [share] if server.mounted else [],
        "network": "page" if server.reaches else "denied",
        **({"limits": server.limits} if server.limits else {}),
    }


@pytest.fixture
def served(server: Server, beyond: Outside, tmp_path: Path) -> Iterator[Gateway]:
    boxed.needed(server)
    named = {"network": "page"} if server.reaches else {}
    contracts = gateway.tools(server.name, *server.tools, mode="write", timeout_seconds=300, **named)
    networks = {"page": {"allow": [f"{boxed.HOST}:{beyond.page}"]}}
    settings = gateway.configuration({server.name: entry(server, beyond)}, contracts, networks=networks)
    with gateway.serve(tmp_path / "gateway", settings) as running:
        yield running


async def test_behind_a_gateway(server: Server, served: Gateway, beyond: Outside) -> None:
    async with served.client("legacy") as client:
        call = boxed.client_call(client)
        with anyio.fail_after(600):
            await server.works(call, beyond)
            await server.fails(call, beyond)
            told = facts(await client.call_tool(server.tools[-1], {}))
    isolation = told["isolation"]
    if isolation is not None and isolation.get("protections"):
        assert (isolation["backend"], isolation["level"]) == ("process", "process")
    assert "without a box" not in served.log()


async def test_by_wrap(server: Server, beyond: Outside, tmp_path: Path) -> None:
    boxed.needed(server)
    options: list[str] = []
    if server.mounted:
        options += ["--mount", f"{beyond.share}:{beyond.share}:rw"]
    if server.reaches:
        options += ["--allow", f"{boxed.HOST}:{beyond.page}"]
    for name, value in server.env(beyond).items():
        options += ["--env", f"{name}={value}"]
    if server.limits:
        options += ["--memory", str(server.limits["memory_mb"]), "--pids", str(server.limits["processes"])]
    own = {name: str(tmp_path / name) for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME")}
    words = ["-m", "ringfence.cli.main", "wrap", *options, "--", *server.command(beyond)]
    wrapped = StdioServerParameters(command=sys.executable, args=words, env={**os.environ, **own})
    with anyio.fail_after(600):
        async with Client(wrapped, mode="legacy") as client:
            call = boxed.client_call(client)
            await server.works(call, beyond)
            await server.fails(call, beyond)
