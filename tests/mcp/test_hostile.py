"""A server that hangs, floods, babbles, dies or never starts harms its own call and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import anyio
import mcp_types as types
import pytest
from mcp import Client

from tests import tooling
from tests.mcp import gateway
from tests.mcp.gateway import ERAS, JSON, Gateway, about, facts, text_of

pytestmark = pytest.mark.anyio
eras = pytest.mark.parametrize("mode", ERAS)

MISBEHAVIOURS = ("echo", "slow", "flood", "huge_line", "garbage", "noisy", "counter", "environ")
SILENT = ("hang", "wrong_id")


def stands_in(folder: Path, command: list[str]) -> JSON:
    """A server that starts only while there is no file named `broken`."""
    script = folder / "mortal.py"
    script.write_text(f"""import os, sys
if os.path.exists({str(folder / "broken")!r}):
    sys.exit(3)
os.execv({command[0]!r}, {command!r})
""")
    code = str(tooling.FIXTURES)  # which nothing but that text names
    return {"command": [command[0], str(script)], "mounts": [{"host": code, "at": code}]}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, hostile_command: list[str]) -> Iterator[Gateway]:
    base = tmp_path_factory.mktemp("hostile")

    def server(command: list[str], **more: object) -> JSON:
        return {"command": command, "pins": "first_use", **more}

    servers = {
        "hostile": server(hostile_command),
        "neighbour": server(hostile_command),
        "mortal": {**stands_in(base, hostile_command), "pins": "first_use"},
        "frozen": server(hostile_command),
        "hanging": server([*hostile_command, "--at-start", "hang"], start_timeout_seconds=1),
        "dying": server([*hostile_command, "--at-start", "die"]),
        "greeting": server([*hostile_command, "--at-start", "garbage"]),
        "absent": server([str(base / "no-such-program")]),
    }
    contracts = {
        **gateway.tools("hostile", *MISBEHAVIOURS, timeout_seconds=300),
        **gateway.tools("hostile", *SILENT, timeout_seconds=1.5),
        "hang_write": {"transport": "mcp", "server": "hostile", "tool": "hang", "mode": "write", "timeout_seconds": 1},
        **gateway.tools("mortal", "die", "die_before", mode="write", timeout_seconds=120),
        **gateway.tools("frozen", "freeze", timeout_seconds=1),
    }
    for server_name in ("neighbour", "mortal", "frozen", "hanging", "dying", "greeting", "absent"):
        contract = {"transport": "mcp", "server": server_name, "tool": "echo", "mode": "read", "timeout_seconds": 120}
        contracts[f"{server_name}_echo"] = {**contract, "retry": {"attempts": 0}}
    contracts["frozen_echo"]["timeout_seconds"] = 1.5
    # The same for a machine on which whatever goes on beside them takes longer than they do.
    for name in ("hang", "hang_write", "wrong_id", "frozen_echo"):
        contracts[f"{name}_longer"] = {"tool": name, **contracts[name], "timeout_seconds": 30}
    with gateway.serve(base, gateway.configuration(servers, contracts)) as running:
        yield running


async def good(client: Client, tool: str = "neighbour_echo", said: str = "hello") -> None:
    """A call that must come through."""
    with anyio.fail_after(tooling.PATIENCE):
        result = await client.call_tool(tool, {"text": said})
    assert text_of(result) == said, text_of(result)


async def beside(client: Client, *bad: tuple[str, JSON]) -> types.CallToolResult:
    """Make the bad call, and good ones while it lasts; every good one must be answered before it ends.

    On a slow machine one that takes longer may be needed for that; each takes longer than the one before.
    """
    for tool, arguments in bad:
        result, order = await _beside(client, tool, arguments, BOTH)
        if order == [*BOTH, "bad"]:
            return result
    raise AssertionError(order)


async def _beside(
    client: Client, tool: str, arguments: JSON, others: tuple[str, ...]
) -> tuple[types.CallToolResult, list[str]]:
    order: list[str] = []
    results: list[types.CallToolResult] = []

    async def bad() -> None:
        results.append(await client.call_tool(tool, arguments))
        order.append("bad")

    async with anyio.create_task_group() as group:
        group.start_soon(bad)
        await anyio.sleep(0.1)
        for other in others:
            await good(client, other)
            order.append(other)
    return results[0], order


def recorded(served: Gateway, result: types.CallToolResult) -> JSON:
    body = served.finished(about(result)["call_id"])
    assert (body["status"], body["reason_code"]) == (about(result)["status"], about(result)["reason_code"])
    return body


BOTH = ("neighbour_echo", "echo")


@eras
@pytest.mark.parametrize(("tool", "effect"), [("hang", "none"), ("hang_write", "unknown"), ("wrong_id", "none")])
async def test_silence_ends_at_the_deadline(served: Gateway, mode: str, tool: str, effect: str) -> None:
    async with served.client(mode) as client:
        result = await beside(client, (tool, {}), (f"{tool}_longer", {}))
    assert result.is_error and (about(result)["status"], facts(result)["effect"]) == ("timeout", effect)
    assert facts(result)["timed_out"] is True
    assert recorded(served, result)["effect"] == effect


@eras
async def test_flood_of_messages_leaves_room_for_others(served: Gateway, mode: str) -> None:
    async with served.client(mode) as client:
        result = await beside(client, *(("flood", {"count": count}) for count in (5000, 20_000, 100_000)))
    assert text_of(result) == "flooded"


async def test_flood_of_stderr_leaves_room_for_others(served: Gateway) -> None:
    async with served.client("legacy") as client:
        async with anyio.create_task_group() as group:
            group.start_soon(good, client)
            group.start_soon(good, client, "echo")
            result = await client.call_tool("noisy", {"bytes": 5_000_000})
        assert text_of(result) == "loud"
        await anyio.sleep(1.1)
        await client.call_tool("noisy", {"bytes": 1000})
    assert served.log().count("e" * 199) < 2000, "the log keeps a bounded share of it"


@eras
async def test_line_of_20_mb_fails_its_own_call(served: Gateway, mode: str) -> None:
    async with served.client(mode) as client:
        async with anyio.create_task_group() as group:
            group.start_soon(good, client)
            group.start_soon(good, client, "echo")
            result = await client.call_tool("huge_line", {"bytes": 20_000_000})
        assert result.is_error
        assert (about(result)["status"], about(result)["reason_code"]) == ("failed", "answer_unusable")
        await good(client, "echo")
    recorded(served, result)


@eras
async def test_garbage_between_messages_is_passed_over(served: Gateway, mode: str) -> None:
    async with served.client(mode) as client:
        assert text_of(await client.call_tool("garbage", {})) == "after the garbage"
        await good(client, "echo")
        await good(client)


@eras
async def test_slow_answer_holds_up_nobody(served: Gateway, mode: str) -> None:
    async with served.client(mode) as client:
        result = await beside(client, *(("slow", {"seconds": seconds}) for seconds in (1, 10, 60)))
    assert text_of(result) == "at last"


async def test_frozen_server_stops_nobody_else(served: Gateway) -> None:
    """It reads nothing any more, so that even what we write to it gets stuck."""
    big = "x" * 300_000
    async with served.client("legacy") as client:
        assert about(await client.call_tool("freeze", {}))["status"] == "timeout"
        for tool in ("frozen_echo", "frozen_echo_longer"):
            early = await _beside_stuck(client, tool, {"text": big})
            if not early:  # otherwise this machine needs longer for what goes on beside them
                break
    assert not early


async def _beside_stuck(client: Client, tool: str, arguments: JSON) -> list[str]:
    """How many of those that get stuck ended before what went on beside them; they all end at their deadline."""
    results: list[str] = []

    async def stuck() -> None:
        results.append(about(await client.call_tool(tool, arguments))["status"])

    with anyio.fail_after(tooling.PATIENCE):  # however full the pipe
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(stuck)
            await anyio.sleep(0.1)
            for _ in range(5):
                await good(client)
            early = list(results)
    assert results == ["timeout"] * 3
    return early


# ── dying and coming back ─────────────────────────────────────────────────────────────────────────


@eras
@pytest.mark.parametrize("tool", ["die", "die_before"])
async def test_death_during_a_call_leaves_its_outcome_unknown(served: Gateway, mode: str, tool: str) -> None:
    async with served.client(mode) as client:
        await until_well(client, "mortal_echo")
        result = await client.call_tool(tool, {})
        await good(client)
        await until_well(client, "mortal_echo")
    assert result.is_error and about(result)["reason_code"] == "server_died"
    assert (about(result)["status"], facts(result)["effect"]) == ("unknown", "unknown")
    assert recorded(served, result)["effect"] == "unknown"


async def until_well(client: Client, tool: str) -> list[str]:
    """Call until it works; how the calls before ended."""
    ends: list[str] = []
    with anyio.fail_after(300):
        while True:
            result = await client.call_tool(tool, {"text": "well"})
            if not result.is_error:
                return ends
            assert about(result)["status"] == "unavailable", text_of(result)
            assert facts(result)["effect"] == "none"
            ends.append(about(result)["reason_code"])
            await anyio.sleep(0.1)


async def test_server_that_cannot_start_is_retried_with_growing_pauses(served: Gateway) -> None:
    broken = served.config.parent / "broken"
    async with served.client("legacy") as client:
        await until_well(client, "mortal_echo")
        broken.touch()
        try:
            await client.call_tool("die", {})
            starts = len(starts_of(served, "mortal"))
            ends: list[str] = []
            # The pauses grow until calls come in between, however slow they are.
            with anyio.fail_after(300):
                while ends.count("server_down") < 4 or "server_start" not in ends:
                    result = await client.call_tool("mortal_echo", {"text": "x"})
                    assert about(result)["status"] == "unavailable"
                    ends.append(about(result)["reason_code"])
                    await good(client)
                    await anyio.sleep(0.02)
            tried = len(starts_of(served, "mortal")) - starts
        finally:
            broken.unlink()
        assert set(ends) == {"server_start", "server_down"}, "tried, and between the tries said to be down"
        assert 1 <= tried <= len(ends) - 4, "fewer starts than calls"
        await until_well(client, "mortal_echo")
        await good(client, "mortal_echo")
    assert {body["status"] for body in starts_of(served, "mortal")} == {"success", "failed"}


def starts_of(served: Gateway, server: str) -> list[JSON]:
    bodies = [record.body for record in served.records(kind="finished")]
    return [b for b in bodies if b["call"]["method"] == "server/start" and b["call"]["server"] == server]


# ── not starting at all ───────────────────────────────────────────────────────────────────────────


@eras
@pytest.mark.parametrize("server", ["hanging", "dying", "absent"])
async def test_server_that_never_starts_is_unavailable(served: Gateway, mode: str, server: str) -> None:
    async with served.client(mode) as client:
        assert f"{server}_echo" not in {tool.name for tool in (await client.list_tools()).tools}
        result = await client.call_tool(f"{server}_echo", {"text": "x"})
        await good(client)
    assert result.is_error and about(result)["status"] == "unavailable"
    recorded(served, result)
    ran = {"unavailable"} if server == "absent" else {"failed"}
    assert {body["status"] for body in starts_of(served, server)} == ran
    assert f"server {server} is not available" in served.log()


@eras
async def test_babble_before_the_first_message_is_passed_over(served: Gateway, mode: str) -> None:
    async with served.client(mode) as client:
        await good(client, "greeting_echo")


async def test_servers_get_no_environment_of_ours(served: Gateway) -> None:
    async with served.client("legacy") as client:
        names = set(json.loads(text_of(await client.call_tool("environ", {})))["names"])
    # What the interpreter itself adds is not ours.
    ours = {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TERM", "TMPDIR"}
    ours.add("NODE_OPTIONS")  # a file of the box
    assert names <= ours, names - ours


async def test_gateway_is_well_after_all_this_and_leaves_no_process(tmp_path: Path, hostile_command: list[str]) -> None:
    config = gateway.configuration(
        {"hostile": {"command": hostile_command, "pins": "first_use"}}, gateway.tools("hostile", "environ")
    )
    with gateway.serve(tmp_path, config) as running:
        async with running.client("legacy") as client:
            pid = json.loads(text_of(await client.call_tool("environ", {})))["pid"]
        # Within its box it has another number.
        started = tooling.descendants(running.started.pid, "hostile_server.py") if running.started else []
        assert running.healthy() and pid and len(started) == 1
        assert running.started is not None
        assert running.started.stop() == 0
    tooling.wait_until_gone(started[0])
