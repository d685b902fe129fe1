"""The tools that run programs: Python or a command, in a fresh box for the call alone or in the box of a session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringfence.core.aio import finished, leave, left, to_the_end
from ringfence.core.box import BoxReport, BoxSpec, Captured, Limits, Ran, Stream
from ringfence.core.errors import Refused, RingfenceError, WorkProgress
from ringfence.core.model import Answer, Call, Grant, Json, Mode, Status
from ringfence.core.ports import Backend, InstalledPackages
from ringfence.core.sessions import (
    CellReport,
    ProcessState,
    StepReport,
    Tell,
    Within,
    discard_output,
    discard_value,
)
from ringfence.sandbox.tools import languages, processes, request, results
from ringfence.sandbox.tools.definition import (
    ACCESS,
    CELL,
    FLAG,
    RAN,
    STEP,
    TERMINAL_SIZE,
    TEXT,
    TEXTS,
    Changes,
    Tool,
    ToolOffer,
    named,
    programs_stated,
)
from ringfence.sandbox.tools.limits import limits_schema
from ringfence.sandbox.tools.task import Task, already_begun

if TYPE_CHECKING:
    from ringfence.sandbox.tools.screening import OutputScreen

_INPUT = "/workspace/input/"
_LONGEST_WAIT = 0.2

# ── Descriptions ──────────────────────────────────────────────────────────────────────────────────

_PYTHON_SESSION = (
    "With `session` (see open_session) it is a cell of a notebook there: variables, imports and files stay, and the"
    " value of the last expression, display(…) and matplotlib figures are returned. `context` names one of several"
    " interpreters."
)
_SHELL_SESSION = (
    "With `session` (see open_session) it runs there, with its files; with `background` it goes on after the call: see"
    " process_output, wait_process, send_input, stop_process."
)
_BYTES: Json = {
    "type": "object",
    "properties": {"name": TEXT, "bytes": {"type": "integer"}, "sha256": TEXT},
    "required": ["bytes", "sha256"],
}
_WIDE: Json = {
    "argv": {"type": "array", "items": TEXT},
    "name": TEXT,
    "env": TEXTS,
    "limits": limits_schema(),
    "inputs": {"type": "array", "items": _BYTES},
    "stdin": {"anyOf": [{"const": "stream"}, _BYTES]},
    "output": TEXT,
    **ACCESS,
    "template": TEXT,
    "image": TEXT,
    "backend": TEXT,
    "memory_layout": {"enum": ["shared", "fresh"]},
    "metadata": TEXTS,
    "cwd": TEXT,
    "pty": TERMINAL_SIZE,
}


def _described(what: str, in_session: str, unless_commands: str = "") -> Callable[[ToolOffer], str]:
    """The description of a tool that runs `what`; a contract that names its commands has no sessions."""

    def describe(offer: ToolOffer) -> str:
        commands = offer.contract.commands
        sentences = [
            what if commands is not None else what + unless_commands,
            "Nothing of an earlier call is there.",
            "Limits: {timeout}, {limits}, {output} of output.",
            "Of a long output the head and the tail are returned, {shown} in all.",
            "Network: {network}. Listening: {listening}.",
            *(("Programs: {programs}.",) if commands is not None else ()),
            "Packages: {packages}; {installing}.",
            "Working folder: /workspace; writable: /workspace/output, for files that are a result, and /workspace/tmp.",
            *((in_session,) if offer.sessions is not None and commands is None else ()),
        ]
        programs = "" if commands is None else programs_stated(commands)
        return " ".join(sentences).format_map({**offer.stated(), "programs": programs})

    return describe


# ── The tools ─────────────────────────────────────────────────────────────────────────────────────
# These are for a session; `in_fresh_box` runs the same where no session is named.


@Tool(
    Mode.HIGH_RISK,
    Changes.CODE,
    _described("Run Python {python} code in a fresh box, and return what it prints.", _PYTHON_SESSION),
    {"code": TEXT, "session": TEXT, "language": {"enum": list(languages.LANGUAGES)}},
    ("code",),
    {**RAN, **CELL},
    wide=_WIDE,
    in_session={"context": TEXT},
    makes_box=True,
    own_clock=True,
)
async def execute_python(task: Task) -> Answer:
    """Run Python as a cell of the session's interpreter; code in another language as a command."""
    await _check_layout(task)
    language = request.language(task.given)
    if language != languages.PYTHON:
        command = request.command(task.grant, task.provision)
        step = await _run_step(task.keeper.command(task.owner, task.session, command, _listener(task)))
        answer = await _answer(task, step)
        if answer.result is not None:
            languages.add_hint(answer.result, language, step.cell.report)
        return answer
    shown = (task.attached.shown if task.open else None) or discard_value
    cell = request.cell(task.grant, task.provision.limits)
    step = await _run_step(task.keeper.run(task.owner, task.session, cell, _listener(task), shown))
    return await _answer(task, step)


@Tool(
    Mode.HIGH_RISK,
    Changes.CODE,
    _described(
        "Run a command line with /bin/sh in a fresh box, and return what it prints.",
        _SHELL_SESSION,
        unless_commands=" Python {python} is there.",
    ),
    {"command": TEXT, "session": TEXT},
    ("command",),
    {**RAN, **STEP, **named("process", "running")},
    wide=_WIDE,
    in_session={"background": FLAG},
    one_of=("command", "argv"),  # a command is a line for the shell, or words
    makes_box=True,
    own_clock=True,
)
async def run_shell(task: Task) -> Answer:
    await _check_layout(task)
    if task.given.get("background"):
        return await _background(task)
    if task.attached.keys is not None:
        return await _typed(task, task.attached.keys, _listener(task))
    command = request.command(task.grant, task.provision)
    step = await _run_step(task.keeper.command(task.owner, task.session, command, _listener(task)))
    return await _answer(task, step)


EXECUTE_PYTHON = execute_python.name
RUN_SHELL = run_shell.name


# ── In a fresh box ────────────────────────────────────────────────────────────────────────────────


async def in_fresh_box(
    backend: Backend,
    grant: Grant,
    wanted: BoxSpec,
    installed: InstalledPackages | None,
    screen: OutputScreen,
    isolation: Json,
) -> Answer:
    """Run the program of a call in the box `wanted`. `isolation` is what is known of it before it is made."""
    call = grant.call
    contract = grant.contract
    # Where a contract redacts, nothing is shown as it comes.
    as_it_comes = call.attached is not None and not contract.redact and contract.result.fields is None
    tell = screen.attached(call.attached).tell if call.attached is not None and as_it_comes else None
    stopped: list[BoxReport] = []
    try:
        report = await to_the_end(_noting(backend.run(wanted, tell, grant.recheck), stopped))
    except ValueError as exc:
        with WorkProgress():
            raise Refused(Status.VALIDATION_FAILURE, "bad_arguments", f"no such box can be made: {exc}") from None
    except asyncio.CancelledError as exc:
        if stopped:
            report, _ = await finished(screen.artifacts(screen.report(stopped[0]), wanted.output))
            ran = Ran(wanted.limits, report if installed is None else replace(report, packages=installed.packages))
            seen = Answer(None, Status.KILLED, "cancelled", isolation=report.isolation or isolation, ran=ran)
            leave(exc, replace(seen, redactions=screen.rules, secrets=screen.secrets))
        raise
    report, unsearched = await screen.artifacts(screen.report(report), wanted.output)
    report = report if installed is None else replace(report, packages=installed.packages)
    status, code = results.judge(report)
    ran = Ran(wanted.limits, report)
    isolation = report.isolation or isolation
    if report.ended == "infra":
        text = "the box itself failed" + (f": {'; '.join(report.trouble)}" if report.trouble else "")
        return Answer(None, status, code, text, isolation, ran=ran)
    if unsearched:
        return Answer(None, Status.FAILED, "artifact", unsearched, isolation, ran=ran)
    if _inputs_differ(call, report):
        text = "an input changed after it was named, so the program saw another than was agreed to"
        return Answer(None, Status.FAILED, "input_changed", text, isolation, ran=ran)
    parts = results.read_by_a_model(results.of_run(report, wide=call.attached is not None), contract)
    fitted, result = results.fitting(parts, contract.result.max_bytes)
    languages.add_hint(result, request.language(call.arguments), report)
    ran = ran if fitted.report is report else Ran(wanted.limits, fitted.report)
    return Answer(result, status, code, isolation=isolation, ran=ran)


async def _noting(run: Coroutine[Any, Any, BoxReport], stopped: list[BoxReport]) -> BoxReport:
    """A run; where it is cancelled, its report is noted, for the error that its caller sees is another."""
    try:
        return await run
    except asyncio.CancelledError as exc:
        if (report := left(exc, BoxReport)) is not None:
            stopped.append(report)
        raise


def _inputs_differ(call: Call, report: BoxReport) -> bool:
    named = {entry["name"]: entry["sha256"] for entry in call.arguments.get("inputs") or ()}
    return any(named.get(fact.path.removeprefix(_INPUT)) != fact.sha256 for fact in report.inputs)


# ── In a session ──────────────────────────────────────────────────────────────────────────────────


async def _check_layout(task: Task) -> None:
    """Refuse the call where the contract requires a memory layout of its own and the session has none."""
    if task.grant.contract.memory_layout != "fresh":
        return
    info = await task.keeper.info(task.owner, task.session)
    if info.isolation.get("memory_layout") != "fresh":
        text = f"{task.grant.contract.name} wants memory_layout fresh, and session {info.id} was opened without it"
        raise Refused(Status.VALIDATION_FAILURE, "session_layout", text)


async def _background(task: Task) -> Answer:
    info = await task.keeper.start(task.owner, task.session, request.command(task.grant, task.provision))
    result = {
        "stdout": "",
        "stderr": "",
        "exit_code": None,
        "files": [],
        **processes.process_json(info),
        "ended": "running",
    }
    words = f"{processes.line(info)}\nIts output: process_output(session={task.session!r}, process={info.process})"
    return task.answer(result, words)


async def _run_step(work: Coroutine[Any, Any, StepReport]) -> StepReport:
    """Wait for a step in a session. If the caller cancels, `work` has the keeper stop the step and waits for that."""
    try:
        return await work
    except ValueError as exc:
        raise Refused(Status.VALIDATION_FAILURE, "bad_arguments", f"this cannot be run: {exc}") from None


async def _answer(task: Task, seen: StepReport) -> Answer:
    step = task.screen.step(seen)
    report = step.cell.report
    status, code = results.judge(report)
    limits = await _limits(task, step)
    within = Within(step.session, step.step, step.context, step.state, step)
    isolation = report.isolation or task.isolation  # the very object: the record recognises it by that
    if report.ended == "infra":
        trouble = f": {'; '.join(report.trouble)}" if report.trouble else ""
        message = f"session {step.session} failed at step {step.step}{trouble}"
        return Answer(None, status, code, message, isolation, ran=Ran(limits, report), within=within)
    parts = results.read_by_a_model(results.of_step(step, wide=task.wide), task.grant.contract)
    fitted, result = results.fitting(parts, task.most_bytes)
    if not task.wide and (whole := await _whole(task, seen, fitted.cut())):
        fitted, result = results.fitting(replace(fitted, whole=whole), task.most_bytes)
    return Answer(result, status, code, isolation=isolation, ran=Ran(limits, fitted.report), within=within)


async def _limits(task: Task, step: StepReport) -> Limits:
    """The limits of the step; where a limit of the box was met, those of the session, too."""
    own = request.step_limits(task.grant, task.provision.limits)
    if step.cell.report.limit in (None, "wall", "output"):
        return own
    try:
        info = await task.keeper.info(task.owner, task.session)
    except RingfenceError:
        return own
    return replace(info.limits, wall_seconds=own.wall_seconds, output_bytes=own.output_bytes)


def _listener(task: Task) -> Tell:
    """Where a contract redacts, output is not handed on as it comes."""
    return (task.attached.tell if task.open else None) or discard_output


async def _whole(task: Task, step: StepReport, cut: Collection[Stream]) -> Mapping[Stream, str]:
    """Where the whole of a stream lies that is cut. One that was captured whole and is cut only now, we put there."""
    out: dict[Stream, str] = {}
    streams: tuple[Stream, Stream] = ("stdout", "stderr")
    for stream in streams:
        captured: Captured = getattr(step.cell.report, stream)
        if stream in step.whole:
            out[stream] = step.whole[stream]
        elif not captured.truncated and stream in cut:
            path = f"/tmp/step-{step.step}.{stream}"  # noqa: S108 - in the box
            with suppress(RingfenceError):  # no room for it, say; then the result says how to do without
                await task.keeper.write(task.owner, task.session, path, captured.head + captured.tail)
                out[stream] = path
    return out


# ── A caller at a terminal ────────────────────────────────────────────────────────────────────────


async def _typed(task: Task, keys: AsyncIterator[bytes | tuple[int, int]], tell: Tell) -> Answer:
    """Run a command that the caller types into; when the caller goes, the command ends."""
    keeper = task.keeper
    owner = task.owner
    session = task.session
    info = await keeper.start(owner, session, request.command(task.grant, task.provision))
    typing = asyncio.ensure_future(_type(task, info, keys))
    try:
        with already_begun():
            over = await keeper.follow(owner, session, info.process, (0, 0), tell)
    except asyncio.CancelledError:
        await to_the_end(keeper.signal(owner, session, info.process, 9))
        raise
    finally:
        typing.cancel()
        await asyncio.wait({typing}, timeout=_LONGEST_WAIT)
    assert over.report is not None
    with already_begun():
        about = await keeper.info(owner, session)
    step = StepReport(session, about.step, CellReport(over.report), state=about.state)
    return await _answer(task, step)


async def _type(task: Task, info: ProcessState, keys: AsyncIterator[bytes | tuple[int, int]]) -> None:
    keeper = task.keeper
    owner = task.owner
    session = task.session
    try:
        async for key in keys:
            if isinstance(key, bytes):
                await keeper.send(owner, session, info.process, key)
            else:
                await keeper.resize(owner, session, info.process, *key)
        await keeper.send(owner, session, info.process, b"", eof=True)
    except RingfenceError:
        return  # it is over, and takes no more
