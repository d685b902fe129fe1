"""Containers of an engine that speaks the Docker Engine API.

Nothing here needs Linux beside us: the engine may be in a virtual machine. Where it is on this host, what the kernel
says of a container is read; elsewhere the engine's word is taken, and the facts say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import secrets
import sys
from asyncio import Task
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from socket import socket
from typing import Any

from ringfence.core.aio import shielded
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.core.record import plain
from ringfence.sandbox.guests import docker_profile as profile
from ringfence.sandbox.guests.docker_api import AttachedStream, DockerApi, DockerGone, DockerRefused
from ringfence.sandbox.guests.docker_host import ContainerOwner, LocalLook, look_at
from ringfence.sandbox.guests.engine import USER, Abilities, GuestRoot, GuestShape, GuestUsage, boot
from ringfence.sandbox.guests.link import Link
from ringfence.sandbox.process.cgroups.cgroup import Counted

Pack = Callable[[GuestRoot], AsyncIterator[bytes]]
"""The root of guests as a tar archive."""
REPOSITORY = "ringfence/root"
LABEL = "dev.ringfence."
_READY = 2
"""Containers that wait for a program, of the shapes that were asked for last."""
_ASK_SECONDS = 5.0
_IMPORT_SECONDS = 600.0
_END_SECONDS = 30.0
_POLL_SECONDS = 0.25
_LISTENER = 90
"""The descriptor in the agent by which refused system calls are told of: the host takes it from there."""
_SHARED = "/dev/shm"  # noqa: S108 - in the container
_BESIDES = 2
"""Tasks of the agent: itself, and a child for files."""
_NEEDED = {"MemoryLimit": "memory", "PidsLimit": "processes", "CpuCfsQuota": "processor time"}
_DENIED = (
    "backend docker may not use {} as this user: run a rootless engine (dockerd-rootless), or"
    " have this user put into the group that the socket belongs to, who are then as good as root on this host"
)


@plain
class DockerSettings:
    """What an operator says about the engine."""

    addresses: tuple[str, ...] = ("unix:///var/run/docker.sock",)
    """Where its socket may be; the first that is there is used."""
    runtime: str | None = None
    """One of the engine's own runtimes; None: its default."""
    ready: int = _READY


class DockerEngine:
    """Starts containers."""

    level = "process"
    abilities = Abilities(frozenset(("staying", "pause", "network", "mounts", "images")))

    def __init__(self, settings: DockerSettings, pack: Pack) -> None:
        self.name = "docker"
        self._settings = settings
        self._pack = pack
        self._opening = asyncio.Lock()
        self._importing = asyncio.Lock()
        self._api: DockerApi | None = None
        self._architecture = ""
        self.version = ""
        self._owner = ContainerOwner.of_this_process()
        self._images: dict[GuestRoot, str] = {}
        self._guests: dict[str, DockerGuest] = {}
        self._events: Task[None] | None = None
        self._here = False
        """Whether it is known to be on this host."""
        self._ready: dict[GuestShape, list[Task[DockerGuest]]] = {}
        self._going: set[Task[None]] = set()

    # ── What is there ──

    async def open(self) -> None:
        async with self._opening:
            if self._api is None or self._events is None or self._events.done():
                await self._drop()
                with _said("the engine cannot be used"):
                    self._api = await self._found()

    async def _found(self) -> DockerApi:
        api, version = await _answering(self._settings.addresses)
        api.speak(str(version.get("ApiVersion", "")))
        info = await api.ask("GET", "/info", seconds=_ASK_SECONDS)
        self._check(info, api.address)
        self._architecture = str(version.get("Arch", ""))
        profile.seccomp_profile(self._architecture)
        named = next((each["Name"] for each in version.get("Components") or () if "Podman" in each["Name"]), "Docker")
        if named != "Docker":
            text = f"the engine at {api.address} is podman's, which takes a filter for system calls only as a file"
            raise Unavailable(
                "no_backend", f"{text} of its own host; that is not built yet: use dockerd, or backend oci"
            )
        self.version = f"{named.partition(' ')[0].lower()} {version.get('Version', '')}"
        await self._sweep(api)
        self._events = asyncio.get_running_loop().create_task(self._follow(api))
        return api

    def _check(self, info: Json, address: str) -> None:
        """Raises Unavailable."""
        kind = info.get("OSType", "linux")
        if kind != "linux":
            text = f"the engine at {address} makes containers for {kind}; boxes need one for linux"
            raise Unavailable("no_backend", text)
        lacking = [what for name, what in _NEEDED.items() if info.get(name) is False]
        if lacking:
            text = f"the engine at {address} cannot limit {', '.join(lacking)} (docker info says why)"
            raise Unavailable("no_backend", f"{text}; give it control groups, or use another backend")
        if not any("seccomp" in str(each) for each in info.get("SecurityOptions") or ()):
            text = f"the engine at {address} has no filter for system calls (seccomp); use a kernel and engine with it"
            raise Unavailable("no_backend", text)
        runtime = self.runtime
        if runtime is not None and runtime not in (info.get("Runtimes") or {}):
            known = ", ".join(sorted(info.get("Runtimes") or {})) or "none"
            text = f"the engine at {address} has no runtime {runtime!r} (docker_runtime); it has: {known}"
            raise Unavailable("no_backend", f"{text}. Add it to its daemon.json, and restart it")

    async def _sweep(self, api: DockerApi) -> None:
        """Remove what supervisors left that are gone: containers that never started, or that the engine forgot."""
        ours = {"label": [f"{LABEL}host={self._owner.host}"]}
        for each in await api.ask("GET", "/containers/json", all=1, filters=ours):
            if not ContainerOwner.lives(each["Labels"].get(f"{LABEL}owner", "")):
                with contextlib.suppress(DockerRefused):
                    await api.ask("DELETE", f"/containers/{each['Id']}", force=1, v=1)

    async def _follow(self, api: DockerApi) -> None:
        """The engine's own news of our containers."""
        wanted = {"type": ["container"], "event": ["oom"], "label": [f"{LABEL}owner={self._owner}"]}
        with contextlib.suppress(DockerGone, DockerRefused):
            async for event in api.events(filters=wanted):
                guest = self._guests.get(str(event.get("id") or (event.get("Actor") or {}).get("ID")))
                if guest is not None:
                    guest.out_of_memory = True

    # ── Images ──

    async def _image(self, api: DockerApi, root: GuestRoot) -> str:
        """The image of a root in the engine, which gets it once. Raises Unavailable."""
        async with self._importing:
            if root not in self._images:
                tag = hashlib.sha256(f"{root.digest}/{root.folder.name}".encode()).hexdigest()[:32]
                found = await _inspected(api, f"{REPOSITORY}:{tag}")
                if found is None:
                    async with asyncio.timeout(_IMPORT_SECONDS):
                        pieces = self._pack(root)
                        await api.put("/images/create", pieces, fromSrc="-", repo=f"{REPOSITORY}:{tag}")
                    found = await _inspected(api, f"{REPOSITORY}:{tag}")
                if found is None:
                    raise Unavailable("no_backend", "the engine did not keep the image that it was given")
                self._images[root] = found["Id"]
        return self._images[root]

    # ── A container ──

    async def start(self, shape: GuestShape) -> DockerGuest:
        await self.open()
        if shape.input is not None or shape.mounts:
            await self._sees_this_host(shape)
        guest = await self._waiting(shape) or await self._start(shape)
        self._refill(shape)
        return guest

    async def _sees_this_host(self, shape: GuestShape) -> None:
        """Only a container tells where the engine is: one that is lent nothing. Raises Unavailable."""
        if not self._here:
            await (await self._start(replace(shape, input=None, mounts=(), placed=()))).remove()
        if not self._here:
            assert self._api is not None
            text = f"the engine at {self._api.address} is not on this host and sees no folder of it"
            raise Unavailable("not_supported", f"{text}: use oci, or an engine here")

    async def _waiting(self, shape: GuestShape) -> DockerGuest | None:
        """One that was started beforehand."""
        waiting = self._ready.get(shape, [])
        while waiting:
            starting = waiting.pop(0)
            try:
                guest = await asyncio.shield(starting)
            except Unavailable:
                continue
            except asyncio.CancelledError:
                waiting.insert(0, starting)
                raise
            if not guest.ended.done():
                return guest
            await guest.remove()
        return None

    def _refill(self, shape: GuestShape) -> None:
        """Containers in which nothing of one caller's is seen are made beforehand."""
        most = self._settings.ready
        if shape.input is not None or shape.mounts or most == 0:
            return
        loop = asyncio.get_running_loop()
        waiting = self._ready.pop(shape, [])
        self._ready[shape] = waiting  # the newest last
        while len(waiting) < most:
            waiting.append(loop.create_task(self._start(shape)))
            waiting[-1].add_done_callback(_look_at)
        while sum(map(len, self._ready.values())) > most + len(waiting):
            oldest = next(iter(self._ready))
            for starting in self._ready.pop(oldest):
                going = loop.create_task(_over(starting))
                self._going.add(going)
                going.add_done_callback(self._going.discard)

    async def _start(self, shape: GuestShape) -> DockerGuest:
        """Raises Unavailable."""
        api = self._api
        assert api is not None
        container = ""
        stream: AttachedStream | None = None
        try:
            with _said("the container could not be started"):
                image = await self._image(api, shape.root)
                name = f"ringfence-{secrets.token_hex(8)}"
                made = await api.ask("POST", "/containers/create", self._config(shape, image), name=name)
                container = made["Id"]
                stream = AttachedStream(*await api.attach(container))
                await api.ask("POST", f"/containers/{container}/start")
                told = await api.ask("GET", f"/containers/{container}/json")
                guest = DockerGuest(self, api, container, stream, shape, told)
                self._guests[container] = guest
                self._here = guest.here
                return guest
        except BaseException:
            if stream is not None:
                stream.ours.close()
                await shielded(asyncio.ensure_future(stream.close()))
            if container:
                await shielded(asyncio.ensure_future(_removed(api, container)))
            raise

    def _config(self, shape: GuestShape, image: str) -> Json:
        limits = shape.limits
        files = limits.open_files + 256
        memory = limits.memory_bytes + limits.disk_bytes
        own = f"uid={USER},gid={USER},mode=755"
        tmpfs = {"/workspace": f"rw,exec,nosuid,nodev,size={limits.disk_bytes},nr_inodes={limits.inodes},{own}"}
        mounts = [_bind(each.host, each.at, each.mode) for each in shape.mounts]
        if shape.input is not None:
            mounts.append(_bind(str(shape.input), "/workspace/input", "ro"))
        return {
            "Image": image,
            "Entrypoint": [*shape.root.agent, "-I", "-S", "-c", boot(0, 1)],
            "Cmd": [],
            "User": f"{USER}:{USER}",
            "WorkingDir": "/",
            "Hostname": "box",
            "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
            "Labels": {f"{LABEL}host": self._owner.host, f"{LABEL}owner": str(self._owner)},
            **{f"Attach{name}": True for name in ("Stdin", "Stdout", "Stderr")},
            "OpenStdin": True,
            "StdinOnce": True,  # with our connection its input ends, and with that the agent
            "Tty": False,
            "NetworkDisabled": True,
            "Healthcheck": {"Test": ["NONE"]},
            "HostConfig": {
                "AutoRemove": True,
                "NetworkMode": "none",
                "IpcMode": "private",
                "CgroupnsMode": "private",
                "CapDrop": ["ALL"],
                "Privileged": False,
                "SecurityOpt": ["no-new-privileges", f"seccomp={self._filter()}"],
                "ReadonlyRootfs": True,
                "MaskedPaths": list(profile.MASKED),
                "ReadonlyPaths": [],
                "Memory": memory,
                "MemorySwap": memory,
                "NanoCpus": int(limits.cpu_cores * 1e9),
                "PidsLimit": limits.processes + _BESIDES,
                "Ulimits": [
                    {"Name": name, "Soft": most, "Hard": most}
                    for name, most in (("nofile", files), ("core", 0), ("memlock", 65536), ("msgqueue", 0))
                ],
                "ShmSize": limits.memory_bytes,
                "Tmpfs": tmpfs,
                "Mounts": mounts,
                "LogConfig": {"Type": "none"},
                "RestartPolicy": {"Name": "no"},
                **({"Runtime": self._settings.runtime} if self._settings.runtime is not None else {}),
            },
        }

    def _filter(self) -> str:
        # Root alone may take over what tells of refused calls, and only on this host.
        told = sys.platform == "linux" and os.geteuid() == 0 and self.runtime is None
        return profile.seccomp_profile(self._architecture, told=told)

    @property
    def runtime(self) -> str | None:
        return self._settings.runtime

    @property
    def machine(self) -> str:
        return profile.MACHINES[self._architecture]

    def removed(self, guest: DockerGuest) -> None:
        self._guests.pop(guest.container, None)

    async def _drop(self) -> None:
        """Give up everything that waits."""
        for waiting in self._ready.values():
            for starting in waiting:
                await _over(starting)
        self._ready = {}
        if self._going:
            await asyncio.wait(self._going)
        if self._events is not None:
            self._events.cancel()
            await asyncio.wait([self._events])
            self._events = None

    async def close(self) -> None:
        await self._drop()
        for guest in list(self._guests.values()):
            await guest.remove()
        self._api = None


class DockerGuest:
    """One container."""

    def __init__(
        self,
        engine: DockerEngine,
        api: DockerApi,
        container: str,
        stream: AttachedStream,
        shape: GuestShape,
        told: Json,
    ) -> None:
        limits = shape.limits
        self.container = container
        self.stream: socket = stream.ours
        self.link: Link | None = None
        self.hardens: Json | None = {
            "unprivileged": True,
            "user": USER,
            "machine": engine.machine,
            "memory_bytes": limits.memory_bytes,
            "lent": [each.at for each in shape.mounts],
            "processors": max(1, math.ceil(limits.cpu_cores)),
            "writable": ["/workspace", _SHARED, *(each.at for each in shape.mounts if each.mode == "rw")],
        }
        self.hands_over = False
        self.trouble: list[str] = []
        self.out_of_memory = False
        self._engine = engine
        self._api = api
        self._attached = stream
        self._limits = limits
        self._told = told
        self._local: LocalLook | None = look_at(int((told.get("State") or {}).get("Pid") or 0), container)
        self._polled: GuestUsage | None = None
        own_kernel = engine.runtime is not None
        """What such a runtime has as the first process on the host is a kernel of its own, and not the agent."""
        if not own_kernel and self._local is not None and (tried := self._local.descriptor(0)) is not None:
            os.close(tried)
            self.hardens["notify"] = _LISTENER
        self._seen: Json = {}
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._gone = loop.create_task(self._wait())
        self._killing: Task[None] | None = None
        self._polling = loop.create_task(self._poll()) if self._local is None else None

    async def _wait(self) -> None:
        await self._attached.over()
        if self._polling is not None:
            self._polling.cancel()
        if self._local is not None:
            self._local.count()
        self._close_stream()
        if not self.ended.done():
            self.ended.set_result(self._attached.words.decode("utf-8", "replace").strip() or "it ended")

    @property
    def here(self) -> bool:
        """Whether it is on this host."""
        return self._local is not None

    def settle(self) -> None:
        return

    def look(self) -> None:
        if self._local is None or self._engine.runtime is not None:
            return
        self._seen = self._local.protections()
        assert self.hardens is not None and self.link is not None
        if "notify" in self.hardens and (listener := self._local.descriptor(_LISTENER)) is not None:
            self.link.given.append(listener)

    @property
    def isolation(self) -> Json:
        seen = self._seen or _by_the_engine(self._told)
        verified = "run" if self._seen else "engine"
        named = {name: {"on": on, "verified": verified} for name, on in seen.items()}
        limits = {name: {"by": "cgroup"} for name in ("memory", "pids", "cpu")}
        return {"engine": self._engine.version, "protections": named, "limits": limits, "host_id": {"whose": "all"}}

    def usage(self) -> GuestUsage | None:
        return self._local.usage() if self._local is not None else self._polled

    async def _poll(self) -> None:
        """What the engine says of its use, where this host does not."""
        with contextlib.suppress(DockerGone, DockerRefused):
            while True:
                path = f"/containers/{self.container}/stats"
                told = await self._api.ask("GET", path, stream="false", one_shot="true")
                self._polled = _used(told) or self._polled
                await asyncio.sleep(_POLL_SECONDS)

    def counted(self) -> Counted:
        counted = self._local.count() if self._local is not None else Counted(None, None, None, None)
        if self.out_of_memory and not counted.oom_kills:
            counted = counted._replace(oom_kills=1)
        return counted

    async def pause(self) -> None:
        with _said("the box cannot be paused"):
            await self._api.ask("POST", f"/containers/{self.container}/pause")

    async def resume(self) -> None:
        with _said("the box cannot be resumed"):
            await self._api.ask("POST", f"/containers/{self.container}/unpause")

    def _close_stream(self) -> None:
        if self.link is not None:
            self.link.close()
        else:
            self.stream.close()

    def kill(self) -> None:
        if self._local is not None:
            self._local.count()
        self._close_stream()
        if self._killing is None:
            self._killing = asyncio.get_running_loop().create_task(self._kill())

    async def _kill(self) -> None:
        try:
            await self._api.ask("POST", f"/containers/{self.container}/kill", seconds=_END_SECONDS)
        except DockerRefused:
            return  # it has ended
        except DockerGone:
            if self._local is not None:
                await asyncio.to_thread(self._local.kill)

    async def remove(self) -> Sequence[str]:
        self.kill()
        assert self._killing is not None
        await asyncio.wait([self._killing])
        try:
            await _removed(self._api, self.container)
        except DockerGone as problem:
            self.trouble.append(f"the container could not be removed: {problem}")
        await self._attached.close()
        await asyncio.wait([self._gone])
        self._engine.removed(self)
        return self.trouble


# ── What is asked of the engine ───────────────────────────────────────────────────────────────────


async def _answering(addresses: Sequence[str]) -> tuple[DockerApi, Json]:
    """The first engine that answers, and what it says of itself. Raises Unavailable."""
    whys: list[str] = []
    for address in addresses:
        api = DockerApi(address)
        try:
            return api, await api.ask("GET", "/version", seconds=_ASK_SECONDS)
        except DockerRefused as problem:
            whys.append(f"{address}: it refuses: {problem}")
        except DockerGone as problem:
            if problem.denied:
                raise Unavailable("no_backend", _DENIED.format(address.removeprefix("unix://"))) from None
            whys.append(f"{address}: {problem}")
    text = f"backend docker found no engine ({'; '.join(whys)})"
    remedy = "start dockerd (apt install docker.io), or name its socket as sandbox.docker_host"
    raise Unavailable("no_backend", f"{text}; {remedy}")


async def _inspected(api: DockerApi, image: str) -> Any:
    for name in (image, f"localhost/{image}"):  # as podman calls what has no registry
        try:
            return await api.ask("GET", f"/images/{name}/json")
        except DockerRefused as problem:
            if problem.status != 404:
                raise
    return None


async def _removed(api: DockerApi, container: str) -> None:
    """Returns when it is gone. Raises DockerGone."""
    for _ in range(2):
        try:
            await api.ask("DELETE", f"/containers/{container}", force=1, v=1, seconds=_END_SECONDS)
        except DockerRefused as problem:
            if problem.status == 404:
                return
            with contextlib.suppress(DockerRefused):
                await api.ask("POST", f"/containers/{container}/wait", condition="removed", seconds=_END_SECONDS)
        else:
            return


def _bind(host: str, at: str, mode: str) -> Json:
    options = {"Propagation": "rprivate", "NonRecursive": False}
    return {"Type": "bind", "Source": host, "Target": at, "ReadOnly": mode != "rw", "BindOptions": options}


def _used(told: Json) -> GuestUsage | None:
    """Both versions of control groups have names of their own; what waits in the page cache is none of its memory."""
    stats = (told.get("memory_stats") or {}).get("stats") or {}
    memory = stats.get("anon", stats.get("total_rss"))
    spent = ((told.get("cpu_stats") or {}).get("cpu_usage") or {}).get("total_usage")
    if not isinstance(memory, int) or not isinstance(spent, int):
        return None
    return GuestUsage(memory, spent / 1e6)


def _by_the_engine(told: Json) -> Json:
    """What the engine says that it does for this very container."""
    given = told.get("HostConfig") or {}
    options = " ".join(given.get("SecurityOpt") or ())
    return {
        "seccomp": "seccomp=" in options,
        "no_new_privs": "no-new-privileges" in options,
        "capabilities": "ALL" in (given.get("CapDrop") or ()) and not given.get("Privileged"),
        "pid_namespace": given.get("PidMode") in ("", "private"),
        "network_namespace": given.get("NetworkMode") == "none",
        "read_only_root": given.get("ReadonlyRootfs") is True,
    }


async def _over(starting: Task[DockerGuest]) -> None:
    """Remove one that waits, or that is still starting."""
    with contextlib.suppress(Unavailable, asyncio.CancelledError):
        await (await starting).remove()


def _look_at(starting: Task[Any]) -> None:
    if not starting.cancelled():
        starting.exception()


@contextlib.contextmanager
def _said(what: str) -> Any:
    """Raises Unavailable for what the engine says."""
    try:
        yield
    except (DockerGone, DockerRefused, TimeoutError) as problem:
        raise Unavailable("no_box", f"{what}: {problem or 'it took too long'}") from None
