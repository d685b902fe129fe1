"""Interpreters of a session that are no forks: started by exec, with an address layout and hash seed of their own.

Nothing of ours is in sight in a box, so what serves cells goes there as code, by a descriptor.
"""

from __future__ import annotations

import asyncio
import marshal
import os
from functools import cache
from pathlib import Path

from ringfence.box import BoxReport, Limits, Stream
from ringfence.errors import OutcomeUnknown, SetUpFailed, Unavailable
from ringfence.sandbox.process.run import memory_file
from ringfence.sandbox.process.steps import Interpreter
from ringfence.sessions import Cell, Failure, Shown

_CODE, _CHANNEL = 3, 4
"""Where a new interpreter finds its code, and its way to the supervisor."""
_READY = b"ready"
_START_SECONDS = 30.0
_LAST_WORDS = 2000
_HOME = "ringfence.sandbox.process"
_MODULES = ("display", "guest", "streams", "claiming", "sources", "cells")
"""Each after those that it needs."""
_BOOT = f"""\
import sys
if not sys.flags.safe_path:
    del sys.path[0]  # until ours are loaded, nobody's modules are found in the working folder
sys.orig_argv = sys.orig_argv[:1]
def begin():
    import _socket, marshal
    with open({_CODE}, "rb") as file:
        parts = marshal.load(file)
    for name, code in parts:
        module = sys.modules[name] = type(sys)(name)
        if code is not None:
            exec(code, module.__dict__)
    sys.modules["{_HOME}.guest"].forget_ourselves()
    return module.serve, _socket.socket(fileno={_CHANNEL})
serve, channel = begin()
serve(channel, ready={_READY!r})
"""


@cache
def _code() -> bytes:
    """What it needs to serve cells, for an interpreter of the very version that runs this."""
    parts: list[tuple[str, object]] = [(name, None) for name in ("ringfence", "ringfence.sandbox", _HOME)]
    for name in _MODULES:
        source = Path(__file__).with_name(f"{name}.py").read_bytes()
        parts.append((f"{_HOME}.{name}", compile(source, f"<{name}>", "exec", dont_inherit=True)))
    return marshal.dumps(parts)


class Started(Interpreter):
    """One that was not forked."""

    async def start(self, path: str) -> None:
        """Of this program; it is ready when this returns. Raises Unavailable."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def over(_: object) -> None:
            if not ready.done():
                ready.set_result(None)

        self._member.heard = over
        self._member.ended.add_done_callback(over)
        nothing, code = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC), memory_file(_code())
        order = {"kind": "afresh", "argv": [path, "-c", _BOOT], "env": dict(self._home.env)}
        try:
            self._member.order(order, [nothing, nothing, nothing, code])
            async with asyncio.timeout(self._home.box.pace.allow(_START_SECONDS)):
                await ready
        except OSError:  # it is gone, or not ready in time
            await self.end()
        except asyncio.CancelledError:
            await self.end()
            raise
        finally:
            self._member.heard = lambda _: None
            os.close(nothing)
            os.close(code)
        if not self.alive:
            raise Unavailable("no_interpreter", "the interpreter could not be started, or ended as soon as it was")

    async def set_up(self, source: str, limits: Limits) -> None:
        """Run code that whatever comes later counts on. Raises SetUpFailed, OutcomeUnknown, Unavailable."""
        self._unnumbered += 1
        try:
            async with self._turn:
                done = await self._run(Cell(source.encode(), limits), _unheard, _unseen, "<setup>")
        except asyncio.CancelledError:
            await self.end()
            raise
        report = done.report
        if report.ended == "exited" and report.exit_status == 0 and done.alive:
            return
        await self.end()
        if report.ended == "infra":
            raise OutcomeUnknown("box_failed", "the box ended while its set-up code ran")
        raise SetUpFailed(done.error.traceback if done.error is not None else _last_words(report))


def _unheard(stream: Stream, data: bytes) -> None:
    """Set-up code speaks to nobody."""


def _unseen(claim: Shown | Failure) -> None:
    """Likewise."""


def _last_words(report: BoxReport) -> str:
    how = f"it was stopped: {report.limit or report.ended}" if report.exit_status is None else "its interpreter ended"
    return f"{report.stderr.text[-_LAST_WORDS:]}\n{how}".lstrip()
