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
    RUNNING,
    TEXT,
    CarriedCode,
    Tool,
)
from ringfence.sandbox.tools.results import SPARE_BYTES, text
from ringfence.sandbox.tools.task import Task, already_begun, bad, data_of

SIGNALS: Mapping[str, int] = {
    **{"HUP": 1, "INT": 2, "QUIT": 3, "KILL": 9, "USR1": 10, "USR2": 12, "TERM": 15},
    **{"CONT": 18, "STOP": 19},
}
_SIGNAL: Json = {
    "anyOf": [{"enum": list(SIGNALS)}, {"type": "integer", "minimum": 1, "maximum": 64}],
    "description": "Left out: KILL.",
}
_AT: Json = {**COUNT, "description": "Where to begin: what an earlier call gave as the same."}
_ATS: Json = {"stdout_at": _AT, "stderr_at": _AT}
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
    "List commands in the background",
    Mode.READ,
    "Commands that run_shell started with `background` in a session, those that are over included.",
    ONE,
    ("session",),
    {"session": TEXT, "processes": {"type": "array", "items": {"type": "object", "properties": RUNNING}}},
)
async def list_processes(task: Task) -> Answer:
    found = await task.keeper.processes(task.owner, task.session)
    result = [process_json(each) for each in found]
    return task.answer({"processes": result}, "\n".join(map(line, found)) or "There are none.")


@Tool(
    "Read the output of a command",
    Mode.READ,
    "What a command in the background has written so far. For what is new since the last call, give the stdout_at"
    " and stderr_at that it returned.",
    {**ONE, "process": PROCESS, **_ATS},
    ("session", "process"),
    {"session": TEXT, "process": NUMBER, "stdout": TEXT, "stderr": TEXT, **_ATS, "running": FLAG},
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
    "Wait for a command",
    Mode.READ,
    "Wait until a command in the background is over, {timeout} at most; `running` says whether it is.",
    {
        **ONE,
        "process": PROCESS,
        "seconds": {"type": "number", "minimum": 0, "description": "No longer than this."},
    },
    ("session", "process"),
    RUNNING,
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
    "Stop a command",
    Mode.WRITE,
    "Send a signal to a command in the background and all that it started.",
    {**ONE, "process": PROCESS, "signal": _SIGNAL},
    ("session", "process"),
    RUNNING,
    destructive=True,
)
async def stop_process(task: Task) -> Answer:
    wanted = task.given.get("signal", "KILL")
    number = SIGNALS[wanted] if isinstance(wanted, str) else wanted
    await task.keeper.signal(task.owner, task.session, task.given["process"], number)
    with already_begun():  # it may take a moment to go
        info = await task.keeper.wait(task.owner, task.session, task.given["process"], 0.5)
    return task.answer(process_json(info), line(info))


@Tool(
    "Send input to a command",
    Mode.HIGH_RISK,  # a shell takes it for commands
    "Write to the stdin of a command in the background. With `eof` it is closed after that.",
    {**ONE, "process": PROCESS, "text": TEXT, "eof": FLAG},
    ("session", "process"),
    {"session": TEXT, "process": NUMBER, "bytes": COUNT},
    wide={"data": DIGEST},
    runs=True,
    carries=CarriedCode("text", "run_shell", "command"),
)
async def send_input(task: Task) -> Answer:
    given = task.given
    if "text" in given and "data" in given:
        raise bad("text and data: one of them")
    data = given["text"].encode() if "text" in given else await data_of(task) if "data" in given else b""
    eof = bool(given.get("eof"))
    if not data and not eof:
        raise bad("there is neither text nor eof")
    await task.keeper.send(task.owner, task.session, given["process"], data, eof)
    return task.answer({"process": given["process"], "bytes": len(data)}, f"{len(data)} bytes were sent.")
