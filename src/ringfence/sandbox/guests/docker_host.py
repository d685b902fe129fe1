"""What this host says of containers that its own engine runs, where it is Linux; and whose containers are whose."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from pathlib import Path
from typing import Any

from ringfence.core import system
from ringfence.core.box import Limit
from ringfence.core.model import Json
from ringfence.core.record import plain
from ringfence.sandbox.guests.engine import GuestUsage
from ringfence.sandbox.process.box_usage import full
from ringfence.sandbox.process.cgroups.cgroup import Counted, Group
from ringfence.sandbox.process.cgroups.hierarchy import V1_ROLES, CgroupFolder, own_folders, roles_of
from ringfence.sandbox.process.host.capabilities import read_back
from ringfence.sandbox.process.zygote import kernel


@plain
class ContainerOwner:
    """A supervisor, in labels of its containers."""

    host: str
    process: str

    @classmethod
    def of_this_process(cls) -> ContainerOwner:
        return cls(_host(), _process(os.getpid()))

    def __str__(self) -> str:
        return self.process

    @staticmethod
    def lives(process: str) -> bool:
        """False only where it is certain."""
        boot, _, rest = process.partition("/")
        space, _, number = rest.partition("/")
        pid = number.partition(".")[0]
        if not pid.isdecimal() or boot != (system.boot() or ""):
            return not pid.isdecimal() or not boot
        if space != _space():
            return True
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True
        return _process(int(pid)) == process


def _host() -> str:
    """This machine, and this user: nobody else's containers are touched."""
    machine = ""
    with contextlib.suppress(OSError):
        machine = Path("/etc/machine-id").read_text().strip()
    named = f"{machine or platform.node()}/{system.account()['uid']}"
    return hashlib.sha256(named.encode()).hexdigest()[:24]


def _process(pid: int) -> str:
    """What no other process has: boot, pid namespace, number and start time, as far as the system says so."""
    start = ""
    with contextlib.suppress(OSError):
        fields = system.process_fields(pid)
        start = "" if fields[0] in "ZX" else fields[19]
    return f"{system.boot() or ''}/{_space()}/{pid}.{start}"


def _space() -> str:
    with contextlib.suppress(OSError):
        return str(os.stat("/proc/self/ns/pid").st_ino)
    return ""


class LocalLook:
    """A container of this host, from outside."""

    def __init__(self, pid: int, group: Group) -> None:
        self._pid = pid
        self._group = group
        self._counted: Counted | None = None

    def protections(self) -> Json:
        """What the kernel says of its first process, which no program in it can change."""
        seen: Json = {**read_back(self._pid), **_namespaces(self._pid)}
        seen["pid_namespace"] = _numbers(self._pid) > _numbers("self")
        with contextlib.suppress(OSError):
            options = _root_options(Path(f"/proc/{self._pid}/mountinfo").read_text())
            seen["read_only_root"] = "ro" in options
        return seen

    def descriptor(self, number: int) -> int | None:
        """One that its first process has open, for us, too; None where we have not the right."""
        with contextlib.suppress(OSError, KeyError):
            process = os.pidfd_open(self._pid)
            try:
                return kernel.call("pidfd_getfd", process, number, 0)
            finally:
                os.close(process)
        return None

    def usage(self) -> GuestUsage | None:
        parts: tuple[int, int] | None = None
        with contextlib.suppress(KeyError, OSError):  # it is just going
            parts = self._group.usage_parts()
        if parts is None:
            return None
        files, rest = parts
        disk, met = _disk(self._pid)
        beyond = max(0, files - disk) if disk is not None else 0  # files elsewhere than in the workspace are memory
        counted = self.count()
        killed, refused = counted.oom_kills or 0, counted.pids_denied or 0
        return GuestUsage(rest + beyond, self._group.cpu_ms() or 0.0, met, killed, refused)

    def kill(self) -> None:
        """Without its engine, where we have the right."""
        with contextlib.suppress(OSError):
            self._group.kill()

    def count(self) -> Counted:
        """While it is there, anew; afterwards what was counted last."""
        with contextlib.suppress(OSError, KeyError):
            group = self._group
            now = Counted(group.oom_kills(), group.pids_denied(), group.pids_peak(), group.cpu_ms())
            if now.pids_peak is not None or self._counted is None:
                self._counted = now
        return self._counted or Counted(None, None, None, None)


def look_at(pid: int, container: str) -> LocalLook | None:
    """None where the engine is elsewhere: its numbers are then not those of this host."""
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text()
        mounts = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return None
    if pid <= 0 or container not in groups:
        return None
    found: dict[str, CgroupFolder] = {}
    for folder, controllers in sorted(own_folders(groups, mounts), key=lambda each: not each[0].v2):
        roles = roles_of(folder) if folder.v2 else {V1_ROLES[name] for name in controllers if name in V1_ROLES}
        if container in folder.path and os.path.isdir(folder.path):
            found = {**dict.fromkeys(sorted(roles), folder), **found}
    return LocalLook(pid, Group(container, found)) if "memory" in found else None


def _namespaces(pid: int) -> dict[str, bool]:
    """Which are its own, and not ours, where we may know."""
    names = {"mnt": "mount"}
    seen: dict[str, bool] = {}
    for name in ("user", "mnt", "net", "ipc", "uts", "cgroup"):
        with contextlib.suppress(OSError):
            own = os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")
            seen[f"{names.get(name, name)}_namespace"] = own
    return seen


def _numbers(pid: int | str) -> int:
    """How many numbers it has: one in each pid namespace that it is in."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return len(line.split()) - 1
    return 0


def _root_options(mountinfo: str) -> list[str]:
    lines: list[list[Any]] = [line.split(" ") for line in mountinfo.splitlines()]
    return [option for line in lines if line[4] == "/" for option in line[5].split(",")]


def _disk(pid: int) -> tuple[int | None, Limit | None]:
    """What its files take, and whether that is all they may; None where we may not look."""
    with contextlib.suppress(OSError):
        descriptor = os.open(f"/proc/{pid}/root/workspace", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            state = os.fstatvfs(descriptor)
            return (state.f_blocks - state.f_bfree) * state.f_frsize, full(descriptor)
        finally:
            os.close(descriptor)
    return None, None
