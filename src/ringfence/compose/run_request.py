"""A run as its caller wants it, and how the arguments of the call name what goes beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, field
from pathlib import Path

from ringfence.core.box import Input, Layout, Mount
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.core.record import plain
from ringfence.sandbox.tools.run import EXECUTE_PYTHON, RUN_SHELL


@plain
class RunRequest:
    """A run as its caller wants it. What is left out, the configuration says."""

    code: str | None = None
    """Python source; without it, `command` or `argv` is run."""
    language: str | None = None
    """What the code is written in, if not Python."""
    command: str | None = None
    argv: tuple[str, ...] = ()
    name: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, float | int] = field(default_factory=dict)
    inputs: tuple[Input, ...] = ()
    stdin: bytes | int = b""
    """Bytes, or the reading end of a pipe."""
    output: Path | None = None
    trees: tuple[Path, ...] = ()
    mounts: tuple[Mount, ...] = ()
    packages: tuple[str, ...] = ()
    """Packages of an index that are installed for it."""
    allow_packages: tuple[str, ...] = ()
    """What it may install by itself: names or patterns."""
    network: str | tuple[str, ...] = ()
    """A name under `networks:`, or places as HOST[:PORT]."""
    secrets: tuple[str, ...] = ()
    """Names under `secrets:`, beside those of the contract."""
    listen: str | Mapping[str, int] | None = None
    """`denied`, `allowed`, or ports by name."""
    template: str | None = None
    image: str | None = None
    """An image that is the root of its box: `packages.images.library` says how one is named."""
    backend: str | None = None
    layout: Layout | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def tool(self) -> str:
        return RUN_SHELL if self.code is None else EXECUTE_PYTHON

    def arguments(self) -> Json:
        """All of it that is decided upon: what is validated, seen by policy, digested and approved."""
        given: Json = {
            "code": self.code,
            "language": self.language,
            "command": self.command,
            "argv": list(self.argv) or None,
            "name": self.name,
            "env": dict(self.env),
            "limits": dict(self.limits),
            "inputs": [named(each) for each in self.inputs],
            "stdin": "stream" if isinstance(self.stdin, int) else _digest(self.stdin) if self.stdin else None,
            "output": None if self.output is None else str(self.output),
            "trees": [str(tree) for tree in self.trees],
            "mounts": [asdict(mount) for mount in self.mounts],
            "packages": list(self.packages),
            "allow_packages": list(self.allow_packages),
            "secrets": list(self.secrets),
            "network": self.network if isinstance(self.network, str) else list(self.network),
            "listen": self.listen if self.listen is None or isinstance(self.listen, str) else dict(self.listen),
            "template": self.template,
            "image": self.image,
            "backend": self.backend,
            "memory_layout": self.layout,
            "metadata": dict(self.metadata),
        }
        said = ("code", "command")
        return {name: value for name, value in given.items() if value or (value is not None and name in said)}


def named(given: Input) -> Json:
    """How arguments name a file that goes beside them. Raises Unavailable."""
    if isinstance(given.source, bytes):
        return {"name": given.name, **_digest(given.source)}
    from ringfence.sandbox.files.inputs import open_input  # noqa: PLC0415 - for Linux alone

    try:
        with open(open_input(given.source, links=given.links), "rb") as file:
            found = hashlib.file_digest(file, "sha256")
            return {"name": given.name, "bytes": file.tell(), "sha256": found.hexdigest()}
    except OSError as exc:
        raise Unavailable("no_input", f"input {given.source}: {exc.strerror or exc}") from None


def _digest(data: bytes) -> Json:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
