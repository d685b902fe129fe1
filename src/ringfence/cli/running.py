"""How a verb runs and ends: its exit code, the user's own configuration, asynchronous work, signals.

`ringfence run` needs no more than this, so nothing here loads a parser of command lines, the store or the audit log.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ringfence import config
from ringfence.cli.terminal import painted, safe
from ringfence.config.settings import Config
from ringfence.core.errors import ConfigError, RingfenceError
from ringfence.core.model import Json, Status
from ringfence.core.record import dataclass

T = TypeVar("T")

EXIT_CODES = {
    Status.SUCCESS: 0,
    Status.FAILED: 1,
    Status.VALIDATION_FAILURE: 2,
    Status.TIMEOUT: 124,
    Status.UNAVAILABLE: 125,
    Status.UNKNOWN: 125,
    Status.DENIED: 126,
    Status.APPROVAL_REQUIRED: 126,
    Status.KILLED: 137,
}
"""Exit codes of verbs that make a call."""
NO_BOX = 125
"""The exit code where a box cannot be made or has failed."""
BROKEN_PIPE = 128 + 13
"""The exit code where the reader of our output is gone: as of SIGPIPE, which other systems do not have."""
OUTPUT_LOST = 74
"""The exit code where output could not be written, to a full disk for one: as `EX_IOERR` of sysexits."""
_WAITING = re.compile(r"waiting for a person to answer (apr_[0-9a-f]+)")


def fail(text: str, code: int = 1) -> NoReturn:
    """Say what is wrong on stderr and exit."""
    print(painted(safe(text, lines=True), "error", sys.stderr), file=sys.stderr)
    raise SystemExit(code)


def own_config(path: Path | None, backend: str | None = None) -> Config:
    """The configuration named, the user's own, or none. Never one in the current folder, which may hold the very
    program that is to be confined."""
    from ringfence.compose.runs import default_config  # noqa: PLC0415 - a verb that runs no box need not load it

    try:
        found = path or next((p for p in config.own_paths() if p.is_file()), None)
    except ConfigError as exc:
        fail(str(exc), 2)
    if path is not None and not path.is_file():
        named_config(path)
        fail(f"{path}: {'is not a regular file' if path.exists() else 'there is no such file'}", 2)
    try:
        loaded = default_config() if found is None else config.load(found)
    except ConfigError as exc:
        fail(str(exc), NO_BOX)
    return loaded if backend is None else replace(loaded, sandbox=replace(loaded.sandbox, backend=backend))


def named_config(path: Path) -> Path:
    """The file that an option names; a folder is none."""
    if path.is_dir():
        there = path / "ringfence.yaml"
        hint = f"name the file in it: {there}" if there.is_file() else "there is no ringfence.yaml in it"
        fail(f"{path} is a folder; {hint}", 2)
    return path


# ── Running ───────────────────────────────────────────────────────────────────────────────────────


def run(work: Callable[..., Awaitable[T]], *arguments: Any, fast: bool = False) -> T:
    """Run asynchronous work to its end; of several errors at once, the first of ours is raised.

    `fast` takes uvloop, which is worth its import where many calls are served; Windows has none.
    """
    fast = fast and sys.platform != "win32"
    try:
        if not fast:
            return asyncio.run(_awaited(work(*arguments)))
        import anyio  # noqa: PLC0415 - see above

        return anyio.run(work, *arguments, backend_options={"use_uvloop": True})
    except BaseExceptionGroup as group:
        errors = _flat(group)
        raise next((e for e in errors if isinstance(e, RingfenceError | OSError)), errors[0]) from group


async def _awaited(work: Awaitable[T]) -> T:
    return await work


def _flat(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    out: list[BaseException] = []
    for item in group.exceptions:
        out.extend(_flat(item) if isinstance(item, BaseExceptionGroup) else [item])
    return out


@dataclass(slots=True)
class OutsideEnd:
    """How work is ended from outside, and the exit code if it was."""

    task: asyncio.Task[Any]
    code: int | None = None

    def end(self, code: int) -> None:
        if self.code is None:
            self.code = code
            self.task.cancel()


@contextmanager
def ended_by_signals() -> Iterator[OutsideEnd]:
    """SIGTERM and SIGHUP cancel the work in here: boxes end first, and calls are closed on record."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGHUP)
    task = asyncio.current_task()
    assert task is not None
    stop = OutsideEnd(task)

    def heard(number: int, _: object) -> None:
        loop.call_soon_threadsafe(stop.end, 128 + number)

    # Not `add_signal_handler`, which loads a parser of Python to see that a handler is no coroutine.
    before = [signal.signal(number, heard) for number in numbers]
    try:
        yield stop
    except asyncio.CancelledError:
        if stop.code is None or task.uncancel() > 0:
            raise
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


# ── Notifications to a caller at a terminal ───────────────────────────────────────────────────────


class TerminalChannel:
    """The channel of a caller at a terminal, who gets notifications and answers no questions."""

    def __init__(self, where: str) -> None:
        self.capabilities: Json = {}
        self._where = where
        self._seen: set[str] = set()

    @classmethod
    def under(cls, configured: Config) -> TerminalChannel:
        """That of a caller whose runs are made in this process under a configuration of their own, or none."""
        from ringfence.compose.runs import default_config  # noqa: PLC0415 - as above

        return cls("" if configured.path == default_config().path else f" --config {configured.path}")

    async def ask(self, questions: Mapping[str, Json]) -> Mapping[str, Json]:
        return {}

    async def notify(self, method: str, params: Json) -> None:
        if method == "notifications/progress":
            self.progress(params)

    def progress(self, params: Json) -> None:
        message = str(params.get("message") or "")
        waiting = _WAITING.fullmatch(message)
        if waiting is None:
            total = f"/{params['total']}" if params.get("total") is not None else ""
            say(f"progress {params.get('progress')}{total} {message}".rstrip())
        elif waiting[1] not in self._seen:
            self._seen.add(waiting[1])
            say(f"waiting for a person; in another terminal: {self._answer(waiting[1])}")

    def left_open(self, approval_id: str) -> None:
        """The call ended without an answer: say how a person gives it, unless that was said."""
        if approval_id not in self._seen:
            say(f"to approve it: {self._answer(approval_id)}")

    def _answer(self, approval_id: str) -> str:
        return f"ringfence approvals approve {approval_id}{self._where}"


def say(text: str) -> None:
    print(safe(text), file=sys.stderr, flush=True)
