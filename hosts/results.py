"""What came of each part: kept in a file of its own, so that a run that was broken off goes on; and told as a table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hosts.guests import ALL_CLASSES
from hosts.places import CACHE

START, END = "<!-- results -->", "<!-- /results -->"
_HEAD = ("date", "guest", "kernel", "who", "limits by", "doctor", "tried", "notes")
_NAMES = {"cgroup": "the kernel"}


@dataclass(frozen=True)
class Result:
    guest: str
    row: str
    part: str
    source: str
    kernel: str
    date: str
    seconds: float
    checks: list[dict[str, Any]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    code: str = ""
    """A digest of the code that was tried."""
    of: int = 0
    """How many parts there are for this row."""

    @property
    def failed(self) -> list[str]:
        return [str(check["name"]) for check in self.checks if not check["ok"]]


class Results:
    def __init__(self, place: Path = CACHE / "results") -> None:
        self._place = place

    def _file(self, guest: str, key: str) -> Path:
        return self._place / guest / f"{key}.json"

    def find(self, guest: str, key: str, source: str) -> Result | None:
        """The result of that part for that very code, if there is one."""
        try:
            result = Result(**json.loads(self._file(guest, key).read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return result if result.source == source else None

    def keep(self, key: str, result: Result) -> None:
        file = self._file(result.guest, key)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(asdict(result), indent=1))
        part.rename(file)

    def every(self) -> list[Result]:
        return [Result(**json.loads(file.read_text())) for file in sorted(self._place.glob("*/*.json"))]


def is_result(line: bytes) -> bool:
    """Whether a line that was printed ends a part."""
    try:
        told = json.loads(line)
    except ValueError:
        return False
    return isinstance(told, dict) and "checks" in told


def read(output: str) -> dict[str, Any]:
    """The last line of what a part printed, where it got so far."""
    last = output.strip().rpartition("\n")[2]
    try:
        told = json.loads(last)
    except ValueError:
        told = None
    if isinstance(told, dict) and "checks" in told:
        return told
    return {"checks": [{"name": "it comes to its end", "ok": False, "note": output[-1500:]}], "data": {}}


def limits_by(limits: Mapping[str, str]) -> str:
    """Who holds the limits, in few words: those with the same means together."""
    means: dict[str, list[str]] = {}
    for name, by in limits.items():
        means.setdefault(_NAMES.get(by, by), []).append(name)
    if len(means) == 1:
        return next(iter(means))
    return ", ".join(f"{' and '.join(names)}: {by}" for by, names in means.items())


def _doctor(results: Sequence[Result]) -> tuple[str, list[str]]:
    """What came of its cases, with the classes where not all were tried; and the broken ones."""
    if not results:
        return "–", []
    kept, broken, left = (sum(result.data[name] for result in results) for name in ("kept", "broken", "not_counted"))
    tried = {name for result in results for name in result.words[result.words.index("--class") + 1]}
    classes = "".join(name for name in ALL_CLASSES if name in tried)
    only = "" if classes == ALL_CLASSES else f" ({classes})"
    cases = [name for result in results for name in result.data["broken_cases"]]
    return f"{kept} kept, {broken} broken, {left} not counted{only}", cases


def _row(results: Sequence[Result]) -> tuple[str, ...]:
    newest = max(results, key=lambda result: result.date)
    # A row is of one and the same code: what was tried before it changed is no longer told.
    results = [result for result in results if result.code == newest.code]
    limits, cases, notes = "–", [], list[str]()
    for result in results:
        if "limits" in result.data:
            limits = limits_by(result.data["limits"])
        if "kept" in result.data:
            cases.append(result)
        if "wakes_per_second" in result.data:
            notes.append(f"idle: {result.data['wakes_per_second']} wakes a second")
        notes += [f"{result.part}: {name}" for name in result.failed if name != "no promise is broken"]
    doctor, broken = _doctor(cases)
    if broken:
        notes.insert(0, "broken: " + " ".join(broken))
    checks = sum(len(result.checks) for result in results)
    failed = sum(len(result.failed) for result in results)
    parts = f"{len(results)} of {newest.of}" if newest.of else str(len(results))
    tried = f"{parts} parts, {checks} checks" + (f", {failed} failed" if failed else "")
    cells = (newest.date[:10], newest.guest, newest.kernel, newest.row, limits, doctor, tried, "; ".join(notes))
    return tuple(cell.replace("|", "\\|").replace("\n", " ") for cell in cells)


def table(results: Iterable[Result], before: str, order: Sequence[str]) -> str:
    """A row for each guest and who was served in it. Rows of others that stood there before stay."""
    rows: dict[tuple[str, str], tuple[str, ...]] = {}
    for line in before.splitlines():
        cells = tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        if len(cells) == len(_HEAD) and re.match(r"\d{4}-", cells[0]):
            rows[cells[1], cells[3]] = cells
    grouped: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        grouped.setdefault((result.guest, result.row), []).append(result)
    rows.update({key: _row(group) for key, group in grouped.items()})
    places = {name: number for number, name in enumerate(order)}
    chosen = sorted((key for key in rows if key[0] in places), key=lambda key: (places[key[0]], key[1]))
    lines = [_HEAD, ("---",) * len(_HEAD), *(rows[key] for key in chosen)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def write(page: Path, results: Iterable[Result], order: Sequence[str]) -> None:
    """Put the table between its two marks; the rest of the page is somebody's prose."""
    text = page.read_text() if page.exists() else f"# Hosts\n\n{START}\n{END}\n"
    if START not in text:
        text += f"\n{START}\n{END}\n"
    head, _, rest = text.partition(START)
    inner, _, tail = rest.partition(END)
    page.write_text(f"{head}{START}\n{table(results, inner, order)}{END}{tail}")
