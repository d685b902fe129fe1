"""A box that stays: interpreters that keep their state, commands, a workspace, until it is ended.

Programs that ran in the box may have changed everything in it, so the supervisor relies on nothing there: the zygote
forks each process, which goes through every step of confinement by itself and gets its orders over its own channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from socket import socket
from typing import Any, NamedTuple

from ringfence.core import system
from ringfence.core.box import BoxReport, ImageRoot, Limit, Limits
from ringfence.core.errors import Unavailable, beginning
from ringfence.core.sessions import Command, Tell
from ringfence.sandbox.files.guarded import Held
from ringfence.sandbox.files.workspace import Workspace
from ringfence.sandbox.process.box import Box, BoxMember
from ringfence.sandbox.process.box_usage import added_up, descendants, full, reclaim, used_memory, worked
from ringfence.sandbox.process.command import RunningCommand
from ringfence.sandbox.process.host.capabilities import check_words
from ringfence.sandbox.process.interpreter import Interpreter, MainThread
from ringfence.sandbox.process.late_work import LateWork, OtherTasks, TaskTable
from ringfence.sandbox.process.limits.pulse import BUSY_SECONDS, Rhythm, worked_ms
from ringfence.sandbox.process.outlet import NetworkOutlet, difference
from ringfence.sandbox.process.output_files import Mappings, OutputFiles
from ringfence.sandbox.process.step import Step
from ringfence.sandbox.process.streams import LateOutput
from ringfence.sandbox.process.zygote.confine import Shape
from ringfence.sandbox.process.zygote_handle import ZygoteHandle

_KILL_ROUNDS = 8
_CONNECT_SECONDS = 5.0
_LONG_STEP_MS = 5000.0
_LONG_STEP_LOOK_SECONDS = 0.25
"""A step that has run longer than that is looked at only this often."""
_STOPPED_SECONDS = 0.25
"""After this time every process that was sent SIGSTOP has stopped."""
_PAUSE_LOOK_SECONDS = 5.0
_MAPS_PIECE = 64 * 1024
_MAX_MOVES = 3
"""How often a process may be found running in a pause: it may have been forked just as the others were stopped."""


class _LastStepEnd(NamedTuple):
    """The state of a box at the moment its last step ended and no other ran."""

    cpu_ms: float
    known: list[int]
    """Its processes at that moment, if no control group counts their processor time."""
    worked_ms: float | None
    """The processor time that these had used."""


class LiveBox:
    """A box of the process backend that stays."""

    def __init__(self, box: Box, zygote: ZygoteHandle, shape: Shape, isolation: dict[str, Any]) -> None:
        self.box = box
        box.reclaim = partial(reclaim, box)
        self.isolation = isolation
        self.mounted: Held = {}
        self.env: Mapping[str, str] = {}
        """Environment variables of every program in it."""
        self.lacks_interpreter = ""
        """Why no interpreter can serve cells in it: its root is an image, which has none that could."""
        self.interpreter_path: str | None = None
        """The program that its interpreters are started from; None: they are forks."""
        self.interpreter_version = sys.version_info[:2]
        self.plain = False
        """Whether that program is an image's own, which runs Python programs without any code of ours."""
        self._setups: tuple[str, ...] = ()
        """Python source that each interpreter runs before its first cell."""
        self._setup_limits = box.limits
        self.outlet: NetworkOutlet | None = None
        """Its route to the network, if it has one."""
        self.paused = False
        self._pause_watch: asyncio.TimerHandle | None = None
        self._reopen_network = False
        """Whether its route is to be opened again when it is resumed."""
        mappings = Mappings(lambda: box.account.file_mappings if self._filter_asks else None, self._maps_files)
        self.outputs = OutputFiles(box.descriptors["workspace"], box.limits.disk_bytes, mappings)
        self._filter_asks = False
        """Whether the seccomp filter of its processes sends us notifications."""
        self.late_output = LateOutput(box.hub)
        self._zygote = zygote
        self._request_lock = asyncio.Lock()
        self._shape = shape
        self._last_number = 1
        self._spare: BoxMember | None = None
        """The process that the box was made with, until that gets an order."""
        self._steps: set[Step] = set()
        self._rhythm = Rhythm(box.hub.pulse, lambda: worked(box), self._check_limits, self._look_interval)
        self._removal: asyncio.Task[str] | None = None
        self._ooms = self._denied = 0
        self._own_tasks = 0
        """Tasks of the box itself, which exist before any program runs in it."""
        self._tasks = TaskTable(box)
        self._last_step_end: _LastStepEnd | None = None
        self._reported_network: Mapping[str, Any] = {}
        """The `network` fact at the last report of a step. Requests after it, and before the first step that is
        reported, are late work for the next report."""
        self._unreported = LateWork()
        """Work between steps that no report contains yet."""
        self._started_since: list[int] = []
        """Processes that we started since the last step: their start-up time is not the work of an earlier step."""

    def adopt_first_worker(self) -> None:
        """Use the first worker of a new box, which is confined by now, for the first order. Raises Unavailable."""
        box = self.box
        member = box.members.get(0)
        if member is None or box.ended.done():
            raise Unavailable("box_ended_at_once", "; ".join(("the box ended as soon as it was made", *box.trouble)))
        member.listen(box.release_channel())
        self._filter_asks = "denials" in box.descriptors
        member.closed(box.worker, box.descriptors.pop("denials", None))
        self._spare = member
        self._own_tasks = ((box.group.tasks_now() if box.group is not None else None) or 1) - 1
        self._removal = asyncio.get_running_loop().create_task(self._remove())
        self._rhythm.rest()

    def exec_interpreters(
        self, path: str, setups: tuple[str, str | None], limits: Limits, image: ImageRoot | None = None
    ) -> None:
        """Start its interpreters by exec from now on, with set-up code first: the template's, then the user's. `image`:
        whose they are."""
        self.interpreter_path = path
        if image is not None:
            self.interpreter_version = image.version
            self.plain = True
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

    def files(self, on_host: tuple[str, ...] = ()) -> Workspace:
        box = self.box
        named = enumerate(self._shape.get("folders", ()))
        of_box = Workspace(
            box.descriptors["disk"],
            box.host_id,
            box.descriptors.get("input"),
            on_host,
            tuple(self._shape["places"]),
            box.descriptors.get("root"),
            is_foreign_user=box.host_id is None and box.host_id_fact.get("whose") == "own",
            folders={at: box.descriptors[f"folder{number}"] for number, (at, _, _) in named},
        )
        # Descriptors of their own: a box that dies closes its own, and what it wrote can still be kept.
        return of_box.again(to_fill=True)

    # ── What runs in it ──

    async def interpreter(self) -> Interpreter:
        """Start an interpreter, empty but for its set-up code. Raises Unavailable, SetUpFailed."""
        self._check_interpreter()
        with beginning("an interpreter"):
            interpreter = Interpreter(self, await self._member())
            if self.interpreter_path is None:
                interpreter.start_fork()
                return interpreter
            await interpreter.start_by_exec(self.interpreter_path, self.interpreter_version)
        for source in self._setups:
            await interpreter.set_up(source, self._setup_limits)
        return interpreter

    async def command(self, command: Command, tell: Tell) -> RunningCommand:
        """Start a command. Raises Unavailable, or ValueError for words that no program can be started with."""
        check_words(command.argv, {**self.env, **command.env})
        if command.source is not None and not self.plain:
            self._check_interpreter()
        await self.outputs.read_ahead()
        with beginning("the command"):
            running = RunningCommand(self, await self._member(), command, tell)
            running.start()
            return running

    def _check_interpreter(self) -> None:
        if self.lacks_interpreter:
            raise Unavailable("no_interpreter", f"{self.lacks_interpreter}; use commands")

    async def _member(self) -> BoxMember:
        spare, self._spare = self._spare, None
        if spare is not None and spare.alive:
            return spare
        self._last_number += 1
        member = self._zygote.enter(self.box, self._shape, self._last_number)
        await member.closed_in_time(self.box.pace)
        self._started_since.append(member.pid)
        return member

    # ── Watching ──

    def step_began(self, step: Step) -> None:
        self._charge_late_network(step)
        if not self._steps:
            self._charge_late(step)
            step.late.limit = "memory" if self.out_of_memory() else self._new_limit_met()
        if self._has_other_tasks():
            running = {each.member.pid for each in self._steps}
            step.others = OtherTasks(self._tasks, step.member.pid, running)
        self._steps.add(step)
        if len(self._steps) == 1:
            self._rhythm.start()
        if self.paused:
            step.clock.stop()

    def step_over(self, step: Step) -> None:
        self._steps.discard(step)
        if not self._steps:
            self._rhythm.rest()  # slower, and not stopped: processes that a step left may still run
            if step.cpu_after is not None:
                known = list(self.box.known) if self.box.group is None else []
                self._last_step_end = _LastStepEnd(step.cpu_after, known, worked_ms(known))
        if self.outlet is not None and not self._has_work():
            self.outlet.hold()

    def _charge_late_network(self, step: Step) -> None:
        """Report with this step, as late work, what left the box since the last report; and open its route again."""
        if self.outlet is None:
            return
        now = self.outlet.facts()
        step.network_before = now
        if now != self._reported_network:
            step.late.network = difference(self._reported_network, now)
        if step.may_send and self.paused:
            self._reopen_network = True
        elif step.may_send:
            self.outlet.go_on()

    def _charge_late(self, step: Step) -> None:
        """Report with this step, as late work, what processes left by earlier steps did since the last one was over."""
        last = self._last_step_end
        started = self._started_since
        self._started_since = []
        if last is None or (step.cpu_before == last.cpu_ms and worked_ms(last.known) == last.worked_ms is not None):
            return  # none of them has run, so none has written anything
        begun = sum((task.used_ns() or 0) / 1e6 for pid in started if (task := self._tasks.get(pid)) is not None)
        step.late.cpu_ms = max(0.0, step.cpu_before - last.cpu_ms - begun)
        step.late.files = self.outputs.changed()[0]

    def _has_other_tasks(self) -> bool:
        """Whether the box has tasks besides the main threads of its members, which wait for orders."""
        if self._steps:
            return True
        members = [member.pid for member in self.box.members.values() if member.pid]
        count = self.box.group.tasks_now() if self.box.group is not None else None
        if count is not None:
            return count > self._own_tasks + len(members)
        if self.box.group is None:  # the processor time that it begins with was added up just now
            return self.box.tasks > len(members)
        return len(self._tasks.numbers()) > len(members)

    def leaves_work(self) -> bool:
        """Whether anything can still use the route out after the step that is being reported: another step, a
        background command, or a process that a step left. If not, the route was shut when the step was over, and stays
        shut until the next one begins: a timer of a waiting interpreter, or bytes in the kernel, send nothing."""
        return self.outlet is not None and not self.outlet.held

    def _has_work(self) -> bool:
        try:
            return self.box.lives() and self._has_other_tasks()
        except (OSError, KeyError):  # it is gone
            return False

    def runs_on(self) -> bool:
        """Whether anything in the box could act before the next step. Unlike `leaves_work` this examines waiting
        interpreters, too, which may have timers. That takes too long for every step."""
        return self._has_work() or any(map(self._may_act, list(self.box.members.values())))

    def _may_act(self, member: BoxMember) -> bool:
        if member is self._spare or not member.pid:
            return False  # it has had no order yet
        main = MainThread(member.pid)
        try:
            return not main.acts_only_on_orders()
        except ProcessLookupError:
            return False
        except OSError:  # what we cannot see, we cannot exclude
            return True
        finally:
            main.close()

    def _maps_files(self, most: int) -> bool:
        """Whether a process in the box has a shared, writable mapping of a file in the workspace. Programs decide how
        many memory areas they have: if the list of them has more than `most` bytes, the answer is yes. Also called in
        threads."""
        device = os.fstat(self.workspace).st_dev
        word = b" %02x:%02x " % (os.major(device), os.minor(device))
        for pid in self._processes():
            with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb", buffering=0) as maps:
                rest = b""
                while data := maps.read(_MAPS_PIECE):
                    most -= len(data)
                    if most < 0:
                        return True
                    listed = rest + data
                    *lines, rest = listed.split(b"\n")
                    if word in listed and any(word in line and line.split(None, 2)[1].endswith(b"s") for line in lines):
                        return True
        return False

    def late_fact(self, step: Step) -> Mapping[str, Any] | None:
        """The `late` fact of a step that is over. Each piece of work is reported once."""
        for denials in self.box.denials():
            step.late.add(LateWork(denials=denials.late))
            denials.late.clear()
        self._unreported.add(step.late)
        if not step.reported:
            return None
        if (fact := self._unreported.fact()) is not None:
            self._unreported = LateWork()
        return fact

    def report_later(self, report: BoxReport) -> None:
        """Report the denials and the files of a step of ours, such as set-up code, with the next step that is reported.
        Its network is part of that anyway, and its processor time is a cost of starting an interpreter."""
        self._unreported.add(LateWork(denials=dict(report.denials), files=report.files))

    def _look_interval(self) -> float:
        """Long steps are looked at less often, where the kernel itself enforces the memory limit."""
        held = self.box.group is not None and self.box.group.oom_kills() is not None
        lasting = held and all(step.wall_ms > _LONG_STEP_MS for step in self._steps)
        return _LONG_STEP_LOOK_SECONDS if lasting else BUSY_SECONDS

    def _check_limits(self) -> None:
        with contextlib.suppress(OSError, KeyError):
            used = self.memory()
            used_up = self._disk_limit()
            for step in list(self._steps):
                step.look(used, used_up)
            if used > self.limits.memory_bytes:
                for step in list(self._steps):
                    step.stop("oom", "memory")
                self.kill_all()

    def memory(self) -> int:
        """Bytes of memory in use by all its processes. Files in the workspace count as disk."""
        return used_memory(self.box)

    def cpu_ms(self) -> float:
        """Processor time of everything that ran in it; if no control group counts that, of what still runs."""
        group = self.box.group
        counted = group.cpu_ms() if group is not None else None
        return counted if counted is not None else added_up(self.box, self.limits.memory_bytes)[1]

    def out_of_memory(self) -> bool:
        """Whether the kernel killed a process for its memory since the last call of this."""
        before, self._ooms = self._ooms, (self.box.group.oom_kills() or 0) if self.box.group is not None else 0
        return self._ooms > before

    def survived_limit(self) -> Limit | None:
        """A limit that was met and survived since the last call of this. A full disk stays full until files go."""
        return self._new_limit_met() or self._disk_limit()

    def _new_limit_met(self) -> Limit | None:
        group = self.box.group
        denied = (group.pids_denied() or 0) if group is not None else 0
        before, self._denied = self._denied, denied
        refused, self.box.account.refused = self.box.account.refused, False
        return "pids" if denied > before else "memory" if refused else None

    def _disk_limit(self) -> Limit | None:
        with contextlib.suppress(OSError, KeyError):
            return full(self.workspace)
        return None

    async def connect(self, port: int) -> socket:
        """A connection to this port on its own loopback. Raises OSError, Unavailable."""
        async with self._request_lock:
            way = socket(fileno=(await self.box.ask_zygote({"request": "reach"}))[0])
        try:
            way.setblocking(False)
            async with asyncio.timeout(_CONNECT_SECONDS):
                await asyncio.get_running_loop().sock_connect(way, ("127.0.0.1", port))
        except BaseException:
            way.close()
            raise
        return way

    def network_meter(self) -> Callable[[], dict[str, Any] | None]:
        """A function that returns the `network` fact of what happened since this call."""
        outlet = self.outlet
        if outlet is None:
            return lambda: {"allowed": [], "denied": [], "bytes_in": 0, "bytes_out": 0}
        before = outlet.facts()
        return lambda: outlet.since(before)

    def network_fact(self, step: Step) -> Mapping[str, Any] | None:
        """The `network` fact of all the box did while this step ran."""
        if self.outlet is None:
            return None
        now = self.outlet.facts()
        if step.reported:
            self._reported_network = now
        return difference(step.network_before, now)

    def kill_all(self) -> None:
        """Kill every process in it; the box itself and its files stay."""
        if self.box.group is not None:
            with contextlib.suppress(OSError):
                self.box.group.kill()
        else:
            # Several rounds, to reach processes that left the groups of their members or were forked meanwhile.
            for _ in range(_KILL_ROUNDS):
                if not self._signal_all(signal.SIGKILL):
                    break
        for member in list(self.box.members.values()):
            member.kill()

    # ── Pause and resume ──

    async def pause(self) -> None:
        """Stop every process, and the clocks of its steps, until `resume`."""
        if self.paused:
            return
        self.paused = True
        if self.outlet is not None:  # a process that goes on all the same, or bytes in the kernel, must send nothing
            self._reopen_network = not self.outlet.held
            self.outlet.hold()
        for step in self._steps:
            step.clock.stop()
        group = self.box.group
        if group is not None and group.frozen() is not None:
            group.freeze()
        else:
            self._signal_all(signal.SIGSTOP)
            self._pause_watch = asyncio.get_running_loop().call_later(_STOPPED_SECONDS, self._check_pause, 0, {})

    def _check_pause(self, moved: int, worked_before: Mapping[int, int]) -> None:
        """Without a freezer a program can have itself continued, for example by a timer. It is stopped again, and if
        that does not help, the box is ended. Programs that ran since the last check show it by processor time."""
        if not self.paused or self.box.ended.done():
            return
        worked_now, moving = _stopped_tasks(pid for pid in self._processes() if pid != self.box.first)
        ran = any(ticks > worked_before.get(task, -1) for task, ticks in worked_now.items()) if worked_before else False
        if moving or ran:
            moved += 1
            if moved > _MAX_MOVES:
                self.box.trouble.append("it went on while it was paused")
                self.box.kill()
                return
            self._signal_all(signal.SIGSTOP)
        seconds = _STOPPED_SECONDS if moving else _PAUSE_LOOK_SECONDS
        loop = asyncio.get_running_loop()
        self._pause_watch = loop.call_later(seconds, self._check_pause, moved, worked_now)

    def _processes(self) -> Iterator[int]:
        return (pid for pid in descendants(self.box.first, *self.box.workers) if pid)

    async def resume(self) -> None:
        self._go_on()

    def _go_on(self) -> None:
        if not self.paused:
            return
        self.paused = False
        if self._pause_watch is not None:
            self._pause_watch.cancel()
            self._pause_watch = None
        group = self.box.group
        if group is not None and group.frozen() is not None:
            group.thaw()
        else:
            self._signal_all(signal.SIGCONT)
        if self.outlet is not None and self._reopen_network:
            self.outlet.go_on()
        for step in self._steps:
            step.clock.start()

    def hold_network(self) -> None:
        self._reopen_network = False
        if self.outlet is not None:
            self.outlet.hold()

    def give_back(self) -> int | None:
        group = self.box.group
        return group.give_back() if self.paused and group is not None and group.gives_back() else None

    def _signal_all(self, number: int) -> bool:
        """Signal every process, in two rounds because some may fork meanwhile. Returns whether there were any."""
        first = self.box.first
        found = False
        for _ in range(2):
            for pid in self._processes():
                if pid != first:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
                        found = True
        return found

    # ── Its end ──

    async def end(self) -> None:
        """End the box and everything in it. Raises Unavailable where a part of it could not be removed."""
        for step in list(self._steps):
            step.stop("cancelled", None)
        self._reopen_network = False
        self._go_on()
        self.box.kill()
        if self._removal is not None:
            problem = await asyncio.shield(self._removal)
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
        while self._steps:  # each reads its last output first
            await asyncio.sleep(0.005)
        self._rhythm.stop()
        self._tasks.close()
        self.late_output.close()
        if self.outlet is not None:
            await self.outlet.close()
        return "" if self.box.remove() else "; ".join(self.box.trouble)


def _stopped_tasks(processes: Iterable[int]) -> tuple[dict[int, int], bool]:
    """The processor time of each task, in ticks, and whether any of them is not stopped. All threads are examined: a
    process whose first thread has ended looks dead."""
    worked_now: dict[int, int] = {}
    moving = False
    for process in processes:
        tasks: list[str] = []
        with contextlib.suppress(OSError):
            tasks = os.listdir(f"/proc/{process}/task")
        for task in tasks:
            with contextlib.suppress(OSError):
                fields = system.process_fields(f"{process}/task/{task}")
                worked_now[int(task)] = int(fields[11]) + int(fields[12])
                moving = moving or fields[0] not in "TtZX"
    return worked_now, moving
