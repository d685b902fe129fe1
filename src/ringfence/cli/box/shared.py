"""What the verbs of `ringfence box` share: governed calls, how they end, tables, and the progress of long work."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import typer

from ringfence.cli import common
from ringfence.cli.common import EXIT_CODES, TerminalChannel
from ringfence.cli.progress import progress
from ringfence.cli.terminal import table
from ringfence.compose.runs import Runs
from ringfence.config.settings import Config
from ringfence.core.box import Attached
from ringfence.core.errors import OutcomeUnknown, Refused, StoreError, Unavailable
from ringfence.core.model import Json, Outcome
from ringfence.core.sizes import short_size
from ringfence.sdk.client import CallTool
from ringfence.sdk.infos import FileInfo, Progress, SandboxInfo, SnapshotInfo, VolumeInfo
from ringfence.sdk.sandbox import AsyncSandbox

T = TypeVar("T")

IdArgument = typer.Argument(..., metavar="ID", help="The box, as `box create` and `box list` name it.")


@asynccontextmanager
async def open_calls(configured: Config) -> AsyncIterator[CallTool]:
    terminal = TerminalChannel.under(configured)
    async with Runs.open(configured) as runs:

        async def way(tool: str, arguments: Json, attached: Attached) -> Outcome:
            return await runs.call(tool, arguments, attached, origin="cli", channel=terminal)

        yield way


@asynccontextmanager
async def sandbox(config_path: Path | None, id: str) -> AsyncIterator[AsyncSandbox]:
    """A box by its id. Whether there is such a box, the first call tells."""
    async with open_calls(common.own_config(config_path)) as way:
        yield AsyncSandbox.over(way, id, {})


def finish(work: Callable[[], Awaitable[T]]) -> T:
    """Run work to its end. An error is printed as one sentence, with an exit code as of `ringfence call`."""
    try:
        ended: T = common.run(_ended_by_signals, work)
    except Refused as exc:
        common.fail(as_boxes(exc.message), EXIT_CODES[exc.status])
    except (Unavailable, OutcomeUnknown, StoreError) as exc:
        common.fail(as_boxes(str(exc)), common.NO_BOX)
    return ended


_BOTH = "list_sessions, or `ringfence box list`, shows"
_SESSION = re.compile(r"(?<![\w./'\"`-])session(s?)(?![\w./'\"`-])")


def as_boxes(text: str) -> str:
    """A message about sessions, in the word that these verbs have for them (docs/glossary.md)."""
    return _SESSION.sub(lambda found: "boxes" if found[1] else "box", text.replace(_BOTH, "`ringfence box list` shows"))


async def _ended_by_signals(work: Callable[[], Awaitable[T]]) -> T:
    """SIGTERM and SIGHUP end the work as Ctrl-C does, so that its calls are closed on record."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
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


# ── Showing ───────────────────────────────────────────────────────────────────────────────────────


def plain(value: Any) -> Any:
    """A record as JSON has it."""
    return asdict(value)


def sandboxes(infos: list[SandboxInfo]) -> str:
    rows = [
        (
            info.id,
            info.state if info.why is None else f"{info.state} ({info.why})",
            info.template,
            _moment(info.created_at),
            _moment(info.ended_at or info.expires_at),
            info.step,
            _memory(info),
            " ".join(f"{name}={value}" for name, value in info.metadata.items()) or None,
        )
        for info in infos
    ]
    return table(("ID", "STATE", "TEMPLATE", "CREATED", "ENDS", "STEPS", "MEMORY", "METADATA"), rows)


def _memory(info: SandboxInfo) -> str | None:
    """What it uses; of a paused one also whether the host has any of it back."""
    used = size(info.memory_bytes)
    if info.state != "paused" or used is None:
        return used
    if info.given_back_bytes is not None:
        return f"{used}, {size(info.given_back_bytes)} given back"
    return f"{used}, resident" if info.isolation.get("paused_memory") == "resident" else used


def snapshots(infos: list[SnapshotInfo]) -> str:
    rows = [(each.id, each.name, each.files, size(each.bytes), _moment(each.created_at)) for each in infos]
    return table(("ID", "NAME", "FILES", "SIZE", "CREATED"), rows)


def volumes(infos: list[VolumeInfo]) -> str:
    rows = [(each.name, each.files, size(each.bytes), size(each.max_bytes), _moment(each.saved_at)) for each in infos]
    return table(("NAME", "FILES", "SIZE", "LIMIT", "SAVED"), rows)


def files(infos: list[FileInfo]) -> str:
    rows = [
        (
            each.kind,
            f"{each.mode:04o}",
            each.bytes if each.kind == "file" else None,
            each.modified.strftime("%Y-%m-%d %H:%M:%S"),
            each.path if each.target is None else f"{each.path} -> {each.target}",
        )
        for each in infos
    ]
    return table(("KIND", "MODE", "BYTES", "MODIFIED", "PATH"), rows)


def _moment(text: str | None) -> str | None:
    return None if text is None else text[:19].replace("T", " ")


def size(number: int | None) -> str | None:
    """Bytes, short."""
    return None if number is None else short_size(number)


@asynccontextmanager
async def metered(what: str) -> AsyncIterator[Callable[[Progress], None]]:
    """A line on stderr that shows progress, on a terminal; yields what is told how far it is."""
    with progress(what, sizes=True) as line:

        def tell(far: Progress) -> None:
            line.done = far.done
            line.total = far.total

        yield tell
