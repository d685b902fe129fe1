"""Waking whoever waits for a person's answer: one look for all of them, and a cheap one.

The answer may be given by another process. SQLite tells at once whether anybody wrote; only then is it asked, once,
which questions are still open. What people were shown, which may be large, is not read for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ringfence.errors import StoreError
from ringfence.store.reader import Reader
from ringfence.store.rows import Approval

LOOK_SECONDS = 0.1


class Waiting:
    """Those of one event loop who wait. While there are none, nothing is done."""

    def __init__(self, reader: Callable[[], Reader]) -> None:
        self._reader = reader
        self._waiting: dict[asyncio.Event, Approval] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next: asyncio.TimerHandle | None = None
        self._version: int | None = None

    @contextmanager
    def answer_to(self, question: Approval) -> Iterator[asyncio.Event]:
        """Set once that question no longer waits for an answer. That it may have expired is for others to see."""
        self._loop = asyncio.get_running_loop()
        answered = asyncio.Event()
        self._waiting[answered] = question
        try:
            self._look_again()
            yield answered
        finally:
            del self._waiting[answered]
            if not self._waiting and self._next is not None:
                self._next.cancel()

    def wake(self) -> None:
        """From any thread: an answer was given here."""
        loop = self._loop
        if loop is not None and self._waiting and not loop.is_closed():
            loop.call_soon_threadsafe(self._look_again)

    def _look_again(self) -> None:
        """At once, whoever wrote."""
        self._version = None
        self._look()

    def _look(self) -> None:
        if self._next is not None:
            self._next.cancel()
        if not self._waiting or self._loop is None:
            return
        self._next = self._loop.call_later(LOOK_SECONDS, self._look)
        try:
            version = self._reader().version()
            if version == self._version:
                return
            open_ = self._reader().unanswered(min(question.asked_at for question in self._waiting.values()))
            self._version = version
        except StoreError:
            return  # whoever waits has a limit, and then hears what is wrong
        for answered, question in self._waiting.items():
            if question.id not in open_:
                answered.set()
