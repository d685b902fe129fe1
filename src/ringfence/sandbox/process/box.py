"""The supervisor's end of one box: its descriptors, and what it and its zygote say of it."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringfence.box import Limits
from ringfence.errors import Unavailable
from ringfence.model import Json
from ringfence.sandbox.patience import Pace
from ringfence.sandbox.process import host
from ringfence.sandbox.process.cgroup import Group
from ringfence.sandbox.process.denials import Account, Denials
from ringfence.sandbox.process.groups import Groups
from ringfence.sandbox.process.hub import Hub
from ringfence.sandbox.process.member import Ended, Member, received
from ringfence.sandbox.process.parts import Parts
from ringfence.sandbox.process.uncounted import Watched
from ringfence.sandbox.waiting import shielded

CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Shared:
    """What all boxes of a backend have in common on the supervisor's side."""

    hub: Hub
    groups: Groups
    pace: Pace = field(default_factory=Pace)


class Box:
    """A box from its fork to its removal."""

    def __init__(self, number: int, slot: int, channel: socket.socket, limits: Limits, shared: Shared) -> None:
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
        """Who it is on the host, where that is not the supervisor's own user."""
        self.whose_id: Json = {}
        """The same for a person: whether anybody else has that id, and why."""
        self.worker = 0
        """The process that runs the program, as the host counts; inside, and to the zygote, it has other numbers."""
        self.group: Group | None = None
        self.known: list[int] = []
        """Its processes when somebody last looked, without the first, which never works."""
        self.tasks = 0
        """Their threads, where no control group counts."""
        self.clocks: dict[int, tuple[float, float]] = {}
        """Processor time of each of them then, and of those that it had waited for."""
        self.ended_ms = 0.0
        """Processor time of those that have ended, as far as it was seen."""
        self.parts = Parts()
        self.descriptors: dict[str, int] = {}
        self.trouble: list[str] = []
        self.begun = False
        self.ended: asyncio.Future[Ended | None] = loop.create_future()
        self.left: asyncio.Future[None] = loop.create_future()
        """The program has ended; until its box has, too, there is little to do."""
        self._program = -1
        self.members: dict[int, Member] = {}
        """Of a box that stays: every process that was started in it and lives, by its number."""
        self._leavers: list[Member] = []
        """Those that ended before what they started did: it may still ask."""
        self.on_removed: Callable[[], object] = lambda: None
        self.bid: Callable[[dict[str, Any], list[int]], None] = _nobody
        """Has its zygote do something for it. Raises OSError where that is gone."""
        self._errand: asyncio.Future[list[int]] | None = None
        self._channel: socket.socket | None = channel
        self._handle = -1
        """Of its first process, with which everything else in it ends."""
        self._unwanted = False
        self._closed: asyncio.Future[None] = loop.create_future()
        self._clock = loop.call_later(self.pace.allow(CLOSE_SECONDS), self._late)
        self.seen: list[str] = []
        self.inherited: list[str] = []
        """Steps that its zygote went through for it, and read back."""
        self.isolation: Json = {}
        """What was read back of it from the kernel once it was closed."""
        self.hub.add(channel.fileno(), self._hear)

    # ── Before the order ──

    async def closed(self) -> None:
        """Wait until every confinement step is done and the worker is there. Raises Unavailable."""
        await shielded(self._closed)

    @property
    def is_in_the_making(self) -> bool:
        return not self._closed.done()

    def when_closed(self, call: Callable[[asyncio.Future[None]], None]) -> None:
        """The same for whoever does not wait."""
        self._closed.add_done_callback(call)

    def _late(self) -> None:
        if self._channel is not None:
            self._hear()  # where everything stood still, it may have been in time
        if self._handle >= 0 and not self._unwanted:
            return
        if not self._closed.done():
            self.fail("it was not ready in time")
        self.kill()
        again = self.pace.allow(CLOSE_SECONDS)
        self._clock = asyncio.get_running_loop().call_later(again, self._late)  # until it is gone

    def _be_closed(self) -> None:
        self._handle = self.descriptors.pop("first")
        if self._unwanted:
            self.kill()
        if not self._closed.done():
            self.isolation = host.read_back(self.worker) | dict.fromkeys(self.seen, True)
            self._clock.cancel()
            self._closed.set_result(None)

    def fail(self, text: str) -> None:
        self.trouble.append(text)
        if not self._closed.done():
            self._closed.set_exception(Unavailable("no_box", f"the box could not be made: {text}"))
            self._closed.exception()  # whoever waited for it may be gone

    # ── What its zygote does for it ──

    async def errand(self, order: dict[str, Any], descriptors: Sequence[int] = ()) -> list[int]:
        """One at a time. The descriptors that came of it. Raises Unavailable."""
        waiting: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._errand = waiting
        try:
            if self._handle < 0 or self.ended.done():
                raise OSError("it is gone")
            self.bid(order, [self._handle, *descriptors])
            async with asyncio.timeout(self.pace.allow(CLOSE_SECONDS)):
                return await waiting
        except (OSError, TimeoutError) as exc:
            raise Unavailable("no_box", f"the box could not be made ready: {exc or 'it took too long'}") from None
        finally:
            self._errand = None

    def did(self, descriptors: list[int], problem: str | None = None) -> None:
        """What became of an errand."""
        waiting = self._errand
        if waiting is None or waiting.done():
            for descriptor in descriptors:
                os.close(descriptor)
        elif problem is None:
            waiting.set_result(descriptors)
        else:
            waiting.set_exception(OSError(problem))

    # ── The order, and what comes back ──

    def order(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Straight to the worker. Raises OSError where the box is gone."""
        assert self._channel is not None
        # What it says from now on can wait until it has ended.
        self.hub.remove(self._channel.fileno())
        with contextlib.suppress(OSError):  # its zygote says how it ended
            self._program = os.pidfd_open(self.worker)
            self.hub.add(self._program, self._leave)
        # Last: whoever gets it may have this core from then on.
        socket.send_fds(self._channel, [marshal.dumps(message)], descriptors)

    def _leave(self) -> None:
        """The program has ended: end what it left. Its zygote would, too, as soon as it gets to it."""
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

    def _hear(self) -> None:
        """One message: where there are more, we are called again."""
        assert self._channel is not None
        data, descriptors, sender = next(received(self._channel, self.hub), (b"", [], 0))
        word, _, rest = data.decode("utf-8", "replace").partition(" ")
        if word == "closed" and not self.worker:
            listed, _, seen = rest.partition("\n")
            self.seen, self.worker, names = seen.split(" "), sender, listed.split(" ")
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
        """Its first process, as the host counts; 0 where that has ended."""
        try:
            with open(f"/proc/self/fdinfo/{self._handle}", encoding="ascii") as file:
                return max(0, int(file.read().rpartition("\nPid:\t")[2].split()[0]))
        except (OSError, ValueError, IndexError):
            return 0

    def pass_on(self) -> socket.socket:
        """Its channel, to somebody else: a box that stays has one for each of its processes."""
        assert self._channel is not None
        channel, self._channel = self._channel, None
        self.hub.remove(channel.fileno())
        return channel

    @property
    def workers(self) -> list[int]:
        """The processes that were started in it, as the host counts."""
        return [member.pid for member in self.members.values() if member.pid] or [self.worker]

    def outlived(self, member: Member) -> None:
        """It ended; what it started may go on."""
        self._leavers = [each for each in (*self._leavers, member) if each.denials.descriptor is not None]

    def denials(self) -> Iterator[Denials]:
        """Of every process that was started in it and may still ask."""
        return (member.denials for member in (*self._leavers, *self.members.values()))

    def lives(self) -> bool:
        """Whether its first process is there; its zygote may not have told yet that it is not."""
        if self.ended.done():
            return False
        return not _is_over(self._handle)

    def kill(self) -> None:
        """Its first process, and so all of it; where it is not there yet, as soon as it is."""
        self._unwanted = True
        if self._handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        elif not self.ended.done():
            with contextlib.suppress(OSError):  # its zygote is gone, and with it the box
                self.bid({"errand": "end"}, [])

    def over(self, ended: Ended | None) -> None:
        """It was reaped; None where nobody was there to reap it."""
        if self._channel is not None:
            self._hear()
        if not self._closed.done():
            self._closed.set_exception(Unavailable("no_box", "the box ended before it was ready"))
            self._closed.exception()
        if not self.ended.done():
            self.ended.set_result(ended)
        if not self.left.done():
            self.left.set_result(None)
        self.did([], "it ended")
        for member in (*self._leavers, *self.members.values()):
            member.left(None)
            member.hear_no_more()
        self.members.clear()

    # ── Tear-down ──

    def remove(self) -> bool:
        """Let go of everything of it. False where something could not be removed: `trouble` says what."""
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
                self._groups.give_back(self.group, self.limits, reaped=reaped)
            except OSError as exc:
                self.trouble.append(f"its control group could not be removed: {exc}")
                clean = False
            self.group = None
        if clean:
            self.on_removed()
        return clean


def _is_over(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def _nobody(order: dict[str, Any], descriptors: list[int]) -> None:
    raise OSError("it has no zygote")
