"""A server behind a URL that floods costs itself: calls of others are answered meanwhile, its own end in time."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx2
import pytest
from mcp import Client

from tests import tooling
from tests.mcp import gateway
from tests.mcp.gateway import JSON, Gateway, about, text_of

pytestmark = pytest.mark.anyio

KINDS = ("messages", "progress", "pings", "comments", "crumbs", "hints")
MAX_GROWTH = 150_000_000


@pytest.fixture(scope="module")
def flooding_url() -> Iterator[str]:
    port = tooling.free_port()
    script = tooling.FIXTURES / "flooding_server.py"
    with tooling.start_process([sys.executable, str(script), str(port)]):
        tooling.wait_for_port(port)
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, flooding_url: str, hostile_command: list[str]
) -> Iterator[Gateway]:
    servers: dict[str, JSON] = {
        "flooding": {"url": f"{flooding_url}/mcp", "pins": "first_use"},
        "neighbour": {"command": hostile_command, "pins": "first_use"},
    }
    plain = {"transport": "mcp", "mode": "read", "timeout_seconds": 300, "retry": {"attempts": 0}}
    contracts = {
        "flood": {**plain, "server": "flooding", "tool": "flood"},
        "short_flood": {**plain, "server": "flooding", "tool": "flood", "timeout_seconds": 1},
        "same_echo": {**plain, "server": "flooding", "tool": "echo"},
        "other_echo": {**plain, "server": "neighbour", "tool": "echo"},
    }
    with gateway.serve(tmp_path_factory.mktemp("floods"), gateway.configuration(servers, contracts)) as running:
        yield running


def held_bytes(served: Gateway) -> int:
    assert served.started is not None
    pages = Path(f"/proc/{served.started.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def has_begun(url: str, count: int) -> None:
    async with httpx2.AsyncClient() as client:
        while (await client.get(f"{url}/begun")).json() < count:
            await anyio.sleep(0.05)


async def echoes(client: Client, times: int) -> list[str]:
    said = []
    for number in range(times):
        for tool in ("other_echo", "same_echo"):
            said.append(text_of(await client.call_tool(tool, {"text": f"{tool} {number}"})))
    return said


@pytest.mark.parametrize("kind", KINDS)
async def test_a_flood_leaves_room_for_others_and_ends_at_its_deadline(
    served: Gateway, flooding_url: str, kind: str
) -> None:
    async with served.client("legacy") as client, httpx2.AsyncClient() as asking:
        await client.set_logging_level("debug")
        expected = await echoes(client, 3)
        before = held_bytes(served)
        begun = (await asking.get(f"{flooding_url}/begun")).json()
        ended: list[str] = []
        async with anyio.create_task_group() as group:

            async def flood() -> None:
                await client.call_tool("flood", {"kind": kind})
                ended.append(kind)

            for _ in range(3):
                group.start_soon(flood)
            await has_begun(flooding_url, begun + 3)
            assert await echoes(client, 3) == expected
            late = await client.call_tool("short_flood", {"kind": kind})
            assert about(late)["status"] == "timeout"
            assert await echoes(client, 3) == expected
            assert ended == [], "the floods have no end of their own"
            group.cancel_scope.cancel()
        assert await echoes(client, 3) == expected
        assert held_bytes(served) - before < MAX_GROWTH
