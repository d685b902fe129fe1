"""The governed way of this process, kept open: one event loop in a thread of its own serves every sandbox.

It is opened by the first run and closed when the process ends. A forked child has none of it and opens its own.
"""

from __future__ import annotations

import asyncio
import atexit
import codecs
import concurrent.futures
import contextlib
import inspect
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

from ringfence import config
from ringfence.box import Attached, Stream
from ringfence.config.settings import Config
from ringfence.model import Json, Outcome
from ringfence.runs import Runs, unwritten
from ringfence.sandbox.waiting import begun, new_loop, shielded
from ringfence.wanted import Wanted

T = TypeVar("T")

Callback = Callable[[Any], object]
"""Gets something as it comes. Where its caller has a loop, it may be asynchronous."""
Heard = queue.SimpleQueue[Callable[[], object] | None]
"""What is to be called in a thread that waits; None: no more."""

_CLOSE_SECONDS = 10.0


class Job(Generic[T]):
    """Work on the engine's loop, seen from elsewhere. It is over when the work is, also where it was cancelled."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        self.over: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._loop = loop
        self._task: asyncio.Task[T] | None = None
        loop.call_soon_threadsafe(self._begin, work)

    def _begin(self, work: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[T]) -> None:
        problem = asyncio.CancelledError() if task.cancelled() else task.exception()
        if problem is None:
            self.over.set_result(task.result())
        else:
            self.over.set_exception(problem)

    def cancel(self) -> None:
        self._loop.call_soon_threadsafe(lambda: self._task is not None and self._task.cancel())


class Engine:
    def __init__(self) -> None:
        self._loop = new_loop()
        self._runs: asyncio.Future[Runs] | None = None
        self._holder: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._work, name="ringfence", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    # ── On the loop ──

    async def run(self, wanted: Wanted, tell: Callable[[Stream, bytes], None] | None) -> Outcome:
        """One run. Raises Unavailable, StoreError where the way cannot be opened."""
        opened = self._opened()
        runs = opened.result() if opened.done() else await shielded(opened)
        return await runs.run(wanted, origin="sdk", tell=tell)

    async def call(self, tool: str, arguments: Json, attached: Attached) -> Outcome:
        """One of our own tools. Raises Unavailable, StoreError where the way cannot be opened."""
        opened = self._opened()
        runs = opened.result() if opened.done() else await shielded(opened)
        return await runs.call(tool, arguments, attached, origin="sdk")

    def _opened(self) -> asyncio.Future[Runs]:
        """Opened once; what failed is tried again by the next run."""
        if self._runs is None or (self._runs.done() and self._runs.exception() is not None):
            self._runs = self._loop.create_future()
            self._holder = self._loop.create_task(self._hold(self._runs))
        return self._runs

    async def _hold(self, opened: asyncio.Future[Runs]) -> None:
        try:
            async with Runs.open(_settings()) as runs:
                opened.set_result(runs)
                await self._over.wait()
        except Exception as exc:  # whatever it is, it belongs to whoever waits for the way to open
            if opened.done():
                raise
            opened.set_exception(exc)
            opened.exception()  # looked at, also where nobody waits any more

    # ── From other threads ──

    def submit(self, work: Coroutine[Any, Any, T]) -> Job[T]:
        return Job(self._loop, work)

    def wait(self, work: Coroutine[Any, Any, T], heard: Heard) -> T:
        """Run `work` to its end on the loop, and meanwhile, in this thread, whatever it puts into `heard`."""
        running: list[asyncio.Task[None]] = []
        # Not a future, which is worth a hundredth of a step: by what it hears this thread knows when they are filled.
        ended: list[T] = []
        failed: list[BaseException] = []

        async def told() -> None:
            try:
                ended.append(await work)
            except Exception as exc:  # it is for the thread that waits
                failed.append(exc)
            except BaseException as exc:
                failed.append(exc)
                raise
            finally:
                heard.put(None)

        def begin() -> None:
            running.append(begun(told()))

        self._loop.call_soon_threadsafe(begin)
        try:
            while (call := heard.get()) is not None:
                call()
        except BaseException:
            self._loop.call_soon_threadsafe(lambda: running[0].cancel())
            until = time.monotonic() + _CLOSE_SECONDS
            with contextlib.suppress(queue.Empty):
                while heard.get(timeout=max(0.0, until - time.monotonic())) is not None:
                    pass  # nobody is there any more to hear it
            raise
        if failed:
            raise failed.pop()
        return ended[0]

    @property
    def here(self) -> bool:
        """Whether we are on the loop already."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """End the boxes and close the record."""
        if self._thread.is_alive():
            with contextlib.suppress(TimeoutError):  # the process ends, and what it holds with it
                self.submit(self._close()).over.result(_CLOSE_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_SECONDS)

    async def _close(self) -> None:
        self._over.set()
        if self._holder is not None:
            await asyncio.wait({self._holder})


def _settings() -> Config:
    """The user's own configuration, if there is one; never one that happens to lie in the current folder."""
    found = next((path for path in config.own_paths() if path.is_file()), None)
    return unwritten() if found is None else config.load(found)


_lock = threading.Lock()
_current: list[Engine] = []
_of_parents: list[Engine] = []
"""Kept for ever: to take apart what a fork copied would disturb the process that it was copied from."""


def engine() -> Engine:
    """The one of this process."""
    with _lock:
        if not _current:
            _current.append(Engine())
        return _current[0]


def _forked() -> None:
    global _lock
    _lock = threading.Lock()
    _of_parents.extend(_current)
    _current.clear()


def close() -> None:
    """At the end of the process; the next run would open another."""
    with _lock:
        closing, _current[:] = list(_current), []
    for one in closing:
        one.close()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forked)
atexit.register(close)


# ── From whichever loop the caller is on ──────────────────────────────────────────────────────────


async def elsewhere(work: Coroutine[Any, Any, T]) -> T:
    """The work on the engine's loop. Whoever gives up waiting ends it, and waits for that."""
    serving = engine()
    if serving.here:
        return await work
    job = serving.submit(work)
    ended = asyncio.wrap_future(job.over)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        # Looked at, also if we are told again not to wait: it is ours, or that it was cancelled.
        ended.add_done_callback(lambda over: over.cancelled() or over.exception())
        job.cancel()
        await asyncio.wait({ended})
        raise


async def told(
    work: Callable[[Callable[[str, Any], None]], Coroutine[Any, Any, T]], callbacks: Mapping[str, Callback | None]
) -> T:
    """Work that tells `(name, value)` as it comes, from any thread, to callbacks on this loop; bytes come as text.

    A callback that raises ends the work.
    """
    loop = asyncio.get_running_loop()
    heard: asyncio.Queue[tuple[str, Any] | None] = asyncio.Queue()
    telling = loop.create_task(_tell(heard, callbacks))
    running = loop.create_task(work(lambda name, value: quietly(loop, heard.put_nowait, (name, value))))

    def end(_: object) -> None:
        running.cancel()

    # Whoever listens is done early only if they failed: then there is nobody to run for.
    telling.add_done_callback(end)
    try:
        await asyncio.wait({running})
        loop.call_soon_threadsafe(heard.put_nowait, None)
        await telling
        return running.result()
    finally:
        telling.remove_done_callback(end)  # told once is enough: who is told twice does not wait for the end
        telling.cancel()
        if running.cancel():
            await asyncio.wait({running})


async def _tell(heard: asyncio.Queue[tuple[str, Any] | None], callbacks: Mapping[str, Callback | None]) -> None:
    decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in callbacks}
    while (item := await heard.get()) is not None:
        name, value = item
        await _call(callbacks[name], decoders[name].decode(value) if isinstance(value, bytes) else value)
    for name, decoder in decoders.items():
        await _call(callbacks[name], decoder.decode(b"", final=True))


async def _call(callback: Callback | None, value: Any) -> None:
    if callback is not None and value != "":
        answer = callback(value)
        if inspect.isawaitable(answer):
            await answer


def quietly(loop: asyncio.AbstractEventLoop, call: Callable[[Any], object], item: Any) -> None:
    try:
        loop.call_soon_threadsafe(call, item)
    except RuntimeError:
        return  # whoever listened has closed their loop


# ── From a thread that waits ──────────────────────────────────────────────────────────────────────


def waited(work: Callable[[Mapping[str, Any]], Coroutine[Any, Any, T]], options: Mapping[str, Any]) -> T:
    """The work, with these options. Callbacks among them (`on_…`) are called here, in the thread that waits: one that
    dawdles holds up nobody else's box."""
    heard: Heard = queue.SimpleQueue()
    here = {
        name: _later(heard, value) if name.startswith("on_") and value is not None else value
        for name, value in options.items()
    }
    return engine().wait(work(here), heard)


def _later(heard: Heard, callback: Callback) -> Callback:
    return lambda value: heard.put(lambda: callback(value))
