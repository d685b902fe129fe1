"""`ringfence wrap`, the part that needs boxes: one server in one, its streams passed through, its start on record."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio

from ringfence.box import MIB, Mount, Stream
from ringfence.cli import common, program
from ringfence.cli.boxed import settings as settings_of
from ringfence.cli.streams import Source
from ringfence.cli.terminal import safe
from ringfence.config import paths
from ringfence.config.folders import declared
from ringfence.config.settings import Config
from ringfence.errors import RingfenceError
from ringfence.launching import boxes_of
from ringfence.model import SYSTEM, ServerSpec
from ringfence.runs import Runs
from ringfence.sandbox.launched import BoxedServer

_FAILED = 125
_NUMBERS: dict[Stream, int] = {"stdout": 1, "stderr": 2}
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A server, and what its box has."""

    server: ServerSpec
    network: str = "denied"
    places: tuple[str, ...] = ()
    limits: dict[str, float | int] = field(default_factory=dict)
    listens: bool = False


# ── What the command line says ──


def spec(words: list[str], mounted: tuple[Mount, ...], env: dict[str, str]) -> ServerSpec:
    name = Path(words[0]).name
    return ServerSpec(name, tuple(words), env=env, cwd=str(Path.cwd()), mounts=mounted)


def mounts(given: list[str], unsafe: str) -> tuple[Mount, ...]:
    """Each as HOST:AT[:ro|rw]; HOST alone is seen at its own path."""
    out: list[Mount] = []
    for text in given:
        words = text.split(":")
        mode = words.pop() if words[-1] in ("ro", "rw") and len(words) > 1 else "ro"
        if len(words) not in (1, 2) or not all(words):
            common.fail(f"--mount {text}: write HOST:AT, HOST:AT:ro or HOST:AT:rw", 2)
        host = str(paths.resolve(words[0], Path()))
        try:
            mount = Mount(host, words[1] if len(words) == 2 else host, "rw" if mode == "rw" else "ro", unsafe)
            out.append(declared(mount, Path()))
        except ValueError as exc:
            common.fail(f"--mount {text}: {str(exc).replace('unsafe: REASON', '--unsafe REASON')}", 2)
    return tuple(out)


def variables(given: list[str]) -> dict[str, str]:
    """K=V, or K for the value that we have ourselves."""
    pairs: list[str] = []
    for text in given:
        if "=" in text:
            pairs.append(text)
            continue
        value = paths.variable(text)
        if value is None:
            common.fail(f"--env {text}: there is no such variable here", 2)
        pairs.append(f"{text}={value}")
    return dict(program.environment(pairs))


def limits(memory: int | None, disk: int | None, pids: int | None) -> dict[str, float | int]:
    sizes = {"memory_bytes": memory, "disk_bytes": disk}
    given: dict[str, float | int] = {name: value * MIB for name, value in sizes.items() if value is not None}
    return given if pids is None else {**given, "processes": pids}


def settings(path: Path | None, network: str | None) -> Config:
    loaded = settings_of(path, None)
    if network is not None and network not in loaded.networks:
        known = ", ".join(loaded.networks) or "none"
        common.fail(f"--network {network}: no such network in {loaded.path}; there are: {known}", 2)
    return loaded


# ── The server ──


async def run(wanted: Wanted, configured: Config) -> int:
    """The exit code."""
    server = replace(wanted.server, network=wanted.network, limits=wanted.limits, listens=wanted.listens)
    source = Source()
    started: list[BoxedServer] = []
    try:
        async with Runs.open(configured) as runs:
            boxes = boxes_of(runs.executor, wanted.places)

            async def start() -> None:
                started.append(await boxes.start(server, SYSTEM, source.descriptor))

            with _signals(started):
                await runs.pipeline.server_start(server, SYSTEM, start)
                return await _live(started[0])
    except RingfenceError as exc:
        _say(str(exc))
        return _FAILED


async def _live(server: BoxedServer) -> int:
    try:
        async with anyio.create_task_group() as group:
            for stream in _NUMBERS:
                group.start_soon(_pass_on, server, stream)
            report = await server.over()
    finally:
        with anyio.CancelScope(shield=True):
            await server.stop()
    if report.ended not in ("exited", "signalled"):
        limit = f", limit: {report.limit}" if report.limit is not None else ""
        _say(f"the server was ended by its box ({report.ended}{limit})")
    if report.ended != "exited" or report.exit_status:
        for want in server.lacked():
            _say(f"it wanted {want.what}: {want.option or want.line}")
    return 128 + report.signal if report.signal is not None else report.exit_status or 0


async def _pass_on(server: BoxedServer, stream: Stream) -> None:
    while chunk := await server.receive(stream):
        try:
            # Where nobody reads, only this waits.
            await anyio.to_thread.run_sync(_write, _NUMBERS[stream], chunk)
        except OSError:
            server.signal(signal.SIGTERM)  # whoever read it is gone
            return


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


@contextmanager
def _signals(started: list[BoxedServer]) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def heard(number: int) -> None:
        if not started:
            raise SystemExit(128 + number)
        started[0].signal(number)

    for number in _PASSED_ON:
        loop.add_signal_handler(number, heard, number)
    try:
        yield
    finally:
        for number in _PASSED_ON:
            loop.remove_signal_handler(number)


def _say(text: str) -> None:
    print(f"ringfence wrap: {safe(text, lines=True)}", file=sys.stderr, flush=True)
