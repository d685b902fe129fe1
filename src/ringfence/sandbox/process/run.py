"""One run in one box: give the order, watch the limits, take what comes out, say how it ended."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ringfence.box import BoxReport, BoxSpec, Captured, FileFact, Limit, Program, Stream, Usage
from ringfence.box import Ended as Ending
from ringfence.errors import Unavailable
from ringfence.model import Json
from ringfence.sandbox.process import collect
from ringfence.sandbox.process import inputs as feeding
from ringfence.sandbox.process.box import Box
from ringfence.sandbox.process.capture import Capture
from ringfence.sandbox.process.denials import MAX_DENIALS, Denials
from ringfence.sandbox.process.member import Ended
from ringfence.sandbox.process.watch import Watch

_CHUNK = 65536
_REAP_SECONDS = 10.0
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_NOEXEC_SEAL = 0x8  # MFD_NOEXEC_SEAL
INLINE = 32_768
"""Shorter source goes into the order itself, which only the box's worker reads."""

Tell = Callable[[Stream, bytes], None]


@dataclass(slots=True)
class Verdict:
    """Why the supervisor ended the run, if it did; the first reason counts."""

    ended: Ending | None = None
    limit: Limit | None = None


@dataclass(slots=True)
class Run:
    """The supervisor's side of one run."""

    box: Box
    spec: BoxSpec
    interpreter: str
    isolation: Callable[[int | None], Json]
    """The fact, by how far beyond its limit the memory was when that was seen, if it was."""
    tell: Tell | None = None
    verdict: Verdict = field(default_factory=Verdict)
    ordered: bool = False
    """The box was told what to run; whatever fails from here on, it may have run."""
    _captures: dict[int, tuple[Stream, Capture]] = field(default_factory=dict)
    _open: set[int] = field(default_factory=set)
    _drained: asyncio.Event = field(default_factory=asyncio.Event)
    _said: int = 0
    _began: float = 0.0

    async def to_the_end(self) -> BoxReport:
        """Raises Unavailable where the program was never started. Cancelling kills the box."""
        spec, box = self.spec, self.box
        loop = asyncio.get_running_loop()
        inputs = feeding.put_inputs(box.descriptors.get("input", -1), spec.inputs, box.host_id) if spec.inputs else ()
        denials = Denials(box.descriptors.get("denials"), box.account, box.host_id)
        self._began = time.monotonic()
        self._start()
        if denials.descriptor is not None:
            box.hub.add(denials.descriptor, lambda: self._deny(denials))
        clock = loop.call_later(spec.limits.wall_seconds, self.stop, "timeout", "wall")
        watch = Watch(box, spec.limits, self.stop)
        watch.start()
        cancelled: asyncio.CancelledError | None = None
        try:
            ended = await self._ended()
        except asyncio.CancelledError as exc:
            cancelled = exc
            self.stop("cancelled", None)
            ended = await asyncio.shield(self._ended())
        finally:
            clock.cancel()
            watch.stop()
            if denials.descriptor is not None:
                box.hub.remove(denials.descriptor)
            self._close_streams()
        report = await self._report(ended, watch, denials, inputs)
        if cancelled is not None:
            raise cancelled
        return report

    # ── The start ──

    def _start(self) -> None:
        program = self.spec.program
        given: list[int] = []
        try:
            given.append(again(program.stdin) if isinstance(program.stdin, int) else memory_file(program.stdin))
            for name in ("stdout", "stderr"):
                ours, theirs = new_pipe()
                os.set_blocking(ours, False)
                given.append(theirs)
                self._captures[ours] = (name, Capture(self.spec.limits.capture_bytes))
                self._open.add(ours)
                self.box.hub.add(ours, partial(self._read, ours))
            order = self._order()
            if program.kind == "python" and (len(program.source) > INLINE or order["kind"] == "fresh"):
                given.append(memory_file(program.source))
            elif program.kind == "python":
                order["source"] = program.source
            self.box.order(order, given)
            self.ordered = True
        except OSError as exc:
            self._close_streams()
            raise Unavailable("no_box", f"the box was gone before it could be told what to run: {exc}") from None
        finally:
            for descriptor in given:
                os.close(descriptor)

    def _order(self) -> dict[str, Any]:
        program, spec = self.spec.program, self.spec
        if program.kind == "python" and spec.layout == "fresh":
            argv, kind = [self.interpreter, *python_words(program)], "fresh"
        else:
            argv, kind = list(program.argv), program.kind
        return {"kind": kind, "name": program.name, "argv": argv, "env": dict(spec.env)}

    # ── While it runs ──

    def _read(self, descriptor: int) -> None:
        stream, capture = self._captures[descriptor]
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            self.box.hub.remove(descriptor)
            os.close(descriptor)
            self._open.discard(descriptor)
            if not self._open:
                self._drained.set()
            return
        self._said += len(chunk)
        if self._said > self.spec.limits.output_bytes:
            self.stop("output", "output")
        capture.feed(chunk)
        if self.tell is not None:
            self.tell(stream, chunk)

    def _deny(self, denials: Denials) -> None:
        if not denials.answer():
            self.box.hub.remove(denials.descriptor or 0)
        elif denials.total > MAX_DENIALS:
            self.stop("policy", None)

    def stop(self, ended: Ending, limit: Limit | None) -> None:
        """End the run for this reason."""
        if self.verdict.ended is None:
            self.verdict.ended, self.verdict.limit = ended, limit
        self.box.kill()

    async def _ended(self) -> Ended | None:
        ended = await asyncio.shield(self.box.ended)
        try:
            # All that could write is dead, so what is left in the pipes is all there is.
            if not self._drained.is_set():
                async with asyncio.timeout(self.box.pace.allow(_REAP_SECONDS)):
                    await self._drained.wait()
        except TimeoutError:
            self.box.trouble.append("the output did not end with the box")
        return ended

    def _close_streams(self) -> None:
        for descriptor in self._open:
            self.box.hub.remove(descriptor)
            os.close(descriptor)

    # ── Afterwards ──

    async def _report(
        self, ended: Ended | None, watch: Watch, denials: Denials, inputs: tuple[FileFact, ...]
    ) -> BoxReport:
        wall = (time.monotonic() - self._began) * 1000.0
        how, status, number, limit = self._how(ended, watch)
        # Much to read would keep everybody else waiting, and what is on disk does not tell: files can have holes.
        files, skipped = await asyncio.to_thread(self._files) if self._left_files() else ((), {})
        streams = {stream: capture.done() for stream, capture in self._captures.values()}
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
            isolation=self.isolation(watch.overshoot if self.verdict.ended == "oom" else None),
            denials=dict(denials.by_name),
            stdout=streams.get("stdout", Captured()),
            stderr=streams.get("stderr", Captured()),
            inputs=inputs,
            files=files,
            skipped=skipped,
            trouble=tuple(self.box.trouble),
        )

    def _left_files(self) -> bool:
        try:
            output = os.stat("output", dir_fd=self.box.descriptors["workspace"], follow_symlinks=False)
        except OSError:
            return False
        return output.st_size != collect.EMPTY_FOLDER

    def _files(self) -> tuple[tuple[FileFact, ...], dict[str, str]]:
        """What was left in /workspace/output; its name, too, was in the program's hands."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            output = os.open("output", flags, dir_fd=self.box.descriptors["workspace"])
        except OSError:
            return (), {}
        try:
            most = self.spec.limits.disk_bytes
            return collect.collect(output, self.spec.output, max_bytes=most, max_files=self.spec.output_files)
        finally:
            os.close(output)

    def _how(self, ended: Ended | None, watch: Watch) -> tuple[Ending, int | None, int | None, Limit | None]:
        """Ended how, with which exit status or signal, for which limit."""
        if self.verdict.ended is not None:
            return self.verdict.ended, None, int(signal.SIGKILL), self.verdict.limit
        if ended is None or not self.box.begun:
            return "infra", None, None, None
        status = ended.status
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number == signal.SIGKILL and watch.out_of_memory():
                return "oom", None, number, "memory"
            if number == signal.SIGXFSZ:
                return "disk", None, number, "file_size"
            if number in (signal.SIGXCPU, signal.SIGKILL) and watch.out_of_time(ended.cpu_ms):
                return "timeout", None, number, "cpu"
            return "signalled", None, number, watch.met()
        return "exited", os.WEXITSTATUS(status), None, watch.met()


_FROM_DESCRIPTOR = "with open(3, 'rb') as f: f = f.read()\nexec(compile(f, '<string>', 'exec', dont_inherit=True))"


def python_words(program: Program) -> list[str]:
    """What tells a new interpreter where its program is, which may be longer than any argument, and what follows it."""
    if program.name != "-c":
        return [program.name, *program.argv]
    short = len(program.source) < INLINE and b"\0" not in program.source
    return ["-c", os.fsdecode(program.source) if short else _FROM_DESCRIPTOR, *program.argv]


def _unexecutable(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _NOEXEC_SEAL)
    except OSError:  # a kernel before 6.3
        return os.memfd_create(name, flags)


def new_pipe() -> tuple[int, int]:
    """A pipe, to read from and to write to. Programs open theirs again by name, and may be another user than we are."""
    ends = os.pipe2(os.O_CLOEXEC)
    os.fchmod(ends[1], 0o666)
    return ends


def again(descriptor: int) -> int:
    """A duplicate for a program. What is a pipe without a name it can open again, as it can its other streams."""
    copy = os.dup(descriptor)
    with suppress(OSError):
        if os.readlink(f"/proc/self/fd/{copy}").startswith("pipe:["):
            os.fchmod(copy, 0o666)
    return copy


def memory_file(data: bytes) -> int:
    """At its beginning, and sealed: whoever gets it could open it again for writing, and fill it."""
    if not data:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    descriptor = _unexecutable("payload")
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(descriptor)
