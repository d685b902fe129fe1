"""Boxes from Python.

    execution = ringfence.run_code("print(6 * 7)")
    print(execution.text, execution.facts["explanation"])

Each run has a fresh box of its own, goes the governed way, and is on record. Written once, asynchronously; `Sandbox`
is a thin runner over `AsyncSandbox`.
"""

from __future__ import annotations

import asyncio
import codecs
import inspect
import math
import queue
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

from ringfence import canonical
from ringfence.box import Input, Limits, Stream
from ringfence.errors import Refused, Unavailable
from ringfence.model import Outcome, Status
from ringfence.runs import Wanted
from ringfence.sandbox.tools import limits_problem
from ringfence.sdk import engine
from ringfence.sdk.execution import CommandResult, Execution, command_result, execution

T = TypeVar("T")

OnOutput = Callable[[str], object]
"""Gets text as it is written. It may be asynchronous with an AsyncSandbox."""
Inputs = Mapping[str, bytes | str | Path]
"""Files for /workspace/input by name: their content, or the path of a file to copy."""


class RunOptions(TypedDict, total=False):
    """What can be said of one run."""

    timeout: float
    """Seconds."""
    envs: Mapping[str, str]
    inputs: Inputs
    output: str | Path
    """A folder that the files of /workspace/output are copied to."""
    on_stdout: OnOutput
    on_stderr: OnOutput


class BoxOptions(TypedDict, total=False):
    """What can be said of all runs of a sandbox."""

    template: str
    """`python`, `data` (numpy, pandas, matplotlib), or one of the configuration's."""
    backend: str
    timeout: float
    """Seconds, for each run that says nothing else."""
    envs: Mapping[str, str]
    metadata: Mapping[str, str]
    """Words of yours; policy can see them as `args.metadata`."""
    limits: Limits


class OneShotOptions(RunOptions, total=False):
    template: str
    backend: str
    metadata: Mapping[str, str]
    limits: Limits


class AsyncCommands:
    """Commands in boxes of a sandbox."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self._sandbox = sandbox

    async def run(self, cmd: str | Sequence[str], **options: Unpack[RunOptions]) -> CommandResult:
        """A line for /bin/sh, or the words of a command. A command that fails is a result."""
        if isinstance(cmd, str):
            return command_result(await self._sandbox._run(options, {"command": cmd}))
        return command_result(await self._sandbox._run(options, {"argv": tuple(cmd)}))


class AsyncSandbox:
    """A box for every run, all with the same template, limits and variables."""

    def __init__(self, **options: Unpack[BoxOptions]) -> None:
        _known(options, BoxOptions)
        self.id = canonical.new_id("box")
        self.commands = AsyncCommands(self)
        self._options = options
        self._limits = _limits(options)
        self._running: set[engine.Job[Outcome] | asyncio.Task[Any]] = set()
        self._killed = False

    @classmethod
    async def create(cls, **options: Unpack[BoxOptions]) -> Self:
        return cls(**options)

    @property
    def metadata(self) -> Mapping[str, str]:
        return dict(self._options.get("metadata") or {})

    async def run_code(self, code: str, **options: Unpack[RunOptions]) -> Execution:
        """Run Python source as a program. What it does wrong is in the Execution.

        Raises Unavailable where it never ran, Refused where it may not run, OutcomeUnknown where nobody can say.
        """
        return execution(await self._run(options, {"code": code}))

    async def kill(self) -> None:
        """End what runs; nothing can be run afterwards."""
        self._killed = True
        for running in list(self._running):
            running.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    async def _run(self, options: RunOptions, program: dict[str, Any]) -> Outcome:
        if self._killed:
            raise Unavailable("killed", "the sandbox was killed")
        wanted = self._wanted(options, program)
        callbacks = {"stdout": options.get("on_stdout"), "stderr": options.get("on_stderr")}
        if not any(callbacks.values()):
            return await self._submitted(wanted, None)
        loop = asyncio.get_running_loop()
        heard: asyncio.Queue[tuple[Stream, bytes] | None] = asyncio.Queue()
        telling = loop.create_task(_told(heard, callbacks))
        running = loop.create_task(
            self._submitted(wanted, lambda stream, data: _quietly(loop, heard.put_nowait, (stream, data)))
        )
        # Whoever listens is done early only if they failed: then there is nobody to run for.
        telling.add_done_callback(lambda _: running.cancel())
        try:
            await asyncio.wait({running})
            loop.call_soon_threadsafe(heard.put_nowait, None)
            await telling
            return running.result()
        finally:
            telling.cancel()
            if running.cancel():
                await asyncio.wait({running})

    async def _submitted(self, wanted: Wanted, tell: Callable[[Stream, bytes], None] | None) -> Outcome:
        serving = engine.engine()
        running: engine.Job[Outcome] | asyncio.Task[Any] | None = asyncio.current_task()
        work = serving.run(wanted, tell)
        if not serving.here:  # a loop of the caller's own: there and back
            running = serving.submit(work)
            work = _over(running)
        assert running is not None
        self._running.add(running)
        try:
            return await work
        except asyncio.CancelledError:
            if not self._killed:
                raise
            raise Refused(Status.KILLED, "cancelled", "the sandbox was killed while it ran") from None
        finally:
            self._running.discard(running)

    def _wanted(self, options: RunOptions, program: dict[str, Any]) -> Wanted:
        _known(options, RunOptions)
        limits = dict(self._limits)
        if "timeout" in options:
            limits["wall_seconds"] = _seconds(options["timeout"])
        output = options.get("output")
        return Wanted(
            **program,
            env={**(self._options.get("envs") or {}), **(options.get("envs") or {})},
            limits=limits,
            inputs=tuple(_input(name, given) for name, given in (options.get("inputs") or {}).items()),
            output=None if output is None else Path(output).resolve(),
            template=self._options.get("template"),
            metadata=self.metadata,
        )


async def _over(job: engine.Job[T]) -> T:
    """Wait for it. Whoever gives up waiting ends it, and waits for that."""
    ended = asyncio.wrap_future(job.over)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        job.cancel()
        await asyncio.wait({ended})
        ended.exception()  # looked at: it is ours, or that it was cancelled
        raise


def _known(options: Mapping[str, Any], kind: Any) -> None:
    unknown = [name for name in options if name not in kind.__annotations__]
    if unknown:
        raise TypeError(f"there is no option {', '.join(unknown)}; there are {', '.join(kind.__annotations__)}")


def _limits(options: BoxOptions) -> dict[str, float | int]:
    if options.get("backend") not in (None, "process"):
        raise Unavailable("no_backend", f"sandbox backend {options['backend']} is not built yet")
    limits = options.get("limits")
    problem = limits_problem(limits) if limits is not None else None
    if problem is not None:
        raise ValueError(problem)
    out = {name: value for name, value in asdict(limits).items() if value is not None} if limits is not None else {}
    if "timeout" in options:
        out["wall_seconds"] = _seconds(options["timeout"])
    return out


def _seconds(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not math.isfinite(timeout):
        raise ValueError(f"timeout must be a number of seconds, this is {timeout!r}")
    problem = limits_problem(Limits(wall_seconds=timeout))
    if problem is not None:
        raise ValueError(problem.replace("wall_seconds", "timeout"))
    return timeout


def _input(name: str, given: bytes | str | Path) -> Input:
    if isinstance(given, Path):
        return Input(name, given.resolve())
    return Input(name, given.encode() if isinstance(given, str) else given)


# ── Output as it comes ────────────────────────────────────────────────────────────────────────────


async def _told(heard: asyncio.Queue[tuple[Stream, bytes] | None], callbacks: Mapping[str, OnOutput | None]) -> None:
    decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in callbacks}
    while (item := await heard.get()) is not None:
        await _call(callbacks[item[0]], decoders[item[0]].decode(item[1]))
    for name, decoder in decoders.items():
        await _call(callbacks[name], decoder.decode(b"", final=True))


async def _call(callback: OnOutput | None, text: str) -> None:
    if callback is not None and text:
        answer = callback(text)
        if inspect.isawaitable(answer):
            await answer


def _quietly(loop: asyncio.AbstractEventLoop, call: Callable[[Any], object], item: Any) -> None:
    try:
        loop.call_soon_threadsafe(call, item)
    except RuntimeError:
        return  # whoever listened has closed their loop


# ── The same, without await ───────────────────────────────────────────────────────────────────────


class Commands:
    """Commands in boxes of a sandbox."""

    def __init__(self, inner: AsyncCommands) -> None:
        self._inner = inner

    def run(self, cmd: str | Sequence[str], **options: Unpack[RunOptions]) -> CommandResult:
        """A line for /bin/sh, or the words of a command. A command that fails is a result."""
        return _wait(lambda here: self._inner.run(cmd, **here), options)


class Sandbox:
    """A box for every run, all with the same template, limits and variables."""

    def __init__(self, **options: Unpack[BoxOptions]) -> None:
        self._inner = AsyncSandbox(**options)
        self.commands = Commands(self._inner.commands)

    @classmethod
    def create(cls, **options: Unpack[BoxOptions]) -> Self:
        return cls(**options)

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def metadata(self) -> Mapping[str, str]:
        return self._inner.metadata

    def run_code(self, code: str, **options: Unpack[RunOptions]) -> Execution:
        """Run Python source as a program. What it does wrong is in the Execution.

        Raises Unavailable where it never ran, Refused where it may not run, OutcomeUnknown where nobody can say.
        """
        return _wait(lambda here: self._inner.run_code(code, **here), options)

    def kill(self) -> None:
        """End what runs; nothing can be run afterwards."""
        _wait(lambda _: self._inner.kill(), {})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def run_code(code: str, **options: Unpack[OneShotOptions]) -> Execution:
    """Run Python source in a fresh box: the one-shot of `Sandbox.run_code`, with the options of both.

    Raises Unavailable where it never ran, Refused where it may not run, OutcomeUnknown where nobody can say.
    """
    _known(options, OneShotOptions)
    once: Any = {name: value for name, value in options.items() if name in RunOptions.__annotations__}
    box: Any = {name: value for name, value in options.items() if name not in RunOptions.__annotations__}
    return Sandbox(**box).run_code(code, **once)


def _wait(work: Callable[[RunOptions], Coroutine[Any, Any, T]], options: RunOptions) -> T:
    """Callbacks are called in the thread that waits: one that dawdles holds up nobody else's box."""
    heard: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
    here = options.copy()
    if (on_stdout := options.get("on_stdout")) is not None:
        here["on_stdout"] = _later(heard, on_stdout)
    if (on_stderr := options.get("on_stderr")) is not None:
        here["on_stderr"] = _later(heard, on_stderr)
    return engine.engine().wait(work(here), heard)


def _later(heard: queue.SimpleQueue[Callable[[], object] | None], callback: OnOutput) -> OnOutput:
    return lambda text: heard.put(lambda: callback(text))
