"""A guest that stays: interpreters that keep their state, commands, files, until it is ended.

Everything in it goes through its agent, over one stream. A pause stops the programs first, by their agent, and then the
whole guest, by its engine: so the guest can go on for a moment, for its agent to reach files, and programs do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from socket import socket
from typing import Any

from ringfence.core.aio import shielded
from ringfence.core.box import BoxReport, Limit, Limits
from ringfence.core.errors import Unavailable, beginning
from ringfence.core.model import Json
from ringfence.core.record import plain
from ringfence.core.sessions import Command, Tell
from ringfence.sandbox.files.guarded import Held
from ringfence.sandbox.guests.command import GuestCommand
from ringfence.sandbox.guests.engine import Guest, GuestRoot, GuestUsage
from ringfence.sandbox.guests.files import GuestFiles, GuestPlaces
from ringfence.sandbox.guests.files_call import WayToFiles
from ringfence.sandbox.guests.interpreter import GuestInterpreter
from ringfence.sandbox.guests.late_output import GuestLateOutput
from ringfence.sandbox.guests.link import GuestGone, Link, said
from ringfence.sandbox.guests.outputs import GuestOutputs
from ringfence.sandbox.guests.port import connected
from ringfence.sandbox.guests.step import GuestStep, whole
from ringfence.sandbox.process.host.capabilities import check_words
from ringfence.sandbox.process.late_work import LateWork
from ringfence.sandbox.process.outlet import NetworkOutlet, difference
from ringfence.sandbox.process.seccomp.notifications import Account, Denials

_LOOK_SECONDS = (0.02, 0.25)
"""How often its use is looked at while a step runs: at first, and after a while."""
_REST_SECONDS = 1.0
"""The same between steps, where something may run."""
_ORDER_SECONDS = 60.0


@plain
class WhatRuns:
    """What interpreters and commands of a guest are started with."""

    root: GuestRoot
    env: Mapping[str, str]
    limits: Limits
    places: GuestPlaces
    setups: tuple[str, ...] = ()
    """Python source that each interpreter runs before its first cell."""
    lacks_interpreter: str | None = None
    """Why no interpreter can serve cells in it, if none can."""


class StayingGuest:
    """A guest that stays."""

    def __init__(
        self,
        guest: Guest,
        link: Link,
        runs: WhatRuns,
        isolation: Mapping[str, Any],
        denials: tuple[Denials, Account],
        outlet: NetworkOutlet | None,
        removing: Callable[[], Awaitable[None]],
    ) -> None:
        """`removing`: removes all that was made for it, once it has ended."""
        self.guest = guest
        self.link = link
        self.isolation = isolation
        self.env = runs.env
        self.limits = runs.limits
        self.mounted: Held = {}
        self.denials, self._account = denials
        self.outlet = outlet
        self.paused = False
        self.late_output = GuestLateOutput()
        self.outputs = GuestOutputs(link, runs.limits.disk_bytes, lambda: self._account.file_mappings, self.awake)
        self._runs = runs
        self._removing = removing
        self._frozen = False
        self._awake = 0
        self._turn = asyncio.Lock()
        """For what stops the guest, or lets it go on."""
        self._reopen_network = False
        self._steps: set[GuestStep] = set()
        self._tasks = 0
        """What else than steps and waiting interpreters ran in it when its agent last said so."""
        self._cpu_at_rest: float | None = None
        """Its processor time when its last step was over and no other ran."""
        self._used = GuestUsage(0, 0.0)
        self._ooms = self._refused = 0
        self._reported_network: Mapping[str, Any] = {}
        self._unreported = LateWork()
        self._carrying: set[asyncio.Task[None]] = set()
        self._looking = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._watching = loop.create_task(self._watch())
        self._removal = loop.create_task(self._remove())
        self.denials.is_late = lambda task: not self._steps
        self._deny()
        link.gone.add_done_callback(lambda _: guest.kill())
        late = link.open({"do": "late"})
        late.on_output = self.late_output.feed

    def files(self, on_host: tuple[str, ...] = ()) -> GuestFiles:
        way = WayToFiles(self.link, asyncio.get_running_loop(), wake=self.wake, doze=self.doze, end=self.guest.kill)
        return GuestFiles(way, replace(self._runs.places, on_host=on_host))

    # ── What runs in it ──

    async def interpreter(self) -> GuestInterpreter:
        """Start an interpreter, empty but for its set-up code. Raises Unavailable, SetUpFailed."""
        self._check_interpreter()
        root = self._runs.root
        with beginning("an interpreter"):
            interpreter = GuestInterpreter(self)
            await interpreter.start(root.python, root.version)
        for source in self._runs.setups:
            await interpreter.set_up(source, self.limits)
        return interpreter

    async def command(self, command: Command, tell: Tell) -> GuestCommand:
        """Start a command. Raises Unavailable, or ValueError for words that no program can be started with."""
        check_words(command.argv, {**self.env, **command.env})
        if command.source is not None and not self._runs.root.python:
            self._check_interpreter()
        with beginning("the command"):
            running = GuestCommand(self, command, tell)
            await running.start()
            return running

    def _check_interpreter(self) -> None:
        if self._runs.lacks_interpreter is not None:
            raise Unavailable("no_interpreter", self._runs.lacks_interpreter)

    def python(self) -> tuple[str, bool]:
        """The interpreter for programs, and whether it reads what we compiled."""
        root = self._runs.root
        return root.python, root.version == sys.version_info[:2]

    # ── Steps ──

    async def step_begins(self, step: GuestStep) -> None:
        """What was done since the last one is late work of earlier steps."""
        if self._steps or self._tasks == 0:
            return
        if step.reported:
            step.late.tasks = self._tasks
        files, _ = await self.outputs.changed()
        step.late.files = files
        if self._cpu_at_rest is not None:
            step.late.cpu_ms = max(0.0, self.cpu_ms() - self._cpu_at_rest)

    def step_began(self, step: GuestStep) -> None:
        if not self._steps:
            self._look_at_use()
            step.late.limit = "memory" if self.out_of_memory() else self.new_limit_met()
        if self.outlet is not None:
            now = step.network_before = self.outlet.facts()
            if now != self._reported_network:
                step.late.network = difference(self._reported_network, now)
            if step.may_send and self.paused:
                self._reopen_network = True
            elif step.may_send:
                self.outlet.go_on()
        self._steps.add(step)
        self._looking.set()

    def step_over(self, step: GuestStep, told: Json | None) -> None:
        if step not in self._steps:
            return
        self._look_at_use()
        step.cpu_after = self._used.cpu_ms
        self._steps.discard(step)
        self._tasks = whole(told, "tasks") or 0
        if not self._steps:
            self._cpu_at_rest = step.cpu_after
        if self.outlet is not None and not self._steps and not self._tasks:
            self.outlet.hold()

    def late_fact(self, step: GuestStep) -> Mapping[str, Any] | None:
        """The `late` fact of a step that is over. Each piece of work is reported once."""
        self._unreported.add(LateWork(denials=dict(self.denials.late)))
        self.denials.late.clear()
        self._unreported.add(step.late)
        if not step.reported:
            return None
        if (fact := self._unreported.fact()) is not None:
            self._unreported = LateWork()
        return fact

    def report_later(self, report: BoxReport) -> None:
        """Report the denials and the files of a step of ours, such as set-up code, with the next that is reported."""
        self._unreported.add(LateWork(denials=dict(report.denials), files=report.files))

    def network_fact(self, step: GuestStep) -> Mapping[str, Any] | None:
        if self.outlet is None:
            return None
        now = self.outlet.facts()
        if step.reported:
            self._reported_network = now
        return difference(step.network_before, now)

    def leaves_work(self) -> bool:
        return self.outlet is not None and not self.outlet.held

    def runs_on(self) -> bool:
        """As its agent said after the last step: what has ended since may still count."""
        return bool(self._steps) or self._tasks > 0

    # ── What it uses ──

    def _deny(self) -> None:
        descriptor = self.denials.descriptor
        if descriptor is None or self.guest.ended.done():
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(descriptor)
        if not self.denials.answer():
            return
        for step in list(self._steps):
            step.look_at_denials()
        if pause := self.denials.pause:
            loop.call_later(pause, self._deny)
        else:
            loop.add_reader(descriptor, self._deny)

    async def _watch(self) -> None:
        first, last = _LOOK_SECONDS
        pause = first
        while True:
            if not self._steps and not self._tasks:
                self._looking.clear()
                await self._looking.wait()
                pause = first
            await asyncio.sleep(pause if self._steps else _REST_SECONDS)
            pause = min(pause * 1.2, last)
            if not self.paused:
                self._look()

    def _look(self) -> None:
        self._look_at_use()
        used = self._used
        for step in list(self._steps):
            step.look(used.memory_bytes, used.cpu_ms, used.full)
        if used.memory_bytes > self.limits.memory_bytes:
            for step in list(self._steps):
                step.end_as("oom", "memory")
                step.must_end()
            self.kill_all()

    def _look_at_use(self) -> None:
        with contextlib.suppress(OSError, KeyError):  # it is just going
            self._used = self.guest.usage() or self._used

    def memory(self) -> int:
        self._look_at_use()
        return self._used.memory_bytes

    def cpu_ms(self) -> float:
        self._look_at_use()
        return self._used.cpu_ms

    def out_of_memory(self) -> bool:
        """Whether the kernel killed a process for its memory since the last call of this."""
        before, self._ooms = self._ooms, self._used.oom_kills
        return self._ooms > before

    def new_limit_met(self) -> Limit | None:
        """A limit that was met and survived since the last call of this."""
        before, self._refused = self._refused, self._used.processes_refused
        refused, self._account.refused = self._account.refused, False
        return "pids" if self._refused > before else "memory" if refused else None

    def kill_all(self) -> None:
        """Kill every program in it; the guest itself and its files stay."""
        self._order("kill")

    # ── Network ──

    def network_meter(self) -> Callable[[], dict[str, Any] | None]:
        outlet = self.outlet
        if outlet is None:
            return lambda: {"allowed": [], "denied": [], "bytes_in": 0, "bytes_out": 0}
        before = outlet.facts()
        return lambda: outlet.since(before)

    def hold_network(self) -> None:
        self._reopen_network = False
        if self.outlet is not None:
            self.outlet.hold()

    async def connect(self, port: int) -> socket:
        """A connection to this port on its own loopback. Raises OSError, Unavailable."""
        connection, carrying = await connected(self.link, port)
        self._carrying.add(carrying)
        carrying.add_done_callback(self._carrying.discard)
        return connection

    # ── Pause and resume ──

    async def pause(self) -> None:
        """Stop every process, and the clocks of its steps, until `resume`. Raises OSError, Unavailable."""
        async with self._turn:
            if self.paused:
                return
            if self.outlet is not None:  # bytes that are under way must go nowhere either
                self._reopen_network = not self.outlet.held
                self.outlet.hold()
            for step in self._steps:
                step.clock.stop()
            self.paused = True
            try:
                await self._ordered("hold")
                if not self._awake:
                    await self._freeze()
            except BaseException:
                self._order("go_on")
                self._goes_on()
                raise

    async def resume(self) -> None:
        """Raises OSError, Unavailable."""
        async with self._turn:
            if not self.paused:
                return
            await self._thaw()
            try:
                await self._ordered("go_on")
            except Unavailable:  # its programs may run again, and no clock of theirs does
                self.guest.kill()
                raise
            except asyncio.CancelledError:
                self._order("hold")
                raise
            self._goes_on()

    def _goes_on(self) -> None:
        self.paused = False
        if self.outlet is not None and self._reopen_network:
            self.outlet.go_on()
        for step in self._steps:
            step.clock.start()

    async def _freeze(self) -> None:
        if not self._frozen:
            await self.guest.pause()
            self._frozen = True

    async def _thaw(self) -> None:
        if self._frozen:
            await self.guest.resume()
            self._frozen = False

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Within this its agent answers, also where the box is paused; programs stay stopped. Raises OSError and
        Unavailable."""
        await self.wake()
        try:
            yield
        finally:
            await self.doze()

    async def wake(self) -> None:
        self._awake += 1
        if self._frozen or self._turn.locked():
            try:
                async with self._turn:
                    await self._thaw()
            except BaseException:
                self._awake -= 1
                raise

    async def doze(self) -> None:
        """The other end of `wake`."""
        self._awake -= 1
        if self.paused and not self._awake:
            async with self._turn:
                if self.paused and not self._awake and not self.guest.ended.done():
                    await self._freeze()

    def _order(self, what: str) -> None:
        with contextlib.suppress(GuestGone):
            self.link.open({"do": what})

    async def _ordered(self, what: str) -> None:
        """Raises Unavailable."""
        try:
            async with asyncio.timeout(_ORDER_SECONDS):
                result = await self.link.open({"do": what}).result
        except (GuestGone, TimeoutError) as problem:
            raise Unavailable("guest_failed", f"the agent of the box does not answer: {problem}") from None
        if result.get("status") != 0:
            raise Unavailable(
                "guest_failed", f"the agent of the box could not do it: {said(result.get('failed', '?'))}"
            )

    def give_back(self) -> int | None:
        return None

    # ── Its end ──

    async def end(self) -> None:
        """End it and everything in it. Raises Unavailable where a part of it could not be removed."""
        for step in list(self._steps):
            step.end_as("cancelled")
        self.guest.kill()
        await shielded(self._removal)
        if self.guest.trouble:
            raise Unavailable("not_removed", "; ".join(self.guest.trouble))

    async def ended(self) -> str:
        why = await asyncio.shield(self.guest.ended)
        return "; ".join(self.guest.trouble) or why

    async def _remove(self) -> None:
        await asyncio.shield(self.guest.ended)
        self.link.close()
        self._watching.cancel()
        if self.denials.descriptor is not None:
            asyncio.get_running_loop().remove_reader(self.denials.descriptor)
        for task in self._carrying:
            task.cancel()
        for _ in range(1000):  # each reads its last output first
            if not self._steps:
                break
            await asyncio.sleep(0.005)
        if self.outlet is not None:
            await self.outlet.close()
        await self._removing()
