"""Two runs of one program compared: what differs, and why, as far as further runs can show.

A cause is found by removing it. If runs agree once the clock is held at the time of the first one, it was the clock; if
they agree once random numbers are held, it was randomness. A difference that no cause explains is reported as such.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from ringfence.core.model import Json
from ringfence.core.record import dataclass

Kind = Literal["output", "clock", "randomness", "network", "files", "environment"]
KINDS: tuple[Kind, ...] = ("output", "clock", "randomness", "network", "files", "environment")
_PARTS = ("ending", "stdout", "stderr", "value")
_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Difference:
    what: str
    """`ending`, `stdout`, `stderr`, `value`, the path of a file, or a key of the environment."""
    kinds: tuple[Kind, ...]
    then: str
    now: str


@dataclass(frozen=True, slots=True)
class Reruns:
    """The observations of further runs, a pair of each kind; None where that kind could not be run."""

    plain: tuple[Json, Json]
    held_clock: tuple[Json, Json] | None = None
    """With the clock held at the time of the first run."""
    held_random: tuple[Json, Json] | None = None
    """With the same random numbers."""
    held_both: tuple[Json, Json] | None = None


def parts_of(seen: Json) -> dict[str, str]:
    """The parts of an observed run, each as the text or digest that it is compared by."""
    out = {name: str(seen[name]["sha256"]) if isinstance(seen[name], dict) else str(seen[name]) for name in _PARTS}
    return out | dict(seen["files"])


def differs(then: Json, now: Json) -> bool:
    return parts_of(then) != parts_of(now)


def differences(then: Json, runs: Reruns, changed: bool) -> list[Difference]:
    """What differs between the run on record and now. `changed`: its environment has changed, too."""
    before, now = parts_of(then), parts_of(runs.plain[0])
    names = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    return [
        Difference(name, _causes(name, then, runs, changed), shown(then, name), shown(runs.plain[0], name))
        for name in names
    ]


def _causes(name: str, then: Json, runs: Reruns, changed: bool) -> tuple[Kind, ...]:
    varies = not _agree(name, runs.plain)
    if varies:
        tried: tuple[tuple[tuple[Json, Json] | None, tuple[Kind, ...]], ...] = (
            (runs.held_clock, ("clock",)),
            (runs.held_random, ("randomness",)),
            (runs.held_both, ("clock", "randomness")),
        )
        for pair, kinds in tried:
            if pair is not None and _agree(name, pair):
                return kinds
    elif runs.held_clock is not None:
        if parts_of(runs.held_clock[0]).get(name) == parts_of(then).get(name):
            return ("clock",)
        # A random value that many boxes share, such as the seed of hashes, is the same in two runs in a row.
        if runs.held_random is not None and _only_moves(name, runs.plain, runs.held_random, runs.held_clock):
            return ("randomness",)
    if runs.held_clock is None and (found := _looks_like(name, then, runs.plain[0])):
        return found
    if any(any(seen["network"].values()) for seen in (then, runs.plain[0])):
        return ("network",)
    if changed and not varies:
        return ("environment",)
    return ("output",) if name in _PARTS else ("files",)


def _only_moves(name: str, plain: tuple[Json, Json], by: tuple[Json, Json], other: tuple[Json, Json]) -> bool:
    """Whether a part changes when one cause is held, and stays as it was when the other one is."""
    return _agree(name, by) and not _agree(name, (plain[0], by[0])) and _agree(name, (plain[0], other[0]))


def _agree(name: str, pair: tuple[Json, Json]) -> bool:
    first, second = (parts_of(each).get(name) for each in pair)
    return first == second


_TIMES = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?)?(?:Z|[+-]\d\d:?\d\d)?|\d\d:\d\d:\d\d(?:[.,]\d+)?"
    r"|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\w* +\w{3} +\d{1,2}|\b1[6-9]\d{8}(?:\.\d+)?\b"
)
_CHANCE = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|\b[0-9a-fA-F]{16,}\b|0x[0-9a-f]{6,}"
)


def _looks_like(name: str, then: Json, now: Json) -> tuple[Kind, ...]:
    """The causes of a difference by what the texts look like: a command's clock and random numbers cannot be held."""
    if name not in ("stdout", "stderr"):
        return ()
    old, new = then[name]["text"], now[name]["text"]
    if _TIMES.sub("T", old) == _TIMES.sub("T", new):
        return ("clock",)
    if _CHANCE.sub("R", old) == _CHANCE.sub("R", new):
        return ("randomness",)
    both = [_CHANCE.sub("R", _TIMES.sub("T", text)) for text in (old, new)]
    return ("clock", "randomness") if both[0] == both[1] else ()


def shown(seen: Json, name: str) -> str:
    """A part as a person reads it: the first characters of a text, or the digest of a file."""
    part = seen.get(name) if name in _PARTS else seen["files"].get(name)
    if isinstance(part, dict):
        return str(part["text"])[:_MAX_SHOWN]
    return "none" if part is None else str(part)


def environment_changes(then: Mapping[str, object], now: Mapping[str, object]) -> list[Difference]:
    """What has changed in the environment since."""
    return [
        Difference(name, ("environment",), str(then.get(name)), str(now.get(name)))
        for name in dict.fromkeys([*then, *now])
        if then.get(name) != now.get(name)
    ]


# ── Holding the clock and random numbers, in Python ───────────────────────────────────────────────

_HOLD = """
def hold(start, chance):
    import datetime, os, random, sys, time
    if start is not None:
        at = [start]
        def tick():
            at[0] += 0.001
            return at[0]
        for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
            setattr(time, name, tick)
            setattr(time, name + "_ns", lambda: int(tick() * 1000000000))
        def sleep(seconds):
            at[0] += seconds
        time.sleep = sleep
        for name in ("gmtime", "localtime"):
            setattr(time, name, lambda s=None, real=getattr(time, name): real(tick() if s is None else s))
        strftime, asctime = time.strftime, time.asctime
        time.strftime = lambda form, t=None: strftime(form, time.localtime() if t is None else t)
        time.asctime = lambda t=None: asctime(time.localtime() if t is None else t)
        time.ctime = lambda s=None: asctime(time.localtime(s))
        class Date(datetime.date):
            @classmethod
            def today(cls):
                return cls.fromtimestamp(tick())
        class DateTime(datetime.datetime):
            @classmethod
            def now(cls, tz=None):
                return cls.fromtimestamp(tick(), tz)
            @classmethod
            def today(cls):
                return cls.now()
            @classmethod
            def utcnow(cls):
                return cls.fromtimestamp(tick(), datetime.timezone.utc).replace(tzinfo=None)
        for made, name in ((Date, "date"), (DateTime, "datetime")):
            made.__name__ = made.__qualname__ = name
            made.__module__ = "datetime"
            setattr(datetime, name, made)
    if chance is not None:
        held = random.Random(chance)
        os.urandom = random._urandom = held.randbytes
        random.seed(chance)
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed(chance)
"""


def held(code: str, start: float | None, chance: int | None) -> str:
    """The program with its clock, its random numbers, or both held, by one line before its first."""
    return f"exec({_HOLD!r} + 'hold({start!r}, {chance!r})', {{}})\n{code}"


def can_be_held(tool_arguments: Json) -> bool:
    """Whether it is Python that can begin with another line, which `from __future__` may not follow."""
    code = tool_arguments.get("code")
    return isinstance(code, str) and tool_arguments.get("language", "python") == "python" and "__future__" not in code
