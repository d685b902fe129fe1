"""Whether something that governs lies where something governed may write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ringfence.config import paths
from ringfence.config.settings import Config
from ringfence.errors import Problem
from ringfence.model import ServerSpec


def overlaps(config: Config) -> list[Problem]:
    """Configuration, policy files, state or keys under a folder that a box or server may write; keys in the state."""
    governing = [
        ("the configuration", config.path),
        *(("the policy file", path) for path in config.policy.files),
        ("the state", config.gateway.state),
        ("the signing key", paths.key_folder()),
    ]
    file = str(config.path)
    problems = [
        Problem(file, 1, 1, f"{what} ({path}) lies under {folder}, which {who} may write")
        for folder, who in _writable(config)
        for what, path in governing
        if _under(path, folder)
    ]
    if _under(paths.key_folder(), config.gateway.state):
        text = f"the signing key ({paths.key_folder()}) lies in the state folder, whose writers could then sign"
        problems.append(Problem(file, 1, 1, text))
    return problems


def _writable(config: Config) -> Iterator[tuple[Path, str]]:
    for name, contract in config.contracts.items():
        for mount in contract.mounts:
            if mount.mode == "rw":
                yield Path(mount.host), f"capability {name!r}"
    for name, server in config.servers.items():
        boxed = (Path(mount.host) for mount in server.mounts if mount.mode == "rw")
        for folder in _given_folders(server, config.path.parent) if server.placement == "unsafe_host" else boxed:
            yield folder, f"server {name!r}"


def _given_folders(server: ServerSpec, home: Path) -> Iterator[Path]:
    """The folders that a command in no box is pointed at: those among its arguments, and where it is told to run.

    A command that runs next to the configuration because nobody said otherwise was not pointed at that folder.
    """
    if not server.command or server.cwd is None:
        return
    if Path(server.cwd) != home:
        yield Path(server.cwd)
    for argument in server.command[1:]:
        text = argument.rpartition("=")[2] if argument.startswith("-") else argument
        folder = Path(server.cwd) / text
        if text and _is_folder(folder):
            yield folder


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # too long to be a path, for one
        return False


def _under(path: Path, folder: Path) -> bool:
    # Links are followed on both sides: what counts is where the bytes lie.
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
