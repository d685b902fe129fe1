"""Containers by runsc (gVisor), each with a kernel of its own: a process of the host, the sentry, without rights there.

The sentry answers the system calls of programs, and few of the host's are open to it. Its platform is systrap, never
the one that needs /dev/kvm. The host's kernel sees no program, only the sentry, what carries programs for it, and a
process that opens files of the root for it (the gofer): limits are of all of them together.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
from asyncio.subprocess import Process
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ringfence.core.box import MIB, Limits
from ringfence.core.model import Json
from ringfence.sandbox.guests.bundle import TEMPORARY, configuration
from ringfence.sandbox.guests.containers import SEARCH, Container, ContainerEngine, ContainerParts
from ringfence.sandbox.guests.engine import USER, Abilities, GuestUsage, boot
from ringfence.sandbox.guests.link import GuestGone
from ringfence.sandbox.guests.on_host import namespaces
from ringfence.sandbox.process.cgroups.cgroup import Counted, Group
from ringfence.sandbox.process.host.capabilities import read_back

PROGRAMS = ("runsc",)
_FLAGS = (
    *("--platform=systrap", "--network=none", "--overlay2=none", "--ignore-cgroups"),
    *("--directfs=false", "--host-uds=none", "--host-fifo=none", "--net-raw=false"),
)
_RIGHTS = ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
"""To its own kernel, for the agent, which gives up those that it needs no more: see `own_kernel`."""
_STREAM = 0
"""The stream is at the descriptor of standard input: only what is at the first three is there again when a checkpoint
is restored."""
_STARTING_BYTES = 256 * MIB
"""What runsc may take besides while it starts; what the sandbox then has is not counted as its programs'."""
_TASKS = 96
"""Threads of runsc, the gofer and the sentry."""
_TASKS_EACH = 6
"""For each process in the guest: what carries it on the host."""


class GvisorEngine(ContainerEngine):
    """Starts sandboxes."""

    level = "gvisor"
    points = (("/workspace/input", "folder"),)
    abilities = Abilities(
        frozenset(("pause", "network", "mounts", "images")),
        {
            "denials": "its own kernel refuses calls, and tells nobody",
            "writable_mounts": "folders of the host are read-only in it; backend process or oci can",
        },
    )

    def __init__(self, programs: Sequence[str] = PROGRAMS) -> None:
        super().__init__(programs)
        self.name = "gvisor"
        self.remedy = "install runsc: Debian has it in bookworm-backports, trixie and later, and gvisor.dev for others"

    def slack(self, limits: Limits) -> Limits:
        return replace(
            limits,
            memory_bytes=limits.memory_bytes + _STARTING_BYTES,
            processes=_tasks(limits),
            cpu_cores=max(limits.cpu_cores, float(os.cpu_count() or 1)),
        )

    def configuration(self, parts: ContainerParts) -> Json:
        told = configuration(parts.shape, parts.root, parts.lent, parts.ids, parts.group.place)
        process = told["process"]
        process["args"] = [*parts.shape.root.agent, "-I", "-S", "-c", boot(_STREAM, _STREAM)]
        process["capabilities"] = {
            **{key: list(_RIGHTS) for key in ("bounding", "effective", "permitted")},
            **{key: [] for key in ("inheritable", "ambient")},
        }
        linux = told["linux"]
        linux["namespaces"] = [each for each in linux["namespaces"] if each["type"] != "cgroup"]
        return told

    async def run(self, parts: ContainerParts, stream: socket.socket) -> Process:
        words = self.words(*_FLAGS, "run", "--bundle", str(parts.bundle), parts.name)
        # A shell enters the group, which the program would not do by itself: it counts and limits all that follows.
        # What is written to the container's standard output and error are its words, until the agent has put them away.
        enter = 'while [ "$1" != -- ]; do echo 0 >"$1" || exit 1; shift; done; shift; exec "$@"'
        return await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", enter, "sh", *_entrances(parts.group), "--", *words),
            stdin=stream.fileno(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={"PATH": SEARCH},
        )

    def guest(self, parts: ContainerParts, process: Process, stream: socket.socket) -> GvisorGuest:
        return GvisorGuest(self, parts, process, stream)


class GvisorGuest(Container):
    """One sandbox. Its first process on the host is the sentry."""

    def __init__(self, engine: GvisorEngine, parts: ContainerParts, process: Process, stream: socket.socket) -> None:
        super().__init__(engine, parts, process, stream)
        limits = self.limits
        self.hardens = {
            "own_kernel": True,
            "user": USER,
            "memory_bytes": limits.memory_bytes,
            "processors": max(1, min(math.ceil(limits.cpu_cores), len(os.sched_getaffinity(0)))),
            "temporary": list(TEMPORARY),
            "writable": ["/workspace", *TEMPORARY],
        }
        self.hands_over = False
        self._gofer = 0
        self._besides = 0
        """What the sandbox took before any program."""
        self._files = 0
        """What the files of the workspace took when that was last asked."""
        self._asked: asyncio.Future[None] | None = None
        self._seen: Json = {}

    def settle(self) -> None:
        named = {_name(pid): pid for pid in self.group.processes()}
        self.first, self._gofer = named.get("runsc-sandbox", 0), named.get("runsc-gofer", 0)

    def look(self) -> None:
        """Read back what the host's kernel says of the sandbox, and have it hold the limits from here on."""
        limits = self.limits
        self._besides = self.group.usage() or 0
        self.group.limit(
            memory_bytes=limits.memory_bytes,
            hard_bytes=self._besides + limits.memory_bytes + limits.disk_bytes,
            processes=_tasks(limits),
            cpu_cores=limits.cpu_cores,
        )
        if not self.first or not self._gofer:
            return
        sentry, gofer = read_back(self.first), read_back(self._gofer)
        self._seen = {
            "seccomp": sentry["seccomp"] and gofer["seccomp"],
            "no_new_privs": sentry["no_new_privs"] and gofer["no_new_privs"],
            "capabilities": sentry["capabilities"],
            "bounding_set": sentry["bounding_set"],
            **{f"{name}_namespace": on for name, on in namespaces(self.first).items() if name != "cgroup"},
            "own_root": _has_no_files(self.first),
        }

    @property
    def isolation(self) -> Json:
        return {
            "engine": self._engine.version,
            "platform": "systrap",
            "protections": {name: {"on": on, "verified": "run"} for name, on in self._seen.items()},
            "limits": {"memory": {"by": "cgroup"}, "pids": {"by": "rlimit"}, "cpu": {"by": "cgroup"}},
            "host_id": {"whose": "nobody", "why": "the sandbox runs as the user who owns nothing, in every box"},
        }

    def usage(self) -> GuestUsage | None:
        held: int | None = None
        with contextlib.suppress(KeyError):  # it is just going
            held = self.group.usage()
        if held is None:
            return None
        held = max(0, held - self._besides)
        cpu = self.group.cpu_ms() or 0.0
        most = self.limits.memory_bytes
        if self.group.oom_kills():
            # The host's kernel took away what carried a program, which ends in some way of the sandbox's.
            return GuestUsage(max(held, most + 1), cpu)
        if held - self._files <= most:
            self._asked = None
        elif self._asked is None:
            # Its memory and the files of its workspace are one thing here. How much is files, it is asked where that
            # matters: what is held against it is a use that was still there with the answer.
            self._asked = asyncio.ensure_future(self._ask())
            return GuestUsage(min(held, most), cpu)
        elif not self._asked.done():
            return GuestUsage(min(held, most), cpu)
        return GuestUsage(max(0, held - self._files), cpu)

    async def _ask(self) -> None:
        with contextlib.suppress(GuestGone):
            if self.link is not None:
                used = (await self.link.open({"do": "room"}).result).get("used", 0)
                self._files = min(used, self.limits.disk_bytes) if isinstance(used, int) else 0

    def counted(self) -> Counted:
        """Without the processes, which are not the host's."""
        return self.group.count()._replace(pids_denied=None, pids_peak=None)


def _tasks(limits: Limits) -> int:
    return _TASKS + _TASKS_EACH * limits.processes


def _entrances(group: Group) -> list[str]:
    """Where a process writes "0" to enter."""
    names = (f"{path}/tasks" for path in group.paths)  # with v1: see `Group.entrances`
    return [name if os.path.exists(name) else f"{os.path.dirname(name)}/cgroup.procs" for name in names]


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode("utf-8", "replace")
    return ""


def _has_no_files(pid: int) -> bool:
    """Whether its own root has nothing but what the sandbox put there: files are opened by another process."""
    try:
        return set(os.listdir(f"/proc/{pid}/root")) <= {"proc", "etc"}
    except OSError:
        return False
