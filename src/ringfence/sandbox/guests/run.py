"""One program in a guest of its own: give the order, watch the limits, capture its output, report how it ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any

from ringfence.core.aio import fed
from ringfence.core.box import BoxReport, BoxSpec, Captured, Ended, FileFact, Limit, OnOutput, Shown, Stream, Usage
from ringfence.core.errors import RingfenceError, Unavailable
from ringfence.core.model import Json
from ringfence.sandbox.files import archive
from ringfence.sandbox.files.paths import shown as _shown
from ringfence.sandbox.guests.engine import Guest, GuestRoot, GuestUsage
from ringfence.sandbox.guests.link import GuestGone, GuestOrder, Link, collected, pass_on
from ringfence.sandbox.process import guest_code, output_files, shown
from ringfence.sandbox.process.capture import Capture
from ringfence.sandbox.process.limit_watch import killed_by, spent
from ringfence.sandbox.process.seccomp.notifications import MAX_DENIALS, Denials

_STREAMS: Mapping[bytes, Stream] = {b"1": "stdout", b"2": "stderr"}
_LOOK_SECONDS = (0.01, 0.1)
"""How often its use is looked at: at first, and after a while."""
_DRAIN_SECONDS = 10.0
_OUTPUT = "output"
_SHOWN = "tmp/.shown"
_NAMED = 1000
"""Of what is left out, so many are named, and the rest is counted."""
_SPOOLED = 8 * 1024 * 1024
"""The most of values that a program shows."""


class GuestRun:
    """The supervisor's side of one run."""

    def __init__(
        self,
        guest: Guest,
        link: Link,
        spec: BoxSpec,
        root: GuestRoot,
        tell: OnOutput | None,
        denials: Denials,
    ) -> None:
        self._guest = guest
        self._link = link
        self._spec = spec
        self._root = root
        self._tell = tell
        self._denials = denials
        self.ended: Ended | None = None
        """Why it was ended from here, if it was; the first reason counts."""
        self.limit: Limit | None = None
        self.ordered = False
        """The guest has its order: from here on, the program may have run whatever fails."""
        self._captures = {stream: Capture(spec.limits.capture_bytes) for stream in _STREAMS.values()}
        self._written = 0
        self._peak = 0
        self._full: Limit | None = None
        self._cpu_before = 0.0
        self._channel: GuestOrder | None = None

    async def to_the_end(self, env: Mapping[str, str], inputs: tuple[FileFact, ...]) -> BoxReport:
        """Run the program to its end. Raises Unavailable where it was never started. Cancelling ends the guest."""
        guest = self._guest
        began = time.monotonic()
        self._look()
        used = guest.usage()
        self._cpu_before = used.cpu_ms if used is not None else 0.0
        try:
            channel = self._channel = self._link.open(self._order(env), self._code())
        except GuestGone as problem:
            raise Unavailable("no_box", f"the box was gone before it had its order: {problem}") from None
        self.ordered = True
        channel.on_output = self._output
        loop = asyncio.get_running_loop()
        clock = loop.call_later(self._spec.limits.wall_seconds, self.stop, "timeout", "wall")
        watching = loop.create_task(self._watch())
        feeding = loop.create_task(self._feed(channel))
        if self._denials.descriptor is not None:
            loop.add_reader(self._denials.descriptor, self._deny)
        try:
            result = await self._result(channel)
        finally:
            clock.cancel()
            if self._denials.descriptor is not None:
                loop.remove_reader(self._denials.descriptor)
            watching.cancel()
            feeding.cancel()
            await asyncio.gather(watching, feeding, return_exceptions=True)
        wall = (time.monotonic() - began) * 1000.0
        return await self._report(result, wall, inputs)

    async def _result(self, channel: GuestOrder) -> Json | None:
        """What the agent says in the end; None where the guest ended first."""
        try:
            return await asyncio.shield(channel.result)
        except GuestGone:
            return None
        except asyncio.CancelledError:
            if channel.result.cancelled():
                raise
            self.stop("cancelled", None)
            raise

    # ── The order ──

    @property
    def _plain(self) -> bool:
        """Whether an interpreter of an image runs the program as it would anywhere, without any code of ours: what
        ours shows of it, its caller does not want, or the interpreter could not run ours."""
        cell = self._spec.program.cell and self._root.version == sys.version_info[:2]
        return self._spec.image is not None and not cell

    def _order(self, env: Mapping[str, str]) -> Json:
        program = self._spec.program
        order: Json = {"do": "run", "alone": True, "env": dict(env), "input": program.stdin != b""}
        if program.kind == "command":
            return {**order, "argv": list(program.argv)}
        words = guest_code.plain_words(program) if self._plain else guest_code.words(program)
        put = {} if program.name == "-c" else {"put": program.name}
        return {**order, "argv": [self._root.python, *words], **put}

    def _code(self) -> bytes:
        program = self._spec.program
        if program.kind == "command":
            return b""
        return program.source if self._plain else guest_code.of_program(program)

    async def _feed(self, channel: GuestOrder) -> None:
        stdin = self._spec.program.stdin
        if stdin != b"":
            await pass_on(channel, stdin)

    # ── While it runs ──

    def _output(self, kind: bytes, data: bytes) -> Awaitable[None] | None:
        stream = _STREAMS[kind]
        self._written += len(data)
        self._captures[stream].feed(data)
        if self._tell is not None:
            self._tell(stream, data)
        if self._written > self._spec.limits.output_bytes:
            self.stop("output", "output")
        return None

    def _deny(self) -> None:
        assert self._denials.descriptor is not None
        if not self._denials.answer():
            asyncio.get_running_loop().remove_reader(self._denials.descriptor)
        elif self._denials.total > MAX_DENIALS:
            self.stop("policy", None)

    def stop(self, ended: Ended, limit: Limit | None) -> None:
        """End the run for this reason."""
        if self.ended is None:
            self.ended = ended
            self.limit = limit
        self._guest.kill()

    async def _watch(self) -> None:
        first, last = _LOOK_SECONDS
        pause = first
        while True:
            await asyncio.sleep(pause)
            pause = min(pause * 1.2, last)
            self._look()

    def _look(self) -> GuestUsage | None:
        try:
            used = self._guest.usage()
        except (OSError, KeyError):  # it is just going
            return None
        if used is None:
            return None
        limits = self._spec.limits
        self._peak = max(self._peak, used.memory_bytes)
        self._full = used.full or self._full
        if used.memory_bytes > limits.memory_bytes:
            self.stop("oom", "memory")
        if self._channel is not None and spent(used.cpu_ms - self._cpu_before, limits):
            self.stop("timeout", "cpu")
        return used

    # ── Report ──

    async def _report(self, result: Json | None, wall: float, inputs: tuple[FileFact, ...]) -> BoxReport:
        self._look()
        status = _whole(result, "status")
        counted = self._guest.counted() if result is None or status is None else None
        files: tuple[FileFact, ...] = ()
        skipped: dict[str, str] = {}
        values: tuple[Shown, ...] = ()
        if result is not None and self.ended is None:
            if result.get("full") in ("disk", "inodes"):
                self._full = result["full"]
            if result.get("left") or self._spec.program.cell:
                files, skipped, values = await self._files()
        used = self._guest.usage() if counted is None else None
        counted = counted or self._guest.counted()
        cpu = max(used.cpu_ms if used is not None else 0.0, counted.cpu_ms or 0.0) - self._cpu_before
        ended, exit_status, number, limit = self._termination(status, counted.oom_kills, counted.pids_denied, cpu)
        return BoxReport(
            ended=ended,
            exit_status=exit_status,
            signal=number,
            limit=limit,
            wall_ms=wall,
            usage=Usage(
                cpu_ms=round(max(0.0, cpu), 3),
                peak_memory_bytes=max(self._peak, _whole(result, "peak_memory_bytes") or 0) or None,
                processes=counted.pids_peak,
            ),
            denials=dict(self._denials.by_name),
            stdout=self._captured("stdout"),
            stderr=self._captured("stderr"),
            inputs=inputs,
            files=files,
            skipped=skipped,
            shown=values,
            trouble=tuple(self._guest.trouble),
        )

    def _captured(self, stream: Stream) -> Captured:
        return self._captures[stream].done()

    def _termination(
        self, status: int | None, oom_kills: int | None, pids_denied: int | None, cpu_ms: float
    ) -> tuple[Ended, int | None, int | None, Limit | None]:
        if self.ended is not None:
            return self.ended, None, int(signal.SIGKILL), self.limit
        met: Limit | None = "memory" if oom_kills else "pids" if pids_denied else self._full
        if status is None:
            return ("oom", None, int(signal.SIGKILL), "memory") if oom_kills else ("infra", None, None, None)
        if not os.WIFSIGNALED(status):
            return "exited", os.WEXITSTATUS(status), None, met
        number = os.WTERMSIG(status)
        too_long = number == signal.SIGXFSZ and self._spec.limits.file_bytes is not None
        limits = self._spec.limits
        return killed_by(number, lambda: bool(oom_kills), lambda: spent(cpu_ms, limits), lambda: met, lambda: too_long)

    async def _files(self) -> tuple[tuple[FileFact, ...], dict[str, str], tuple[Shown, ...]]:
        """What it left in /workspace/output, and what it showed: taken out of the guest, and then examined here."""
        spec = self._spec
        most = spec.limits.disk_bytes
        names = [_OUTPUT, *([_SHOWN] if spec.program.cell else [])]
        order = {"do": "pack", "what": {"folder": "/workspace", "names": names, "most": most, "named": _NAMED}}
        with tempfile.TemporaryDirectory(prefix="ringfence-output-") as place:
            folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                async with asyncio.timeout(_DRAIN_SECONDS + most / 1e6):
                    channel = self._link.open(order)
                    unpack = partial(_unpacked, folder, most + _SPOOLED, spec.limits.inodes + 2)
                    errors = bytearray()
                    await fed(collected(channel, errors), unpack)
                    await channel.result  # an archive ends before the stream does
                found, skipped = await asyncio.to_thread(
                    output_files.collected, folder, spec.output, most, spec.output_files
                )
                skipped = {**_left_out(errors), **skipped}
                values = await shown.by_program(folder) if spec.program.cell else ()
            except (GuestGone, TimeoutError, RingfenceError, OSError) as problem:
                return (), {"/workspace/output": f"it cannot be read: {problem}"}, ()
            finally:
                os.close(folder)
        return found, skipped, values


def _unpacked(folder: int, max_bytes: int, max_files: int, pieces: Any) -> None:
    archive.unpack_into(folder, None, pieces, max_bytes=max_bytes, max_files=max_files)


def _left_out(said: bytearray) -> dict[str, str]:
    """What the guest says that it left out, and why."""
    try:
        told = json.loads(said)
    except (ValueError, RecursionError):
        return {}
    entries = told.items() if isinstance(told, dict) else ()
    return {f"/workspace/{_shown(path)}": _shown(str(why))[:200] for path, why in entries}


def _whole(result: Json | None, name: str) -> int | None:
    value = None if result is None else result.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None
