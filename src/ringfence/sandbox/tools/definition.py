"""How a tool of ours is declared, and how it is offered: `@Tool(…)` stands above the function that carries it out.

    @Tool(Mode.WRITE, Changes.SESSION, "Freeze a session.", ONE, ("session",), STATE)
    async def pause_session(task: Task) -> Answer:
        ...

The function's name is the tool's name. An agent sees the narrow form of a tool. A caller in this process, who could as
well edit the configuration, has the wide form, with more arguments. A description states what is in force: names in
braces stand for that.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from ringfence.core.box import CommandRules, Limits, Listening
from ringfence.core.model import Answer, Contract, Json, Mode, NetworkSpec
from ringfence.core.record import dataclass
from ringfence.sandbox.tools.limits import size
from ringfence.sandbox.tools.request import BoxContents, SessionLifetimes

if TYPE_CHECKING:
    from ringfence.sandbox.tools.task import Task

    Handler = Callable[[Task], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """What the definition of a tool is made for."""

    contract: Contract
    limits: Limits
    contents: BoxContents
    sessions: SessionLifetimes | None
    """None where there are no sessions."""

    @property
    def lifetimes(self) -> SessionLifetimes:
        return self.sessions or SessionLifetimes()

    def stated(self) -> Mapping[str, str]:
        """What descriptions state, by the names that stand for it."""
        limits = self.limits
        lifetimes = self.lifetimes
        contents = self.contents
        more = f", and, where they are installed, {', '.join(contents.packages)}" if contents.packages else ""
        return {
            "timeout": _seconds(self.contract.timeout_seconds),
            "limits": f"{size(limits.memory_bytes)} of memory,"
            f" {size(limits.disk_bytes)} of disk, {limits.processes} processes and threads,"
            f" {limits.cpu_cores:g} processor core{'' if limits.cpu_cores == 1 else 's'}",
            "output": size(limits.output_bytes),
            "shown": _shown(self.contract, limits),
            "packages": f"Python's standard library{more}",
            "installing": _installing(contents),
            "network": _reachable(contents.network),
            "listening": _listening(self.contract.listen),
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            "lifetime": _seconds(lifetimes.lifetime_seconds),
            "most_lifetime": _seconds(lifetimes.most_lifetime_seconds),
            "idle": _seconds(lifetimes.idle_seconds),
            "retain": _seconds(lifetimes.retain_seconds),
        }


@dataclass(frozen=True, slots=True)
class CarriedCode:
    """Code that a tool runs besides those for programs. What the operator demands of the program that would run the
    same code (`toolkit.carried_code`) is demanded of the call that carries it."""

    argument: str
    """Where the code is. A call without it runs none, unless its session has set-up code that runs again."""
    program: str
    taken_as: str
    """The program's own name for it."""


class Changes(StrEnum):
    """What calls of a tool may change. `governance/effects.py` says of each what that can be outside of the box, so
    every tool declares it."""

    NOTHING = "nothing"
    """It only looks."""
    SESSION = "session"
    """The state of its session alone. What is saved or continues with that was written or started by earlier calls, and
    is the effect of those."""
    FILES = "files"
    """Files of a session, and so what is mounted there."""
    SIGNAL = "signal"
    """A program of its session handles its `signal`, where a program can."""
    SET_UP = "set_up"
    """It makes a session, for which nothing runs but set-up code."""
    CODE = "code"
    """It starts something that may use all that the box has."""
    LASTING = "lasting"
    """What outlives every session: volumes and snapshots."""

    @property
    def by_session(self) -> bool:
        """Whether it depends on what the box of its session has."""
        return self in (Changes.FILES, Changes.SIGNAL, Changes.SET_UP, Changes.CODE)


async def _undeclared(task: Task) -> Answer:
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool: its description, arguments and results, and the function that carries it out."""

    mode: Mode
    """How much harm it can do by itself."""
    changes: Changes
    text: str | Callable[[ToolOffer], str]
    """Its description."""
    takes: Json
    """Its arguments: the properties of its input schema."""
    needs: tuple[str, ...] = ()
    """Those of `takes` that must be given."""
    gives: Json = field(default_factory=dict)
    """Properties of its structured content for an agent; a caller in this process may get more."""
    wide: Json = field(default_factory=dict)
    """Arguments for callers in this process only."""
    in_session: Json = field(default_factory=dict)
    """Arguments that exist only where there are sessions; `request` refuses them without `session`."""
    one_of: tuple[str, ...] = ()
    """Exactly one of these arguments must be given."""
    only_wide: bool = False
    """Offered only to callers in this process."""
    if_declared: bool = False
    """Offered to an agent only where a contract is for it; to callers in this process always."""
    destructive: bool = False
    """It destroys something: a file, a session, a process. Clients are told of all other tools that they do not."""
    makes_box: bool = False
    """It makes a box: takes `packages`, and says whether it reaches the world outside. If it runs code, a call without
    a session gets a fresh box."""
    carries: CarriedCode | None = None
    """Code in its arguments, where it is not itself a program's tool."""
    own_clock: bool = False
    """It ends by itself when the contract's time is up."""
    name: str = ""
    handler: Handler = _undeclared

    def __call__(self, handler: Handler) -> Tool:
        """Declare the function below as the handler."""
        if (self.mode is Mode.READ) != (self.changes is Changes.NOTHING):
            raise TypeError(f"{handler.__name__}: what changes nothing is a read, and nothing else is")
        return replace(self, name=handler.__name__, handler=handler)

    @property
    def needs_session(self) -> bool:
        """Whether it is for a session; programs get a box of their own where no session is named."""
        return not (self.makes_box and self.changes is Changes.CODE)

    def body(self, offer: ToolOffer, *, wide: bool) -> Json:
        """The definition of the tool, as MCP has it."""
        taken = {**self.takes, **(self.in_session if offer.sessions is not None else {}), **(self.wide if wide else {})}
        choices = self.choices(wide=wide)
        needs = [key for key in self.needs if key not in choices]
        schema: Json = {  # in JSON Schema 2020-12, as MCP reads a schema that names no other
            "type": "object",
            "properties": taken if wide else {key: _bounded(key, each, offer) for key, each in taken.items()},
            **({"required": needs} if needs else {}),
            "additionalProperties": False,
        }
        if choices and wide:
            schema["oneOf"] = [{"required": [key]} for key in choices]
        body: Json = {
            "name": self.name,
            "description": self.text.format_map(offer.stated()) if isinstance(self.text, str) else self.text(offer),
            "inputSchema": schema,
            **({"annotations": hints} if (hints := self._hints(offer)) else {}),
        }
        if not wide:  # a caller in this process has the report itself
            body["outputSchema"] = {"type": "object", "properties": self.gives}
        if offer.contents.installable and self.makes_box:
            schema["properties"]["packages"] = PACKAGES
        return body

    def choices(self, *, wide: bool) -> tuple[str, ...]:
        """Several arguments of which exactly one must be given. An agent's schema does not say so, `request` refuses
        the rest: the interfaces of models accept no tool that has `oneOf` at the top of its schema."""
        choices = tuple(key for key in self.one_of if wide or key not in self.wide)
        return choices if len(choices) > 1 else ()

    def _hints(self, offer: ToolOffer) -> Json:
        """MCP's annotations, but for those that say what a client assumes anyway: that a tool writes and destroys. Of
        the world outside only a tool that makes a box says whether it is reached."""
        hints: Json = {"readOnlyHint": True} if self.mode is Mode.READ else {"destructiveHint": False}
        hints = {} if self.destructive else hints
        return {**hints, "openWorldHint": offer.contents.network is not None} if self.makes_box else hints


def _bounded(key: str, schema: Json, offer: ToolOffer) -> Json:
    """An agent is limited to what the operator allows; a caller in this process could edit that anyway."""
    lifetimes = offer.lifetimes
    most = {"lifetime_seconds": lifetimes.most_lifetime_seconds, "idle_seconds": lifetimes.most_idle_seconds}
    return {**schema, "maximum": most[key]} if key in most else schema


# ── What descriptions state ───────────────────────────────────────────────────────────────────────


def _seconds(value: float) -> str:
    return f"{value:g} s"


def _shown(contract: Contract, limits: Limits) -> str:
    most = contract.result.max_chars
    return size(limits.capture_bytes) if most is None else f"{most:,} characters"


def _installing(contents: BoxContents) -> str:
    if not contents.installable:
        return "nothing can be installed"
    fit = f"as far as they fit {', '.join(contents.installable)}"
    pip = ", and pip installs them" if contents.inside else ""
    return f"`packages` has others installed before it starts{pip}, {fit}"


def _reachable(network: NetworkSpec | None) -> str:
    if network is None or not network.allow:
        return "none"
    bounds = [", ".join(network.methods)] if network.methods is not None else []
    bounds += [f"under {', '.join(network.paths)}"] if network.paths is not None else []
    more = f" ({'; '.join(bounds)})" if bounds else ""
    return f"{', '.join(network.allow)}{more}, over HTTP and HTTPS by the proxy that the environment names; else none"


def _listening(listening: Listening) -> str:
    if not listening.allowed:
        return "on the box's own loopback"
    if listening.ports is None:
        return "on the box's own loopback; ports can be shown on this machine's, to its owner alone"
    named = ", ".join(f"{name} (port {port})" for name, port in listening.ports)
    return f"on the box's own loopback; shown on this machine's, to its owner alone, can be: {named}"


def programs_stated(commands: CommandRules) -> str:
    """Which programs there are, where a contract names them."""
    ask = f"; for {', '.join(commands.ask)} a person is asked" if commands.ask else ""
    if commands.allow is not None:
        there = f"beside sh only {', '.join(commands.allow)}" if commands.allow else "sh alone"
    else:
        there = "those of the system" + (f" without {', '.join(commands.deny)}" if commands.deny else "")
    return f"{there}{ask}; what is written in the box cannot be executed, and there are no sessions"


# ── Arguments ─────────────────────────────────────────────────────────────────────────────────────

TEXT: Json = {"type": "string"}
TEXTS: Json = {"type": "object", "additionalProperties": TEXT}
NUMBER: Json = {"type": "integer"}
COUNT: Json = {"type": "integer", "minimum": 0}
FLAG: Json = {"type": "boolean"}
DIGEST: Json = {
    "type": "object",
    "properties": {"name": TEXT, "bytes": COUNT, "sha256": TEXT},
    "required": ["bytes", "sha256"],
}
MOUNTS: Json = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"host": TEXT, "at": TEXT, "mode": {"enum": ["ro", "rw"]}, "unsafe": TEXT},
        "required": ["host", "at"],
        "additionalProperties": False,
    },
}
PACKAGES: Json = {
    "type": "array",
    "items": {"type": "string", "maxLength": 500},
    "maxItems": 100,
    "description": "Python packages to install for it, as pip names them: name, or name==version.",
}
TERMINAL_SIZE: Json = {
    "type": "array",
    "items": {"type": "integer", "minimum": 1, "maximum": 10_000},
    "minItems": 2,
    "maxItems": 2,
}
"""Columns and rows."""
LISTEN: Json = {
    "anyOf": [
        {"enum": ["denied", "allowed"]},
        {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1, "maximum": 65_535}},
    ]
}
"""Whether ports that its programs listen on can be shown to its owner; where some are named, only those."""
ALLOW_PACKAGES: Json = {**PACKAGES, "description": "What its programs may install by themselves: names or patterns."}
NETWORK: Json = {"anyOf": [TEXT, {"type": "array", "items": TEXT}]}
"""A name under `networks:`, or places as HOST[:PORT]."""
ACCESS: Json = {
    "trees": {"type": "array", "items": TEXT},
    "mounts": MOUNTS,
    "network": NETWORK,
    "listen": LISTEN,
    "secrets": {"type": "array", "items": TEXT},
    "packages": PACKAGES,
    "allow_packages": ALLOW_PACKAGES,
}
"""What a box may reach, as callers in this process say it for a run and for a session."""

# An agent's model reads all of this before its first call, so it says only what the name of an argument does not.
# Where a name is too long, or names nothing, the keeper of sessions refuses it with a message that says so.
ONE: Json = {"session": TEXT}

# ── Results ───────────────────────────────────────────────────────────────────────────────────────
# Few clients show these to models, and every client gets them: they name what is there. What it means is in the
# documentation.


def named(*names: str) -> Json:
    """Properties by their names alone."""
    return {name: {} for name in names}


RAN = named("stdout", "stderr", "exit_code", "ended", "files", "truncated")
"""The result of a program."""
STEP = named("session", "step", "state", "whole", "late")
"""What a step of a session has besides."""
CELL = {**STEP, **named("context", "interpreter_alive", "fresh_interpreter", "claimed")}
"""A step of Python."""
STATE = named("session", "state", "step", "expires_at", "why")
INFO = {**STATE, **named("template", "contexts", "metadata")}
"""What an agent is told of a session."""
PROCESS = named("session", "process", "argv", "started_at", "running", "exit_code", "ended", "signal")
FILE = named("session", "path", "bytes", "sha256")
