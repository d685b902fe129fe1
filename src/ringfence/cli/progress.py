"""How far long work is: one line on stderr that changes, on a terminal alone; elsewhere nothing.

A thread draws it, so that it goes on where the work is not asynchronous or holds up the event loop.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ringfence.cli.terminal import columns, cut
from ringfence.core.sizes import short_size

_TICK_SECONDS = 0.2
_CLEAR = "\r\x1b[K"
_BAR = 20


class ProgressLine:
    """What is done, how much of it, and for how long. Without a total there is no bar."""

    def __init__(self, what: str, total: int | None = None, *, sizes: bool = False) -> None:
        self.what = what
        self.total = total
        self.done = 0
        self._sizes = sizes
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._shown = False

    def step(self, count: int = 1) -> None:
        self.done += count

    def line(self) -> str:
        took = f"{time.monotonic() - self._began:.0f} s"
        if self.total:
            full = min(_BAR, self.done * _BAR // self.total)
            bar = f"[{'#' * full}{'.' * (_BAR - full)}]"
            return f"{self.what}  {bar} {self._count(self.done)}/{self._count(self.total)}, {took}"
        return f"{self.what} … {f'{self._count(self.done)}, ' if self.done else ''}{took}"

    def say(self, text: str) -> None:
        """A line of its own on stderr, above this one."""
        with self._lock:
            self._clear()
            print(text, file=sys.stderr, flush=True)

    def begin(self) -> None:
        if sys.stderr.isatty():
            self._thread = threading.Thread(target=self._draw, name="ringfence-progress", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Remove the line. May be called again."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._clear()

    def _count(self, number: int) -> str:
        return short_size(number) if self._sizes else str(number)

    def _draw(self) -> None:
        while not self._over.wait(_TICK_SECONDS):
            with self._lock:
                sys.stderr.write(_CLEAR + cut(self.line(), columns(2) - 1))
                sys.stderr.flush()
                self._shown = True

    def _clear(self) -> None:
        if self._shown:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
            self._shown = False


@contextmanager
def progress(what: str, total: int | None = None, *, sizes: bool = False) -> Iterator[ProgressLine]:
    line = ProgressLine(what, total, sizes=sizes)
    line.begin()
    try:
        yield line
    finally:
        line.end()
