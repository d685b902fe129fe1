"""The supervisor's end of a box: its descriptors, its processes, and the messages of these and of their zygote."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import select
import signal
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from typing import Any

from ringfence.core.aio import shielded
from ringfence.core.box import Limits
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.core.record import dataclass, plain
from ringfence.sandbox.process.cgroups.cgroup import Group, GroupPool
from ringfence.sandbox.process.host import capabilities
from ringfence.sandbox.process.limits.pulse import Pulse
from ringfence.sandbox.process.limits.shared_pages import Parts
from ringfence.sandbox.process.limits.uncounted import Locks, Watched
from ringfence.sandbox.process.memory_file import memory_file
from ringfence.sandbox.process.patience import MachinePace, Patience
from ringfence.sandbox.process.seccomp.notifications import MAX_DENIALS, Account, Denials

_READY_AT_ONCE = 64
_ANCILLARY = socket.CMSG_SPACE(64 * 4) + socket.CMSG_SPACE(12)
_MESSAGES_AT_ONCE = 32
_LONGEST_MESSAGE = 64 * 1024
_PASSES_RIGHTS = 83  # SO_PASSRIGHTS
CLOSE_SECONDS = 10.0


class Hub:
    """Many descriptors behind one reader of the event loop: each callback runs when there is something to read, or when
    the last writer is gone.

    A box has half a dozen that live for milliseconds; what the loop does for each would cost more than reading it."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._called: dict[int, Callable[[], object]] = {}
        self._resting: dict[int, asyncio.TimerHandle] = {}
        self.pulse = Pulse()
        self.locks = Locks()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._poll.fileno(), self._receive)

    def add(self, descriptor: int, call: Callable[[], object]) -> None:
        self._poll.register(descriptor, select.EPOLLIN)
        self._called[descriptor] = call

    def change(self, descriptor: int, call: Callable[[], object]) -> None:
        """Another callback for a descriptor, which may have been removed before."""
        self._awake(descriptor)
        if descriptor not in self._called:
            self._poll.register(descriptor, select.EPOLLIN)
        self._called[descriptor] = call

    def rest(self, descriptor: int, seconds: float) -> None:
        """Look at a descriptor again only after so long."""
        call = self._called.get(descriptor)
        if call is not None:
            self.remove(descriptor)
            self._resting[descriptor] = self._loop.call_later(seconds, self.change, descriptor, call)

    def _awake(self, descriptor: int) -> None:
        timer = self._resting.pop(descriptor, None)
        if timer is not None:
            timer.cancel()

    def remove(self, descriptor: int) -> None:
        """Remove a descriptor before it is closed. It may have been removed before."""
        self._awake(descriptor)
        if self._called.pop(descriptor, None) is not None and not self._poll.closed:
            self._poll.unregister(descriptor)

    def _receive(self) -> None:
        for descriptor, _ in self._poll.poll(0, _READY_AT_ONCE):
            # An earlier callback may have removed this one, and another descriptor may have its number by now: the
            # callback finds out by reading, which never waits.
            call = self._called.get(descriptor)
            if call is not None:
                call()

    def close(self) -> None:
        for descriptor in list(self._resting):
            self._awake(descriptor)
        if not self._poll.closed:
            self._loop.remove_reader(self._poll.fileno())
            self._poll.close()


# ── A process that was started in a box: its channel, its handle, and how it ended ────────────────


@plain
class ProcessExit:
    """What the kernel said when a process was reaped, including all processes that it had reaped itself."""

    status: int
    cpu_ms: float
    peak_memory_bytes: int
    """The peak of the largest single process."""
    io_bytes: int

    @classmethod
    def parse(cls, words: list[str]) -> ProcessExit:
        """Parse the words of a zygote."""
        status, cpu_seconds, memory, disk = words[:4]
        return cls(int(status), float(cpu_seconds) * 1000.0, int(memory), int(disk))


def new_channel() -> tuple[socket.socket, socket.socket]:
    """A pair of sockets: our end, on which the kernel names the sender, and the end of a process in a box. Raises
    Unavailable."""
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as exc:
        raise Unavailable("no_box", f"there is no way to a box: {exc}") from None
    ours.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return ours, theirs


def receive(channel: socket.socket) -> tuple[bytes, list[int], int]:
    """A message, the descriptors that came with it, and the process that sent it, as the kernel says."""
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
    """Refuse descriptors from now on (Linux 6.16); on older kernels they are closed as they come."""
    with contextlib.suppress(OSError):
        channel.setsockopt(socket.SOL_SOCKET, _PASSES_RIGHTS, 0)


def _send_order(channel: socket.socket, message: dict[str, Any], descriptors: list[int]) -> None:
    """Send an order; one that is too long for a message goes as a file, which is then the last descriptor."""
    data = marshal.dumps(message)
    if len(data) <= _LONGEST_MESSAGE:
        socket.send_fds(channel, [data], descriptors)
        return
    file = memory_file(data)
    try:
        socket.send_fds(channel, [marshal.dumps({"long": True})], [*descriptors, file])
    finally:
        os.close(file)


def received(channel: socket.socket, hub: Hub) -> Iterator[tuple[bytes, list[int], int]]:
    """A few of the messages that wait in a channel. A channel whose other end is gone is removed from the hub."""
    for _ in range(_MESSAGES_AT_ONCE):
        try:
            data, descriptors, sender = receive(channel)
        except BlockingIOError:
            return
        except OSError:
            data = b""
            descriptors = []
            sender = 0
        if not data:
            for descriptor in descriptors:  # an empty message can bring descriptors, too
                os.close(descriptor)
            hub.remove(channel.fileno())
            return
        yield data, descriptors, sender


class BoxMember:
    """A process in a box that stays, from its fork until it is reaped."""

    def __init__(self, number: int, hub: Hub, account: Account | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.pid = 0
        """As the host numbers it."""
        self.begun = False
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[ProcessExit | None] = loop.create_future()
        self._account = account or Account(0)
        self.denials = Denials(None, self._account)
        self.on_message: Callable[[bytes], None] = lambda _: None
        """Called with each message of its program, once it has its order."""
        self.on_denial: Callable[[], None] = lambda: None
        self._hub = hub
        self._channel: socket.socket | None = None
        self._handle = -1
        self._doomed = False
        """Kill it as soon as its handle is here."""

    @property
    def alive(self) -> bool:
        return not self.ended.done()

    # ── Messages of its zygote ──

    def born(self, handle: int) -> None:
        self._handle = handle
        if self.ended.done():
            self._close()
        elif self._doomed:
            self.kill()

    def left(self, ended: ProcessExit | None) -> None:
        if self._channel is not None:
            self._receive()
        if not self.ended.done():
            self.ended.set_result(ended)
        self.fail("it ended before it was ready")
        self._close()

    async def closed_in_time(self, pace: MachinePace) -> None:
        """Wait until it has gone through every step. Where no Landlock keeps them apart, programs of its box may stop
        it meanwhile: it is killed if it takes too long. Raises Unavailable."""
        clock = asyncio.get_running_loop().call_later(pace.allow(CLOSE_SECONDS), self._late)
        try:
            await shielded(self.ready)
        except asyncio.CancelledError:
            self.ready.add_done_callback(lambda _: self.kill())
            raise
        finally:
            if self.ready.done():
                clock.cancel()

    def _late(self) -> None:
        if self._channel is not None:
            self._receive()  # if the whole supervisor stood still, it may have been in time
        if not self.ready.done():
            self.fail("it was not ready in time, as if something had stopped it")
            self.kill()

    def fail(self, text: str) -> None:
        if not self.ready.done():
            self.ready.set_exception(Unavailable("no_process", f"no process could be started in the box: {text}"))
            self.ready.exception()

    # ── Channel ──

    def listen(self, channel: socket.socket) -> None:
        self._channel = channel
        self._hub.add(channel.fileno(), self._receive)

    def closed(self, pid: int, denials: int | None) -> None:
        """It has gone through every step, and waits for its order."""
        self.pid = pid
        self.denials = Denials(denials, self._account)
        if self._channel is not None:
            take_no_descriptors(self._channel)
        if denials is not None:
            self._hub.add(denials, self._deny)
        if not self.ready.done():
            self.ready.set_result(None)

    def order(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Send its order. Raises OSError where it is gone."""
        if self._channel is None:
            raise BrokenPipeError(32, "the process is gone")
        _send_order(self._channel, message, descriptors)

    def _receive(self) -> None:
        if self._channel is None:
            return
        for data, descriptors, sender in received(self._channel, self._hub):
            if self.ready.done():
                for descriptor in descriptors:
                    os.close(descriptor)
                if sender != self.pid:
                    continue  # a child that kept the channel has nothing to say
                if data == b"begun" and not self.begun:
                    self.begun = True
                else:
                    self.on_message(data)
                if self._channel is None:
                    return  # the callback ended it
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
            self.stop_answering()  # what its program left behind is gone, or goes on without end
        elif not more:
            self._hub.remove(self.denials.descriptor)
        elif pause := self.denials.pause:
            self._hub.rest(self.denials.descriptor, pause)
        self.on_denial()

    # ── End ──

    def signal(self, number: int, *, group: bool = False) -> None:
        """Signal the process, or all of its process group, which it leads unless its program left it."""
        if self._handle < 0:
            self._doomed = self._doomed or number == signal.SIGKILL
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group and self.pid:
                os.killpg(self.pid, number)
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL, group=True)

    def _close(self) -> None:
        if self._channel is not None:
            self._hub.remove(self._channel.fileno())
            self._channel.close()
            self._channel = None
        self.on_denial = lambda: None
        if not self.denials.in_use:
            self.stop_answering()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def stop_answering(self) -> None:
        """Close the descriptor: from now on the kernel answers what its program left behind with ENOSYS."""
        if self.denials.descriptor is not None:
            self._hub.remove(self.denials.descriptor)
            os.close(self.denials.descriptor)
            self.denials.descriptor = None


# ── The box ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class SharedServices:
    """What all boxes of a backend share on the supervisor's side."""

    hub: Hub
    groups: GroupPool
    pace: MachinePace = field(default_factory=MachinePace)


class Box:
    """A box from its fork to its removal."""

    def __init__(self, number: int, slot: int, channel: socket.socket, limits: Limits, shared: SharedServices) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.slot = slot
        self.limits = limits
        self.hub = shared.hub
        self.reclaim: Callable[[], object] = lambda: None
        self.account = Account(limits.memory_bytes, lambda: self.reclaim())
        self.watched = Watched()
        self._groups = shared.groups
        self.pace = shared.pace
        self.host_id: int | None = None
        """Its user id on the host, where that is not the supervisor's own."""
        self.host_id_fact: Json = {}
        """The `host_id` fact: whether the id is the box's alone, and if not, why."""
        self.worker = 0
        """The process that runs the program, as the host numbers it; inside it has another number."""
        self.group: Group | None = None
        self.known: list[int] = []
        """Its processes at the last look, without the first, which never works."""
        self.tasks = 0
        """Their threads, where no control group counts."""
        self.clocks: dict[int, tuple[float, float]] = {}
        """Processor time of each of them then, and of those that it had waited for."""
        self.ended_ms = 0.0
        """Processor time of those that have ended, as far as it was seen."""
        self.parts = Parts()
        self.descriptors: dict[str, int] = {}
        self.written: tuple[str, ...] = ("workspace",)
        """The descriptors of the file systems that it may write to, which are kept in memory."""
        self.trouble: list[str] = []
        self.begun = False
        self.warmed = False
        """Whether it worked before it was ready, which is no work of its program."""
        self.ended: asyncio.Future[ProcessExit | None] = loop.create_future()
        self.left: asyncio.Future[None] = loop.create_future()
        """Done when the program has ended; its box may still be ending."""
        self._program = -1
        self.members: dict[int, BoxMember] = {}
        """In a box that stays: every live process that was started in it, by its number."""
        self._leavers: list[BoxMember] = []
        """Members that ended before the processes they had started: those may still ask us."""
        self.on_removed: Callable[[], object] = lambda: None
        self.tell_zygote: Callable[[dict[str, Any], list[int]], None] = _no_zygote
        """Sends its zygote a request for it. Raises OSError where the zygote is gone."""
        self.makers: Callable[[], Iterable[int]] = tuple
        """The processes that make it, while it is being made."""
        self._request: asyncio.Future[list[int]] | None = None
        self._channel: socket.socket | None = channel
        self._handle = -1
        """A pidfd of its first process; everything else in the box ends with that process."""
        self._unwanted = False
        self._closed: asyncio.Future[None] = loop.create_future()
        self._clock = loop.call_later(self.pace.allow(CLOSE_SECONDS), self._late)
        self._patience: Patience | None = None
        self.seen: list[str] = []
        self.inherited: list[str] = []
        """Steps that its zygote did for it and read back."""
        self.isolation: Json = {}
        """What the kernel said of it once it was closed."""
        self.hub.add(channel.fileno(), self._receive)

    # ── Before the order ──

    async def closed(self) -> None:
        """Wait until every confinement step is done and the worker is there. Raises Unavailable."""
        await shielded(self._closed)

    @property
    def is_being_made(self) -> bool:
        return not self._closed.done()

    def when_closed(self, call: Callable[[asyncio.Future[None]], None]) -> None:
        """Call back when `closed` would return."""
        self._closed.add_done_callback(call)

    def _late(self) -> None:
        if self._channel is not None:
            self._receive()  # if the whole process stood still, the box may have been in time
        if self._handle >= 0 and not self._unwanted:
            return
        if not self._closed.done():
            # The time has come on a usual machine; on one that is this slow it is over when nothing moves any more.
            self._patience = self._patience or Patience(self.makers, CLOSE_SECONDS)
            if not self._patience.is_over():
                self._clock = asyncio.get_running_loop().call_later(self._patience.pause, self._late)
                return
            self.fail("it was not ready in time")
        self.kill()
        again = self.pace.allow(CLOSE_SECONDS)
        self._clock = asyncio.get_running_loop().call_later(again, self._late)  # until it is gone

    def _be_closed(self) -> None:
        self._handle = self.descriptors.pop("first")
        if self._unwanted:
            self.kill()
        if not self._closed.done():
            self.isolation = capabilities.read_back(self.worker) | dict.fromkeys(self.seen, True)
            self._clock.cancel()
            self._closed.set_result(None)

    def fail(self, text: str) -> None:
        self.trouble.append(text)
        if not self._closed.done():
            self._closed.set_exception(Unavailable("no_box", f"the box could not be made: {text}"))
            self._closed.exception()  # the caller that waited may be gone

    # ── Requests to its zygote ──

    async def ask_zygote(self, order: dict[str, Any], descriptors: Sequence[int] = ()) -> list[int]:
        """Send a request, one at a time, and return the descriptors that it produced. Raises Unavailable."""
        waiting: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._request = waiting
        try:
            if self._handle < 0 or self.ended.done():
                raise OSError("it is gone")
            self.tell_zygote(order, [self._handle, *descriptors])
            async with asyncio.timeout(self.pace.allow(CLOSE_SECONDS)):
                return await waiting
        except (OSError, TimeoutError) as exc:
            raise Unavailable("no_box", f"the box could not be made ready: {exc or 'it took too long'}") from None
        finally:
            self._request = None

    def request_done(self, descriptors: list[int], problem: str | None = None) -> None:
        """Take the result of a request."""
        waiting = self._request
        if waiting is None or waiting.done():
            for descriptor in descriptors:
                os.close(descriptor)
        elif problem is None:
            waiting.set_result(descriptors)
        else:
            waiting.set_exception(OSError(problem))

    # ── The order, and what comes back ──

    def order(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Send the order straight to the worker. Raises OSError where the box is gone."""
        assert self._channel is not None
        # Its messages from now on can wait until it has ended.
        self.hub.remove(self._channel.fileno())
        with contextlib.suppress(OSError):  # its zygote reports how it ended
            self._program = os.pidfd_open(self.worker)
            self.hub.add(self._program, self._leave)
        # Last: the worker may take this core from then on.
        _send_order(self._channel, message, descriptors)

    def _leave(self) -> None:
        """End what the program left when it has ended. Its zygote does so as well, but later."""
        if not _is_over(self._program):
            return
        self._forget_program()
        self.kill()
        if not self.left.done():
            self.left.set_result(None)

    def _forget_program(self) -> None:
        if self._program >= 0:
            self.hub.remove(self._program)
            os.close(self._program)
            self._program = -1

    def _receive(self) -> None:
        """Read one message; the hub calls again if there are more."""
        assert self._channel is not None
        data, descriptors, sender = next(received(self._channel, self.hub), (b"", [], 0))
        word, _, rest = data.decode("utf-8", "replace").partition(" ")
        if word == "closed" and not self.worker:
            listed, _, seen = rest.partition("\n")
            self.seen = seen.split(" ")
            self.worker = sender
            names = listed.split(" ")
            if len(names) == len(descriptors):
                self.descriptors = dict(zip(names, descriptors, strict=True))
                self._be_closed()
                return
            self.fail("its descriptors were lost: there are too many here")
            self.kill()
        for descriptor in descriptors:
            os.close(descriptor)
        if word == "begun":
            self.begun = True
        elif word == "failed":
            self.fail(rest)

    @property
    def first(self) -> int:
        """Its first process, as the host numbers it; 0 where that has ended."""
        try:
            with open(f"/proc/self/fdinfo/{self._handle}", encoding="ascii") as file:
                return max(0, int(file.read().rpartition("\nPid:\t")[2].split()[0]))
        except (OSError, ValueError, IndexError):
            return 0

    def release_channel(self) -> socket.socket:
        """Give away its channel: a box that stays has one for each of its processes."""
        assert self._channel is not None
        channel, self._channel = self._channel, None
        self.hub.remove(channel.fileno())
        return channel

    @property
    def workers(self) -> list[int]:
        """The processes that were started in it, as the host numbers them."""
        return [member.pid for member in self.members.values() if member.pid] or [self.worker]

    def outlived(self, member: BoxMember) -> None:
        """Keep a member that ended while processes that it started may go on."""
        self._leavers = [each for each in (*self._leavers, member) if each.denials.descriptor is not None]

    def denials(self) -> Iterator[Denials]:
        """The denials of every process that was started in it and may still make system calls."""
        return (member.denials for member in (*self._leavers, *self.members.values()))

    def lives(self) -> bool:
        """Whether its first process is there; its zygote may not have reported its end yet."""
        if self.ended.done():
            return False
        return not _is_over(self._handle)

    def kill(self) -> None:
        """Kill its first process, and with it all of the box; if there is none yet, as soon as there is."""
        self._unwanted = True
        if self._handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        elif not self.ended.done():
            with contextlib.suppress(OSError):  # its zygote is gone, and the box with it
                self.tell_zygote({"request": "end"}, [])

    def over(self, ended: ProcessExit | None) -> None:
        """It was reaped; `ended` is None where its zygote was gone."""
        if self._channel is not None:
            self._receive()
        if not self._closed.done():
            self._closed.set_exception(Unavailable("no_box", "the box ended before it was ready"))
            self._closed.exception()
        if not self.ended.done():
            self.ended.set_result(ended)
        if not self.left.done():
            self.left.set_result(None)
        self.request_done([], "it ended")
        for member in (*self._leavers, *self.members.values()):
            member.left(None)
            member.stop_answering()
        self.members.clear()

    # ── Tear-down ──

    def remove(self) -> bool:
        """Release everything of it. False where something could not be removed yet: `trouble` says what.

        Its slot is free once all of it is gone.
        """
        clean = True
        self._clock.cancel()
        self._forget_program()
        if self._channel is not None:
            self.hub.remove(self._channel.fileno())
            self._channel.close()
            self._channel = None
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors = {}
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        if self.group is not None:
            try:
                reaped = self.ended.done() and self.ended.result() is not None
                self._groups.give_back(self.group, self.limits, reaped=reaped, removed=self.on_removed)
            except OSError as exc:
                self.trouble.append(f"its control group could not be removed yet: {exc}")
                clean = False
            self.group = None
        if clean:
            self.on_removed()
        return clean


def _is_over(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def _no_zygote(order: dict[str, Any], descriptors: list[int]) -> None:
    raise OSError("it has no zygote")
