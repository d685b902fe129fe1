"""What a container engine is told to keep from a container of ours, as it wants it said.

The engine's filter for system calls knows names alone: it is made of the same verdicts as every box's, and allows what
some arguments may be allowed of, and what the agent needs to hide more of the machine. The agent puts the exact filter
on top of it, for itself and for all programs.
"""

from __future__ import annotations

import errno
import json
from functools import cache

from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.sandbox.process.seccomp.verdicts import ALLOW, POLICY, Ruling

_ARCHITECTURES = {"amd64": "SCMP_ARCH_X86_64", "arm64": "SCMP_ARCH_AARCH64"}
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""What engines call machines, and what the kernel calls them."""

MASKED = (
    *("/proc/acpi", "/proc/asound", "/proc/bus", "/proc/driver", "/proc/fs", "/proc/irq", "/proc/scsi", "/proc/tty"),
    *("/proc/buddyinfo", "/proc/cgroups", "/proc/cmdline", "/proc/config.gz", "/proc/consoles", "/proc/crypto"),
    *("/proc/devices", "/proc/diskstats", "/proc/dma", "/proc/execdomains", "/proc/fb", "/proc/interrupts"),
    *("/proc/iomem", "/proc/ioports", "/proc/kallsyms", "/proc/kcore", "/proc/key-users", "/proc/keys", "/proc/kmsg"),
    *("/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags", "/proc/latency_stats", "/proc/locks"),
    *("/proc/mdstat", "/proc/misc", "/proc/modules", "/proc/mtrr", "/proc/pagetypeinfo", "/proc/partitions"),
    *("/proc/pressure", "/proc/sched_debug", "/proc/schedstat", "/proc/slabinfo", "/proc/softirqs", "/proc/swaps"),
    *("/proc/sysrq-trigger", "/proc/sysvipc", "/proc/timer_list", "/proc/timer_stats", "/proc/vmallocinfo"),
    *("/proc/vmstat", "/proc/zoneinfo", "/proc/sys", "/sys"),
)
"""More than engines hide by themselves: all that tells of the machine, and no program counts on."""
_AGENTS = ("unshare", "mount", "umount2", "mount_setattr")
"""Calls of the agent before any program, which no program may make. They need a user namespace: it has no rights."""


@cache
def seccomp_profile(architecture: str, *, told: bool = False) -> str:
    """By name, as engines read it. `told`: what we are to be told of is left to the agent's filter, since of two that
    refuse a call the engine's would win. Raises Unavailable for a machine that no box runs on."""
    if architecture not in _ARCHITECTURES:
        raise Unavailable(
            "no_backend", f"the engine runs on {architecture}, and boxes on {' and '.join(MACHINES)} alone"
        )
    allowed: list[str] = []
    refused: dict[int, list[str]] = {}
    for name, judgement in POLICY.items():
        ruling = judgement if isinstance(judgement, Ruling) else ALLOW
        if name in _AGENTS or (told and ruling.action == "notify") or not ruling.errno:
            allowed.append(name)
        else:
            refused.setdefault(ruling.errno, []).append(name)
    rules: list[Json] = [{"names": sorted(allowed), "action": "SCMP_ACT_ALLOW"}]
    rules += [
        {"names": sorted(names), "action": "SCMP_ACT_ERRNO", "errnoRet": number}
        for number, names in sorted(refused.items())
    ]
    profile = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.ENOSYS,
        "architectures": [_ARCHITECTURES[architecture]],
        "syscalls": rules,
    }
    return json.dumps(profile, separators=(",", ":"))
