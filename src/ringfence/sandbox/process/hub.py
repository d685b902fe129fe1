"""Many descriptors behind one reader of the event loop.

A box has half a dozen that live for milliseconds; what the loop does for each of them would cost more than reading it.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

from ringfence.sandbox.process.pulse import Pulse
from ringfence.sandbox.process.uncounted import Locks

_AT_ONCE = 64


class Hub:
    """Calls whoever asked when there is something to read, or nobody left to write."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._called: dict[int, Callable[[], object]] = {}
        self.pulse = Pulse()
        self.locks = Locks()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._poll.fileno(), self._hear)

    def add(self, descriptor: int, call: Callable[[], object]) -> None:
        self._poll.register(descriptor, select.EPOLLIN)
        self._called[descriptor] = call

    def remove(self, descriptor: int) -> None:
        """Before it is closed. It may have been removed before."""
        if self._called.pop(descriptor, None) is not None and not self._poll.closed:
            self._poll.unregister(descriptor)

    def _hear(self) -> None:
        for descriptor, _ in self._poll.poll(0, _AT_ONCE):
            # One that was called before may have removed this one, and another may have its number by now: whoever is
            # called finds out by reading, which never waits.
            call = self._called.get(descriptor)
            if call is not None:
                call()

    def close(self) -> None:
        if not self._poll.closed:
            self._loop.remove_reader(self._poll.fileno())
            self._poll.close()
