"""Tools for commands in the background of a session: output, end, input and signals."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ringfence.core.box import Ran
from ringfence.core.model import Answer, Json, Mode
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


def line(info: ProcessState) -> str:
    what = " ".join(info.argv)[:200]
    if info.report is None:
        return f"process {info.process} is running: {what}"
    how = info.report
    status = f" with status {how.exit_status}" if how.exit_status is not None else ""
    return f"process {info.process} is over ({how.ended}{status}): {what}"


@Tool(
    Mode.READ,
    "Background commands of a session, also those that are over.",
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
    "What a background command has written. For what is new since a call, give the stdout_at and stderr_at that it"
    " returned.",
    {**_ONE, **_ATS},
    ("session", "process"),
    named("session", "process", "running", "stdout", "stderr", "stdout_at", "stderr_at"),
)
async def process_output(task: Task) -> Answer:
    given = task.given
    number = task.given["process"]
    at = (given.get("stdout_at", 0), given.get("stderr_at", 0))
    logs = await task.keeper.logs(task.owner, task.session, number, *at)
    stdout = logs.stdout
    stderr = logs.stderr  # the guard searches it, or the screen on its way to a caller that listens
    result: Json = {"process": number, "running": logs.running}
    if task.attached.tell is not None and task.open:
        for stream, data in (("stdout", stdout), ("stderr", stderr)):
            task.attached.tell("stdout" if stream == "stdout" else "stderr", data)
        return task.answer({**result, "stdout_at": logs.stdout_at, "stderr_at": logs.stderr_at}, "")
    # What does not fit comes with the next call.
    room = max(1, (task.most_bytes - SPARE_BYTES) // _ESCAPED // 2)
    if task.most_chars is not None:
        room = min(room, max(1, task.most_chars // (2 if stdout and stderr else 1)))
    rest_out = len(stdout[room:])
    rest_err = len(stderr[room:])
    result |= {"stdout_at": logs.stdout_at - rest_out, "stderr_at": logs.stderr_at - rest_err}
    shown = [part[:room].decode("utf-8", "replace") for part in (stdout, stderr)]
    content = [text(shown[0])]
    if shown[1]:
        content.append(text(f"stderr:\n{shown[1]}"))
    if rest_out or rest_err:
        content.append(text(f"[{rest_out + rest_err} bytes more: ask again from stdout_at and stderr_at]"))
    return task.answer({**result, "stdout": shown[0], "stderr": shown[1]}, "", content)


@Tool(
    Mode.READ,
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
    try:
        async with asyncio.timeout(seconds):
            info = await task.keeper.follow(task.owner, task.session, number, at, tell)
    except TimeoutError:
        info = await task.keeper.wait(task.owner, task.session, number, 0)
    return _waited(task, info)


def _waited(task: Task, info: ProcessState) -> Answer:
    answer = task.answer(process_json(info), line(info))
    if info.report is None:
        return answer
    ran = Ran(task.provision.limits, task.screen.report(info.report))
    return Answer(answer.result, isolation=info.report.isolation or task.isolation, ran=ran, within=answer.within)


@Tool(
    Mode.WRITE,
    "Send a signal as TERM or 15 (left out: KILL) to a background command and all that it started.",
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
    "Write to the stdin of a background command; `eof` closes it.",
    {**_ONE, "text": TEXT, "eof": FLAG},
    ("session", "process"),
    named("session", "process", "bytes"),
    wide={"data": DIGEST, "pty": TERMINAL_SIZE},
    runs=True,
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
