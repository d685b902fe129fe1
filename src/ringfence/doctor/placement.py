"""The same cases elsewhere than in a fresh box: as a later step of a session, or as an MCP server.

Each wraps a backend whose boxes can stay. `InSession` runs a case's program second in its box, after a step that left
behind all it could; `InServer` runs it as the command of a server, with folders of the host to read and write.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from ringfence.core.box import BoxReport, BoxSpec, Mount, OnOutput
from ringfence.core.model import Recheck, ServerSpec, always
from ringfence.core.ports import Backend
from ringfence.core.sessions import Cell, Command, SessionBackend, StaySpec, discard_output, discard_value
from ringfence.doctor.cases import CATALOGUE
from ringfence.doctor.stage import lendable
from ringfence.sandbox.servers.launcher import BoxLauncher, LaunchSettings

# ── What all of them share ────────────────────────────────────────────────────────────────────────

NAMED_PROGRAMS = {
    case.id: "where a contract names programs, a session is refused" for case in CATALOGUE if case.programs is not None
}
TOLD_LATER = {"F54": "the supervisor of the box reports it, when a step or the server has ended"}


@runtime_checkable
class StayingBackend(SessionBackend, Backend, Protocol):
    """A backend whose boxes can stay as well as run one program."""


class PlacedBackend:
    """A backend for the suite, wrapped around one whose boxes stay."""

    def __init__(self, backend: StayingBackend) -> None:
        self._backend = backend

    @property
    def name(self) -> str:
        return self._backend.name

    async def close(self) -> None:
        await self._backend.close()


# ── In a session ──────────────────────────────────────────────────────────────────────────────────

PLANTED = b"""
import builtins, os, signal, sys, threading
for name in ("tmp", "output"):
    os.mkdir(f"/workspace/{name}")
for name in ("sitecustomize", "usercustomize", "tmp/os", "tmp/json", "output/ctypes"):
    with open(f"/workspace/{name}.py", "w") as file:
        file.write("raise SystemExit('planted')")
for name, target in (("planted", "/"), ("tmp/up", "../.."), ("output/out", "/etc"), ("tmp/fd", "/proc/self/fd")):
    os.symlink(target, f"/workspace/{name}")
os.chmod("/workspace/tmp", 0o777)
builtins.open = builtins.print = builtins.compile = builtins.exec = None
os.environ.update(LD_PRELOAD="/workspace/x.so", PYTHONPATH="/workspace", PYTHONSTARTUP="/workspace/tmp/os.py")
for number in range(3, 128):
    try:
        os.dup2(1, number)
    except OSError:
        pass
if not os.fork():
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pause()
"""
"""Modules and links where others may look, changed builtins, descriptors in the place of ours, a process that stays."""
NOT_IN_SESSION = {
    "A13": "what runs on after a step may change files after it; facts are of the moment at which the step ended",
    **TOLD_LATER,
    **NAMED_PROGRAMS,
}
"""Cases that show nothing about a session, and why."""


class InSession(PlacedBackend):
    """Runs each case as the second program of a box."""

    async def run(self, spec: BoxSpec, tell: OnOutput | None = None, recheck: Recheck = always) -> BoxReport:
        await recheck()
        # Cases look for the folders of a program that is run once.
        stay = StaySpec(spec.limits, spec.env, spec.inputs, (), spec.trees, spec.template, tenant=spec.tenant)
        stay = replace(stay, listening=spec.listening, mounts=spec.mounts, layout=spec.layout, has_input=True)
        box = await self._backend.open(stay, spec.network)
        try:
            listener = tell or discard_output
            interpreter = await box.interpreter()
            await interpreter.run(
                Cell(PLANTED, replace(spec.limits, wall_seconds=max(5.0, spec.limits.wall_seconds))),
                discard_output,
                discard_value,
            )
            program = spec.program
            source = program.source if program.kind == "python" else None
            command = Command(program.argv, spec.limits, stdin=program.stdin, source=source, name=program.name)
            running = await box.command(command, listener)
            return await running.over()
        finally:
            await box.end()


# ── As an MCP server ──────────────────────────────────────────────────────────────────────────────

NOT_IN_SERVER = {
    "F03": "a server has the folders that were mounted for it",
    "F40": "likewise, and one of them to write to",
    "A06": "a server leaves nothing that is copied out",
    "A14": "likewise",
    "A15": "likewise",
    "A07": "where a box writes to the host, no setuid file can be made at all",
    "A13": "what runs on after a server may change files after it; facts are of the moment at which it ended",
    "X12": "a server's interpreter is started for it, and has a layout of its own",
    **TOLD_LATER,
    **dict.fromkeys(NAMED_PROGRAMS, "a server's box has the programs of the system"),
}
"""Cases that show nothing about a server, and why."""


class InServer(PlacedBackend):
    """Runs each case as a server."""

    async def run(self, spec: BoxSpec, tell: OnOutput | None = None, recheck: Recheck = always) -> BoxReport:
        await recheck()
        folder = _folder()
        try:
            return await self._run(spec, folder, tell or discard_output)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _run(self, spec: BoxSpec, folder: Path, tell: OnOutput) -> BoxReport:
        launcher = BoxLauncher(self._backend, LaunchSettings(spec.limits, {}, lambda path: None))
        stay, command = launcher.prepared(_server(spec, folder))
        given = replace(stay, env=spec.env, inputs=spec.inputs, template=spec.template, tenant=spec.tenant)
        trees = tuple(tree for tree in spec.trees if not any(str(tree) == mount.at for mount in stay.mounts))
        box = await self._backend.open(
            replace(given, limits=spec.limits, trees=trees, listening=spec.listening, has_input=True), spec.network
        )
        try:
            folders = Command(("mkdir", "/workspace/tmp", "/workspace/output"))
            await (await box.command(folders, discard_output)).over()
            wanted = replace(command, limits=spec.limits, stdin=spec.program.stdin)
            return await (await box.command(wanted, tell)).over()
        finally:
            await box.end()


def _folder() -> Path:
    where = lendable(Path(tempfile.gettempdir()))[:1] if os.geteuid() == 0 else []
    return Path(os.path.realpath(tempfile.mkdtemp(prefix="ringfence-server-", dir=where[0] if where else None)))


def _server(spec: BoxSpec, folder: Path) -> ServerSpec:
    """The case's program as a script, with one folder to read and one to write to."""
    mounts = [*spec.mounts]
    for name, mode in (("lent", "ro"), ("shared", "rw")):
        (folder / name).mkdir()
        (folder / name / "note.txt").write_text(name)
        mounts.append(Mount(str(folder / name), f"/srv/{name}", "rw" if mode == "rw" else "ro"))
    program = spec.program
    if program.kind == "command":
        return ServerSpec("case", program.argv, mounts=tuple(mounts))
    (folder / "code").mkdir()
    script = folder / "code" / "server.py"
    script.write_bytes(program.source)
    interpreter = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    return ServerSpec("case", (interpreter, str(script), *program.argv), mounts=tuple(mounts))
