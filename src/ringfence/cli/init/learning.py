"""`ringfence init --learn`: a server is started, and whatever it lacks is offered as a grant, until it works. Then
every grant that it does not need is taken back, and the rest is shown as a diff."""

from __future__ import annotations

import difflib
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import anyio
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from ringfence import config
from ringfence.audit.signing import signing_key
from ringfence.cli.terminal import confirm, quoted, safe
from ringfence.compose.runs import make_router, policy_of
from ringfence.compose.secrets import ConfiguredSecrets
from ringfence.compose.servers import ServerInspection, inspect_server
from ringfence.config import Config, writing
from ringfence.core.errors import ConfigError, Unavailable
from ringfence.core.model import Definition, Json
from ringfence.core.record import dataclass
from ringfence.sandbox.servers.startup_diagnosis import MissingGrant
from ringfence.store import Store

_MAX_ROUNDS = 12
_LIMITS = {"--memory": "memory_mb", "--pids": "processes", "--disk": "disk_mb"}


@dataclass(frozen=True, slots=True)
class Lesson:
    """The server to learn about, the calls that have to succeed, and grants that need no question."""

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
    grants: list[ServerGrant] = field(default_factory=list)

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
        store = await anyio.to_thread.run_sync(Store.open, settings.gateway.state, signing_key(config.key_folder()))
        stack.push_async_callback(store.aclose)
        return await _Learning(lesson, text, store).run()


def _settings(text: str, lesson: Lesson) -> Config:
    return config.loads(text, file=str(lesson.path), base=lesson.path.absolute().parent)


class _Learning:
    def __init__(self, lesson: Lesson, text: str, store: Store) -> None:
        self._lesson = lesson
        self._text = text
        self._store = store
        self._declined: set[ServerGrant] = set()

    async def run(self) -> Learnt:
        grants: list[ServerGrant] = []
        look = ServerInspection(problem="it was not tried")
        for _ in range(_MAX_ROUNDS):
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

    async def _tried(self, grants: Sequence[ServerGrant]) -> ServerInspection:
        settings = _settings(granted(self._text, self._lesson.server, grants), self._lesson)
        safe_ = ConfiguredSecrets(settings)
        await safe_.load()
        policy = policy_of(settings)
        router = make_router(settings, lambda: safe_.broker(lambda: policy, self._store))
        server = settings.servers[self._lesson.server]
        places = {"state": settings.gateway.state, "configuration": settings.path}
        return await inspect_server(server, settings.sandbox, router, self._lesson.calls, **places)

    async def _agreed(self, grant: ServerGrant) -> bool:
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
            agreed = await anyio.to_thread.run_sync(
                confirm, "", safe(f"May {self._lesson.server} {grant_text(grant)}?")
            )
        except Unavailable:
            print(safe(f"  not given: there is no terminal to ask on; use --grant '{grant}'"), file=sys.stderr)
            agreed = False
        if not agreed:
            self._declined.add(grant)
        return agreed

    async def _least(self, grants: list[ServerGrant]) -> list[ServerGrant]:
        """The grants that it needs: each is left out in turn, and dropped if the server works without it."""
        needed = list(grants)
        for grant in grants:
            fewer = [each for each in needed if each != grant]
            if _works(await self._tried(fewer)):
                needed = fewer
                continue
            if grant.value == "rw":
                weaker = [ServerGrant("mount", grant.what, "ro") if each == grant else each for each in needed]
                needed = weaker if _works(await self._tried(weaker)) else needed
        return needed

    def _written(self, grants: list[ServerGrant], look: ServerInspection) -> str:
        settings = _settings(self._text, self._lesson)
        known = {contract.tool for contract in settings.contracts.values() if contract.server == self._lesson.server}
        new: list[Definition] = [each for each in look.definitions if each.kind == "tool" and each.name not in known]
        return granted(self._text, self._lesson.server, grants, new) if grants or new else self._text


def _works(look: ServerInspection) -> bool:
    return look.problem is None and not look.failed


def _why(look: ServerInspection) -> str:
    return look.problem or "\n".join(look.failed)


# ── Grants, and the configuration with them ───────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ServerGrant:
    """One thing that a server may be given. Its text is what `--grant` takes."""

    kind: Literal["mount", "allow", "limit"]
    what: str
    value: str = ""

    def __str__(self) -> str:
        return ":".join(filter(None, (self.kind, self.what, self.value)))


def grants_of(want: MissingGrant) -> list[ServerGrant]:
    """The grants that would give a server what it lacks; none if a configuration cannot."""
    words = want.option.split(" ")
    if want.option.startswith("--mount "):
        path, _, mode = want.option.removeprefix("--mount ").rpartition(":")
        return [ServerGrant("mount", path[: len(path) // 2], mode)]
    if words[0] in _LIMITS:
        return [ServerGrant("limit", _LIMITS[words[0]], words[1])]
    hosts = [word for word in words if not word.startswith("--") and "." in word]
    return [ServerGrant("allow", host) for host in hosts] if words[0] == "--allow" else []


def granted(text: str, server: str, grants: Iterable[ServerGrant], tools: Iterable[Definition] = ()) -> str:
    """The configuration with these grants, and with drafts for these tools."""
    yaml = YAML(typ="rt")
    yaml.width = 4096
    yaml.preserve_quotes = True
    yaml.indent(mapping=2, sequence=4, offset=2)
    top = yaml.load(text)
    entry = top["servers"][server]
    for grant in grants:
        _give(top, entry, server, grant)
    if tools:
        capabilities = _section(top, "capabilities")
        for tool in tools:
            keys = {"server": server, **({"tool": tool.name} if tool.name in capabilities else {})}
            name = f"{server}_{tool.name}" if tool.name in capabilities else tool.name
            capabilities[name] = _flow({**keys, **writing.draft_contract(tool.body)})
    out = io.StringIO()
    yaml.dump(top, out)
    return out.getvalue()


def _give(top: Any, entry: Any, server: str, grant: ServerGrant) -> None:
    if grant.kind == "mount":
        mounts = entry.setdefault("mounts", _sequence([]))
        same = next((mount for mount in mounts if mount.get("at") == grant.what), None)
        if same is None:
            mounts.append(_flow({"host": grant.what, "at": grant.what, "mode": grant.value}))
        elif grant.value == "rw":
            same["mode"] = "rw"
    elif grant.kind == "limit":
        entry.setdefault("limits", _flow({}))[grant.what] = int(grant.value)
    else:
        if entry.get("network", "denied") == "denied":
            entry["network"] = f"{server}_network"
        network = _section(top, "networks").setdefault(entry["network"], _flow({"allow": _sequence([])}))
        network.setdefault("allow", _sequence([])).append(grant.what)


def _section(top: Any, name: str) -> Any:
    if not top.get(name):
        top[name] = CommentedMap()
    top[name].fa.set_block_style()
    return top[name]


def _flow(keys: Mapping[str, Any]) -> CommentedMap:
    made = CommentedMap(keys)
    made.fa.set_flow_style()
    return made


def _sequence(items: list[Any]) -> CommentedSeq:
    made = CommentedSeq(items)
    made.fa.set_flow_style()
    return made


def grant_text(grant: ServerGrant) -> str:
    """The grant in words, for the question."""
    if grant.kind == "mount":
        access = "read and write" if grant.value == "rw" else "read"
        return f"{access} {grant.what}"
    if grant.kind == "allow":
        return f"reach {grant.what}"
    return f"use more: {writing.flow({grant.what: int(grant.value)})}"
