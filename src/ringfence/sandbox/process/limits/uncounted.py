"""Kernel memory that a box takes, and that neither its control group nor the accounts of its processes show.

A program makes the kernel keep things for it: datagrams that were not read, locks on parts of files, descriptors to be
waited for. Where nothing else counts them, we count them here, by what /proc shows, and only where there are so many
that it matters.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from ringfence.core.record import plain

_FEW_BYTES = 4 << 20
"""Sockets that cannot hold more together are not worth reading one by one."""
_STREAM_BYTES = 512 << 10
"""The most that a TCP connection of a box can hold, both ways: the kernel enlarges its buffers no further by itself."""
_SOCKET_BYTES = 4096
"""What the kernel keeps for a TCP socket in which nothing waits. A connection that was not accepted yet is one, and has
no descriptor, so that no other limit is met."""
_UNREAD_BYTES = 256 << 10
"""The most that a connection which was not accepted yet can hold for who will accept it; nothing is sent on it."""
_CLOSED_BYTES = 256
"""What the kernel keeps for a while of a connection that was closed."""
_TCP = ("tcp", "tcp6")
_LISTENS = "0A"
_OPEN = ("01", "08")
"""The states of a connection whose own end was not closed, as /proc names them."""
_LOCK_BYTES = 256
_FEW_LOCKS = 1000
_MAX_LOCKS = 5000
"""In one box: no honest program has as many."""
_MAX_LISTED = 100_000
"""The most entries of the host's list that are read. A box that hides behind as many locks of others needs twenty
other boxes for it."""
_LOCKS_SECONDS = 0.2
"""How old the list may be: it is one for the whole host."""
_PIECE_SECONDS = 0.02
"""The longest time one read of the list takes: enough to find the locks of one box that has too many, unless the
machine is busy."""
_BREATH = 3.0
"""For so many times as long as reading took, the list is not read again."""
_WATCH_BYTES = 1024
"""About 200 in truth. They count for more, so that few have to be read before a box has too many."""
_FEW_WATCHERS = 8
MAX_WATCHERS = 256
"""Epoll instances of one box, where nothing else limits what they hold."""
MAX_FILTERS = 32
"""Filters for system calls that the programs of one box have installed at the same time."""
_READ_BYTES = 1 << 18
_REST = 20.0
"""For so many times as long as a count took, there is no other."""


def datagrams(pid: int) -> int:
    """Bytes that wait in the UDP sockets of the network of a process. Among them are copies of what was sent, which a
    program asks for by asking for the time of sending: no control group is charged for these."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        if _sockets(pid, "UDP")[0] * _received_bytes() > _FEW_BYTES:
            return sum(each.unread for name in ("udp", "udp6") for each in _listed(pid, name))
    return 0


def unlisted(pid: int, room: int) -> int:
    """The most that sockets of the network of a process can hold that no list shows, because they have no address, or
    none any more, if that could be more than `room`. They hold what was sent, as above."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        hidden = _all_sockets(pid) - sum(_sockets(pid, kind)[0] for kind in ("TCP", "UDP"))
        if hidden * _received_bytes() > room:
            hidden -= Path(f"/proc/{pid}/net/unix").read_bytes().count(b"\n") - 1
            return max(0, hidden) * _received_bytes()
    return 0


def _all_sockets(pid: int) -> int:
    """All sockets of a network, of whatever kind."""
    return int(Path(f"/proc/{pid}/net/sockstat").read_text().split(None, 3)[2])


@cache
def _received_bytes() -> int:
    """The most that waits in one socket; boxes cannot enlarge it."""
    return _of_a_new_socket(socket.SO_RCVBUF)


@cache
def sent_bytes() -> int:
    """The most that was sent on one socket and not received yet, likewise."""
    return _of_a_new_socket(socket.SO_SNDBUF)


def _of_a_new_socket(option: int) -> int:
    """By asking one: containers do not see the kernel's settings in /proc/sys on Linux 6.1."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as new:
        return new.getsockopt(socket.SOL_SOCKET, option)


def streams(pid: int, room: int) -> int:
    """Bytes that TCP connections of the network of a process may hold, where they could be more than `room`.

    One in which anything waits counts whole: what the kernel keeps for a byte is not known. A socket can be connected
    to itself, so that no server is needed.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        sockets, closed = _sockets(pid, "TCP")
        least = sockets * _SOCKET_BYTES + closed * _CLOSED_BYTES
        if least > room:
            return least  # too many, and a list so long is not worth reading
        if least + sockets * _STREAM_BYTES > room:
            return least + _STREAM_BYTES * sum(bool(each.unread or each.unsent) for each in _connections(pid))
    return 0


def unaccepted(pid: int, room: int) -> int:
    """Bytes that the kernel keeps for TCP connections of the network of a process that no program has accepted, or
    that were closed, where they could be more than `room`.

    A connection is made when a packet arrives, which is nobody's work: no control group is charged for it, nor for what
    is sent to it, before it is accepted.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        sockets, closed = _sockets(pid, "TCP")
        least = closed * _CLOSED_BYTES
        if least + sockets * (_SOCKET_BYTES + _UNREAD_BYTES) <= room:
            return 0
        waiting = sum(each.unread for name in _TCP for each in _listening(pid, name))
        least += waiting * _SOCKET_BYTES
        if least > room or least + waiting * _UNREAD_BYTES <= room:
            return least
        return least + _UNREAD_BYTES * sum(each.waits_with_data for each in _connections(pid))
    return 0


def _sockets(pid: int, kind: str) -> tuple[int, int]:
    """How many there are, and how many were closed that the kernel still remembers."""
    total = closed = 0
    for name in ("sockstat", "sockstat6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines():
                words = line.split()
                if words[0] in (f"{kind}:", f"{kind}6:"):
                    total += int(words[2])
                    closed += int(words[6]) if words[5:6] == ["tw"] else 0
    return total, closed


@plain
class _Listed:
    """A socket in the lists of /proc."""

    state: str
    unsent: int
    unread: int
    """Bytes; where it listens, the connections that wait to be accepted."""
    inode: str

    @property
    def waits_with_data(self) -> bool:
        """Whether it belongs to no program yet, and holds more than the news that its other end was closed."""
        return self.inode == "0" and self.state in _OPEN and self.unread > 1


def _listed(pid: int, name: str) -> Iterator[_Listed]:
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/net/{name}", encoding="ascii") as lines:
        next(lines)
        for line in lines:
            words = line.split()
            unsent, _, unread = words[4].partition(":")
            yield _Listed(words[3], int(unsent, 16), int(unread, 16), words[9])


def _listening(pid: int, name: str) -> Iterator[_Listed]:
    """They come first, so that the rest of the list need not be read."""
    return itertools.takewhile(lambda each: each.state == _LISTENS, _listed(pid, name))


def _connections(pid: int) -> Iterator[_Listed]:
    return (each for name in _TCP for each in _listed(pid, name) if each.state != _LISTENS)


class Locks:
    """The number of locks on parts of files that each process holds, by the list of all on this host.

    Boxes and others can make the list long, and the kernel walks it from its start for each page of it that is read.
    A long list is therefore read in pieces, so that it never keeps us busy.
    """

    def __init__(self, path: str = "/proc/locks") -> None:
        self._path = path
        self._next = float("-inf")
        self._list: int | None = None
        self._rest = b""
        self._seen: set[bytes] = set()
        self._listed = 0
        self._now: dict[bytes, int] = {}
        """By process, as far as the list was read."""
        self._before: dict[bytes, int] = {}
        """The same when the list was last read to its end."""

    def held(self, pids: Callable[[], Iterable[int]], limit: int) -> int:
        """Bytes that the locks of these processes take; more than `limit` where there are too many to be honest."""
        now = time.monotonic()
        if now >= self._next:
            more = self._read_on(now + _PIECE_SECONDS)
            took = (time.monotonic() - now) * _BREATH
            self._next = now + (took if more else max(_LOCKS_SECONDS, took))
        if max(sum(self._now.values()), sum(self._before.values())) < _FEW_LOCKS:
            return 0
        words = [b"%d" % pid for pid in pids()]
        count = sum(max(self._now.get(word, 0), self._before.get(word, 0)) for word in words)
        return count * _LOCK_BYTES if count < _MAX_LOCKS else max(count * _LOCK_BYTES, limit + 1)

    def _read_on(self, until: float) -> bool:
        """Read a piece of the list, and tell whether there is more."""
        try:
            if self._list is None:
                self._list = os.open(self._path, os.O_RDONLY)
            while self._listed < _MAX_LISTED and (page := os.read(self._list, _READ_BYTES)):
                self._count(page)
                if time.monotonic() >= until:
                    return True
        except OSError:
            pass  # not to be read here
        self._before, self._now, self._rest, self._listed = self._now, {}, b"", 0
        self._seen.clear()
        if self._list is not None:
            os.close(self._list)
            self._list = None
        return False

    def _count(self, page: bytes) -> None:
        """Lines such as `1: POSIX  ADVISORY  WRITE 123 00:2a:17 0 EOF`, in which `-> ` stands before one that waits.

        Locks that are made while we read move others back, so that we meet these twice. A process cannot have the same
        lock twice, except those of whole files (`FLOCK`): it has one for each time that it has opened the file.
        """
        *lines, self._rest = (self._rest + page).split(b"\n")
        for line in lines:
            lock = line.partition(b": ")[2].removeprefix(b"-> ")
            words = lock.split(None, 4)
            if len(words) == 5 and (words[0] == b"FLOCK" or lock not in self._seen):
                self._seen.add(lock)
                self._listed += 1
                self._now[words[3]] = self._now.get(words[3], 0) + 1


class Watched:
    """The number of descriptors that the processes of one box watch with epoll."""

    def __init__(self) -> None:
        self._next = 0.0
        self._bytes = 0

    def held(self, watchers: int, pids: Iterable[int], limit: int) -> int:
        """Bytes; `watchers` is the largest possible number of epoll instances, and counting may end at `limit`.

        A user has only so many watches on the host, so that an eighth of all counts as the whole limit.
        """
        now = time.monotonic()
        if watchers <= _FEW_WATCHERS:
            return 0
        if now >= self._next:
            each = max(_WATCH_BYTES, limit * 8 // _most_watches())
            count = 0
            for fdinfo in instances(pids):
                count += fdinfo.count(b"tfd:")
                if count * each > limit:
                    break
            self._bytes = count * each
            self._next = now + (time.monotonic() - now) * _REST
        return self._bytes


def instances(pids: Iterable[int]) -> Iterator[bytes]:
    """The fdinfo of each epoll instance, once for every process that has it.

    A link in /proc names the kind of a descriptor, but only to its own user, which may be another because of the
    ids of boxes.
    """
    for pid in pids:
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fdinfo"):
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    with open(f"/proc/{pid}/fdinfo/{number}", "rb", buffering=0) as file:
                        fdinfo = file.read(_READ_BYTES)
                    if b"tfd:" in fdinfo or _essence(fdinfo) == _empty_one():
                        yield fdinfo


def _essence(fdinfo: bytes) -> list[bytes]:
    """Without position and flags: the inode, and the lines of this kind of descriptor."""
    return [line for line in fdinfo.splitlines() if not line.startswith((b"pos:", b"flags:"))]


@cache
def _empty_one() -> list[bytes]:
    """The fdinfo of an epoll instance that watches nothing: they all have the same inode."""
    with select.epoll() as own:
        return _essence(Path(f"/proc/self/fdinfo/{own.fileno()}").read_bytes())


def filters(pids: Iterable[int]) -> int:
    """At most so many filters for system calls have these processes installed: each task counts for itself, since
    nothing tells which filters it shares with others."""
    count = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError):
                    count += max(0, _filters_of(f"{pid}/task/{task}") - _filters_of("self") - 1)
    return count


def _filters_of(task: str) -> int:
    """Boxes begin with those of the supervisor and one more."""
    return int(Path(f"/proc/{task}/status").read_bytes().partition(b"\nSeccomp_filters:")[2].split(None, 1)[0])


@cache
def _most_watches() -> int:
    try:
        return max(1, int(Path("/proc/sys/fs/epoll/max_user_watches").read_text()))
    except (OSError, ValueError):
        return 1 << 20
