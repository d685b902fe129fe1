"""Ringfence from Python: every kind of upstream, a governed call, and errors that say what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from ringfence import Gateway
from ringfence.core.errors import ConfigError, StoreError, Unavailable
from ringfence.core.model import Mode, Status
from ringfence.sdk.gateway import _contract
from tests import gateways, tooling

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def helpdesk() -> Iterator[str]:
    with tooling.serve_fixture("helpdesk_server.py") as url:
        yield url


async def test_a_url_a_command_and_a_mapping_are_upstreams(
    echo_url: str, helpdesk: str, hostile_command: list[str], tmp_path: Path
) -> None:
    upstream: list[Any] = [echo_url, hostile_command, {"name": "desk", "url": helpdesk, "elicitation": "deny"}]
    async with Gateway(upstream, "permissive", state=tmp_path / "state") as gateway:
        names = [tool["name"] for tool in await gateway.list_tools()]
        assert names.count("echo") == 1, "the first server with a tool of that name has it"
        assert {"echo", "counter", "create_ticket"} <= set(names)
        echoed = await gateway.call_tool("echo", {"text": "hi"})
        assert (echoed.status, echoed.text, echoed.facts["isolation"]["backend"]) == (Status.SUCCESS, "hi", "remote")
        assert (await gateway.call_tool("counter")).facts["isolation"]["backend"] == "process"
        filed = await gateway.call_tool("create_ticket", {"title": "x"})
        assert filed.structured == {"number": 7}
        assert filed.facts["effect"] == "confirmed"
        assert [block["type"] for block in filed.content] == ["text", "image", "audio"]
    servers = {body["call"]["server"] for body in gateways.finished(tmp_path / "state")}
    assert servers == {"server1", "server2", "desk"}


async def test_a_refusal_is_an_outcome_and_no_exception(echo_url: str, tmp_path: Path) -> None:
    async with Gateway([echo_url], state=tmp_path, approval_wait_seconds=0) as gateway:
        asked = await gateway.call_tool("echo", {"text": "x"})
        assert (asked.status, asked.ok) == (Status.APPROVAL_REQUIRED, False), "strict asks for whatever may write"
        assert asked.approval_id is not None
        assert asked.approval_id in asked.text
        assert (await gateway.call_tool("ecko")).status is Status.VALIDATION_FAILURE
        assert (await gateway.call_tool("echo", {"text": float("nan")})).status is Status.VALIDATION_FAILURE


async def test_options_of_a_call(echo_url: str, tmp_path: Path) -> None:
    async with Gateway([echo_url], "permissive", state=tmp_path) as gateway:
        first = await gateway.call_tool("echo", {"text": "x"}, idempotency_key="k")
        again = await gateway.call_tool("echo", {"text": "x"}, idempotency_key="k")
        assert again.text == first.text
        assert gateways.finished(tmp_path)[1]["replayed_from"] == first.facts["call_id"]
        with pytest.raises(TypeError, match="timeout"):
            await gateway.call_tool("echo", {}, timeout=5)


async def test_a_list_is_the_callers_own(echo_url: str, tmp_path: Path) -> None:
    async with Gateway([echo_url], "permissive", state=tmp_path) as gateway:
        shown = await gateway.list_tools()
        shown[0]["inputSchema"].clear()
        shown.clear()
        assert (await gateway.list_tools())[0]["inputSchema"]["required"] == ["text"]


async def test_a_gateway_from_a_file(echo_url: str, tmp_path: Path) -> None:
    path = gateways.write(tmp_path, f"""
        gateway: {{state: ./state}}
        servers: {{far: {{url: "{echo_url}", pins: first_use}}}}
        capabilities: {{talk: {{tool: echo, mode: read}}}}
    """)  # fmt: skip
    gateway = Gateway.from_config(path)
    for _ in range(2):  # it can be started again
        async with gateway:
            assert [tool["name"] for tool in await gateway.list_tools()] == ["talk", *gateways.own_tools()]
            assert (await gateway.call_tool("talk", {"text": "hi"})).text == "hi"
    assert len(gateways.finished(tmp_path / "state")) == 2
    path.write_text("capabilites: {}\n")
    with pytest.raises(ConfigError, match="did you mean 'capabilities'"):
        Gateway.from_config(path)
    with pytest.raises(ConfigError):
        Gateway.from_config(tmp_path / "missing.yaml")


async def test_it_runs_only_between_start_and_stop(echo_url: str, tmp_path: Path) -> None:
    gateway = Gateway([echo_url], "permissive", state=tmp_path)
    for use in (gateway.list_tools, lambda: gateway.call_tool("echo")):
        with pytest.raises(Unavailable, match="not running"):
            await use()
    await gateway.stop()  # nothing to stop
    await gateway.start()
    with pytest.raises(Unavailable, match="running already"):
        await gateway.start()
    assert (await gateway.call_tool("echo", {"text": "x"})).ok
    await gateway.stop()
    await gateway.stop()
    with pytest.raises(Unavailable):
        await gateway.call_tool("echo")
    assert gateways.verified(tmp_path).ok


async def test_start_and_stop_may_be_in_different_tasks(echo_url: str, tmp_path: Path) -> None:
    gateway = Gateway([echo_url], "permissive", state=tmp_path)
    for step in (gateway.start, gateway.stop):
        async with anyio.create_task_group() as group:
            group.start_soon(step)
    assert [body["kind"] for body in gateways.records(tmp_path)][-1] == "chain_closed"


@pytest.mark.parametrize(
    ("upstream", "problem"),
    [
        ([{"url": "http://127.0.0.1:1/mcp", "sampling": "Deny"}], "did you mean 'deny'"),
        ([{"url": "http://127.0.0.1:1/mcp", "eliciation": "deny"}], "did you mean 'elicitation'"),
        ([{"command": ["x"], "mounts": [{"host": "/", "at": "/x"}]}], "unsafe: REASON"),
        ([{"command": ["x"], "network": "inside"}], "network"),
        ([{"command": ["x"], "url": "http://127.0.0.1:1/mcp"}], "command|url"),
        (["ftp://x"], "http"),
        ([[]], "must not be empty"),
        ([{"name": "a", "command": ["x"]}, {"name": "a", "command": ["y"]}], "two servers are named 'a'"),
    ],
)
async def test_a_wrong_upstream_is_refused_as_in_a_file(upstream: list[Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        await Gateway(upstream, state=tmp_path / "state").start()
    assert not (tmp_path / "state").exists()


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match="standard"):
        Gateway(policy="lenient")


async def test_a_server_that_is_down_leaves_the_others(echo_url: str, tmp_path: Path) -> None:
    upstream: list[Any] = [{"name": "down", "command": [sys.executable, "-c", "import sys; sys.exit(3)"]}, echo_url]
    async with Gateway(upstream, "permissive", state=tmp_path) as gateway:
        assert [tool["name"] for tool in await gateway.list_tools()] == ["echo"]


async def test_a_state_that_cannot_be_used_is_said(echo_url: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError):
        await Gateway([echo_url], state=tmp_path / "file" / "state").start()


async def test_servers_without_a_box_are_warned_about(hostile_command: list[str], tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="without a box"):
        async with Gateway([hostile_command], "permissive", sandbox=False, state=tmp_path) as gateway:
            assert (await gateway.call_tool("counter")).facts["isolation"]["level"] == "none"


@pytest.mark.parametrize(
    ("annotations", "mode"),
    [({"readOnlyHint": True}, Mode.READ), ({"readOnlyHint": "yes"}, Mode.WRITE), (None, Mode.WRITE), ([], Mode.WRITE)],
)
def test_a_draft_is_cautious(annotations: Any, mode: Mode) -> None:
    contract = _contract("desk", {"name": "t", "annotations": annotations})
    assert (contract.name, contract.server, contract.mode, contract.approval) == ("t", "desk", mode, "none")
