"""The supervisor's end of one process that was started in a box: its channel, its handle, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

from ringfence.errors import Unavailable
from ringfence.plain import plain
from ringfence.sandbox.process.denials import MAX_DENIALS, Account, Denials
from ringfence.sandbox.process.hub import Hub

_ANCILLARY = socket.CMSG_SPACE(64 * 4) + socket.CMSG_SPACE(12)
_AT_ONCE = 32
_PASSES_RIGHTS = 83  # SO_PASSRIGHTS


@plain
class Ended:
    """What the kernel said when a process was reaped, all that it had reaped itself included."""

    status: int
    cpu_ms: float
    peak_memory_bytes: int
    """Of the largest single process."""
    io_bytes: int


def ended(words: list[str]) -> Ended:
    """As a zygote says it."""
    status, cpu, memory, disk = int(words[0]), float(words[1]), int(words[2]), int(words[3])
    return Ended(status, cpu * 1000.0, memory, disk)


def new_channel() -> tuple[socket.socket, socket.socket]:
    """Our end, which tells who wrote, and that of a process in a box. Raises Unavailable."""
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as exc:
        raise Unavailable("no_box", f"there is no way to a box: {exc}") from None
    ours.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return ours, theirs


def receive(channel: socket.socket) -> tuple[bytes, list[int], int]:
    """A message, the descriptors that came with it, and who sent it, as the kernel says."""
    data, ancillary, _, _ = channel.recvmsg(65536, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    sender = 0
    for _, kind, packed in ancillary:
        if kind == socket.SCM_RIGHTS:
            descriptors += struct.unpack(f"{len(packed) // 4}i", packed)
        elif kind == socket.SCM_CREDENTIALS:
            sender = struct.unpack("3i", packed)[0]
    return data, descriptors, sender


def take_no_descriptors(channel: socket.socket) -> None:
    """From now on whoever sends some is refused (Linux 6.16); before that they are closed as they come."""
    with contextlib.suppress(OSError):
        channel.setsockopt(socket.SOL_SOCKET, _PASSES_RIGHTS, 0)


def received(channel: socket.socket, hub: Hub) -> Iterator[tuple[bytes, list[int], int]]:
    """What waits in a channel, a few at once; of one whose other end is gone, nothing is heard any more."""
    for _ in range(_AT_ONCE):
        try:
            data, descriptors, sender = receive(channel)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors, sender = b"", [], 0
        if not data:
            for descriptor in descriptors:  # an empty message can bring some, too
                os.close(descriptor)
            hub.remove(channel.fileno())
            return
        yield data, descriptors, sender


class Member:
    """A process in a box that stays, from its fork until it is reaped."""

    def __init__(self, number: int, hub: Hub, account: Account | None = None, owner: int | None = None) -> None:
        """`owner` is who its box is on the host, where that is not our own user."""
        loop = asyncio.get_running_loop()
        self.number = number
        self.pid = 0
        """As the host counts."""
        self.begun = False
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[Ended | None] = loop.create_future()
        self._account = account or Account(0)
        self._owner = owner
        self.denials = Denials(None, self._account)
        self.heard: Callable[[bytes], None] = lambda _: None
        """Gets what it says once it was given its order."""
        self.on_denial: Callable[[], None] = lambda: None
        self._hub = hub
        self._channel: socket.socket | None = None
        self._handle = -1
        self._doomed = False
        """It is to be killed, and nobody could do it yet."""

    @property
    def alive(self) -> bool:
        return not self.ended.done()

    # ── What its zygote says ──

    def born(self, handle: int) -> None:
        self._handle = handle
        if self.ended.done():
            self._let_go()
        elif self._doomed:
            self.kill()

    def left(self, ended: Ended | None) -> None:
        if self._channel is not None:
            self._hear()
        if not self.ended.done():
            self.ended.set_result(ended)
        self.fail("it ended before it was ready")
        self._let_go()

    def fail(self, text: str) -> None:
        if not self.ready.done():
            self.ready.set_exception(Unavailable("no_process", f"no process could be started in the box: {text}"))
            self.ready.exception()

    # ── Its channel ──

    def listen(self, channel: socket.socket) -> None:
        self._channel = channel
        self._hub.add(channel.fileno(), self._hear)

    def closed(self, pid: int, denials: int | None) -> None:
        """It went through every step, and waits for its order."""
        self.pid, self.denials = pid, Denials(denials, self._account, self._owner)
        if self._channel is not None:
            take_no_descriptors(self._channel)
        if denials is not None:
            self._hub.add(denials, self._deny)
        if not self.ready.done():
            self.ready.set_result(None)

    def order(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Raises OSError where it is gone."""
        if self._channel is None:
            raise BrokenPipeError(32, "the process is gone")
        socket.send_fds(self._channel, [marshal.dumps(message)], descriptors)

    def _hear(self) -> None:
        if self._channel is None:
            return
        for data, descriptors, sender in received(self._channel, self._hub):
            if self.ready.done():
                for descriptor in descriptors:
                    os.close(descriptor)
                if sender != self.pid:
                    continue  # a child of it that kept the channel has nothing to say
                if data == b"begun" and not self.begun:
                    self.begun = True
                else:
                    self.heard(data)
                if self._channel is None:
                    return  # whoever heard it has had enough
                continue
            word, _, rest = data.decode("utf-8", "replace").partition(" ")
            if word == "closed":
                self.closed(sender, descriptors[0] if descriptors else None)
            else:
                self.fail(rest)

    def _deny(self) -> None:
        if self.denials.descriptor is None:
            return
        more = self.denials.answer()
        if self.ended.done() and (not more or self.denials.total > MAX_DENIALS):
            self.hear_no_more()  # what its program left behind is gone, too, or goes on without end
        elif not more:
            self._hub.remove(self.denials.descriptor)
        self.on_denial()

    # ── Its end ──

    def signal(self, number: int, *, group: bool = False) -> None:
        """To the process, or to all of its process group, which it leads unless its program left it."""
        if self._handle < 0:
            self._doomed = self._doomed or number == signal.SIGKILL
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group and self.pid:
                os.killpg(self.pid, number)
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL, group=True)

    def _let_go(self) -> None:
        if self._channel is not None:
            self._hub.remove(self._channel.fileno())
            self._channel.close()
            self._channel = None
        self.on_denial = lambda: None
        if not self.denials.in_use:
            self.hear_no_more()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def hear_no_more(self) -> None:
        """Whatever its program left behind is told from now on that there is no such system call."""
        if self.denials.descriptor is not None:
            self._hub.remove(self.denials.descriptor)
            os.close(self.denials.descriptor)
            self.denials.descriptor = None
