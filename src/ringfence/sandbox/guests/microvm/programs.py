"""Programs that run virtual machines, one process for each, started and held by a warden: `warden` says how."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from pathlib import Path

from ringfence.core.errors import Unavailable
from ringfence.core.record import plain
from ringfence.sandbox.process.cgroups.cgroup import Group

_WARDEN = Path(__file__).with_name("warden.py")
_LAST_WORDS = 2000
_LONGEST = 1 << 16
_END_SECONDS = 15.0


@plain
class Confinement:
    """What a program may have of the host."""

    user: int | None
    """None: the own, in a user namespace."""
    groups: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    limits: Mapping[str, int] | None = None
    shown: tuple[Path, ...] = ()
    """Folders that it sees besides, and may change."""


class MachineProgram:
    """One of them, while it runs."""

    def __init__(self, name: str, pid: int, said: asyncio.Task[str], wardens: Wardens) -> None:
        self.name = name
        self.pid = pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its status."""
        self._said = said
        self._wardens = wardens

    async def said(self) -> str:
        """The end of what it wrote, once it has ended."""
        await asyncio.shield(self.ended)
        return await self._said

    def kill(self) -> None:
        if not self.ended.done():
            self._wardens.kill(self.name)

    async def gone(self) -> bool:
        """Whether it has ended, in a while at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await asyncio.shield(self.ended)
        return self.ended.done()


class Wardens:
    """The warden of this supervisor, started when it is first needed."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._stream: socket.socket | None = None
        self._listening: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._asked: dict[str, asyncio.Future[int]] = {}
        self._running: dict[str, MachineProgram] = {}

    async def start(
        self, words: Sequence[str], given: Sequence[int], confined: Confinement, group: Group | None = None
    ) -> MachineProgram:
        """`given`: its descriptors, from 3 on. They stay open here. Raises Unavailable."""
        async with self._turn:
            if self._stream is None:
                await self._begin()
        assert self._stream is not None
        name = secrets.token_hex(8)
        order = {
            "start": name,
            "words": list(words),
            "user": confined.user,
            "groups": list(confined.groups),
            "devices": list(confined.devices),
            "limits": dict(confined.limits or {}),
            "shown": list(map(str, confined.shown)),
        }
        loop = asyncio.get_running_loop()
        started = self._asked[name] = loop.create_future()
        reads, writes = os.pipe2(os.O_CLOEXEC)
        entrances: list[int] = []
        try:
            if group is not None:
                entrances = group.entrances()
            passed = [*entrances, writes, *given]
            socket.send_fds(self._stream, [json.dumps({**order, "enters": len(entrances)}).encode()], passed)
        except OSError as problem:
            os.close(reads)
            self._asked.pop(name, None)
            raise Unavailable("no_box", f"a machine could not be started: {problem.strerror}") from None
        finally:
            os.close(writes)
            if group is not None:
                group.entered(entrances)
        said = loop.create_task(_heard(reads))
        try:
            pid = await started
        except BaseException:
            said.cancel()
            raise
        running = self._running[name] = MachineProgram(name, pid, said, self)
        return running

    def kill(self, name: str) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.send(json.dumps({"kill": name}).encode())

    async def _begin(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", str(_WARDEN), "0"),
                stdin=theirs.fileno(),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._stream = ours
        self._listening = asyncio.get_running_loop().create_task(self._listen(ours))

    async def _listen(self, stream: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                data = await loop.sock_recv(stream, _LONGEST)
            except OSError:
                data = b""
            if not data:
                break
            told = json.loads(data)
            if "started" in told:
                self._asked.pop(told["started"]).set_result(told["pid"])
                await asyncio.sleep(0)  # its starter has it before its end is told
            elif "failed" in told:
                problem = Unavailable("no_box", f"a machine could not be started: {told['why']}")
                self._asked.pop(told["failed"]).set_exception(problem)
            elif (running := self._running.pop(told["ended"], None)) is not None:
                running.ended.set_result(told["status"])
        self._stream = None
        stream.close()
        gone = Unavailable("no_box", "what holds the machines of this host has ended")
        for asked in self._asked.values():
            asked.set_exception(gone)
        for running in self._running.values():
            running.ended.set_result(-1)
        self._asked, self._running = {}, {}

    async def close(self) -> None:
        """Ends all that run."""
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.shutdown(socket.SHUT_WR)
        if self._process is not None:
            await self._process.wait()
            self._process = None
        if self._listening is not None:
            await self._listening
            self._listening = None


async def _heard(reads: int) -> str:
    """The end of what is written to a pipe."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reads, "rb", 0))
    words = bytearray()
    try:
        while data := await reader.read(4096):
            words += data
            del words[:-_LAST_WORDS]
    finally:
        transport.close()
    return words.decode("utf-8", "replace").strip()
