"""The same program bare and boxed: `python FILE` as an ordinary user in a folder like a workspace, and a box."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ringfence.core.box import BoxReport, BoxSpec, Layout, Limits, Program
from ringfence.core.errors import Unavailable
from ringfence.core.ports import Backend
from ringfence.core.system import interpreter
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.baseline import Baseline, configuration
from ringfence.sandbox.process.zygote.template import NODE_FILE
from tests.sandbox import ordinary

PYTHON = str(interpreter())
LIMITS = Limits(capture_bytes=16_000_000)
"""The defaults, but for what is returned of the output: all of it is compared."""
_PATH = str(configuration(Baseline(), own_ids=False)["env"]["PATH"])
"""Where this system has no program named `python`, boxes have one of ours."""


@dataclass(frozen=True)
class Honest:
    """A program that does nothing which a box should mind."""

    name: str
    source: str | bytes
    stdin: bytes = b""
    argv: tuple[str, ...] = ()
    inline: bool = False
    """`python -c SOURCE` rather than a file."""

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


async def opened(
    like: BoxSpec = BoxSpec(Program("python"), LIMITS),  # noqa: B008
    without: Sequence[str] = (),
) -> AsyncIterator[ProcessBackend]:
    """A backend that is ready for boxes like this one, for a fixture. Skips where this host lacks a protection."""
    backend = ProcessBackend(without=without)
    try:
        await backend.warm(like)
    except Unavailable as exc:
        if exc.reason_code != "missing_protection":
            raise
        pytest.skip(str(exc))
    yield backend
    await backend.close()


def bare(program: Honest, seconds: float = 300.0) -> Seen:
    """Run it without a box. Its folder is called /workspace in what it says."""
    place = os.path.realpath(tempfile.mkdtemp(prefix="bare-"))
    try:
        furnish(place, program.code)
        words = ["-c", os.fsdecode(program.code)] if program.inline else [f"{place}/prog.py"]
        done = subprocess.run(
            [*ORDINARY, PYTHON, *words, *program.argv],
            cwd=place,
            env={**environment(place), "HOME": "/home/user"},
            input=program.stdin,
            capture_output=True,
            timeout=seconds,
            start_new_session=True,
        )
        return _same_words(Seen(done.returncode, done.stdout, done.stderr, _files(Path(place, "output"))), place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


async def boxed(
    backend: Backend, program: Honest, limits: Limits = LIMITS, layout: Layout = "shared"
) -> tuple[Seen, BoxReport]:
    """Run it in a box."""
    with tempfile.TemporaryDirectory() as output:
        name = "-c" if program.inline else "/workspace/prog.py"
        order = Program("python", program.code, program.argv, name, program.stdin)
        spec = BoxSpec(order, limits, output=Path(output), layout=layout)
        report = await backend.run(spec)
        code = report.exit_status if report.exit_status is not None else -(report.signal or 0)
        streams = [stream.head + stream.tail for stream in (report.stdout, report.stderr)]
        return _same_words(Seen(code, streams[0], streams[1], _files(Path(output)))), report


async def both(
    backend: Backend, program: Honest, limits: Limits = LIMITS, layout: Layout = "shared"
) -> tuple[Seen, Seen, BoxReport]:
    """Side by side: bare, boxed, and what the supervisor says of the latter."""
    without = asyncio.get_running_loop().run_in_executor(None, bare, program)
    within, report = await boxed(backend, program, limits, layout)
    return await without, within, report


# ── What the bare one needs ──

ORDINARY = (PYTHON, "-I", "-S", str(Path(ordinary.__file__)))


def environment(place: str) -> dict[str, str]:
    """What a box has, with this folder for a workspace."""
    return {
        "PATH": _PATH,
        "HOME": place,
        "LANG": "C.UTF-8",
        "TMPDIR": f"{place}/tmp",
        "USER": "box",
        "LOGNAME": "box",
        "TERM": "xterm-256color",
        "NODE_OPTIONS": f"--require=/etc/{NODE_FILE}",
    }


def furnish(place: str, source: bytes) -> None:
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


def _same_words(seen: Seen, place: str = "/workspace") -> Seen:
    """Without what differs from run to run: the folder's name, addresses, and how long something took."""

    def said(text: bytes) -> bytes:
        text = re.sub(rb"\b0x[0-9a-f]{8,}\b", b"0xADDRESS", text.replace(place.encode(), b"/workspace"))
        return re.sub(rb"\bin \d+\.\d+s\b", b"in SECONDS", text)

    files = {name: said(content) for name, content in seen.files.items()}
    return replace(seen, stdout=said(seen.stdout), stderr=said(seen.stderr), files=files)
