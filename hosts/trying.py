"""All the parts of a guest, one after the other; what has a result for this code already is not tried again."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from hosts.guests import Guest
from hosts.machine import Line, Running
from hosts.parts import Part, parts
from hosts.places import Trouble, digest, say
from hosts.project import bring, digest_of
from hosts.results import Result, Results, read

_INSIDE = Path(__file__).parent / "inside"


def mark(code: str, part: Part) -> str:
    """What a result is of: the code, and how it was tried."""
    return digest(code, (_INSIDE / "tries.py").read_text(), part.argv())


def _judged(part: Part, told: dict[str, object]) -> dict[str, object]:
    data, checks = told["data"], told["checks"]
    assert isinstance(data, dict) and isinstance(checks, list)
    if part.limits is not None:
        held = data.get("limits")
        note = "" if held == part.limits else f"they are held by {held}"
        checks.append({"name": "the kernel holds the limits", "ok": held == part.limits, "note": note})
    return told


def _one(line: Line, guest: Guest, part: Part, marked: str, code: str, of: int) -> Result:
    say(f"{guest.name}: {part.name} as {part.row}")
    began = time.monotonic()
    output: list[bytes] = []

    def show(stream: str, data: bytes) -> None:
        output.append(data)

    ended = line.call(part.argv(), show=show)
    told = _judged(part, read(ended.out if ended.out.strip() else ended.err))
    kernel = line.call(["uname", "-r"]).out.strip()
    seconds = round(time.monotonic() - began, 1)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    result = Result(
        guest.name,
        part.row,
        part.name,
        marked,
        kernel,
        now,
        seconds,
        told["checks"],  # type: ignore[arg-type]
        told["data"],  # type: ignore[arg-type]
        list(part.words),
        code,
        of,
    )
    failed = "; ".join(result.failed)
    say(f"{guest.name}: {part.name} as {part.row}: {'FAILED: ' + failed if failed else 'ok'} ({seconds:.0f} s)")
    return result


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
            for part, marked in todo:
                of = sum(each.row == part.row for each in every)
                result = _one(line, guest, part, marked, code, of)
                kept.keep(part.key, result)
                found.append(result)
    except Trouble as trouble:
        # What has a result keeps it; the next guest may do better.
        say(f"{guest.name} is given up: {trouble}")
    finally:
        running.stop()
    return len(found) == len(list(filter(wanted, every))) and not any(result.failed for result in found)
