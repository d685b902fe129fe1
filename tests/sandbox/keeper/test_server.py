"""A keeper at its socket: who is let in, and when it leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest

from ringfence.core.errors import Unavailable
from ringfence.core.sessions import CellRequest, SessionSpec
from ringfence.sandbox.keeper.client import KeeperClient
from ringfence.sandbox.keeper.process import KeeperLaunch
from tests.sandbox.keeper.parrot import ANN, Parrot, kept, quiet, session
from tests.sandbox.keeper.rawclient import HELLO, frame, raw, serves
from tests.sandbox.keeper.test_client import until
from tests.sandbox.ordinary import NOBODY

pytestmark = pytest.mark.anyio


# ── Who is let in ─────────────────────────────────────────────────────────────────────────────────

_CONNECT = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as connection:
    connection.settimeout(60)
    connection.connect(sys.argv[1])
    print(connection.recv(65536)[5:].decode())
"""
_FROM_ELSEWHERE = """
import os, socket, sys
os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
with socket.socket(socket.AF_UNIX) as connection:
    connection.settimeout(60)
    connection.connect(sys.argv[1])
    print(connection.recv(65536)[5:].decode())
"""


@pytest.mark.skipif(not hasattr(os, "unshare"), reason="this Python cannot leave a namespace")
async def test_a_program_of_the_same_user_in_a_box_is_turned_away() -> None:
    async with kept(Parrot()) as (_, there):
        command = [sys.executable, "-I", "-S", "-c", _FROM_ELSEWHERE, there.folder.address() or ""]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False)
    if b"PermissionError" in done.stderr and b"unshare" in done.stderr:
        pytest.skip("this host gives no namespaces to ordinary programs")
    assert json.loads(done.stdout)["refused"]["reason_code"] == "foreign_network", done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_another_user_is_turned_away_even_where_the_folder_is_open(caplog: pytest.LogCaptureFixture) -> None:
    parrot = Parrot()
    async with kept(parrot) as (_, there):
        address = there.folder.address() or ""
        command = [sys.executable, "-I", "-S", "-c", _CONNECT, address, str(NOBODY)]

        async def foreign() -> subprocess.CompletedProcess[bytes]:
            return await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False)

        assert b"PermissionError" in (await foreign()).stderr
        for folder in (there.folder.path, there.folder.path.parent):
            folder.chmod(0o711)
        os.chmod(address, 0o666)
        with caplog.at_level(logging.CRITICAL):
            said = json.loads((await foreign()).stdout)
        assert said["refused"]["reason_code"] == "foreign_user"
        there.folder.path.chmod(0o700)
        assert await serves(there)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_a_client_does_not_talk_to_another_users_keeper() -> None:
    async with kept(Parrot()) as (_, there):
        there.folder.path.parent.chmod(0o711)
        for path in (there.folder.path, there.folder.path / "address", there.folder.path / "socket"):
            os.chown(path, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            with pytest.raises(Unavailable, match="belongs to another user"):
                await KeeperClient.lazy(there).list(ANN)
        finally:
            os.seteuid(0)


async def test_a_client_of_another_version_is_told_what_to_do() -> None:
    parrot = Parrot()
    session(parrot)
    async with kept(parrot) as (_, there):
        with raw(there) as client:
            await client.say(frame(HELLO | {"protocol": "0-other"}))
            refused = (await client.message())["refused"]
            assert await client.hung_up()
        assert refused["reason_code"] == "keeper_version" and not refused["leaving"]
        assert "close its sessions, wait until they end, or end it with them" in refused["message"]
        assert await serves(there)


async def test_a_client_that_needs_other_settings_is_told_what_to_do() -> None:
    parrot = Parrot()
    session(parrot)
    async with kept(parrot) as (_, there):
        other = KeeperLaunch(there.folder, there.command, {}, b"", "others")
        with pytest.raises(Unavailable, match="other sandbox settings") as refused:
            await KeeperClient.lazy(other).list(ANN)
        assert refused.value.reason_code == "keeper_settings"
        assert await serves(there)


@pytest.mark.parametrize(
    "hello", [HELLO | {"protocol": "0-other"}, HELLO | {"terms": "others"}], ids=["version", "terms"]
)
async def test_an_idle_keeper_makes_room_for_another(hello: dict[str, Any]) -> None:
    parrot = Parrot()
    async with kept(parrot) as (_, there):
        with raw(there) as client:
            await client.say(frame(hello))
            assert (await client.message())["refused"]["leaving"]
            assert await client.hung_up()
        await until(lambda: parrot.closed)


async def test_a_keeper_with_another_client_does_not() -> None:
    async with kept(Parrot()) as (_, there), KeeperClient.connect(there) as keeper:
        with raw(there) as client:
            await client.say(frame(HELLO | {"terms": "others"}))
            assert not (await client.message())["refused"]["leaving"]
        assert await keeper.list(ANN) == []


# ── When it leaves ────────────────────────────────────────────────────────────────────────────────


async def test_a_keeper_leaves_when_neither_session_nor_client_is_left() -> None:
    parrot = Parrot()
    async with kept(parrot, linger=600) as (server, there):
        async with KeeperClient.connect(there) as keeper:
            server.linger = 0.2  # not before somebody was there, which may take longer
            box = (await keeper.create(ANN, SessionSpec())).id
            await asyncio.sleep(0.4)
            assert not parrot.closed
        await asyncio.sleep(0.4)
        assert not parrot.closed  # it has a session
        async with KeeperClient.connect(there) as keeper:
            await keeper.end(ANN, box)
            await asyncio.sleep(0.4)
            assert not parrot.closed  # it has a client
        await until(lambda: parrot.closed)


async def test_who_waits_for_an_answer_when_it_is_told_to_leave_gets_one() -> None:
    parrot = Parrot()
    async with kept(parrot) as (server, there), KeeperClient.connect(there) as keeper:
        step = asyncio.create_task(keeper.run(ANN, session(parrot), CellRequest("sleep 1"), quiet, quiet))
        await until(lambda: parrot.begun)
        server.leave()
        assert (await step).step == 1
        await until(lambda: keeper._connection is None or not keeper._connection.is_open)
