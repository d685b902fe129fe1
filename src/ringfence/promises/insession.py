"""Tries the same cases in a session: not in a fresh box, but after a step that left all it could for whoever is next.

Wraps a backend whose boxes can stay, and makes of each case's program the second program of a box.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, runtime_checkable

from ringfence.box import BoxReport, BoxSpec, Stream
from ringfence.promises.cases import CATALOGUE
from ringfence.sandbox.verbs import unheard, unseen
from ringfence.sessions import Cell, Command, Opening, StaySpec

PLANTED = b"""
import builtins, os, signal, sys, threading
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


NAMED_PROGRAMS = {
    case.id: "where a contract names programs, a session is refused" for case in CATALOGUE if case.programs is not None
}
TOLD_LATER = {"F54": "whoever keeps the box tells of it, when a step or the server has ended"}
NOT_THERE = {
    "A13": "what runs on after a step may change files after it; facts are of the moment at which the step ended",
    **TOLD_LATER,
    **NAMED_PROGRAMS,
}
"""Cases that say nothing of a session."""


@runtime_checkable
class Staying(Opening, Protocol):
    """A backend that has both kinds of boxes."""

    @property
    def name(self) -> str: ...

    async def close(self) -> None: ...


class Wrapping:
    """A backend for the suite, over another whose boxes stay."""

    def __init__(self, backend: Staying) -> None:
        self._backend = backend

    @property
    def name(self) -> str:
        return self._backend.name

    async def close(self) -> None:
        await self._backend.close()


class InSession(Wrapping):
    """Cases are the second program of a box."""

    async def run(self, spec: BoxSpec, tell: Callable[[Stream, bytes], None] | None = None) -> BoxReport:
        stay = StaySpec(spec.limits, spec.env, spec.inputs, (), spec.trees, spec.template, tenant=spec.tenant)
        stay = replace(stay, listening=spec.listening, mounts=spec.mounts, layout=spec.layout)
        box = await self._backend.open(stay, spec.network)
        try:
            told = tell or unheard
            interpreter = await box.interpreter()
            await interpreter.run(
                Cell(PLANTED, replace(spec.limits, wall_seconds=max(5.0, spec.limits.wall_seconds))), unheard, unseen
            )
            program = spec.program
            source = program.source if program.kind == "python" else None
            command = Command(program.argv, spec.limits, stdin=program.stdin, source=source, name=program.name)
            running = await box.command(command, told)
            return await running.over()
        finally:
            await box.end()
