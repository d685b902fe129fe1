"""The interpreters of a session, each under the name of its context. One cell at a time in each, in their order."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ringfence.box import Limits
from ringfence.errors import Refused, RingfenceError
from ringfence.sandbox.beneath import WORKSPACE, full_path, parts_of, refusal
from ringfence.sandbox.life import Life
from ringfence.sandbox.turns import Turn
from ringfence.sandbox.verbs import unheard, unseen
from ringfence.sessions import Cell, CellReport, CellRequest, Failure, Interpreting, Living, Shown, Tell

DEFAULT = "default"
MOST_CONTEXTS = 16
MOST_WAITING = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OURS = Limits(wall_seconds=10.0, output_bytes=65_536, capture_bytes=16_384)
"""For the few words that we say to an interpreter ourselves."""

OnShown = Callable[[Shown | Failure], None]


@dataclass(slots=True)
class Context:
    """An interpreter, or the place for one."""

    name: str
    turn: Turn
    interpreter: Interpreting | None = None
    running: bool = False

    async def run(self, interpreter: Interpreting, cell: Cell, tell: Tell, shown: OnShown) -> CellReport:
        self.running = True
        try:
            return await interpreter.run(cell, tell, shown)
        finally:
            self.running = False
            if not interpreter.alive:
                self.interpreter = None


class Contexts:
    """Of one session."""

    def __init__(self, life: Life) -> None:
        self.folder = WORKSPACE
        """Where interpreters begin, and where the first one was when it was last asked."""
        self._life = life
        self._contexts: dict[str, Context] = {}
        self.get(DEFAULT)

    def get(self, name: str) -> Context:
        """Made when it is first named."""
        if name not in self._contexts:
            if not _NAME.fullmatch(name):
                text = (
                    f"{name[:80]!r} cannot be the name of a context; use letters, digits, '.', '_' and '-', 64 at most"
                )
                raise refusal("bad_context", text)
            if len(self._contexts) >= MOST_CONTEXTS:
                raise refusal(
                    "too_many", f"session {self._life.id} has {MOST_CONTEXTS} contexts already; use one of them"
                )
            self._contexts[name] = Context(name, Turn(MOST_WAITING, f"context {name!r} of session {self._life.id}"))
            self._life.contexts = list(self._contexts)
        return self._contexts[name]

    async def interpreter(self, context: Context) -> tuple[Interpreting, bool]:
        """In one's turn: its interpreter, and whether it was started just now."""
        life = self._life
        while True:
            await life.awake()
            if context.interpreter is not None and context.interpreter.alive:
                return context.interpreter, False
            async with life.gate.together():
                if life.state == "running":
                    return await self._started(context, life.box), True

    async def set_up(self, box: Living) -> None:
        """The first interpreter, before the session has begun. Raises SetUpFailed, Unavailable."""
        await self._started(self._contexts[DEFAULT], box)

    async def _started(self, context: Context, box: Living) -> Interpreting:
        made = context.interpreter = await box.interpreter()
        if self.folder != WORKSPACE:
            await self._say(context, f"__import__('os').chdir({self.folder!r})")
        return made

    def interrupt(self, name: str) -> bool:
        """Whether there was a cell to be interrupted."""
        context = self._contexts.get(name)
        if context is None or not context.running or context.interpreter is None:
            return False
        return context.interpreter.interrupt()

    async def note_folder(self) -> None:
        """Ask the first interpreter where it is, if it has nothing else to do. It may say what it likes."""
        context = self._contexts[DEFAULT]
        if not context.turn.idle or context.interpreter is None or not context.interpreter.alive:
            return
        async with context.turn:
            if self._life.state != "running":
                return
            report = await self._say(context, "print(__import__('os').getcwd());")
        said = report.report.stdout.head.decode("utf-8", "replace").rstrip("\n") if report is not None else ""
        try:
            if said.startswith(WORKSPACE):
                self.folder = full_path(parts_of(said))
        except Refused:
            return

    async def _say(self, context: Context, source: str) -> CellReport | None:
        assert context.interpreter is not None
        try:
            return await context.run(context.interpreter, Cell(source.encode(), _OURS, told=False), unheard, unseen)
        except RingfenceError:
            return None

    def cell(self, request: CellRequest) -> Cell:
        limits = request.limits or self._life.spec.stay.limits
        try:
            return Cell(request.source.encode(), limits, request.env)
        except UnicodeEncodeError:
            raise refusal("bad_source", "the source has half of a surrogate pair in it, which is no text") from None
