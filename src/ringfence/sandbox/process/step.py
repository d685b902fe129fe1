"""One cell or command in a box that stays: its clock, what it writes and uses, why it was stopped, and its report."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ringfence.core.aio import PausableTimer
from ringfence.core.box import BoxReport, Captured, Ended, Limit, Limits, Stream, Usage
from ringfence.core.sessions import Tell
from ringfence.sandbox.process.box import Box, BoxMember, ProcessExit
from ringfence.sandbox.process.late_work import LateWork, OtherTasks
from ringfence.sandbox.process.limit_watch import Termination, has_long_file, killed_by, spent, used_up_by_process
from ringfence.sandbox.process.output_files import OutputFiles
from ringfence.sandbox.process.seccomp.notifications import MAX_DENIALS
from ringfence.sandbox.process.streams import LateOutput, Output


class StepBox(Protocol):
    """The box of a step, as far as steps and what runs them depend on it."""

    box: Box
    isolation: dict[str, Any]
    env: Mapping[str, str]
    interpreter_path: str | None
    plain: bool
    outputs: OutputFiles
    late_output: LateOutput
    paused: bool

    def cpu_ms(self) -> float: ...

    def step_began(self, step: Step) -> None: ...

    def step_over(self, step: Step) -> None: ...

    def out_of_memory(self) -> bool: ...

    def survived_limit(self) -> Limit | None: ...

    def network_fact(self, step: Step) -> Mapping[str, Any] | None: ...

    def late_fact(self, step: Step) -> Mapping[str, Any] | None: ...

    def report_later(self, report: BoxReport) -> None: ...

    def leaves_work(self) -> bool: ...


class Step:
    """One cell or command, from its order until it is over."""

    def __init__(
        self,
        home: StepBox,
        member: BoxMember,
        limits: Limits,
        tell: Tell,
        *,
        reported: bool = True,
        may_send: bool = True,
    ) -> None:
        """`reported`: a caller gets its report; else late work is reported with the next step that is. `may_send`:
        while it runs, the box may use its route out."""
        self.limits = limits
        self.reported = reported
        self.may_send = may_send
        self.member = member
        self.peak = 0
        self.full: Limit | None = None
        """The disk limit that was used up at the last look, if any was."""
        self.ended: Ended | None = None
        """Why it was stopped, if it was; the first reason counts."""
        self.limit: Limit | None = None
        self.on_stop: Callable[[], None] = member.kill
        self.network_before: Mapping[str, Any] = {}
        """The `network` fact of the box when it began."""
        self._home = home
        self.output = Output(home.box.hub, limits, tell, lambda: self.stop("output", "output"))
        self._began = time.monotonic()
        self.cpu_before = home.cpu_ms()
        """Processor time of all that ran in the box until it began; and, below, until it was over."""
        self.cpu_after: float | None = None
        self._cpu_seen = 0.0
        self.late = LateWork()
        self.late_output: Mapping[Stream, Captured] = {}
        """What earlier steps left running and wrote until it was over."""
        self.pipes = True
        """Whether its output goes through pipes, which others may still hold when it is over."""
        self.others: OtherTasks | None = None
        """What else runs in the box, if anything does."""
        self._denied = dict(member.denials.by_name)
        self._denials = member.denials.total
        self.on_timeout: Callable[[], bool] = lambda: False
        """Called when its time is up. True: the callee ends the step."""
        self.clock = PausableTimer(limits.wall_seconds, self._time_is_up)
        self.clock.start()
        member.on_denial = self._look_at_denials
        member.denials.is_late = self._is_anothers
        home.step_began(self)

    # ── While it runs ──

    def look(self, used: int, full: Limit | None) -> None:
        """Note what the whole box uses now: the step uses no more than that."""
        self.peak, self.full = max(self.peak, used), full or self.full
        if self.others is not None:
            self.others.look()
        self._cpu_seen = max(self._cpu_seen, self._cpu_ms(self._home.cpu_ms()))
        most = self.limits.cpu_seconds
        if most is not None and self._cpu_seen > most * 1000:
            self.stop("timeout", "cpu")

    def reaped(self, exited: ProcessExit) -> None:
        """Note what the kernel said of the process that was this step. Without a control group only this tells the
        time of children that it waited for at its very end."""
        self.peak = max(self.peak, exited.peak_memory_bytes)
        group = self._home.box.group
        if group is None or group.cpu_ms() is None:
            self._cpu_seen = max(self._cpu_seen, exited.cpu_ms)

    def _cpu_ms(self, now: float) -> float:
        """Its share of what the whole box has used by now."""
        return now - self.cpu_before - (self.others.cpu_ms if self.others is not None else 0.0)

    def _is_anothers(self, task: int) -> bool:
        return self.others is not None and self.others.include(task)

    # ── Its end ──

    def _time_is_up(self) -> None:
        if not self.on_timeout():
            self.stop("timeout", "wall")

    def stop(self, ended: Ended, limit: Limit | None) -> None:
        if self.end_as(ended, limit):
            self.on_stop()

    def restart_clock(self, seconds: float, call: Callable[[], None]) -> None:
        """From here on, this is called when its time is up. A pause does not count, as before."""
        self.clock.cancel()
        self.clock = PausableTimer(seconds, call)
        if not self._home.paused:
            self.clock.start()

    def end_as(self, ended: Ended, limit: Limit | None = None) -> bool:
        """Set why it ends. False where there was a reason before, which stands."""
        if self.ended is not None:
            return False
        self.ended = ended
        self.limit = limit
        return True

    def _look_at_denials(self) -> None:
        if self.member.denials.total - self._denials > MAX_DENIALS:
            self.stop("policy", None)

    def finish(self) -> None:
        """Read the rest of the output and stop watching."""
        self.clock.cancel()
        if self.reported:  # before its own pipes are among those of steps that are over
            self.late_output = self._home.late_output.take()
        self.output.finish(self._home.late_output if self.pipes else None)
        if self.others is not None:
            self.others.look()
            self.late.cpu_ms += self.others.late_ms
            self.late.tasks = self.others.tasks
        with contextlib.suppress(OSError, KeyError):  # the box is gone
            self.cpu_after = self._home.cpu_ms()
        self.member.denials.is_late = _always
        self._home.step_over(self)

    @property
    def wall_ms(self) -> float:
        return (time.monotonic() - self._began) * 1000.0

    def usage(self) -> Usage:
        now = self.cpu_after if self.cpu_after is not None else self._home.cpu_ms()
        cpu_ms = max(0.0, self._cpu_seen, self._cpu_ms(now))
        return Usage(cpu_ms=round(cpu_ms, 3), peak_memory_bytes=self.peak or None)

    def denials(self) -> dict[str, int]:
        before = self._denied
        return {
            name: count - before.get(name, 0)
            for name, count in self.member.denials.by_name.items()
            if count > before.get(name, 0)
        }


def _always(task: int) -> bool:
    """Everything between two steps is late."""
    return True


# ── Its report ────────────────────────────────────────────────────────────────────────────────────


def box_report(ending: Termination, step: Step, home: StepBox) -> BoxReport:
    ended, status, number, limit = ending
    files, skipped = home.outputs.changed()
    late = home.late_fact(step)
    if written := step.late_output:
        late = {**(late or {}), **{f"{stream}_bytes": captured.total for stream, captured in written.items()}}
    return BoxReport(
        ended=ended,
        exit_status=status,
        signal=number,
        limit=limit,
        wall_ms=step.wall_ms,
        usage=step.usage(),
        isolation=home.isolation,
        denials=step.denials(),
        stdout=step.output.captured("stdout"),
        stderr=step.output.captured("stderr"),
        files=files,
        skipped=skipped,
        network=home.network_fact(step),
        late=late,
        late_stdout=written.get("stdout", Captured()),
        late_stderr=written.get("stderr", Captured()),
        left=home.leaves_work(),
    )


def survived_limit(step: Step, home: StepBox) -> Limit | None:
    """A limit that a step met and survived."""
    return "memory" if home.out_of_memory() else home.survived_limit() or step.full


def termination_of(exited: ProcessExit | None, step: Step, home: StepBox) -> Termination:
    """How a process ended that ended by itself or by the kernel."""
    if exited is None:
        return "infra", None, None, None
    if not os.WIFSIGNALED(exited.status):
        return "exited", os.WEXITSTATUS(exited.status), None, survived_limit(step, home)
    number = os.WTERMSIG(exited.status)
    return killed_by(
        number,
        home.out_of_memory,
        lambda: spent(step.usage().cpu_ms or 0.0, step.limits) or used_up_by_process(exited.cpu_ms, home.box.limits),
        lambda: home.survived_limit() or step.full,
        lambda: has_long_file(home.box),
    )
