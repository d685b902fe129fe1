"""Containers by runc or crun, which share the host's kernel."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
from asyncio.subprocess import Process
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ringfence.core.box import Limits, within
from ringfence.core.model import Json
from ringfence.sandbox.guests.bundle import TEMPORARY, configuration, writable
from ringfence.sandbox.guests.containers import LIMITED, SEARCH, Container, ContainerEngine, ContainerParts
from ringfence.sandbox.guests.engine import LINK, USER, Abilities, GuestUsage
from ringfence.sandbox.guests.on_host import disk, namespaces, number_inside, uid
from ringfence.sandbox.process.box_usage import descendants, with_uncounted
from ringfence.sandbox.process.host.capabilities import read_back
from ringfence.sandbox.process.limits.uncounted import Locks

PROGRAMS = ("runc", "crun")
_SLACK = 6
"""Tasks of the engine while it starts a container."""
_BESIDES = 2
"""Those of the agent afterwards: itself, and a child for files."""
_START = f"""\
while [ "$1" != -- ]; do echo 0 > "$1/cgroup.procs" || exit 125; shift; done
shift
exec "$@" {LINK}<&0 0<&1
"""


class OciEngine(ContainerEngine):
    """Starts containers."""

    level = "process"
    for_users = True
    abilities = Abilities(
        frozenset(("staying", "pause", "folders", "network", "mounts", "writable_mounts", "images", "denials"))
    )

    def __init__(self, programs: Sequence[str] | None = None) -> None:
        programs = PROGRAMS if programs is None else programs
        super().__init__(programs)
        self.name = "oci"
        self.remedy = f"apt install {programs[0]}"
        self.locks = Locks()

    def slack(self, limits: Limits) -> Limits:
        return replace(limits, processes=limits.processes + _SLACK)

    def configuration(self, parts: ContainerParts) -> Json:
        return configuration(parts.shape, parts.root, parts.lent, parts.ids, parts.group.place)

    @property
    def enters_itself(self) -> bool:
        """Whether the program is in the group of a container, too: that of an ordinary user's crun, which leaves
        groups alone that it did not make."""
        return os.geteuid() != 0 and os.path.basename(self.program) == "crun"

    async def run(self, parts: ContainerParts, stream: socket.socket) -> Process:
        groups = parts.group.paths if self.enters_itself else ()
        options = ["--cgroup-manager=disabled"] if groups else []
        words = self.words(*options, "run", "--preserve-fds", "1", "--bundle", str(parts.bundle), parts.name)
        # A shell moves the stream to where the program expects what it is to pass on. The other descriptors are never
        # those of a file of the host, not even of /dev/null: crun gives what it finds there to the container's user.
        return await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", _START, "sh", *groups, "--", *words),
            stdin=stream.fileno(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={"PATH": SEARCH},
        )

    def guest(self, parts: ContainerParts, process: Process, stream: socket.socket) -> OciGuest:
        return OciGuest(self, parts, process, stream)


class OciGuest(Container):
    """One container. Its first process is the agent."""

    def __init__(self, engine: OciEngine, parts: ContainerParts, process: Process, stream: socket.socket) -> None:
        super().__init__(engine, parts, process, stream)
        shape, limits = parts.shape, self.limits
        lent = [*(each.at for each in shape.mounts), *(each.at for each in shape.placed)]
        # What holds something of the host stays: programs cannot write there.
        temporary = [at for at in TEMPORARY if not any(within(each, at) for each in lent)]
        self.hardens = {
            "user": USER,
            "memory_bytes": limits.memory_bytes,
            "processors": max(1, min(math.ceil(limits.cpu_cores), len(os.sched_getaffinity(0)))),
            "temporary": temporary,
            "writable": ["/workspace", *temporary, *writable(shape)],
            "lent": lent,
            "landlock": True,
        }
        self.hands_over = True
        self._locks = engine.locks
        self._besides = _BESIDES + engine.enters_itself
        self._disks = ("/workspace", *(folder.at for folder in shape.folders))
        self._in_folders = sum(folder.max_bytes for folder in shape.folders)
        self._seen: Json = {}

    def settle(self) -> None:
        inside = sorted(self.group.processes())
        self.first = next((pid for pid in inside if number_inside(pid) == 1), 0)
        if not self.first:
            raise OSError(0, "it is not in its control group")
        with contextlib.suppress(OSError):
            self.group.add(self.first)  # engines leave out the hierarchies that they do not use themselves

    def look(self) -> None:
        """Find its first process on the host, and read back what the kernel says of it."""
        limits = self.limits
        self.group.limit(
            memory_bytes=limits.memory_bytes,
            hard_bytes=limits.memory_bytes + limits.disk_bytes + self._in_folders,
            processes=limits.processes + self._besides,
            cpu_cores=limits.cpu_cores,
        )
        if self.first:
            self._seen = read_back(self.first)
            self._seen["pid_namespace"] = True  # by the number that it was found by

    @property
    def isolation(self) -> Json:
        named = {
            **{name: {"on": on, "verified": "run"} for name, on in self._seen.items()},
            **{f"{name}_namespace": {"on": on, "verified": "run"} for name, on in namespaces(self.first).items()},
        }
        if self._seen:
            owned = self.parts.ids.whose == "box" and uid(self.first) == self.parts.ids.outside
            named["host_id"] = {"on": owned, "verified": "run"}
        limits = {name: {"by": "cgroup"} for name in LIMITED}
        whose: Json = {"whose": self.parts.ids.whose}
        if self.parts.ids.whose == "user":
            whose["why"] = "it must see this user's folders with this user's permissions"
        return {"engine": self._engine.version, "protections": named, "limits": limits, "host_id": whose}

    def usage(self) -> GuestUsage | None:
        parts: tuple[int, int] | None = None
        with contextlib.suppress(KeyError):  # it is just going
            parts = self.group.usage_parts()
        if parts is None:
            return None
        files, rest = parts
        used, met = disk(self.first, self._disks) if self.first else (0, None)
        held = rest + max(0, files - used)
        if self.first:
            most = self.limits.memory_bytes
            held = with_uncounted(held, self.first, self.group, self._locks, self._inside, most)
        kills, refused = self.group.oom_kills() or 0, self.group.pids_denied() or 0
        self.used = GuestUsage(held, self.group.cpu_ms() or 0.0, met, kills, refused)
        return self.used

    def _inside(self) -> Iterator[int]:
        return (pid for pid in descendants(self.first) if pid != self.first)
