"""What the agent does in a guest whose kernel is not the host's, nor Linux: it has no Landlock, tells nobody of refused
calls, and protects the first process from nothing but other users.

So the agent is another user than its programs, and yet what it writes is theirs: its real user is root, who cannot be
signalled or traced by them, and its effective one is theirs. Of root's rights it keeps what it takes to start programs.

Runs in the guest, with the modules of the zygote.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import struct

from ringfence.sandbox.process.zygote import kernel, machine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SAFE = kernel.MS_NOSUID | kernel.MS_NODEV
_TEMPORARY = "/workspace/tmp"
_CAPABILITIES = 41
_RDONLY = 1
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "pts", "shm", "ptmx")
_SETGID, _SETUID = 6, 7
_SET_MODE_FILTER = 1


def settle_in(told: dict[str, Any], code: bytes) -> list[str]:
    """`told`: what the guest is to be; `code`: the filter for system calls. Returns the steps that were done. Raises
    OSError."""
    done = []
    for step in (_machine, _places, _devices, _read_only, _become):
        step(told)
        done.append(step.__name__[1:])
    if code:
        _seccomp(code)
        done.append("seccomp")
    return done


def _machine(told: dict[str, Any]) -> None:
    """What tells how large it is says so with the box's limits."""
    kernel.mount("box", "/tmp", "tmpfs", _SAFE, "mode=755,size=1m")  # noqa: S108 - what is bound from there stays
    for at, name, text in machine.described(told["memory_bytes"], told["processors"]):
        if os.path.exists(at):
            _write(f"/tmp/{name}", text())  # noqa: S108
            kernel.mount(f"/tmp/{name}", at, None, kernel.MS_BIND)  # noqa: S108
    _cover([at for at, _, _ in machine.described(told["memory_bytes"], told["processors"])])
    kernel.call("umount2", b"/tmp", kernel.MNT_DETACH)
    kernel.mount("box", "/sys", "tmpfs", _SAFE, "mode=755,size=64k")
    os.makedirs(machine.CPU)
    for name, line in machine.processor_files(told["processors"]):
        _write(f"{machine.CPU}/{name}", line)
    kernel.mount("proc", "/proc", None, kernel.MS_REMOUNT | _SAFE | kernel.MS_NOEXEC)


def _cover(shown: list[str]) -> None:
    """All else in /proc that is not about a process: nothing is seen in its place."""
    os.mkdir("/tmp/nowhere", 0o555)  # noqa: S108
    _write("/tmp/nothing", "", 0)  # noqa: S108 - nobody may open it
    with os.scandir("/proc") as entries:
        others = [each for each in entries if not each.name.isdigit() and not each.is_symlink()]
    for each in others:
        if each.path not in shown:
            nothing = "/tmp/nowhere" if each.is_dir() else "/tmp/nothing"  # noqa: S108
            kernel.mount(nothing, each.path, None, kernel.MS_BIND)


def _read_only(told: dict[str, Any]) -> None:
    """Every mount but the folders that programs write to. What is in use stays as it is: /dev, where only root may."""
    kept = {*told["writable"], "/proc", "/dev/pts"}
    with open("/proc/self/mountinfo") as mounts:
        places = dict.fromkeys(line.split(" ")[4] for line in mounts)
    for at in places:
        if at not in kept:
            with contextlib.suppress(OSError):
                kernel.mount("box", at, None, kernel.MS_REMOUNT | kernel.MS_BIND | _SAFE | _RDONLY)


def _devices(told: dict[str, Any]) -> None:
    """Devices that every kernel of its own kind has, and that no program needs."""
    for name in os.listdir("/dev"):
        place = f"/dev/{name}"
        if name in _DEVICES or os.path.islink(place) or os.path.ismount(place):
            continue
        if os.path.isdir(place):
            shutil.rmtree(place, ignore_errors=True)
        else:
            os.unlink(place)


def _write(path: str, text: str, mode: int = 0o444) -> None:
    with open(path, "w") as file:
        file.write(text)
    os.chmod(path, mode)


def _places(told: dict[str, Any]) -> None:
    """The other folders that programs write to are one of the workspace, as in every box: one disk has one limit."""
    os.seteuid(told["user"])  # whose workspace it is
    os.makedirs(_TEMPORARY, 0o755, exist_ok=True)
    os.seteuid(0)
    for at in told["temporary"]:
        if os.path.isdir(at):
            kernel.mount(_TEMPORARY, at, None, kernel.MS_BIND)


def _become(told: dict[str, Any]) -> None:
    user = told["user"]
    os.setgroups([])
    os.setresgid(user, user, user)
    for number in range(_CAPABILITIES):
        kernel.call("prctl", kernel.PR_CAPBSET_DROP, number)
    kept = 1 << _SETGID | 1 << _SETUID
    kernel.call("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", kept, kept, 0, 0, 0, 0))
    os.setresuid(0, user, 0)
    kernel.call("prctl", kernel.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _seccomp(code: bytes) -> None:
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(buffer))
    kernel.call("seccomp", _SET_MODE_FILTER, 0, ctypes.addressof(program))
