"""What a call of one of our own tools asks for: a box to be made, a session to be opened, or a step in one.

What the arguments leave open, the contract decides, and then the configuration. What makes no sense is refused before
anything runs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path

from ringfence.core.box import (
    MAX_SOURCE_BYTES,
    Attached,
    BoxSpec,
    ImageRoot,
    Installs,
    Limits,
    Listening,
    Mount,
    Outside,
    Program,
    Programs,
)
from ringfence.core.brokering import SessionSecrets
from ringfence.core.errors import Refused
from ringfence.core.model import Call, Contract, Grant, Json, NetworkSpec, Status
from ringfence.core.ports import Access, InstalledPackages, Route
from ringfence.core.record import dataclass
from ringfence.core.sessions import CellRequest, CommandRequest, SessionSpec, StaySpec, VolumeMount
from ringfence.sandbox.tools import languages

_MAX_WORD_BYTES = 131_071
"""The kernel starts no program with a longer argument."""
_SHORTEST_SECONDS = 0.001
_NOTHING = Attached()
_NO_ROUTE = Route()
_IN_A_SESSION = (
    "inputs",
    "packages",
    "allow_packages",
    "output",
    "trees",
    "mounts",
    "network",
    "secrets",
    "template",
    "image",
    "backend",
    "memory_layout",
    "listen",
    "name",
    "metadata",
)
"""Limits of the whole box, not of one step."""
_ONLY_IN_A_SESSION = ("cwd", "pty", "context", "background")


# ── Settings ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class SessionLifetimes:
    """How long sessions exist: by default, and at most."""

    lifetime_seconds: float = 3600.0
    most_lifetime_seconds: float = 86_400.0
    idle_seconds: float = 300.0
    most_idle_seconds: float = 86_400.0
    retain_seconds: float = 86_400.0


@dataclass(frozen=True, slots=True)
class BoxContents:
    """What the boxes of a capability have."""

    packages: tuple[str, ...] = ()
    network: NetworkSpec | None = None
    installable: tuple[str, ...] = ()
    """Patterns of what may be installed besides."""
    inside: bool = False
    """Also by programs in them."""


@dataclass(frozen=True, slots=True)
class Provision:
    """What boxes get where neither contract nor caller asks for more."""

    limits: Limits
    templates: Mapping[str, tuple[str, ...]]
    """Packages by the name of the template."""
    level: str = "process"
    """The isolation that the backend gives."""
    lives: SessionLifetimes | None = None
    """How long sessions exist; None where there are none."""
    no_sessions: str = "there are no sessions here"
    """What is said of that."""
    mounts: tuple[Mount, ...] = ()
    """What every session sees besides: the code of servers that run in sessions."""
    installable: tuple[str, ...] = ()
    """Patterns of the packages that an agent may have installed; a caller in this process may have any."""
    installs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Packages that are installed for boxes of a template, by its name."""
    image: str | None = None
    """The image that is the root of boxes whose callers name none."""
    inside: Installs = field(default_factory=lambda: Installs(()))
    """What programs in boxes may install by themselves."""


# ── The box ───────────────────────────────────────────────────────────────────────────────────────


def check(call: Call, choices: tuple[str, ...] = ()) -> None:
    """Raises Refused for arguments that no box can be made of, and where not exactly one of `choices` is given."""
    problem = next(_problems(call.arguments), None)
    if problem is None and choices and sum(name in call.arguments for name in choices) != 1:
        problem = f"exactly one of {', '.join(choices)} must be given"
    if problem is not None:
        raise Refused(
            Status.VALIDATION_FAILURE, "bad_arguments", f"The arguments of {call.tool!r} do not fit: {problem}."
        )


@dataclass(frozen=True, slots=True)
class FromSnapshot:
    """What a session has that is opened from a snapshot, where the call does not say otherwise."""

    template: str | None = None
    packages: tuple[str, ...] = ()
    id: str | None = None
    """The snapshot itself: what its name means may change."""


_FROM_NONE = FromSnapshot()


def template(call: Call, contract: Contract, kept: FromSnapshot = _FROM_NONE) -> str:
    return call.arguments.get("template") or kept.template or contract.template


def image(call: Call, given: Provision) -> str | None:
    """The image that is to be the root of the box of this call, by its name; None: it has the host's system."""
    return call.arguments.get("image") or given.image


def packages(call: Call, contract: Contract, given: Provision, kept: FromSnapshot = _FROM_NONE) -> tuple[str, ...]:
    """The packages to be installed for the box of this call: its template's, and those that the caller asks for; with
    none asked for, those of its snapshot."""
    asked = call.arguments.get("packages")
    wanted = (*given.installs.get(template(call, contract, kept), ()), *(kept.packages if asked is None else asked))
    return tuple(dict.fromkeys(wanted))


def outside(call: Call, contract: Contract) -> Outside:
    """What the box of this call has of the outside, not counting our own package index."""
    network, places, secrets = _reach(call, contract)
    modes = [mount.mode for mount in _mounts(contract, call.arguments)]
    modes += [volume.get("mode", "rw") for volume in call.arguments.get("volumes") or ()]  # they outlive the session
    return Outside(network != "denied" or bool(places or secrets), "rw" in modes)


def _reach(call: Call, contract: Contract) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """The network of its box, other places it may reach, and its secrets."""
    asked = call.arguments.get("network")
    network = asked if isinstance(asked, str) else contract.network
    places = tuple(asked) if isinstance(asked, list) else ()
    return network, places, (*contract.secrets, *(call.arguments.get("secrets") or ()))


def access(call: Call, contract: Contract, given: Provision) -> Access | None:
    """What the box of this call is to have of the outside; None: nothing."""
    network, places, secrets = _reach(call, contract)
    # A caller in this process decides what programs may install; for all others the operator does.
    inside = call.arguments.get("allow_packages") or given.inside.names
    if network == "denied" and not places and not secrets and not inside:
        return None
    return Access(
        network=network,
        places=places,
        secrets=tuple(dict.fromkeys(secrets)),
        tenant=call.principal.tenant,
        capability=contract.name,
        agent=call.principal.agent,
        call_id=call.id,
        installs=Installs(tuple(inside), given.inside.required) if inside else None,
    )


def spec(
    call: Call, contract: Contract, defaults: Limits, route: Route = _NO_ROUTE, image: ImageRoot | None = None
) -> BoxSpec:
    """The box of a call. The contract and the configuration decide what the arguments leave open. Raises Refused."""
    check(call)
    given = call.arguments
    attached = call.attached or _NOTHING
    fresh = contract.memory_layout == "fresh" or given.get("memory_layout") == "fresh"
    return BoxSpec(
        program=_program(call, attached.stdin),
        limits=_limits(call, contract, defaults),
        env={**({} if image is None else image.env), **route.env, **(given.get("env") or {})},
        inputs=attached.inputs,
        output=attached.output,
        trees=tuple(map(Path, given.get("trees") or ())),
        template=template(call, contract),
        layout="fresh" if fresh else "shared",
        tenant=call.principal.tenant,
        mounts=_mounts(contract, given),
        network=route.serve,
        installs=_installs(route),
        listening=_listening(contract, given),
        level=contract.isolation,
        backend=given.get("backend"),
        root=None if image is None else image.folder,
        image=image,
    )


def asked_for(call: Call, contract: Contract) -> tuple[str, ...]:
    """Programs that need approval and that the command may run, because their names are in it.

    Hiding a name is of no use: a program that was not approved is not in the box.
    """
    if contract.commands is None or not contract.commands.ask:
        return ()
    text = "\n".join((str(call.arguments.get("command", "")), *map(str, call.arguments.get("argv") or ())))
    return tuple(name for name in contract.commands.ask if _names(text, name))


def _names(text: str, program: str) -> bool:
    name = re.escape(program.rpartition("/")[2])
    return re.search(rf"(?<![A-Za-z0-9_]){name}(?![A-Za-z0-9_])", text) is not None


def programs(grant: Grant) -> Programs | None:
    """What the box of this call has; programs that need approval are in it where this very call was approved."""
    commands = grant.contract.commands
    if commands is None:
        return None
    agreed = asked_for(grant.call, grant.contract) if grant.approval_id is not None else ()
    if commands.allow is not None:
        return Programs((*commands.allow, *agreed), commands.deny)
    return Programs(None, (*commands.deny, *(name for name in commands.ask if name not in agreed)))


def _listening(contract: Contract, given: Json) -> Listening:
    """As the contract says, unless a caller in this process asks for something else."""
    return Listening.of(given["listen"]) if "listen" in given else contract.listen


def _installs(route: Route) -> bool:
    return any(rule.installs is not None for rule in route.rules)


def _mounts(contract: Contract, given: Json) -> tuple[Mount, ...]:
    """Those of the contract, and those that a caller in this process asks for."""
    return (*contract.mounts, *(Mount(**mount) for mount in given.get("mounts") or ()))


# ── Sessions and their steps ──────────────────────────────────────────────────────────────────────


def session(
    grant: Grant,
    given: Provision,
    route: Route = _NO_ROUTE,
    installed: InstalledPackages | None = None,
    kept: FromSnapshot = _FROM_NONE,
    image: ImageRoot | None = None,
) -> SessionSpec:
    """The session that is to be opened. Raises Refused."""
    call = grant.call
    contract = grant.contract
    lives = given.lives or SessionLifetimes()
    wanted = call.arguments
    attached = call.attached or _NOTHING
    setup = wanted.get("setup") or None
    fresh = contract.memory_layout == "fresh" or wanted.get("memory_layout") == "fresh" or setup is not None
    stay = StaySpec(
        limits=replace(given.limits, **{"wall_seconds": contract.timeout_seconds, **(wanted.get("limits") or {})}),
        env={**({} if image is None else image.env), **(wanted.get("env") or {})},
        inputs=attached.inputs,
        trees=tuple(map(Path, wanted.get("trees") or ())),
        template=template(call, contract, kept),
        layout="fresh" if fresh else "shared",
        setup=setup,
        tenant=call.principal.tenant,
        mounts=(*given.mounts, *_mounts(contract, wanted)),
        packages=() if installed is None else (installed.folder,),
        installs=_installs(route),
        listening=_listening(contract, wanted),
        root=None if image is None else image.folder,
        image=image,
        level=contract.isolation,
        backend=wanted.get("backend"),
    )
    return SessionSpec(
        stay=stay,
        lifetime_seconds=wanted.get("lifetime_seconds", lives.lifetime_seconds),
        idle_seconds=wanted.get("idle_seconds", lives.idle_seconds),
        auto_resume=wanted.get("auto_resume", True),
        metadata=wanted.get("metadata") or {},
        snapshot=kept.id or wanted.get("snapshot"),
        volumes=tuple(VolumeMount(**volume) for volume in wanted.get("volumes") or ()),
        retain=wanted.get("retain", "output"),
        network=route.rules,
        opened_by=contract.name if call.attached is None else None,
        secrets=SessionSecrets(route.brokered, contract.name, call.id) if route.brokered else None,
        packages=packages(call, contract, given, kept),
    )


def cell(grant: Grant, defaults: Limits) -> CellRequest:
    """A step of Python in a session."""
    given = grant.call.arguments
    return CellRequest(
        source=given["code"],
        context=given.get("context", "default"),
        limits=step_limits(grant, defaults),
        env=given.get("env") or {},
        after_step=grant.after_step,
        keep_whole=grant.call.attached is None,
    )


def command(grant: Grant, given: Provision) -> CommandRequest:
    """A command in a session. One in the background may run as long as its session."""
    wanted = grant.call.arguments
    attached = grant.call.attached or _NOTHING
    lasting = bool(wanted.get("background")) or attached.keys is not None
    pty = wanted.get("pty")
    return CommandRequest(
        argv=_words(wanted),
        limits=None if lasting and "limits" not in wanted else step_limits(grant, given.limits),
        env=wanted.get("env") or {},
        cwd=wanted.get("cwd") or "/workspace",
        stdin=attached.stdin if attached.stdin and isinstance(attached.stdin, bytes) else None if lasting else b"",
        pty=(pty[0], pty[1]) if pty else None,
        after_step=grant.after_step,
        keep_whole=grant.call.attached is None,
    )


def step_limits(grant: Grant, defaults: Limits) -> Limits:
    """Limits of one step, without those of the whole box."""
    return _limits(grant.call, grant.contract, defaults)


# ── Both ──────────────────────────────────────────────────────────────────────────────────────────


def language(given: Json) -> str:
    """What the code of a call is written in."""
    return str(given.get("language", languages.PYTHON))


def _words(given: Json) -> tuple[str, ...]:
    if "code" in given:
        return languages.words(language(given), given["code"])
    return tuple(given["argv"]) if "argv" in given else ("/bin/sh", "-c", given["command"])


def _program(call: Call, stdin: bytes | int) -> Program:
    given = call.arguments
    words = tuple(given.get("argv") or ())
    if language(given) != languages.PYTHON:
        return Program("command", argv=languages.words(language(given), given["code"]), stdin=stdin)
    if "code" in given:
        name = given.get("name") or "-c"
        # At a command line it is what `python -c` would run there; elsewhere its caller wants what it shows.
        return Program("python", given["code"].encode(), words, name, stdin, name == "-c" and call.origin != "cli")
    return Program("command", argv=_words(given), stdin=stdin)


def _limits(call: Call, contract: Contract, defaults: Limits) -> Limits:
    given = {"wall_seconds": contract.timeout_seconds, **(call.arguments.get("limits") or {})}
    if call.deadline is not None:
        left = max(call.deadline - time.monotonic(), _SHORTEST_SECONDS)
        given["wall_seconds"] = min(given["wall_seconds"], left)
    return defaults if given == {"wall_seconds": defaults.wall_seconds} else replace(defaults, **given)


def _problems(given: Json) -> Iterator[str]:
    """Problems that no schema finds. The values themselves are never repeated: this goes on record."""
    words = given.get("argv") or ()
    yield from _source_problems(given)
    if "argv" in given and not words and "code" not in given:
        yield "argv: there is no command in it"
    if "session" not in given:
        yield from (f"{name}: only in a session" for name in _ONLY_IN_A_SESSION if name in given)
    elif "code" in given or "command" in given or words:
        yield from (f"{name}: a session's box has its own already" for name in _IN_A_SESSION if name in given)
        if "code" in given:
            yield from (f"{name}: a cell has none" for name in ("argv", "stdin", "pty", "cwd") if name in given)
    for name in ("command", "argv", "name", "trees", "cwd"):
        texts = given.get(name) or ()
        for text in (texts,) if isinstance(texts, str) else texts:
            if "\0" in text:
                yield f"{name}: no NUL character can stand in it"
            if _longer(text, _MAX_WORD_BYTES):
                yield f"{name}: longer than {_MAX_WORD_BYTES} bytes"
    for name, value in (given.get("env") or {}).items():
        if not name or "=" in name or "\0" in name + value:
            yield "env: a variable has a name without '=', and no NUL character"
        elif _longer(f"{name}={value}", _MAX_WORD_BYTES):
            yield f"env: a variable is longer than {_MAX_WORD_BYTES} bytes"


def _source_problems(given: Json) -> Iterator[str]:
    for name in ("code", "setup"):
        source = given.get(name) or ""
        if "\0" in source:
            yield f"{name}: a program has no NUL character"
        if _longer(source, MAX_SOURCE_BYTES):
            yield f"{name}: longer than {MAX_SOURCE_BYTES // 1024 // 1024} MiB"
    if language(given) == languages.PYTHON:
        return
    yield from (f"{name}: only with Python" for name in ("context", "argv", "name") if name in given)
    if _longer(given.get("code") or "", _MAX_WORD_BYTES):
        yield f"code: longer than {_MAX_WORD_BYTES} bytes, as only Python may be; write it into a file, and run that"


def _longer(text: str, most: int) -> bool:
    """Whether it is longer when encoded. A character has at most four bytes, so a short text need not be encoded."""
    return len(text) * 4 > most and (len(text) > most or len(text.encode()) > most)
