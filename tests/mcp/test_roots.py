"""Roots of a client reach a server that goes by them, and give it nothing that its box does not show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp import Client, stdio_client

from tests import tooling
from tests.mcp import gateway
from tests.mcp.gateway import MODERN, Gateway, text_of

pytestmark = pytest.mark.anyio


@dataclass(frozen=True, slots=True)
class House:
    gateway: Gateway
    first: Path
    second: Path
    outside: Path
    """Of no mount."""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    base = tmp_path_factory.mktemp("roots")
    folders = [base / name for name in ("first", "second", "outside")]
    for folder in folders:
        folder.mkdir()
        (folder / "a.txt").write_text(f"in {folder.name}")
    first, second, outside = folders
    mounts = [{"host": str(each), "at": str(each), "mode": "ro"} for each in (first, second)]
    command = tooling.npm_command("mcp-server-filesystem", str(first))
    server = {"command": command, "pins": "first_use", "mounts": mounts}
    contracts = gateway.tools("files", "list_allowed_directories", "read_text_file")
    with gateway.serve(base / "gateway", gateway.configuration({"files": server}, contracts)) as served:
        yield House(served, first, second, outside)


class Roots:
    """What a client tells."""

    def __init__(self, *folders: Path) -> None:
        self.folders = folders
        self.asked = 0

    async def __call__(self, context: Any) -> types.ListRootsResult:
        self.asked += 1
        return types.ListRootsResult(
            roots=[types.Root.model_validate({"uri": f"file://{folder}"}) for folder in self.folders]
        )


async def said(client: Client, tool: str, **arguments: str) -> str:
    return text_of(await client.call_tool(tool, arguments))


async def comes_to_say(wanted: Callable[[str], bool], client: Client, tool: str, **arguments: str) -> str:
    """The server looks at the folders that it was told of before it goes by them, and answers calls meanwhile."""
    with anyio.fail_after(tooling.PATIENCE):
        while not wanted(told := await said(client, tool, **arguments)):
            await anyio.sleep(0.05)
    return told


@pytest.mark.parametrize("transport", ["http", "stdio"])
async def test_a_server_goes_by_the_roots_of_its_client_within_its_mounts(house: House, transport: str) -> None:
    roots = Roots(house.second)
    there: Any = house.gateway.url if transport == "http" else stdio_client(house.gateway.stdio())
    async with Client(there, mode="legacy", cache=None, list_roots_callback=roots) as client:
        await comes_to_say(lambda told: str(house.second) in told, client, "list_allowed_directories")
        assert await said(client, "read_text_file", path=str(house.second / "a.txt")) == "in second"
        denied = await said(client, "read_text_file", path=str(house.first / "a.txt"))
        assert "outside allowed directories" in denied
        assert roots.asked == 1
        # They change: the server hears of it, and asks.
        roots.folders = (house.first,)
        await client.session.send_roots_list_changed()
        await comes_to_say("in first".__eq__, client, "read_text_file", path=str(house.first / "a.txt"))
        assert "outside" in await said(client, "read_text_file", path=str(house.second / "a.txt"))
        # A root outside of the mounts is a name and nothing else: the folder is not there.
        roots.folders = (house.outside, house.second)
        await client.session.send_roots_list_changed()
        told = await comes_to_say(lambda told: str(house.second) in told, client, "list_allowed_directories")
        assert str(house.outside) not in told
        denied = await said(client, "read_text_file", path=str(house.outside / "a.txt"))
        assert "in outside" not in denied and "denied" in denied
        roots.folders = (Path("/"),)
        await client.session.send_roots_list_changed()
        denied = await comes_to_say(
            lambda told: "ENOENT" in told, client, "read_text_file", path=str(house.outside / "a.txt")
        )
        assert "in outside" not in denied


async def test_clients_have_roots_of_their_own(house: House) -> None:
    first, second = Roots(house.first), Roots(house.second)
    async with (
        house.gateway.client("legacy", list_roots_callback=first) as one,
        house.gateway.client("legacy", list_roots_callback=second) as other,
    ):
        for client, folder in ((one, house.first), (other, house.second)):
            await comes_to_say(f"Allowed directories:\n{folder}".__eq__, client, "list_allowed_directories")


@pytest.mark.parametrize("mode", ["legacy", MODERN])
async def test_without_roots_a_server_has_what_it_was_started_with(house: House, mode: str) -> None:
    async with house.gateway.client(mode) as client:
        assert str(house.first) in await said(client, "list_allowed_directories")


async def test_a_client_that_does_not_answer_is_no_reason_to_fail(house: House) -> None:
    async def broken(context: Any) -> types.ListRootsResult:
        raise RuntimeError("no roots today")

    async with house.gateway.client("legacy", list_roots_callback=broken) as client:
        assert str(house.first) in await said(client, "list_allowed_directories")
