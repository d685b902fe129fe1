"""The keeper's sessions, from another process: the verbs of the house, one to one, over the keeper's socket.

A keeper is started by whoever needs it first. Where it dies, its sessions are gone: what was asked and may have been
done answers OutcomeUnknown, and the next question goes to a new keeper, which knows how the old one's sessions ended.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, Unpack

from ringfence.box import FileFact
from ringfence.errors import OutcomeUnknown, RingfenceError, Unavailable
from ringfence.loans import Denial, Lent, Wish
from ringfence.sandbox.keeperhome import Starting, start_if_absent
from ringfence.sandbox.keeperline import AbsentError, Asked, Line
from ringfence.sandbox.protocol import VERBS, Verb
from ringfence.sandbox.snapshots import Snapshot
from ringfence.sandbox.verbs import OnShown
from ringfence.sandbox.volumes import Volume
from ringfence.sandbox.watching import Changed
from ringfence.sandbox.workspace import Entry
from ringfence.sessions import (
    CellRequest,
    CommandRequest,
    Logs,
    Owner,
    Problem,
    ProcessInfo,
    SessionInfo,
    SessionSpec,
    StepReport,
    Tell,
    Writing,
)

_AGAIN_SECONDS = 0.05


class Keeper:
    """For any number of tasks of one event loop. Nothing is started before something is asked for."""

    def __init__(self, starting: Starting, *, request_timeout: float | None = None) -> None:
        """`request_timeout`: seconds until an answer must be there; what was asked for is stopped then."""
        self._starting = starting
        self._request_timeout = request_timeout
        self._line: Line | None = None
        self._opening = asyncio.Lock()

    @classmethod
    @asynccontextmanager
    async def connect(cls, starting: Starting, *, request_timeout: float | None = None) -> AsyncIterator[Keeper]:
        """With a keeper that is there. Raises Unavailable and StoreError."""
        keeper = cls(starting, request_timeout=request_timeout)
        await keeper._opened()
        try:
            yield keeper
        finally:
            await keeper.close()

    async def close(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            await line.close()

    async def _opened(self) -> Line:
        if self._line is not None and self._line.is_open:
            return self._line
        async with self._opening:
            if self._line is None or not self._line.is_open:
                self._line = await self._open()
            return self._line

    async def _open(self) -> Line:
        clock = asyncio.get_running_loop().time
        until = clock() + self._starting.seconds
        while True:
            address = self._starting.home.address()
            if address is not None:
                try:
                    return await Line.open(address, self._starting.terms)
                except AbsentError:
                    pass
            if clock() > until:
                raise Unavailable("keeper_start", f"no keeper could be had in {self._starting.seconds:g} s")
            await asyncio.to_thread(start_if_absent, self._starting)
            if address is not None:
                await asyncio.sleep(_AGAIN_SECONDS)

    # ── Asking ──

    async def _ask(self, verb: str, owner: Owner, **arguments: Any) -> Any:
        asking = VERBS[verb]
        try:
            return await self._ask_once(asking, {"owner": owner, **arguments})
        except Unavailable as exc:
            if exc.reason_code != "keeper_died" or not asking.can_be_repeated:
                raise
        return await self._ask_once(asking, {"owner": owner, **arguments})  # of the next keeper

    async def _ask_once(self, verb: Verb, given: dict[str, Any]) -> Any:
        line, asked = await self._begin(verb, given)
        clock: asyncio.Timeout | None = None
        try:
            if self._request_timeout is None and verb.stream is None:
                return await asked.answer
            async with asyncio.timeout(self._request_timeout) as clock:
                if verb.stream is not None:
                    await line.upload(asked, given[verb.stream])
                return await asked.answer
        except BaseException as exc:
            await line.drop(asked)
            if isinstance(exc, TimeoutError) and clock is not None and clock.expired():
                raise self._too_late(verb) from None
            raise

    async def _begin(self, verb: Verb, given: dict[str, Any]) -> tuple[Line, Asked]:
        line = await self._opened()
        sent = {name: value for name, value in given.items() if name in verb.takes}
        return line, line.ask(verb, sent, given.get(verb.tell or ""), given.get(verb.shown or ""))

    def _too_late(self, verb: Verb) -> RingfenceError:
        text = f"{verb.name} was not answered within {self._request_timeout:g} s (request_timeout)"
        if verb.only_reads:
            return Unavailable("request_timeout", text)
        return OutcomeUnknown("request_timeout", f"{text} and was stopped; what it did until then stays done")

    async def _pour(self, verb: str, owner: Owner, **arguments: Any) -> AsyncIterator[Any]:
        line, asked = await self._begin(VERBS[verb], {"owner": owner, **arguments})
        assert asked.inlet is not None
        try:
            async for item in asked.inlet:
                yield item
            await asked.answer
        finally:
            await line.drop(asked)

    # ── Sessions ──

    async def create(self, owner: Owner, spec: SessionSpec) -> SessionInfo:
        answer: SessionInfo = await self._ask("create", owner, spec=spec)
        return answer

    async def info(self, owner: Owner, id: str) -> SessionInfo:
        answer: SessionInfo = await self._ask("info", owner, id=id)
        return answer

    async def list(self, owner: Owner) -> Sequence[SessionInfo]:
        answer: Sequence[SessionInfo] = await self._ask("list", owner)
        return answer

    async def past(self, owner: Owner) -> Sequence[SessionInfo]:
        answer: Sequence[SessionInfo] = await self._ask("past", owner)
        return answer

    async def state_of(self, owner: Owner, id: str) -> tuple[int, str]:
        answer: tuple[int, str] = await self._ask("state_of", owner, id=id)
        return answer

    async def pause(self, owner: Owner, id: str) -> SessionInfo:
        answer: SessionInfo = await self._ask("pause", owner, id=id)
        return answer

    async def resume(self, owner: Owner, id: str) -> SessionInfo:
        answer: SessionInfo = await self._ask("resume", owner, id=id)
        return answer

    async def end(self, owner: Owner, id: str) -> SessionInfo:
        answer: SessionInfo = await self._ask("end", owner, id=id)
        return answer

    async def extend(self, owner: Owner, id: str, lifetime_seconds: float) -> SessionInfo:
        answer: SessionInfo = await self._ask("extend", owner, id=id, lifetime_seconds=lifetime_seconds)
        return answer

    # ── Steps ──

    async def run(self, owner: Owner, id: str, request: CellRequest, tell: Tell, shown: OnShown) -> StepReport:
        answer: StepReport = await self._ask("run", owner, id=id, request=request, tell=tell, shown=shown)
        return answer

    async def show(self, owner: Owner, id: str, port: int | str) -> int:
        answer: int = await self._ask("show", owner, id=id, port=port)
        return answer

    async def interrupt(self, owner: Owner, id: str, context: str = "default") -> bool:
        answer: bool = await self._ask("interrupt", owner, id=id, context=context)
        return answer

    async def command(self, owner: Owner, id: str, request: CommandRequest, tell: Tell) -> StepReport:
        answer: StepReport = await self._ask("command", owner, id=id, request=request, tell=tell)
        return answer

    async def start(self, owner: Owner, id: str, request: CommandRequest) -> ProcessInfo:
        answer: ProcessInfo = await self._ask("start", owner, id=id, request=request)
        return answer

    async def processes(self, owner: Owner, id: str) -> Sequence[ProcessInfo]:
        answer: Sequence[ProcessInfo] = await self._ask("processes", owner, id=id)
        return answer

    async def logs(self, owner: Owner, id: str, process: int, offset_stdout: int, offset_stderr: int) -> Logs:
        offsets = {"offset_stdout": offset_stdout, "offset_stderr": offset_stderr}
        answer: Logs = await self._ask("logs", owner, id=id, process=process, **offsets)
        return answer

    async def follow(self, owner: Owner, id: str, process: int, offsets: tuple[int, int], tell: Tell) -> ProcessInfo:
        asked = {"process": process, "offsets": offsets, "tell": tell}
        answer: ProcessInfo = await self._ask("follow", owner, id=id, **asked)
        return answer

    async def wait(self, owner: Owner, id: str, process: int, timeout: float | None) -> ProcessInfo:
        answer: ProcessInfo = await self._ask("wait", owner, id=id, process=process, timeout=timeout)
        return answer

    async def signal(self, owner: Owner, id: str, process: int, number: int) -> None:
        await self._ask("signal", owner, id=id, process=process, number=number)

    async def send(self, owner: Owner, id: str, process: int, data: bytes, eof: bool = False) -> None:
        await self._ask("send", owner, id=id, process=process, data=data, eof=eof)

    async def resize(self, owner: Owner, id: str, process: int, columns: int, rows: int) -> None:
        await self._ask("resize", owner, id=id, process=process, columns=columns, rows=rows)

    # ── Files ──

    async def read(self, owner: Owner, id: str, path: str, offset: int, length: int | None) -> bytes:
        answer: bytes = await self._ask("read", owner, id=id, path=path, offset=offset, length=length)
        return answer

    async def write(self, owner: Owner, id: str, path: str, data: bytes, **how: Unpack[Writing]) -> FileFact:
        answer: FileFact = await self._ask("write", owner, id=id, path=path, data=data, **how)
        return answer

    async def entries(self, owner: Owner, id: str, path: str, depth: int) -> Sequence[Entry]:
        answer: Sequence[Entry] = await self._ask("entries", owner, id=id, path=path, depth=depth)
        return answer

    async def stat(self, owner: Owner, id: str, path: str) -> Entry:
        answer: Entry = await self._ask("stat", owner, id=id, path=path)
        return answer

    async def remove(self, owner: Owner, id: str, path: str) -> None:
        await self._ask("remove", owner, id=id, path=path)

    async def make_dir(self, owner: Owner, id: str, path: str) -> bool:
        answer: bool = await self._ask("make_dir", owner, id=id, path=path)
        return answer

    async def rename(self, owner: Owner, id: str, old: str, new: str) -> None:
        await self._ask("rename", owner, id=id, old=old, new=new)

    async def copy(self, owner: Owner, id: str, path: str, to_id: str, to_path: str) -> FileFact:
        answer: FileFact = await self._ask("copy", owner, id=id, path=path, to_id=to_id, to_path=to_path)
        return answer

    def pack(self, owner: Owner, id: str, path: str) -> AsyncIterator[bytes]:
        return self._pour("pack", owner, id=id, path=path)

    async def unpack(self, owner: Owner, id: str, path: str, stream: AsyncIterator[bytes]) -> Sequence[FileFact]:
        answer: Sequence[FileFact] = await self._ask("unpack", owner, id=id, path=path, stream=stream)
        return answer

    def watch(self, owner: Owner, id: str, path: str, recursive: bool) -> AsyncIterator[Changed]:
        return self._pour("watch", owner, id=id, path=path, recursive=recursive)

    # ── Secrets ──

    def wishes(self, owner: Owner, lender: str) -> AsyncIterator[Wish]:
        return self._pour("wishes", owner, lender=lender)

    async def lend(self, owner: Owner, id: str, lender: str) -> None:
        await self._ask("lend", owner, id=id, lender=lender)

    async def settle(self, owner: Owner, lender: str, number: int, answer: Lent | Denial) -> None:
        await self._ask("settle", owner, lender=lender, number=number, answer=answer)

    # ── What outlives them ──

    async def snapshot(self, owner: Owner, id: str, name: str | None = None) -> Snapshot:
        answer: Snapshot = await self._ask("snapshot", owner, id=id, name=name)
        return answer

    async def snapshots(self, owner: Owner) -> Sequence[Snapshot]:
        answer: Sequence[Snapshot] = await self._ask("snapshots", owner)
        return answer

    async def remove_snapshot(self, owner: Owner, reference: str) -> None:
        await self._ask("remove_snapshot", owner, reference=reference)

    async def fork(self, owner: Owner, id: str, count: int) -> builtins.list[SessionInfo | Problem]:
        answer: builtins.list[SessionInfo | Problem] = await self._ask("fork", owner, id=id, count=count)
        return answer

    async def create_volume(self, owner: Owner, name: str, max_bytes: int, mode: Literal["ro", "rw"]) -> Volume:
        answer: Volume = await self._ask("create_volume", owner, name=name, max_bytes=max_bytes, mode=mode)
        return answer

    async def volumes(self, owner: Owner) -> Sequence[Volume]:
        answer: Sequence[Volume] = await self._ask("volumes", owner)
        return answer

    async def remove_volume(self, owner: Owner, name: str) -> None:
        await self._ask("remove_volume", owner, name=name)
