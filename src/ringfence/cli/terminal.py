"""The terminal and the person at it: text that it must not act upon, and questions that only a person may answer."""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TextIO

from ringfence.core import invisible
from ringfence.core.errors import Unavailable
from ringfence.core.invisible import json_text as json_text
from ringfence.core.system import write_all

_TERMINAL = "/dev/tty"
MARGIN = "    | "
_CONTINUED = "    : "
_USUAL = 80
_NARROWEST = 40
_LONGEST_ANSWER = 1024
_LONGEST_NAME = 60
_PLAIN = re.compile(r"[\w.:/@%+~#?&=,-]+", re.ASCII)
_BLANKS = re.compile(r"(?<= ) +|[^\S \n\t]+|^ +| +$")
"""What would look like one blank, like the edge of a line or like a column."""


def safe(text: str, *, lines: bool = False) -> str:
    """The text with everything escaped that a terminal could act upon or that a reader would not see.

    `lines` keeps newlines and tabs, for text that may span several lines.
    """
    return invisible.visible(text, lines=lines)


def quoted(text: str, margin: str) -> str:
    """Untrusted text of several lines, each behind a margin, so that none can pass for a line of ours."""
    return "\n".join(margin + safe(line) for line in text.split("\n"))


def within(text: str, columns: int) -> str:
    """Quoted lines, broken where a terminal would break them, with a margin before the rest of each: a terminal would
    begin the rest at its edge, where untrusted text could pass for a line of ours."""
    out: list[str] = []
    for line in text.split("\n"):
        margin = ""
        start = 0
        while line.startswith(MARGIN):
            end = _end(line, start, columns - len(margin))
            out.append(margin + line[start:end])
            if end == len(line):
                break
            margin = _CONTINUED
            start = end
        else:
            out.append(line)
    return "\n".join(out)


def _end(line: str, start: int, columns: int) -> int:
    """Where the part that fits into so many columns ends."""
    for place in range(start, len(line)):
        columns -= _columns_of(line[place])
        if columns < 0:
            return max(place, start + 1)
    return len(line)


def _columns_of(character: str) -> int:
    """How many columns of a line a terminal may give to it: where terminals differ, or it is younger than Python, as
    many as the widest do."""
    wide = unicodedata.east_asian_width(character) in "WFA" or unicodedata.category(character) == "Cn"
    return 2 if wide else 1


def columns(descriptor: int) -> int:
    try:
        return max(os.get_terminal_size(descriptor).columns or _USUAL, _NARROWEST)
    except OSError:
        return _USUAL


def cut(text: str, most: int) -> str:
    """One line, escaped, no wider than `most`."""
    line = safe(text[: most + 1])
    return line if _end(line, 0, most) == len(line) else line[: _end(line, 0, most - 1)] + "…"


def _blanks(found: re.Match[str]) -> str:
    return "".join(map(invisible.escape, found.group()))


def foreign(name: str) -> str:
    """A name that others chose (a URI, a session, a folder), on a line of ours: whatever is in it, the line stays one
    line that is ours and is not much wider. A plain word stands as it is, anything else in quotes."""
    if len(name) <= _LONGEST_NAME and _PLAIN.fullmatch(name):
        return name
    inner = _BLANKS.sub(_blanks, name[: _LONGEST_NAME + 1])
    inner = safe(inner.replace('"', r"\""))
    if (end := _end(inner, 0, _LONGEST_NAME)) < len(inner) or len(name) > _LONGEST_NAME:
        return f'"{inner[:end]}…" ({len(name)} characters)'
    return f'"{inner}"'


_PAINT = {"good": "32", "bad": "31", "warning": "33", "error": "31", "aside": "2"}


def painted(text: str, kind: str, file: TextIO | None = None) -> str:
    """The text in the colour of its kind, where `file` (stdout) is a terminal that is to show colours."""
    code = _PAINT.get(kind)
    if code is None or not (file or sys.stdout).isatty():
        return text
    from ringfence.config.paths import colours  # noqa: PLC0415 - of use on a terminal alone

    if not colours():
        return text
    return f"\x1b[{code}m{text}\x1b[0m"


_WORDS = {
    **dict.fromkeys(("success", "ok", "running", "kept"), "good"),
    **dict.fromkeys(("failed", "denied", "killed", "timeout", "unavailable", "BROKEN", "MISSING", "OFF"), "bad"),
    **dict.fromkeys(("approval_required", "validation_failure", "unknown", "weaker", "paused"), "warning"),
    **dict.fromkeys(("n/a", "stopped", "-"), "aside"),
}


def word(text: str) -> str:
    """A word that stands for how something is, in its colour; whatever is around it stays."""
    bare = text.strip()
    return text.replace(bare, painted(bare, _WORDS.get(bare.partition(" ")[0], "")), 1) if bare else text


def table(heads: Sequence[str] | None, rows: Sequence[Sequence[object]], most: int = 120) -> str:
    """Rows beneath each other, with a head where there is one, each cell on one line and escaped."""
    lines = [["-" if cell is None else cut(_BLANKS.sub(_blanks, str(cell)), most) for cell in row] for row in rows]
    shown = [list(heads), *lines] if heads is not None else lines
    widths = [max(len(line[n]) for line in shown) for n in range(len(shown[0]))]
    out = []
    for number, line in enumerate(shown):
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        cells[-1] = cells[-1].rstrip()
        out.append("  ".join(map(word, cells) if heads is None or number else cells).rstrip())
    return "\n".join(out)


def moment(at: float, form: str = "%Y-%m-%d %H:%M:%S UTC") -> str:
    try:
        return datetime.fromtimestamp(at, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):  # the database was edited
        return "no time"


def _forget_typed(descriptor: int) -> None:
    """What was typed before a question was there is no answer to it."""
    try:
        import termios  # noqa: PLC0415 - not every system has it
    except ImportError:
        return
    with suppress(termios.error):
        termios.tcflush(descriptor, termios.TCIFLUSH)


def _opened(purpose: str) -> int:
    """The controlling terminal. Raises Unavailable."""
    try:
        return os.open(_TERMINAL, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        raise Unavailable("no_terminal", f"there is no terminal here {purpose}; run this in one") from None


def tell(text: str) -> None:
    """Show something to the person at the controlling terminal alone: what reads our stdout does not get it. Raises
    Unavailable."""
    descriptor = _opened("to show it on")
    try:
        write_all(descriptor, text.encode("utf-8", "backslashreplace"))
    finally:
        os.close(descriptor)


def confirm(shown: str, question: str) -> bool:
    """Show something on the controlling terminal and ask the person there; yes is `y` or `yes`.

    It never reads stdin: an answer from a pipe is a program's, not a person's. Raises Unavailable.
    """
    descriptor = _opened("to ask a person on")
    with open(descriptor, "r+b", buffering=0) as terminal:
        text = f"{within(shown, columns(descriptor))}\n"
        write_all(descriptor, text.encode("utf-8", "backslashreplace"))
        _forget_typed(descriptor)
        write_all(descriptor, f"{question} [y/N] ".encode("utf-8", "backslashreplace"))
        answer = terminal.readline(_LONGEST_ANSWER)
    return answer.decode("utf-8", "replace").strip().lower() in ("y", "yes")
