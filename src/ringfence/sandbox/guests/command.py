"""A command in a guest that stays, with pipes or a terminal."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from ringfence.core.aio import shielded
from ringfence.core.box import BoxReport, Captured, Program
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.core.sessions import Command, Tell
from ringfence.sandbox.guests.link import GuestGone, GuestOrder, pass_on, said
from ringfence.sandbox.guests.step import STREAMS, GuestStep, box_report, termination_of
from ringfence.sandbox.process import guest_code

if TYPE_CHECKING:
    from ringfence.sandbox.guests.staying import StayingGuest

_START_SECONDS = 60.0


class GuestCommand:
    """A command that was started."""

    def __init__(self, home: StayingGuest, command: Command, tell: Tell) -> None:
        self._home = home
        self._command = command
        self._step = GuestStep(home, command.limits, tell, reported=command.reported)
        self._channel: GuestOrder | None = None
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._input_closed = False
        self._over: asyncio.Task[BoxReport] | None = None
        self._feeding: asyncio.Task[None] | None = None

    @property
    def logs(self) -> tuple[Captured, Captured]:
        return self._step.captured("stdout"), self._step.captured("stderr")

    # ── Start ──

    async def start(self) -> None:
        """Raises Unavailable."""
        await self._step.begin()
        self._step.on_stop = self._kill
        try:
            order, code = self._order()
            channel = self._channel = self._home.link.open(order, code)
            channel.on_output = self._step.take
            channel.on_note = self._note
            channel.result.add_done_callback(lambda _: self._has_begun())
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.shield(self._begun)
            if channel.result.done() and "failed" in channel.result.result():
                raise Unavailable(
                    "no_process", f"the command could not be started: {said(channel.result.result()['failed'])}"
                )
        except (GuestGone, TimeoutError) as problem:
            self._step.finish(None)
            raise Unavailable("no_process", f"the command could not be started: {problem}") from None
        except BaseException:
            if self._channel is not None:
                self._channel.kill()
            self._step.finish(None)
            raise
        loop = asyncio.get_running_loop()
        if self._command.stdin is not None and self._command.stdin != b"" and self._command.pty is None:
            self._feeding = loop.create_task(pass_on(channel, self._command.stdin))
        self._over = loop.create_task(self._wait(channel))

    def _order(self) -> tuple[Json, bytes]:
        command, home = self._command, self._home
        order: Json = {"do": "step", "env": {**home.env, **command.env}, "cwd": command.cwd}
        order |= {"input": command.stdin != b"", "pty": command.pty}
        if command.source is None:
            return {**order, "argv": list(command.argv)}, b""
        program = Program("python", command.source, command.argv, command.name)
        python, compiled = home.python()
        words = guest_code.words(program) if compiled else guest_code.plain_words(program)
        code = guest_code.of_program(program) if compiled else program.source
        put = {} if program.name == "-c" else {"put": program.name}
        return {**order, "argv": [python, *words], **put}, code

    def _has_begun(self) -> None:
        if not self._begun.done():
            self._begun.set_result(None)

    def _note(self, told: Json) -> None:
        if "began" in told:
            self._has_begun()
        elif told.get("input") == "closed":
            self._input_closed = True
        elif (stream := STREAMS.get(str(told.get("closed")).encode())) is not None:
            self._step.closed(stream)

    # ── While it runs ──

    @property
    def _takes_input(self) -> bool:
        open_ended = self._command.stdin is None or self._command.pty is not None
        return open_ended and not self._input_closed and self._channel is not None and not self._channel.result.done()

    def send(self, data: bytes) -> int:
        """Returns how many bytes were taken: there may be no room. Raises Unavailable where it reads no input."""
        if not self._takes_input or self._channel is None:
            raise Unavailable("no_input", "the command takes no input")
        return self._channel.put(data)

    def close_input(self) -> None:
        if self._takes_input and self._channel is not None:
            self._input_closed = self._command.pty is None
            self._channel.end()

    def resize(self, columns: int, rows: int) -> bool:
        if self._command.pty is not None and self._channel is not None:
            self._channel.act({"size": [columns, rows]})
        return self._command.pty is not None

    def signal(self, number: int) -> None:
        self._send_signal(number)

    def _kill(self) -> None:
        self._send_signal(signal.SIGKILL)
        self._step.must_end()

    def _send_signal(self, number: int) -> None:
        if self._channel is not None:
            self._channel.act({"signal": number})

    # ── Its end ──

    async def over(self) -> BoxReport:
        assert self._over is not None
        return await shielded(self._over)

    async def _wait(self, channel: GuestOrder) -> BoxReport:
        result: Json | None = None
        try:
            result = await asyncio.shield(channel.result)
        except GuestGone:
            result = None
        finally:
            if self._feeding is not None:
                self._feeding.cancel()
                await asyncio.gather(self._feeding, return_exceptions=True)
        step = self._step
        step.finish(result)
        changed = await self._home.outputs.changed()
        ending = termination_of(result, step, self._home)
        if step.ended is not None:
            ending = (step.ended, None, int(signal.SIGKILL), step.limit)
        return box_report(ending, step, self._home, changed)
