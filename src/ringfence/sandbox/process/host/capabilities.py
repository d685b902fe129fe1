"""What this host can give a box, what it lacks, and what was read back from the kernel about one that runs."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import field
from functools import cache, lru_cache
from pathlib import Path

from ringfence.core.box import CAN_DO_WITHOUT, MAX_SOURCE_BYTES, MIB, BoxSpec, Layout, Limits
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.core.record import dataclass
from ringfence.sandbox.process.seccomp import syscalls
from ringfence.sandbox.process.zygote import confine, landlock, template

_MAX_WORDS = 2 * MIB  # what the kernel takes with the usual size of a stack
"""Arguments and environment go into a box in one message, and the kernel limits its length."""
_WORKABLE_LIMITS = {
    "wall_seconds": (0.001, 10**8),
    "cpu_seconds": (0.001, 10**8),
    "cpu_cores": (0.01, 8192),
    "memory_bytes": (16 * MIB, 2**46),
    "disk_bytes": (64 * 1024, 2**46),
    "inodes": (16, 2**31),
    "processes": (1, 1_000_000),
    "open_files": (16, 500_000),
    "file_bytes": (1, 2**46),
    "output_bytes": (1, 2**46),
    "capture_bytes": (0, 2**31),
}
"""What a box can work with, and what a kernel can count to. Callers may ask for less: `tools.limits`."""
_OPTIONAL = ("cpu_seconds", "file_bytes")
MEANS = {"memory": "watchdog", "pids": "rlimit", "cpu": "affinity"}
"""What enforces a limit where no control group does."""
_NO_PROTECTION = (
    *("entrance", "folder", "folders", "rooms", "mounts", "places", "whole", "loopback", "input", "terminals"),
    *("cores", "memory", "cpu_time"),
)
"""Steps that give a box something, or set a limit that is reported elsewhere."""
STEPS = (*template.STEPS, *confine.names())
PROTECTIONS = tuple(name for name in STEPS if name not in _NO_PROTECTION)
"""By the names of the steps that make them."""


_UNDER_WAY = 2048
"""One message carries 253 descriptors, and what several processes send at the same time passes together."""


def descriptors(wanted: int) -> tuple[int, int]:
    """How many descriptors a box may have open, and how many until it has sent us its own.

    The kernel limits how many descriptors of a user are on their way between processes, by the open-file limit of the
    sender. A box of the same user could fill that quota up to its own limit, and then no process with the same limit
    could send another box the descriptors that it starts with. So this process, and every box until its program begins,
    has a higher limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = wanted + _UNDER_WAY
    if os.geteuid() == 0:
        # Nothing of the kind is asked of us; but boxes that see the same mounts are one user among themselves.
        return wanted, enough if hard == resource.RLIM_INFINITY else max(wanted, min(hard, enough))
    if soft == resource.RLIM_INFINITY:
        return wanted, wanted
    if soft < enough:
        soft = enough if hard == resource.RLIM_INFINITY else min(hard, enough)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(wanted, soft - min(_UNDER_WAY, soft // 3)), soft


@dataclass(frozen=True, slots=True)
class Tested:
    """What a box of this backend was seen to have, before any other was used."""

    found: Mapping[str, bool]
    at: str
    left_out: frozenset[str]


@dataclass(frozen=True, slots=True)
class HostCapabilities:
    """This machine, as far as boxes are concerned."""

    missing: Mapping[str, str] = field(default_factory=dict)
    """Missing protections, and why."""

    @classmethod
    def detect(cls) -> HostCapabilities:
        """What can be seen at once. The first zygote finds out by trying whether namespaces and mounts are allowed."""
        missing: dict[str, str] = {}
        if sys.platform != "linux":
            return cls({"linux": f"boxes of the process backend need Linux; this is {sys.platform}"})
        machine = os.uname().machine
        if machine not in syscalls.NUMBERS:
            return cls({"seccomp": f"the system calls of {machine} are not known"})
        if not landlock.version():
            missing["landlock"] = "this kernel has no Landlock, or it is not among its active security modules"
        actions = _text("/proc/sys/kernel/seccomp/actions_avail")
        if actions and "user_notif" not in actions:
            missing["seccomp"] = "this kernel cannot notify of refused system calls (it needs Linux 5.0)"
        return cls(missing)

    def require(self, accepted: Sequence[str]) -> None:
        """Raises Unavailable for what is missing and was not given up."""
        lacking = {
            name: why for name, why in self.missing.items() if name not in accepted or name not in CAN_DO_WITHOUT
        }
        if lacking:
            missing = "; ".join(f"{name}: {why}" for name, why in lacking.items())
            hint = "".join(
                f" To run without {name}, list it under sandbox.accept_missing."
                for name in lacking
                if name in CAN_DO_WITHOUT
            )
            hint += " `ringfence host` says what to do about it."
            raise Unavailable("missing_protection", f"boxes would lack a protection on this host ({missing}).{hint}")

    def isolation(self, seen: Json, tested: Tested, layout: Layout, means: Mapping[str, Json]) -> Json:
        """The `isolation` fact of a box; `seen` was read back from it, `tested` from another one on this host."""
        protections: Json = {}
        for name in PROTECTIONS:
            if name in seen:
                protections[name] = {"on": seen[name], "verified": "run"}
            elif name in tested.found:
                protections[name] = {"on": tested.found[name] and name not in tested.left_out, "verified": "host"}
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


async def explained(test: Awaitable[Tested]) -> Tested:
    """The result of looking at the first box. Where the kernel refused to make one: why, and what to do about it."""
    try:
        return await test
    except Unavailable as exc:
        if exc.reason_code not in ("no_zygote", "no_box"):
            raise
        from ringfence.sandbox.process.host import diagnosis  # noqa: PLC0415 - only where something is wrong

        raise await asyncio.to_thread(diagnosis.explained, exc) from None


def read_back(pid: int) -> Json:
    """What the kernel reports of the box's first process, which the box itself cannot change."""
    try:
        descriptor = os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        status = os.read(descriptor, 65536)
    except OSError:
        return {}  # it has ended since
    finally:
        os.close(descriptor)

    def word(name: bytes) -> bytes:
        return status.partition(b"\n" + name + b":\t")[2].partition(b"\n")[0]

    return {
        "seccomp": word(b"Seccomp") == b"2",
        "no_new_privs": word(b"NoNewPrivs") == b"1",
        "capabilities": not any(int(word(name) or b"1", 16) for name in (b"CapEff", b"CapPrm", b"CapInh", b"CapAmb")),
        "bounding_set": int(word(b"CapBnd") or b"1", 16) == 0,
        "pid_namespace": word(b"NSpid").count(b"\t") > _depth() + 1,  # the zygote has one, too
    }


@cache
def _depth() -> int:
    """The number of nested pid namespaces that we are in."""
    return _text("/proc/self/status").partition("NSpid:\t")[2].partition("\n")[0].count("\t")


def check_spec(spec: BoxSpec, templates: Collection[str]) -> None:
    """Raises ValueError, with a sentence for a person, for a spec that makes no sense."""
    program = spec.program
    _check_limits(spec.limits)
    if spec.template not in templates:
        raise ValueError(f"there is no template {spec.template!r}; there are: {', '.join(sorted(templates))}")
    if len(program.source) > MAX_SOURCE_BYTES:
        raise ValueError(f"the source is {len(program.source)} bytes long; at most {MAX_SOURCE_BYTES} are taken")
    if b"\0" in program.source:
        raise ValueError("the source contains a NUL byte")
    if program.kind == "python" and program.name != "-c":
        _check_name(program.name)
        if len(program.source) > spec.limits.disk_bytes // 2:
            raise ValueError("the source is longer than half of the disk that the box may use")
    if program.kind == "command" and not (program.argv and program.argv[0]):
        raise ValueError("a command needs at least one word")
    check_words((*program.argv, program.name), spec.env)
    if isinstance(program.stdin, int) and not os.path.exists(f"/proc/self/fd/{program.stdin}"):
        raise ValueError(f"there is no open descriptor {program.stdin} for standard input")
    for tree in spec.trees:
        if not Path(tree).is_dir():
            raise ValueError(f"{tree} is not a folder that could be shown in the box")


def check_words(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Raises ValueError for arguments and environment variables that no program can be started with."""
    words = (*argv, *env, *env.values())
    if any("\0" in word for word in words):
        raise ValueError("an argument or environment variable contains a NUL character")
    if sum(len(word.encode("utf-8", "surrogatepass")) + 16 for word in words) > _MAX_WORDS:
        raise ValueError(f"arguments and environment variables are longer than {_MAX_WORDS} bytes together")
    if any(not name or "=" in name for name in env):
        raise ValueError("the name of an environment variable is empty or contains =")


@lru_cache(maxsize=64)
def _check_limits(limits: Limits) -> None:
    """Cached, since most runs have the same limits; refused ones are checked each time."""
    for name, (least, most) in _WORKABLE_LIMITS.items():
        value = getattr(limits, name)
        # Not a number is neither below nor above anything.
        if not ((value is None and name in _OPTIONAL) or (value is not None and least <= value <= most)):
            raise ValueError(f"the limit {name} must be between {least} and {most}, not {value}")


def _check_name(name: str) -> None:
    """A program is put where its name says, so that must be a place of its own."""
    folder, _, last = name.rpartition("/")
    taken = ("", ".", "..") if folder == "/workspace/tmp" else ("", ".", "..", "input", "output", "tmp")
    if folder not in ("/workspace", "/workspace/tmp") or last in taken or len(last.encode()) > 255:
        raise ValueError(f"a program must be called -c, or be a file of /workspace, not {name!r}")


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
