"""`docker run …` (podman, nerdctl) as a client's file has it, taken apart: hostile input like the rest of that file.

What a box has anyway, or cannot have, is dropped with a note. A command with an option that would loosen a box, or that
is not known here, is not taken over at all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path

from ringfence.config import validators
from ringfence.config.folders import touches_credentials
from ringfence.config.yaml import read_file
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass

_LONGEST_FILE = 65_536
_MAX_LINES = 256
_ENGINES = ("docker", "podman", "nerdctl")
_FLAGS = {"-i", "--interactive", "--rm", "-t", "--tty", "--init", "--read-only", "-q", "--quiet", "--sig-proxy"}
_DROPPED = {
    *("--pull", "--name", "-l", "--label", "--label-file", "-h", "--hostname", "--cap-drop", "--stop-timeout"),
    *("--stop-signal", "--log-driver", "--log-opt"),
}
_LIMITS = {
    "-m": "limits: {memory_mb: …}",
    "--memory": "limits: {memory_mb: …}",
    "--cpus": "limits: {cpu_cores: …}",
    "--pids-limit": "limits: {processes: …}",
}
_NOT_KEPT = "is not mounted: what the server writes there goes to /workspace, and is removed with its box"
_USED = {
    *("-e", "--env", "--env-file", "-v", "--volume", "--mount", "-w", "--workdir", "--entrypoint", "--platform"),
    *("-u", "--user", "--network", "--net"),
}
_SHORT_FLAGS = frozenset("itq")
_SHORT_VALUED = frozenset("elhmvwu")
_BIND = {"type", "source", "src", "target", "dst", "destination", "readonly", "ro", "bind-propagation", "consistency"}


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable that the container is given."""

    name: str
    value: str | None
    """None: it is taken from the environment of the command."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A folder or file of the host, and where the container sees it."""

    host: str
    at: str
    writable: bool


@dataclass(slots=True)
class ContainerRun:
    """What one command would run."""

    image: str = ""
    arguments: tuple[str, ...] = ()
    entrypoint: str | None = None
    cwd: str | None = None
    platform: str | None = None
    env: list[Variable] = field(default_factory=list)
    env_files: list[str] = field(default_factory=list)
    bound: list[Bound] = field(default_factory=list)
    volumes: list[tuple[str, str]] = field(default_factory=list)
    """Names of durable folders, and where the container sees each."""
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Why it is not taken."""
    shown: tuple[str, ...] = ()
    """The command without the values of variables, which are shown by themselves."""
    hidden: frozenset[int] = frozenset()
    """Which words of it had one."""


@dataclass(frozen=True, slots=True)
class _Option:
    name: str
    value: str
    start: int
    """The first of the words that it stands in."""
    stop: int


def is_container(command: tuple[str, ...]) -> bool:
    return bool(command) and os.path.basename(command[0]).removesuffix(".exe") in _ENGINES


def parse_run(command: tuple[str, ...]) -> ContainerRun:
    """Parse a command for which `is_container` is true."""
    run = ContainerRun(shown=command)
    first = 2 if command[1:2] == ("container",) else 1
    if command[first : first + 1] != ("run",):
        run.refused.append("its command is not `run` with an image, so there is nothing to fetch and pin")
        return run
    shown = list(command)
    hidden = set()
    at = first + 1
    for option in _options(command, at, run):
        at = option.stop
        _meant(run, option)
        if option.name in ("-e", "--env"):
            hidden.add(option.stop - 1)
            shown[option.stop - 1] = _without_value(command, option)
    for index in range(at, len(command)) if run.refused else ():
        # What follows is not known, and may be a variable all the same.
        if command[index - 1] in ("-e", "--env") or command[index].startswith(("--env=", "-e")):
            hidden.add(index)
            shown[index] = "[not shown]"
    run.shown = tuple(shown)
    run.hidden = frozenset(hidden)
    if run.refused:
        return run
    at += command[at : at + 1] == ("--",)
    if at >= len(command):
        run.refused.append("it names no image")
        return run
    run.image = command[at]
    run.arguments = tuple(command[at + 1 :])
    return run


def _without_value(command: tuple[str, ...], option: _Option) -> str:
    """The word that it stands in: the same variable, taken from the environment of the command."""
    return command[option.stop - 1].removesuffix(option.value) + option.value.partition("=")[0]


def _options(command: tuple[str, ...], at: int, run: ContainerRun) -> Iterator[_Option]:
    """Read the options up to the image. An unknown one ends it, since the next word may be its value or not."""
    while at < len(command) and command[at].startswith("-") and command[at] not in ("-", "--"):
        word = command[at]
        name, value, words = _long(command, at) if word.startswith("--") else _short(command, at)
        if value is None:
            run.refused.append(_why(name))
            return
        yield _Option(name, value, at, at + words)
        at += words


def _long(command: tuple[str, ...], at: int) -> tuple[str, str | None, int]:
    name, equals, value = command[at].partition("=")
    if name in _FLAGS:
        return name, value, 1
    if name not in _DROPPED and name not in _LIMITS and name not in _USED:
        return name, None, 1
    if equals:
        return name, value, 1
    return (name, command[at + 1], 2) if at + 1 < len(command) else (name, None, 1)


def _short(command: tuple[str, ...], at: int) -> tuple[str, str | None, int]:
    """Several letters may stand in one word; the last of them may have a value, in the same word or in the next."""
    letters = command[at][1:]
    while letters and letters[0] in _SHORT_FLAGS:
        letters = letters[1:]
    if not letters or letters in ("=true", "=false"):
        return command[at][:2], "", 1
    name = f"-{letters[0]}"
    if letters[0] not in _SHORT_VALUED:
        return name, None, 1
    if letters[1:]:
        return name, letters[1:].removeprefix("="), 1
    return (name, command[at + 1], 2) if at + 1 < len(command) else (name, None, 1)


def _why(name: str) -> str:
    return f"its option {name[:40]} is not taken: a box has nothing of the kind, or it would loosen it"


def _meant(run: ContainerRun, option: _Option) -> None:
    value = option.value
    match option.name:
        case "-e" | "--env":
            name, sign, given = value.partition("=")
            run.env.append(Variable(name, given if sign else None))
        case "--env-file":
            run.env_files.append(value)
        case "-v" | "--volume":
            _volume(run, value)
        case "--mount":
            _mount(run, value)
        case "-w" | "--workdir":
            run.cwd = value
        case "--entrypoint":
            run.entrypoint = value
        case "--platform":
            run.platform = value
        case "-u" | "--user":
            run.notes.append("its user is not taken over: a box has an id of its own")
        case "--network" | "--net":
            if value != "none":
                run.notes.append(
                    f"its network {quoted(value, 40)} is not taken over: a box has none unless networks: gives it"
                )
        case name if name in _LIMITS:
            run.notes.append(f"{name} is not taken over: write {_LIMITS[name]} instead")


def _volume(run: ContainerRun, value: str) -> None:
    host, sign, rest = value.partition(":")
    at, _, words = rest.partition(":")
    if not sign or not at.startswith("/"):
        run.notes.append(f"the volume {quoted(value)} {_NOT_KEPT}")
    elif "/" not in host and not host.startswith((".", "~")):
        _named(run, host, at)
    else:
        run.bound.append(Bound(host, at, "ro" not in words.split(",")))


def _named(run: ContainerRun, name: str, at: str) -> None:
    at = os.path.normpath(at)
    try:
        validators.volume(name)
        validators.path_inside(at)
    except ValueError as exc:
        run.notes.append(f"the volume {quoted(name)} is not mounted: {exc}")
        return
    run.volumes.append((name, at))


def _mount(run: ContainerRun, value: str) -> None:
    given: dict[str, str] = {}
    for part in value.split(","):
        name, sign, what = part.partition("=")
        given[name] = what if sign else "true"
    kind = given.get("type", "volume")
    source = given.get("source") or given.get("src") or ""
    target = given.get("target") or given.get("dst") or given.get("destination") or ""
    if kind == "volume" and source and target:
        _named(run, source, target)
        return
    if kind != "bind":
        run.notes.append(f"--mount of type {quoted(kind, 20)} {_NOT_KEPT}")
        return
    if given.keys() - _BIND:
        run.refused.append(
            f"its option --mount has {quoted(sorted(given.keys() - _BIND)[0], 40)}, which is not known here"
        )
        return
    host, at = source, target
    reads = next((given[name] for name in ("readonly", "ro") if name in given), "false") in ("true", "1")
    if not host or not at.startswith("/"):
        run.refused.append("its option --mount names no source or no target")
        return
    run.bound.append(Bound(host, at, not reads))


# ── Files of variables ────────────────────────────────────────────────────────────────────────────


def variables(client: Path, path: str, notes: list[str]) -> list[tuple[str, str]]:
    """What a file of `--env-file` says, where that lies beside the client's own file: nowhere else is one read."""
    folder = os.path.realpath(client.parent)
    place = os.path.realpath(os.path.join(folder, path))
    if not place.startswith(f"{folder.rstrip('/')}/"):
        notes.append(
            f"--env-file {path[:80]} is not read: it does not lie beside the client's file; name what it needs"
        )
        return []
    if (why := touches_credentials(place)) is not None:
        notes.append(f"--env-file {path[:80]} is not read: it holds {why}")
        return []
    text, problems = read_file(Path(place), path)
    if text is None or len(text) > _LONGEST_FILE:
        notes.append(f"--env-file {path[:80]} cannot be read: {problems[0].text if problems else 'it is too long'}")
        return []
    found = []
    for line in text.splitlines()[:_MAX_LINES]:
        name, sign, value = line.strip().partition("=")
        if sign and not name.startswith("#") and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,200}", name, re.ASCII):
            found.append((name, value))
    return found
