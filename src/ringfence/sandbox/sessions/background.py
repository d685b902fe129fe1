"""Background processes of a session: what they wrote, how they ended, and input for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import field

from ringfence.core.box import BoxReport, Captured, Stream
from ringfence.core.errors import OutcomeUnknown, Refused, RingfenceError, Unavailable
from ringfence.core.model import Status
from ringfence.core.record import dataclass
from ringfence.core.sessions import ProcessLogs, ProcessState, StartedCommand, Tell, timestamp

MAX_RUNNING = 16
MAX_KEPT = 16
"""How many exited processes can still be asked for, the latest ones."""
CAPTURED_BYTES = 256 * 1024
"""Of each stream, by default: it is kept in the supervisor's memory, not in the box's."""
_FULL_SECONDS = 0.005


@dataclass(slots=True)
class Process:
    """A command, from its start until it is dropped from the list."""

    number: int
    argv: tuple[str, ...]
    running: StartedCommand
    listeners: set[Tell]
    over: asyncio.Task[BoxReport]
    started_at: str = field(default_factory=timestamp)
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_over(self) -> bool:
        return self.over.done()

    @property
    def info(self) -> ProcessState:
        report = None
        if self.over.done():
            report = BoxReport("infra") if self.over.cancelled() or self.over.exception() else self.over.result()
        return ProcessState(self.number, self.argv, self.started_at, not self.is_over, report)

    def logs(self, stdout_from: int, stderr_from: int) -> ProcessLogs:
        """Output since these offsets. Where some was dropped, the next offset is further on than the bytes returned."""
        stdout, stderr = self.running.logs
        out, out_at = _since(stdout, stdout_from)
        err, err_at = _since(stderr, stderr_from)
        return ProcessLogs(out, err, out_at, err_at, not self.is_over)

    async def wait(self, timeout: float | None) -> ProcessState:
        await asyncio.wait((self.over,), timeout=timeout)
        return self.info

    async def follow(self, offsets: tuple[int, int], tell: Tell) -> ProcessState:
        """Hand on output from these offsets on, and what is written later, until it exits."""
        at = offsets
        while True:  # the captured head and tail come one after the other
            logs = self.logs(*at)
            for stream, data in (("stdout", logs.stdout), ("stderr", logs.stderr)):
                if data:
                    tell("stdout" if stream == "stdout" else "stderr", data)
            if at == (logs.stdout_at, logs.stderr_at):
                break
            at = (logs.stdout_at, logs.stderr_at)

        def on_output(stream: Stream, data: bytes) -> None:
            tell(stream, data)

        self.listeners.add(on_output)
        try:
            return await self.wait(None)
        finally:
            self.listeners.discard(on_output)

    async def send(self, data: bytes, *, eof: bool) -> None:
        """Send all of it, as fast as it is read. Raises Unavailable where the process has exited before it took any,
        and OutcomeUnknown where it took a part."""
        async with self.sending:
            rest = data
            while rest:
                if self.is_over:
                    raise self._takes_nothing(len(data) - len(rest))
                try:
                    rest = rest[self.running.send(rest) :]
                except Unavailable:
                    if rest is data:
                        raise
                    raise self._takes_nothing(len(data) - len(rest)) from None
                if rest:
                    await asyncio.sleep(_FULL_SECONDS)
            if eof:
                self.running.close_input()

    def _takes_nothing(self, taken: int) -> RingfenceError:
        if taken:
            text = f"process {self.number} ended after it had taken {taken} bytes, and may have acted upon them"
            return OutcomeUnknown("no_input", text)
        nothing = Unavailable("no_input", f"process {self.number} is over, and takes no input")
        nothing.nothing_begun = True
        return nothing


class Processes:
    """The background processes of one session, by number."""

    def __init__(self) -> None:
        self._next = 1
        self._processes: dict[int, Process] = {}

    @property
    def any_running(self) -> bool:
        return any(not process.is_over for process in self._processes.values())

    def check_room(self) -> None:
        if sum(not process.is_over for process in self._processes.values()) >= MAX_RUNNING:
            text = f"{MAX_RUNNING} commands run in the background already; wait for some, or end them"
            raise Refused(Status.VALIDATION_FAILURE, "too_many", text)

    def add(
        self,
        argv: tuple[str, ...],
        running: StartedCommand,
        over: asyncio.Task[BoxReport],
        listeners: set[Tell],
        done: Callable[[], None],
    ) -> ProcessState:
        """Add one that was just started; `over` waits for its report, `listeners` get what it writes, `done` is called
        when it exits."""
        over.add_done_callback(lambda _: done())
        process = Process(self._next, argv, running, listeners, over)
        self._processes[self._next] = process
        self._next += 1
        ended = [number for number, each in self._processes.items() if each.is_over]
        for number in ended[: max(0, len(ended) - MAX_KEPT)]:
            del self._processes[number]
        return process.info

    def get(self, number: int) -> Process:
        with suppress(KeyError):
            return self._processes[number]
        text = f"there is no process {number}; list the processes to see which there are"
        raise Refused(Status.VALIDATION_FAILURE, "unknown_process", text)

    def infos(self) -> list[ProcessState]:
        return [process.info for process in self._processes.values()]


def _since(captured: Captured, offset: int) -> tuple[bytes, int]:
    """What is still captured of a stream from an offset on, in one piece, and the offset of its end."""
    if offset < len(captured.head):
        data = captured.head[max(0, offset) :]
        return (data, len(captured.head)) if captured.truncated else (data + captured.tail, captured.total)
    begins = captured.total - len(captured.tail)
    return captured.tail[max(0, offset - begins) :], max(offset, captured.total)
