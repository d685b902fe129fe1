"""`env NAME=VALUE …` and `cross-env NAME=VALUE …` before the command of a server, as a client's file has it.

What such a command sets is a variable like those under `env`, and no value of a variable is written down or shown.
Where values stand that cannot be taken apart, in words of a shell for one, the server is not taken over.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import field

from ringfence.core.record import dataclass

_SETTERS = ("env", "cross-env")
_OTHERS = ("cross-env-shell", "sudo", "doas")
"""Take assignments too, and do more than that."""
_FETCHERS = (("npx",), ("bunx",), ("npm", "exec"), ("pnpm", "exec"), ("pnpm", "dlx"), ("yarn", "dlx"))
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "ash", "busybox")
_ASSIGNMENT = re.compile(r"([^-=/\s][^=/\s]*)=(.*)", re.DOTALL)
_IN_SHELL = re.compile(
    r"(?:^|[;&|({\n]|\b(?:export|declare|readonly|then|do|else|exec|sudo)\s|\b(?:cross-)?env\s(?:\s*-\S+\s)*)"
    r"\s*[A-Za-z_][A-Za-z0-9_]*=[^\s;&|)]"
)
"""An assignment where a command begins. A flag like `--level=3` is none."""


@dataclass(slots=True)
class SetVariables:
    """What stands before the command itself."""

    length: int = 0
    """In words."""
    variables: list[tuple[str, str]] = field(default_factory=list)
    cleared: bool = False
    """Whether the command gets no other variables (`env -i`)."""
    unset: set[str] = field(default_factory=set)


def before(command: tuple[str, ...]) -> SetVariables:
    """What the first words set, as far as they can be taken apart."""
    found = SetVariables()
    while (at := _setter(command, found.length)) is not None:
        taken = _taken(command, at, found)
        if taken is None or taken >= len(command):
            break
        found.length = taken
    return found if found.length else SetVariables()


def left(command: tuple[str, ...]) -> Iterator[int]:
    """Which words hold, or may hold, the value of a variable all the same."""
    setting = shell = False
    for index, word in enumerate(command):
        name = _name(word)
        if name in (*_SETTERS, *_OTHERS):
            setting = True
        elif setting and (_ASSIGNMENT.fullmatch(word) or "=" in word or command[index - 1] in ("-S", "--split-string")):
            yield index
        elif setting and not word.startswith("-") and not command[index - 1].startswith("-"):
            setting = False
        shell = shell or name in _SHELLS
        if shell and not setting and _IN_SHELL.search(word):
            yield index


def _setter(command: tuple[str, ...], at: int) -> int | None:
    """Where what follows `env` begins, if that is what stands here."""
    if [word.lower() for word in command[at : at + 2]] in (["cmd", "/c"], ["cmd.exe", "/c"]):
        at += 2
    if at >= len(command):
        return None
    if _name(command[at]) in _SETTERS:
        return at + 1
    for words in _FETCHERS:
        if (_name(command[at]), *command[at + 1 : at + len(words)]) == words:
            at += len(words)
            while command[at : at + 1] in (("-y",), ("--yes",), ("-q",), ("--quiet",), ("--",)):
                at += 1
            fetched = command[at].partition("@")[0] if at < len(command) else ""
            return at + 1 if fetched == "cross-env" else None
    return None


def _taken(command: tuple[str, ...], at: int, found: SetVariables) -> int | None:
    """Where the command itself begins; None where an option is not known here."""
    variables: list[tuple[str, str]] = []
    unset: set[str] = set()
    cleared = False
    while at < len(command) and command[at].startswith("-") and command[at] != "--":
        option, _, value = command[at].partition("=")
        if option in ("-i", "-", "--ignore-environment"):
            cleared = True
        elif option in ("-u", "--unset"):
            at += not value
            unset.add(value or (command[at] if at < len(command) else ""))
        else:
            return None
        at += 1
    at += command[at : at + 1] == ("--",)
    while at < len(command) and (assigned := _ASSIGNMENT.fullmatch(command[at])):
        variables.append((assigned[1], assigned[2]))
        at += 1
    if cleared:
        found.cleared = True
        found.variables.clear()
    found.variables = [each for each in found.variables if each[0] not in unset] + variables
    found.unset |= unset
    return at


def _name(word: str) -> str:
    return os.path.basename(word).removesuffix(".exe").removesuffix(".cmd")
