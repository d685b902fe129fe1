"""Guests that are virtual machines: each goes on from a saved one, and is told then what it is to be.

1. A kernel of the distribution and a disk with the root are found or made (`kernel`, `disks`).
2. A machine of the wanted size is booted, made ready and saved, once for a host (`saved`).
3. Each guest is a copy of it that shares its memory until it writes there. It is given new randomness, the time, its
   limits, and copies of its files. The agent then confines it as it does a container: programs have no rights in their
   own kernel either.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ringfence.core.aio import in_thread, shielded
from ringfence.core.box import Limit, Limits
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.sandbox.guests.engine import USER, Abilities, GuestShape, GuestUsage
from ringfence.sandbox.guests.link import Link
from ringfence.sandbox.guests.microvm import lent
from ringfence.sandbox.guests.microvm.kernel import GuestKernel
from ringfence.sandbox.guests.microvm.machine import Hypervisor, Machine, MachineShape
from ringfence.sandbox.guests.microvm.saved import GuestStart, SavedMachines, told
from ringfence.sandbox.process.cgroups.cgroup import Cgroups, Counted, Group, GroupPool, sweep
from ringfence.sandbox.process.cgroups.hierarchy import Systemd
from ringfence.sandbox.process.host.capabilities import read_back

_MIB = 1024 * 1024
_KERNEL_BYTES = 160 * _MIB
"""What the kernel of a machine, the agent and files of the root take beside programs and their files."""
_PROGRAM_BYTES = 512 * _MIB
"""What the program that runs a machine takes beside its memory."""
_THREADS = 64
"""The most threads of that program."""
_SMALLEST = 256 * _MIB
_BESIDES = 2
"""Tasks of the agent in its machine: itself, and a child for files."""
_FILES = 256
_LOOK_SECONDS = 0.1
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm", "/home/user")  # noqa: S108 - in the machine
_ABILITIES = Abilities(
    frozenset({"staying", "pause", "network", "mounts", "images"}),
    {
        "writable_mounts": "a machine sees copies of the host's folders, and what it wrote would be lost",
    },
)

Agent = Callable[[], bytes]
Kernels = Callable[[], GuestKernel]
"""Finds the kernel. Raises Unavailable."""


class MicrovmEngine:
    """Starts virtual machines."""

    level = "microvm"
    abilities = _ABILITIES

    def __init__(
        self,
        name: str,
        hypervisors: Sequence[Hypervisor],
        kept: Path,
        kernel: Kernels,
        agent: Agent,
        *,
        emulates: bool = True,
    ) -> None:
        """`hypervisors`: the first that boots a machine here is used. `emulates`: the last needs no virtualization."""
        self._emulates = emulates
        self.name = name
        self._hypervisors = hypervisors
        self._kept = kept
        self._kernel = kernel
        self._agent = agent
        self._opening = asyncio.Lock()
        self._hypervisor: Hypervisor | None = None
        self._machines: SavedMachines | None = None
        self._found: GuestKernel | None = None
        self._groups: GroupPool | None = None
        self.why_not: dict[str, str] = {}
        """Why an accelerator is not used."""

    async def open(self) -> None:
        async with self._opening:
            if self._hypervisor is not None:
                return
            self._found = await in_thread(self._kernel)
            self._machines = SavedMachines(self._kept, self._found)
            chosen = await self._chosen(self._machines)
            await chosen.open()
            if os.geteuid() == 0:
                cgroups = await asyncio.to_thread(Cgroups.detect, manager=Systemd())
                sweep(cgroups)
                self._groups = GroupPool(cgroups) if cgroups.available else None
            self._hypervisor = chosen

    async def _chosen(self, machines: SavedMachines) -> Hypervisor:
        *others, last = self._hypervisors
        for each in others if self._emulates else self._hypervisors:
            why = await machines.accelerated(each, each.accelerator)
            if why is None:
                return each
            self.why_not[each.accelerator] = why
        if not self._emulates:
            why = "; ".join(self.why_not.values())
            text = (
                f"backend {self.name} needs KVM, and it does not serve here: {why}; microvm emulates machines without"
            )
            raise Unavailable("no_backend", text)
        return last

    # ── A machine ──

    async def start(self, shape: GuestShape) -> MicrovmGuest:
        await self.open()
        hypervisor, machines, kernel = self._hypervisor, self._machines, self._found
        assert hypervisor is not None and machines is not None and kernel is not None
        names, files = await in_thread(lambda: lent.packed(shape.input, shape.mounts, shape.placed))
        disk = await machines.disk(shape.root.folder, shape.root.digest)
        wanted = MachineShape(
            kernel.image,
            await machines.initrd(),
            disk,
            _size(shape.limits, len(files)),
            max(1, min(math.ceil(shape.limits.cpu_cores), len(os.sched_getaffinity(0)))),
        )
        saved = await machines.saved(hypervisor, wanted, GuestStart(self._agent(), shape.root.agent))
        group = self._take_group(wanted, shape.limits)
        machine: Machine | None = None
        try:
            machine = await hypervisor.start(wanted, saved, group)
            guest = MicrovmGuest(self, machine, wanted, group, shape)
            await told(machine, json.dumps(self._what_it_is(shape, names, files, group is not None)).encode())
            await asyncio.get_running_loop().sock_sendall(machine.stream, files)
        except BaseException as problem:
            if machine is not None:
                await shielded(asyncio.ensure_future(machine.remove()))
            self.give_back(group)
            if isinstance(problem, OSError):
                raise Unavailable("no_box", f"a machine could not be started: {problem}") from None
            raise
        return guest

    def _what_it_is(self, shape: GuestShape, names: list[list[str]], files: bytes, grouped: bool) -> Json:
        limits = shape.limits
        group: Json = {"memory.max": limits.memory_bytes + limits.disk_bytes, "pids.max": limits.processes + _BESIDES}
        if not grouped:
            group["cpu.max"] = f"{round(limits.cpu_cores * 100_000)} 100000"
        return {
            "seed": secrets.token_hex(256),
            "time": time.time(),
            "user": USER,
            "disk_bytes": limits.disk_bytes,
            "inodes": limits.inodes,
            "open_files": limits.open_files + _FILES,
            "group": group,
            "lent": names,
            "files": len(files),
        }

    def _take_group(self, shape: MachineShape, limits: Limits) -> Group | None:
        if self._groups is None:
            return None
        wanted = replace(limits, memory_bytes=shape.memory_bytes + _PROGRAM_BYTES, disk_bytes=0, processes=_THREADS)
        with contextlib.suppress(OSError):
            return self._groups.take(wanted, pauses=True)
        raise Unavailable("no_box", "there is no control group for a machine; `ringfence host` says why")

    def give_back(self, group: Group | None) -> None:
        if group is not None and self._groups is not None:
            with contextlib.suppress(OSError):
                self._groups.give_back(group, _NO_LIMITS, reaped=True, removed=lambda: None)

    @property
    def about(self) -> Json:
        """What of the `isolation` fact is the same for all its guests."""
        assert self._hypervisor is not None and self._found is not None
        fact: Json = {
            "engine": self._hypervisor.version,
            "accelerator": self._hypervisor.accelerator,
            "guest_kernel": self._found.release,
        }
        if self.why_not:
            fact["not_accelerated"] = dict(self.why_not)
        return fact

    async def close(self) -> None:
        for each in self._hypervisors:
            await each.close()
        if self._groups is not None:
            self._groups.close()
        self._hypervisor = None


_NO_LIMITS = Limits()


def _size(limits: Limits, lent_bytes: int) -> int:
    """The memory of a machine: its programs' memory, all their files, and what its kernel takes. Few sizes, since each
    needs a saved machine of its own."""
    needed = limits.memory_bytes + limits.disk_bytes + lent_bytes + _KERNEL_BYTES
    size = _SMALLEST
    while size < needed:
        size *= 2
    return size


class MicrovmGuest:
    """One machine with a box in it."""

    def __init__(
        self, engine: MicrovmEngine, machine: Machine, shape: MachineShape, group: Group | None, guest: GuestShape
    ) -> None:
        self.stream = machine.stream
        self.link: Link | None = None
        self.hardens: Json | None = {
            "user": USER,
            "memory_bytes": guest.limits.memory_bytes,
            "processors": shape.processors,
            "temporary": list(_TEMPORARY),
            "writable": ["/workspace", *_TEMPORARY],
            "lent": [each.at for each in guest.mounts],
            "landlock": True,
        }
        self.hands_over = False
        self.ended = machine.ended
        self.trouble: list[str] = []
        self._engine = engine
        self._machine = machine
        self._shape = shape
        self._group = group
        self._seen: Json = {}
        self._looking: asyncio.Task[None] | None = None

    def settle(self) -> None:
        """Nothing is left to do from outside."""

    def look(self) -> None:
        with contextlib.suppress(OSError):
            self._seen = read_back(self._machine.pid)
            self._seen["pid_namespace"] = _number_inside(self._machine.pid) == 1
        self._looking = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        assert self.link is not None
        while not self.link.gone.done():
            self.link.count()
            await asyncio.sleep(_LOOK_SECONDS)

    @property
    def isolation(self) -> Json:
        by = "cgroup"
        return {
            **self._engine.about,
            "machine": {"memory_bytes": self._shape.memory_bytes, "processors": self._shape.processors},
            "protections": {
                "own_kernel": {"on": True, "verified": "host"},  # a machine of it was started and saved
                **{f"machine_{name}": {"on": on, "verified": "run"} for name, on in self._seen.items()},
            },
            "limits": {"memory": {"by": by}, "pids": {"by": by}, "cpu": {"by": by}},
        }

    def usage(self) -> GuestUsage | None:
        if self.link is None or not (counted := self.link.counted):
            return None
        return GuestUsage(_number(counted, "memory_bytes"), float(_number(counted, "cpu_ms")), _full(counted))

    def counted(self) -> Counted:
        """By the machine's own kernel: whoever has that could have it say anything, and would still be in there."""
        counted = self.link.counted if self.link is not None else {}
        oom_kills, pids_denied = (_number(counted, name) for name in ("oom_kills", "pids_denied"))
        return Counted(oom_kills, pids_denied, None, float(_number(counted, "cpu_ms")))

    async def pause(self) -> None:
        await self._machine.pause()

    async def resume(self) -> None:
        await self._machine.resume()

    def kill(self) -> None:
        if self.link is not None:
            self.link.close()
        self._machine.kill()

    async def remove(self) -> Sequence[str]:
        if self._looking is not None:
            self._looking.cancel()
        self.kill()
        self.trouble += await self._machine.remove()
        if not self.trouble:  # else a machine may still be in it
            self._engine.give_back(self._group)
        return self.trouble


def _number_inside(pid: int) -> int:
    """Its number in its own namespace; 0: it is gone."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return 0


def _number(counted: Json, name: str) -> int:
    """What a guest says is data."""
    value = counted.get(name, 0)
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**63
    return int(value) if fits else 0


def _full(counted: Json) -> Limit | None:
    full = counted.get("full")
    return full if full in ("disk", "inodes") else None
