"""The terminal and the person at it: text that it must not act upon, and questions that only a person may answer."""

from __future__ import annotations

import json
import os
import unicodedata
from datetime import UTC, datetime
from typing import Any

from ringfence.core import invisible
from ringfence.core.errors import Unavailable
from ringfence.core.system import write_all

_TERMINAL = "/dev/tty"
MARGIN = "    | "
_CONTINUED = "    : "
_USUAL = 80
_NARROWEST = 40
_LONGEST_ANSWER = 1024


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
        columns -= 2 if unicodedata.east_asian_width(line[place]) in "WF" else 1
        if columns < 0:
            return max(place, start + 1)
    return len(line)


def columns(descriptor: int) -> int:
    try:
        return max(os.get_terminal_size(descriptor).columns or _USUAL, _NARROWEST)
    except OSError:
        return _USUAL


def cut(text: str, most: int) -> str:
    """One line, escaped, no longer than `most`."""
    line = safe(text[: most + 1])
    return line if len(line) <= most else line[: most - 1] + "…"


def json_text(value: Any, *, indent: int | None = 2) -> str:
    """JSON that reads the same to a program and cannot steer a terminal."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    # Only strings can hold what is escaped, and inside them an escape means the same.
    return invisible.quotable(text, lambda character: json.dumps(character)[1:-1], "\n")


def moment(at: float, form: str = "%Y-%m-%d %H:%M:%S UTC") -> str:
    try:
        return datetime.fromtimestamp(at, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):  # the database was edited
        return "no time"


def confirm(shown: str, question: str) -> bool:
    """Show something on the controlling terminal and ask the person there; yes is `y` or `yes`.

    It never reads stdin: an answer from a pipe is a program's, not a person's. Raises Unavailable.
    """
    try:
        descriptor = os.open(_TERMINAL, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        raise Unavailable("no_terminal", "there is no terminal here to ask a person on; run this in one") from None
    with open(descriptor, "r+b", buffering=0) as terminal:
        text = f"{within(shown, columns(descriptor))}\n{question} [y/N] "
        write_all(descriptor, text.encode("utf-8", "backslashreplace"))
        answer = terminal.readline(_LONGEST_ANSWER)
    return answer.decode("utf-8", "replace").strip().lower() in ("y", "yes")
