"""Many programs, each in a fresh box of its own, several at a time.

    for execution in ringfence.map_code(["print(6 * 7)", "1 / 0"], timeout=5):
        print(execution.status, execution.text)

Each run is a governed call, and is on record. A program that fails, or may not run, harms no other.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, Unpack, cast

import anyio

from ringfence.compose.backends import row_of
from ringfence.compose.run_request import RunRequest
from ringfence.core.errors import RingfenceError
from ringfence.core.record import dataclass
from ringfence.sdk import engine
from ringfence.sdk.execution import Execution, ended, without_result
from ringfence.sdk.once import OnceOptions, OnOutput, known, limits_of, request_of, run_request

T = TypeVar("T")

Program = str | Mapping[str, Any]
"""Python source; or `code` with options of its own, which are those of `run_code`."""
OnDone = Callable[[int, Execution], object]
"""Gets the number of a program, counted from 0, and what it came to. It may be asynchronous if its caller is."""

_FOR_EACH_CORE = 2
_JOINED = ("envs", "inputs", "metadata")


def map_code(
    programs: Iterable[Program],
    *,
    workers: int | None = None,
    on_done: OnDone | None = None,
    **options: Unpack[OnceOptions],
) -> list[Execution]:
    """Run each program in a fresh box, `workers` at a time, and return an Execution for each, in their order.

    The options are those of `run_code` and hold for all programs; a program's own win. Where both have `envs`,
    `inputs`, `metadata` or `limits`, these are joined by name. An `output` for all has a folder for each program,
    named by its number. `on_done(index, execution)` is called as each ends, in the thread that waits.

    A program that was refused, could not be run, or of which nobody knows whether it ran, is an Execution with that
    `error` and `status`. Wrong usage raises TypeError or ValueError before anything runs. Where no box can be made at
    all, the errors are those of `run_code`. An exception in a callback, or Ctrl-C, ends the boxes that run.
    """
    if inspect.iscoroutinefunction(on_done):
        raise TypeError("on_done is asynchronous: await map_code_async, or give a plain function")
    batch = _checked(programs, options)
    here = [replace(each, on_stdout=_here(each.on_stdout), on_stderr=_here(each.on_stderr)) for each in batch]
    return engine.waited(_run, here, _at_a_time(workers), on_done=on_done)


async def map_code_async(
    programs: Iterable[Program],
    *,
    workers: int | None = None,
    on_done: OnDone | None = None,
    **options: Unpack[OnceOptions],
) -> list[Execution]:
    """`map_code`, awaited. Cancelling it ends the boxes that run. One call of `on_done` is made at a time."""
    return await _run(_checked(programs, options), _at_a_time(workers), on_done=on_done)


# ── Checked before anything runs ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Checked:
    """A program to run, or what became of one that cannot be."""

    wanted: RunRequest | Execution
    on_stdout: OnOutput | None = None
    on_stderr: OnOutput | None = None


def _checked(programs: Iterable[Program], options: OnceOptions) -> list[_Checked]:
    if isinstance(programs, str | bytes | Mapping):
        raise TypeError("programs is a list of programs; for one program there is run_code")
    known(options, OnceOptions)
    request_of("", options)
    named = options.get("backend")
    if named is not None and named != "auto":
        row_of(named)  # without it nothing could run at all
    out: list[_Checked] = []
    for index, program in enumerate(programs):
        try:
            out.append(_program(index, program, options))
        except (TypeError, ValueError) as exc:
            kind = TypeError if isinstance(exc, TypeError) else ValueError
            raise kind(f"programs[{index}]: {exc}") from exc
    return out


def _program(index: int, program: Program, options: OnceOptions) -> _Checked:
    if not isinstance(program, str | Mapping):
        raise TypeError(f"a program is text, or a mapping with code and options; this is {type(program).__name__}")
    given = {"code": program} if isinstance(program, str) else dict(program)
    code = given.pop("code", None)
    if not isinstance(code, str):
        raise TypeError("code is missing" if code is None else f"code is text; this is {type(code).__name__}")
    known(given, OnceOptions)
    own = cast(OnceOptions, given)
    both = _both(index, options, own)
    try:
        wanted = replace(request_of(code, both), limits={**limits_of(options), **limits_of(own)})
    except RingfenceError as exc:
        return _Checked(without_result(exc))
    replace(wanted, inputs=()).arguments()  # what cannot be the arguments of a call raises here; files are read later
    return _Checked(wanted, both.get("on_stdout"), both.get("on_stderr"))


def _both(index: int, options: OnceOptions, own: OnceOptions) -> OnceOptions:
    """The options of one program."""
    both: dict[str, Any] = {**options, **own}
    for name in _JOINED:
        if isinstance(options.get(name), Mapping) and isinstance(own.get(name), Mapping):
            both[name] = {**cast(Any, options)[name], **cast(Any, own)[name]}
    output = options.get("output")
    if output is not None and "output" not in own:
        place = Path(output) / str(index)
        if place.is_symlink():  # the caller named only the folder above
            raise ValueError(f"output: {place} is a link; remove it, or name another folder")
        both["output"] = place
    return cast(OnceOptions, both)


def _at_a_time(workers: int | None) -> int:
    if workers is None:
        return default_workers()
    if isinstance(workers, bool) or not isinstance(workers, int):
        raise TypeError(f"workers is a whole number, this is {workers!r}")
    if workers < 1:
        raise ValueError(f"workers must be 1 or more, this is {workers}")
    return workers


def default_workers() -> int:
    """As many as boxes of a kind are kept ready: more at a time would wait for each other."""
    mine = getattr(os, "sched_getaffinity", None)  # other systems have none, nor boxes
    return _FOR_EACH_CORE * (len(mine(0)) if mine is not None else os.cpu_count() or 1)


# ── Running ───────────────────────────────────────────────────────────────────────────────────────


async def _run(batch: Sequence[_Checked], workers: int, *, on_done: OnDone | None) -> list[Execution]:
    async def one(index: int) -> Execution:
        program = batch[index]
        if isinstance(program.wanted, Execution):
            return program.wanted
        try:
            return ended(
                await run_request(program.wanted, program.on_stdout, program.on_stderr), program.wanted.language
            )
        except RingfenceError as exc:  # an input that is not there, say
            return without_result(exc)

    if batch:
        await engine.elsewhere(_ready())
    return await run_all(len(batch), one, workers, on_done)


async def _ready() -> None:
    await engine.engine().ready()


async def run_all(
    count: int,
    one: Callable[[int], Awaitable[T]],
    workers: int,
    done: Callable[[int, T], object] | None = None,
) -> list[T]:
    """`one(index)` for each index below `count`, `workers` at a time; what they return, in the order of the indexes.

    `done` is told of each as it ends. Whatever is raised, and whoever cancels this: it returns when all have ended.
    """
    waiting = iter(range(count))
    found: dict[int, T] = {}
    turn = asyncio.Lock()

    async def work() -> None:
        for index in waiting:
            found[index] = await one(index)
            if done is not None:
                async with turn:
                    answer = done(index, found[index])
                    if inspect.isawaitable(answer):
                        await answer

    tasks = [asyncio.get_running_loop().create_task(work()) for _ in range(min(workers, count))]
    if not tasks:
        return []
    over: set[asyncio.Task[None]] = set()
    try:
        over, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()  # once: a second time, it would not wait for the end of its box
        with anyio.CancelScope(shield=True):
            await asyncio.wait(tasks)
        for task in tasks:
            _ = task.cancelled() or task.exception()  # looked at; the first is raised below
    for task in sorted(over, key=asyncio.Task.cancelled):
        task.result()
    return [found[index] for index in range(count)]


def _here(callback: OnOutput | None) -> OnOutput | None:
    return None if callback is None else engine.heard_here(callback)
