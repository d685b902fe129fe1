"""Tries the same cases as an MCP server: a command in a box that stays, with folders of the host to read and write.

Wraps a backend whose boxes can stay, and makes of each case's program the command of a server.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ringfence.box import BoxReport, BoxSpec, Mount, Stream
from ringfence.model import ServerSpec
from ringfence.promises.insession import NAMED_PROGRAMS, TOLD_LATER, Wrapping
from ringfence.promises.stage import lendable
from ringfence.sandbox.servers import Boxes, Surroundings
from ringfence.sandbox.verbs import unheard

NOT_THERE = {
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
"""Cases that say nothing of a server."""


class InServer(Wrapping):
    """Cases are servers."""

    async def run(self, spec: BoxSpec, tell: Callable[[Stream, bytes], None] | None = None) -> BoxReport:
        folder = _folder()
        try:
            return await self._run(spec, folder, tell or unheard)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _run(self, spec: BoxSpec, folder: Path, tell: Callable[[Stream, bytes], None]) -> BoxReport:
        boxes = Boxes(self._backend, Surroundings(spec.limits, {}, lambda path: None))
        stay, command = boxes.prepared(_server(spec, folder))
        given = replace(stay, env=spec.env, inputs=spec.inputs, template=spec.template, tenant=spec.tenant)
        trees = tuple(tree for tree in spec.trees if not any(str(tree) == mount.at for mount in stay.mounts))
        box = await self._backend.open(
            replace(given, limits=spec.limits, trees=trees, listening=spec.listening), spec.network
        )
        try:
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
