"""Between a terminal or pipe of ours and a box: output as it comes, input as it is read.

Both have threads of their own: a reader that dawdles must not hold up the clock that ends the box.
"""

from __future__ import annotations

import codecs
import os
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from ringfence.box import Stream
from ringfence.cli.terminal import safe

_CHUNK = 65536
_NUMBERS: dict[Stream, int] = {"stdout": 1, "stderr": 2}


class _Decoder(Protocol):
    def decode(self, data: bytes, final: bool = ...) -> str: ...


class Sink:
    """Writes what a program says to our own stdout and stderr, in the order in which it came.

    A file or pipe gets the very bytes. A terminal gets nothing that it would act upon.
    """

    def __init__(self) -> None:
        self.heard = False
        self.broken = False
        self.on_broken: Callable[[], object] = lambda: None
        self._queue: queue.SimpleQueue[tuple[Stream, bytes] | None] = queue.SimpleQueue()
        utf8 = codecs.getincrementaldecoder("utf-8")
        self._terminals: dict[Stream, _Decoder] = {s: utf8("replace") for s, fd in _NUMBERS.items() if os.isatty(fd)}
        self._thread = threading.Thread(target=self._work, name="ringfence-output", daemon=True)
        self._thread.start()

    def tell(self, stream: Stream, data: bytes) -> None:
        self.heard = True
        self._queue.put((stream, data))

    def close(self) -> None:
        """Wait until everything is written."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if self.broken:
                continue
            try:
                _write(_NUMBERS[item[0]], self._shown(*item))
            except OSError:
                # Whoever read it is gone, as with `| head`: there is nobody to run for.
                self.broken = True
                self.on_broken()

    def _shown(self, stream: Stream, data: bytes) -> bytes:
        decoder = self._terminals.get(stream)
        if decoder is None:
            return data
        text = decoder.decode(data).replace("\r\n", "\n")
        return safe(text, lines=True).encode("utf-8", "replace")


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class Source:
    """Our stdin as a pipe that is the box's alone: it never gets the descriptor of ours."""

    def __init__(self) -> None:
        self.descriptor, self._end = os.pipe2(os.O_CLOEXEC)
        threading.Thread(target=self._work, name="ringfence-input", daemon=True).start()

    @staticmethod
    def there() -> bool:
        """Whether there is a stdin to pass on: a terminal's belongs to the person at it."""
        try:
            return not os.isatty(0) and os.fstat(0) is not None
        except OSError:
            return False

    def close(self) -> None:
        os.close(self.descriptor)

    def _work(self) -> None:
        try:
            while chunk := os.read(0, _CHUNK):
                _write(self._end, chunk)
        except OSError:
            pass  # the program is over, or our stdin is nothing to read from
        os.close(self._end)
