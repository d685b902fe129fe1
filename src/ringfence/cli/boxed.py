"""`ringfence run`, the part that needs the governed way: one box in this process, streamed, on record."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import anyio

from ringfence import config
from ringfence.cli import common
from ringfence.cli.streams import Sink, Source
from ringfence.cli.telling import EXIT, Told
from ringfence.cli.terminal import json_text, safe
from ringfence.config.settings import Config
from ringfence.errors import ConfigError, RingfenceError
from ringfence.model import Json, Outcome, Status
from ringfence.runs import Runs, unwritten
from ringfence.wanted import Wanted

__all__ = ["Report", "Wanted", "run", "settings"]

_FAILED = 125
_BROKEN_PIPE = 128 + signal.SIGPIPE


def settings(path: Path | None, backend: str | None) -> Config:
    """The configuration named, the user's own, or none. Never one that lies in this folder: that folder may hold
    the very program that is to be confined."""
    found = path or next((p for p in config.own_paths() if p.is_file()), None)
    try:
        loaded = unwritten() if found is None else config.load(found)
    except ConfigError as exc:
        common.fail(str(exc), _FAILED)
    return loaded if backend is None else replace(loaded, sandbox=replace(loaded.sandbox, backend=backend))


class Report:
    """Where the facts go. The file is opened first: a run whose facts could not be kept is not begun."""

    def __init__(self, path: str | None) -> None:
        self._file = None
        if path is not None:
            try:
                descriptor = os.dup(2) if path == "-" else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
                self._file = os.fdopen(descriptor, "w", encoding="utf-8")
            except OSError as exc:
                common.fail(f"--facts {path}: {exc.strerror}", 2)

    def write(self, facts: Json) -> None:
        if self._file is not None:
            with self._file as file:
                file.write(json_text(facts) + "\n")


@dataclass(slots=True)
class _Stop:
    """What ended the run from outside, if anything did: the exit code for it."""

    code: int | None = None


async def run(wanted: Wanted, configured: Config, report: Report, with_stdin: bool) -> int:
    """The exit code."""
    sink, stop = Sink(), _Stop()
    source = Source() if with_stdin and Source.there() else None
    if source is not None:
        wanted = replace(wanted, stdin=source.descriptor)
    outcome: Outcome | None = None
    try:
        with anyio.CancelScope() as scope, _signals(scope, stop):
            loop = asyncio.get_running_loop()
            sink.on_broken = lambda: loop.call_soon_threadsafe(_end, scope, stop, _BROKEN_PIPE)
            async with Runs.open(configured) as runs:
                told = Told("" if configured.path == unwritten().path else f" --config {configured.path}")
                outcome = await runs.run(wanted, origin="cli", tell=sink.tell, channel=told)
    except RingfenceError as exc:
        _say(str(exc))
        return _FAILED
    finally:
        sink.close()
        if source is not None:
            source.close()
    if outcome is None:
        return stop.code if stop.code is not None else _FAILED
    return _ended(outcome, sink, report)


@contextmanager
def _signals(scope: anyio.CancelScope, stop: _Stop) -> Iterator[None]:
    """Ended by signal, the box ends first and the call is closed on record."""
    loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, _end, scope, stop, 128 + number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _end(scope: anyio.CancelScope, stop: _Stop, code: int) -> None:
    stop.code = code
    scope.cancel()


def _ended(outcome: Outcome, sink: Sink, report: Report) -> int:
    report.write(outcome.facts)
    if outcome.result is not None and outcome.ran is None:
        _show(outcome.structured)  # a contract that has something removed lets nothing through as it comes
    plain = outcome.ran is not None and outcome.ran.report.ended == "exited"
    if not plain:
        text = outcome.facts.get("explanation") or str(outcome.status)
        _say(f"{outcome.message} ({text})" if outcome.message else text)
    if outcome.ran is not None and outcome.status in (Status.SUCCESS, Status.FAILED):
        seen = outcome.ran.report
        return 128 + seen.signal if seen.signal is not None else seen.exit_status or 0
    if outcome.status in (Status.SUCCESS, Status.FAILED) and isinstance(outcome.facts.get("exit_status"), int):
        return int(outcome.facts["exit_status"])
    return EXIT[outcome.status]


def _show(structured: object) -> None:
    if not isinstance(structured, dict):
        return
    for name, file in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        text = structured.get(name)
        if isinstance(text, str):
            file.write(safe(text, lines=True) if file.isatty() else text)
            file.flush()


def _say(text: str) -> None:
    print(f"ringfence: {safe(text, lines=True)}", file=sys.stderr, flush=True)
