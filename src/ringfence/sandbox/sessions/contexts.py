"""The contexts of a session: named interpreters, each of which runs one cell at a time, in order of arrival."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from ringfence.core.box import Limits
from ringfence.core.errors import Refused, RingfenceError
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass
from ringfence.core.sessions import (
    BoxInterpreter,
    Cell,
    CellReport,
    CellRequest,
    OnShown,
    StayingBox,
    Tell,
    discard_output,
    discard_value,
)
from ringfence.sandbox.files.paths import WORKSPACE, full_path, parts_of, refusal
from ringfence.sandbox.sessions.concurrency import BoundedLock

DEFAULT = "default"
MAX_CONTEXTS = 16
MAX_WAITING = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OUR_LIMITS = Limits(wall_seconds=10.0, output_bytes=65_536, capture_bytes=16_384)
"""For the line that the supervisor itself runs in an interpreter."""


@dataclass(slots=True)
class Context:
    """An interpreter, or the place for one."""

    name: str
    turn: BoundedLock
    interpreter: BoxInterpreter | None = None
    running: bool = False
    removed: bool = False

    async def run(self, interpreter: BoxInterpreter, cell: Cell, tell: Tell, shown: OnShown) -> CellReport:
        self.running = True
        try:
            return await interpreter.run(cell, tell, shown)
        finally:
            self.running = False
            if not interpreter.alive:
                self.interpreter = None


class Contexts:
    """All contexts of one session."""

    def __init__(self, session: str) -> None:
        self.folder = WORKSPACE
        """The working directory of new interpreters: that of the default one when it was last noted."""
        self._session = session
        self._contexts: dict[str, Context] = {}
        self.get(DEFAULT)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._contexts)

    def get(self, name: str) -> Context:
        """The context of this name, made when it is first named."""
        if name not in self._contexts:
            if not _NAME.fullmatch(name):
                text = (
                    f"{quoted(name)} cannot be the name of a context; use letters, digits, '.', '_' and '-', 64 at most"
                )
                raise refusal("bad_context", text)
            if len(self._contexts) >= MAX_CONTEXTS:
                raise refusal(
                    "too_many", f"session {self._session} has {MAX_CONTEXTS} contexts already; use one of them"
                )
            self._contexts[name] = Context(
                name, BoundedLock(MAX_WAITING, f"context {name!r} of session {self._session}")
            )
        return self._contexts[name]

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[Context]:
        """The context of this name, once it is the caller's turn. One that was removed meanwhile is made anew."""
        while True:
            context = self.get(name)
            async with context.turn:
                if not context.removed:
                    yield context
                    return

    async def start(self, context: Context, box: StayingBox) -> BoxInterpreter:
        """Raises SetUpFailed, Unavailable."""
        made = context.interpreter = await box.interpreter()
        if self.folder != WORKSPACE:
            await self._enter_folder(context, made)
        return made

    def interrupt(self, name: str) -> bool:
        """Whether there was a cell to interrupt."""
        context = self._contexts.get(name)
        if context is None or not context.running or context.interpreter is None:
            return False
        return context.interpreter.interrupt()

    async def restart(self, name: str) -> bool:
        """End its interpreter, with the cell that runs in it; the next cell has a fresh one. False: there was none."""
        context = self._contexts.get(name)
        if context is None or context.interpreter is None:
            return False
        await context.interpreter.end()
        return True

    async def remove(self, name: str) -> bool:
        """End its interpreter, and forget the context. Cells that wait for it have another of the same name."""
        if name == DEFAULT:
            raise refusal("bad_context", f"context {DEFAULT!r} is always there; restart it instead")
        context = self._contexts.pop(name, None)
        if context is None:
            return False
        context.removed = True
        if context.interpreter is not None:
            await context.interpreter.end()
        return True

    def note_folder(self) -> None:
        """Note the working directory of the default interpreter. The kernel is asked, not the interpreter: a pause or a
        snapshot is no step, so nothing of the session may run for it. It is the program's choice, and not trusted."""
        interpreter = self._contexts[DEFAULT].interpreter
        folder = interpreter.folder if interpreter is not None and interpreter.alive else None
        try:
            if folder is not None and folder.startswith("/"):
                self.folder = full_path(parts_of(folder))
        except Refused:
            return

    async def _enter_folder(self, context: Context, interpreter: BoxInterpreter) -> None:
        cell = Cell(f"__import__('os').chdir({self.folder!r})".encode(), _OUR_LIMITS, reported=False)
        with suppress(RingfenceError):
            await context.run(interpreter, cell, discard_output, discard_value)


def cell_of(request: CellRequest, limits: Limits) -> Cell:
    """What an interpreter is given; `limits` are those of the session."""
    try:
        return Cell(request.source.encode(), request.limits or limits, request.env)
    except UnicodeEncodeError:
        raise refusal("bad_source", "the source contains half of a surrogate pair, which is not text") from None
