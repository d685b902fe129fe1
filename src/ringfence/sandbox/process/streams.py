"""Where a session's interpreter writes: into the running cell's pipes, and between cells nowhere; it reads nothing.

What threads and child processes print while no cell runs is lost; it never fails and never shows up in another cell.
"""

from __future__ import annotations

import io
import os
import sys
from os import close, dup2

from ringfence.sandbox.process import display, guest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

__builtins__ = display.BUILTINS  # type: ignore[assignment]

_NAMES = ("stdout", "stderr")


class NoInput(io.TextIOBase):
    """Standard input of a cell: nobody is there to answer. Descriptor 0 is empty, for programs that look there."""

    encoding = "utf-8"

    def read(self, size: int | None = -1, /) -> NoReturn:
        raise RuntimeError("a session has no standard input; pass data as a file or a variable")

    readline = read

    @property
    def buffer(self) -> NoInput:
        return self

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    def close(self) -> None:
        """`exit()` closes what it finds here; the next cell is to be told the same as this one."""


class Streams:
    """The descriptors 1 and 2, and the two streams of the interpreter that write into them."""

    def __init__(self) -> None:
        self._nowhere = -1
        self._own: list[io.TextIOBase] = []
        sys.stdin = sys.__stdin__ = NoInput()  # type: ignore[assignment, misc]
        for number, name in enumerate(_NAMES, 1):
            stream = getattr(sys, name)
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
            else:
                stream = _stream(number)
                setattr(sys, name, stream)
            self._own.append(stream)

    def lead_to(self, stdout: int, stderr: int) -> None:
        """Into these, which are taken over."""
        self.flush()
        for number, descriptor in enumerate((stdout, stderr), 1):
            dup2(descriptor, number)
        close(stdout)
        close(stderr)
        self._mend()

    def lead_nowhere(self) -> None:
        """All that was written until now has gone where it belonged."""
        self.flush()
        try:
            for number in (1, 2):
                dup2(self._nowhere, number)
        except OSError:  # the first time, or a cell closed it
            self._nowhere = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
            for number in (1, 2):
                dup2(self._nowhere, number)
        self.flush()  # what could not be written does not belong to the next cell

    def spare(self) -> list[int]:
        """Three descriptors that lead nowhere; none if there are no more."""
        found: list[int] = []
        try:
            while len(found) < 3:
                found.append(os.dup(self._nowhere))
        except OSError:
            let_go(found)
            return []
        return found

    def flush(self) -> None:
        """All that was written is where it belongs."""
        for stream in self._own:
            try:
                stream.flush()
            except (OSError, ValueError, RuntimeError):
                continue  # nobody reads it, or it was closed
        guest.write_out_c(None)

    def _mend(self) -> None:
        """A stream that a cell closed, unless it put another in its place."""
        for number, name in enumerate(_NAMES, 1):
            old = self._own[number - 1]
            if not _is_usable(old):
                new = self._own[number - 1] = _stream(number)
                for place in (name, f"__{name}__"):
                    if getattr(sys, place, None) is old:
                        setattr(sys, place, new)


def flush_what_is_there() -> None:
    """Whatever the user's code has put in the place of the streams; so this is a part of its cell."""
    for name in _NAMES:
        stream = getattr(sys, name, None)
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except Exception:  # noqa: S112 - nobody is left to be told
            continue


def let_go(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        try:
            close(descriptor)
        except OSError:
            continue  # a cell closed it


def _stream(number: int) -> io.TextIOBase:
    # By lines, since somebody is watching. What UTF-8 cannot say is shown, not an error.
    return open(number, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _is_usable(stream: io.TextIOBase) -> bool:
    try:
        return not stream.closed
    except ValueError:  # its buffer was taken away
        return False
