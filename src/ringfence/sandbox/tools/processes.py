"""Tools for commands in the background of a session: output, end, input and signals."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ringfence.core.box import Ran, Stream
from ringfence.core.model import Answer, Json, Mode
from ringfence.core.record import dataclass
from ringfence.core.sessions import ProcessState
from ringfence.sandbox.tools.definition import (
    COUNT,
    DIGEST,
    FLAG,
    NUMBER,
    ONE,
    PROCESS,
    TERMINAL_SIZE,
    TEXT,
    CarriedCode,
    Changes,
    Tool,
    named,
)
from ringfence.sandbox.tools.results import SPARE_BYTES, text
from ringfence.sandbox.tools.task import Task, already_begun, bad, data_of

SIGNALS: Mapping[str, int] = {
    **{"HUP": 1, "INT": 2, "QUIT": 3, "KILL": 9, "USR1": 10, "USR2": 12, "TERM": 15},
    **{"CONT": 18, "STOP": 19},
}
_LAST_SIGNAL = 64
_ONE: Json = {**ONE, "process": NUMBER}
_ATS: Json = {"stdout_at": COUNT, "stderr_at": COUNT}
_ESCAPED = 12


def process_json(info: ProcessState) -> Json:
    report = info.report
    return {
        "process": info.process,
        "argv": list(info.argv),
        "started_at": info.started_at,
        "running": info.running,
        "exit_code": None if report is None else report.exit_status,
        "ended": None if report is None else report.ended,
        "signal": None if report is None else report.signal,
    }


def shown_words(argv: Sequence[str], most: int = 200) -> str:
    """As many of them as there is room for, each whole: half of a secret would not be recognised as one."""
    shown: list[str] = []
    for word in argv:
        most -= len(word) + 1
        if most < 0:
            return " ".join((*shown, "…"))
        shown.append(word)
    return " ".join(shown)


def line(info: ProcessState) -> str:
    what = shown_words(info.argv)
    if info.report is None:
        return f"process {info.process} is running: {what}"
    how = info.report
    status = f" with status {how.exit_status}" if how.exit_status is not None else ""
    return f"process {info.process} is over ({how.ended}{status}): {what}"


@Tool(
    Mode.READ,
    Changes.NOTHING,
    "List the background commands of a session, including those that have ended.",
    ONE,
    ("session",),
    named("session", "processes"),
)
async def list_processes(task: Task) -> Answer:
    found = await task.keeper.processes(task.owner, task.session)
    result = [process_json(each) for each in found]
    return task.answer({"processes": result}, "\n".join(map(line, found)) or "There are none.")


@Tool(
    Mode.READ,
    Changes.NOTHING,
    "Read what a background command has written. For what is new since a call, give the stdout_at and stderr_at that it"
    " returned.",
    {**_ONE, **_ATS},
    ("session", "process"),
    named("session", "process", "running", "stdout", "stderr", "stdout_at", "stderr_at"),
)
async def process_output(task: Task) -> Answer:
    number = task.given["process"]
    running, pages = await _pages(task, number)
    result: Json = {"process": number, "running": running}
    if task.attached.tell is not None and task.open:
        for stream, page in pages.items():
            clean, at = await page.shown(task, None)
            task.attached.tell(stream, clean)
            result[f"{stream}_at"] = at
        return task.answer(result, "")
    # What does not fit comes with the next call.
    room = max(1, (task.most_bytes - SPARE_BYTES) // _ESCAPED // 2)
    if task.most_chars is not None:
        room = min(room, max(1, task.most_chars // (2 if all(page.length for page in pages.values()) else 1)))
    rest = 0
    for stream, page in pages.items():
        clean, at = await page.shown(task, room)
        result |= {stream: clean.decode("utf-8", "replace"), f"{stream}_at": at}
        rest += max(0, page.end - at)
    content = [text(result["stdout"])]
    if result["stderr"]:
        content.append(text(f"stderr:\n{result['stderr']}"))
    if rest:
        content.append(text(f"[{rest} bytes more: ask again from stdout_at and stderr_at]"))
    return task.answer(result, "", content)


@dataclass(slots=True)
class _Page:
    """What a command has written to a stream from an offset on, with what stands before and behind it."""

    data: bytes
    begins: int
    """The offset of its first byte."""
    start: int
    """The offset that was asked for, or where there is something again behind what was dropped."""
    end: int
    """The offset of the end of what is there to be shown; data goes on where the command went on writing since."""
    hidden: int = 0
    """How many bytes before the end are not shown: what follows them was dropped, so nobody can tell what they are."""

    @property
    def length(self) -> int:
        return max(0, self.end - self.start)

    async def shown(self, task: Task, room: int | None) -> tuple[bytes, int]:
        """What of it may be shown, at most so many bytes, and the offset to ask from next time."""
        last = max(self.start, self.end - self.hidden)
        stop = last if room is None else min(last, self.start + room)
        searched = await task.screen.searched(self.data, task.grant.contract.redact)
        clean, stop = searched.page(self.start - self.begins, stop - self.begins)
        at = max(stop + self.begins, self.start)
        return task.screen.counted(clean), self.end if last <= at < self.end else at


async def _pages(task: Task, number: int) -> tuple[bool, dict[Stream, _Page]]:
    """Whether a command runs, and what there is of both of its streams from the offsets on that the caller gives.

    The last bytes of a command that runs may be the beginning of a secret. They are shown if nothing follows them for
    a moment, as it is with output that is shown as it comes."""
    around = task.screen.around(task.grant.contract.redact)
    at = (task.given.get("stdout_at", 0), task.given.get("stderr_at", 0))

    async def told(places: Iterable[int]) -> tuple[bool, tuple[_Part, _Part]]:
        logs = await task.keeper.logs(task.owner, task.session, number, *places)
        return logs.running, (_Part(logs.stdout, logs.stdout_at), _Part(logs.stderr, logs.stderr_at))

    running, before = await told(max(0, place - around) for place in at)
    here = before
    if any(part.end <= place for part, place in zip(before, at, strict=True)):
        running, here = await told(part.end for part in before)
    found = [_Found(place, max(0, place - around), *parts) for place, *parts in zip(at, before, here, strict=True)]
    after = None
    if around and any(one.end > one.at for one in found):
        if running and task.screen.reach:
            await asyncio.sleep(task.screen.patience_seconds)
        after = (await told(one.end for one in found))[1]
    reach = task.screen.reach
    out, err = (one.page(reach, None if after is None else after[place]) for place, one in enumerate(found))
    return running, {"stdout": out, "stderr": err}


class _Part(NamedTuple):
    data: bytes
    end: int

    @property
    def begins(self) -> int:
        return self.end - len(self.data)


class _Found(NamedTuple):
    """What there is of one stream at an offset."""

    at: int
    asked: int
    """The offset from which on it was asked for: somewhat before."""
    before: _Part
    here: _Part
    """What there is from the end of what stands before."""

    @property
    def end(self) -> int:
        return self.before.end if self.before.end > self.at else max(self.before.end, self.here.end)

    def page(self, reach: int, after: _Part | None) -> _Page:
        data = self.before.data
        begins = self.before.begins
        cut = begins > self.asked
        if self.before.end <= self.at:
            if self.here.begins == self.before.end:
                data += self.here.data
            else:  # what stood between was dropped
                data, begins, cut = self.here.data, self.here.begins, True
        # Half a secret beside a gap is still half a secret, and the same length goes whatever it is.
        start = min(max(self.at, begins + reach if cut else begins), max(self.end, self.at))
        if after is None or not after.data:
            return _Page(data, begins, start, self.end)
        if after.begins == self.end:
            return _Page(data + after.data, begins, start, self.end)
        return _Page(data, begins, start, self.end, reach)


@Tool(
    Mode.READ,
    Changes.NOTHING,
    "Wait until a background command is over, {timeout} at most.",
    {**_ONE, "seconds": {"type": "number", "minimum": 0}},
    ("session", "process"),
    PROCESS,
    wide=_ATS,
    own_clock=True,
)
async def wait_process(task: Task) -> Answer:
    """Wait for it. A caller in this process may wait without end; an agent's call ends when its time is up."""
    given = task.given
    number = task.given["process"]
    seconds: float | None = given.get("seconds")
    if not task.wide:
        most = task.grant.contract.timeout_seconds
        seconds = most if seconds is None else min(seconds, most)
    tell = task.attached.tell
    if tell is None or not task.open:
        info = await task.keeper.wait(task.owner, task.session, number, seconds)
        return _waited(task, info)
    at = (given.get("stdout_at", 0), given.get("stderr_at", 0))
    await _remember(task, number, at)
    try:
        async with asyncio.timeout(seconds):
            info = await task.keeper.follow(task.owner, task.session, number, at, tell)
    except TimeoutError:
        info = await task.keeper.wait(task.owner, task.session, number, 0)
    return _waited(task, info)


async def _remember(task: Task, number: int, at: tuple[int, int]) -> None:
    """A secret may stand across the place where the caller left off."""
    around = task.screen.around()
    if around and any(at):
        asked = (max(0, place - around) for place in at)
        logs = await task.keeper.logs(task.owner, task.session, number, *asked)
        for stream, part, place in (
            ("stdout", _Part(logs.stdout, logs.stdout_at), at[0]),
            ("stderr", _Part(logs.stderr, logs.stderr_at), at[1]),
        ):
            if part.begins < place <= part.end:
                seen = part.data[: place - part.begins]
                task.screen.went_before("stdout" if stream == "stdout" else "stderr", seen)


def _waited(task: Task, info: ProcessState) -> Answer:
    answer = task.answer(process_json(info), line(info))
    if info.report is None:
        return answer
    ran = Ran(task.provision.limits, task.screen.report(info.report))
    return Answer(answer.result, isolation=info.report.isolation or task.isolation, ran=ran, within=answer.within)


@Tool(
    Mode.WRITE,
    Changes.SIGNAL,
    "Send a signal, such as TERM or 15 (default: KILL), to a background command and everything it started.",
    {**_ONE, "signal": {"type": ["string", "integer"]}},
    ("session", "process"),
    PROCESS,
    destructive=True,
)
async def stop_process(task: Task) -> Answer:
    await task.keeper.signal(task.owner, task.session, task.given["process"], _signal(task))
    with already_begun():  # it may take a moment to go
        info = await task.keeper.wait(task.owner, task.session, task.given["process"], 0.5)
    return task.answer(process_json(info), line(info))


def _signal(task: Task) -> int:
    wanted = task.given.get("signal", "KILL")
    if isinstance(wanted, str) and wanted in SIGNALS:
        return SIGNALS[wanted]
    if isinstance(wanted, str) or not 1 <= wanted <= _LAST_SIGNAL:
        raise bad(f"signal: it is one of {', '.join(SIGNALS)}, or a number from 1 to {_LAST_SIGNAL}")
    return int(wanted)


@Tool(
    Mode.HIGH_RISK,  # a shell takes it for commands
    Changes.CODE,
    "Write to the stdin of a background command; `eof` closes it.",
    {**_ONE, "text": TEXT, "eof": FLAG},
    ("session", "process"),
    named("session", "process", "bytes"),
    wide={"data": DIGEST, "pty": TERMINAL_SIZE},
    carries=CarriedCode("text", "run_shell", "command"),
)
async def send_input(task: Task) -> Answer:
    given = task.given
    if "text" in given and "data" in given:
        raise bad("text and data: one of them")
    data = given["text"].encode() if "text" in given else await data_of(task) if "data" in given else b""
    eof = bool(given.get("eof"))
    if "pty" in given:
        await task.keeper.resize(task.owner, task.session, given["process"], *given["pty"])
        return task.answer({"process": given["process"], "bytes": 0}, "Its terminal has another size.")
    if not data and not eof:
        raise bad("there is neither text nor eof")
    await task.keeper.send(task.owner, task.session, given["process"], data, eof)
    return task.answer({"process": given["process"], "bytes": len(data)}, f"{len(data)} bytes were sent.")
