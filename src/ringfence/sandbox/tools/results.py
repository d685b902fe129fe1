"""What ran in a box, as a result: what it printed, showed and left, and how all that is kept within bounds.

What the program said of itself stands apart, under `claimed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Any

from ringfence.core import canonical
from ringfence.core.box import BoxReport, Captured, Stream
from ringfence.core.model import Json, Status
from ringfence.core.record import plain
from ringfence.core.sessions import Failure, Shown, StepReport
from ringfence.sandbox.tools.resources import address

MOST_FILES = 1000
MOST_LINKS = 20
SPARE_BYTES = 1024
"""Of a result that has to be cut, this much is left for what the guard may add."""
_ESCAPED = 12
"""A byte of output stands twice in a result, and becomes six at most each time."""
_PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp")


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
            return Status.KILLED, "forged" if report.forged else report.ended


@plain
class ResultParts:
    """All that a result is made of."""

    report: BoxReport
    step: StepReport | None = None
    shown: tuple[Shown, ...] = ()
    error: Failure | None = None
    wide: bool = False
    """For a caller in this process, which has every form of a value where it is claimed."""
    whole: Mapping[Stream, str] = field(default_factory=dict)
    """Where all of a stream lies that is cut here."""

    @property
    def is_error(self) -> bool:
        return judge(self.report)[0] is not Status.SUCCESS


def of_step(step: StepReport, *, wide: bool) -> ResultParts:
    return ResultParts(step.cell.report, step, step.cell.results, step.cell.error, wide)


def fitting(told: ResultParts, most: int) -> tuple[ResultParts, Json]:
    """The result, cut until it is no larger than the contract allows: first what was printed, then what was shown."""
    result = _result(told)
    report = told.report
    out = report.stdout
    err = report.stderr
    kept = len(out.head) + len(out.tail) + len(err.head) + len(err.tail)
    for each in told.shown:
        kept += sum(map(len, each.data.values()))
    kept += len(told.error.traceback) + len(told.error.value) if told.error is not None else 0
    if kept * _ESCAPED + len(report.files[:MOST_FILES]) * 5000 + SPARE_BYTES < most:
        return told, result  # the usual case, known without looking
    room = max(len(report.stdout.head + report.stdout.tail), len(report.stderr.head + report.stderr.tail))
    while len(canonical.dumps(result)) > most - SPARE_BYTES:
        if room > 0:
            room //= 2
            report = replace(report, stdout=cut(report.stdout, room), stderr=cut(report.stderr, room))
            told = replace(told, report=report)
        elif (less := _shown_less(told)) is not None:
            told = less
        else:
            break
        result = _result(told)
    return told, result


def cut(stream: Captured, room: int) -> Captured:
    """No more than `room` bytes of a stream: its head and its tail."""
    if len(stream.head) + len(stream.tail) <= room:
        return stream
    head, tail = (stream.head, stream.tail) if stream.tail else (stream.head, stream.head)
    half = room // 2
    return replace(stream, head=head[: room - half], tail=tail[len(tail) - half :] if half else b"")


def _shown_less(told: ResultParts) -> ResultParts | None:
    """Without the longest form of all that was shown; without the error's trace where nothing is shown any more."""
    sizes = [(len(text), place, mime) for place, each in enumerate(told.shown) for mime, text in each.data.items()]
    if not sizes:
        if told.error is None or not (told.error.traceback or told.error.value):
            return None
        return replace(told, error=Failure(told.error.name[:200], told.error.value[:200]))
    size, place, mime = max(sizes)
    old = told.shown[place]
    data = {key: text for key, text in old.data.items() if key != mime}
    less = replace(old, data=data, cut={**old.cut, mime: size})
    return replace(told, shown=(*told.shown[:place], less, *told.shown[place + 1 :]))


# ── Results ───────────────────────────────────────────────────────────────────────────────────────


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def _result(told: ResultParts) -> Json:
    report = told.report
    stdout = report.stdout.text
    stderr = report.stderr.text
    files = [{"path": f.path, "bytes": f.bytes, "sha256": f.sha256} for f in report.files[:MOST_FILES]]
    structured: Json = {"stdout": stdout, "stderr": stderr, "exit_code": report.exit_status, "ended": report.ended}
    structured["files"] = files
    content: list[Json] = [text(stdout)] if stdout or told.step is None else []
    if stderr:
        content.append(text(f"stderr:\n{stderr}"))
    if told.step is not None:
        if report.stdout.truncated or report.stderr.truncated:
            content += _pointers(told)
        for each in told.shown:
            content += _blocks(each)
        if told.error is not None:
            content.append(text(told.error.traceback or f"{told.error.name}: {told.error.value}"))
        if told.step.context is not None and not told.step.cell.alive:
            content.append(text("[the interpreter is gone, and its variables with it; the next call has a fresh one]"))
        if files:
            content += _links(told.step.session, files)
        structured |= _of_step(told, told.step)
    result: Json = {"content": content or [text("")], "structuredContent": {**structured, "facts": {}}}
    if told.is_error:
        result["isError"] = True
    return result


def _of_step(told: ResultParts, step: StepReport) -> Json:
    told_of: Json = {"session": step.session, "step": step.step, "state": step.state}
    if told.whole:
        told_of["whole"] = dict(told.whole)
    if step.context is None:
        return told_of
    error = None if told.error is None else _error(told.error)
    results = [_claimed(each, told.wide) for each in told.shown]
    told_of |= {"context": step.context, "interpreter_alive": step.cell.alive, "fresh_interpreter": step.fresh}
    return told_of | {"claimed": {"results": results, "error": error}}


def _error(error: Failure) -> Json:
    return {"name": error.name, "value": error.value, "traceback": error.traceback}


def _claimed(each: Shown, wide: bool) -> Json:
    data = {mime: form for mime, form in each.data.items() if wide or mime not in _PICTURES}
    claimed: Json = {"data": data, "main": each.main}
    return {**claimed, "cut": dict(each.cut)} if each.cut else claimed


def _blocks(each: Shown) -> Iterator[Json]:
    """What a client shows of a value: text as text, a picture as a picture."""
    data = each.data
    if "text/plain" in data:
        yield text(data["text/plain"])
    for mime in _PICTURES:
        if mime in data:
            yield {"type": "image", "data": data[mime], "mimeType": mime}
    if "image/svg+xml" in data:
        svg: Json = {"uri": "ringfence://shown/figure.svg", "mimeType": "image/svg+xml", "text": data["image/svg+xml"]}
        yield {"type": "resource", "resource": svg}
    if "text/html" in data:
        yield text(f"[also as HTML, {len(data['text/html'])} characters: structuredContent.claimed]")
    if each.cut:
        forms = ", ".join(f"{mime} ({size} bytes)" for mime, size in each.cut.items())
        yield text(f"[too long to be shown: {forms}; save it in /workspace/output and read it with read_file]")


def _pointers(told: ResultParts) -> Iterator[Json]:
    """Where all of it is, for what was cut."""
    for name, stream in (("stdout", told.report.stdout), ("stderr", told.report.stderr)):
        if not stream.truncated:
            continue
        path = told.whole.get("stdout" if name == "stdout" else "stderr")
        if path is not None:
            yield text(f"[all of {name}, {stream.total} bytes, is in {path}; read parts of it with read_file]")
        else:
            yield text(f"[{name} had {stream.total} bytes; write so much into a file, and read parts of it]")


def _links(session: str, files: list[Json]) -> Iterator[Json]:
    for file in files[:MOST_LINKS]:
        path = str(file["path"])
        name = path.rpartition("/")[2]
        yield {"type": "resource_link", "uri": address(session, path), "name": name, "size": file["bytes"]}


def complete(result: Json, facts: Mapping[str, Any]) -> None:
    """Put the facts into a result of ours that has a place for them, and say how it ended where it did not go well."""
    structured = result.get("structuredContent")
    if isinstance(structured, dict) and "facts" in structured:
        structured["facts"] = dict(facts)
    if result.get("isError"):
        result["content"] = [*result["content"], {"type": "text", "text": f"[{facts['explanation']}]"}]
