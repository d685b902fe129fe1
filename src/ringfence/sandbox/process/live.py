"""A box that stays: interpreters that keep their state, commands, a workspace, until it is ended.

Everything in it may have been changed by what ran there before, so nothing in it is relied on: each process is forked
by the zygote, goes through every step of confinement by itself, and is told what to run over a channel of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from socket import socket
from typing import Any, NamedTuple

from ringfence.core.aio import shielded
from ringfence.core.box import Limit, Limits
from ringfence.core.errors import Unavailable, beginning
from ringfence.core.sessions import Command, Tell
from ringfence.sandbox.files.guarded import Held
from ringfence.sandbox.process.box import Box, BoxMember
from ringfence.sandbox.process.command import RunningCommand
from ringfence.sandbox.process.interpreter import Interpreter
from ringfence.sandbox.process.late_work import LateWork, OtherTasks, TaskTable
from ringfence.sandbox.process.limits.pulse import BUSY_SECONDS, Rhythm, worked_ms
from ringfence.sandbox.process.outlet import NetworkOutlet
from ringfence.sandbox.process.output_files import OutputFiles
from ringfence.sandbox.process.step import Step
from ringfence.sandbox.process.watch import added_up, descendants, full, reclaim, used_memory, worked
from ringfence.sandbox.process.zygote.confine import Shape
from ringfence.sandbox.process.zygote_handle import ZygoteHandle

_ROUNDS = 8
_LASTING_MS = 5000.0
_LASTING_SECONDS = 0.25
"""From then on a step counts as one that lasts, and is looked at this often."""


class _Rest(NamedTuple):
    """How a box was when the last step was over and none ran any more."""

    cpu_ms: float
    network: Mapping[str, Any]
    known: list[int]
    """Its processes then, and what they had used, where no control group counts: to the nanosecond."""
    worked_ms: float | None


class LiveBox:
    """A box of the process backend that stays."""

    def __init__(self, box: Box, zygote: ZygoteHandle, shape: Shape, isolation: dict[str, Any]) -> None:
        self.box = box
        box.reclaim = partial(reclaim, box)
        self.isolation = isolation
        self.held: Held = {}
        self.env: Mapping[str, str] = {}
        """What everything in it finds in its environment."""
        self.has_interpreter = True
        """Whether one of ours is in it; an image brings its own or none."""
        self.interpreter_path: str | None = None
        """The program that its interpreters are started from; None: they are forks."""
        self._setups: tuple[str, ...] = ()
        """Python source that each interpreter runs before its first cell."""
        self._setup_limits = box.limits
        self.outlet: NetworkOutlet | None = None
        """Its way to the network, where it has one."""
        self.paused = False
        self.outputs = OutputFiles(box.descriptors["workspace"], box.limits.disk_bytes)
        self._zygote = zygote
        self._requests = asyncio.Lock()
        self._shape = shape
        self._next = 1
        self._spare: BoxMember | None = None
        """The process that the box was made with, until one is wanted."""
        self._steps: set[Step] = set()
        self._rhythm = Rhythm(box.hub.pulse, lambda: worked(box), self._look, self._busy_seconds)
        self._removed: asyncio.Task[str] | None = None
        self._ooms = self._denied = 0
        self._first_tasks = 0
        """Tasks of the box itself, which are there before anything runs in it."""
        self._tasks = TaskTable(box)
        self._rest: _Rest | None = None
        """Since the last step was over."""
        self._untold = LateWork()
        self._newcomers: list[int] = []
        """Processes that we started since: what they need to begin, no step has left."""

    def take_over(self) -> None:
        """Once the box is closed: take over its first worker. Raises Unavailable."""
        box = self.box
        member = box.members.get(0)
        if member is None or box.ended.done():
            raise Unavailable("box_ended_at_once", "; ".join(("the box ended as soon as it was made", *box.trouble)))
        member.listen(box.release_channel())
        member.closed(box.worker, box.descriptors.pop("denials", None))
        self._spare = member
        self._first_tasks = ((box.group.tasks_now() if box.group is not None else None) or 1) - 1
        self._removed = asyncio.get_running_loop().create_task(self._remove())
        self._rhythm.rest()

    def exec_interpreters(self, path: str, setups: tuple[str, str | None], limits: Limits) -> None:
        """From now on its interpreters are no forks, and run set-up code first: the template's, and the user's own."""
        self.interpreter_path = path
        self._setup_limits = limits
        self._setups = tuple(source for source in setups if source)
        if setups[1] is not None:
            self.isolation = {**self.isolation, "template": {"setup": "user", "started": "exec"}}

    @property
    def limits(self) -> Limits:
        return self.box.limits

    @property
    def workspace(self) -> int:
        return self.box.descriptors["workspace"]

    @property
    def input(self) -> int | None:
        return self.box.descriptors.get("input")

    @property
    def folders(self) -> Mapping[str, int]:
        """Writable descriptors of the file systems of their own that it has, by where they are."""
        named = enumerate(self._shape.get("folders", ()))
        return {at: self.box.descriptors[f"folder{number}"] for number, (at, _, _) in named}

    @property
    def host_id(self) -> int | None:
        return self.box.host_id

    # ── What runs in it ──

    async def interpreter(self) -> Interpreter:
        """One more interpreter, with nothing in it but what it is set up with. Raises Unavailable, SetUpFailed."""
        self._check_interpreter()
        with beginning("an interpreter"):
            interpreter = Interpreter(self, await self._member())
            if self.interpreter_path is None:
                interpreter.begin()
                return interpreter
            await interpreter.start(self.interpreter_path)
        for source in self._setups:
            await interpreter.set_up(source, self._setup_limits)
        return interpreter

    async def command(self, command: Command, tell: Tell) -> RunningCommand:
        """Start one. Raises Unavailable."""
        if command.source is not None:
            self._check_interpreter()
        await self.outputs.read_ahead()
        with beginning("the command"):
            running = RunningCommand(self, await self._member(), command, tell)
            running.begin()
            return running

    def _check_interpreter(self) -> None:
        if not self.has_interpreter:
            raise Unavailable("no_interpreter", "a box whose root is an image has no interpreter of ours; use commands")

    async def _member(self) -> BoxMember:
        spare, self._spare = self._spare, None
        if spare is not None and spare.alive:
            return spare
        self._next += 1
        member = self._zygote.enter(self.box, self._shape, self._next)
        try:
            await shielded(member.ready)
        except asyncio.CancelledError:
            member.ready.add_done_callback(lambda _: member.kill())
            raise
        self._newcomers.append(member.pid)
        return member

    # ── Watching ──

    def began(self, step: Step) -> None:
        if not self._steps:
            self._charge_late(step)
        if self._has_other_tasks():
            running = {each.member.pid for each in self._steps}
            step.others = OtherTasks(self._tasks, step.member.pid, running)
        self._steps.add(step)
        if self.outlet is not None:
            step.network_before = self.outlet.facts()
        if len(self._steps) == 1:
            self._rhythm.start()
        if self.paused:
            step.clock.stop()

    def over(self, step: Step) -> None:
        self._steps.discard(step)
        if not self._steps:
            self._rhythm.rest()  # what a step left behind may go on
            if step.cpu_after is not None:
                network = self.outlet.facts() if self.outlet is not None else {}
                known = list(self.box.known) if self.box.group is None else []
                self._rest = _Rest(step.cpu_after, network, known, worked_ms(known))

    def _charge_late(self, step: Step) -> None:
        """What was done since the last step was over, by what earlier ones left, is told with this one, but apart."""
        rest = self._rest
        newcomers = self._newcomers
        self._newcomers = []
        if rest is None or (step.cpu_before == rest.cpu_ms and worked_ms(rest.known) == rest.worked_ms is not None):
            return  # who has not run has written nothing
        begun = sum((task.used_ns() or 0) / 1e6 for pid in newcomers if (task := self._tasks.get(pid)) is not None)
        step.late.cpu_ms = max(0.0, step.cpu_before - rest.cpu_ms - begun)
        step.late.files = self.outputs.changed()[0]
        step.late.network = self.outlet.since(rest.network) if self.outlet is not None else None

    def _has_other_tasks(self) -> bool:
        """Whether there are tasks in it which are not the ones that we started, each with its one thread."""
        members = [member.pid for member in self.box.members.values() if member.pid]
        count = self.box.group.tasks_now() if self.box.group is not None else None
        if count is not None:
            return count > self._first_tasks + len(members) or bool(self._steps)
        if self.box.group is None:  # the processor time that it begins with was added up just now
            return self.box.tasks > len(members) or bool(self._steps)
        return len(self._tasks.numbers()) > len(members)

    def late_of(self, step: Step) -> Mapping[str, Any] | None:
        """The fact of what earlier steps left, for a step that is over. What was told once is not told again."""
        for denials in self.box.denials():
            step.late.add(LateWork(denials=denials.late))
            denials.late.clear()
        self._untold.add(step.late)
        if not step.told:
            return None
        if (told := self._untold.told()) is not None:
            self._untold = LateWork()
        return told

    def _busy_seconds(self) -> float:
        """What runs on and on is looked at less often, where the kernel itself holds the limit of memory."""
        held = self.box.group is not None and self.box.group.oom_kills() is not None
        lasting = held and all(step.wall_ms > _LASTING_MS for step in self._steps)
        return _LASTING_SECONDS if lasting else BUSY_SECONDS

    def _look(self) -> None:
        with contextlib.suppress(OSError, KeyError):
            used = self.memory()
            used_up = self._full()
            for step in list(self._steps):
                step.look(used, used_up)
            if used > self.limits.memory_bytes:
                for step in list(self._steps):
                    step.stop("oom", "memory")
                self.kill_all()

    def memory(self) -> int:
        """Bytes in use by all that runs in it; files of the workspace are disk."""
        return used_memory(self.box)

    def cpu_ms(self) -> float:
        """Processor time of all that ran in it; without a group that counts, of what still runs."""
        group = self.box.group
        counted = group.cpu_ms() if group is not None else None
        return counted if counted is not None else added_up(self.box, self.limits.memory_bytes)[1]

    def out_of_memory(self) -> bool:
        """Whether the kernel ended something for its memory since this was last asked."""
        before, self._ooms = self._ooms, (self.box.group.oom_kills() or 0) if self.box.group is not None else 0
        return self._ooms > before

    def met(self) -> Limit | None:
        """A limit that was met and survived since this was last asked; the disk is full until something is removed."""
        group = self.box.group
        denied = (group.pids_denied() or 0) if group is not None else 0
        before, self._denied = self._denied, denied
        refused, self.box.account.refused = self.box.account.refused, False
        return "pids" if denied > before else "memory" if refused else self._full()

    def _full(self) -> Limit | None:
        with contextlib.suppress(OSError, KeyError):
            return full(self.workspace)
        return None

    async def reach(self) -> socket:
        """A socket in its network, not connected yet. Raises Unavailable."""
        async with self._requests:
            return socket(fileno=(await self.box.ask_zygote({"request": "reach"}))[0])

    def asking(self) -> Callable[[], dict[str, Any] | None]:
        """From now on: what it asks of the network."""
        outlet = self.outlet
        if outlet is None:
            return lambda: {"allowed": [], "denied": [], "bytes_in": 0, "bytes_out": 0}
        before = outlet.facts()
        return lambda: outlet.since(before)

    def network_of(self, step: Step) -> Mapping[str, Any] | None:
        """What was asked of the network while this step ran, by whatever runs in the box."""
        return None if self.outlet is None else self.outlet.since(step.network_before)

    def kill_all(self) -> None:
        """Everything that runs in it; the box itself, and its files, stay."""
        if self.box.group is not None:
            with contextlib.suppress(OSError):
                self.box.group.kill()
        else:
            # What has left the process groups of its members, too, and what is born meanwhile.
            for _ in range(_ROUNDS):
                if not self._signal_everything(signal.SIGKILL):
                    break
        for member in list(self.box.members.values()):
            member.kill()

    # ── Standing still ──

    def pause(self) -> None:
        """Nothing in it runs until `resume`; the clocks of its steps stand still, too."""
        if self.paused:
            return
        self.paused = True
        for step in self._steps:
            step.clock.stop()
        group = self.box.group
        if group is not None and group.frozen() is not None:
            group.freeze()
        else:
            self._signal_everything(signal.SIGSTOP)

    def resume(self) -> None:
        if not self.paused:
            return
        self.paused = False
        group = self.box.group
        if group is not None and group.frozen() is not None:
            group.thaw()
        else:
            self._signal_everything(signal.SIGCONT)
        for step in self._steps:
            step.clock.go_on()

    def _signal_everything(self, number: int) -> bool:
        """Twice: what was born meanwhile is found by the second look. Whether anything was there."""
        first = self.box.first
        found = False
        for _ in range(2):
            for pid in descendants(first, *self.box.workers):
                if pid and pid != first:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
                        found = True
        return found

    # ── Its end ──

    async def end(self) -> None:
        """With all that is in it. Raises Unavailable where something of it could not be removed."""
        for step in list(self._steps):
            step.stop("cancelled", None)
        self.resume()
        self.box.kill()
        if self._removed is not None:
            problem = await asyncio.shield(self._removed)
            if problem:
                raise Unavailable("not_removed", problem)

    async def ended(self) -> str:
        await asyncio.shield(self.box.ended)
        return "; ".join(self.box.trouble) or "it was ended"

    async def _remove(self) -> str:
        await asyncio.shield(self.box.ended)
        for step in list(self._steps):
            step.stop("infra", None)
        await asyncio.sleep(0)
        while self._steps:  # what they wrote is still to be read
            await asyncio.sleep(0.005)
        self._rhythm.stop()
        self._tasks.close()
        if self.outlet is not None:
            await self.outlet.close()
        return "" if self.box.remove() else "; ".join(self.box.trouble)
