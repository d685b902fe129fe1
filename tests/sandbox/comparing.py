"""The same program bare and boxed: `python FILE` as an ordinary user in a folder like a workspace, and a box."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from ringfence.box import BoxReport, BoxSpec, Limits, Program
from ringfence.ports import Backend
from ringfence.sandbox.process.zygotes import interpreter
from tests.sandbox import ordinary

PYTHON = str(interpreter())
_PATH = f"{os.path.dirname(PYTHON)}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_ORDINARY = str(Path(ordinary.__file__))


@dataclass(frozen=True)
class Honest:
    """A program that does nothing which a box should mind."""

    name: str
    source: str | bytes
    stdin: bytes = b""
    argv: tuple[str, ...] = ()

    @property
    def code(self) -> bytes:
        return self.source if isinstance(self.source, bytes) else textwrap.dedent(self.source).encode()


@dataclass(frozen=True)
class Seen:
    """What can be seen of a program that is over."""

    code: int
    """As `subprocess` has it: negative for a signal."""
    stdout: bytes
    stderr: bytes
    files: dict[str, bytes] = field(default_factory=dict)
    """In its output folder."""


def bare(program: Honest, seconds: float = 60.0) -> Seen:
    """Run it without a box. Its folder is called /workspace in what it says."""
    place = os.path.realpath(tempfile.mkdtemp(prefix="bare-"))
    try:
        _furnish(place, program.code)
        env = {"PATH": _PATH, "HOME": place, "LANG": "C.UTF-8", "TMPDIR": f"{place}/tmp", "USER": "box", "LOGNAME": "box"}
        command = [PYTHON, "-I", "-S", _ORDINARY, PYTHON, f"{place}/prog.py", *program.argv]
        done = subprocess.run(
            command, cwd=place, env=env, input=program.stdin, capture_output=True, timeout=seconds, start_new_session=True
        )
        said = [stream.replace(place.encode(), b"/workspace") for stream in (done.stdout, done.stderr)]
        return Seen(done.returncode, said[0], said[1], _files(Path(place, "output")))
    finally:
        shutil.rmtree(place, ignore_errors=True)


async def boxed(backend: Backend, program: Honest, limits: Limits = Limits()) -> tuple[Seen, BoxReport]:
    """Run it in a box."""
    with tempfile.TemporaryDirectory() as output:
        order = Program("python", program.code, program.argv, "/workspace/prog.py", program.stdin)
        report = await backend.run(BoxSpec(order, limits, output=Path(output)))
        code = report.exit_status if report.exit_status is not None else -(report.signal or 0)
        streams = [stream.head + stream.tail for stream in (report.stdout, report.stderr)]
        return Seen(code, streams[0], streams[1], _files(Path(output))), report


async def both(backend: Backend, program: Honest, limits: Limits = Limits()) -> tuple[Seen, Seen, BoxReport]:
    """Side by side: bare, boxed, and what the supervisor says of the latter."""
    without = asyncio.get_running_loop().run_in_executor(None, bare, program)
    within, report = await boxed(backend, program, limits)
    return await without, within, report


def _furnish(place: str, source: bytes) -> None:
    """Like a workspace, and the property of whoever the program is to run as."""
    os.chmod(place, 0o755)
    for name in ("input", "output", "tmp"):
        os.mkdir(f"{place}/{name}", 0o755)
    Path(place, "prog.py").write_bytes(source)
    if os.geteuid() == 0:
        for name in ("", "/input", "/output", "/tmp", "/prog.py"):
            os.chown(place + name, ordinary.NOBODY, ordinary.NOBODY)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
