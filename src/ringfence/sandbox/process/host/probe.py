"""Tries, one after the other, what a zygote and a box ask of the kernel, and says how each went.

A program of its own, `python -I probe.py SOURCE_ROOT [BASE SIZE]`: it has left its namespaces for good. It
changes nothing that another process could see. Each line that it prints is a step, the error number or 0, and what the
kernel said; steps that need one that failed are not tried. With BASE and SIZE, as root, those ids are
mapped, from outside; without, the caller's own. `hold` as the first word after SOURCE_ROOT only makes a user namespace,
says `held` and waits: what newuidmap can map is tried on it.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
from collections.abc import Callable, Iterable

sys.path.insert(0, sys.argv[1])

from ringfence.sandbox.process.zygote import kernel, landlock, template
from ringfence.sandbox.process.zygote.confine import TEMPLATE

_REST = kernel.NEWNS | kernel.NEWIPC | kernel.NEWUTS | kernel.NEWNET | kernel.NEWCGROUP
_OF_A_BOX = kernel.NEWUSER | kernel.NEWNS | kernel.NEWIPC | kernel.NEWUTS | kernel.NEWNET | kernel.NEWPID
_NO_PRIVILEGES = kernel.MS_NOSUID | kernel.MS_NODEV
_INSIDE = 1000
_ALLOW = struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
"""A filter of one instruction, which lets everything pass: whether it can be installed is the question."""

Act = Callable[[], object]
Step = tuple[str, tuple[str, ...], Act]


def main(words: list[str]) -> None:
    if words[:1] == ["hold"]:
        kernel.unshare(kernel.NEWUSER)
        os.write(1, b"held\n")
        sys.stdin.read()
    elif words:
        _as_root(*words)
    else:
        _try(_steps(_map_own))


def _as_root(base: str, size: str) -> None:
    """Map several ids, which is only possible from outside: we map them for a child that waits."""
    asked, ask = os.pipe()
    answered, answer = os.pipe()
    child = os.fork()
    if child == 0:

        def mapped() -> None:
            os.write(ask, b".")
            number = int.from_bytes(os.read(answered, 4), "little")
            if number:
                raise OSError(number, os.strerror(number))
            os.setgroups([])
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # otherwise our own files below /proc belong to the host's root

        _try(_steps(mapped))
        os._exit(0)
    os.close(ask)
    if os.read(asked, 1):
        number = 0
        try:
            for name in ("uid_map", "gid_map"):
                _write(f"/proc/{child}/{name}", f"0 {base} {size}")
        except OSError as exc:
            number = exc.errno or errno.EIO
        os.write(answer, number.to_bytes(4, "little"))
    os.waitpid(child, 0)


def _try(steps: Iterable[Step]) -> None:
    failed: set[str] = set()
    for name, needs, act in steps:
        if not failed.isdisjoint(needs):
            failed.add(name)
            continue
        try:
            act()
        except OSError as exc:
            failed.add(name)
            _say(name, exc.errno or errno.EIO, exc.strerror or str(exc))
        else:
            _say(name, 0, "")


def _say(name: str, number: int, text: str) -> None:
    os.write(1, f"{name}\t{number}\t{text}\n".encode())  # at once: the next step may end us


def _steps(mapped: Act) -> list[Step]:
    """The steps in the order of the zygote's, then of a box's; each with those that it needs."""
    own = ("mapping",)
    return [
        ("user_namespace", (), lambda: kernel.unshare(kernel.NEWUSER)),
        ("mapping", ("user_namespace",), mapped),
        ("namespaces", own, lambda: kernel.unshare(_REST)),
        ("mounts", ("namespaces",), _mount),
        ("pid_namespace", own, lambda: _go_on_in(kernel.NEWPID)),
        ("proc", ("mounts", "pid_namespace"), _mount_proc),
        ("pivot", ("proc",), lambda: kernel.pivot(template.BASE)),
        ("host_name", ("namespaces",), lambda: kernel.set_host_name(template.HOST_NAME)),
        ("keyring", (), kernel.new_session_keyring),
        ("setns", ("pid_namespace",), lambda: kernel.call("setns", os.pidfd_open(os.getpid()), kernel.NEWPID)),
        ("box_namespaces", own, lambda: _go_on_in(_OF_A_BOX)),
        ("box_mapping", ("box_namespaces",), lambda: _map_own(_INSIDE)),
        ("shares", ("box_mapping", "pivot"), lambda: _write("/proc/sys/user/max_user_namespaces", "0")),
        ("box_proc", ("box_mapping", "pivot"), _mount_proc_of_a_box),
        ("no_new_privs", (), lambda: kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)),
        ("landlock", ("no_new_privs",), _restrict),
        ("seccomp", ("no_new_privs",), _filter),
    ]


_user = os.getuid()
_group = os.getgid()


def _map_own(inside: int = 0) -> None:
    user, group = (0, 0) if inside else (_user, _group)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {user} 1"),
        ("gid_map", f"{inside} {group} 1"),
    ):
        _write(f"/proc/self/{name}", text)


def _mount() -> None:
    place = template.make_place()
    kernel.mount("template", place, "tmpfs", _NO_PRIVILEGES, "mode=0755,size=64m,nr_inodes=16k")
    for name in ("usr", "proc"):
        os.mkdir(f"{place}/{name}", 0o755)
    kernel.bind("/usr", f"{place}/usr", kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV)
    os.mkdir(f"{place}/null", 0o755)
    kernel.bind("/dev", f"{place}/null", kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NOEXEC)


def _go_on_in(spaces: int) -> None:
    """Run the steps in a child, which is in the new pid namespace, and wait for it."""
    kernel.unshare(spaces)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os._exit(0)


def _mount_proc() -> None:
    kernel.mount("proc", f"{template.BASE}/proc", "proc", _NO_PRIVILEGES | 8)


def _mount_proc_of_a_box() -> None:
    kernel.mount("proc", f"{TEMPLATE.decode()}/proc", "proc", _NO_PRIVILEGES | 8, "subset=pid,hidepid=invisible")


def _restrict() -> None:
    attributes = landlock.attributes(landlock.version() or 1)
    rules = kernel.call("landlock_create_ruleset", attributes, len(attributes), 0)
    kernel.call("landlock_restrict_self", rules, 0)


def _filter() -> None:
    program = kernel.prepare_filter(_ALLOW)
    os.close(kernel.call("seccomp", 1, 8, kernel.address(program)))


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main(sys.argv[2:])
