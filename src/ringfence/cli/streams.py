"""Between our own stdin, stdout and stderr and a box: output is written as it comes, input is passed on as it is read.

Each has a thread: a slow reader of our output must not delay the clock that ends the box.
"""

from __future__ import annotations

import codecs
import errno
import os
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from ringfence.cli.running import BROKEN_PIPE, OUTPUT_LOST, say
from ringfence.cli.terminal import safe
from ringfence.core.box import Stream
from ringfence.core.system import write_all

_CHUNK = 65536
_LAST = 2048
_NUMBERS: dict[Stream, int] = {"stdout": 1, "stderr": 2}


class _Decoder(Protocol):
    def decode(self, data: bytes, final: bool = ...) -> str: ...


class OutputEscaper:
    """What one of our own descriptors gets of bytes that are not ours: a file or pipe exactly these, a terminal nothing
    that it would act upon."""

    def __init__(self, descriptor: int) -> None:
        is_terminal = os.isatty(descriptor)
        self._decoder: _Decoder | None = codecs.getincrementaldecoder("utf-8")("replace") if is_terminal else None

    def shown(self, data: bytes) -> bytes:
        if self._decoder is None:
            return data
        text = self._decoder.decode(data).replace("\r\n", "\n")
        return safe(text, lines=True).encode("utf-8", "replace")


class Sink:
    """Writes a program's output to our own stdout and stderr, in the order in which it came."""

    def __init__(self) -> None:
        self.heard = False
        self.last_stderr = b""
        """The end of it, for what can be said of a failure."""
        self.broken: OSError | None = None
        """Why not all of it could be written."""
        self.on_broken: Callable[[], object] = lambda: None
        self._queue: queue.SimpleQueue[tuple[Stream, bytes, bool] | None] = queue.SimpleQueue()
        self._escapers = {stream: OutputEscaper(descriptor) for stream, descriptor in _NUMBERS.items()}
        self._thread = threading.Thread(target=self._work, name="ringfence-output", daemon=True)
        self._thread.start()

    def tell(self, stream: Stream, data: bytes) -> None:
        self.heard = True
        if stream == "stderr":
            self.last_stderr = (self.last_stderr + data)[-_LAST:]
        self._queue.put((stream, data, True))

    def draw(self, text: str) -> None:
        """Words of our own on stderr, which may steer the terminal that is there."""
        self._queue.put(("stderr", text.encode(), False))

    def close(self) -> None:
        """Wait until everything is written."""
        self._queue.put(None)
        self._thread.join()

    @property
    def lost(self) -> int | None:
        """The exit code where output is missing; asked when it is closed. A reader that went away knows that itself;
        of anything else stderr tells."""
        if self.broken is None:
            return None
        if self.broken.errno == errno.EPIPE:
            return BROKEN_PIPE
        say(f"ringfence: the output could not be written, and some of it is lost: {self.broken.strerror}")
        return OUTPUT_LOST

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if self.broken is not None:
                continue
            try:
                stream, data, untrusted = item
                write_all(_NUMBERS[stream], self._escapers[stream].shown(data) if untrusted else data)
            except OSError as exc:
                # The reader is gone, as with `| head`, or the disk is full: the program need not run on.
                self.broken = exc
                self.on_broken()


class StdinPipe:
    """Our stdin, passed on through a pipe: the box never gets our own descriptor."""

    def __init__(self) -> None:
        self.descriptor, self._end = os.pipe2(os.O_CLOEXEC)
        threading.Thread(target=self._work, name="ringfence-input", daemon=True).start()

    @staticmethod
    def there() -> bool:
        """Whether there is a stdin to pass on. A terminal is not passed on: it belongs to the person at it."""
        try:
            return not os.isatty(0) and os.fstat(0) is not None
        except OSError:
            return False

    def close(self) -> None:
        os.close(self.descriptor)

    def _work(self) -> None:
        try:
            while chunk := os.read(0, _CHUNK):
                write_all(self._end, chunk)
        except OSError:
            pass  # the program is over, or our stdin cannot be read
        os.close(self._end)
