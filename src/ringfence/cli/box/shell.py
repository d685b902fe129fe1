"""`ringfence box shell`: a person in a box."""

from __future__ import annotations

import asyncio
import codecs
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import typer

from ringfence.cli import common, options
from ringfence.cli.box.shared import IdArgument, finish, sandbox
from ringfence.cli.terminal import safe
from ringfence.config import paths
from ringfence.core.box import Attached, Stream
from ringfence.core.system import write_all
from ringfence.sdk.execution import command_result

_DAY = 86_400
_LIMITS = {"wall_seconds": _DAY, "output_bytes": 2**44}
_SHELL = 'exec "$(command -v bash || command -v sh)" -i'
_CHUNK = 65536

AFTERWARDS = "\x1b[0m\x1b[?25h\x1b[?1l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b>"
"""Colours, cursor, keys, mouse and pasting as they were."""

_STRINGS = frozenset("]PX^_")
"""After ESC they begin a string, which BEL or ESC \\ ends."""
_ENDS = frozenset("\x18\x1a")
"""Give up whatever has begun."""
_ESC = "\x1b"
_BEL = "\x07"
_DEL = "\x7f"
_State = Literal["text", "escape", "string", "string escape"]

Key = bytes | tuple[int, int]


def shell(
    id: str = IdArgument,
    command: str = typer.Option(_SHELL, "--command", metavar="CMD", help="What to run.", show_default=False),
    config_path: options.OwnConfig = None,
) -> None:
    """Open a shell in a box, for a person at a terminal: with the files, limits and network of the box.

    It is one step of the box, on record as such. End it with `exit` or Ctrl-D; the box stays, and the exit code is the
    shell's. Sequences that would set the title or the clipboard of your terminal are removed.

    \b
    ringfence box shell ID
    ringfence box shell ID --command 'python3'
    """
    if not (os.isatty(0) and os.isatty(1)):
        common.fail("box shell needs a terminal; for a program there is: ringfence box exec ID --shell CMD", 2)
    raise typer.Exit(finish(lambda: _shell(config_path, id, command)))


async def _shell(config_path: Path | None, id: str, command: str) -> int:
    screen = TerminalFilter()

    def show(stream: Stream, data: bytes) -> None:
        write_all(1, screen.shown(data))

    async with sandbox(config_path, id) as box:
        await box.info()  # if there is no such box, or it has ended, fail before the terminal is touched
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


@contextmanager
def _raw() -> Iterator[None]:
    """Every key goes to the box, Ctrl-C too; the terminal is as it was when this is over, however it ends."""
    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)
    try:
        yield
    finally:
        write_all(1, AFTERWARDS.encode())
        # Discard what was typed or answered meanwhile.
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


# ── What the terminal gets ────────────────────────────────────────────────────────────────────────


class TerminalFilter:
    """Takes what the box writes, in any pieces, and gives what the terminal may get: text, colours, cursor moves.

    Strings for the terminal itself are removed: they set its title and clipboard, and make it answer with what they
    set, which would be typed into the program that reads the terminal next.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._state: _State = "text"

    def shown(self, data: bytes) -> bytes:
        # Controls of eight bits mean the same as two characters, so there are none.
        text = (character for character in self._decoder.decode(data) if not "\x80" <= character <= "\x9f")
        return "".join(map(self._take, text)).encode("utf-8", "replace")

    def _take(self, character: str) -> str:
        """What goes on: an ESC only together with what follows it, so that nothing can be put between them."""
        if self._state == "text":
            self._state = "escape" if character == _ESC else "text"
            return "" if character == _ESC else character
        if self._state == "string" or character == _ESC:
            inside = self._state.startswith("string")
            if character == _ESC:
                self._state = "string escape" if inside else "escape"
            elif character == _BEL or character in _ENDS:
                self._state = "text"
            return ""
        if self._state == "string escape" and character == "\\":
            self._state = "text"
            return ""
        return self._escaped(character)

    def _escaped(self, character: str) -> str:
        if character in _STRINGS:
            self._state = "string"
            return ""
        if character == _DEL or (character < " " and character not in _ENDS):
            return character  # terminals obey it at once, and are still after the ESC
        self._state = "text"
        return character if character in _ENDS else _ESC + character
