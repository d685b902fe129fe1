"""Containers without a daemon: an OCI bundle, started straight from here by a program that takes one. What those
programs share; `oci` and `gvisor` have what differs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import socket
import tempfile
from abc import ABC, abstractmethod
from asyncio.subprocess import Process
from collections.abc import Sequence
from pathlib import Path

from ringfence.core.aio import shielded
from ringfence.core.box import Limits
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.core.record import plain
from ringfence.sandbox.guests.bundle import ContainerIds
from ringfence.sandbox.guests.engine import Abilities, Guest, GuestShape, GuestUsage
from ringfence.sandbox.guests.holding import ContainerHolder, Lent
from ringfence.sandbox.guests.link import Link, said
from ringfence.sandbox.process.cgroups.cgroup import Cgroups, Counted, Group, GroupPool, sweep
from ringfence.sandbox.process.cgroups.hierarchy import Systemd
from ringfence.sandbox.process.ids import Block, take_block, take_for_containers

SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LIMITED = ("memory", "pids", "cpu")
"""What control groups limit: without one of these there are no containers."""
_END_SECONDS = 15.0
_LAST_WORDS = 2000


@plain
class ContainerParts:
    """What one container is made of, besides the processes in it."""

    name: str
    shape: GuestShape
    ids: ContainerIds
    group: Group
    taken: Limits
    """The limits that the group was taken with."""
    bundle: Path
    root: str
    """Where the program finds its root."""
    lent: Sequence[Lent]


class ContainerEngine(ABC):
    """Starts containers by one of some programs."""

    name: str
    level: str
    abilities: Abilities
    remedy: str
    """How to get one of the programs."""
    for_users = False
    """Whether users other than root can start its containers."""
    points: Sequence[tuple[str, str]] = ()
    """Where every root needs a file or a folder to mount something at."""

    def __init__(self, programs: Sequence[str]) -> None:
        self._programs = programs
        """The first that is there is used."""
        self._opening = asyncio.Lock()
        self._groups: GroupPool | None = None
        self._holder: ContainerHolder | None = None
        self._blocks: list[Block] = []
        self._free: list[ContainerIds] = []
        self._folder: Path | None = None
        self.program = ""
        self.version = ""

    # ── What differs ──

    @abstractmethod
    def slack(self, limits: Limits) -> Limits:
        """The limits of the group while the program starts a container."""

    @abstractmethod
    def configuration(self, parts: ContainerParts) -> Json: ...

    @abstractmethod
    async def run(self, parts: ContainerParts, stream: socket.socket) -> Process:
        """Start the program, which ends with the container. It writes its words to a pipe."""

    @abstractmethod
    def guest(self, parts: ContainerParts, process: Process, stream: socket.socket) -> Container: ...

    # ── What is there ──

    async def open(self) -> None:
        async with self._opening:
            if self._holder is not None:
                return
            found = [path for name in self._programs if (path := shutil.which(name, path=SEARCH)) is not None]
            if not found:
                names = " or ".join(self._programs)
                raise Unavailable("no_backend", f"backend {self.name} needs {names}: {self.remedy}")
            self.program = found[0]
            self.version = await _version(self.program)
            if os.geteuid() != 0 and not self.for_users:
                text = f"backend {self.name} as an ordinary user is not built yet; run as root, or use process"
                raise Unavailable("no_backend", text)
            own = None if os.geteuid() == 0 else await asyncio.to_thread(self._own_ids)
            cgroups = await asyncio.to_thread(Cgroups.detect, manager=Systemd())
            lacking = {name: why for name, why in cgroups.why.items() if name in LIMITED}
            if lacking:
                self._release()
                whys = "; ".join(f"{name}: {why}" for name, why in lacking.items())
                text = f"backend {self.name} limits containers by control groups, and has none here ({whys})"
                raise Unavailable("no_backend", f"{text}; `ringfence host` says what to do about it")
            sweep(cgroups)
            self._groups = GroupPool(cgroups)
            folder = _new_folder(self.name)
            try:
                self._holder = await ContainerHolder.start(folder, [self.program, "--root", str(folder / "run")], own)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                self._release()
                raise
            self._folder = folder

    def _own_ids(self) -> Block:
        """Those that an ordinary user has for containers. Raises Unavailable."""
        try:
            block = take_for_containers()
        except Unavailable as problem:
            text = f"backend {self.name} needs ids for containers: {problem.message}"
            raise Unavailable("no_backend", text) from None
        self._blocks.append(block)
        # In the namespace of the holder, where this user is 0.
        self._free += [ContainerIds(1, 1 + number, block.base + number) for number in range(1, block.size)]
        return block

    # ── A container ──

    async def start(self, shape: GuestShape) -> Guest:
        await self.open()
        assert self._holder is not None and self._groups is not None and self._folder is not None
        name = f"box-{secrets.token_hex(8)}"
        ids = self._take_ids(shape)
        taken = self.slack(shape.limits)
        group: Group | None = None
        bundle = self._folder / "bundles" / name
        ours, theirs = socket.socketpair()
        process: Process | None = None
        try:
            root, lent = await self._holder.show(name, shape, ids.user, self.points)
            group = self._groups.take(taken, pauses=True)
            if group is None:
                raise Unavailable("no_box", "there is no control group for a container; `ringfence host` says why")
            parts = ContainerParts(name, shape, ids, group, taken, bundle, root, lent)
            bundle.mkdir(mode=0o711)
            (bundle / "config.json").write_text(json.dumps(self.configuration(parts)))
            await self._holder.owe(name)
            process = await self.run(parts, theirs)
            theirs.close()
            return self.guest(parts, process, ours)
        except BaseException:
            ours.close()
            theirs.close()
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            if group is not None:
                self._give_back(group, taken)
            self._put_back(ids)
            shutil.rmtree(bundle, ignore_errors=True)
            await self._holder.settle(name)
            raise

    def words(self, *words: str) -> list[str]:
        """A command of the program, with options of its own before it, within the holder's view."""
        assert self._holder is not None and self._folder is not None
        return self._holder.inside(self.program, "--root", str(self._folder / "run"), *words)

    def _take_ids(self, shape: GuestShape) -> ContainerIds:
        """Raises Unavailable."""
        if os.geteuid() != 0 and shape.placed:
            return ContainerIds(1, 0, os.geteuid(), "user")  # it sees this user's folders with this user's permissions
        if not self._free and os.geteuid() != 0:
            text = "as many containers run as this user has ids for: give it a longer range in"
            raise Unavailable("no_box", f"{text} /etc/subuid and /etc/subgid")
        if not self._free:
            block = take_block()
            self._blocks.append(block)
            ids = range(block.base + 1, block.base + block.size)
            self._free += [ContainerIds(block.base, each, each) for each in ids]
        return self._free.pop(0)

    def _put_back(self, ids: ContainerIds) -> None:
        if ids.whose == "box":
            self._free.append(ids)

    def _give_back(self, group: Group, taken: Limits) -> None:
        assert self._groups is not None
        with contextlib.suppress(OSError):
            self._groups.give_back(group, taken, reaped=True, removed=lambda: None)

    async def removed(self, parts: ContainerParts) -> None:
        """Take back what a container had that has ended."""
        self._give_back(parts.group, parts.taken)
        self._put_back(parts.ids)
        shutil.rmtree(parts.bundle, ignore_errors=True)
        if self._folder is not None:  # where the program was killed before it could
            shutil.rmtree(self._folder / "run" / parts.name, ignore_errors=True)
        if self._holder is not None:
            await self._holder.settle(parts.name)

    def _release(self) -> None:
        for block in self._blocks:
            block.release()
        self._blocks = []
        self._free = []

    async def close(self) -> None:
        if self._groups is not None:
            self._groups.close()
        if self._holder is not None:
            await self._holder.close()
            self._holder = None
        self._release()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class Container(ABC):
    """One container."""

    hardens: Json | None
    hands_over: bool

    def __init__(self, engine: ContainerEngine, parts: ContainerParts, process: Process, stream: socket.socket) -> None:
        self.stream = stream
        self.link: Link | None = None
        self.limits = parts.shape.limits
        self.group = parts.group
        self.parts = parts
        self.trouble: list[str] = []
        self.used = GuestUsage(0, 0.0)
        """At the last look."""
        self.first = 0
        """Its first process, by its number on the host; 0: not known yet."""
        self._engine = engine
        self._process = process
        self._words = bytearray()
        loop = asyncio.get_running_loop()
        self._gone: asyncio.Task[None] = loop.create_task(self._wait())
        self.ended: asyncio.Future[str] = loop.create_future()

    async def _wait(self) -> None:
        assert self._process.stdout is not None
        while data := await self._process.stdout.read(4096):
            self._words += data
            del self._words[:-_LAST_WORDS]
        await self._process.wait()
        self._close_stream()
        if not self.ended.done():
            self.ended.set_result(said(" ".join(self._words.decode("utf-8", "replace").split())[-300:]) or "it ended")

    @abstractmethod
    def settle(self) -> None: ...

    @abstractmethod
    def look(self) -> None: ...

    @property
    @abstractmethod
    def isolation(self) -> Json: ...

    @abstractmethod
    def usage(self) -> GuestUsage | None: ...

    def counted(self) -> Counted:
        with contextlib.suppress(OSError):  # its program has removed it already: what was seen last counts
            return self.group.count()
        return Counted(self.used.oom_kills, self.used.processes_refused, None, self.used.cpu_ms)

    def _close_stream(self) -> None:
        if self.link is not None:
            self.link.close()
        else:
            self.stream.close()

    async def pause(self) -> None:
        self.group.freeze()

    async def resume(self) -> None:
        self.group.thaw()

    def kill(self) -> None:
        self._close_stream()
        with contextlib.suppress(OSError):
            self.group.kill()

    async def remove(self) -> Sequence[str]:
        self.counted()
        self.kill()
        try:
            async with asyncio.timeout(_END_SECONDS):
                await asyncio.shield(self._gone)
        except TimeoutError:
            self.trouble.append("the container did not end when it was killed")
            return self.trouble
        await shielded(asyncio.ensure_future(self._engine.removed(self.parts)))
        return self.trouble


def _new_folder(name: str) -> Path:
    """What a supervisor keeps of its containers: every user may pass through it, and look at nothing."""
    folder = Path(tempfile.mkdtemp(prefix=f"ringfence-{name}-"))
    folder.chmod(0o711)
    for each in ("view", "bundles", "run"):
        (folder / each).mkdir(mode=0o711)
    return folder


async def _version(program: str) -> str:
    process = await asyncio.create_subprocess_exec(program, "--version", stdout=asyncio.subprocess.PIPE)
    told, _ = await process.communicate()
    return told.decode("utf-8", "replace").partition("\n")[0].replace(" version ", " ")
