"""Plain data about sandboxes, their files, processes, snapshots and volumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from ringfence.core.model import Json
from ringfence.core.record import dataclass

T = TypeVar("T")


def made(kind: type[T], reply: Mapping[str, Any], **more: Any) -> T:
    """A `kind` made of those keys that are fields of it."""
    places = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in reply.items() if name in places}, **more)


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A sandbox."""

    id: str
    state: str
    """`starting`, `running`, `paused` or `stopped`."""
    template: str
    created_at: str
    step: int = 0
    """How many steps were begun."""
    contexts: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    limits: Json = field(default_factory=dict)
    expires_at: str | None = None
    """When its lifetime is over. While it is paused: when it is closed unless it is resumed."""
    ended_at: str | None = None
    why: str | None = None
    """Why it ended: `closed`, `lifetime`, `box_died`, `keeper_died`, `killed` or `failed`."""
    isolation: Json = field(default_factory=dict)
    snapshot: str | None = None
    """The snapshot that it was made from."""
    memory_bytes: int | None = None
    given_back_bytes: int | None = None
    """How much of that the host has back while it is paused; None: nothing, so far or on this host."""
    network: tuple[str, ...] = ()
    """The hosts and addresses that it may reach."""

    @classmethod
    def of(cls, reply: Json) -> SandboxInfo:
        listed = {name: tuple(reply.get(name) or ()) for name in ("contexts", "network")}
        return made(cls, {**reply, **listed}, id=str(reply["session"]))


@dataclass(frozen=True, slots=True)
class CodeContext:
    """An interpreter of a sandbox, with variables of its own."""

    id: str
    """Its name."""
    language: str = "python"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file, folder or link; for a link, the link itself."""

    name: str
    path: str
    kind: str
    """`file`, `dir`, `link` or `other`."""
    bytes: int
    modified: datetime
    mode: int
    target: str | None = None
    """Where a link leads, as the box wrote it."""

    @classmethod
    def of(cls, reply: Json) -> FileInfo:
        name = reply.get("name") or reply["path"].rpartition("/")[2]
        return made(cls, {**reply, "name": name, "modified": datetime.fromisoformat(reply["modified"])})


@dataclass(frozen=True, slots=True)
class Moved:
    """Files that were copied into a sandbox or out of it."""

    files: int
    bytes: int
    left_out: Mapping[str, str] = field(default_factory=dict)
    """What was not copied, and why: links that lead out, devices, pipes, names that cannot be shown; out of a sandbox,
    also files that programs of the host act upon by themselves."""


class Progress(NamedTuple):
    """The progress of a transfer, in bytes."""

    done: int
    total: int | None
    """None if it is not known."""


@dataclass(frozen=True, slots=True)
class FileChange:
    """`created`, `modified`, `removed`, `renamed`; `lost`: some changes below `path` were missed, so list it again."""

    kind: str
    path: str
    to: str | None = None
    """Where it was renamed to."""


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A command that was started in the background."""

    pid: int
    """Its number in the sandbox, which is never used again."""
    argv: tuple[str, ...]
    started_at: str
    running: bool
    exit_code: int | None = None
    ended: str | None = None
    """How it ended, once it has: as in the facts."""
    signal: int | None = None

    @classmethod
    def of(cls, reply: Json) -> ProcessInfo:
        return made(cls, {**reply, "argv": tuple(reply.get("argv") or ())}, pid=int(reply["process"]))


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """The kept files of a sandbox, with its environment, working folder, template and packages; without memory, secrets
    and rules."""

    id: str
    name: str | None
    bytes: int
    files: int
    created_at: str
    tree_digest: str = ""
    template: str | None = None
    packages: tuple[str, ...] = ()

    @classmethod
    def of(cls, reply: Json) -> SnapshotInfo:
        packages = tuple(reply.get("packages") or ())
        return made(cls, {**reply, "packages": packages}, id=str(reply["snapshot"]))


@dataclass(frozen=True, slots=True)
class VolumeInfo:
    """A named folder that outlives sandboxes."""

    name: str
    max_bytes: int
    mode: str
    created_at: str
    bytes: int = 0
    files: int = 0
    saved_at: str | None = None

    @classmethod
    def of(cls, reply: Json) -> VolumeInfo:
        return made(cls, reply)
