"""The nouns of the suite: a hostile case, what was seen when it was tried, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Literal

from ringfence.core.box import MIB, BoxReport, Layout, Limits, NetworkRule, Programs
from ringfence.core.model import Json
from ringfence.core.record import dataclass
from ringfence.doctor.fake_internet import Answers
from ringfence.doctor.props import Props

CLASSES = {
    "F": "filesystem",
    "P": "processes",
    "D": "devices",
    "N": "network",
    "S": "sockets and IPC",
    "K": "kernel surface",
    "G": "resources",
    "A": "artifacts",
    "X": "environment and secrets",
    "I": "integrity",
}

PLAIN = Limits(wall_seconds=20.0)
TIGHT = Limits(
    wall_seconds=20.0,
    memory_bytes=96 * MIB,
    disk_bytes=24 * MIB,
    inodes=400,
    processes=16,
    open_files=64,
    output_bytes=MIB,
    capture_bytes=65_536,
)
"""So small that a bomb of half as much again is over quickly."""
BRIEF = Limits(wall_seconds=0.7)
FEW_CYCLES = Limits(wall_seconds=20.0, cpu_seconds=1.0)
QUARTER_CORE = Limits(wall_seconds=20.0, cpu_cores=0.25)

Space = Literal["user", "pid", "mnt", "ipc", "uts", "net", "cgroup"]
Feature = Literal["victim", "internet", "terminal", "socket", "trailer", "shell"]


@dataclass(frozen=True, slots=True)
class Control:
    """How the same program is run outside of any box, so that it can do what it tries without harm."""

    share: frozenset[Space] = frozenset()
    """Namespaces that it does not get for itself: the one that the case is about."""
    features: frozenset[Feature] = frozenset()
    """`victim`: a process of the harness beside it. `internet`: every address is answered, within its own network.
    `terminal`: it has one. `socket`: its stdout is a socket. `trailer`, `shell`: its supervisor believes the last line
    of output, or tells how a program ended from its exit status, as shells do."""
    impossible: str = ""
    """Why there can be no control."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Everything that was seen of one case, in a box or as its control."""

    report: BoxReport
    limits: Limits
    props: Props
    claim: Json | None = None
    """The last line of the program. Believed if it admits having done harm."""
    after: Json | None = None
    """The last line of the program that ran afterwards, in a box of its own."""
    after_report: BoxReport | None = None
    beside: Json | None = None
    """What the neighbouring box said, which lived at the same time."""
    seen: Json = field(default_factory=dict)
    """What the harness saw of the box from outside while it lived."""


Judge = Callable[[Trial], str | None]
"""What is wrong, in words, or None."""


def claimed(trial: Trial) -> str | None:
    """The program says that it did it."""
    claim = trial.claim
    return str(claim.get("detail") or "it did") if claim and claim.get("done") else None


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that hostile code tries."""

    id: str
    tried: str
    expected: str
    """What a correct box answers."""
    program: str
    """Python source; `doctor/probe.py` stands in front of it."""
    hit: Judge = claimed
    """Did the attack do what it tries? The same question is put to the control."""
    owed: tuple[Judge, ...] = ()
    """What the facts must say besides; not asked of the control."""
    silent: bool = False
    """It is meant to be ended before it can say what came of it."""
    limits: Limits = PLAIN
    props: tuple[str, ...] = ()
    """What the harness sets up for it, beside the canary that is always there."""
    env: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, bytes] = field(default_factory=dict)
    output_files: int = 10_000
    """How many are collected at most."""
    stdin: bytes = b""
    then: str = ""
    """A second program, in a box of its own, when the first is gone."""
    beside: str = ""
    """A program in a box that lives meanwhile."""
    observe: Callable[[Props, Json], Json] | None = None
    """Looks at the box from the host, when the program says that it is ready."""
    network: tuple[NetworkRule, ...] = ()
    """What its box may reach; the harness plays all of it. Empty: the box has no way out."""
    secret: bool = False
    """Its box has a placeholder for a secret of the harness's; its control has the secret itself."""
    names: Answers = field(default_factory=dict)
    """What the harness's resolver answers, beside what it always does."""
    control: Control = Control()
    layout: Layout = "shared"
    programs: Programs | None = None
    """Its box has no others."""
    command: tuple[str, ...] = ()
    """Run this instead, in place of Python; `program` is then its stdin."""
    rests_on: str = ""
    """A protection that an operator may do without; where that was given up, nothing is promised."""

    @property
    def kind(self) -> str:
        return self.id[0]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What came of a case."""

    case: Case
    got: str
    control: str
    kept: bool | None
    """None: not counted."""
    reason: str = ""
    """Why it was not counted."""

    def as_json(self) -> Json:
        case = self.case
        row: Json = {
            "id": case.id,
            "class": case.kind,
            "tried": case.tried,
            "expected": case.expected,
            "got": self.got,
            "control": self.control,
            "kept": self.kept,
        }
        return row if self.kept is not None else {**row, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class SuiteReport:
    """The whole suite on one backend and host."""

    backend: str
    host: Json
    results: tuple[CaseResult, ...]
    isolation: Json = field(default_factory=dict)
    """The protections that a box on this host reports."""

    @property
    def not_counted(self) -> int:
        return sum(result.kept is None for result in self.results)

    @property
    def kept(self) -> int:
        return sum(result.kept is True for result in self.results)

    @property
    def broken(self) -> int:
        return sum(result.kept is False for result in self.results)

    def as_json(self) -> Json:
        cases = [result.as_json() for result in self.results]
        host = {**self.host, "isolation": self.isolation}
        counts = {"kept": self.kept, "broken": self.broken, "not_counted": self.not_counted}
        return {"backend": self.backend, "host": host, "cases": cases, **counts}
