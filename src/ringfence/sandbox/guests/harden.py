"""What a guest that begins as the root of its own user namespace does to itself, before any program: it hides what the
engine left in sight, makes everything read-only but its own folders, and gives up every right that it began with.

Runs in the guest, with the modules of the zygote that confine boxes of the process backend in the same way.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import resource
import socket
import struct

from ringfence.sandbox.process.zygote import kernel, landlock, machine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PROC = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
_SECURE_BITS = 0xEF
_TERMINALS = 32
_LOCKED_BYTES = 65536
_SHARES = {
    "user/max_inotify_instances": b"8",
    "user/max_inotify_watches": b"4096",
    "user/max_user_namespaces": b"1",
    "net/ipv4/tcp_rmem": b"4096\t131072\t262144",
    "net/ipv4/tcp_wmem": b"4096\t16384\t262144",
}
"""Bounds for all users of the guest. The one user namespace is made below: programs can make none."""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_TEMPORARY = "/workspace/tmp"
_TMP = "/tmp"  # noqa: S108 - in the guest
_SET_MODE_FILTER = 1
_NEW_LISTENER = 8


def harden(told: dict[str, Any], code: bytes, *, notify: bool) -> tuple[list[str], int]:
    """`told`: what the guest is to be; `code`: the filter for system calls. Returns the steps that were done, and the
    descriptor by which refused calls are told of, if they are to be (`notify`). Raises OSError."""
    done = []
    kernel.call("unshare", kernel.NEWCGROUP)  # the host has put this process where it belongs by now
    for step in (_shares, _proc, _terminals, _places, _read_only):
        step(told)
        done.append(step.__name__[1:])
    _become(told["user"])
    if told.get("landlock") and landlock.version():
        _landlock(told)
        done.append("landlock")
    return done, _seccomp(code, _NEW_LISTENER if notify else 0)


def harden_further(told: dict[str, Any], code: bytes) -> tuple[list[str], int]:
    """The same where the engine has given no rights to begin with, as far as any process may do it to itself: in a user
    namespace of its own, if the host lets it have one. What an engine did is not undone where this cannot be done.

    Returns as `harden` does. Raises OSError where the filter cannot be applied.
    """
    done = []
    if "user" in told:  # or its engine has made such a namespace already
        with contextlib.suppress(OSError):
            _leave_root_behind(told["user"])
            done.append("user")
            kernel.call("unshare", kernel.NEWNS)
            for step in (_devices, _read_only, _covers, _terminals, _read_only):  # what is covered, and what covers it
                step(told)
                done.append(step.__name__[1:])
    _give_up_rights(bounding="user" in done)
    if landlock.version():
        _landlock(told)
        done.append("landlock")
    listener = _seccomp(code, _NEW_LISTENER if told.get("notify") else 0)
    return done, listener


def _covers(told: dict[str, Any]) -> None:
    """In /proc as the engine has mounted it, with what the engine hid."""
    kernel.mount("box", "/run", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    kernel.mount("box", "/sys", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=64k")
    os.makedirs(machine.CPU)
    machine.FOLDER = "/run/machine"
    files = machine.MachineFiles(subset=False)
    for at, source in files.sized(told["memory_bytes"], told["processors"]):
        if os.path.exists(at):
            kernel.bind(source.decode(), at.decode(), 0)
    for at, nothing in files.covers() or ():
        kernel.bind(nothing.decode(), at.decode(), 0)
    kernel.call("umount2", b"/run", kernel.MNT_DETACH)


def _devices(told: dict[str, Any]) -> None:
    """Mounts of their own: no other device counts afterwards."""
    for name in _DEVICES:
        if os.path.exists(f"/dev/{name}"):
            kernel.bind(f"/dev/{name}", f"/dev/{name}", 0)


def _shares(told: dict[str, Any]) -> None:
    for name, most in _SHARES.items():
        try:
            with open(f"/proc/sys/{name}", "wb", buffering=0) as file:
                file.write(most)
        except FileNotFoundError:
            continue  # this kernel has no such bound


def _proc(told: dict[str, Any]) -> None:
    # Only what is bound from there stays: /tmp is another folder later.
    kernel.mount("box", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")  # noqa: S108
    kernel.mount("box", "/sys", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=64k")
    os.makedirs(machine.CPU)
    machine.FOLDER = "/tmp/machine"  # noqa: S108
    files = machine.MachineFiles(subset=True)
    for at, source in files.sized(told["memory_bytes"], told["processors"]):
        if os.path.exists(at):
            kernel.bind(source.decode(), at.decode(), 0)
    link = os.open("/proc/mounts", os.O_PATH | os.O_NOFOLLOW)
    kernel.bind("/proc/1/mounts", f"/proc/self/fd/{link}", 0)
    os.close(link)
    covers = files.covers()
    if covers is None:
        kernel.mount("proc", "/proc", "proc", _PROC | kernel.MS_REMOUNT, "subset=pid,hidepid=invisible")
    else:
        kernel.mount("proc", "/proc", "proc", _PROC | kernel.MS_REMOUNT, "hidepid=invisible")
        for at, nothing in covers:
            kernel.bind(nothing.decode(), at.decode(), 0)


def _places(told: dict[str, Any]) -> None:
    """The other folders that programs write to are one of the workspace, as in every box: one disk has one limit."""
    kernel.call("umount2", b"/tmp", kernel.MNT_DETACH)
    os.makedirs("/dev/shm", exist_ok=True)  # noqa: S108 - in the guest
    if told.get("apart"):
        _apart(told)
        return
    os.seteuid(told["user"])  # whose workspace it is
    os.makedirs(_TEMPORARY, 0o755, exist_ok=True)
    os.seteuid(0)
    for at in told["temporary"]:
        if os.path.isdir(at):
            kernel.bind(_TEMPORARY, at, 0)


def _apart(told: dict[str, Any]) -> None:
    """In a guest that stays the workspace begins empty, and those other folders lie beside it on the same disk, which
    is where the workspace is mounted until then."""
    disk = "/workspace"
    mounted: list[str] = []
    for at in sorted(_mounted()):
        if at.startswith(f"{disk}/") and not any(at.startswith(f"{each}/") for each in mounted):
            mounted.append(at)
    os.seteuid(told["user"])
    for name in ("workspace", "tmp", "home", "home/user"):
        os.mkdir(f"{disk}/{name}", 0o755)
    for at in mounted:
        target = disk + at
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.isdir(at):
            os.makedirs(target, exist_ok=True)
        else:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
    os.seteuid(0)
    for at in told["temporary"]:
        if os.path.isdir(at):
            kernel.bind(disk + (at if at == "/home/user" else _TMP), at, 0)
    for at in mounted:
        kernel.bind(at, disk + at, 0)
    kernel.bind(f"{disk}/workspace", disk, 0)


def _terminals(told: dict[str, Any]) -> None:
    options = f"newinstance,ptmxmode=0666,mode=0600,max={_TERMINALS}"
    kernel.mount("devpts", "/dev/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, options)


def _read_only(told: dict[str, Any]) -> None:
    """Every mount but the folders that programs write to: those keep that right alone."""
    writable, lent = set(told["writable"]), set(told["lent"])
    for at in _mounted():
        flags = kernel.ATTR_NOSUID
        if at not in writable and at not in ("/proc", "/dev/pts"):
            flags |= kernel.ATTR_RDONLY
        if not (at == "/dev/pts" or (at.startswith("/dev/") and at[5:] in _DEVICES)):
            flags |= kernel.ATTR_NODEV
        if at != "/" and at not in writable and at not in lent:
            flags |= kernel.ATTR_NOEXEC
        if os.path.lexists(at):
            _set(at, flags)


def _mounted() -> list[str]:
    """Where something is mounted, each place once."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        return list(dict.fromkeys(_unescaped(line.split(" ")[4]) for line in mounts))


def _set(at: str, flags: int) -> None:
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)
    kernel.call("mount_setattr", kernel.AT_FDCWD, at.encode(), 0, attributes, len(attributes))


def _unescaped(text: str) -> str:
    for code, letter in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, letter)
    return text


def _become(user: int) -> None:
    """The user of programs, without any right beyond that, now and later."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (_LOCKED_BYTES, _LOCKED_BYTES))
    with contextlib.suppress(OSError):  # this kernel has no keys
        kernel.call("keyctl", 1, None)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    _leave_root_behind(user)
    _give_up_rights()


def _give_up_rights(*, bounding: bool = True) -> None:
    """`bounding`: those that a program could gain, too, where this process has the right to."""
    if bounding:
        for number in range(_last_capability() + 1):
            kernel.call("prctl", kernel.PR_CAPBSET_DROP, number)
        kernel.call("prctl", kernel.PR_SET_SECUREBITS, _SECURE_BITS)
    kernel.call("prctl", kernel.PR_CAP_AMBIENT, kernel.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    kernel.call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    kernel.call("prctl", kernel.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _leave_root_behind(user: int) -> None:
    """Into a user namespace that has no root, not even one that nobody can become."""
    kernel.call("prctl", kernel.PR_SET_DUMPABLE, 1)  # or these files would be another user's
    kernel.call("unshare", kernel.NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{user} {user} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _last_capability() -> int:
    number = 0
    while True:
        try:
            kernel.call("prctl", 23, number)
        except OSError:
            return number - 1
        number += 1


def _landlock(told: dict[str, Any]) -> None:
    version = landlock.version()
    attributes = landlock.attributes(version)
    rules = kernel.call("landlock_create_ruleset", attributes, len(attributes), 0)
    rights_of = [("/", landlock.READ), ("/dev", landlock.DEVICE)]
    rights_of += [(at, landlock.TERMINAL) for at in ("/dev/tty",)]
    rights_of += [("/dev/pts", landlock.TERMINAL | landlock.READ_DIR)]
    rights_of += [(at, landlock.WORK if os.path.isdir(at) else landlock.CHANGE) for at in told["writable"]]
    for path, rights in rights_of:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        kernel.call("landlock_add_rule", rules, landlock.PATH_BENEATH, landlock.rule(version, rights, descriptor), 0)
        os.close(descriptor)
    kernel.call("landlock_restrict_self", rules, landlock.restriction(version))
    os.close(rules)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _seccomp(code: bytes, flags: int = _NEW_LISTENER) -> int:
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(buffer))
    return kernel.call("seccomp", _SET_MODE_FILTER, flags, ctypes.addressof(program))


def listener(port: int) -> int:
    """A listener on the guest's own loopback."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen(128)
    return listening.detach()


def hand_over(stream: int, descriptors: list[int]) -> None:
    """Send descriptors over the stream, with one byte, before anything else."""
    sending = socket.socket(fileno=os.dup(stream))
    try:
        sending.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])
    finally:
        sending.close()
