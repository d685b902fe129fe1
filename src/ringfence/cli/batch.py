"""`ringfence run --batch`: many programs, each in a fresh box of its own, and a line of JSON for each."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ringfence.cli import common, program
from ringfence.cli.common import TerminalChannel
from ringfence.cli.streams import Sink
from ringfence.cli.terminal import json_text
from ringfence.compose.run_request import RunRequest
from ringfence.compose.runs import Runs
from ringfence.config.settings import Config
from ringfence.core import canonical
from ringfence.core.errors import RingfenceError
from ringfence.core.model import Status
from ringfence.core.record import dataclass
from ringfence.sandbox.files.acted_upon import is_acted_upon
from ringfence.sdk.batch import default_workers, run_all
from ringfence.sdk.execution import Execution, ended, without_result
from ringfence.sdk.once import seconds

_KEYS = ("code", "id", "timeout", "env")
_FOLDER_NAME = re.compile(r"\w[\w.@=+-]{0,199}")
_PLACE = re.compile(r": line 1 column (\d+) \(char \d+\)")
_CLEAR = "\r\x1b[K"


@dataclass(frozen=True, slots=True)
class BatchProgram:
    """A line of the batch."""

    id: str | int
    line: int
    wanted: RunRequest


# ── Reading: every line is checked before anything runs ───────────────────────────────────────────


def read_batch(path: str, shared: RunRequest) -> list[BatchProgram]:
    """The programs of a file, each with what `shared` says of all of them. Ends the command at a line that is wrong."""
    try:
        with open(0 if path == "-" else path, "rb", closefd=path != "-") as file:
            lines = file.read().split(b"\n")
    except (OSError, ValueError) as exc:
        common.fail(f"{path}: {exc.strerror if isinstance(exc, OSError) else exc}", 2)
    out = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                out.append(_program(number, canonical.loads(line.strip()), shared, f"{path}:{number}"))
            except ValueError as exc:
                common.fail(f"{path}:{number}: {_PLACE.sub(_column, str(exc))}", 2)
    return out if shared.output is None else _with_folders(out, path)


def _column(place: re.Match[str]) -> str:
    return f" (column {place[1]})"


def _program(number: int, given: Any, shared: RunRequest, where: str) -> BatchProgram:
    """Raises ValueError."""
    said = {"code": given} if isinstance(given, str) else given
    if not isinstance(said, dict):
        raise ValueError("a program is a string, or an object with code")
    unknown = [key for key in said if key not in _KEYS]
    if unknown:
        raise ValueError(f"there is no key {', '.join(unknown)}; there are {', '.join(_KEYS)}")
    if not isinstance(said.get("code"), str):
        raise ValueError("code is not a string" if "code" in said else "code is missing")
    name = said.get("id")
    if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
        raise ValueError("id is neither a string nor an integer")
    env = said.get("env")
    if env is not None and not (isinstance(env, dict) and all(isinstance(value, str) for value in env.values())):
        raise ValueError("env is not an object with string values")
    own = {} if said.get("timeout") is None else {"wall_seconds": seconds(said["timeout"])}
    wanted = replace(
        shared,
        code=program.source_text(said["code"].encode(), where),
        env={**shared.env, **(env or {})},
        limits={**shared.limits, **own},
    )
    return BatchProgram(number if name is None else name, number, wanted)


def _with_folders(programs: Sequence[BatchProgram], path: str) -> list[BatchProgram]:
    """Each with a folder of its own for its output, named by its id, which must do for a name."""
    lines: dict[str, int] = {}
    for each in programs:
        name = str(each.id)
        if not _FOLDER_NAME.fullmatch(name) or is_acted_upon(name, folder=True):
            common.fail(f"{path}:{each.line}: id {name}: not a name for a folder, which --output makes of it", 2)
        if name in lines:
            common.fail(
                f"{path}:{each.line}: id {name}: line {lines[name]} has it, and --output needs a folder each", 2
            )
        lines[name] = each.line
    out = []
    for each in programs:
        assert each.wanted.output is not None
        place = each.wanted.output / str(each.id)
        folder = program.output_folder(place)
        out.append(replace(each, wanted=replace(each.wanted, output=folder)))
    return out


# ── Running ───────────────────────────────────────────────────────────────────────────────────────


async def run_batch(programs: Sequence[BatchProgram], configured: Config, workers: int | None) -> int:
    """Run them in boxes of this process, each on record; returns the exit code."""
    sink = Sink()
    printed = _Printed(programs, sink)
    over = False
    try:
        with common.ended_by_signals() as stop:
            loop = asyncio.get_running_loop()
            sink.on_broken = lambda: loop.call_soon_threadsafe(stop.end, common.BROKEN_PIPE)
            async with Runs.open(configured) as runs:
                terminal = TerminalChannel.under(configured)

                async def one(index: int) -> None:
                    try:
                        found = ended(await runs.run(programs[index].wanted, origin="cli", channel=terminal))
                    except RingfenceError as exc:  # an input that is gone, say
                        found = without_result(exc)
                    printed.done(index, found)

                printed.begin()
                await run_all(len(programs), one, workers or default_workers())
                over = True
    except RingfenceError as exc:
        common.say(f"ringfence: {exc}")
        return common.NO_BOX
    finally:
        printed.end()
        sink.close()
    if (lost := sink.lost) is not None:
        return lost
    if not over:
        return stop.code if stop.code is not None else common.NO_BOX
    if printed.unavailable is not None and printed.count[Status.UNAVAILABLE] == len(programs):
        common.say(f"ringfence: {printed.unavailable}; nothing was run")
        return common.NO_BOX
    return 0 if printed.failed == 0 else 1


class _Printed:
    """The line of each program on stdout, once those of all before it are there; and on a terminal, how far it is."""

    def __init__(self, programs: Sequence[BatchProgram], sink: Sink) -> None:
        self.count = dict.fromkeys(Status, 0)
        self.unavailable: str | None = None
        self._programs = programs
        self._sink = sink
        self._lines: dict[int, bytes] = {}
        """Those that wait for one before them."""
        self._next = 0
        self._began: float | None = None
        self._terminal = os.isatty(2)

    @property
    def failed(self) -> int:
        return sum(self.count.values()) - self.count[Status.SUCCESS]

    def begin(self) -> None:
        self._began = time.monotonic()
        self._draw(self._far())

    def done(self, index: int, execution: Execution) -> None:
        self.count[Status(execution.status)] += 1
        if execution.status == Status.UNAVAILABLE and execution.error is not None:
            self.unavailable = self.unavailable or execution.error.value
        self._lines[index] = _line(self._programs[index].id, execution)
        self._draw("")
        while self._next in self._lines:
            self._sink.tell("stdout", self._lines.pop(self._next))
            self._next += 1
        self._draw(self._far())

    def end(self) -> None:
        if self._began is not None:
            self._draw(f"ringfence: {self._far()}, {time.monotonic() - self._began:.1f} s\n")

    def _far(self) -> str:
        return f"{sum(self.count.values())}/{len(self._programs)} done, {self.failed} failed"

    def _draw(self, text: str) -> None:
        if self._terminal:
            self._sink.draw(_CLEAR + text)


def _line(name: str | int, execution: Execution) -> bytes:
    error = execution.error
    told = {
        "id": name,
        "status": execution.status,
        "exit_status": execution.facts.get("exit_status"),
        "stdout": "".join(execution.logs.stdout),
        "stderr": "".join(execution.logs.stderr),
        "error": None if error is None else {"name": error.name, "value": error.value},
        "ended": execution.facts.get("ended"),
        "facts": execution.facts,
    }
    if execution.logs.truncated:
        told["truncated"] = True
    return (json_text(told, indent=None) + "\n").encode("utf-8", "backslashreplace")
