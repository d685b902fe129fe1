"""One program in a box of its own: give the order, watch the limits, capture its output, report how it ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from ringfence.core.box import BoxReport, BoxSpec, Ended, FileFact, Limit, OnOutput, Usage
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.core.record import dataclass
from ringfence.sandbox.files import inputs as input_files
from ringfence.sandbox.process import guest_code, output_files, shown
from ringfence.sandbox.process.box import Box, ProcessExit
from ringfence.sandbox.process.limit_watch import RunWatch, Termination, has_long_file, killed_by
from ringfence.sandbox.process.memory_file import memory_file
from ringfence.sandbox.process.seccomp.notifications import MAX_DENIALS, Denials
from ringfence.sandbox.process.streams import Output, new_input

_REAP_SECONDS = 10.0
_READ_AT_START = ("PYTHON", "LANG", "LC_", "LD_", "GLIBC_", "MALLOC_")
"""Environment variables that a process looks at once, when it starts."""
INLINE = 32_768
"""Shorter source goes into the order itself, which only the box's worker reads."""


@dataclass(slots=True)
class ProgramRun:
    """The supervisor's side of one run."""

    box: Box
    spec: BoxSpec
    interpreter: str
    isolation: Callable[[int | None], Json]
    """Makes the `isolation` fact, from how far memory was beyond its limit when that was seen, if it was."""
    tell: OnOutput | None = None
    ended: Ended | None = None
    """Why the supervisor ended the run, if it did; the first reason counts."""
    limit: Limit | None = None
    cancelled: asyncio.CancelledError | None = None
    """The error of a caller that gave it up."""
    ordered: bool = False
    """The box has its order: from here on, the program may have run whatever fails."""
    output: Output = field(init=False)
    _began: float = 0.0

    def __post_init__(self) -> None:
        self.output = Output(self.box.hub, self.spec.limits, self.tell, lambda: self.stop("output", "output"))

    async def to_the_end(self) -> BoxReport:
        """Run the program to its end. Raises Unavailable where it was never started. Cancelling kills the box; then
        `cancelled` is to be raised once the report is complete."""
        spec = self.spec
        box = self.box
        loop = asyncio.get_running_loop()
        inputs = (
            input_files.put_inputs(box.descriptors.get("input", -1), spec.inputs, box.host_id) if spec.inputs else ()
        )
        denials = Denials(box.descriptors.get("denials"), box.account)
        watch = RunWatch(box, spec.limits, self.stop)
        self._began = time.monotonic()
        self._start()
        if denials.descriptor is not None:
            box.hub.add(denials.descriptor, lambda: self._deny(denials))
        clock = loop.call_later(spec.limits.wall_seconds, self.stop, "timeout", "wall")
        watch.start()
        try:
            ended = await self._ended()
        except asyncio.CancelledError as exc:
            self.cancelled = exc
            self.stop("cancelled", None)
            ended = await asyncio.shield(self._ended())
        finally:
            clock.cancel()
            watch.stop()
            if denials.descriptor is not None:
                box.hub.remove(denials.descriptor)
            self.output.close()
        return await self._report(ended, watch, denials, inputs)

    # ── Start ──

    def _start(self) -> None:
        program = self.spec.program
        given: list[int] = []
        try:
            given.append(new_input(program.stdin, unexecutable=self.spec.programs is not None))
            self.output.open_pipes(given)
            order = self._order()
            if order["kind"] == "fresh":
                given.append(memory_file(self._code()))
            elif program.kind == "python" and len(program.source) > INLINE:
                given.append(memory_file(program.source))
            elif program.kind == "python":
                order["source"] = program.source
            self.box.order(order, given)
            self.ordered = True
        except OSError as exc:
            self.output.close()
            raise Unavailable("no_box", f"the box was gone before it had its order: {exc}") from None
        finally:
            for descriptor in given:
                os.close(descriptor)

    def _code(self) -> bytes:
        """What the descriptor of a new interpreter has."""
        program = self.spec.program
        return program.source if self._plain else guest_code.of_program(program)

    @property
    def _plain(self) -> bool:
        """Whether an interpreter of an image runs the program as it would anywhere, without any code of ours: what
        ours shows of it, its caller does not want, or the interpreter could not run ours."""
        image = self.spec.image
        return image is not None and not (self.spec.program.cell and image.version == sys.version_info[:2])

    def _order(self) -> dict[str, Any]:
        program = self.spec.program
        spec = self.spec
        if program.kind == "python" and spec.image is not None:
            kind = "fresh"
            argv = [spec.image.python, *(guest_code.plain_words(program) if self._plain else guest_code.words(program))]
        elif program.kind == "python" and spec.layout == "fresh":
            argv = [self.interpreter, *guest_code.words(program)]
            kind = "fresh"
        else:
            argv = list(program.argv)
            kind = program.kind
        order = {"kind": kind, "name": program.name, "argv": argv, "env": dict(spec.env)}
        return {**order, "cell": True} if program.cell else order

    # ── While it runs ──

    def _deny(self, denials: Denials) -> None:
        assert denials.descriptor is not None
        if not denials.answer():
            self.box.hub.remove(denials.descriptor)
        elif denials.total > MAX_DENIALS:
            self.stop("policy", None)
        elif pause := denials.pause:
            self.box.hub.rest(denials.descriptor, pause)

    def stop(self, ended: Ended, limit: Limit | None) -> None:
        """End the run for this reason."""
        if self.ended is None:
            self.ended = ended
            self.limit = limit
        self.box.kill()

    async def _ended(self) -> ProcessExit | None:
        ended = await asyncio.shield(self.box.ended)
        try:
            # All that could write is dead, so the pipes hold all there is.
            if not self.output.is_drained:
                async with asyncio.timeout(self.box.pace.allow(_REAP_SECONDS)):
                    await self.output.drained()
        except TimeoutError:
            self.box.trouble.append("the output did not end with the box")
        return ended

    # ── Report ──

    async def _report(
        self, ended: ProcessExit | None, watch: RunWatch, denials: Denials, inputs: tuple[FileFact, ...]
    ) -> BoxReport:
        wall = (time.monotonic() - self._began) * 1000.0
        how, status, number, limit = self._termination(ended, watch)
        files, skipped = await self._files()
        cell = self.spec.program.cell
        values = await shown.by_program(self.box.descriptors["workspace"]) if cell else ()
        return BoxReport(
            ended=how,
            exit_status=status,
            signal=number,
            limit=limit,
            wall_ms=wall,
            usage=Usage(
                cpu_ms=round(watch.cpu_ms(ended.cpu_ms if ended is not None else 0.0), 3),
                peak_memory_bytes=watch.peak_memory(ended.peak_memory_bytes if ended is not None else 0),
                io_bytes=ended.io_bytes if ended is not None else None,
                processes=watch.most_processes(),
            ),
            isolation=self.isolation(watch.overshoot if self.ended == "oom" else None),
            denials=dict(denials.by_name),
            stdout=self.output.captured("stdout"),
            stderr=self.output.captured("stderr"),
            inputs=inputs,
            files=files,
            skipped=skipped,
            shown=values,
            trouble=tuple(self.box.trouble),
        )

    async def _files(self) -> tuple[tuple[FileFact, ...], dict[str, str]]:
        workspace = self.box.descriptors["workspace"]
        if not output_files.left_any(workspace):
            return (), {}
        spec = self.spec
        # In a thread: much data would keep other callers waiting, and the size on disk does not show how much there is.
        most = (spec.limits.disk_bytes, spec.output_files)
        return await asyncio.to_thread(output_files.collected, workspace, spec.output, *most)

    def _termination(self, ended: ProcessExit | None, watch: RunWatch) -> Termination:
        if self.ended is not None:
            return self.ended, None, int(signal.SIGKILL), self.limit
        if ended is None or not self.box.begun:
            return "infra", None, None, None
        if os.WIFSIGNALED(ended.status):
            number = os.WTERMSIG(ended.status)
            return killed_by(
                number,
                watch.out_of_memory,
                lambda: watch.out_of_time(ended.cpu_ms),
                watch.survived_limit,
                lambda: has_long_file(self.box),
            )
        return "exited", os.WEXITSTATUS(ended.status), None, watch.survived_limit()


def read_at_start(*environments: Mapping[str, str]) -> bool:
    """Whether a variable has an effect only in an interpreter that is started with it, and none in one that runs."""
    return any(name.startswith(_READ_AT_START) for env in environments for name in env)
