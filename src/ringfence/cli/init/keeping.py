"""Servers that are known to keep data in a file: in a box that file needs a volume, or it is gone with the box.

What a server writes cannot be told from its command, so this is a short list of those that many clients have.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringfence.config import paths
from ringfence.sandbox.process import mounting

AT = "/data"
"""Where such a server sees its volume."""
_BOX_ALONE = "/workspace"


@dataclass(frozen=True, slots=True)
class KnownStore:
    """How a server is told where its file is: by a variable, or by an option."""

    packages: tuple[str, ...]
    """Of npm and PyPI, and images."""
    program: str
    file: str
    variable: str | None = None
    option: str | None = None


_KNOWN = (
    KnownStore(
        ("@modelcontextprotocol/server-memory", "mcp/memory", "docker.io/mcp/memory"),
        "mcp-server-memory",
        "memory.jsonl",
        variable="MEMORY_FILE_PATH",
    ),
    KnownStore(
        ("mcp-server-sqlite", "mcp/sqlite", "docker.io/mcp/sqlite"),
        "mcp-server-sqlite",
        "sqlite.db",
        option="--db-path",
    ),
)


def known(command: Sequence[str], packages: Iterable[str]) -> KnownStore | None:
    """The server's store, by its packages, or by the programs and files that its command names."""
    bare = {re.split(r"(?<=.)[@\[=:]", package)[0] for package in packages}
    for store in _KNOWN:
        if bare & set(store.packages):
            return store
        for word in command:
            if os.path.basename(word) == store.program or any(f"/{each}/" in word for each in store.packages):
                return store
    return None


def told(arguments: Sequence[str], option: str) -> str | None:
    """The value of an option among the arguments."""
    for number, word in enumerate(arguments):
        if word == option and number + 1 < len(arguments):
            return arguments[number + 1]
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


def telling(arguments: Sequence[str], option: str, value: str) -> list[str]:
    """The arguments, with the option at this value."""
    out: list[str] = []
    skip = False
    for word in arguments:
        if skip or word.startswith(f"{option}="):
            skip = False
            continue
        if word == option:
            skip = True
            continue
        out.append(word)
    return [*out, option, value]


def place() -> str:
    """The folder for a server's file: a volume, unless this host cannot mount one to be written."""
    return AT if _mountable() else _BOX_ALONE


def _mountable() -> bool:
    if os.geteuid() != 0:
        return True
    folder = Path(os.path.realpath(paths.state_folder()))
    return mounting.maps_ids(next(each for each in (folder, *folder.parents) if each.is_dir()))
