"""The governed way that the verbs of `ringfence box` go, and how they end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import typer

from ringfence.box import Attached
from ringfence.cli import boxed, common
from ringfence.cli.telling import EXIT, Told
from ringfence.config.settings import Config
from ringfence.errors import OutcomeUnknown, Refused, StoreError, Unavailable
from ringfence.model import Json, Outcome
from ringfence.runs import Runs, unwritten
from ringfence.sdk.link import Way
from ringfence.sdk.sandbox import AsyncSandbox

T = TypeVar("T")

FAILED = 125
ConfigOption = typer.Option(
    None, "--config", help="A ringfence.yaml for policy, limits and state. Left out: the user's own, if there is one."
)
JsonOption = typer.Option(False, "--json", help="Print JSON.")
IdArgument = typer.Argument(..., metavar="ID", help="The box, as `box create` and `box list` name it.")


@asynccontextmanager
async def opened(configured: Config) -> AsyncIterator[Way]:
    told = Told("" if configured.path == unwritten().path else f" --config {configured.path}")
    async with Runs.open(configured) as runs:

        async def way(tool: str, arguments: Json, attached: Attached) -> Outcome:
            return await runs.call(tool, arguments, attached, origin="cli", channel=told)

        yield way


@asynccontextmanager
async def sandbox(config_path: Path | None, id: str) -> AsyncIterator[AsyncSandbox]:
    """One that is there; whether it is, it says itself when something is asked of it."""
    async with opened(boxed.settings(config_path, None)) as way:
        yield AsyncSandbox.over(way, id, {})


def done(work: Callable[[], Awaitable[T]]) -> T:
    """Work to its end. What goes wrong is one sentence, and an exit code as `ringfence call` has it."""
    try:
        ended: T = common.run(_ended_by_signals, work)
    except Refused as exc:
        common.fail(exc.message, EXIT[exc.status])
    except (Unavailable, OutcomeUnknown, StoreError) as exc:
        common.fail(str(exc), FAILED)
    return ended


async def _ended_by_signals(work: Callable[[], Awaitable[T]]) -> T:
    """SIGTERM and SIGHUP end what is under way as Ctrl-C does, so that it is closed on record."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    ended: list[int] = []

    def end(number: int) -> None:
        ended.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end, number)
    try:
        return await work()
    except asyncio.CancelledError:
        if not ended:
            raise
        raise typer.Exit(128 + ended[0]) from None
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
