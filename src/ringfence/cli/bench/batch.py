"""A batch of programs by `map_code`, each in a fresh box of its own, against the same programs started bare.

A row is of whole batches: `n` of them, and the time of one from its first program to its last result.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ringfence import map_code
from ringfence.cli.bench.measure import Row, cpu_seconds_of_all, note, own_record, row
from ringfence.core.errors import Unavailable
from ringfence.core.system import interpreter

_PROGRAM = "print(sum(range(100)))"
_ANSWER = "4950\n"
_WORKERS = (2, 8)
_BATCHES = 3


def run(programs: int) -> list[Row]:
    """Both ways alternate. Raises Unavailable where there are no boxes here."""
    rows: list[Row] = []
    with own_record():
        _boxed(2, 10)
        for workers in _WORKERS:
            ways = {"bare": _bare, "map_code": _boxed}
            times: dict[str, list[float]] = {name: [] for name in ways}
            cpu = dict.fromkeys(ways, 0.0)
            for number in range(_BATCHES):
                note(f"batch: {programs} programs, {workers} workers, {number + 1} of {_BATCHES}")
                for name, way in ways.items():
                    before = cpu_seconds_of_all()
                    times[name].append(_timed(way, workers, programs))
                    cpu[name] += cpu_seconds_of_all() - before
            base: Row | None = None
            for name in ways:
                made = row(f"{name}, batch of {programs} programs, {workers} workers", times[name], base)
                made.per_second = round(programs * 1000 / made.p50_ms, 1)
                made.cpu_ms = round(cpu[name] / _BATCHES * 1000, 1)
                rows.append(made)
                base = base or made
    return rows


def _timed(way: Callable[[int, int], list[str]], workers: int, programs: int) -> float:
    began = time.perf_counter()
    answers = way(workers, programs)
    took = time.perf_counter() - began
    if answers != [_ANSWER] * programs:
        raise Unavailable("bench", f"{sum(each != _ANSWER for each in answers)} of {programs} programs went wrong")
    return took


def _bare(workers: int, programs: int) -> list[str]:
    command = (str(interpreter()), "-c", _PROGRAM)

    def one(_: int) -> str:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False).stdout

    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(one, range(programs)))


def _boxed(workers: int, programs: int) -> list[str]:
    return [execution.text for execution in map_code([_PROGRAM] * programs, workers=workers)]
