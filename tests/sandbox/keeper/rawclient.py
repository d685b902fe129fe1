"""A client of a keeper that says what it likes, frame by frame."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ringfence.sandbox.keeper.client import KeeperClient
from ringfence.sandbox.keeper.process import KeeperLaunch
from ringfence.sandbox.keeper.protocol import PROTOCOL
from tests.sandbox.keeper.parrot import ANN

HELLO = {"ringfence": "client", "protocol": PROTOCOL, "terms": "these"}
LIST = {"id": 1, "do": "list", "with": {"owner": list(ANN)}}


def frame(data: Any, kind: int = 1, length: int | None = None) -> bytes:
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    return struct.pack(">IB", len(data) if length is None else length, kind) + data


class Raw:
    """A client that says what it likes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    async def say(self, *frames: bytes) -> bool:
        """Whether all of it was taken; a keeper that hung up, or waits for us to read, takes nothing."""
        try:
            async with asyncio.timeout(5):
                await asyncio.get_running_loop().sock_sendall(self._connection, b"".join(frames))
        except (OSError, TimeoutError):
            return False
        return True

    async def hear(self, size: int = 65_536) -> bytes:
        async with asyncio.timeout(120):
            try:
                return await asyncio.get_running_loop().sock_recv(self._connection, size)
            except ConnectionError:
                return b""

    async def message(self) -> Any:
        length, kind = struct.unpack(">IB", await self.hear(5))
        assert kind == 1
        return json.loads(await self.hear(length))

    async def greeted(self) -> Raw:
        await self.say(frame(HELLO))
        assert (await self.message())["ringfence"] == "keeper"
        return self

    async def hung_up(self) -> bool:
        """Once all that was said before is read."""
        while data := await self.hear():
            assert len(data) > 0
        return True


@contextmanager
def raw(there: KeeperLaunch) -> Iterator[Raw]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        connection.connect(there.folder.address() or "")
        yield Raw(connection)


async def serves(there: KeeperLaunch) -> bool:
    """Whether an honest client is served."""
    async with asyncio.timeout(120), KeeperClient.connect(there) as keeper:
        await keeper.list(ANN)
        return True
