"""What happens around a call while it runs: cancellation, progress and log lines, over HTTP and stdio."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import mcp_types as types
import pytest
from mcp import Client

from tests import tooling
from tests.mcp import gateway
from tests.mcp.gateway import ERAS, JSON, MODERN, Gateway, text_of

pytestmark = pytest.mark.anyio
eras = pytest.mark.parametrize("mode", ERAS)
upstreams = pytest.mark.parametrize("upstream", ["handshake", "modern"])
STEPS = [(float(n), 100.0, f"Completed step {n} of 100") for n in (0, 50, 100)]


def house(hostile_command: list[str], *revisions: str) -> JSON:
    servers: dict[str, JSON] = {"hostile": {"command": hostile_command, "pins": "first_use"}}
    contracts = {
        **gateway.tools("hostile", "cancellations", "echo"),
        **gateway.tools("hostile", "hang", timeout_seconds=300, mode="write"),
        "brief_hang": {"transport": "mcp", "server": "hostile", "tool": "hang", "mode": "write", "timeout_seconds": 4},
    }
    for era in revisions:
        command = tooling.fixture_command("everything_server.py", "--stdio", "--era", era)
        servers[era] = {"command": command, "pins": "first_use"}
        for verb, tool in (("progress", "test_tool_with_progress"), ("log", "test_tool_with_logging")):
            contracts[f"{era}-{verb}"] = {"transport": "mcp", "server": era, "tool": tool, "mode": "read"}
    return gateway.configuration(servers, contracts)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, hostile_command: list[str]) -> Iterator[Gateway]:
    with gateway.serve(tmp_path_factory.mktemp("calls"), house(hostile_command, "handshake", "modern")) as running:
        yield running


class Heard:
    """Writes down the progress and the log lines that a client receives."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float | None, str | None]] = []
        self.lines: list[Any] = []

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        self.steps.append((progress, total, message))

    async def log(self, params: types.LoggingMessageNotificationParams) -> None:
        self.lines.append(params.data)


async def cancelled(client: Client) -> list[int]:
    found: list[int] = json.loads(text_of(await client.call_tool("cancellations", {})))
    return found


@asynccontextmanager
async def cancelled_once_begun(files: Gateway, tool: str) -> AsyncIterator[None]:
    """What is called within is cancelled when it is on record that it began, however long that takes."""

    def begun() -> int:
        return sum(record.body["call"]["tool"] == tool for record in files.records(kind="started"))

    async def cancel() -> None:
        await tooling.until(lambda: begun() > before)
        await anyio.sleep(0.2)  # on its way to the server
        scope.cancel()

    before = begun() if files.state.exists() else 0
    async with anyio.create_task_group() as group:
        group.start_soon(cancel)
        with anyio.CancelScope() as scope:
            yield
        assert scope.cancelled_caught


async def give_up(client: Client, files: Gateway) -> None:
    """Cancel a call, and see that its server was told and that the next call works."""
    before = await cancelled(client)
    async with cancelled_once_begun(files, "hang"):
        await client.call_tool("hang", {})
    with anyio.fail_after(tooling.PATIENCE):
        while len(await cancelled(client)) == len(before):
            await anyio.sleep(0.05)
    assert text_of(await client.call_tool("echo", {"text": "still here"})) == "still here"


def check_record(served: Gateway, origin: str) -> None:
    finished = served.last_finished("hang")
    assert (finished["status"], finished["reason_code"], finished["effect"]) == ("killed", "cancelled", "unknown")
    assert finished["call"]["origin"] == origin


@eras
async def test_cancellation_reaches_the_server_and_the_record(served: Gateway, mode: str) -> None:
    async with served.client(mode) as client:
        await give_up(client, served)
    check_record(served, "mcp-http")


@eras
async def test_call_of_a_client_that_vanished_is_closed_on_record(served: Gateway, mode: str) -> None:
    """At 2026-07-28 a closed connection cancels; before, the call goes on until its deadline."""
    tool = "hang" if mode == MODERN else "brief_hang"
    async with cancelled_once_begun(served, tool), served.client(mode) as client:
        await client.call_tool(tool, {})
    finished = served.last_finished(tool)
    assert finished["status"] == ("killed" if mode == MODERN else "timeout")


@eras
@upstreams
async def test_progress_is_relayed(served: Gateway, mode: str, upstream: str) -> None:
    heard = Heard()
    async with served.client(mode) as client:
        await client.call_tool(f"{upstream}-progress", {}, progress_callback=heard.progress)
    assert heard.steps == STEPS[: len(heard.steps)] and len(heard.steps) >= 2


@upstreams
async def test_log_level_of_a_session(served: Gateway, upstream: str) -> None:
    heard = Heard()
    async with served.client("legacy", logging_callback=heard.log) as client:
        await client.set_logging_level("error")
        await client.call_tool(f"{upstream}-log", {})
        assert heard.lines == []
        await client.set_logging_level("info")
        await client.call_tool(f"{upstream}-log", {})
    assert heard.lines[:2] == ["Tool execution started", "Tool processing data"]


@upstreams
@pytest.mark.parametrize(("level", "loud"), [(None, False), ("error", False), ("info", True)])
async def test_log_level_of_a_request(served: Gateway, upstream: str, level: Any, loud: bool) -> None:
    heard = Heard()
    async with served.client(MODERN, logging_callback=heard.log, log_level=level) as client:
        await client.call_tool(f"{upstream}-log", {})
    assert bool(heard.lines) is loud


@eras
async def test_stream_that_a_server_closes_is_resumed(tmp_path: Path, mode: str) -> None:
    """At 2025-11-25 a server may let go of the connection in the middle of a call, and answer on the next one."""
    with tooling.serve_fixture("everything_server.py", "--era", "handshake") as url:
        config = gateway.configuration(
            {"remote": {"url": url, "pins": "first_use"}}, gateway.tools("remote", "test_reconnection")
        )
        with gateway.serve(tmp_path, config) as running:
            async with running.client(mode) as client:
                result = await client.call_tool("test_reconnection", {})
    assert text_of(result) == "Reconnection test completed"


@eras
async def test_the_same_over_stdio(tmp_path: Path, hostile_command: list[str], mode: str) -> None:
    """The bridged revision behind: each client meets a server of the other one."""
    other = "modern" if mode == "legacy" else "handshake"
    files = gateway.write(tmp_path, house(hostile_command, other))
    heard = Heard()
    level: Any = None if mode == "legacy" else "info"
    async with Client(files.stdio(), mode=mode, cache=None, logging_callback=heard.log, log_level=level) as client:
        await give_up(client, files)
        await client.call_tool(f"{other}-progress", {}, progress_callback=heard.progress)
        if mode == "legacy":
            await client.set_logging_level("info")
        await client.call_tool(f"{other}-log", {})
    assert heard.steps == STEPS[: len(heard.steps)] and len(heard.steps) >= 2
    assert heard.lines[:2] == ["Tool execution started", "Tool processing data"]
    check_record(files, "mcp-stdio")


def test_a_call_that_ends_because_the_gateway_is_stopped_says_so(tmp_path: Path, hostile_command: list[str]) -> None:
    def ask() -> None:
        with contextlib.suppress(httpx2.HTTPError):  # the connection ends with the gateway
            raw.post(gateway.call("hang"))

    with gateway.serve(tmp_path, house(hostile_command)) as served, gateway.RawHttp(served) as raw:
        raw.open()
        asking = threading.Thread(target=ask)
        asking.start()
        begun = lambda: [r for r in served.records(kind="started") if r.body["call"].get("tool") == "hang"]  # noqa: E731
        tooling.wait_until(begun)
        assert served.started is not None
        served.started.stop()
        asking.join()
    record = served.finished(str(begun()[0].call_id))
    assert (record["status"], record["reason_code"]) == ("killed", "stopping")
    assert "caller" not in record["message"]
