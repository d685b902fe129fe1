"""System calls that a process is going to make, listed beforehand. Used inside the zygote.

The zygote makes a plan once for all boxes of a kind. What differs from box to box are a few numbers, which are put in
before the fork; then the process that is to run the program makes all the calls at once, without its interpreter.

Descriptors have numbers that are known in advance, since the kernel always takes the lowest free one: the plan begins
by moving what was given to fixed places and closing everything else. That they are what was foreseen is looked at
again afterwards, before the supervisor learns that there is a box.
"""

from __future__ import annotations

import ctypes
import errno
import os

from ringfence.sandbox.process.zygote import kernel
from ringfence.sandbox.process.zygote.native import Calls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

CHANNEL = 100
HANDLE = 101
ENTRANCES = 102
"""Descriptors, once the plan has begun: the channel to the supervisor, the first process, the control group."""
PLACES = range(CHANNEL, ENTRANCES + 16)
"""All of them. Nothing else may be there: it would be written over before it was moved."""
_STANDARD = 3
_LAST = 0xFFFFFFFF


class SyscallPlan:
    def __init__(self, entrances: int) -> None:
        self.descriptors: dict[str, int] = {}
        """For the supervisor."""
        self.entrances = list(range(ENTRANCES, ENTRANCES + entrances))
        self.step = ""
        """The step that calls are added to."""
        self._calls: list[tuple[int, ...]] = []
        self._steps: list[str] = []
        self._kept: list[object] = []
        self._taken: set[int] = set()
        self._foreseen: dict[int, int] = {}
        self._checks: dict[str, Callable[[], bool]] = {}
        self._texts: dict[str, ctypes.Array[ctypes.c_char]] = {}
        self._lengths: dict[int, str] = {}
        self._ready: Calls | None = None
        for place in (CHANNEL, HANDLE, *self.entrances):
            self.call("dup3", -1, place, os.O_CLOEXEC)
        self.call("close_range", _STANDARD, CHANNEL - 1, 0)
        self.call("close_range", ENTRANCES + entrances, _LAST, 0)

    # ── Planning ──

    def call(self, name: str, *arguments: int | bytes | None) -> int:
        """Add a call. Returns its index."""
        words = [argument if isinstance(argument, int) else self._address(argument) for argument in arguments]
        self._calls.append((kernel.NUMBERS[name], *words))
        self._steps.append(self.step)
        return len(self._calls) - 1

    def taken(self, index: int) -> int:
        """The descriptor that this call is going to return."""
        number = next(number for number in range(_STANDARD, CHANNEL) if number not in self._taken)
        self._taken.add(number)
        self._foreseen[index] = number
        return number

    def open(self, path: bytes, flags: int) -> int:
        return self.taken(self.call("openat", kernel.AT_FDCWD, path, flags | os.O_CLOEXEC, 0))

    def open_text(self, path: str, flags: int) -> int:
        """Open a path that is given for each box, under this name."""
        return self.taken(self.call("openat", kernel.AT_FDCWD, self._text(path), flags | os.O_CLOEXEC, 0))

    def close(self, descriptor: int) -> None:
        self.call("close", descriptor)
        self._taken.discard(descriptor)

    def write(self, path: bytes, data: bytes) -> None:
        descriptor = self.open(path, os.O_WRONLY)
        self.call("write", descriptor, data, len(data))
        self.close(descriptor)

    def write_text(self, path: str, data: str) -> None:
        """Write text to a path; both are given for each box, under these names."""
        descriptor = self.open_text(path, os.O_WRONLY)
        self._lengths[self.call("write", descriptor, self._text(data), 0)] = data
        self.close(descriptor)

    def reads(self, descriptor: int, expected: bytes) -> None:
        """Read a value back; it is compared afterwards."""
        buffer = ctypes.create_string_buffer(64)
        self._kept.append(buffer)
        self.call("pread64", descriptor, ctypes.addressof(buffer), 63, 0)
        self._checks[self.step] = lambda: buffer.value.strip() == expected

    def done_is_seen(self) -> None:
        """The results of these calls show that the step was done."""
        self._checks[self.step] = lambda: True

    def _text(self, name: str) -> int:
        buffer = self._texts.get(name)
        if buffer is None:
            buffer = self._texts[name] = ctypes.create_string_buffer(256)
        return ctypes.addressof(buffer)

    def _address(self, data: bytes | None) -> int:
        if data is None:
            return 0
        self._kept.append(data)
        return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0

    # ── Carrying out ──

    def prepare(self, given: list[int], texts: dict[str, bytes]) -> None:
        """Fill in, in the zygote, what differs for this box: its channel, first process, control group, and texts."""
        if self._ready is None:
            self._ready = Calls(self._calls)
        for index, descriptor in enumerate(given):
            self._ready.set(index, 0, descriptor)
        for name, buffer in self._texts.items():
            buffer.value = texts[name]
        for index, name in self._lengths.items():
            self._ready.set(index, 2, len(texts[name]))

    def carry_out(self) -> list[str]:
        """Make the calls, in the box. Returns the steps that were read back. Raises OSError with the step's name."""
        assert self._ready is not None
        return self._looked_at(self._ready.make())

    def rehearse(self) -> list[str]:
        """Go on as if all calls had been made."""
        assert self._ready is not None
        for index in range(len(self._calls)):
            self._ready.put(index, self._foreseen.get(index, 0))
        return self._looked_at(len(self._calls))

    def _looked_at(self, made: int) -> list[str]:
        assert self._ready is not None
        if made < len(self._calls):
            number = -self._ready.result(made)
            raise OSError(number, f"{self._steps[made] or 'descriptors'}: {os.strerror(number)}")
        for index, descriptor in self._foreseen.items():
            if self._ready.result(index) != descriptor:
                raise OSError(errno.EBADF, f"{self._steps[index]}: not the descriptor that was foreseen")
        return [name for name, check in self._checks.items() if check()]
