"""The standard streams of a program in a box: its input, and its output, captured in bounded memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import cast

from ringfence.core.box import Captured, Limits, Stream
from ringfence.core.sessions import Tell, TellEnds
from ringfence.core.system import write_all
from ringfence.sandbox.process.box import Hub
from ringfence.sandbox.process.capture import Capture
from ringfence.sandbox.process.memory_file import can_be_sealed, memory_file

_CHUNK = 65536
_LATE_BYTES = 64 * 1024
"""What is kept of each stream that nobody waits for."""
_LATE_SECONDS = 0.02
"""After a piece of late output that long nothing is read: nobody waits for it, and its writer may never stop."""
_MAX_LATE = 8
"""Pipes of steps that are over and still have writers. The oldest are closed: what runs in a box decides how long it
holds one, and must not use up the supervisor's descriptors."""


# ── Output ────────────────────────────────────────────────────────────────────────────────────────


class Output:
    """What one program, or one step of a session, writes: captured, handed on as it comes, and bounded."""

    def __init__(self, hub: Hub, limits: Limits, tell: Tell | None, too_much: Callable[[], None]) -> None:
        """`too_much` is called when more was written than `output_bytes`."""
        self._hub = hub
        self._limits = limits
        self._tell = tell
        self._too_much = too_much
        self._captures: dict[Stream, Capture] = {}
        self._open: dict[int, Stream] = {}
        self._written = 0
        self._drained: asyncio.Future[None] | None = None

    def open_pipes(self, given: list[int]) -> None:
        """Make a pipe each for stdout and stderr; the ends to write to are added to `given`."""
        for stream in ("stdout", "stderr"):
            ours, theirs = new_pipe()
            given.append(theirs)
            self.read_from(ours, stream)

    def read_from(self, descriptor: int, stream: Stream) -> None:
        """Read from this descriptor, which is ours from now on."""
        os.set_blocking(descriptor, False)
        self._open[descriptor] = stream
        self._hub.add(descriptor, partial(self._read, descriptor))

    def captured(self, stream: Stream) -> Captured:
        """What was captured so far."""
        capture = self._captures.get(stream)
        return capture.done() if capture is not None else Captured()

    @property
    def is_drained(self) -> bool:
        """Nothing can be written any more, and everything written was read."""
        return not self._open

    async def drained(self) -> None:
        """Wait until `is_drained`."""
        if not self.is_drained:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained

    def _read(self, descriptor: int) -> bool:
        """Whether there may be more."""
        stream = self._open.get(descriptor)
        if stream is None:
            return False
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            chunk = b""  # a terminal whose other end is closed
        if not chunk:
            self._close(descriptor)
            # Not `isinstance`, which loads a parser of Python for a protocol.
            if hasattr(self._tell, "closed") and stream not in self._open.values():
                cast(TellEnds, self._tell).closed(stream)
            return False
        self._written += len(chunk)
        if self._written > self._limits.output_bytes:
            self._too_much()
        if stream not in self._captures:
            self._captures[stream] = Capture(self._limits.capture_bytes)
        self._captures[stream].feed(chunk)
        room = self._tell(stream, chunk) if self._tell is not None else None
        if room is not None:
            self._pause(descriptor, asyncio.ensure_future(room))
        return True

    def _pause(self, descriptor: int, room: asyncio.Future[None]) -> None:
        """Stop reading while the listener has enough: the pipe fills, and the program waits."""
        self._hub.remove(descriptor)
        room.add_done_callback(lambda _: self._go_on(descriptor))

    def _go_on(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._hub.add(descriptor, partial(self._read, descriptor))

    def _close(self, descriptor: int) -> None:
        self._hub.remove(descriptor)
        os.close(descriptor)
        self._open.pop(descriptor, None)
        if not self._open and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def close(self) -> None:
        """Stop reading."""
        for descriptor in list(self._open):
            self._close(descriptor)
        self._too_much = _ignore  # else each run would be a cycle that only the garbage collector frees

    def finish(self, late: LateOutput | None) -> None:
        """Read what is there: the step is over. What others still hold open and write later is `late`, or not read."""
        for descriptor in list(self._open):
            for _ in range(1 + self._limits.output_bytes // _CHUNK):
                if not self._read(descriptor):
                    break
        if late is not None:
            late.adopt(self._open)
            self._open = {}
        self.close()


class LateOutput:
    """What threads, children and tasks of a box write after their step is over, until it is reported."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._captures: dict[Stream, Capture] = {}
        self._open: dict[int, Stream] = {}
        """The pipes of steps that are over, as long as they have writers; the oldest first."""

    def adopt(self, pipes: dict[int, Stream]) -> None:
        for descriptor, stream in pipes.items():
            self._open[descriptor] = stream
            self._hub.change(descriptor, partial(self._read_slowly, descriptor))
        while len(self._open) > _MAX_LATE:
            self._close(next(iter(self._open)))

    def take(self) -> dict[Stream, Captured]:
        """All that came since the last time, and is there now."""
        for descriptor in list(self._open):
            for _ in range(_LATE_BYTES // _CHUNK + 1):
                if not self._read(descriptor):
                    break
        taken, self._captures = self._captures, {}
        return {stream: capture.done() for stream, capture in taken.items()}

    def _read_slowly(self, descriptor: int) -> None:
        if self._read(descriptor):
            self._hub.remove(descriptor)
            asyncio.get_running_loop().call_later(_LATE_SECONDS, self._go_on, descriptor)

    def _go_on(self, descriptor: int) -> None:
        if descriptor in self._open:  # or it has that number again, and then reads on too early, which does no harm
            self._hub.change(descriptor, partial(self._read_slowly, descriptor))

    def _read(self, descriptor: int) -> bool:
        """Whether there may be more."""
        stream = self._open.get(descriptor)
        try:
            chunk = os.read(descriptor, _CHUNK) if stream is not None else b""
        except BlockingIOError:
            return False
        if stream is None or not chunk:
            self._close(descriptor)
            return False
        if stream not in self._captures:
            self._captures[stream] = Capture(_LATE_BYTES)
        self._captures[stream].feed(chunk)
        return True

    def _close(self, descriptor: int) -> None:
        if self._open.pop(descriptor, None) is not None:
            self._hub.remove(descriptor)
            os.close(descriptor)

    def close(self) -> None:
        for descriptor in list(self._open):
            self._close(descriptor)


def _ignore() -> None:
    """The callback of a pipe that is not read any more."""


# ── Input ─────────────────────────────────────────────────────────────────────────────────────────


def new_pipe() -> tuple[int, int]:
    """A pipe: the end to read from and the end to write to. Programs, perhaps of another user, can open theirs again by
    name."""
    ends = os.pipe2(os.O_CLOEXEC)
    os.fchmod(ends[1], 0o666)
    return ends


def new_input(stdin: bytes | int, *, unexecutable: bool = False) -> int:
    """The standard input of a program: these bytes, or this descriptor. `unexecutable`: even where the program owns
    what it is given, and could give itself the permission."""
    if isinstance(stdin, int):
        return _duplicate(stdin)
    return _piped(stdin) if unexecutable and stdin and not can_be_sealed() else memory_file(stdin)


def _piped(data: bytes) -> int:
    """Bytes in a pipe, which is filled until its reader is gone."""
    reading, writing = new_pipe()

    def fill() -> None:
        with suppress(OSError):
            write_all(writing, data)
        os.close(writing)

    Thread(target=fill, name="input", daemon=True).start()
    return reading


def _duplicate(descriptor: int) -> int:
    """Duplicate a descriptor for a program. It can open a pipe again by name, as its other streams."""
    copy = os.dup(descriptor)
    with suppress(OSError):
        if os.readlink(f"/proc/self/fd/{copy}").startswith("pipe:["):
            os.fchmod(copy, 0o666)
    return copy
