"""What containers of one supervisor need beside them: the process that holds their roots, and ends them when the
supervisor dies; `holder` is that process, and describes it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringfence.core.errors import Unavailable
from ringfence.core.record import plain
from ringfence.sandbox.guests.engine import GuestShape
from ringfence.sandbox.process import mounting
from ringfence.sandbox.process.ids import Block, map_ourselves_as_root

_HOLDER = Path(__file__).with_name("holder.py")


@plain
class Lent:
    """A file or folder of the host for one container."""

    place: str
    """Where the engine finds it."""
    at: str
    mode: str


class ContainerHolder:
    """Our end of that process."""

    def __init__(self, process: Process, folder: Path, program: Sequence[str]) -> None:
        self._process = process
        self._view = folder / "view"
        self._program = tuple(program)
        self._turn = asyncio.Lock()
        self._roots: dict[str, str] = {}
        """Where roots without mounts of their own are, by their folders."""
        self._shown: dict[str, list[str]] = {}
        """What else is shown, by the container that it is for."""

    @classmethod
    async def start(cls, folder: Path, program: Sequence[str], own: Block | None) -> ContainerHolder:
        """`own`: the ids of an ordinary user's containers. Raises Unavailable."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", str(_HOLDER), str(folder), *([] if own is None else ["ordinary"])),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        holder = cls(process, folder, program)
        try:
            await holder._answer()
            if own is not None:
                await asyncio.to_thread(map_ourselves_as_root, process.pid, own)
                await holder._ask({"mapped": True})
        except BaseException:
            await holder.close()
            raise
        return holder

    async def show(
        self, name: str, shape: GuestShape, user: int, places: Sequence[tuple[str, str]]
    ) -> tuple[str, list[Lent]]:
        """Where a container finds its root, and each of its mounts, outermost first. `user`: of its programs, on the
        host. `places`: where else in it something is mounted, and whether that is a file or a folder."""
        folder = str(shape.root.folder)
        names = self._shown.setdefault(name, [])
        lent: list[Lent] = []
        placed = {each.at for each in shape.placed}
        ordinary = os.geteuid() != 0
        for each in shape.placed if ordinary else ():  # the box is their owner, whom we need not map
            names.append(f"{name}-{len(names)}")
            same = {"same": each.identity[:2], "writable": each.writable}
            await self._ask({"lend": names[-1], "path": each.host, **same})
            lent.append(Lent(str(self._view / names[-1]), each.at, "rw" if each.writable else "ro"))
        clones = [] if ordinary else await asyncio.to_thread(mounting.clone, shape.placed, user)
        try:
            for each, clone in zip(shape.placed, clones, strict=False):
                names.append(f"{name}-{len(names)}")
                at = {"process": os.getpid(), "descriptor": clone, "folder": each.folder}
                await self._ask({"attach": names[-1], **at})
                lent.append(Lent(str(self._view / names[-1]), each.at, "rw" if each.writable else "ro"))
        finally:
            for clone in clones:
                os.close(clone)
        for tree in shape.mounts:
            if tree.at not in placed:
                names.append(f"{name}-{len(names)}")
                await self._ask({"lend": names[-1], "path": tree.host})
                lent.append(Lent(str(self._view / names[-1]), tree.at, "ro"))
        lent.sort(key=lambda each: each.at)
        if shape.mounts:
            points = [*places, *((each.at, _kind(each.host)) for each in shape.mounts)]
            names.append(name)
            await self._ask({"root": name, "folder": folder, "points": points})
            return str(self._view / name), lent
        if folder not in self._roots:
            plain = f"root-{len(self._roots)}"
            await self._ask({"root": plain, "folder": folder, "points": places})
            self._roots[folder] = str(self._view / plain)
        return self._roots[folder], lent

    async def owe(self, name: str) -> None:
        await self._ask({"owe": name, "words": [*self._program, "delete", "--force", name]})

    async def settle(self, name: str) -> None:
        await self._ask({"settled": name})
        if shown := self._shown.pop(name, None):
            await self._ask({"hide": shown})

    def inside(self, *words: str) -> list[str]:
        """A command within its mount namespace."""
        place = f"/proc/{self._process.pid}/ns"
        user = [] if os.geteuid() == 0 else [f"--user={place}/user"]
        return ["nsenter", *user, f"--mount={place}/mnt", "--", *words]

    async def _ask(self, order: Mapping[str, Any]) -> None:
        async with self._turn:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            await self._answer()

    async def _answer(self) -> None:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        told = json.loads(line) if line else {"failed": "it has ended"}
        if "failed" in told:
            raise Unavailable("no_box", f"what containers need on this host cannot be made: {told['failed']}")

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


def _kind(path: str) -> str:
    return "folder" if os.path.isdir(path) else "file"
