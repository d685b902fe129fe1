"""Runs hostile programs outside of any box, where they can do what they try and harm only what the harness put up.

Started by path, as `python -I launcher.py CONTROL_FD`; imports nothing of ours, and forks for every order. A program
runs as an unprivileged user in namespaces of its own, with all capabilities that these give, and with none of a box's
other protections. It is stopped at twice its limits. The supervisor here is a naive one on purpose: it believes the
first word on a descriptor that the program inherits, reaps no orphans, and follows links when it collects.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import ctypes
import fcntl
import json
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import termios
import time
import traceback
from typing import Any

# Loaded now, since the program may not be able to read them as the user that it becomes.
_NEEDED = "array io linecache mmap multiprocessing ssl stat subprocess tempfile threading tokenize zlib"
_NEEDED += " encodings.idna"
PRELOADED = list(map(__import__, _NEEDED.split()))

_BITS = {"user": 28, "pid": 29, "mnt": 17, "ipc": 27, "uts": 26, "net": 30, "cgroup": 25}
_REC_PRIVATE = 0x4000 | 0x40000
_PDEATHSIG = 1
_DUMPABLE = 4
_SUBREAPER = 36
_AMBIENT = 47
_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_UP_AND_RUNNING = 0x41
_JOIN_SESSION_KEYRING = 1
_KEYCTL = {"x86_64": (250, 248), "aarch64": (219, 217)}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def main() -> None:
    """Fork for every order, until the harness is gone: `run`, with five descriptors, or `stop PID`."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who is started in the background ignores it
    running: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 4096, 5)
        running -= _buried()
        if not message:
            break
        word, _, rest = message.decode().partition(" ")
        if word == "stop" and int(rest) in running:
            os.kill(int(rest), signal.SIGALRM)
        elif word == "run":
            pid = os.fork()
            if pid == 0:
                control.close()
                _guarded(lambda: _take(descriptors))  # noqa: B023 - called at once
            running.add(pid)
            control.send(str(pid).encode())
            for descriptor in descriptors:
                os.close(descriptor)
    for pid in running:
        os.kill(pid, signal.SIGALRM)


def _buried() -> set[int]:
    """Children that ended; until they are reaped, their numbers are not used again."""
    gone: set[int] = set()
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            gone.add(pid)
    return gone


def _take(descriptors: list[int]) -> None:
    """Receive one order: the file with it, where to report how it ended, and the three streams."""
    with open(descriptors[0], "rb") as file:
        order: dict[str, Any] = json.load(file)
    # Each process forked from here has the sources of all programs.
    order["programs"] = [base64.b64decode(text) for text in order["programs"]]
    status = descriptors[1]
    for number, descriptor in enumerate(descriptors[2:]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    first = 0

    def late(number: int, frame: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _tell(status, late=True)
        _end_all(first, order)
        os._exit(0)

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, order["deadline"])
    _enter(order)
    _prctl(_SUBREAPER, 1)
    first = os.fork()
    if first == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        _guarded(lambda: _first(order, status))
    # As a reader does that waits for the end of the output: for every process that could still write.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(first, 0)
        first = 0
        left = _children(order)
        if left:
            _tell(status, left=len(left))
        while True:
            os.wait()


def _children(order: dict[str, Any]) -> list[int]:
    """Processes that became our children when their parents ended; none can in a process namespace of its own."""
    found = []
    if "pid" in order["share"]:
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    found.append(int(name))
    return found


def _end_all(first: int, order: dict[str, Any]) -> None:
    """Our own descendants, who all become our children as their parents end."""
    for _ in range(200):
        for pid in {first, *_children(order)} - {0}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            if os.waitpid(-1, 0)[0] == first:
                first = 0
        except ChildProcessError:
            return


# ── Where it runs ──


def _enter(order: dict[str, Any]) -> None:
    """Become the user, and go into the namespaces. Root makes those first: to a user this host may refuse them."""
    root = os.getuid() == 0
    apart = "user" not in order["share"]
    user, group = (order["id"], order["id"]) if root else (os.getuid(), os.getgid())
    if user == 0:
        raise SystemExit("refused: a control never runs as root")
    if root:
        os.setgroups(order["groups"])
        if not apart:
            _become(user, group)
    os.umask(order["umask"])
    if apart:
        flags = sum(1 << bit for name, bit in _BITS.items() if name not in order["share"])
        go = os.eventfd(0)
        helper = os.fork() if root else 0
        if root and helper == 0:
            os.eventfd_read(go)
            _guarded(lambda: _map(os.getppid(), user, group))
        _checked(_libc.unshare(flags), "unshare")
        if root:
            os.eventfd_write(go, 1)
            os.waitpid(helper, 0)
            _become(0, 0)
        else:
            _map(os.getpid(), user, group)
        os.close(go)
    _prctl(_DUMPABLE, 1)
    _keyring(order)


def _become(user: int, group: int) -> None:
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)


def _map(process: int, user: int, group: int) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/{process}/{name}", "w") as file:
            file.write(text)


def _first(order: dict[str, Any], status: int) -> None:
    """What PID 1 of a box is: prepares, starts the program, waits for it."""
    _prctl(_PDEATHSIG, signal.SIGKILL)
    here: dict[str, Any] = {}
    if "user" not in order["share"]:
        _capabilities(-1)
        if "mnt" not in order["share"]:
            _mounts(order)
        if "net" not in order["share"]:
            _network(order)
    _workspace(order)
    victim = 0
    if "victim" in order["features"]:
        gone, begun = os.pipe()  # closed by what is executed
        victim = os.fork()
        if victim == 0:
            os.execve("/bin/sleep", ["sleep", "3600"], {"SECRET": order["secret"]})  # noqa: S606
        here["victim"] = victim
        os.close(begun)
        os.read(gone, 1)
        os.close(gone)
    _limits(order["limits"])
    _tell(status, begun=True)
    for index in range(len(order["programs"])):
        if index:
            os.write(1, b"\x1e\n")
        worker = os.fork()
        if worker == 0:
            _guarded(lambda at=index: _work(order, at, here))
        _tell(status, status=os.waitpid(worker, 0)[1])
    if victim:
        lives = True
        for _ in range(40):  # what was killed needs a moment to be dead
            lives = lives and os.waitpid(victim, os.WNOHANG)[0] == 0
            time.sleep(0.01 if lives else 0)
        _tell(status, victim=lives)
    if order["output"]:
        _collect(order, status)


def _mounts(order: dict[str, Any]) -> None:
    _mount(None, "/", None, _REC_PRIVATE)
    limits = order["limits"]
    # The program is stopped here at twice its limit.
    _mount("control", order["workspace"], "tmpfs", 0, f"mode=0777,size={limits['disk_bytes'] * 2}")
    _mount("control", "/dev/shm", "tmpfs", 0, f"mode=0777,size={limits['memory_bytes'] * 2}")  # noqa: S108
    if "pid" not in order["share"]:
        _mount("proc", "/proc", "proc")


def _network(order: dict[str, Any]) -> None:
    """Loopback up; where asked for, every address in the world is this machine, and a server listens there."""
    request = struct.pack("16sh14x", b"lo", 0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", request[:16], _UP_AND_RUNNING))
    if "internet" not in order["features"]:
        return
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
        for family in (socket.AF_INET, socket.AF_INET6):
            # A route of type "local" for everything, out of interface 1, which is loopback.
            route = struct.pack("BBBBBBBBI", family, 0, 0, 0, 255, 4, 254, 2, 0) + struct.pack("HHI", 8, 4, 1)
            netlink.send(struct.pack("IHHII", 16 + len(route), 24, 0x605, family, 0) + route)
            netlink.recv(4096)
    both: dict[str, Any] = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    listeners = [socket.create_server(("::", port), **both) for port in (80, 443)]
    if os.fork() == 0:
        _guarded(lambda: _answer(listeners))
    for listener in listeners:
        listener.close()


def _answer(listeners: list[socket.socket]) -> None:
    while True:
        for listener in select.select(listeners, [], [])[0]:
            connection, _ = listener.accept()
            connection.send(b"hello\n")
            connection.close()


def _workspace(order: dict[str, Any]) -> None:
    os.chdir(order["workspace"])
    for name in ("input", "output", "tmp"):
        os.makedirs(name, exist_ok=True)
    for name, content in order["inputs"].items():
        os.makedirs(os.path.dirname(f"input/{name}"), exist_ok=True)
        with open(f"input/{name}", "wb") as file:
            file.write(base64.b64decode(content))


def _limits(limits: dict[str, Any]) -> None:
    """The bomb stops at twice the limit; and nothing else is limited."""
    wall = int(limits["wall_seconds"] * 2) + 1
    for kind, most in (
        (resource.RLIMIT_NPROC, limits["processes"] * 2),
        (resource.RLIMIT_NOFILE, limits["open_files"] * 2),
        (resource.RLIMIT_CPU, wall),
    ):
        hard = resource.getrlimit(kind)[1]
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (allowed, allowed))


# ── The program ──


def _work(order: dict[str, Any], index: int, here: dict[str, Any]) -> None:
    os.environ.update(order["env"])
    if "terminal" in order["features"]:
        _take_terminal()
    if order["command"]:
        os.execvp(order["command"][0], order["command"])  # noqa: S606
    # Forked from one process, which has not reseeded its random numbers.
    random.setstate(_RANDOM)
    source = order["programs"][index]
    code: object = 0
    try:
        exec(compile(source, "-c", "exec"), {"__name__": "__main__", "__builtins__": builtins, "HERE": here})  # noqa: S102
    except SystemExit as exc:
        code = exc.code
    sys.stdout.flush()
    os._exit(0 if code is None else code & 255 if isinstance(code, int) else 1)


_RANDOM = random.getstate()


def _take_terminal() -> None:
    _, terminal = os.openpty()
    os.setsid()
    os.dup2(terminal, 0)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _collect(order: dict[str, Any], status: int) -> None:
    """Collect output naively: every file, wherever its name leads."""

    def stuck(number: int, frame: object) -> None:
        _tell(status, collector="it waits for ever")
        os._exit(0)

    signal.signal(signal.SIGALRM, stuck)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, order["limits"]["wall_seconds"]))
    _capabilities(0)
    try:
        for folder, _, names in os.walk("output", followlinks=True, onerror=_raise):
            for name in names:
                source = f"{folder}/{name}"
                copy = f"{order['output']}/{folder[7:]}/{name}"
                os.makedirs(os.path.dirname(copy), exist_ok=True)
                with open(source, "rb") as file, open(copy, "wb") as out:
                    out.write(file.read())
                os.chmod(copy, os.stat(source).st_mode & 0o7777)
    except OSError as exc:
        _tell(status, collector=f"it fails: {exc.strerror}")


def _raise(exc: OSError) -> None:
    raise exc


# ── Small things ──


def _guarded(act: Any) -> None:
    """A forked process does this and never returns."""
    try:
        act()
    except BaseException:  # it must not go on as a copy of its parent
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _tell(where: int, **frame: object) -> None:
    os.write(where, f"{json.dumps(frame)}\n".encode())


def _keyring(order: dict[str, Any]) -> None:
    """A session keyring with a credential in it, as a login leaves one."""
    keyctl, add_key = _KEYCTL[os.uname().machine]
    if _libc.syscall(keyctl, _JOIN_SESSION_KEYRING, None) > 0:
        secret = order["secret"].encode()
        _libc.syscall(add_key, b"user", b"rf-canary", secret, len(secret), -3)


def _capabilities(wanted: int) -> None:
    """All that there are, in every set, or none in effect."""
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    every = (1 << (last + 1)) - 1
    sets = (every & wanted, every, every & wanted)
    low = (part & 0xFFFFFFFF for part in sets)
    high = (part >> 32 for part in sets)
    _checked(_libc.capset(struct.pack("II", 0x20080522, 0), struct.pack("IIIIII", *low, *high)), "capset")
    for number in range(last + 1) if wanted else ():
        _prctl(_AMBIENT, 2, number)


def _mount(source: str | None, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    _checked(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def _prctl(option: int, second: int, third: int = 0) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(second), ctypes.c_ulong(third), 0, 0), f"prctl {option}")


def _checked(result: int, what: str) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
