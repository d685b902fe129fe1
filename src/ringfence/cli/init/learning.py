"""`ringfence init --learn`: a server is started, what it lacks is offered as a grant, until it works; then every grant
that it does not need after all is taken back, and what is left is shown as a diff."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from ringfence import config
from ringfence.audit.keys import load_or_create
from ringfence.cli.init.grants import Grant, granted, grants_of, shown
from ringfence.cli.terminal import confirm, quoted, safe
from ringfence.config import Config
from ringfence.errors import ConfigError, Unavailable
from ringfence.model import Definition, Json
from ringfence.policy import Policy
from ringfence.runs import way_out
from ringfence.safe import Safe
from ringfence.servers import Look, look_at
from ringfence.store import Store

_MOST_ROUNDS = 12


@dataclass(frozen=True, slots=True)
class Lesson:
    """What is to be learnt, and what may be given without a question."""

    path: Path
    server: str
    calls: Sequence[tuple[str, Json]] = ()
    allowed: frozenset[str] = frozenset()


@dataclass(slots=True)
class Learnt:
    before: str
    after: str
    works: bool
    problem: str = ""
    grants: list[Grant] = field(default_factory=list)

    def diff(self, name: str) -> str:
        lines = (self.before.splitlines(), self.after.splitlines())
        return "\n".join(difflib.unified_diff(*lines, name, f"{name} (learnt)", lineterm="", n=2))


async def learn(lesson: Lesson) -> Learnt:
    """Raises ConfigError, Unavailable."""
    text = lesson.path.read_text(encoding="utf-8")
    settings = _settings(text, lesson)
    if lesson.server not in settings.servers:
        known = ", ".join(settings.servers) or "none"
        raise Unavailable("no_server", f"there is no server {lesson.server!r}; there are: {known}")
    if settings.servers[lesson.server].url is not None:
        raise Unavailable("remote_server", f"{lesson.server} is a remote server; there is no box to learn about")
    async with AsyncExitStack() as stack:
        store = await anyio.to_thread.run_sync(Store.open, settings.gateway.state, load_or_create(config.key_folder()))
        stack.push_async_callback(store.aclose)
        return await _Learning(lesson, text, store).run()


def _settings(text: str, lesson: Lesson) -> Config:
    return config.loads(text, file=str(lesson.path), base=lesson.path.absolute().parent)


class _Learning:
    def __init__(self, lesson: Lesson, text: str, store: Store) -> None:
        self._lesson = lesson
        self._text = text
        self._store = store
        self._declined: set[Grant] = set()

    async def run(self) -> Learnt:
        grants: list[Grant] = []
        look = Look(problem="it was not tried")
        for _ in range(_MOST_ROUNDS):
            look = await self._tried(grants)
            if _works(look):
                break
            print(quoted(_why(look), f"{self._lesson.server}: "), file=sys.stderr)
            new = [grant for want in look.wanted for grant in grants_of(want)]
            new = [each for each in dict.fromkeys(new) if each not in grants and each not in self._declined]
            given = [grant for grant in new if await self._agreed(grant)]
            if not given:
                return Learnt(self._text, self._text, False, _why(look))
            grants += given
        else:
            return Learnt(self._text, self._text, False, _why(look))
        needed = await self._least(grants)
        return Learnt(self._text, self._written(needed, look), True, grants=needed)

    async def _tried(self, grants: Sequence[Grant]) -> Look:
        settings = _settings(granted(self._text, self._lesson.server, grants), self._lesson)
        safe_ = Safe(settings)
        await safe_.load()
        policy = Policy(
            settings.policy.rules,
            preset=settings.policy.preset,
            default=settings.policy.default,
            environment=settings.environment,
        )
        outward = way_out(settings, lambda: safe_.lending(lambda: policy, self._store))
        return await look_at(settings.servers[self._lesson.server], settings.sandbox, outward, self._lesson.calls)

    async def _agreed(self, grant: Grant) -> bool:
        try:
            _settings(granted(self._text, self._lesson.server, [grant]), self._lesson)
        except ConfigError as exc:
            print(quoted(exc.problems[0].text, "  cannot be given here: "), file=sys.stderr)
            self._declined.add(grant)
            return False
        if str(grant) in self._lesson.allowed:
            print(safe(f"  given: {grant}"), file=sys.stderr)
            return True
        try:
            agreed = await anyio.to_thread.run_sync(confirm, "", safe(f"May {self._lesson.server} {shown(grant)}?"))
        except Unavailable:
            print(safe(f"  not given: there is no terminal to ask on; say it with --grant '{grant}'"), file=sys.stderr)
            agreed = False
        if not agreed:
            self._declined.add(grant)
        return agreed

    async def _least(self, grants: list[Grant]) -> list[Grant]:
        """Without each in turn; what it works without is not given."""
        needed = list(grants)
        for grant in grants:
            fewer = [each for each in needed if each != grant]
            if _works(await self._tried(fewer)):
                needed = fewer
                continue
            if grant.value == "rw":
                weaker = [Grant("mount", grant.what, "ro") if each == grant else each for each in needed]
                needed = weaker if _works(await self._tried(weaker)) else needed
        return needed

    def _written(self, grants: list[Grant], look: Look) -> str:
        settings = _settings(self._text, self._lesson)
        known = {contract.tool for contract in settings.contracts.values() if contract.server == self._lesson.server}
        new: list[Definition] = [each for each in look.definitions if each.kind == "tool" and each.name not in known]
        return granted(self._text, self._lesson.server, grants, new) if grants or new else self._text


def _works(look: Look) -> bool:
    return look.problem is None and not look.failed


def _why(look: Look) -> str:
    return look.problem or "\n".join(look.failed)
