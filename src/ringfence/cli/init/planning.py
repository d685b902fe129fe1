"""What becomes of each server of a client's file: keys of a `ringfence.yaml`, before anything is started or fetched."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ringfence.box import Mount
from ringfence.cli.init.runners import NotTaken, Runner, of_image, taken_apart
from ringfence.config import paths
from ringfence.config.clientfiles import ClientFile, ClientServer, Setting
from ringfence.config.containers import Run
from ringfence.config.folders import touches_credentials
from ringfence.config.writing import Entry
from ringfence.errors import RingfenceError
from ringfence.sandbox.finding import find, within
from ringfence.sandbox.process import mounting
from ringfence.secret import MIN_CHARACTERS

_UNFIT = re.compile(r"[^A-Za-z0-9_-]+")
_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)\}")
_LONGEST_NAME = 60
_EVERYBODYS = ("/tmp", "/var/tmp", "/var")  # noqa: S108 - as they are called on every host
_MOST_LOOKED_AT = 50_000
"""Files of a folder that is to be mounted."""


@dataclass(slots=True)
class Plan:
    """One server on its way into the configuration."""

    name: str
    server: ClientServer
    keys: dict[str, Any] = field(default_factory=dict)
    runner: Runner | None = None
    remarks: list[str] = field(default_factory=list)
    problem: str | None = None
    """Why it is not taken over."""
    failure: RingfenceError | None = None
    """Why it did not start."""


@dataclass(slots=True)
class Asked:
    """A secret that servers of the file need, and how the client that starts us is to hand it on."""

    name: str
    variable: str
    keys: dict[str, Any]
    servers: list[str]
    given: str | None
    """What the client's file says for it, where that is a reference; None where it has the value itself."""

    def entry(self) -> Entry:
        return Entry(self.name, {**self.keys, "servers": self.servers})


class Planner:
    """Goes through a client's file; names and secrets are the whole file's."""

    def __init__(self, file: ClientFile, plain: Collection[str] = ()) -> None:
        """`plain`: the variables that are no secrets, as a person said. Any other value stays where it is: what it is
        called and what it looks like do not say what it is worth."""
        self._file = file
        self._plain = frozenset(plain)
        self._names: set[str] = {"ringfence"}
        self.secrets: list[Asked] = []

    def plans(self) -> list[Plan]:
        return [self._plan(server) for server in self._file.servers]

    def _plan(self, given: ClientServer) -> Plan:
        unsaid = [s.name for s in given.env if s.kind == "plain" and s.name not in self._plain]
        env = tuple(Setting(s.name, "hidden") if s.name in unsaid else s for s in given.env)
        server = replace(given, env=env)
        plan = Plan(self._name(server.name), server, remarks=list(server.notes))
        if unsaid:
            plan.remarks.append(
                f"Not copied, since nobody said that it is no secret: {', '.join(unsaid)}. Set it where Ringfence is "
                f"started, or say --plain {unsaid[0]}."
            )
        short = [s.name for s in given.env if s.name in unsaid and len(s.text) < MIN_CHARACTERS]
        if short:
            plan.remarks.append(
                f"Too short to be kept as a secret (fewer than {MIN_CHARACTERS} characters): {', '.join(short)}. "
                f"If it is none, say --plain {' --plain '.join(short)}, or write it under env: instead of secrets:."
            )
        reasons = list(server.unusable)
        try:
            if server.container is None:
                plan.runner = taken_apart(server.command) if server.command else None
            elif not reasons:
                plan.runner = of_image(server.container)
        except NotTaken as exc:
            reasons = reasons or [str(exc)]
        if reasons:
            plan.problem = "; ".join(reasons)
            return plan
        if server.url is not None:
            plan.keys["url"] = server.url
        elif server.container is not None:
            self._container(plan, server.container)
        else:
            self._command(plan)
        self._settings(plan)
        return plan

    def _name(self, given: str) -> str:
        base = _UNFIT.sub("_", given).strip("_-")[:_LONGEST_NAME] or "server"
        name, number = base, 1
        while name in self._names:
            number += 1
            name = f"{base}_{number}"
        self._names.add(name)
        return name

    # ── Commands and the folders that they name ──

    def _command(self, plan: Plan) -> None:
        server, base = plan.server, self._base()
        arguments = list(plan.runner.arguments if plan.runner else server.command[1:])
        arguments = [self._placed(word, base) for word in arguments]
        if plan.runner is not None:
            plan.runner = Runner(plan.runner.kind, plan.runner.packages, plan.runner.program, tuple(arguments))
        else:
            program = server.command[0]
            plan.keys["command"] = [self._placed(program, base) if "/" in program else program, *arguments]
        if server.cwd is not None:
            plan.keys["cwd"] = str(paths.resolve(server.cwd, base))
        named = [*arguments, *(s.text for s in server.env if s.kind == "plain"), *filter(None, [plan.keys.get("cwd")])]
        mounts = list(self._mounts(plan, named))
        if mounts:
            plan.keys["mounts"] = mounts

    def _container(self, plan: Plan, run: Run) -> None:
        """Its words are about what is in the image; of the host it sees what is bound into it, read-only."""
        base = paths.resolve(plan.server.cwd or "", self._base())
        mounts: list[dict[str, Any]] = []
        for bound in run.bound:
            host, at = str(paths.resolve(bound.host, base)), os.path.normpath(bound.at)
            try:
                mounting.check([*(Mount(**each) for each in mounts), Mount(host, at)], ())
            except ValueError as exc:
                plan.remarks.append(f"{bound.host} is not mounted: {exc}.")
                continue
            if not _exists(host):
                plan.remarks.append(f"{bound.host} is not mounted: it is not there.")
            elif (why := _withheld(host)) is not None:
                plan.remarks.append(_withheld_text(host, why))
            else:
                mounts.append({"host": host, "at": at, "mode": "ro"})
                if bound.writable:
                    plan.remarks.append(f"{at} is mounted read-only; `mode: rw` lets it write there.")
        if mounts:
            plan.keys["mounts"] = mounts
        if run.cwd is not None:
            plan.keys["cwd"] = run.cwd

    def _base(self) -> Path:
        folder = self._file.path.absolute().parent
        return folder.parent if folder.name in (".vscode", ".cursor") else folder

    def _placed(self, word: str, base: Path) -> str:
        """A path of the file as an absolute one: in the box there is no folder that it could be relative to."""
        option, sign, value = word.partition("=") if word.startswith("-") else ("", "", word)
        if value in (".", "..", "~") or value.startswith(("./", "../", "~/")):
            return f"{option}{sign}{paths.resolve(value, base)}"
        return word

    def _mounts(self, plan: Plan, named: list[str]) -> Iterator[dict[str, str]]:
        """What arguments name and the host has, readable and no more."""
        seen: set[str] = set()
        shown = _shown_anyway(plan)
        for word in named:
            value = word.partition("=")[2] if word.startswith("-") else word
            if not os.path.isabs(value) or value in seen or not _exists(value):
                continue
            if any(within(value, folder) for folder in shown):
                continue
            seen.add(value)
            if (why := _withheld(value)) is not None:
                plan.remarks.append(_withheld_text(value, why))
                continue
            yield {"host": value, "at": os.path.normpath(value), "mode": "ro"}

    # ── Environment and headers ──

    def _settings(self, plan: Plan) -> None:
        server = plan.server
        plain = {s.name: s.text for s in server.env if s.kind == "plain"}
        if plain and server.url is None:
            plan.keys["env"] = plain
        names = [self._secret(plan, s, {"env": s.name}) for s in server.env if s.kind != "plain"]
        host = urlsplit(server.url or "").hostname or ""
        for header in server.headers:
            if header.kind == "plain":
                plan.remarks.append(f"The header {header.name} is left out: only headers that hold secrets are sent.")
                continue
            more: dict[str, Any] = {"hosts": [host], "header": header.name}
            shown = _VARIABLE.sub("{value}", header.text)
            if header.kind == "reference" and shown != "{value}":
                more["format"] = shown
            names.append(self._secret(plan, header, {**more, "methods": ["GET", "POST", "DELETE"]}))
        if names:
            plan.keys["secrets"] = names

    def _secret(self, plan: Plan, setting: Setting, more: dict[str, Any]) -> str:
        """The name of the secret that this setting is, once it is among those asked for."""
        whole = _VARIABLE.fullmatch(setting.text)
        within = _VARIABLE.findall(setting.text) if setting.kind == "reference" else []
        variable = within[0] if len(within) == 1 and (whole or "header" in more) else None
        given = f"${{{variable}}}" if variable else (setting.text if setting.kind == "reference" else None)
        variable = variable or _UNFIT.sub("_", setting.name).replace("-", "_").upper()
        keys = {"from": "env", "name": variable, **more}
        for known in self.secrets:
            if known.variable == variable and known.keys == keys and known.given == given is not None:
                known.servers.append(plan.name)
                return known.name
        taken = {known.name for known in self.secrets}, {known.variable for known in self.secrets}
        if variable in taken[1] and given is None:
            variable = f"{_UNFIT.sub('_', plan.name).replace('-', '_').upper()}_{variable}"
            keys["name"] = variable
        name, number = variable.lower(), 1
        while name in taken[0] or name == "none":
            number += 1
            name = f"{variable.lower()}_{number}"
        self.secrets.append(Asked(name, variable, keys, [plan.name], given))
        return name


def _shown_anyway(plan: Plan) -> list[str]:
    """What the box of a command sees of the host because the command itself needs it."""
    command = plan.keys.get("command")
    if command is None:
        return []
    try:
        found = find(command, paths.process_environment(), plan.keys.get("cwd", "/"), touches_credentials)
    except ValueError:  # it cannot be started: whoever tries will say so
        return []
    return [*found.trees, *found.files]


def _withheld(path: str) -> str | None:
    """What is there that nobody gets unasked."""
    real = os.path.realpath(path)
    if real == "/":
        return "the whole file system"
    if real in _EVERYBODYS:
        return "what all programs of this host leave there, their sockets among it"
    return touches_credentials(real) or _sockets(real)


def _sockets(folder: str) -> str | None:
    """Whoever sees a socket can talk to the program behind it, and to many that is to be its user: an agent of keys, a
    terminal. That it is seen read-only is no matter."""
    looked = 0
    for place, _, names in os.walk(folder):
        for name in names:
            looked += 1
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.lstat(f"{place}/{name}").st_mode):
                    return f"a socket of a program of this host ({os.path.relpath(f'{place}/{name}', folder)})"
        if looked > _MOST_LOOKED_AT:
            break
    return None


def _withheld_text(path: str, why: str) -> str:
    rest = "Name what it needs of it under mounts:, or mount it with `unsafe: REASON`."
    return f"{path} is not mounted: it holds {why}. {rest}"


def _exists(path: str) -> bool:
    try:
        return os.path.exists(path)
    except (OSError, ValueError):  # too long to be a path, for one
        return False
