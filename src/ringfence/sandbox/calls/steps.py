"""Code and commands in a session: the same tools as for a fresh box, in one that is there already."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ringfence.box import BoxReport, Captured, Limits, Ran, Stream
from ringfence.errors import Refused, RingfenceError
from ringfence.model import Answer, Status
from ringfence.sandbox import order, results
from ringfence.sandbox.calls.processes import line, process_json
from ringfence.sandbox.calls.task import Task
from ringfence.sandbox.tools import EXECUTE_PYTHON
from ringfence.sandbox.verbs import unheard, unseen
from ringfence.sandbox.waiting import to_the_end
from ringfence.sessions import CellReport, ProcessInfo, StepReport, Tell, Within

_LONGEST_WAIT = 0.2


async def run(task: Task) -> Answer:
    """One step."""
    await _check_layout(task)
    if task.grant.contract.tool == EXECUTE_PYTHON:
        return await _cell(task)
    if task.given.get("background"):
        return await _background(task)
    return await _command(task)


async def _check_layout(task: Task) -> None:
    """A contract that wants an address layout of its own gets it, or nothing."""
    if task.grant.contract.memory_layout != "fresh":
        return
    info = await task.keeper.info(task.owner, task.session)
    if info.isolation.get("memory_layout") != "fresh":
        text = f"{task.grant.contract.name} wants memory_layout fresh, and session {info.id} was opened without it"
        raise Refused(Status.VALIDATION_FAILURE, "session_layout", text)


async def _cell(task: Task) -> Answer:
    shown = (task.attached.shown if task.open else None) or unseen
    request = order.cell(task.grant, task.provision.limits)
    step = await _once(task.keeper.run(task.owner, task.session, request, _listener(task), shown))
    return await _answer(task, step)


async def _command(task: Task) -> Answer:
    request = order.command(task.grant, task.provision)
    if task.attached.keys is not None:
        return await _typed(task, task.attached.keys, _listener(task))
    step = await _once(task.keeper.command(task.owner, task.session, request, _listener(task)))
    return await _answer(task, step)


async def _background(task: Task) -> Answer:
    info = await task.keeper.start(task.owner, task.session, order.command(task.grant, task.provision))
    told = {"stdout": "", "stderr": "", "exit_code": None, "files": [], **process_json(info), "ended": "running"}
    words = f"{line(info)}\nIts output: process_output(session={task.session!r}, process={info.process})"
    return task.done(told, words)


async def _once(work: Coroutine[Any, Any, StepReport]) -> StepReport:
    """Whoever gives up has the keeper stop it, and waits for that: `work` sees to it itself."""
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
    isolation = report.isolation or task.isolation  # the very object: what was written of it is known by that
    if report.ended == "infra":
        trouble = f": {'; '.join(report.trouble)}" if report.trouble else ""
        message = f"session {step.session} failed at step {step.step}{trouble}"
        return Answer(None, status, code, message, isolation, ran=Ran(limits, report), within=within)
    fitted, result = results.fitting(results.of_step(step, wide=task.wide), task.most_bytes)
    if not task.wide and (whole := await _whole(task, seen, fitted.report)):
        fitted, result = results.fitting(replace(fitted, whole=whole), task.most_bytes)
    return Answer(result, status, code, isolation=isolation, ran=Ran(limits, fitted.report), within=within)


async def _limits(task: Task, step: StepReport) -> Limits:
    """Those of the step; where one of the box's was met, those of the session, too."""
    own = order.step_limits(task.grant, task.provision.limits)
    if step.cell.report.limit in (None, "wall", "output"):
        return own
    try:
        info = await task.keeper.info(task.owner, task.session)
    except RingfenceError:
        return own
    return replace(info.limits, wall_seconds=own.wall_seconds, output_bytes=own.output_bytes)


def _listener(task: Task) -> Tell:
    """What a contract has something removed from, nobody hears as it comes."""
    return (task.attached.tell if task.open else None) or unheard


async def _whole(task: Task, step: StepReport, shown: BoxReport) -> Mapping[Stream, str]:
    """Where all of a stream lies that is cut. What was captured whole and is cut only now is put there by us."""
    out: dict[Stream, str] = {}
    streams: tuple[Stream, Stream] = ("stdout", "stderr")
    for stream in streams:
        captured: Captured = getattr(step.cell.report, stream)
        if stream in step.whole:
            out[stream] = step.whole[stream]
        elif not captured.truncated and getattr(shown, stream).truncated:
            path = f"/workspace/tmp/step-{step.step}.{stream}"
            with suppress(RingfenceError):  # no room for it, say; then the result says how to do without
                await task.keeper.write(task.owner, task.session, path, captured.head + captured.tail)
                out[stream] = path
    return out


# ── Somebody at the keys ──────────────────────────────────────────────────────────────────────────


async def _typed(task: Task, keys: AsyncIterator[bytes | tuple[int, int]], tell: Tell) -> Answer:
    """A command that is typed into while it runs; when its caller goes, so does it."""
    keeper, owner, session = task.keeper, task.owner, task.session
    info = await keeper.start(owner, session, order.command(task.grant, task.provision))
    typing = asyncio.ensure_future(_type(task, info, keys))
    try:
        over = await keeper.follow(owner, session, info.process, (0, 0), tell)
    except asyncio.CancelledError:
        await to_the_end(keeper.signal(owner, session, info.process, 9))
        raise
    finally:
        typing.cancel()
        await asyncio.wait({typing}, timeout=_LONGEST_WAIT)
    assert over.report is not None
    about = await keeper.info(owner, session)
    step = StepReport(session, about.step, CellReport(over.report), state=about.state)
    return await _answer(task, step)


async def _type(task: Task, info: ProcessInfo, keys: AsyncIterator[bytes | tuple[int, int]]) -> None:
    keeper, owner, session = task.keeper, task.owner, task.session
    try:
        async for key in keys:
            if isinstance(key, bytes):
                await keeper.send(owner, session, info.process, key)
            else:
                await keeper.resize(owner, session, info.process, *key)
        await keeper.send(owner, session, info.process, b"", eof=True)
    except RingfenceError:
        return  # it is over, and takes no more
