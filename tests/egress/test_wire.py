"""The end of a connection: what was said arrives, and whoever does not take it is not waited for."""

from __future__ import annotations

import asyncio
import socket

import pytest

from ringfence.egress import wire as wires
from ringfence.egress.wire import HttpWire
from tests import tooling

pytestmark = pytest.mark.anyio

SAID = b"x" * 60_000


async def both() -> tuple[HttpWire, socket.socket]:
    """One says so much, and there is so little room between them, that most of it still waits."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    theirs.setblocking(False)
    wire = HttpWire(*await asyncio.open_connection(sock=ours))
    await wire.send(SAID)
    return wire, theirs


async def test_what_was_said_still_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "_GOODBYE_SECONDS", tooling.PATIENCE)  # however slowly it is taken
    wire, other = await both()
    with other:
        leaving = asyncio.create_task(wire.leave())
        await asyncio.sleep(0.05)
        assert not leaving.done()
        got = b""
        while data := await asyncio.get_running_loop().sock_recv(other, 1000):
            got += data
        await asyncio.wait_for(leaving, tooling.PATIENCE)
    assert got == SAID


async def test_whoever_takes_nothing_is_left_all_the_same() -> None:
    wire, other = await both()
    with other:
        await asyncio.wait_for(wire.leave(), tooling.PATIENCE)
        got = 0
        while data := await asyncio.get_running_loop().sock_recv(other, 65_536):
            got += len(data)
    assert 0 < got < len(SAID)


async def test_whoever_is_told_to_stop_leaves_at_once() -> None:
    wire, other = await both()
    with other:
        leaving = asyncio.create_task(wire.leave())
        await asyncio.sleep(0.05)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert wire.ended
