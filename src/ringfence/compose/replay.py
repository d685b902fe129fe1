"""Runs a recorded program again: in fresh boxes, without a network, secrets or a place outside to write to."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from ringfence.compose.runs import Runs
from ringfence.config.settings import Config, PolicySettings, sealed
from ringfence.core.box import Attached
from ringfence.core.errors import RingfenceError, Unavailable
from ringfence.core.model import Json, Origin
from ringfence.core.record import dataclass
from ringfence.governance.remembered import seen_of
from ringfence.governance.replaying import (
    Difference,
    Reruns,
    can_be_held,
    differences,
    differs,
    environment_changes,
    held,
)
from ringfence.sandbox.tools.surroundings import surroundings

_CHANCE = 1
_STILL: Mapping[str, str] = {"PYTHONHASHSEED": "0"}


@dataclass(frozen=True, slots=True)
class Replayed:
    """How many runs were made, and how they differ from the one on record."""

    runs: int
    differences: tuple[Difference, ...]
    environment: tuple[Difference, ...]
    """What has changed in its environment, whether or not it mattered."""

    @property
    def same(self) -> bool:
        return not self.differences


async def replay(settings: Config, kept: Json, call_id: str) -> Replayed:
    """Run it again, and find out why it differs where it does. Each run is a call on record, by the user of this
    machine, with `call_id` as its parent. Raises Unavailable where it cannot be run as it was."""
    async with Runs.open(alone(settings)) as runs:
        again = _Again(runs, kept, call_id)
        first = await again.run()
        then = kept["seen"]
        environment = environment_changes(kept["environment"], again.environment())
        if not differs(then, first):
            return Replayed(again.count, (), tuple(environment))
        second = await again.run()
        found = Reruns((first, second))
        if can_be_held(kept["arguments"]):
            began = float(kept["began"])
            # Not all of them can be run so: then they say nothing.
            with suppress(RingfenceError):
                found = replace(found, held_clock=(await again.run(began), await again.run(began)))
                found = replace(found, held_random=(await again.run(None, _CHANCE), await again.run(None, _CHANCE)))
                found = replace(found, held_both=(await again.run(began, _CHANCE), await again.run(began, _CHANCE)))
        return Replayed(again.count, tuple(differences(then, found, bool(environment))), tuple(environment))


def alone(settings: Config) -> Config:
    """The configuration without whatever could reach outside: a replay has no effect."""
    return sealed(
        replace(
            settings,
            servers={},
            contracts={},
            networks={},
            secrets={},
            approvals={},
            hooks={},
            policy=PolicySettings(),
            sandbox=replace(settings.sandbox, network_enabled=False, max_sessions=0),
        )
    )


class _Again:
    def __init__(self, runs: Runs, kept: Json, call_id: str) -> None:
        self.count = 0
        self._runs = runs
        self._kept = kept
        self._call_id = call_id

    def environment(self) -> Json:
        then = self._kept["environment"]
        executor = self._runs.executor
        name = then["template"]
        ready = executor.provision.templates.get(name, ())
        added = executor.provision.installs.get(name, ())
        asked = self._kept["arguments"].get("packages") or ()
        return surroundings(name, ready, tuple(dict.fromkeys([*added, *asked])), executor.backend.name)

    async def run(self, start: float | None = None, chance: int | None = None) -> Json:
        """The observations of one run. `start` holds its clock from that time on, `chance` its random numbers by that
        seed. Raises Unavailable."""
        kept = self._kept
        given = {name: value for name, value in kept["arguments"].items() if name in ("code", "command", "language")}
        if start is not None or chance is not None:
            given["code"] = held(given["code"], start, chance)
        packages = kept["arguments"].get("packages")
        arguments: Json = {
            **given,
            "limits": kept["limits"],
            "template": kept["environment"]["template"],
            "memory_layout": kept["layout"],
            **({"mounts": [{**each, "mode": "ro"} for each in kept["mounts"]]} if kept["mounts"] else {}),
            **({"packages": packages} if packages else {}),
            **({"env": dict(_STILL)} if chance is not None else {}),
        }
        self.count += 1
        origin: Origin = "sdk" if kept["shows"] else "cli"
        outcome = await self._runs.call(kept["tool"], arguments, Attached(), origin=origin, parent=self._call_id)
        if outcome.ran is None or outcome.ran.report.ended == "infra":
            raise Unavailable(outcome.reason_code, f"it cannot be run again: {outcome.message}")
        return seen_of(outcome.ran.report)
