"""`ringfence box shell`: a person in a box."""

from __future__ import annotations

import asyncio
import codecs
import os
import re
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

_STRINGS = frozenset("]PX^_k")
"""After ESC they begin a string, which BEL or ESC \\ ends; `k`, a title, in screen and tmux alone."""
_ENDS = frozenset("\x18\x1a")
"""Give up whatever has begun."""
_ESC = "\x1b"
_BEL = "\x07"
_DEL = "\x7f"
_ENQ = "\x05"
"""Terminals answer it with a text that was set before."""
_State = Literal["text", "escape", "designation", "control", "string", "string escape"]

Key = bytes | tuple[int, int]


def shell(
    id: str = IdArgument,
    command: str = typer.Option(_SHELL, "--command", metavar="CMD", help="What to run.", show_default=False),
    config_path: options.OwnConfig = None,
) -> None:
    """Open a shell in a box, for a person at a terminal: with the files, limits and network of the box.

    It is one step of the box, on record as such. End it with `exit` or Ctrl-D; the box stays, and the exit code is the
    shell's. Sequences that would set the title or the clipboard of your terminal, or make it answer, are removed, and
    the modes that programs set are reset at the end.

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
        with _keys() as keys, _raw(screen):
            ended = command_result(await box.outcome("run_shell", wanted, Attached(tell=show, keys=keys)))
    if ended.facts.get("ended") not in ("exited", None):
        print(f"ringfence: {safe(str(ended.facts.get('explanation')))}", file=sys.stderr)
    return ended.exit_code


def _size() -> tuple[int, int]:
    columns, rows = os.get_terminal_size(0)
    return max(columns, 1), max(rows, 1)


@contextmanager
def _raw(screen: TerminalFilter) -> Iterator[None]:
    """Every key goes to the box, Ctrl-C too; the terminal is as it was when this is over, however it ends."""
    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)
    try:
        yield
    finally:
        write_all(1, screen.afterwards())
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

_KNOWN = re.compile(r"[0-9;:]*[@A-MPSTXZ`abdefgmrsu]|\?[0-9;]*[JK]|!p|[0-9]* q")
"""Control sequences without their ESC [ that nothing is answered to: moves, erases, colours, margins, a soft reset, the
shape of the cursor."""
_CHARACTER_SETS = frozenset("()*+-./#")
"""After ESC, and before another character, they choose a character set or the size of a line."""
_MODES = frozenset({4})
_PRIVATE_MODES = frozenset(
    (*(1, 5, 6, 7, 12, 25, 47, 66, 1047, 1048, 1049, 2004, 2026), *(1000, 1002, 1003, 1004, 1006, 1015, 1016))
)
"""Keys, colours, wrapping, cursor, the other screen, pasting; mouse and focus."""
_OTHER_SCREEN = frozenset({47, 1047, 1049})
_USUALLY_ON = frozenset({7, 25})
_MOVES_CURSOR = frozenset({6, 1048, *_OTHER_SCREEN})
"""Where these are switched off, the cursor moves: that is for a terminal on which they are on."""
_LONGEST = 64
"""A control sequence that is longer means nothing to a terminal."""


class TerminalFilter:
    """Takes what the box writes, in any pieces, and gives what the terminal may get: text, colours, cursor moves, and
    modes that can be taken back.

    Removed is what a terminal would answer: questions for its kind, its state, the place of its cursor. The answer is
    typed into the program that reads the terminal next, which may be the person's own shell. So are strings for the
    terminal itself, which set its title and clipboard. What is not known to be harmless counts as a question.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._state: _State = "text"
        self._begun = ""
        """Of a sequence that has not ended yet, what follows its ESC."""
        self._on: set[int] = set()
        """Private modes that move the cursor when they are switched off, and are on."""
        self._margins = False

    def shown(self, data: bytes) -> bytes:
        # Controls of eight bits mean the same as two characters, so there are none.
        text = (character for character in self._decoder.decode(data) if not "\x80" <= character <= "\x9f")
        return "".join(map(self._take, text)).encode("utf-8", "replace")

    def afterwards(self) -> bytes:
        """Everything as it was before: the screen, colours, cursor, keys, mouse, pasting, character sets."""
        out = "".join(f"\x1b[?{mode}l" for mode in sorted(self._on & _OTHER_SCREEN))
        if self._margins or 6 in self._on:
            out += "\x1b[?6l\x1b[r\x1b[999;1H"
        off = sorted(_PRIVATE_MODES - _USUALLY_ON - _MOVES_CURSOR - {12})
        out += "".join(f"\x1b[?{mode}l" for mode in off) + "".join(f"\x1b[?{mode}h" for mode in sorted(_USUALLY_ON))
        return f"{out}\x1b[4l\x1b[0m\x1b[0 q\x0f\x1b(B\x1b>".encode()

    def _take(self, character: str) -> str:
        """What goes on: an ESC only together with all that follows it, so that nothing can be put between them."""
        if character == _ENQ:
            return ""
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
        if character < " " and character not in _ENDS:
            return character  # terminals obey it at once, and are still in the sequence
        if character == _DEL:
            return ""
        if character in _ENDS:
            self._state = "text"
            return character
        return self._control(character) if self._state == "control" else self._escaped(character)

    def _escaped(self, character: str) -> str:
        if self._state == "designation":
            self._state = "text"
            chosen = self._begun
            known = chosen in _CHARACTER_SETS and "0" <= character <= "~"
            return f"{_ESC}{chosen}{character}" if known else ""
        self._begun = ""
        if character in _STRINGS:
            self._state = "string"
        elif character == "[":
            self._state = "control"
        elif " " <= character <= "/":
            self._state = "designation"
            self._begun = character
        else:
            self._state = "text"
            return _ESC + character if "0" <= character <= "~" and character != "Z" else ""  # ESC Z: what are you?
        return ""

    def _control(self, character: str) -> str:
        if " " <= character <= "?":
            self._begun = (self._begun + character)[: _LONGEST + 1]
            return ""
        self._state = "text"
        given = self._begun
        if len(given) > _LONGEST or character > "~":
            return ""
        if character in "hl":
            return self._modes(given, character)
        if _KNOWN.fullmatch(given + character) is None:
            return ""
        self._margins = self._margins or character == "r"
        return f"{_ESC}[{given}{character}"

    def _modes(self, given: str, character: str) -> str:
        mark = "?" if given[:1] == "?" else ""
        known = _PRIVATE_MODES if mark else _MODES
        modes = [int(each) for each in given.removeprefix("?").split(";") if each.isdecimal() and each.isascii()]
        modes = [mode for mode in modes if mode in known]
        if mark:
            moving = _MOVES_CURSOR.intersection(modes)
            self._on = self._on | moving if character == "h" else self._on - moving
        return f"{_ESC}[{mark}{';'.join(map(str, modes))}{character}" if modes else ""
