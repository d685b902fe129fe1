"""The contexts of a session: named interpreters, each of which runs one cell at a time, in order of arrival."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ringfence.core.box import Limits
from ringfence.core.errors import Refused, RingfenceError
from ringfence.core.quoting import quoted
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
MOST_CONTEXTS = 16
MOST_WAITING = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OUR_LIMITS = Limits(wall_seconds=10.0, output_bytes=65_536, capture_bytes=16_384)
"""For the few lines that the supervisor itself runs in an interpreter."""


@dataclass(slots=True)
class Context:
    """An interpreter, or the place for one."""

    name: str
    turn: BoundedLock
    interpreter: BoxInterpreter | None = None
    running: bool = False

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
        """The working directory of new interpreters: that of the default one when it was last asked."""
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
            if len(self._contexts) >= MOST_CONTEXTS:
                raise refusal(
                    "too_many", f"session {self._session} has {MOST_CONTEXTS} contexts already; use one of them"
                )
            self._contexts[name] = Context(
                name, BoundedLock(MOST_WAITING, f"context {name!r} of session {self._session}")
            )
        return self._contexts[name]

    async def start(self, context: Context, box: StayingBox) -> BoxInterpreter:
        """Raises SetUpFailed, Unavailable."""
        made = context.interpreter = await box.interpreter()
        if self.folder != WORKSPACE:
            await self._run_own(context, f"__import__('os').chdir({self.folder!r})")
        return made

    def interrupt(self, name: str) -> bool:
        """Whether there was a cell to interrupt."""
        context = self._contexts.get(name)
        if context is None or not context.running or context.interpreter is None:
            return False
        return context.interpreter.interrupt()

    async def note_folder(self, is_running: Callable[[], bool]) -> None:
        """Ask the default interpreter, if it is idle, for its working directory. Its answer is not trusted."""
        context = self._contexts[DEFAULT]
        if not context.turn.idle or context.interpreter is None or not context.interpreter.alive:
            return
        async with context.turn:
            if not is_running():
                return
            report = await self._run_own(context, "print(__import__('os').getcwd());")
        answer = report.report.stdout.head.decode("utf-8", "replace").rstrip("\n") if report is not None else ""
        try:
            if answer.startswith(WORKSPACE):
                self.folder = full_path(parts_of(answer))
        except Refused:
            return

    async def _run_own(self, context: Context, source: str) -> CellReport | None:
        """Run a line of the supervisor's, which no caller gets a report of."""
        assert context.interpreter is not None
        cell = Cell(source.encode(), _OUR_LIMITS, reported=False)
        try:
            return await context.run(context.interpreter, cell, discard_output, discard_value)
        except RingfenceError:
            return None


def cell_of(request: CellRequest, limits: Limits) -> Cell:
    """What an interpreter is given; `limits` are those of the session."""
    try:
        return Cell(request.source.encode(), request.limits or limits, request.env)
    except UnicodeEncodeError:
        raise refusal("bad_source", "the source contains half of a surrogate pair, which is not text") from None
