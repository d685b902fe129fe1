"""How the tests take a defence away, and how they tell that a case of the doctor is broken by that: harm was done."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ringfence.core.ports import Backend
from ringfence.doctor import CATALOGUE, Case, Options, run
from ringfence.doctor.case import Trial
from ringfence.doctor.placement import InSession
from ringfence.sandbox.process.backend import ProcessBackend
from tests.boxing import need_boxes

Taken = Callable[[pytest.MonkeyPatch], None]
"""Takes a defence away, in this process, which is the supervisor of the boxes."""


@dataclass(frozen=True, slots=True)
class Defence:
    """One that stands alone: without it, harm is done in one of these cases."""

    without: Taken
    cases: tuple[str, ...]
    stops: tuple[str, ...] = ()
    """What it says when it refuses."""
    told: bool = False
    """Another one still prevents the harm, and the facts show that this one is missing."""
    session: bool = False
    """Of boxes that stay."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Several that cover each other: each of them prevents it alone, and without all of them harm is done."""

    without: Mapping[str, Taken]
    cases: tuple[str, ...]
    stops: tuple[str, ...] = ()
    fails: str = ""
    """Why the run itself fails then, and tells nobody what came of it."""


Row = Defence | Layers


@dataclass(slots=True)
class Tried:
    harm: dict[str, str] = field(default_factory=dict)
    """By case: what was done."""
    uncounted: dict[str, str] = field(default_factory=dict)
    """By case: why this host cannot show it."""

    def shows(self) -> bool:
        """Whether harm was done; skips the test where that cannot be shown on this host."""
        if not self.harm and self.uncounted:
            pytest.skip("; ".join(f"{id}: {why}" for id, why in self.uncounted.items()))
        return bool(self.harm)


async def tried(ids: Collection[str], *, told: bool = False, fails: str = "", session: bool = False) -> Tried:
    """Tries these cases as things are now. Not that a program failed counts, but that it did what it tries."""
    need_boxes()
    found = Tried()

    def watched(case: Case) -> Case:
        def hit(trial: Trial) -> str | None:
            asked = (case.hit, *case.owed) if told else (case.hit,)
            said = next((wrong for wrong in (ask(trial) for ask in asked) if wrong), None)
            found.harm.pop(case.id, None)  # of a try that had too little time
            if said:
                found.harm[case.id] = said
            return said

        return replace(case, hit=hit)

    cases = tuple(watched(case) for case in CATALOGUE if case.id in ids)
    assert {case.id for case in cases} == set(ids)
    fresh = ProcessBackend(depth=0)
    backend: Backend = InSession(fresh) if session else fresh
    try:
        report = await run(backend, Options(cases=cases, controls=False))
    finally:
        await backend.close()
    fallen = {result.case.id: result.got for result in report.results if fails and fails in result.got}
    found.harm |= fallen
    found.uncounted = {result.case.id: result.reason for result in report.results if result.kept is None}
    return found


def instead(of: object, name: str, value: Any) -> Taken:
    return lambda patch: patch.setattr(of, name, value)


async def without_all(layers: Layers, but: str = "") -> Tried:
    """With all of them away, or all but one."""
    with pytest.MonkeyPatch.context() as patch:
        for name, take in layers.without.items():
            if name != but:
                take(patch)
        return await tried(layers.cases, fails=layers.fails)
