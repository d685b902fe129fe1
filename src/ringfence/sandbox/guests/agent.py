"""The first process of a guest, a container or a virtual machine: it starts programs there, and passes on what they
write. Imports the standard library and what is sent with it; it runs with whatever Python a guest has, from 3.8 on.

It talks to one host over one stream, in frames:

    4 bytes   the length of the rest
    1 byte    what it is
    4 bytes   the channel that it belongs to
    the rest

The host opens a channel by an order (`O`): 4 bytes with the length of a JSON object, that object, then bytes. After it,
`D` is input for the channel and `E` its end, `W` allows so many more bytes of output (4 bytes), `S` is a JSON object
that acts on what runs there, and `X` ends it. The agent answers with `1` and `2`, what was written to standard output
and error, with `N`, a JSON object about what happened, with `W`, and, as the last of a channel, with `R`, the result.
Neither side sends more than the other has allowed; each channel begins with `CREDIT` bytes both ways.

The host trusts nothing that comes from here. This process goes through the same filter for system calls as its
programs, and has no privileges that they lack; but they can neither trace nor, as it is the first of their process
namespace, kill it. It ends with the stream, and all of the guest with it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import selectors
import signal
import struct
import sys
import termios
import time

from ringfence.sandbox.guests import counting, passage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn, TypeAlias

    AnyChannel: TypeAlias = "AgentChannel | passage.CarriedListener | passage.CarriedConnection"

CREDIT = 256 * 1024
PIECE = 64 * 1024
_FRAME = struct.Struct(">IcI")
_WORD = struct.Struct(">I")
_SIZE = struct.Struct("4H")
_LONGEST = 16 * 1024 * 1024
_BEHIND = 1024 * 1024
"""Bytes that wait for the host to read them; then nothing more is read from programs."""
_CODE_FD = 3
_RESERVE = 8
"""Descriptors that are kept for orders."""
_SECOND = 1_000_000_000

_PR_SET_DUMPABLE = 4
_SIGPENDING = 11
"""RLIMIT_SIGPENDING, which Python has no name for."""


class GuestSettings:
    """What the host told of this guest when it began."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.env = told.get("env", {})
        self.python = told.get("python") or [sys.executable]
        """The words that start this interpreter, which is not always the one of programs."""
        self.user = told.get("user")
        """The user that programs run as; None: the agent's own."""
        self.limits = told.get("limits", {})
        self.output = told.get("output", "/workspace/output")
        self.folders = told.get("folders", ())
        """Folders that are made before anything runs."""
        self.hardens = told.get("harden")
        """What this guest is to do to itself first; None: its engine does all of it."""
        self.done: list[str] = []
        self.hands_over = told.get("hand_over", False)
        """Whether the host takes over what tells of refused calls, and the listener of the one way out."""
        self.listens = told.get("listen", 0)
        """The port of that listener; 0: there is none, or it is not the host that takes it over."""


class Loop:
    """Waits for everything at once, and never for anything in particular."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads = reads
        self._writes = writes
        self._selector = selectors.DefaultSelector()
        self._received = bytearray()
        self._waiting = bytearray()
        self._children: dict[int, Callable[[int, resource.struct_rusage], None]] = {}
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self.channels: dict[int, AnyChannel] = {}
        self.guest = GuestSettings({})
        self.helpers: set[int] = set()
        """Children that are none of the programs: they go on when those are stopped."""
        self.held: set[int] | None = None
        """While programs are stopped: those that were so before."""
        self.seen: list[tuple[int, int, int, int]] = []
        """What the output folder had at the last look."""
        self._woken, wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for descriptor in (reads, writes):
            os.set_blocking(descriptor, False)
        self.watch(self._woken, self._reap)
        self.watch(reads, self._receive)

    def watch(self, descriptor: int, call: Callable[[], object], *, write: bool = False) -> None:
        self._selector.register(descriptor, selectors.EVENT_WRITE if write else selectors.EVENT_READ, call)

    def forget(self, descriptor: int) -> None:
        try:
            self._selector.unregister(descriptor)
        except KeyError:
            return

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + seconds, call))

    def _next(self) -> float | None:
        """Call what is due. Returns for how long to wait at most."""
        now = time.monotonic()
        due = [call for at, call in self._timers if at <= now]
        self._timers = [each for each in self._timers if each[0] > now]
        for call in due:
            call()
        waits = [1.0] if self._children else []
        waits += [max(0.0, at - time.monotonic()) for at, _ in self._timers]
        return min(waits) if waits else None

    def run(self) -> None:
        while True:
            for key, events in self._selector.select(self._next()):
                if key.fd == self._writes == self._reads:
                    if events & selectors.EVENT_WRITE:
                        self._flush()
                    if events & selectors.EVENT_READ:
                        self._receive()
                else:
                    key.data()

    # ── The host ──

    def send(self, kind: bytes, channel: int, *parts: bytes) -> None:
        size = sum(map(len, parts))
        self._waiting += _FRAME.pack(size + 5, kind, channel)
        for part in parts:
            self._waiting += part
        self._flush()

    def tell(self, kind: bytes, channel: int, told: dict[str, Any]) -> None:
        self.send(kind, channel, json.dumps(told).encode())

    @property
    def behind(self) -> bool:
        return len(self._waiting) > _BEHIND

    def _flush(self) -> None:
        while self._waiting:
            try:
                sent = os.write(self._writes, memoryview(self._waiting)[:PIECE])
            except BlockingIOError:
                break
            except OSError:
                os._exit(0)  # the host is gone
            del self._waiting[:sent]
        self._want_to_write(bool(self._waiting))

    def _want_to_write(self, wants: bool) -> None:
        both = selectors.EVENT_READ | selectors.EVENT_WRITE
        if self._reads == self._writes:
            self._selector.modify(self._reads, both if wants else selectors.EVENT_READ, self._receive)
        elif wants:
            if self._writes not in self._selector.get_map():
                self.watch(self._writes, self._flush, write=True)
        else:
            self.forget(self._writes)
        if not wants:
            for each in list(self.channels.values()):
                each.go_on()

    def _receive(self) -> None:
        try:
            data = os.read(self._reads, PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            os._exit(0)
        self._received += data
        while len(self._received) >= _FRAME.size:
            size, kind, number = _FRAME.unpack_from(self._received)
            if size > _LONGEST:
                os._exit(70)
            end = 4 + size
            if len(self._received) < end:
                return
            body = bytes(memoryview(self._received)[_FRAME.size : end])
            del self._received[:end]
            self._take(kind, number, body)

    def _take(self, kind: bytes, number: int, body: bytes) -> None:
        channel = self.channels.get(number)
        if kind == b"H":
            self._begin(body)
        elif kind == b"C":
            self._count()
        elif kind == b"O":
            (size,) = _WORD.unpack_from(body)
            self._order(number, json.loads(body[4 : 4 + size]), body[4 + size :])
        elif channel is not None:
            channel.take(kind, body)

    def _begin(self, body: bytes) -> None:
        (size,) = _WORD.unpack_from(body)
        self.guest = GuestSettings(json.loads(body[4 : 4 + size]))
        _prepare(self.guest, body[4 + size :], self._writes)
        self._count()
        version = list(sys.version_info[:3])
        self.tell(b"H", 0, {"python": version, "done": self.guest.done, "pid": os.getpid()})

    def _order(self, number: int, order: dict[str, Any], data: bytes) -> None:
        try:
            channel = ORDERS[order["do"]](self, number, order, data)
            if channel is not None:
                self.channels[number] = channel
        except Exception as problem:  # whatever one order breaks, the others go on
            code = problem.errno if isinstance(problem, OSError) else 0
            self.tell(b"R", number, {"failed": f"{type(problem).__name__}: {problem}", "errno": code})

    def _count(self) -> None:
        """Tell what this guest counted of itself, if it does: always before that is judged."""
        if counting.FILES:
            self.tell(b"C", 0, counting.counted())

    def over(self, number: int, result: dict[str, Any]) -> None:
        self.channels.pop(number, None)
        self._count()
        self.tell(b"R", number, result)

    # ── Children ──

    def expect(self, pid: int, call: Callable[[int, resource.struct_rusage], None]) -> None:
        self._children[pid] = call

    def _reap(self) -> None:
        try:
            while os.read(self._woken, 512):
                pass
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            call = self._children.pop(pid, None)
            if call is not None:
                call(status, used)


# ── What the host can order ───────────────────────────────────────────────────────────────────────


class AgentChannel:
    """What the host has opened by an order."""

    def take(self, kind: bytes, body: bytes) -> None:
        """A frame for it."""

    def go_on(self) -> None:
        """The host may have room for more."""


class ChannelStreams(AgentChannel):
    """A channel with output that is read here, and input that is written here."""

    def __init__(self, loop: Loop, number: int) -> None:
        self._loop = loop
        self._number = number
        self._credit = CREDIT
        self._reading: dict[int, bytes] = {}
        self._paused: set[int] = set()
        self._owed: dict[int, int] = {}
        """What is read to the end of what is there now, up to so many bytes each, whoever else may still write."""
        self._input = -1
        self._to_write = bytearray()
        self._no_more = False
        self._pty: list[int] | None = None

    def _read(self, descriptor: int, kind: bytes) -> None:
        self._reading[descriptor] = kind
        self._loop.watch(descriptor, lambda: self._more(descriptor))

    def _more(self, descriptor: int) -> bool:
        """Pass on what was written; the host gets no more than it has room for. Returns whether there may be more."""
        if descriptor not in self._reading:
            return False  # it was closed in the same turn
        if self._credit <= 0 or self._loop.behind:
            self._loop.forget(descriptor)
            self._paused.add(descriptor)
            return False
        try:
            data = self._piece(descriptor, min(PIECE, self._credit))
        except BlockingIOError:
            self._paid(descriptor)
            return False
        except OSError:
            data = b""  # a terminal without a program
        if not data:
            self._close(descriptor)
            self._end_if_over()
            return False
        self._credit -= len(data)
        self._loop.send(self._reading[descriptor], self._number, data)
        if descriptor in self._owed:
            self._owed[descriptor] -= len(data)
            if self._owed[descriptor] <= 0:
                self._paid(descriptor)
                return False
        return True

    def _piece(self, descriptor: int, most: int) -> bytes:
        return os.read(descriptor, most)

    def go_on(self) -> None:
        if self._credit > 0 and self._paused and not self._loop.behind:
            paused, self._paused = self._paused, set()
            for descriptor in paused:
                self._read(descriptor, self._reading[descriptor])
            for descriptor in paused:  # what has nothing to read is not waited for where all is read that is there
                while descriptor in self._owed and self._more(descriptor):
                    pass

    def _close(self, descriptor: int) -> None:
        self._loop.forget(descriptor)
        self._paused.discard(descriptor)
        self._reading.pop(descriptor, None)
        self._owed.pop(descriptor, None)
        os.close(descriptor)

    def _paid(self, descriptor: int) -> None:
        if self._owed.pop(descriptor, None) is not None:
            self._end_if_over()

    def _close_ours(self) -> None:
        for descriptor in list(self._reading):
            self._close(descriptor)
        self._close_input()

    def _end_if_over(self) -> None:
        """Called when something of it has come to its end."""
        raise NotImplementedError

    # ── Input ──

    def take(self, kind: bytes, body: bytes) -> None:
        if kind == b"D":
            self._to_write += body
            self._write()
        elif kind == b"E":
            self._no_more = True
            self._write()
        elif kind == b"W":
            self._credit += _WORD.unpack(body)[0]
            self.go_on()

    def _write(self) -> None:
        if self._input < 0:
            self._allow(len(self._to_write))
            self._to_write.clear()
            return
        self._loop.forget(self._input)
        while self._to_write:
            try:
                sent = os.write(self._input, memoryview(self._to_write)[:PIECE])
            except BlockingIOError:
                self._loop.watch(self._input, self._write, write=True)
                return
            except OSError:
                self._close_input()
                self._loop.tell(b"N", self._number, {"input": "closed"})
                return
            del self._to_write[:sent]
            self._allow(sent)
        if self._no_more and self._pty:
            self._no_more = False
            self._to_write += b"\x04"
            self._write()
        elif self._no_more:
            self._close_input()

    def _allow(self, size: int) -> None:
        if size:
            self._loop.send(b"W", self._number, _WORD.pack(size))

    def _close_input(self) -> None:
        if self._input >= 0:
            self._loop.forget(self._input)
            os.close(self._input)
            self._input = -1
            self._to_write.clear()


class Run(ChannelStreams):
    """A program, from its order until it is over and everything that it wrote is read."""

    def __init__(self, loop: Loop, number: int, order: dict[str, Any], data: bytes) -> None:
        super().__init__(loop, number)
        self._alone = order.get("alone", False)
        """Whether all else in the guest ends with it."""
        self._result: dict[str, Any] | None = None
        self._helps = order.get("plain", False)
        """Whether it is our own, and no program."""
        self._pty = order.get("pty")
        self._begun_at = time.monotonic()
        self.pid = -1
        given = self._open(order)
        try:
            self.pid = _start(loop.guest, order, given, data)
        except BaseException:
            self._close_ours()
            raise
        finally:
            for descriptor in given:
                os.close(descriptor)
        if self._helps:
            loop.helpers.add(self.pid)
        loop.expect(self.pid, self._ended)
        loop.tell(b"N", number, {"began": self.pid})

    def _open(self, order: dict[str, Any]) -> list[int]:
        if self._pty:
            ours, theirs = os.openpty()
            os.set_blocking(ours, False)
            _resize(ours, *self._pty)
            self._input = os.dup(ours)
            self._read(ours, b"1")
            if self._loop.guest.user is not None:
                os.fchown(theirs, self._loop.guest.user, -1)
            return [theirs, os.dup(theirs), os.dup(theirs)]
        if order.get("input"):
            stdin, self._input = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self._input, False)
        else:
            stdin = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        return [stdin, self._pipe(b"1"), self._pipe(b"2")]

    def _pipe(self, kind: bytes) -> int:
        """A pipe that is read from now on. Returns its other end."""
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(ours, False)
        _open_to_all(theirs)  # programs, perhaps of another user, can open theirs again by name
        self._read(ours, kind)
        return theirs

    # ── From the host ──

    def take(self, kind: bytes, body: bytes) -> None:
        if kind == b"S":
            self._act(json.loads(body))
        elif kind == b"X":
            self._signal(signal.SIGKILL)
        else:
            super().take(kind, body)

    def _act(self, told: dict[str, Any]) -> None:
        if "signal" in told:
            self._signal(told["signal"])
        if "size" in told and self._pty and self._input >= 0:
            _resize(self._input, *told["size"])

    def _signal(self, number: int) -> None:
        if self._result is not None:
            return
        for send in (os.killpg, os.kill):  # it may have no group of its own yet
            try:
                send(self.pid, number)
            except ProcessLookupError:
                continue
            except OSError:
                return
            return

    # ── Its end ──

    def _ended(self, status: int, used: resource.struct_rusage) -> None:
        self._loop.helpers.discard(self.pid)
        if self._alone:
            _end_all_others()
        self._result = {
            "status": status,
            "cpu_ms": round((used.ru_utime + used.ru_stime) * 1000.0, 3),
            "peak_memory_bytes": used.ru_maxrss * 1024,
            "io_bytes": (used.ru_inblock + used.ru_oublock) * 512,
            "wall_ms": round((time.monotonic() - self._begun_at) * 1000.0, 3),
        }
        self._close_input()
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._result is not None and not self._reading:
            if self._alone:
                self._result.update(left(self._loop.guest))
            self._loop.over(self._number, self._result)


class ArchiveOrder(Run):
    """Files that go in or come out as an archive, by a child of ours, which has the rights of programs."""

    def __init__(self, loop: Loop, number: int, order: dict[str, Any], data: bytes) -> None:
        guest = loop.guest
        code = _PACK if order["do"] == "pack" else _UNPACK
        argv = [*guest.python, "-I", "-S", "-c", code, json.dumps(order["what"])]
        plain = {"do": "run", "argv": argv, "env": {}, "cwd": "/", "input": order["do"] == "unpack", "plain": True}
        super().__init__(loop, number, plain, data)
        self._guest = guest


_PACK = """
import json, os, stat, sys, tarfile
what = json.loads(sys.argv[1])
left = {}
unnamed = [0]
kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
def fits(entry):
    kind = stat.S_IFMT(os.lstat(entry.name).st_mode)
    if kind == stat.S_IFREG and entry.size <= what["most"]:
        if entry.islnk():
            entry.type, entry.linkname, entry.size = tarfile.REGTYPE, "", os.lstat(entry.name).st_size
        return entry
    if kind == stat.S_IFDIR:
        return entry
    if len(left) >= what["named"]:
        unnamed[0] += 1
    else:
        more = f"{entry.size} bytes, and less may be collected"
        left[entry.name] = f"it has {more}" if kind == stat.S_IFREG else f"it is {kinds.get(kind, 'a device')}"
    return None
def add(archive, path):
    try:
        entry = archive.gettarinfo(path)
        if entry is None:  # tar has no sockets
            left[path] = "it is a socket"
        elif (entry := fits(entry)) is None:
            return
        elif entry.isdir():
            archive.addfile(entry)
            for name in sorted(os.listdir(path)):
                add(archive, f"{path}/{name}")
        else:
            with open(path, "rb") as file:
                archive.addfile(entry, file)
    except OSError as problem:
        left[path] = f"it cannot be read: {problem.strerror}"
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT, bufsize=65536) as archive:
    os.chdir(what["folder"])
    for name in what["names"]:
        if os.path.lexists(name):
            add(archive, name)
if unnamed[0]:
    left[what["names"][0]] = f"{unnamed[0]} more were left out"
print(json.dumps(left), file=sys.stderr)
"""
_UNPACK = """
import json, os, sys, tarfile
what = json.loads(sys.argv[1])
os.makedirs(what["folder"], exist_ok=True)
os.umask(0)
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|", bufsize=65536) as archive:
    os.chdir(what["folder"])
    for entry in archive:
        archive.extract(entry, set_attrs=False)
        if entry.isfile():
            os.chmod(entry.name, entry.mode & 0o777)
"""


def _write(loop: Loop, number: int, order: dict[str, Any], data: bytes) -> None:
    """Write a small file, at once."""
    with open(order["path"], "wb") as file:
        file.write(data)
    loop.tell(b"R", number, {"status": 0})
    return None


def _open_to_all(descriptor: int) -> None:
    try:
        os.fchmod(descriptor, 0o666)
    except PermissionError:
        return  # a kernel that changes no pipe: that one has it belong to the user already, see `own_kernel`


def _room(loop: Loop, number: int, order: dict[str, Any], data: bytes) -> None:
    """How much of the disk is used."""
    room = os.statvfs("/workspace")
    loop.tell(b"R", number, {"status": 0, "used": (room.f_blocks - room.f_bfree) * room.f_frsize})
    return None


ORDERS: dict[str, Callable[[Loop, int, dict[str, Any], bytes], AnyChannel | None]] = {
    "run": Run,
    "write": _write,
    "room": _room,
    "pack": ArchiveOrder,
    "unpack": ArchiveOrder,
    "listen": passage.CarriedListener,
    "connection": passage.CarriedConnection,
}
"""Other modules add their own."""


def left(guest: GuestSettings) -> dict[str, Any]:
    """Whether the program left files, and how full the disk is: asking costs less than looking in vain."""
    try:
        with os.scandir(guest.output) as entries:
            left = next(entries, None) is not None
    except OSError:
        left = False
    try:
        room = os.statvfs("/workspace")
        full = "disk" if room.f_bavail == 0 else "inodes" if room.f_files and not room.f_favail else None
    except OSError:
        full = None
    return {"left": left, "full": full}


def _end_all_others() -> None:
    """Kill everything else in the guest."""
    try:
        os.kill(-1, signal.SIGKILL)
    except OSError:
        return  # there is nothing else


def _resize(descriptor: int, columns: int, rows: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, _SIZE.pack(rows, columns, 0, 0))


# ── A program ─────────────────────────────────────────────────────────────────────────────────────


def _start(guest: GuestSettings, order: dict[str, Any], given: list[int], code: bytes) -> int:
    """Start the program of an order with these descriptors: the first three are its streams, the others come after
    that of its code, if it has any. Returns its process. Raises OSError."""
    file = -1
    if order.get("put"):
        with open(order["put"], "wb") as writing:
            writing.write(code)
    elif code:
        file = os.memfd_create("program")
        with open(file, "wb", closefd=False) as writing:
            writing.write(code)
    try:
        pid = os.fork()
        if pid:
            return pid
        try:
            _become(guest, order, given, file)
        finally:
            os._exit(125)
    finally:
        if file >= 0:
            os.close(file)


def _become(guest: GuestSettings, order: dict[str, Any], given: list[int], file: int) -> NoReturn:
    """Turn this child into the program. Does not return."""
    os.setsid()
    if file >= 0:
        os.lseek(file, 0, os.SEEK_SET)
    wanted = [*given[:3], *([file] if file >= 0 else []), *given[3:]]
    for target, descriptor in enumerate([fcntl.fcntl(each, fcntl.F_DUPFD, 64) for each in wanted]):
        os.dup2(descriptor, target)
    os.closerange(len(wanted), 1 << 16)
    if order.get("pty"):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is not signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    env = {**guest.env, **order.get("env", {})}
    _limit({} if order.get("plain") else guest.limits)
    try:
        os.chdir(order.get("cwd") or "/workspace")
    except OSError as problem:
        os.write(2, f"{order.get('cwd')}: {problem.strerror}\n".encode())
        os._exit(126)
    if guest.user is not None:
        os.seteuid(0)
        os.setgroups([])
        os.setresgid(guest.user, guest.user, guest.user)
        os.setresuid(guest.user, guest.user, guest.user)
    if "work" in order:  # of ours, which needs no program
        order["work"]()
        os._exit(0)
    argv = order["argv"]
    try:
        os.execvpe(argv[0], argv, env)  # noqa: S606 - a shell is started only where one was asked for
    except OSError as problem:
        os.write(2, f"{argv[0]}: {problem.strerror}\n".encode())
        os._exit(127 if problem.errno == errno.ENOENT else 126)


def _limit(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        number = _SIGPENDING if name == "RLIMIT_SIGPENDING" else getattr(resource, name)
        _, most = resource.getrlimit(number)
        wanted = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(number, (wanted, wanted))
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")  # the kernel ends programs before the agent
    except OSError:
        return


def _prepare(guest: GuestSettings, code: bytes, stream: int) -> None:
    """Confine this process, and with it all that it starts, and prepare what programs need."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o022)
    if guest.hardens is not None:
        from ringfence.sandbox.guests import harden  # noqa: PLC0415 - not every guest is sent that

        if guest.hardens.get("own_kernel"):
            from ringfence.sandbox.guests import own_kernel  # noqa: PLC0415

            guest.done = own_kernel.settle_in(guest.hardens, code)
            guest.user = guest.hardens["user"]
        elif guest.hardens.get("unprivileged"):
            guest.done, denials = harden.harden_further(guest.hardens, code)
            if guest.hardens.get("notify"):  # the host takes it where it lies
                os.dup2(denials, guest.hardens["notify"], inheritable=False)
                os.close(denials)
        else:
            given = [harden.listener(guest.listens)] if guest.listens else []
            guest.done, denials = harden.harden(guest.hardens, code, notify=guest.hands_over)
            if guest.hands_over:
                given.insert(0, denials)
                harden.hand_over(stream, given)
            for descriptor in given:
                os.close(descriptor)
    for folder in guest.folders:
        os.makedirs(folder, exist_ok=True)
    import ctypes  # noqa: PLC0415 - not every Python has it, and then nothing is traced anyway

    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def serve(reads: int, writes: int) -> None:
    """Serve the host at the other end of these descriptors until it is gone."""
    placed = {}
    for descriptor in (reads, writes):
        if descriptor not in placed:
            placed[descriptor] = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100)
    nothing = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    Loop(placed[reads], placed[writes]).run()
