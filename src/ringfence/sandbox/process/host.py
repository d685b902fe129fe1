"""What this host can give a box, what it lacks, and what was read back from the kernel about one that runs."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ringfence.box import MIB, BoxSpec, Layout
from ringfence.errors import Unavailable
from ringfence.model import Json
from ringfence.sandbox.process import confine, landlock, syscalls, template

MAX_SOURCE = 10 * MIB
MEANS = {"memory": "watchdog", "pids": "rlimit", "cpu": "affinity"}
"""How a limit is held where no control group holds it."""
_NO_PROTECTION = ("loopback", "input", "cores", "memory", "cpu_time")
"""Steps that give a box something, or set a limit that is told of elsewhere."""
STEPS = (*template.STEPS, *confine.names())
PROTECTIONS = tuple(name for name in STEPS if name not in _NO_PROTECTION)
"""By the names of the steps that make them."""
CAN_DO_WITHOUT = ("landlock",)
"""What an operator may accept to do without; a box without any of the others would be none."""


@dataclass(frozen=True, slots=True)
class Tested:
    """What a box of this backend was seen to have, before any other was used."""

    found: Mapping[str, bool]
    at: str
    left_out: frozenset[str]


@dataclass(frozen=True, slots=True)
class Host:
    """This machine, as far as boxes are concerned."""

    missing: Mapping[str, str] = field(default_factory=dict)
    """A protection, and why there is none."""

    @classmethod
    def detect(cls) -> Host:
        missing: dict[str, str] = {}
        machine = platform.machine()
        if sys.platform != "linux":
            return cls({"linux": f"boxes of the process backend need Linux; this is {sys.platform}"})
        if machine not in syscalls.NUMBERS:
            return cls({"seccomp": f"the system calls of {machine} are not known"})
        if not _number("/proc/sys/user/max_user_namespaces", 1):
            missing["user_namespace"] = "user namespaces are switched off (user.max_user_namespaces is 0)"
        elif os.geteuid() != 0 and not _number("/proc/sys/kernel/unprivileged_userns_clone", 1):
            missing["user_namespace"] = "kernel.unprivileged_userns_clone is 0"
        elif os.geteuid() != 0 and _number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", 0):
            missing["user_namespace"] = "AppArmor restricts them (kernel.apparmor_restrict_unprivileged_userns is 1)"
        if not landlock.version():
            missing["landlock"] = "this kernel has no Landlock, or it is not among its active security modules"
        actions = _text("/proc/sys/kernel/seccomp/actions_avail")
        if "user_notif" not in actions:
            missing["seccomp"] = "this kernel cannot notify of refused system calls (it needs Linux 5.0)"
        return cls(missing)

    def require(self, accepted: Sequence[str]) -> None:
        """Raises Unavailable for what is missing and was not given up."""
        lacking = {
            name: why for name, why in self.missing.items() if name not in accepted or name not in CAN_DO_WITHOUT
        }
        if lacking:
            told = "; ".join(f"{name}: {why}" for name, why in lacking.items())
            hint = "".join(
                f" To run without {name}, list it under sandbox.accept_missing."
                for name in lacking
                if name in CAN_DO_WITHOUT
            )
            raise Unavailable("missing_protection", f"boxes would lack a protection on this host ({told}).{hint}")

    def isolation(self, seen: Json, tested: Tested, layout: Layout, means: Mapping[str, Json]) -> Json:
        """The `isolation` fact of a box; `seen` was read back from it, `tested` from another one on this host."""
        protections: Json = {}
        for name in PROTECTIONS:
            if name in seen:
                protections[name] = {"on": seen[name], "verified": "run"}
            elif name in tested.found:
                protections[name] = {"on": tested.found[name], "verified": "host"}
            else:
                protections[name] = {"on": name not in tested.left_out, "verified": None}
        return {
            "backend": "process",
            "level": "process",
            "memory_layout": layout,
            "protections": protections,
            "verified_at": tested.at,
            "limits": dict(means),
        }


def read_back(pid: int) -> Json:
    """What the kernel says of the box's first process, which the box itself cannot change."""
    try:
        descriptor = os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        status = os.read(descriptor, 65536)
    finally:
        os.close(descriptor)

    def word(name: bytes) -> bytes:
        return status.partition(b"\n" + name + b":\t")[2].partition(b"\n")[0]

    return {
        "seccomp": word(b"Seccomp") == b"2",
        "no_new_privs": word(b"NoNewPrivs") == b"1",
        "capabilities": not any(int(word(name) or b"1", 16) for name in (b"CapEff", b"CapPrm", b"CapInh", b"CapAmb")),
        "bounding_set": int(word(b"CapBnd") or b"1", 16) == 0,
        "pid_namespace": word(b"NSpid").count(b"\t") > _depth(),
    }


@cache
def _depth() -> int:
    """In how many pid namespaces we are, beside the first."""
    return _text("/proc/self/status").partition("NSpid:\t")[2].partition("\n")[0].count("\t")


def check_spec(spec: BoxSpec, templates: Collection[str]) -> None:
    """Raises ValueError, with a sentence for a person, for a spec that makes no sense."""
    limits, program = spec.limits, spec.program
    for name in (
        "wall_seconds",
        "cpu_cores",
        "memory_bytes",
        "disk_bytes",
        "inodes",
        "processes",
        "open_files",
        "output_bytes",
    ):
        value = getattr(limits, name)
        if not value > 0 or value != value or value > 2**50:
            raise ValueError(f"the limit {name} must be a positive number, not {value}")
    if limits.memory_bytes < 16 * MIB:
        raise ValueError(f"a box needs at least 16 MiB of memory, not {limits.memory_bytes} bytes")
    if limits.disk_bytes < 64 * 1024 or limits.inodes < 16 or limits.open_files < 16:
        raise ValueError("a box needs at least 64 KiB of disk, 16 inodes and 16 open files")
    if spec.template not in templates:
        raise ValueError(f"there is no template {spec.template!r}; there are: {', '.join(sorted(templates))}")
    if len(program.source) > MAX_SOURCE:
        raise ValueError(f"the source is {len(program.source)} bytes long; at most {MAX_SOURCE} are taken")
    if program.kind == "command" and not program.argv:
        raise ValueError("a command needs at least one word")
    words = (*program.argv, program.name, *spec.env, *spec.env.values())
    if any("\0" in word for word in words):
        raise ValueError("an argument or environment variable contains a NUL character")
    if any(not name or "=" in name for name in spec.env):
        raise ValueError("the name of an environment variable is empty or contains =")
    for tree in spec.trees:
        if not Path(tree).is_dir():
            raise ValueError(f"{tree} is not a folder that could be shown in the box")


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _number(path: str, otherwise: int) -> int:
    text = _text(path).strip()
    return int(text) if text.isdigit() else otherwise
