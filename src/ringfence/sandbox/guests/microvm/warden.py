"""Starts the programs that run virtual machines, as their parent, and ends them when its supervisor has died. A process
of its own, with one thread.

Each of them has namespaces of its own: no network, no process but itself, and as its root the system's programs and
libraries, read-only. It runs as the user that it is given, who is nobody else, and can get no further rights.

Orders come over the socket that is its standard input, one JSON object in each message, with descriptors:

    {"start": NAME, "words": [...], "user": NUMBER or null, "groups": [...], "enters": MANY, "devices": [...],
     "limits": {...}, "shown": [...]}

The first `enters` descriptors are entrances to control groups, the next is its standard error, and the others are its
descriptors from 3 on. It answers `{"started": NAME, "pid": NUMBER}` or `{"failed": NAME, "why": ...}`, and says
`{"ended": NAME, "status": NUMBER}` once it has ended. `{"kill": NAME}` ends one.

Imports the standard library alone.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_CLONE = {"x86_64": 56, "aarch64": 220}
_SET_MOUNTS = 442
_PIVOT = {"x86_64": 155, "aarch64": 41}
_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    *(0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000),
)
_NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_READ_ONLY = 1 | 2
_NO_DEVICES = 4
_DETACH = 2
_DEATH, _DROP, _NO_NEW_RIGHTS = 1, 24, 38
_PLACES = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/opt", "/nix", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_MOST = 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if each is None else each.encode() for each in (source, target, kind)]
    packed = None if data is None else data.encode()
    _checked(_libc.mount(*words, ctypes.c_ulong(flags), packed), f"mount {target}")


def _close_from(first: int) -> None:
    _libc.syscall(ctypes.c_long(436), ctypes.c_long(first), ctypes.c_long(0xFFFFFFFF), ctypes.c_long(0))


# ── What each may see and do ──────────────────────────────────────────────────────────────────────


def _confine(order: dict[str, Any], supervisor: int) -> None:
    _mount(None, "/", None, _PRIVATE | _REC)
    root = "/tmp" if os.path.isdir("/tmp") else "/mnt"  # noqa: S108 - covered by a root of its own
    devices = [*_DEVICES, *order["devices"]]
    shown = {name: os.open(name, os.O_PATH) for name in order["shown"]}
    kept = {name: os.open(name, os.O_PATH) for name in devices if os.path.exists(name)}
    places = {name: os.open(name, os.O_PATH) for name in _PLACES if os.path.exists(name) and not os.path.islink(name)}
    links = {name: os.readlink(name) for name in _PLACES if os.path.islink(name)}
    _mount("machine", root, "tmpfs", _NOSUID, "mode=755,size=1m")
    for name, descriptor in {**places, **kept}.items():
        _show(f"/proc/self/fd/{descriptor}", root + name, devices=name in kept)
        os.close(descriptor)
    for name, target in links.items():
        os.symlink(target, root + name)
    for name, descriptor in shown.items():
        if not os.path.exists(root + name):  # or it is part of the system
            _show(f"/proc/self/fd/{descriptor}", root + name, devices=True)
        os.close(descriptor)
    os.mkdir(f"{root}/proc")
    _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    os.chdir(root)
    _mount(None, root, None, _BIND | 32 | 1 | _NOSUID)  # read-only from here on
    number = _PIVOT[os.uname().machine]
    _checked(_libc.syscall(ctypes.c_long(number), b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _DETACH), "umount")
    os.chdir("/")
    socket.sethostname("machine")


def _show(source: str, target: str, *, devices: bool) -> None:
    if os.path.isdir(source):
        os.makedirs(target, 0o755)
    else:
        os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, None, _BIND | _REC)
    if devices:
        return
    wanted = struct.pack("QQQQ", _READ_ONLY | _NO_DEVICES, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_SET_MOUNTS), ctypes.c_long(-100), target.encode(), ctypes.c_long(0x8000), wanted, len(wanted)
    )
    _checked(result, f"mount_setattr {target}")


def _become(order: dict[str, Any]) -> None:
    for name, value in order["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    user = order["user"]
    if user is not None:
        right = 0
        while _libc.prctl(_DROP, *map(ctypes.c_ulong, (right, 0, 0, 0))) == 0:
            right += 1
        os.setgroups(order["groups"])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    for option, value in ((_NO_NEW_RIGHTS, 1), (_DEATH, signal.SIGKILL)):
        _checked(_libc.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))), "prctl")


def _map(user: int, group: int) -> None:
    """For an ordinary user: the own ids in a user namespace of its own, with the rights to make the others."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _start(order: dict[str, Any], given: list[int], ours: int) -> int:
    root = os.geteuid() == 0
    flags = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET | _NEWCGROUP | signal.SIGCHLD | (0 if root else _NEWUSER)
    user, group, supervisor = os.geteuid(), os.getegid(), os.getpid()
    arguments = [ctypes.c_long(each) for each in (_CLONE[os.uname().machine], flags, 0, 0, 0, 0)]
    pid = _checked(_libc.syscall(*arguments), "clone")
    if pid:
        return pid
    try:
        if not root:
            _map(user, group)
        _run(order, given, supervisor)
    except BaseException as problem:  # whatever it is, this is a child and has nobody to raise it to
        os.write(ours, f"{problem}\n".encode())
    finally:
        os._exit(126)


def _run(order: dict[str, Any], given: list[int], supervisor: int) -> NoReturn:
    os.setsid()
    enters = order["enters"]
    for descriptor in given[:enters]:
        os.write(descriptor, b"0")
    _confine(order, supervisor)
    # Out of the way first: one may have the number that another is to get.
    high = [_duplicate(descriptor) for descriptor in given[enters:]]
    nothing = os.open("/dev/null", os.O_RDWR)
    for target, descriptor in enumerate((nothing, high[0], high[0], *high[1:])):
        os.dup2(descriptor, target)
        os.set_inheritable(target, True)
    _close_from(2 + len(high))
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is not signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _become(order)
    words = order["words"]
    os.execve(words[0], words, {"PATH": "/usr/bin:/bin"})  # noqa: S606 - a program of the host's own


def _duplicate(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD, 128)


# ── Those that run ────────────────────────────────────────────────────────────────────────────────


class Warden:
    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._running: dict[str, int] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._selector.register(stream, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._woken:
                    self._reap()
                elif not self._order():
                    self._end()
                    return

    def _order(self) -> bool:
        try:
            data, ancillary, _, _ = self._stream.recvmsg(1 << 18, socket.CMSG_SPACE(4 * _MOST), socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return False
        given = array.array("i")
        for _, _, packed in ancillary:
            given.frombytes(packed[: len(packed) - len(packed) % given.itemsize])
        if not data:
            return False
        order = json.loads(data)
        try:
            if "kill" in order:
                if order["kill"] in self._running:
                    os.kill(self._running[order["kill"]], signal.SIGKILL)
            else:
                self._begin(order, list(given))
        finally:
            for descriptor in given:
                os.close(descriptor)
        return True

    def _begin(self, order: dict[str, Any], given: list[int]) -> None:
        name = order["start"]
        try:
            pid = _start(order, given, given[order["enters"]])
        except OSError as problem:
            self._say({"failed": name, "why": str(problem)})
            return
        self._running[name] = pid
        self._say({"started": name, "pid": pid})

    def _reap(self) -> None:
        try:
            while os.read(self._woken, 512):
                pass
        except BlockingIOError:
            pass
        names = {pid: name for name, pid in self._running.items()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in names:
                del self._running[names[pid]]
                self._say({"ended": names[pid], "status": status})

    def _say(self, told: dict[str, Any]) -> None:
        try:
            self._stream.send(json.dumps(told).encode())
        except OSError:
            return  # nobody is there to be told; the next order says so

    def _end(self) -> None:
        for pid in self._running.values():
            os.kill(pid, signal.SIGKILL)
        for pid in self._running.values():
            os.waitpid(pid, 0)


signal.signal(signal.SIGINT, signal.SIG_IGN)
Warden(socket.socket(fileno=os.dup(int(sys.argv[1])))).run()
