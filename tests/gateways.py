"""A whole gateway for a test: `ringfence serve` as its users start it, and what it leaves on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringfence import config
from ringfence.audit.chain import Verification
from ringfence.audit.export import verify_live
from ringfence.audit.keys import Keys, load_or_create
from ringfence.compose.runs import make_executor
from ringfence.core.errors import Unavailable
from ringfence.sandbox.tools.toolkit import offered_tools
from ringfence.store import Reader
from tests import tooling, warm

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Served:
    """A gateway that is running in a process of its own."""

    started: tooling.Started
    url: str
    config: Path
    state: Path

    @property
    def pid(self) -> int:
        return self.started.pid


def ringfence(*arguments: str | Path) -> list[str]:
    """The command line, on this Python."""
    return [sys.executable, "-m", "ringfence.cli.main", *map(str, arguments)]


def run(*arguments: str | Path, cwd: Path | None = None, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    """One verb of the command line, run to its end."""
    return warm.run(ringfence(*arguments), cwd=cwd, timeout=timeout)


def server(script: str, *arguments: str) -> str:
    """The command of a fixture server as a configuration writes it."""
    return json.dumps(tooling.fixture_command(script, *arguments))


def write(folder: Path, text: str, name: str = "ringfence.yaml") -> Path:
    """A configuration whose state lies beside it."""
    path = folder / name
    path.write_text(text)
    return path


@contextmanager
def serve(path: Path) -> Iterator[Served]:
    """`ringfence serve` with this configuration on a free port, while the block lasts."""
    port = tooling.free_port()
    command = ringfence("serve", "--config", path, "--port", str(port))
    with tooling.start_process(command, cwd=path.parent) as started:
        started.wait_for("Paste into .mcp.json")
        started.wait_for_port(port)
        yield Served(started, f"http://127.0.0.1:{port}/mcp", path, config.load(path).gateway.state)


@contextmanager
def serve_as_configured(path: Path) -> Iterator[tooling.Started]:
    """The same where its configuration says, while the block lasts."""
    with tooling.start_process(ringfence("serve", "--config", path), cwd=path.parent) as started:
        started.wait_for("Paste into .mcp.json", 120)
        yield started


def own_tools() -> list[str]:
    """Tools of our own that a gateway offers on this host without being told to."""
    try:
        make_executor(config.SandboxSettings())
    except Unavailable:
        return []
    return list(offered_tools())


def keys() -> Keys:
    """The signing key that gateways of this home use."""
    return load_or_create(config.key_folder())


def records(state: Path, **wanted: Any) -> list[Body]:
    """What is on record, each with its kind and place."""
    reader = Reader.open(state)
    try:
        return [record.body for record in reader.records(**wanted)]
    finally:
        reader.close()


def finished(state: Path, kind: str = "tool") -> list[Body]:
    """How calls of one kind ended, in the order in which they did."""
    return [body for body in records(state, kind="finished") if body["call"]["kind"] == kind]


def verified(state: Path) -> Verification:
    """What a check of the live log against its checkpoints finds."""
    reader = Reader.open(state)
    try:
        return verify_live(*reader.evidence(), keys().public, reader.record)
    finally:
        reader.close()


def holding(state: Path, needles: Sequence[str]) -> list[str]:
    """Which of these texts stand anywhere in any file below a folder, in clear."""
    everything = b"\0".join(path.read_bytes() for path in sorted(state.rglob("*")) if path.is_file())
    return [needle for needle in needles if needle.encode() in everything]
