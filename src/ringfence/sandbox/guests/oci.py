"""Containers by runc or crun, without a daemon: an OCI bundle, started straight from here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
import shutil
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ringfence.core.aio import shielded
from ringfence.core.box import Limit, Limits
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.core.record import plain
from ringfence.sandbox.guests.engine import BOOT, LINK, USER, Abilities, GuestShape, GuestUsage
from ringfence.sandbox.guests.link import Link
from ringfence.sandbox.process import mounting
from ringfence.sandbox.process.box_usage import descendants, full, with_uncounted
from ringfence.sandbox.process.cgroups.cgroup import Cgroups, Counted, Group, GroupPool, sweep
from ringfence.sandbox.process.cgroups.hierarchy import Systemd
from ringfence.sandbox.process.host.capabilities import read_back
from ringfence.sandbox.process.ids import Block, take_block
from ringfence.sandbox.process.limits.uncounted import Locks

PROGRAMS = ("runc", "crun")
"""The first that works is used."""
_SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_HOLDER = Path(__file__).with_name("holder.py")
_SLACK = 6
"""Tasks of the engine while it starts a container."""
_BESIDES = 2
"""Those of the agent afterwards: itself, and a child for files."""
_START_SECONDS = 60.0
_END_SECONDS = 15.0
_LAST_WORDS = 2000
_NAMESPACES = ("pid", "ipc", "uts", "mount", "network", "user", "cgroup")
_RIGHTS = ("CAP_SYS_ADMIN", "CAP_SYS_RESOURCE", "CAP_NET_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
"""In its own user namespace, for the agent alone, which gives them up before any program: see `harden`."""
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm", "/home/user")  # noqa: S108 - in the container


@plain
class _Ids:
    """The ids of one container on the host: of its root, which no program is, and of its programs."""

    root: int
    user: int


@plain
class _Lent:
    """A file or folder of the host for one container."""

    place: str
    """Where the engine finds it."""
    at: str
    mode: str


class OciEngine:
    """Starts containers."""

    level = "process"
    abilities = Abilities(frozenset(("pause", "network", "mounts", "writable_mounts", "images", "denials")))

    def __init__(self, programs: Sequence[str] = PROGRAMS) -> None:
        self.name = "oci"
        self._programs = programs
        self._opening = asyncio.Lock()
        self._program = ""
        self.version = ""
        self._groups: GroupPool | None = None
        self._holder: _Holder | None = None
        self._blocks: list[Block] = []
        self._free: list[_Ids] = []
        self._folder: Path | None = None
        self.locks = Locks()

    # ── What is there ──

    async def open(self) -> None:
        async with self._opening:
            if self._holder is not None:
                return
            found = [path for name in self._programs if (path := shutil.which(name, path=_SEARCH)) is not None]
            if not found:
                names = " or ".join(self._programs)
                raise Unavailable("no_backend", f"backend {self.name} needs {names}: apt install {self._programs[0]}")
            self._program = found[0]
            self.version = await _version(self._program)
            if os.geteuid() != 0:
                text = f"backend {self.name} as an ordinary user is not built yet; run as root, or use process"
                raise Unavailable("no_backend", text)
            cgroups = await asyncio.to_thread(Cgroups.detect, manager=Systemd())
            lacking = {name: why for name, why in cgroups.why.items() if name in ("memory", "pids")}
            if lacking:
                whys = "; ".join(f"{name}: {why}" for name, why in lacking.items())
                text = f"backend {self.name} limits containers by control groups, and has none here ({whys})"
                raise Unavailable("no_backend", f"{text}; `ringfence host` says what to do about it")
            sweep(cgroups)
            self._groups = GroupPool(cgroups)
            folder = _new_folder()
            try:
                self._holder = await _Holder.start(folder, [self._program, "--root", str(folder / "run")])
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            self._folder = folder

    # ── A container ──

    async def start(self, shape: GuestShape) -> OciGuest:
        await self.open()
        assert self._holder is not None and self._groups is not None and self._folder is not None
        name = f"box-{secrets.token_hex(8)}"
        ids = self._take_ids()
        limits = shape.limits
        group: Group | None = None
        bundle = self._folder / "bundles" / name
        ours, theirs = socket.socketpair()
        process: Process | None = None
        try:
            root, mounts = await self._holder.show(name, shape, ids.user)
            group = self._groups.take(_with_slack(limits), pauses=True)
            if group is None:
                raise Unavailable("no_box", "there is no control group for a container")
            bundle.mkdir(mode=0o711)
            words = _config(shape, root, mounts, ids, group.place)
            (bundle / "config.json").write_text(json.dumps(words))
            await self._holder.owe(name)
            process = await self._run(name, bundle, theirs)
            theirs.close()
            return OciGuest(self, name, process, ours, group, ids, bundle, shape)
        except BaseException:
            ours.close()
            theirs.close()
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            if group is not None:
                self._give_back(group, limits)
            self._free.append(ids)
            shutil.rmtree(bundle, ignore_errors=True)
            await self._holder.settle(name)
            raise

    async def _run(self, name: str, bundle: Path, theirs: socket.socket) -> Process:
        """Start the engine's program: it stays as long as the container, and removes it afterwards."""
        assert self._holder is not None and self._folder is not None
        inside = self._holder.inside(self._program, "--root", str(self._folder / "run"))
        words = [*inside, "run", "--preserve-fds", "1", "--bundle", str(bundle), name]
        # A shell moves the stream to where the program expects what it is to pass on. The other descriptors are never
        # those of a file of the host, not even of /dev/null: crun gives what it finds there to the container's user.
        return await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", f'exec "$@" {LINK}<&0 0<&1', "sh", *words),
            stdin=theirs.fileno(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={"PATH": _SEARCH},
        )

    def _take_ids(self) -> _Ids:
        if not self._free:
            block = take_block()
            self._blocks.append(block)
            self._free += [_Ids(block.base, block.base + number) for number in range(1, block.size)]
        return self._free.pop(0)

    def _give_back(self, group: Group, limits: Limits) -> None:
        assert self._groups is not None
        with contextlib.suppress(OSError):
            self._groups.give_back(group, limits, reaped=True, removed=lambda: None)

    async def removed(self, guest: OciGuest) -> None:
        """Take back what a container had that has ended."""
        self._give_back(guest.group, guest.limits)
        self._free.append(guest.ids)
        shutil.rmtree(guest.bundle, ignore_errors=True)
        if self._holder is not None:
            await self._holder.settle(guest.name)

    async def close(self) -> None:
        if self._groups is not None:
            self._groups.close()
        if self._holder is not None:
            await self._holder.close()
            self._holder = None
        for block in self._blocks:
            block.release()
        self._blocks = []
        self._free = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class OciGuest:
    """One container."""

    def __init__(
        self,
        engine: OciEngine,
        name: str,
        process: Process,
        stream: socket.socket,
        group: Group,
        ids: _Ids,
        bundle: Path,
        shape: GuestShape,
    ) -> None:
        limits = shape.limits
        self.name = name
        self.stream = stream
        self.link: Link | None = None
        self.hardens: Json | None = {
            "user": USER,
            "memory_bytes": limits.memory_bytes,
            "processors": max(1, min(math.ceil(limits.cpu_cores), len(os.sched_getaffinity(0)))),
            "temporary": list(_TEMPORARY),
            "writable": ["/workspace", *_TEMPORARY, *(each.at for each in shape.placed if each.writable)],
            "lent": [*(each.at for each in shape.mounts), *(each.at for each in shape.placed)],
            "landlock": True,
        }
        self.hands_over = True
        self.group = group
        self.ids = ids
        self.bundle = bundle
        self.limits = limits
        self.trouble: list[str] = []
        self.first = 0
        """The agent, by its number on the host; 0: not known yet."""
        self._engine = engine
        self._process = process
        self._words = bytearray()
        self._seen: Json = {}
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
            self.ended.set_result(self._words.decode("utf-8", "replace").strip() or "it ended")

    def settle(self) -> None:
        inside = sorted(self.group.processes())
        self.first = next((pid for pid in inside if _number_inside(pid) == 1), 0)
        with contextlib.suppress(OSError):
            self.group.add(self.first)  # engines leave out the hierarchies that they do not use themselves

    def look(self) -> None:
        """Find its first process on the host, and read back what the kernel says of it."""
        limits = self.limits
        self.group.limit(
            memory_bytes=limits.memory_bytes,
            hard_bytes=limits.memory_bytes + limits.disk_bytes,
            processes=limits.processes + _BESIDES,
            cpu_cores=limits.cpu_cores,
        )
        if self.first:
            self._seen = read_back(self.first)
            self._seen["pid_namespace"] = True  # by the number that it was found by

    @property
    def isolation(self) -> Json:
        named = {
            **{name: {"on": on, "verified": "run"} for name, on in self._seen.items()},
            **{f"{name}_namespace": {"on": on, "verified": "run"} for name, on in _namespaces(self.first).items()},
        }
        if self._seen:
            named["host_id"] = {"on": _uid(self.first) == self.ids.user, "verified": "run"}
        limits = {name: {"by": "cgroup"} for name in ("memory", "pids", "cpu")}
        return {"engine": self._engine.version, "protections": named, "limits": limits, "host_id": {"whose": "box"}}

    def usage(self) -> GuestUsage | None:
        parts: tuple[int, int] | None = None
        with contextlib.suppress(KeyError):  # it is just going
            parts = self.group.usage_parts()
        if parts is None:
            return None
        files, rest = parts
        disk, met = _disk(self.first) if self.first else (0, None)
        held = rest + max(0, files - disk)
        if self.first:
            most = self.limits.memory_bytes
            held = with_uncounted(held, self.first, self.group, self._engine.locks, self._inside, most)
        return GuestUsage(held, self.group.cpu_ms() or 0.0, met)

    def _inside(self) -> Iterator[int]:
        return (pid for pid in descendants(self.first) if pid != self.first)

    def counted(self) -> Counted:
        return self.group.count()

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
        self.group.count()
        self.kill()
        try:
            async with asyncio.timeout(_END_SECONDS):
                await asyncio.shield(self._gone)
        except TimeoutError:
            self.trouble.append("the container did not end when it was killed")
            return self.trouble
        await shielded(asyncio.ensure_future(self._engine.removed(self)))
        return self.trouble


# ── What is beside containers ─────────────────────────────────────────────────────────────────────


class _Holder:
    """The process that holds roots, and ends containers when this one dies; `holder` describes it."""

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
    async def start(cls, folder: Path, program: Sequence[str]) -> _Holder:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", str(_HOLDER), str(folder)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        holder = cls(process, folder, program)
        await holder._answer()
        return holder

    async def show(self, name: str, shape: GuestShape, user: int) -> tuple[str, list[_Lent]]:
        """Where a container finds its root, and each of its mounts, outermost first. `user`: of its programs, on the
        host."""
        folder = str(shape.root.folder)
        names = self._shown.setdefault(name, [])
        lent: list[_Lent] = []
        placed = {each.at for each in shape.placed}
        clones = await asyncio.to_thread(mounting.clone, shape.placed, user)
        try:
            for each, clone in zip(shape.placed, clones, strict=True):
                names.append(f"{name}-{len(names)}")
                at = {"process": os.getpid(), "descriptor": clone, "folder": each.folder}
                await self._ask({"attach": names[-1], **at})
                lent.append(_Lent(str(self._view / names[-1]), each.at, "rw" if each.writable else "ro"))
        finally:
            for clone in clones:
                os.close(clone)
        for tree in shape.mounts:
            if tree.at not in placed:
                names.append(f"{name}-{len(names)}")
                await self._ask({"lend": names[-1], "path": tree.host})
                lent.append(_Lent(str(self._view / names[-1]), tree.at, "ro"))
        lent.sort(key=lambda each: each.at)
        if shape.mounts:
            points = [[each.at, _kind(each.host)] for each in shape.mounts]
            names.append(name)
            await self._ask({"root": name, "folder": folder, "points": points})
            return str(self._view / name), lent
        if folder not in self._roots:
            plain = f"root-{len(self._roots)}"
            await self._ask({"root": plain, "folder": folder, "points": []})
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
        return ["nsenter", f"--mount=/proc/{self._process.pid}/ns/mnt", "--", *words]

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


def _new_folder() -> Path:
    """What a supervisor keeps of its containers: every user may pass through it, and look at nothing."""
    folder = Path(tempfile.mkdtemp(prefix="ringfence-oci-"))
    folder.chmod(0o711)
    for name in ("view", "bundles", "run"):
        (folder / name).mkdir(mode=0o711)
    return folder


def _kind(path: str) -> str:
    return "folder" if os.path.isdir(path) else "file"


async def _version(program: str) -> str:
    process = await asyncio.create_subprocess_exec(program, "--version", stdout=asyncio.subprocess.PIPE)
    told, _ = await process.communicate()
    return told.decode("utf-8", "replace").partition("\n")[0].replace(" version ", " ")


def _with_slack(limits: Limits) -> Limits:
    return replace(limits, processes=limits.processes + _SLACK)


# ── Its configuration ─────────────────────────────────────────────────────────────────────────────


def _config(shape: GuestShape, root: str, lent: Sequence[_Lent], ids: _Ids, place: str) -> Json:
    limits = shape.limits
    own = f"uid={USER},gid={USER}"
    mounts: list[Json] = [
        _mount("/proc", "proc", "noexec"),
        _mount("/dev", "tmpfs", "strictatime", "mode=755", "size=64k", devices=True),
        _mount("/dev/pts", "devpts", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", devices=True),
        _mount("/workspace", "tmpfs", "mode=755", *own.split(","), f"size={limits.disk_bytes}", _inodes(shape)),
    ]
    if shape.input is not None:
        mounts.append(_bind(str(shape.input), "/workspace/input", "ro"))
    mounts += (_bind(each.place, each.at, each.mode) for each in lent)
    mapped = [
        {"containerID": 0, "hostID": ids.root, "size": 1},
        {"containerID": USER, "hostID": ids.user, "size": 1},
    ]
    files = limits.open_files + 256
    return {
        "ociVersion": "1.0.2",
        "hostname": "box",
        "root": {"path": root, "readonly": True},
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": [*shape.root.agent, "-I", "-S", "-c", BOOT],
            "env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
            "cwd": "/",
            "capabilities": {
                **{key: list(_RIGHTS) for key in ("bounding", "effective", "permitted")},
                **{key: [] for key in ("inheritable", "ambient")},
            },
            "noNewPrivileges": True,
            "rlimits": [
                {"type": "RLIMIT_NOFILE", "hard": files, "soft": files},
                {"type": "RLIMIT_CORE", "hard": 0, "soft": 0},
            ],
        },
        "mounts": mounts,
        "linux": {
            "cgroupsPath": place,
            "namespaces": [{"type": each} for each in _NAMESPACES],
            "uidMappings": mapped,
            "gidMappings": mapped,
            "maskedPaths": [],
            "readonlyPaths": [],
        },
    }


def _inodes(shape: GuestShape) -> str:
    return f"nr_inodes={shape.limits.inodes}"


def _mount(at: str, kind: str, *options: str, devices: bool = False) -> Json:
    safe = ["nosuid"] if devices else ["nosuid", "nodev"]
    return {"destination": at, "type": kind, "source": kind, "options": [*safe, *options]}


def _bind(host: str, at: str, mode: str) -> Json:
    options = ["bind", "nosuid", "nodev", "private", mode]
    return {"destination": at, "type": "bind", "source": host, "options": options}


# ── What the kernel says of it ────────────────────────────────────────────────────────────────────


def _number_inside(pid: int) -> int:
    """Its number in its own namespace; 0: it has none, or is gone."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return 0


def _uid(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("Uid:"):
                return int(line.split()[2])
    return -1


@cache
def _own_namespaces() -> Mapping[str, str]:
    return {name: os.readlink(f"/proc/self/ns/{name}") for name in ("user", "mnt", "net", "ipc", "uts", "cgroup")}


def _namespaces(pid: int) -> dict[str, bool]:
    """Which namespaces are its own, and not ours."""
    names = {"mnt": "mount"}
    found: dict[str, bool] = {}
    for name, own in _own_namespaces().items():
        with contextlib.suppress(OSError):
            found[names.get(name, name)] = pid > 0 and os.readlink(f"/proc/{pid}/ns/{name}") != own
    return found


def _disk(pid: int) -> tuple[int, Limit | None]:
    """What its files take, and whether that is all they may."""
    used = 0
    met: Limit | None = None
    with contextlib.suppress(OSError):
        descriptor = os.open(f"/proc/{pid}/root/workspace", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            state = os.fstatvfs(descriptor)
            used = (state.f_blocks - state.f_bfree) * state.f_frsize
            met = full(descriptor)
        finally:
            os.close(descriptor)
    return used, met
