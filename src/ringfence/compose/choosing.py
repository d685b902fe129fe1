"""Which backend makes a box: the one that the configuration or a caller names, a stronger one where the contract asks
for that, or, by `auto`, the strongest that starts soon enough. Never a weaker one than was asked for."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from ringfence.compose.probes import Makers, Probes
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import BACKENDS, LEVELS, BoxReport, BoxSpec, OnOutput, Serve
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json, Recheck, always
from ringfence.core.ports import Backend
from ringfence.core.record import plain
from ringfence.core.sessions import SessionBackend, StayingBox, StaySpec

T = TypeVar("T")
_STRONGEST = "microvm"
_SHORT = 120
_WEAKER = "; backend process can"
"""What backends say as a remedy, and what is none where a stronger box is asked for."""


@plain
class Selected:
    """A backend, and why it is this one."""

    name: str
    by: Literal["configuration", "caller", "auto", "contract"]
    why: str = ""

    def fact(self) -> Json | None:
        """For `isolation.chosen`; None where there was nothing to choose."""
        return {"by": self.by, "why": self.why} if self.by in ("auto", "contract") else None


def at_least(level: str, than: str) -> bool:
    """Whether a level is as strong as another."""
    return LEVELS.index(level) >= LEVELS.index(than)


class Chooser:
    """Chooses among the backends of this host."""

    def __init__(self, settings: SandboxSettings, probes: Probes, makers: Makers) -> None:
        self._settings = settings
        self._probes = probes
        self._makers = makers
        self._levels = {name: BACKENDS[name] for name, row in makers.rows.items() if row.general}
        """Of what may be chosen."""

    def named(self, level: str, asked: str | None) -> Selected | None:
        """What was named by the caller or the configuration, if it may serve; None: there is one to be chosen. Raises
        Unavailable where a caller names one that may not."""
        name = asked or self._settings.backend
        if name == "auto":
            return None
        if asked is not None:
            self._makers.row_of(asked)
        if at_least(own := self._makers.level_of(name), level):
            return Selected(name, "configuration" if asked is None else "caller")
        if asked is not None:
            raise Unavailable(
                "no_isolation", f"isolation {level} is asked for, and boxes of backend {asked} have {own}"
            )
        return None

    def refusal(self, level: str) -> str | None:
        """Why boxes of this level cannot be made here, as far as that is known without trying."""
        known = {name: self._probes.known(name) for name, own in self._levels.items() if at_least(own, level)}
        lacking = {name: each.missing for name, each in known.items() if each is not None and each.missing is not None}
        return None if lacking.keys() != known.keys() else self._unserved(level, lacking)

    async def choices(self, level: str, asked: str | None = None) -> AsyncGenerator[Selected]:
        """All that may serve, the best first. Raises Unavailable where none may."""
        by: Literal["auto", "contract"] = "auto" if "auto" in (asked, self._settings.backend) else "contract"
        most = self._settings.max_start_ms
        lacking: dict[str, str] = {}
        passed: list[str] = []
        slow: list[tuple[float, str]] = []
        any_served = False
        for own in reversed(LEVELS):
            names = [name for name, its in self._levels.items() if its == own and at_least(own, level)]
            soon: list[tuple[float, str]] = []
            for name in names:
                if level != _STRONGEST and self._probes.must_emulate(name):
                    lacking[name] = f"there is no /dev/kvm for it, and emulation serves only isolation {_STRONGEST}"
                    passed.append(f"{name} would be emulated here")
                    continue
                found = await self._probes.of(name)
                if found.missing is not None:
                    lacking[name] = found.missing
                    passed.append(f"{name} is not available here")
                elif found.emulated and level != _STRONGEST:
                    lacking[name] = f"it is emulated here, which serves only isolation {_STRONGEST}"
                    passed.append(f"{name} is emulated here")
                elif found.start_ms > most:
                    passed.append(f"{name} takes {found.start_ms:.0f} ms")
                    slow.append((found.start_ms, name))
                else:
                    soon.append((found.start_ms, name))
            for took, name in sorted(soon, key=itemgetter(0)):
                any_served = True
                why = f"the strongest that starts within {most:g} ms (sandbox.max_start_ms): it takes {took:.0f} ms"
                yield Selected(name, by, "; ".join((why, *passed)))
        for took, name in sorted(slow, key=itemgetter(0)):
            any_served = True
            yield Selected(name, by, f"none starts within {most:g} ms (sandbox.max_start_ms): this takes {took:.0f} ms")
        if not any_served:
            raise Unavailable("no_isolation" if level != "process" else "no_backend", self._unserved(level, lacking))

    def _unserved(self, level: str, lacking: Mapping[str, str]) -> str:
        """What is said, everywhere, of a level that no backend here has."""
        told = [
            f"{name}: {lacking[name]}" if name in lacking else f"{name} is not built yet"
            for name, own in BACKENDS.items()
            if name in lacking or (name not in self._makers.rows and at_least(own, level))
        ]
        return f"isolation {level} is given by no backend here ({'; '.join(told) or 'there is none'})"


class ChosenBackend:
    """Boxes, each by the backend that is to make it."""

    def __init__(
        self,
        settings: SandboxSettings,
        state: Path | None,
        makers: Makers,
        own: Backend | None = None,
        *,
        keep_ready: int | None = None,
        probes: Probes | None = None,
    ) -> None:
        """`own`: of the configuration, if it was made already; whoever made it closes it."""
        self._settings = settings
        self._state = state
        self._keep_ready = keep_ready
        self._makers = makers
        self._chooser = Chooser(settings, probes or Probes(settings, state, makers), makers)
        self._own = own
        self._made: dict[str, Backend] = {}
        self._fact: tuple[Mapping[str, Any], Json] | None = None
        """The last, without and with what was chosen: boxes of a kind have the very same."""

    @property
    def name(self) -> str:
        return self._settings.backend

    def check(self, level: str, asked: str | None) -> None:
        """Raises Unavailable where it is known already that there can be no such box."""
        if self._chooser.named(level, asked) is None and (refusal := self._chooser.refusal(level)) is not None:
            raise Unavailable("no_isolation", refusal)

    async def run(self, spec: BoxSpec, tell: OnOutput | None = None, recheck: Recheck = always) -> BoxReport:
        plain_spec = replace(spec, level="process", backend=None)

        async def by(choice: Selected) -> BoxReport:
            report = await self._backend(choice.name).run(plain_spec, tell, recheck)
            return replace(report, isolation=self.fact(report.isolation, choice))

        return await self._first(spec.level, spec.backend, by)

    async def open(self, spec: StaySpec, network: Serve | None = None) -> StayingBox:
        plain_spec = replace(spec, level="process", backend=None)

        async def by(choice: Selected) -> StayingBox:
            backend = self._backend(choice.name)
            if not isinstance(backend, SessionBackend) or not self._makers.row_of(choice.name).stays:
                raise Unavailable("not_supported", self._makers.no_stay(choice.name))
            box = await backend.open(plain_spec, network)
            return box if choice.fact() is None else cast("StayingBox", _ChosenBox(box, choice))

        return await self._first(spec.level, spec.backend, by)

    async def close(self) -> None:
        while self._made:
            await self._made.popitem()[1].close()

    async def _first(self, level: str, asked: str | None, make: Callable[[Selected], Awaitable[T]]) -> T:
        """By the best that can give all that is asked for."""
        named = self._chooser.named(level, asked)
        if named is not None:
            try:
                return await make(named)
            except Unavailable as exc:
                raise Unavailable(exc.reason_code, _remedied(exc.message, level)) from exc
        lacking: list[str] = []
        async with aclosing(self._chooser.choices(level, asked)) as choices:
            async for choice in choices:
                try:
                    return await make(replace(choice, why="; ".join((choice.why, *lacking))))
                except Unavailable as exc:
                    if exc.reason_code != "not_supported":
                        raise
                    why = _remedied(exc.message, level)[:_SHORT]
                    lacking.append(f"{choice.name} cannot: {why}")  # nothing ran: the next may
        raise Unavailable("not_supported", "; ".join(lacking))

    def _backend(self, name: str) -> Backend:
        if self._own is not None and name == self._own.name:
            return self._own
        if name not in self._made:
            settings = replace(self._settings, backend=name)
            self._made[name] = self._makers.make(settings, self._state, keep_ready=self._keep_ready)
        return self._made[name]

    def fact(self, isolation: Mapping[str, Any], choice: Selected) -> Json:
        """The `isolation` fact of a box, with what was chosen."""
        chosen = choice.fact()
        if chosen is None:
            return dict(isolation)
        if self._fact is None or self._fact[0] is not isolation or self._fact[1]["chosen"] != chosen:
            self._fact = isolation, {**isolation, "chosen": chosen}
        return self._fact[1]


def _remedied(message: str, level: str) -> str:
    return message if level == "process" else message.removesuffix(_WEAKER)


class _ChosenBox:
    """A box that stays, with what was chosen in its facts."""

    def __init__(self, box: StayingBox, choice: Selected) -> None:
        self._box = box
        self._choice = choice
        self._fact: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None

    @property
    def isolation(self) -> Mapping[str, Any]:
        seen = self._box.isolation
        if self._fact is None or self._fact[0] is not seen:
            self._fact = seen, {**seen, "chosen": self._choice.fact()}
        return self._fact[1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._box, name)
