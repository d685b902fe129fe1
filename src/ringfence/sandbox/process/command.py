"""A command in a box that stays, with pipes or a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import termios
from typing import Any

from ringfence.core.aio import shielded
from ringfence.core.box import BoxReport, Captured, Program
from ringfence.core.errors import Unavailable
from ringfence.core.sessions import Command, Tell
from ringfence.core.system import interpreter
from ringfence.sandbox.process import guest_code
from ringfence.sandbox.process.box import BoxMember
from ringfence.sandbox.process.box_usage import descendants
from ringfence.sandbox.process.memory_file import memory_file
from ringfence.sandbox.process.run import read_at_start
from ringfence.sandbox.process.step import Step, StepBox, box_report, termination_of
from ringfence.sandbox.process.streams import new_input, new_pipe


class RunningCommand:
    """A command that was started."""

    def __init__(self, home: StepBox, member: BoxMember, command: Command, tell: Tell) -> None:
        self._home = home
        self._member = member
        self._command = command
        self._step = Step(home, member, command.limits, tell)
        self._step.reported = command.reported
        self._input = -1
        self._over: asyncio.Task[BoxReport] | None = None

    @property
    def number(self) -> int:
        return self._member.number

    @property
    def logs(self) -> tuple[Captured, Captured]:
        return self._step.output.captured("stdout"), self._step.output.captured("stderr")

    def start(self) -> None:
        """Raises Unavailable."""
        command = self._command
        given = list[int]()
        env = {**self._home.env, **command.env}
        order: dict[str, Any] = {"kind": "command", "name": "-c", "argv": list(command.argv), "env": env}
        order |= {"cwd": command.cwd, **({"terminal": True} if command.pty is not None else {})}
        try:
            given = self._terminal(*command.pty) if command.pty is not None else self._pipes()
            if command.source is not None:
                order |= {"kind": "python", "name": command.name}
                path = self._home.interpreter_path
                if path is None and read_at_start(command.env):
                    path = str(interpreter())
                program = Program("python", command.source, command.argv, command.name)
                plain = path is None or self._home.plain
                if path is not None:
                    words = guest_code.plain_words(program) if plain else guest_code.words(program)
                    order |= {"kind": "fresh", "argv": [path, *words]}
                given.append(memory_file(command.source if plain else guest_code.of_program(program)))
            self._member.order(order, given)
        except OSError as exc:
            self._step.finish()
            raise Unavailable("no_process", f"the command could not be started: {exc}") from None
        finally:
            for descriptor in given:
                os.close(descriptor)
        self._over = asyncio.get_running_loop().create_task(self._wait())

    def _pipes(self) -> list[int]:
        given: list[int] = []
        if self._command.stdin is None:
            theirs, self._input = new_pipe()
            os.set_blocking(self._input, False)
            given.append(theirs)
        else:
            given.append(new_input(self._command.stdin))
        self._step.output.open_pipes(given)
        return given

    def _terminal(self, columns: int, rows: int) -> list[int]:
        ours, theirs = os.openpty()
        os.set_inheritable(ours, False)
        self._input = os.dup(ours)
        self.resize(columns, rows)
        if self._home.box.host_id is not None:
            os.fchown(theirs, self._home.box.host_id, self._home.box.host_id)
        self._step.output.read_from(ours, "stdout")
        self._step.pipes = False
        return [theirs, os.dup(theirs), os.dup(theirs)]

    def resize(self, columns: int, rows: int) -> bool:
        if self._command.pty is not None and self._input >= 0:
            fcntl.ioctl(self._input, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
        return self._command.pty is not None

    def send(self, data: bytes) -> int:
        """Returns how many bytes were taken: the pipe may be full. Raises Unavailable where it reads no input."""
        if self._input < 0:
            raise Unavailable("no_input", "the command takes no input")
        try:
            return os.write(self._input, data)
        except BlockingIOError:
            return 0
        except OSError as exc:
            raise Unavailable("no_input", f"the command takes no more input: {exc.strerror}") from None

    def close_input(self) -> None:
        if self._input >= 0 and self._command.pty is None:
            os.close(self._input)
            self._input = -1
        elif self._input >= 0:
            self.send(b"\x04")

    def signal(self, number: int) -> None:
        self._member.signal(number, group=True)

    async def over(self) -> BoxReport:
        assert self._over is not None
        return await shielded(self._over)

    async def _wait(self) -> BoxReport:
        ended = await asyncio.shield(self._member.ended)
        if self._command.pty is not None and ended is not None and os.WTERMSIG(ended.status) == signal.SIGKILL:
            self._end_jobs()
        self._step.finish()
        if ended is not None:
            self._step.reaped(ended)
        if self._input >= 0:
            os.close(self._input)
            self._input = -1
        step = self._step
        await self._home.outputs.read_ahead()
        if step.ended is not None:
            return box_report((step.ended, None, int(signal.SIGKILL), step.limit), step, self._home)
        if not self._member.begun:
            raise Unavailable("no_process", "the process of the command ended before the command had begun")
        return box_report(termination_of(ended, step, self._home), step, self._home)

    def _end_jobs(self) -> None:
        """Kill the jobs of a shell on a terminal as well: each has a process group of its own."""
        box = self._home.box
        for pid in descendants(box.first, *box.workers):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(pid) == self._member.pid:
                    os.kill(pid, signal.SIGKILL)
