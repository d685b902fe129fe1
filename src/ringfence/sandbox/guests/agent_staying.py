"""What the agent does in a guest that stays: it serves interpreters, runs commands beside each other, keeps apart what
is written late, stops programs and lets them go on, connects to their ports, and says which output files are new.

Runs in the guest, after `agent`, whose orders it adds to. Beside the frames described there, an interpreter's channel
has `3` for what it claims, and late output has a channel of its own.

An interpreter gets a cell as `D` with its source and then `S` with `{"cell": …}`. When its main thread waits for the
next order, and everything that the cell wrote is on its way, the agent says so (`N`, `over`).
"""

from __future__ import annotations

import _socket
import contextlib
import errno
import json
import marshal
import os
import signal
import stat
import struct

from ringfence.sandbox.guests import agent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_INLINE = 32_768
"""Longer source goes by a file, as it would not fit into a message."""
_MESSAGE = 65_537
_IN_A_PIPE = 1024 * 1024 + agent.PIECE
_DONE = b'"t":"done"'
_LOOKS_AT_ONCE = 40
_LOOK_SECONDS = 0.02
_RECVFROM = {"x86_64": b"45", "aarch64": b"207"}
_PEEK_ARGUMENTS = ([b"0x1", b"0x22"],)
_MAX_LATE = 8
"""Pipes of steps that are over and still have writers. The oldest are closed."""
_ROUNDS = 100
_STOPPED = "TtXZ"
_MAX_ENTRIES = 10_000
_MAX_REASONS = 1000
_DEEPEST = 32
_LONGEST_PATH = 1024


# ── Steps ─────────────────────────────────────────────────────────────────────────────────────────


class AgentStep(agent.Run):
    """A program in a guest that goes on when it is over. What others still hold of its output then, is late."""

    def _ended(self, status: int, used: Any) -> None:
        self._owed = dict.fromkeys(self._reading, _IN_A_PIPE)  # it is not over before that is read
        super()._ended(status, used)
        if self._pty and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            _end_session(self.pid)
        self._read_out()

    def _read_out(self) -> None:
        """Read what is there by now."""
        self._owed = dict.fromkeys(self._reading, _IN_A_PIPE)
        for descriptor in list(self._owed):
            while descriptor in self._owed and self._more(descriptor):
                pass
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._result is None or self._owed or self._number not in self._loop.channels:
            return
        self._leave_behind()
        self._result.update(agent.left(self._loop.guest), tasks=_tasks(self._loop))
        self._loop.over(self._number, self._result)

    def _leave_behind(self) -> None:
        late = _late(self._loop)
        for descriptor, kind in list(self._reading.items()):
            if late is None or self._pty or kind not in (b"1", b"2"):
                self._close(descriptor)
                continue
            self._loop.forget(descriptor)
            self._paused.discard(descriptor)
            del self._reading[descriptor]
            late.adopt(descriptor, kind)


def _end_session(leader: int) -> None:
    """Kill the jobs of a shell on a terminal as well: each has a process group of its own."""
    for pid in processes():
        try:
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)
        except OSError:
            continue


class CellServer(AgentStep):
    """Runs cell after cell, and keeps its state."""

    def __init__(self, loop: agent.Loop, number: int, order: dict[str, Any], data: bytes) -> None:
        self._source = bytearray()
        self._looking = False
        self._at_rest = False
        self._id = 0
        self._channel: Any = None
        super().__init__(loop, number, order, data)
        self._main = WaitingThread(self.pid)

    def _open(self, order: dict[str, Any]) -> list[int]:
        self._channel, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        self._read(self._channel.fileno(), b"3")
        nothing = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        return [nothing, os.dup(nothing), os.dup(nothing), theirs.detach()]

    def _piece(self, descriptor: int, most: int) -> bytes:
        if descriptor != self._channel.fileno():
            return super()._piece(descriptor, most)
        data: bytes = self._channel.recv(_MESSAGE)  # whole messages: it may be a little more than there is room for
        if _DONE in data and not self._looking:
            self._looking = True
            self._loop.later(0, self._look)
        return data

    def _close(self, descriptor: int) -> None:
        if descriptor == self._channel.fileno():
            descriptor = self._channel.detach()
        super()._close(descriptor)

    # ── From the host ──

    def take(self, kind: bytes, body: bytes) -> None:
        if kind == b"D":
            self._source += body
            self._allow(len(body))
        else:
            super().take(kind, body)

    def _act(self, told: dict[str, Any]) -> None:
        if "cell" in told:
            self._cell(told["cell"])
        elif "signal" in told and self._result is None:
            try:
                os.kill(self.pid, told["signal"])
            except OSError:
                return

    def _cell(self, order: dict[str, Any]) -> None:
        source, self._source = bytes(self._source), bytearray()
        self._id = order["id"]
        self._leave_behind()
        given = []
        try:
            given += [self._pipe(b"1"), self._pipe(b"2")]
            if len(source) > _INLINE:
                given.append(os.memfd_create("cell"))
                with open(given[-1], "wb", closefd=False) as file:
                    file.write(source)
            else:
                order["source"] = source
            message = marshal.dumps({"kind": "cell", **order})
            packed = struct.pack(f"{len(given)}i", *given)
            self._channel.sendmsg([message], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)])
        except OSError as problem:
            self._loop.tell(b"N", self._number, {"refused": os.strerror(problem.errno or errno.EPIPE)})
        finally:
            for descriptor in given:
                os.close(descriptor)

    def _leave_behind(self) -> None:
        """Its channel goes on as long as it does."""
        channel = self._channel.fileno()
        kept = self._reading.pop(channel, None) if self._result is None else None
        super()._leave_behind()
        if kept is not None:
            self._reading[channel] = kept

    # ── Is the cell over? ──

    def _look(self, looks: int = 0) -> None:
        """It claims that the cell is done, which is true once its main thread waits for the next order."""
        if self._result is not None:
            return
        for _ in range(_LOOKS_AT_ONCE if looks == 0 else 1):
            if self._main.waits():
                self._looking = False
                self._at_rest = True
                self._read_out()
                return
            os.sched_yield()
        self._loop.later(min(0.001 * 2**looks, _LOOK_SECONDS), lambda: self._look(min(looks + 1, 10)))

    def _end_if_over(self) -> None:
        if self._result is not None:
            super()._end_if_over()
        elif self._at_rest and not self._owed:
            self._at_rest = False
            self._leave_behind()
            told = {"over": self._id, "folder": _folder(self.pid), "peak": _peak(self.pid)}
            told.update(agent.left(self._loop.guest), tasks=_tasks(self._loop))
            self._loop.tell(b"N", self._number, told)


class WaitingThread:
    """Tells whether the main thread of an interpreter waits for its next order."""

    def __init__(self, pid: int) -> None:
        self._folder = f"/proc/{pid}/task/{pid}"
        self._recvfrom = _RECVFROM.get(os.uname().machine)
        self._look = self._is_in_recvfrom

    def waits(self) -> bool:
        """Where the kernel hides its system call from us, that it sleeps is enough."""
        try:
            return self._look()
        except OSError as problem:
            if problem.errno == errno.ESRCH:
                return False
            self._look = self._sleeps
        try:
            return self._look()
        except OSError:
            return False

    def _is_in_recvfrom(self) -> bool:
        called = self._read("syscall").split()
        if self._recvfrom is None or len(called) < 2:
            if called[:1] == [b"running"]:
                return False
            raise OSError(errno.ENOSYS, "")
        return called[0] == self._recvfrom and called[3:5] in _PEEK_ARGUMENTS

    def _sleeps(self) -> bool:
        return self._read("stat").rpartition(b")")[2].split()[:1] == [b"S"]

    def _read(self, name: str) -> bytes:
        descriptor = os.open(f"{self._folder}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, 4096)
        finally:
            os.close(descriptor)


# ── LateChannel output ───────────────────────────────────────────────────────────────────────────────────


class LateChannel(agent.AgentChannel):
    """What is written when its step is over."""

    def __init__(self, loop: agent.Loop, number: int, order: dict[str, Any], data: bytes) -> None:
        self._loop = loop
        self._number = number
        self._credit = agent.CREDIT
        self._reading: dict[int, bytes] = {}
        """The oldest first."""
        self._paused: set[int] = set()

    def adopt(self, descriptor: int, kind: bytes) -> None:
        self._reading[descriptor] = kind
        self._watch(descriptor)
        while len(self._reading) > _MAX_LATE:
            self._close(next(iter(self._reading)))

    def _watch(self, descriptor: int) -> None:
        self._loop.watch(descriptor, lambda: self._more(descriptor))

    def take(self, kind: bytes, body: bytes) -> None:
        if kind == b"W":
            self._credit += int.from_bytes(body, "big")
            self.go_on()

    def go_on(self) -> None:
        if self._credit > 0 and self._paused and not self._loop.behind:
            paused, self._paused = self._paused, set()
            for descriptor in paused:
                self._watch(descriptor)

    def _more(self, descriptor: int) -> None:
        if self._credit <= 0 or self._loop.behind:
            self._loop.forget(descriptor)
            self._paused.add(descriptor)
            return
        try:
            data = os.read(descriptor, min(agent.PIECE, self._credit))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(descriptor)
            return
        self._credit -= len(data)
        self._loop.send(self._reading[descriptor], self._number, data)

    def _close(self, descriptor: int) -> None:
        self._loop.forget(descriptor)
        self._paused.discard(descriptor)
        del self._reading[descriptor]
        os.close(descriptor)


def _late(loop: agent.Loop) -> LateChannel | None:
    return next((each for each in loop.channels.values() if isinstance(each, LateChannel)), None)


# ── All programs ──────────────────────────────────────────────────────────────────────────────────


def processes() -> list[int]:
    """Every process of programs, by number: not ours, nor those of the kernel itself."""
    helpers = {1, os.getpid()}
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in helpers]


def _programs(loop: agent.Loop) -> list[int]:
    return [pid for pid in processes() if pid not in loop.helpers and not _is_of_the_kernel(pid)]


def _is_of_the_kernel(pid: int) -> bool:
    """It has no program; nor has one that waits to be reaped."""
    try:
        os.readlink(f"/proc/{pid}/exe")
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _tasks(loop: agent.Loop) -> int:
    """How many processes and threads there are beside interpreters that wait for their next order."""
    count = 0
    for pid in _programs(loop):
        try:
            count += len(os.listdir(f"/proc/{pid}/task"))
        except OSError:
            continue
    waiting = [each for each in loop.channels.values() if isinstance(each, CellServer) and each._result is None]
    return max(0, count - len(waiting))


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read(4096).rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return "X"


def _hold(loop: agent.Loop, number: int, order: dict[str, Any], data: bytes) -> None:
    """Stop all programs. Those that are stopped already stay so when the others go on."""
    if loop.held is None:
        loop.held = {pid for pid in _programs(loop) if _state(pid) in "Tt"}
    for _ in range(_ROUNDS):  # some may just be forked
        moving = [pid for pid in sorted(_programs(loop)) if _state(pid) not in _STOPPED]
        for pid in moving:
            _signal(pid, signal.SIGSTOP)
        if not moving:
            break
        os.sched_yield()
    loop.tell(b"R", number, {"status": 0 if not moving else 1})


def _go_on(loop: agent.Loop, number: int, order: dict[str, Any], data: bytes) -> None:
    held, loop.held = loop.held or set(), None
    # Children first: a shell that goes on before its job would find that stopped.
    for pid in sorted(set(_programs(loop)) - held, reverse=True):
        _signal(pid, signal.SIGCONT)
    loop.tell(b"R", number, {"status": 0})


def _kill(loop: agent.Loop, number: int, order: dict[str, Any], data: bytes) -> None:
    """End all programs; the guest stays."""
    for _ in range(_ROUNDS):
        found = _programs(loop)
        for pid in found:
            _signal(pid, signal.SIGKILL)
        if not found:
            break
        os.sched_yield()
    loop.tell(b"R", number, {"status": 0})


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        return


def _folder(pid: int) -> str | None:
    place = f"/proc/{pid}/cwd"
    try:
        return os.readlink(place) if os.stat(place).st_nlink else None
    except OSError:
        return None


def _peak(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return int(file.read().partition(b"\nVmHWM:")[2].split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return 0


# ── Ports ─────────────────────────────────────────────────────────────────────────────────────────


class PortConnection(agent.ChannelStreams):
    """To a port on the guest's own loopback. `D` and `1` are its bytes, and each side ends by itself."""

    def __init__(self, loop: agent.Loop, number: int, order: dict[str, Any], data: bytes) -> None:
        super().__init__(loop, number)
        self._socket = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._socket.connect_ex(("127.0.0.1", order["port"]))
        loop.watch(self._socket.fileno(), self._connected, write=True)

    def _connected(self) -> None:
        self._loop.forget(self._socket.fileno())
        problem = self._socket.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR)
        if problem:
            self._socket.close()
            self._loop.over(self._number, {"failed": os.strerror(problem), "errno": problem})
            return
        self._loop.tell(b"N", self._number, {"connected": True})
        self._input = os.dup(self._socket.fileno())
        self._read(self._socket.fileno(), b"1")
        self._write()

    def take(self, kind: bytes, body: bytes) -> None:
        if kind == b"X":
            self._close_ours()
            if self._socket.fileno() >= 0:  # it is not connected yet
                self._loop.forget(self._socket.fileno())
                self._socket.close()
            self._loop.over(self._number, {"status": 0})
        else:
            super().take(kind, body)

    def _close(self, descriptor: int) -> None:
        self._socket.detach()
        super()._close(descriptor)

    def _write(self) -> None:
        if self._input >= 0 or self._socket.fileno() < 0:  # else it waits until it is connected
            super()._write()

    def _close_input(self) -> None:
        if self._input >= 0 and self._socket.fileno() >= 0:
            with contextlib.suppress(OSError):
                self._socket.shutdown(_socket.SHUT_WR)
        super()._close_input()
        self._end_if_over()

    def _end_if_over(self) -> None:
        if not self._reading and self._socket.fileno() < 0 and self._number in self._loop.channels:
            super()._close_input()
            self._loop.over(self._number, {"status": 0})


# ── Files ─────────────────────────────────────────────────────────────────────────────────────────


class ListOutput(agent.Run):
    """Which files there are in the output folder, if anything there is another than at the last look: by a child of
    ours, since reading them takes as long as programs want."""

    def __init__(self, loop: agent.Loop, number: int, order: dict[str, Any], data: bytes) -> None:
        work = {"do": "run", "env": {}, "cwd": "/", "plain": True, "work": lambda: _listed(loop.guest.output, order)}
        super().__init__(loop, number, work, b"")


def _changed(loop: agent.Loop, number: int, order: dict[str, Any], data: bytes) -> ListOutput | None:
    look: list[tuple[int, int, int, int]] = []
    _look_at(loop.guest.output, look, 0)
    if look == loop.seen and not order.get("again"):
        loop.tell(b"R", number, {"status": 0, "same": True})
        return None
    loop.seen = look
    if not look:
        loop.tell(b"R", number, {"status": 0})
        return None
    return ListOutput(loop, number, order, data)


def _look_at(folder: str, look: list[tuple[int, int, int, int]], depth: int) -> None:
    """The metadata of everything beneath."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if len(look) >= _MAX_ENTRIES:
                    return
                found = entry.stat(follow_symlinks=False)
                look.append((found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
                if stat.S_ISDIR(found.st_mode) and depth < _DEEPEST:
                    _look_at(entry.path, look, depth + 1)
    except OSError:
        return


def _listed(folder: str, order: dict[str, Any]) -> None:
    """Write every file with its size and digest, and what is left out and why, to standard output."""
    listing = _Listing(order["max_bytes"], order["max_files"])
    listing.folder(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW), b"")
    told = json.dumps({"files": listing.files, "skipped": listing.skipped, "unnamed": listing.unnamed}).encode()
    with open(1, "wb", closefd=False) as output:
        output.write(told)


class _Listing:
    def __init__(self, max_bytes: int, max_files: int) -> None:
        self.files: list[tuple[str, int, str]] = []
        self.skipped: dict[str, str] = {}
        self.unnamed = 0
        self._bytes_left = max_bytes
        self._files_left = max_files

    def folder(self, folder: int, inside: bytes, depth: int = 1) -> None:
        try:
            for name in sorted(map(os.fsencode, os.listdir(folder))):
                path = inside + name
                try:
                    why = self._entry(folder, name, path, depth)
                except OSError as problem:
                    why = f"it cannot be read: {os.strerror(problem.errno or 0)}"
                if why is not None:
                    self._skip(path, why)
        finally:
            os.close(folder)

    def _entry(self, folder: int, name: bytes, path: bytes, depth: int) -> str | None:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if len(path) > _LONGEST_PATH:
            return f"its path is longer than {_LONGEST_PATH} bytes"
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        if stat.S_ISDIR(found.st_mode):
            if depth >= _DEEPEST:
                return f"it is deeper than {_DEEPEST} folders"
            self.folder(os.open(name, flags | os.O_DIRECTORY, dir_fd=folder), path + b"/", depth + 1)
            return None
        if not stat.S_ISREG(found.st_mode):
            kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
            return f"it is {kinds.get(stat.S_IFMT(found.st_mode), 'a device')}"
        if self._files_left <= 0:
            return "there are too many files"
        if found.st_size > self._bytes_left:
            return f"it has {found.st_size} bytes, and {self._bytes_left} more may be collected"
        self._file(os.open(name, flags, dir_fd=folder), path, found.st_size)
        return None

    def _file(self, file: int, path: bytes, most: int) -> None:
        digest = _sha256()
        size = 0
        try:
            while True:
                piece = os.read(file, min(262_144, most + 1 - size))
                if not piece:
                    break
                digest.update(piece)
                size += len(piece)
                if size > most:
                    self._skip(path, "it grew while it was read")
                    return
        finally:
            os.close(file)
        self._files_left -= 1
        self._bytes_left -= size
        self.files.append((os.fsdecode(path), size, digest.hexdigest()))

    def _skip(self, path: bytes, why: str) -> None:
        if len(self.skipped) < _MAX_REASONS:
            self.skipped[os.fsdecode(path)] = why
        else:
            self.unnamed += 1


def _sha256() -> Any:
    """Without the library that `hashlib` loads, where that is possible."""
    try:
        from _sha2 import sha256  # type: ignore[import-not-found, unused-ignore] # noqa: PLC0415 - in the guest; it has this name since Python 3.12
    except ImportError:
        from hashlib import sha256  # noqa: PLC0415
    return sha256()


agent.ORDERS.update(
    cells=CellServer,
    step=AgentStep,
    late=LateChannel,
    connect=PortConnection,
    hold=_hold,
    go_on=_go_on,
    kill=_kill,
    changed=_changed,
)
