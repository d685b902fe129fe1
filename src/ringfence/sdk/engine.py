"""The engine of this process: one event loop, in a thread of its own, makes the governed calls of every sandbox.

The first run opens it, and it is closed when the process ends. A forked child opens an engine of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import codecs
import concurrent.futures
import contextlib
import contextvars
import inspect
import os
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from ringfence import config
from ringfence.compose.run_request import RunRequest
from ringfence.compose.runs import Runs, default_config
from ringfence.config.settings import Config
from ringfence.core.aio import begun, new_loop, shielded
from ringfence.core.box import Attached, OnOutput
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json, Outcome

P = ParamSpec("P")
T = TypeVar("T")

Callback = Callable[[Any], object]
"""Gets each value as it comes. It may be asynchronous if its caller has a loop."""
Heard = queue.SimpleQueue[Callable[[], object] | None]
"""Calls to make in a thread that waits; None: no more."""

_CLOSE_SECONDS = 10.0
_END: Any = object()
_heard: contextvars.ContextVar[Heard] = contextvars.ContextVar("ringfence_heard")
"""Of work that a thread waits for: where that thread listens."""


class EngineTask(Generic[T]):
    """Work on the engine's loop, seen from another. It is over when the work is, even if it was cancelled."""

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
    """An event loop in a thread of its own, with the governed calls of this process open on it."""

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

    async def run(self, wanted: RunRequest, tell: OnOutput | None) -> Outcome:
        """One run. Raises Unavailable or StoreError if governed calls cannot be opened, ValueError for an output folder
        that holds what rules over boxes."""
        runs = await self.ready()
        if wanted.output is not None and (problem := runs.output_problem(wanted.output)) is not None:
            raise ValueError(f"output {wanted.output}: {problem}")
        return await runs.run(wanted, origin="sdk", tell=tell)

    async def call(self, tool: str, arguments: Json, attached: Attached) -> Outcome:
        """Call one of our own tools. Raises Unavailable or StoreError if governed calls cannot be opened."""
        runs = await self.ready()
        return await runs.call(tool, arguments, attached, origin="sdk")

    @property
    def is_ready(self) -> bool:
        """Whether governed calls are open."""
        return self._runs is not None and self._runs.done()

    async def ready(self) -> Runs:
        """Governed calls, opened. Raises ConfigError, StoreError or Unavailable if that cannot be done."""
        opened = self._opened()
        return opened.result() if opened.done() else await shielded(opened)

    def _opened(self) -> asyncio.Future[Runs]:
        """Opened once; if that failed, the next run tries again."""
        if self._runs is None or (self._runs.done() and self._runs.exception() is not None):
            self._runs = self._loop.create_future()
            self._holder = self._loop.create_task(self._hold(self._runs))
        return self._runs

    async def _hold(self, opened: asyncio.Future[Runs]) -> None:
        try:
            async with Runs.open(_settings()) as runs:
                opened.set_result(runs)
                await self._over.wait()
        except Exception as exc:  # whatever it is, the run that waits for this raises it
            if opened.done():
                raise
            opened.set_exception(exc)
            opened.exception()  # retrieved, even if no run waits any more

    # ── From other threads ──

    def submit(self, work: Coroutine[Any, Any, T]) -> EngineTask[T]:
        return EngineTask(self._loop, work)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end on the loop; meanwhile make the calls that it hands to this thread (`heard_here`)."""
        heard: Heard = queue.SimpleQueue()
        running: list[asyncio.Task[None]] = []
        # Not a future, which costs a hundredth of a step: the end of `heard` says that one of these is filled.
        ended: list[T] = []
        failed: list[BaseException] = []

        async def finish() -> None:
            _heard.set(heard)
            try:
                ended.append(await work)
            except Exception as exc:  # the thread that waits raises it
                failed.append(exc)
            except BaseException as exc:
                failed.append(exc)
                raise
            finally:
                heard.put(None)

        def begin() -> None:
            running.append(begun(finish()))

        self._loop.call_soon_threadsafe(begin)
        try:
            while (call := heard.get()) is not None:
                call()
        except BaseException:
            self._loop.call_soon_threadsafe(lambda: running[0].cancel())
            until = time.monotonic() + _CLOSE_SECONDS
            with contextlib.suppress(queue.Empty):
                while heard.get(timeout=max(0.0, until - time.monotonic())) is not None:
                    pass  # this thread makes no more calls
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
            with contextlib.suppress(TimeoutError):  # the process ends, and what it holds ends with it
                self.submit(self._close()).over.result(_CLOSE_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_SECONDS)

    async def _close(self) -> None:
        self._over.set()
        if self._holder is not None:
            await asyncio.wait({self._holder})


def _settings() -> Config:
    """The user's own configuration, if there is one; never one in the current folder."""
    found = next((path for path in config.own_paths() if path.is_file()), None)
    return default_config() if found is None else config.load(found)


_lock = threading.Lock()
_current: list[Engine] = []
_of_parents: list[Engine] = []
"""Never freed: to close what a fork copied would disturb the parent process."""


def engine() -> Engine:
    """The engine of this process."""
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
    """Close the engine, at the end of the process. Another run would open a new one."""
    with _lock:
        closing, _current[:] = list(_current), []
    for one in closing:
        one.close()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forked)
atexit.register(close)


# ── From the caller's loop ────────────────────────────────────────────────────────────────────────


async def elsewhere(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on the engine's loop. A caller that is cancelled cancels the work, and waits for its end."""
    serving = engine()
    if serving.here:
        return await work
    job = serving.submit(work)
    ended = asyncio.wrap_future(job.over)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        # Retrieved, even if we are cancelled again: either our own error, or that it was cancelled.
        ended.add_done_callback(lambda over: over.cancelled() or over.exception())
        job.cancel()
        await asyncio.wait({ended})
        raise


async def with_callbacks(
    work: Callable[[Callable[[str, Any], None]], Coroutine[Any, Any, T]],
    callbacks: Mapping[str, Callback | None],
    *,
    raw: bool = False,
) -> T:
    """Run work that tells `(name, value)`, from any thread, to callbacks on this loop; bytes become text, unless `raw`.

    A callback that raises ends the work.
    """
    loop = asyncio.get_running_loop()
    heard: asyncio.Queue[tuple[str, Any] | None] = asyncio.Queue()
    telling = loop.create_task(_tell(heard, callbacks, raw))
    running = loop.create_task(work(lambda name, value: quietly(loop, heard.put_nowait, (name, value))))

    def end(_: object) -> None:
        running.cancel()

    # A callback ends early only if it failed: then there is nothing left to run for.
    telling.add_done_callback(end)
    try:
        await asyncio.wait({running})
        loop.call_soon_threadsafe(heard.put_nowait, None)
        await telling
        return running.result()
    finally:
        telling.remove_done_callback(end)  # cancelled once is enough: a second time, it would not wait for its end
        telling.cancel()
        if running.cancel():
            await asyncio.wait({running})


async def _tell(
    heard: asyncio.Queue[tuple[str, Any] | None], callbacks: Mapping[str, Callback | None], raw: bool
) -> None:
    decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in callbacks}
    while (item := await heard.get()) is not None:
        name, value = item
        await _call(callbacks[name], decoders[name].decode(value) if isinstance(value, bytes) and not raw else value)
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
        return  # the loop that listened is closed


# ── From a thread that waits ──────────────────────────────────────────────────────────────────────


def waited(work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work(*args, **kwargs)` on the engine's loop, and wait for it.

    Callbacks among the keywords (`on_…`) are called in the thread that waits: a slow one holds up no other box.
    """
    for name, value in kwargs.items():
        if name.startswith("on_") and value is not None:
            kwargs[name] = heard_here(value)
    return engine().wait(work(*args, **kwargs))


def heard_here(callback: Any) -> Callable[..., object]:
    """The callback, called in the thread that waits for the work which has something to tell.

    That need not be the work that was given the callback: a command in the background tells while it is waited for.
    """
    return lambda *values: _heard.get().put(lambda: callback(*values))


def steps(pieces: AsyncIterator[T]) -> Iterator[T]:
    """Iterate in this thread over what the engine's loop yields."""

    async def step() -> T:
        return await anext(pieces, _END)

    try:
        while (piece := waited(step)) is not _END:
            yield piece
    finally:
        close = getattr(pieces, "aclose", None)
        if close is not None:
            waited(close)


def named(path: str | Path, reason: str) -> Path:
    """Where a path of the host leads that the caller names; no link on it needs to be followed from then on. Raises
    Unavailable for one that another may have made."""
    from ringfence.config import named_paths  # noqa: PLC0415 - most programs name none

    try:
        return named_paths.resolve(Path(path))
    except named_paths.UntrustedLink as exc:
        raise Unavailable(reason, f"{path}: {exc}") from None
