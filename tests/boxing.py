"""A fake backend, and the governed way in front of it: what a box would say is played by a few lines of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio
import pytest

from ringfence import config
from ringfence.compose.backends import templates
from ringfence.compose.runs import Runs, default_config, make_executor
from ringfence.config import SandboxSettings
from ringfence.core.box import BoxReport, BoxSpec, Captured, Limits, Stream
from ringfence.core.errors import Unavailable
from ringfence.core.model import Recheck, always
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.tools.executor import Executor
from ringfence.sandbox.tools.request import Provision
from tests import gateways

ISOLATION = {"backend": "process", "level": "process", "memory_layout": "shared", "protections": {}}


def captured(data: bytes = b"", **more: Any) -> Captured:
    return Captured(**{"head": data, "total": len(data), "sha256": sha256(data).hexdigest(), **more})


def report(ended: Any = "exited", stdout: bytes = b"", stderr: bytes = b"", **more: Any) -> BoxReport:
    status = {"exit_status": 0} if ended == "exited" else {}
    told = {"wall_ms": 12.4, "isolation": ISOLATION, **status, **more}
    return BoxReport(ended, stdout=captured(stdout), stderr=captured(stderr), **told)


@dataclass(slots=True)
class FakeBackend:
    """A fake: it makes no box. It answers from a list, the last entry again and again, and remembers what it got."""

    replies: list[BoxReport | Exception] = field(default_factory=lambda: [report(stdout=b"done\n")])
    specs: list[BoxSpec] = field(default_factory=list)
    hold: anyio.Event | None = None
    closed: bool = False
    name: str = "process"

    async def run(
        self, spec: BoxSpec, tell: Callable[[Stream, bytes], None] | None = None, recheck: Recheck = always
    ) -> BoxReport:
        await recheck()
        self.specs.append(spec)
        if self.hold is not None:
            await self.hold.wait()
        reply = self.replies[min(len(self.specs), len(self.replies)) - 1]
        if isinstance(reply, Exception):
            raise reply
        if tell is not None:
            tell("stdout", reply.stdout.head)
        return reply

    async def close(self) -> None:
        self.closed = True


def fake(*replies: BoxReport | Exception, limits: Limits = Limits(), **more: Any) -> tuple[Executor, FakeBackend]:  # noqa: B008
    backend = FakeBackend(list(replies) or [report(stdout=b"done\n")])
    return Executor(backend, Provision(limits, templates(SandboxSettings()), **more)), backend


def settings(folder: Path, text: str = "") -> config.Config:
    """What a configuration of this text says; its state lies in `folder`."""
    if not text:
        return replace(default_config(), gateway=replace(default_config().gateway, state=folder / "state"))
    return config.load(gateways.write(folder, text + "\ngateway: {state: ./state, approval_wait_seconds: 0}\n"))


@asynccontextmanager
async def faked(
    folder: Path, *replies: BoxReport | Exception, text: str = ""
) -> AsyncIterator[tuple[Runs, FakeBackend]]:
    """Runs of one's own, with a real store and no boxes."""
    executor, backend = fake(*replies)
    async with Runs.open(settings(folder, text), executor) as runs:
        yield runs, backend


def need_boxes() -> None:
    """Skip a test that needs real boxes, with what this host lacks."""
    try:
        make_executor(SandboxSettings())
    except Unavailable as exc:
        pytest.skip(str(exc))


def boxes_run(monkeypatch: pytest.MonkeyPatch) -> list[BoxSpec]:
    """What every box of the process backend is made of from now on."""
    seen: list[BoxSpec] = []
    run = ProcessBackend.run

    async def watched(self: ProcessBackend, spec: BoxSpec, tell: Any = None) -> BoxReport:
        seen.append(spec)
        return await run(self, spec, tell)

    monkeypatch.setattr(ProcessBackend, "run", watched)
    return seen
