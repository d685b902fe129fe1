"""What this host gives to boxes, what is weaker than it could be and what is missing, each with its cause and remedy.

What boxes need is tried (`probe`), never inferred from a setting: a setting only explains a refusal. Findings are plain
data; `judge` makes them from what was tried and what is known of the host, and does nothing else.
"""

from __future__ import annotations

import errno
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import ringfence
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.core.record import dataclass
from ringfence.sandbox.process import ids
from ringfence.sandbox.process.cgroups.cgroup import Cgroups
from ringfence.sandbox.process.cgroups.hierarchy import Systemd
from ringfence.sandbox.process.host import remedies
from ringfence.sandbox.process.host.info import ALL_IDS, HostInfo, with_launcher
from ringfence.sandbox.process.host.remedies import Cause, Remedy
from ringfence.sandbox.process.ids import take_block
from ringfence.sandbox.process.seccomp import syscalls

_SOURCE_ROOT = str(Path(ringfence.__file__).parent.parent)
_PROGRAM = str(Path(__file__).with_name("probe.py"))
_SECONDS = 600.0
"""Allows for a slow machine; a kernel that does not answer at all is not waited for."""
State = Literal["ok", "weaker", "missing"]

_OLDEST = (5, 12)
"""mount_setattr."""
_REFUSED = (errno.EPERM, errno.EACCES)
_CONFINED = ("docker-default", "containers-default", "cri-containerd", "crio-default", "lxc-", "snap.")
"""Profiles of AppArmor that engines give their containers: user namespaces are allowed in them, mounts are not."""

NAMES = {
    "user_namespace": "user namespaces",
    "mapping": "user namespaces",
    "namespaces": "other namespaces",
    "mounts": "mounts of a box's own",
    "pid_namespace": "other namespaces",
    "proc": "/proc of a box's own",
    "pivot": "mounts of a box's own",
    "host_name": "other namespaces",
    "keyring": "keyrings",
    "setns": "other namespaces",
    "box_namespaces": "user namespaces",
    "box_mapping": "user namespaces",
    "shares": "/proc of a box's own",
    "box_proc": "/proc of a box's own",
    "no_new_privs": "seccomp",
    "landlock": "Landlock",
    "seccomp": "seccomp",
}
"""The part that each step of `probe` belongs to, in words for a person."""
_NEEDED = tuple(dict.fromkeys(name for name in NAMES.values()))
_HELD_BY = {
    "memory": "a watchdog ends a box that uses too much, after the fact",
    "pids": "a resource limit counts processes",
    "cpu": "a box is kept to a number of cores",
}


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step of `probe`; 0 is success."""

    number: int
    text: str = ""


def try_steps() -> dict[str, StepResult]:
    """The results of all steps up to the first that failed."""
    words: list[str] = []
    block = None
    if os.geteuid() == 0:
        try:
            block = take_block()
        except Unavailable as exc:
            return {"user_namespace": StepResult(0), "mapping": StepResult(errno.EPERM, exc.message)}
        words = [str(block.base), str(block.size)]
    try:
        output = _output_of(with_launcher([_interpreter(), "-I", _PROGRAM, _SOURCE_ROOT, *words]))
    finally:
        if block is not None:
            block.release()
    lines = (line.split("\t") for line in output.splitlines())
    return {line[0]: StepResult(int(line[1]), line[2]) for line in lines if len(line) == 3 and line[1].isdecimal()}


def _interpreter() -> str:
    """The interpreter that zygotes run in: rights may depend on the program."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _output_of(command: Sequence[str]) -> str:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, cwd="/", check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout


def mapped_by_helper(users: range, groups: range) -> str:
    """The complaint of newuidmap or newgidmap when they are to map these; empty where they do it."""
    with subprocess.Popen(
        with_launcher([_interpreter(), "-I", _PROGRAM, _SOURCE_ROOT, "hold"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != b"held\n":
            return "no user namespace to try it on"
        own = (os.getuid(), os.getgid())
        for helper, span, outer in zip(("newuidmap", "newgidmap"), (users, groups), own, strict=True):
            command = [helper, str(holder.pid), "0", str(outer), "1", "1", str(span.start), str(len(span))]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if ran.returncode:
                return (ran.stderr.strip().splitlines() or [f"it ended with {ran.returncode}"])[-1]
    return ""


def range_of(path: Path, uid: int) -> range | None:
    """What /etc/subuid or /etc/subgid gives to a user."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    names = {str(uid)}
    with suppress(KeyError):
        names.add(pwd.getpwuid(uid).pw_name)
    for line in lines:
        words = line.split(":")
        if len(words) == 3 and words[0] in names and words[1].isdecimal() and words[2].isdecimal():
            return range(int(words[1]), int(words[1]) + int(words[2]))
    return None


# ── Findings ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that boxes need, or profit from."""

    name: str
    state: State
    seen: str
    """What was tried, with its result."""
    follows: str = ""
    """For boxes."""
    cause: Cause | None = None
    remedies: tuple[Remedy, ...] = ()

    def as_json(self) -> Json:
        return {
            "name": self.name,
            "state": self.state,
            "seen": self.seen,
            "follows": self.follows,
            "cause": self.cause,
            "remedies": [remedy.as_json() for remedy in self.remedies],
        }


@dataclass(frozen=True, slots=True)
class Diagnosis:
    host: HostInfo
    findings: tuple[Finding, ...] = field(default=())

    @property
    def missing(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.state == "missing")

    @property
    def causes(self) -> tuple[Cause, ...]:
        return tuple(dict.fromkeys(finding.cause for finding in self.findings if finding.cause is not None))

    def sentence(self) -> str:
        """What is missing and what to do, for an error message."""
        missing = "; ".join(f"{finding.name}: {finding.seen}" for finding in self.missing)
        options = remedies.options(self.causes, self.host)
        if options:
            return f"{missing}. Start the container with {options}; `ringfence host` says more"
        cures = [remedy for finding in self.missing for remedy in finding.remedies]
        if any(remedy.mends for remedy in cures):
            return f"{missing}. Run `ringfence host` to see what is missing, `{remedies.fix()}` to fix it"
        commands = dict.fromkeys(remedy.command for remedy in cures if remedy.command)
        if commands:
            return f"{missing}. Run {' and '.join(f'`{command}`' for command in commands)}; `ringfence host` says more"
        pages = dict.fromkeys(remedy.page for remedy in cures if remedy.page)
        return f"{missing}. What to do: `ringfence host`, {', '.join(pages)}"


def diagnose() -> Diagnosis:
    """Diagnose this host for our own user. Takes a fraction of a second, starts programs, and may move this process
    into a control group of its own, as for boxes."""
    found = diagnose_refusals()
    if found.host.machine not in syscalls.NUMBERS or found.host.system != "linux":
        return found
    rest = [] if found.host.root else [_ids(found.host)]
    rest += _groups(found.host, Cgroups.detect(manager=Systemd()).why)
    return replace(found, findings=(*found.findings, *rest))


def diagnose_refusals() -> Diagnosis:
    """Diagnose only what boxes cannot do without."""
    host = HostInfo.read()
    if host.system != "linux" or host.machine not in syscalls.NUMBERS:
        return Diagnosis(host, (_unsupported(host),))
    return Diagnosis(host, (_kernel(host), *judge(try_steps(), host)))


def explained(problem: Unavailable) -> Unavailable:
    """Explain a zygote's failure to start: its cause, and what to do about it."""
    found = diagnose_refusals()
    if not found.missing:
        return Unavailable(problem.reason_code, f"{problem.message}. Run `ringfence host` to see what this host gives")
    return Unavailable("missing_protection", f"no box can be made on this host: {found.sentence()}")


# ── Judging ───────────────────────────────────────────────────────────────────────────────────────


def judge(tried: Mapping[str, StepResult], host: HostInfo) -> list[Finding]:
    """What boxes cannot do without, in the order in which it is needed; what was not tried is left out."""
    out: dict[str, Finding] = {}
    if not tried:
        return [_missing("the attempt", "the program that tries it ended at once, or did not end", "unknown", host)]
    for step, how in tried.items():
        name = NAMES[step]
        if name in out and out[name].state == "missing":
            continue
        if how.number:
            cause = _cause(step, how.number, host)
            out[name] = _missing(name, _seen(step, how, cause, host), cause, host)
        elif name not in out:
            out[name] = Finding(name, "ok", _DONE[name])
    causes = {finding.cause for finding in out.values()}
    if any(finding.state == "missing" for finding in out.values()):
        for name, cause, seen in _expected(host):
            if cause not in causes and out.get(name, Finding(name, "ok", "")).state == "ok":
                out[name] = _missing(name, seen, cause, host)
    return [out[name] for name in _NEEDED if name in out]


_DONE = {
    "user namespaces": "made, and one within another",
    "other namespaces": "made: mounts, processes, network, host name, message queues",
    "mounts of a box's own": "a memory file system, a read-only view of /usr, a root of its own",
    "/proc of a box's own": "mounted",
    "keyrings": "an empty one was made",
    "Landlock": "a ruleset was put in force",
    "seccomp": "a filter with notification was put in force",
}


def _missing(name: str, seen: str, cause: Cause, host: HostInfo) -> Finding:
    follows = "no box can be made"
    if name == "Landlock":
        follows = "boxes lack their second line of defence for files, and are refused unless that is accepted"
    return Finding(name, "missing", seen, follows, cause, remedies.of(cause, host))


def _cause(step: str, number: int, host: HostInfo) -> Cause:
    if step == "landlock":
        return "container_seccomp" if host.filtered and number == errno.EPERM else "landlock"
    if number in (errno.ENOSPC, errno.EUSERS):
        return "max_namespaces"
    if number in (errno.ENOSYS, errno.EINVAL) and not host.filtered:
        return "chroot" if host.chrooted else "kernel" if step != "pivot" else "rootfs"
    if step in ("proc", "box_proc", "shares") and host.covered:
        return "masked_proc"
    if step in ("user_namespace", "box_namespaces") and number in _REFUSED:
        # Inside a user namespace no process is privileged for this kernel, and boxes of root are made in one, too.
        refused = step == "box_namespaces" or not host.root
        if refused and host.settings.get("kernel.unprivileged_userns_clone") == 0:
            return "userns_clone"
        if host.chrooted:
            return "chroot"
    if step == "mapping" and host.root:
        return "root_of_few" if host.mapped_ids < ALL_IDS else "no_setuid"
    # A filter answers EPERM or ENOSYS; security modules, but for a missing capability, EACCES.
    if host.filtered and number in (errno.EPERM, errno.ENOSYS) and step != "mapping":
        return "container_seccomp"
    if number in _REFUSED:
        if host.label.startswith(_CONFINED) or host.label.endswith("(enforce)"):
            return "container_apparmor"
        if not host.root and host.settings.get("kernel.apparmor_restrict_unprivileged_userns"):
            return "apparmor"
        if host.selinux:
            return "selinux"
    return "unknown"


def _expected(host: HostInfo) -> Iterable[tuple[str, Cause, str]]:
    """What would be refused next: known, though the trial did not get so far."""
    if host.label.startswith(_CONFINED):
        yield "mounts of a box's own", "container_apparmor", f"not tried; AppArmor's {_profile(host)} forbids mounts"
    if host.covered:
        seen = f"not tried; {_some(host.covered)} {'is' if len(host.covered) == 1 else 'are'} covered"
        yield "/proc of a box's own", "masked_proc", seen


def _seen(step: str, how: StepResult, cause: Cause, host: HostInfo) -> str:
    refusal = f"{_WORDS.get(step, step.replace('_', ' '))}: {how.text.split(': ')[-1] or os.strerror(how.number)}"
    why = {
        "userns_clone": "kernel.unprivileged_userns_clone is 0",
        "max_namespaces": _too_few(host),
        "apparmor": "kernel.apparmor_restrict_unprivileged_userns is 1, and no profile allows it",
        "container_seccomp": "a seccomp filter from outside refuses it",
        "container_apparmor": f"AppArmor's {_profile(host)} forbids it",
        "masked_proc": f"{_some(host.covered)} {'is' if len(host.covered) == 1 else 'are'} covered",
        "selinux": "SELinux is enforcing",
        "chroot": "we are in a chroot, where the kernel allows none",
        "kernel": f"Linux {host.release} does not have it",
        "landlock": _no_landlock(how.number, host),
        "root_of_few": f"only {host.mapped_ids} user ids exist here, and boxes of root get others",
        "no_setuid": "root lacks the capability CAP_SETUID or CAP_SETGID",
        "rootfs": "the root file system is the initial ramdisk",
    }.get(cause, "")
    return f"{refusal} ({why})" if why else refusal


_WORDS = {
    "user_namespace": "making one",
    "mapping": "writing its id map",
    "box_namespaces": "making one within another",
    "box_mapping": "writing the id map of a box",
    "namespaces": "making them",
    "mounts": "mounting",
    "pid_namespace": "making one of processes",
    "proc": "mounting it",
    "box_proc": "mounting it in a box",
    "shares": "setting a box's own shares in it",
    "pivot": "changing the root",
    "host_name": "setting a host name",
    "keyring": "making one",
    "setns": "entering one",
    "landlock": "making a ruleset",
    "seccomp": "installing a filter",
}


def _too_few(host: HostInfo) -> str:
    low = {name: value for name, value in host.settings.items() if name.startswith("user.max_") and value < 1000}
    return ", ".join(f"{name} is {value}" for name, value in low.items()) or "as many as are allowed exist already"


def _no_landlock(number: int, host: HostInfo) -> str:
    if number == errno.EOPNOTSUPP:
        return "the kernel has it, but it is not among its active security modules"
    return f"Linux {host.release} does not have it; 5.13 is the first"


def _profile(host: HostInfo) -> str:
    return host.label.split(" ")[0]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ── The rest of the host ──────────────────────────────────────────────────────────────────────────


def _unsupported(host: HostInfo) -> Finding:
    if host.system != "linux":
        seen = f"boxes are made of Linux; this is {host.system}"
        cause = "not_linux"
    else:
        seen = f"the system calls of {host.machine} are not known"
        cause = "machine"
    return _missing("system", seen, cause, host)  # type: ignore[arg-type]


def _kernel(host: HostInfo) -> Finding:
    system = ", ".join(filter(None, (f"Linux {host.release}", host.machine, host.distribution)))
    system += " under WSL" if host.wsl else ""
    if host.engine is not None:
        system += f", in a container ({host.engine}, by {host.engine_sign})"
    if host.kernel < _OLDEST:
        return _missing("system", f"{system}; boxes need Linux 5.12, and 5.13 for Landlock", "kernel", host)
    return Finding("system", "ok", system)


def _ids(host: HostInfo) -> Finding:
    """Whether an ordinary user's boxes can each be another user."""
    weaker = partial(Finding, "a user id for each box", "weaker")
    follows = "boxes share your own user id on the host, and what the kernel counts by user: inotify watches, keys"
    if shutil.which("newuidmap") is None or shutil.which("newgidmap") is None:
        return weaker(
            "newuidmap or newgidmap is not installed", follows, "no_newuidmap", remedies.of("no_newuidmap", host)
        )
    users, groups = (range_of(Path(f"/etc/{name}"), host.uid) for name in ("subuid", "subgid"))
    if users is None or groups is None:
        seen = f"/etc/{'subuid' if users is None else 'subgid'} has no range for you"
        return weaker(seen, follows, "no_subids", remedies.of("no_subids", host))
    problem = mapped_by_helper(users, groups)
    if problem:
        return weaker(problem, follows, "newuidmap_refused", remedies.of("newuidmap_refused", host))
    if host.kernel < ids.LENDS_SINCE:
        seen = f"Linux {host.release} mounts no tmpfs with mapped ids; 6.3 is the first"
        return weaker(seen, follows, "kernel", remedies.of("kernel", host))
    return Finding("a user id for each box", "ok", "newuidmap and newgidmap mapped your range")


def _groups(host: HostInfo, why: Mapping[str, str]) -> list[Finding]:
    out = []
    for role, held in _HELD_BY.items():
        name = f"{role} limits by the kernel"
        if role in why:
            cause = remedies.cause_of_groups(host)
            out.append(Finding(name, "weaker", why[role], held, cause, remedies.of(cause, host)))
        else:
            out.append(Finding(name, "ok", "a control group was made"))
    return out
