"""Commands that fetch a package before they run it, taken apart: which package, and what it is given."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

from ringfence.config.containers import Run
from ringfence.packages import manifests
from ringfence.packages.references import Reference

_NPM = re.compile(r"(@[a-z0-9~_.-]+/)?[a-z0-9~_.-]+(@[A-Za-z0-9^~<>=*.+_-]+)?", re.IGNORECASE)
_PYPI = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._,-]+\])?((==|@)[A-Za-z0-9.+!_-]+)?")
_NPX_ALONE = {"-y", "--yes", "-q", "--quiet", "--prefer-offline", "--offline", "--prefer-online", "--silent", "-s"}
_UVX_ALONE = {"-q", "--quiet", "--isolated", "--offline", "--refresh", "--no-cache", "-n", "--no-progress"}


@dataclass(frozen=True, slots=True)
class Runner:
    """What a command like `npx` would fetch and run."""

    kind: Literal["npm", "pypi", "image"]
    packages: tuple[str, ...]
    """As the registry's client names them; the first has the program."""
    program: str | None
    """The program's name where it is not the package's own; of an image, what is run instead of its entry point."""
    arguments: tuple[str, ...]


class NotTaken(Exception):
    """A command that fetches what cannot be pinned."""


def taken_apart(command: tuple[str, ...]) -> Runner | None:
    """None: it runs what is there already. Raises NotTaken with the reason and what to do."""
    words = _without_shell(list(command))
    name = os.path.basename(words[0]).removesuffix(".cmd").removesuffix(".exe")
    match [name, *words[1:]]:
        case ["npx" | "bunx", *rest] | ["npm", "exec", *rest] | ["pnpm" | "yarn", "dlx", *rest]:
            return _npx(rest)
        case ["uvx", *rest] | ["uv", "tool", "run", *rest]:
            return _uvx(rest, "--from")
        case ["pipx", "run", *rest]:
            return _uvx(rest, "--spec")
    return None


def of_image(run: Run) -> Runner:
    """Raises NotTaken."""
    try:
        Reference.of(run.image)
    except ValueError as exc:
        raise NotTaken(str(exc)) from None
    if run.platform is not None and not manifests.is_here(run.platform):
        raise NotTaken(f"it is for {run.platform[:40]}, and this machine is linux/{manifests.machine()}")
    return Runner("image", (run.image,), run.entrypoint, run.arguments)


def _without_shell(words: list[str]) -> list[str]:
    """`cmd /c npx …`, as files that are shared with Windows have it."""
    if len(words) > 2 and os.path.basename(words[0]).lower() in ("cmd", "cmd.exe") and words[1].lower() == "/c":
        return words[2:]
    return words


def _npx(words: list[str]) -> Runner:
    named: list[str] = []
    while words and words[0].startswith("-"):
        option, _, value = words.pop(0).partition("=")
        if option == "--":
            break
        if option in ("-p", "--package"):
            named.append(value or (words.pop(0) if words else ""))
        elif option not in _NPX_ALONE:
            raise NotTaken(f"the option {option} of npx is not known here")
    if not words:
        raise NotTaken("it names no package")
    first, *arguments = words
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    packages = tuple(named or [first])
    for package in packages:
        if not _NPM.fullmatch(package):
            raise NotTaken(f"{package[:80]!r} is no package of a registry, so it cannot be pinned by its integrity")
    return Runner("npm", packages, first if named else None, tuple(arguments))


def _uvx(words: list[str], source: str) -> Runner:
    named, beside = "", []
    while words and words[0].startswith("-"):
        option, _, value = words.pop(0).partition("=")
        if option == "--":
            break
        if option in (source, "--with", "--python", "-p"):
            value = value or (words.pop(0) if words else "")
            if option == source:
                named = value
            elif option == "--with":
                beside += value.split(",")
        elif option not in _UVX_ALONE:
            raise NotTaken(f"the option {option} of uvx is not known here")
    if not words:
        raise NotTaken("it names no package")
    first, *arguments = words
    packages = [_requirement(package) for package in (named or first, *beside)]
    program = first if named else re.split(r"[\[@=]", first)[0]
    return Runner("pypi", tuple(packages), program, tuple(arguments))


def _requirement(text: str) -> str:
    """`name@1.2` is uvx's own way to write `name==1.2`."""
    if not _PYPI.fullmatch(text):
        raise NotTaken(f"{text[:80]!r} is no package of an index, so it cannot be pinned by its hash")
    name, _, version = text.partition("@")
    return name if version in ("", "latest") else f"{name}=={version}"
