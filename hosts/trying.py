"""All the parts of a guest, one after the other; what has a result for this code already is not tried again."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

from hosts.guests import Guest
from hosts.machine import Line, Running
from hosts.parts import Part, parts
from hosts.places import Trouble, digest, say
from hosts.project import bring, digest_of
from hosts.results import Result, Results, is_result, read

_INSIDE = Path(__file__).parent / "inside"
_PROGRESS = re.compile(r"^\d+/\d+  .*", re.MULTILINE)
"""A line of `doctor` that says how far it is."""


def mark(code: str, part: Part) -> str:
    """What a result is of: the code, and how it was tried."""
    return digest(code, (_INSIDE / "tries.py").read_text(), part.argv())


def _judged(part: Part, told: dict[str, Any]) -> dict[str, Any]:
    data, checks = told["data"], told["checks"]
    if part.limits is not None:
        held = data.get("limits")
        note = "" if held == part.limits else f"they are held by {held}"
        checks.append({"name": "the kernel holds the limits", "ok": held == part.limits, "note": note})
    return told


@dataclass
class _Trial:
    """Parts of one guest that are tried in one process, and the results that have come of it so far."""

    guest: Guest
    code: str
    parts: Sequence[tuple[Part, str]]
    of: int
    found: list[Result] = field(default_factory=list)

    def run(self, line: Line, keep: Callable[[str, Result], None]) -> None:
        kernel = line.call(["uname", "-r"]).out.strip()
        pending, began = b"", time.monotonic()
        self._announce()

        def ended(text: str) -> None:
            nonlocal began
            part, marked = self.parts[len(self.found)]
            told = _judged(part, read(text))
            seconds = round(time.monotonic() - began, 1)
            began = time.monotonic()
            result = self._result(part, marked, told, kernel, seconds)
            keep(part.key, result)
            self.found.append(result)
            failed = "; ".join(result.failed)
            after = f"{'FAILED: ' + failed if failed else 'ok'} ({seconds:.0f} s)"
            say(f"{self.guest.name}: {part.name} as {part.row}: {after}")
            self._announce()

        def show(stream: str, data: bytes) -> None:
            nonlocal pending
            if stream == "err":
                for done in _PROGRESS.findall(data.decode(errors="replace")):
                    say(f"{self.guest.name}: {done}")
            if stream == "out":
                *lines, pending = (pending + data).split(b"\n")
                for text in lines:
                    if is_result(text) and len(self.found) < len(self.parts):
                        ended(text.decode(errors="replace"))

        first, *more = (part for part, _ in self.parts)
        whole = line.call(first.argv(*more), show=show)
        if len(self.found) < len(self.parts):  # it broke off, and the part that it was at is told so
            ended(f"{whole.out[-1000:]}\n{whole.err[-1000:]}\n")

    def _announce(self) -> None:
        if len(self.found) < len(self.parts):
            part = self.parts[len(self.found)][0]
            say(f"{self.guest.name}: {part.name} as {part.row}")

    def _result(self, part: Part, marked: str, told: dict[str, Any], kernel: str, seconds: float) -> Result:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        checks, data = told["checks"], told["data"]
        words = list(part.words)
        return Result(
            self.guest.name, part.row, part.name, marked, kernel, now, seconds, checks, data, words, self.code, self.of
        )


def _first_alike(todo: Sequence[tuple[Part, str]]) -> list[tuple[Part, str]]:
    first = todo[0][0]
    return list(takewhile(lambda one: one[0].alike(first), todo))


def try_guest(guest: Guest, source: Path, wanted: Callable[[Part], bool], again: bool) -> bool:
    """Whether all wanted parts were tried and none failed. It is started only if something is left to try in it."""
    kept, found = Results(), []
    todo: list[tuple[Part, str]] = []
    # Looked at once: somebody may go on working on it while a guest tries what was brought to it.
    code = digest_of(source)
    every = list(parts(guest, source))
    for part in filter(wanted, every):
        marked = mark(code, part)
        before = None if again else kept.find(guest.name, part.key, marked)
        if before is not None:
            found.append(before)
        else:
            todo.append((part, marked))
    if not todo:
        say(f"{guest.name}: everything has been tried with this code")
        return not any(result.failed for result in found)
    running = Running(guest.name)
    if not running.alive:
        running.start(guest, source)
    try:
        with running.line() as line:
            bring(line, guest, source)
            # The script may be newer than a guest that is up already.
            line.put("/usr/local/lib/hosts/tries.py", (_INSIDE / "tries.py").read_bytes())
            while todo:
                together = _first_alike(todo)
                row = together[0][0].row
                trial = _Trial(guest, code, together, sum(each.row == row for each in every))
                trial.run(line, kept.keep)
                found += trial.found
                del todo[: max(len(trial.found), 1)]
    except Trouble as trouble:
        # What has a result keeps it; the next guest may do better.
        say(f"{guest.name} is given up: {trouble}")
    finally:
        running.stop()
    return len(found) == len(list(filter(wanted, every))) and not any(result.failed for result in found)
