"""Carries out a grant of one of our own tools: a box is made, its program run, and what was seen of it reported."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

import anyio

from ringfence import canonical
from ringfence.box import BoxReport, Captured, Limits, Ran
from ringfence.errors import Refused, Unavailable
from ringfence.model import Answer, Call, Contract, Grant, Json, Status
from ringfence.ports import Backend
from ringfence.sandbox import order

_LEVELS = ("none", "process", "gvisor", "microvm")
_MOST_FILES = 1000
_SPARE_BYTES = 1024
"""Of a result that has to be cut, this much is left for what the guard may add."""
_ESCAPED = 12
"""A byte of output stands twice in a result, and becomes six at most each time."""
_INPUT = "/workspace/input/"


@dataclass(frozen=True, slots=True)
class Provision:
    """What boxes get where neither contract nor caller says more."""

    limits: Limits
    templates: Mapping[str, tuple[str, ...]]
    """Packages by the name of the template."""
    level: str = "process"
    """The isolation that the backend gives."""


class Executor:
    """Our own tools, over one backend."""

    def __init__(self, backend: Backend, provision: Provision) -> None:
        self.backend = backend
        self.provision = provision

    def check(self, call: Call, contract: Contract) -> None:
        """Refuse what could not run as asked. Raises Refused, Unavailable."""
        if call.arguments.get("session") is not None:
            raise Unavailable(
                "no_session", "sessions are not built yet: leave session out, and each call has its own box"
            )
        if contract.secrets:
            raise Unavailable("no_secret", f"{contract.name} needs a secret, and secrets cannot be delivered yet")
        if contract.network != "denied":
            raise Unavailable("no_network_control", f"{contract.name} needs a network, and a box has none yet")
        if contract.mounts:
            raise Unavailable("no_mounts", f"{contract.name} needs folders of the host, and a box has none yet")
        if _LEVELS.index(contract.isolation) > _LEVELS.index(self.provision.level):
            raise Unavailable(
                "no_isolation",
                f"{contract.name} demands isolation {contract.isolation}, and backend {self.backend.name}"
                f" gives {self.provision.level}",
            )
        wanted = order.spec(call, contract, self.provision.limits)
        if wanted.template not in self.provision.templates:
            known = ", ".join(self.provision.templates)
            raise Refused(
                Status.VALIDATION_FAILURE, "unknown_template", f"there is no template of that name; there are: {known}"
            )

    def isolation(self) -> Json:
        """The `isolation` fact of a box that is yet to be made."""
        return {"backend": self.backend.name, "level": self.provision.level}

    async def run(self, grant: Grant) -> Answer:
        """Once. Raises Unavailable where nothing was run."""
        call, contract = grant.call, grant.contract
        wanted = order.spec(call, contract, self.provision.limits)
        # What a contract redacts, nobody sees as it comes.
        as_it_comes = call.attached is not None and not contract.redact and contract.result.fields is None
        tell = call.attached.tell if call.attached is not None and as_it_comes else None
        try:
            report = await _to_the_end(self.backend.run(wanted, tell))
        except ValueError as exc:
            raise Refused(Status.VALIDATION_FAILURE, "bad_arguments", f"no such box can be made: {exc}") from None
        status, code = judge(report)
        ran = Ran(wanted.limits, report)
        isolation = report.isolation or self.isolation()
        if report.ended == "infra":
            text = "the box itself failed" + (f": {'; '.join(report.trouble)}" if report.trouble else "")
            return Answer(None, status, code, text, isolation, ran=ran)
        if _inputs_differ(call, report):
            text = "an input changed after it was named, so the program saw another than was agreed to"
            return Answer(None, Status.FAILED, "input_changed", text, isolation, ran=ran)
        fitting, result = _fitting(report, contract.result.max_bytes, is_error=status is not Status.SUCCESS)
        return Answer(result, status, code, isolation=isolation, ran=Ran(wanted.limits, fitting))


async def _to_the_end(running: Coroutine[Any, Any, BoxReport]) -> BoxReport:
    """A run that is cancelled is told so once, and then has the time that it takes to remove its box."""
    task = asyncio.ensure_future(running)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # looked at; whatever it was, the caller has gone
        raise


def judge(report: BoxReport) -> tuple[Status, str]:
    """How a run counts: status and reason code."""
    match report.ended:
        case "exited":
            return (Status.SUCCESS, "ok") if report.exit_status == 0 else (Status.FAILED, "exit_status")
        case "signalled":
            return Status.FAILED, "signalled"
        case "timeout":
            return Status.TIMEOUT, "timeout"
        case "oom":
            return Status.KILLED, "memory"
        case "infra":
            return Status.UNKNOWN, "box_failed"
        case "pids" | "disk" | "output":
            return Status.KILLED, report.limit or report.ended
        case "policy" | "cancelled":
            return Status.KILLED, report.ended


def _inputs_differ(call: Call, report: BoxReport) -> bool:
    named = {entry["name"]: entry["sha256"] for entry in call.arguments.get("inputs") or ()}
    return any(named.get(fact.path.removeprefix(_INPUT)) != fact.sha256 for fact in report.inputs)


# ── Results ───────────────────────────────────────────────────────────────────────────────────────


def _fitting(report: BoxReport, most: int, *, is_error: bool) -> tuple[BoxReport, Json]:
    """The result, its streams cut until it is no larger than the contract allows, and the report cut likewise."""
    result = _result(report, is_error)
    kept = sum(len(part) for stream in (report.stdout, report.stderr) for part in (stream.head, stream.tail))
    if kept * _ESCAPED + len(report.files[:_MOST_FILES]) * 5000 + _SPARE_BYTES < most:
        return report, result  # the usual case, known without looking
    room = max(len(report.stdout.head + report.stdout.tail), len(report.stderr.head + report.stderr.tail))
    while len(canonical.dumps(result)) > most - _SPARE_BYTES and room > 0:
        room //= 2
        report = replace(report, stdout=_cut(report.stdout, room), stderr=_cut(report.stderr, room))
        result = _result(report, is_error)
    return report, result


def _cut(stream: Captured, room: int) -> Captured:
    """No more than `room` bytes of a stream: its head and its tail."""
    if len(stream.head) + len(stream.tail) <= room:
        return stream
    head, tail = (stream.head, stream.tail) if stream.tail else (stream.head, stream.head)
    half = room // 2
    return replace(stream, head=head[: room - half], tail=tail[len(tail) - half :] if half else b"")


def _result(report: BoxReport, is_error: bool) -> Json:
    stdout, stderr = report.stdout.text, report.stderr.text
    content: list[Json] = [{"type": "text", "text": stdout}]
    if stderr:
        content.append({"type": "text", "text": f"stderr:\n{stderr}"})
    files = [{"path": f.path, "bytes": f.bytes, "sha256": f.sha256} for f in report.files[:_MOST_FILES]]
    structured: Json = {"stdout": stdout, "stderr": stderr, "exit_code": report.exit_status, "ended": report.ended}
    result: Json = {"content": content, "structuredContent": {**structured, "files": files, "facts": {}}}
    if is_error:
        result["isError"] = True
    return result
