"""`ringfence box shell`: a person in a box."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from ringfence.box import Attached, Stream
from ringfence.cli import common
from ringfence.cli.box.screen import AFTERWARDS, Screen
from ringfence.cli.box.way import ConfigOption, IdArgument, done, sandbox
from ringfence.cli.terminal import safe
from ringfence.config import paths
from ringfence.sdk.execution import command_result

_DAY = 86_400
_LIMITS = {"wall_seconds": _DAY, "output_bytes": 2**44}
_SHELL = 'exec "$(command -v bash || command -v sh)" -i'
_CHUNK = 65536

Key = bytes | tuple[int, int]


def shell(
    id: str = IdArgument,
    command: str = typer.Option(_SHELL, "--command", metavar="CMD", help="What to run.", show_default=False),
    config_path: Path | None = ConfigOption,
) -> None:
    """A shell in a box, for a person at a terminal: with the files of the box, its limits, and no network.

    It is one step of the box, on record as such. Leave it with `exit` or Ctrl-D; the box stays, and the exit code is
    the shell's. What would set the title or the clipboard of your terminal is not passed on to it.

    \b
    ringfence box shell ID
    ringfence box shell ID --command 'python3'
    """
    if not (os.isatty(0) and os.isatty(1)):
        common.fail("box shell needs a terminal; for a program there is: ringfence box exec ID --shell CMD", 2)
    raise typer.Exit(done(lambda: _shell(config_path, id, command)))


async def _shell(config_path: Path | None, id: str, command: str) -> int:
    screen = Screen()

    def show(stream: Stream, data: bytes) -> None:
        _write(screen.shown(data))

    async with sandbox(config_path, id) as box:
        await box.info()  # there is no such box, it has ended: said before the terminal is touched
        wanted = {"command": command, "pty": list(_size()), "stdin": "stream", "limits": _LIMITS}
        wanted["env"] = {"TERM": paths.process_environment().get("TERM") or "xterm"}
        with _keys() as keys, _raw():
            ended = command_result(await box.outcome("run_shell", wanted, Attached(tell=show, keys=keys)))
    if ended.facts.get("ended") not in ("exited", None):
        print(f"ringfence: {safe(str(ended.facts.get('explanation')))}", file=sys.stderr)
    return ended.exit_code


def _size() -> tuple[int, int]:
    columns, rows = os.get_terminal_size(0)
    return max(columns, 1), max(rows, 1)


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


@contextmanager
def _raw() -> Iterator[None]:
    """Every key goes to the box, Ctrl-C too; the terminal is as it was when this is over, however it ends."""
    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)
    try:
        yield
    finally:
        _write(AFTERWARDS.encode())
        # What was typed or answered meanwhile is for nobody.
        termios.tcsetattr(0, termios.TCSAFLUSH, before)


@contextmanager
def _keys() -> Iterator[AsyncIterator[Key]]:
    """What is typed, and each new size of the terminal, as they come."""
    loop = asyncio.get_running_loop()
    typed: asyncio.Queue[Key | None] = asyncio.Queue()

    def read() -> None:
        try:
            data = os.read(0, _CHUNK)
        except OSError:
            data = b""
        if not data:
            loop.remove_reader(0)
        typed.put_nowait(data or None)

    async def pieces() -> AsyncIterator[Key]:
        while (piece := await typed.get()) is not None:
            yield piece

    loop.add_reader(0, read)
    loop.add_signal_handler(signal.SIGWINCH, lambda: typed.put_nowait(_size()))
    try:
        yield pieces()
    finally:
        loop.remove_reader(0)
        loop.remove_signal_handler(signal.SIGWINCH)
