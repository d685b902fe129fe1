"""The results of programs in boxes: what they printed, showed and left, kept within bounds.

What the program claims of itself stands apart, under `claimed`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Any

from ringfence.core import canonical, excerpt
from ringfence.core.box import BoxReport, Captured, Shown, Stream
from ringfence.core.model import Contract, Json, Status
from ringfence.core.record import plain
from ringfence.core.sessions import Failure, StepReport
from ringfence.sandbox.tools import resources

MAX_FILES = 1000
MAX_LINKS = 20
SPARE_BYTES = 1024
"""Of a result that has to be cut, this much is left for what the guard may add."""
_ESCAPED = 12
"""A byte of output stands twice in a result, and becomes six at most each time."""
_PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp")
CHART = "application/vnd.ringfence.chart+json"
"""A chart as data, beside its picture."""
_BESIDE_TEXT = (*_PICTURES, CHART)
"""A model sees the picture as a picture, and made the data itself."""


def judge(report: BoxReport) -> tuple[Status, str]:
    """The status and reason code of a run."""
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
    """For a caller in this process, which gets every form of a claimed value."""
    whole: Mapping[Stream, str] = field(default_factory=dict)
    """The files with all of a stream that is cut here."""
    most_chars: int | None = None
    """How many characters the caller is given to read; the guard leaves out what is more."""

    @property
    def is_error(self) -> bool:
        return judge(self.report)[0] is not Status.SUCCESS

    def cut(self) -> Mapping[Stream, Captured]:
        """The streams that the caller does not get whole."""
        out, err = self.report.stdout, self.report.stderr
        room: float = math.inf
        if self.most_chars is not None:
            shown = [form for each in self.shown if (form := each.data.get("text/plain"))]
            failed = [] if self.error is None else [self.error.traceback]
            room = excerpt.share([len(text) for text in (out.text, err.text, *shown, *failed)], self.most_chars)
        streams: dict[Stream, Captured] = {"stdout": out, "stderr": err}
        return {name: stream for name, stream in streams.items() if stream.truncated or len(stream.text) > room}


def of_run(report: BoxReport, *, wide: bool) -> ResultParts:
    return ResultParts(report, shown=report.shown, wide=wide)


def of_step(step: StepReport, *, wide: bool) -> ResultParts:
    return ResultParts(step.cell.report, step, step.cell.results, step.cell.error, wide)


def fitting(parts: ResultParts, most: int) -> tuple[ResultParts, Json]:
    """The result, cut until it is no larger than the contract allows: first what was printed, then what was shown."""
    result = _result(parts)
    report = parts.report
    out = report.stdout
    err = report.stderr
    kept = sum(len(each.head) + len(each.tail) for each in (out, err, report.late_stdout, report.late_stderr))
    for each in parts.shown:
        kept += sum(map(len, each.data.values()))
    kept += len(parts.error.traceback) + len(parts.error.value) if parts.error is not None else 0
    if kept * _ESCAPED + len(report.files[:MAX_FILES]) * 5000 + SPARE_BYTES < most:
        return parts, result  # the usual case, known without looking
    room = max(len(each.head + each.tail) for each in (out, err, report.late_stdout, report.late_stderr))
    while len(canonical.dumps(result)) > most - SPARE_BYTES:
        if room > 0:
            room //= 2
            report = replace(report, stdout=cut(report.stdout, room), stderr=cut(report.stderr, room))
            report = replace(
                report, late_stdout=cut(report.late_stdout, room), late_stderr=cut(report.late_stderr, room)
            )
            parts = replace(parts, report=report)
        elif (less := _shown_less(parts)) is not None:
            parts = less
        else:
            break
        result = _result(parts)
    return parts, result


def read_by_a_model(parts: ResultParts, contract: Contract) -> ResultParts:
    """For a caller that is given so many characters. The guard shortens texts, after it searched them. Only what was
    cut already when it was captured is cut here, so that the number of bytes that are missing is right; unless the
    contract removes something, which must not be cut in two."""
    most = contract.result.max_chars
    if most is None:
        return parts
    report = parts.report
    if (report.stdout.truncated or report.stderr.truncated) and not contract.redact:
        stdout, stderr = (
            cut(stream, most // 2) if stream.truncated else stream for stream in (report.stdout, report.stderr)
        )
        report = replace(report, stdout=stdout, stderr=stderr)
    return replace(parts, report=report, most_chars=most)


def cut(stream: Captured, room: int) -> Captured:
    """No more than `room` bytes of a stream: its head and its tail."""
    if len(stream.head) + len(stream.tail) <= room:
        return stream
    head, tail = (stream.head, stream.tail) if stream.tail else (stream.head, stream.head)
    half = room // 2
    return replace(stream, head=head[: room - half], tail=tail[len(tail) - half :] if half else b"")


def _shown_less(parts: ResultParts) -> ResultParts | None:
    """Without the longest form of all that was shown; without the error's traceback where nothing is shown any more."""
    sizes = [(len(text), place, mime) for place, each in enumerate(parts.shown) for mime, text in each.data.items()]
    if not sizes:
        if parts.error is None or not (parts.error.traceback or parts.error.value):
            return None
        return replace(parts, error=Failure(parts.error.name[:200], parts.error.value[:200]))
    size, place, mime = max(sizes)
    old = parts.shown[place]
    data = {key: text for key, text in old.data.items() if key != mime}
    less = replace(old, data=data, cut={**old.cut, mime: size})
    return replace(parts, shown=(*parts.shown[:place], less, *parts.shown[place + 1 :]))


# ── Results ───────────────────────────────────────────────────────────────────────────────────────


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def _result(parts: ResultParts) -> Json:
    report = parts.report
    stdout = report.stdout.text
    stderr = report.stderr.text
    files = [fact.as_json() for fact in report.files[:MAX_FILES]]
    structured: Json = {"stdout": stdout, "stderr": stderr, "exit_code": report.exit_status, "ended": report.ended}
    structured["files"] = files
    cut = parts.cut()
    if cut:
        structured["truncated"] = True
    content: list[Json] = [text(stdout)] if stdout else []
    if stderr:
        content.append(text(f"stderr:\n{stderr}"))
    content += _pointers(parts, cut)
    for each in parts.shown:
        content += _blocks(each)
    if parts.step is None and parts.shown:
        structured["claimed"] = {"results": [_claimed(each, parts.wide) for each in parts.shown]}
    if parts.step is not None:
        if parts.error is not None:
            content.append(text(parts.error.traceback or f"{parts.error.name}: {parts.error.value}"))
        if parts.step.context is not None and not parts.step.cell.alive:
            content.append(text("[the interpreter is gone, and its variables with it; the next call has a fresh one]"))
        if files:
            content += _links(parts.step.session, files)
        if late := _late(report):
            content += [text(f"{name} of what earlier steps left running:\n{said}") for name, said in late.items()]
            structured["late"] = late
        structured |= _of_step(parts, parts.step)
    result: Json = {"content": content or [text("")], "structuredContent": structured}
    if parts.is_error:
        result["isError"] = True
    return result


def _late(report: BoxReport) -> dict[str, str]:
    """What was written since the last step by what earlier ones left running."""
    streams = {"stdout": report.late_stdout, "stderr": report.late_stderr}
    return {name: stream.text for name, stream in streams.items() if stream.total}


def _of_step(parts: ResultParts, step: StepReport) -> Json:
    structured: Json = {"session": step.session, "step": step.step, "state": step.state}
    if parts.whole:
        structured["whole"] = dict(parts.whole)
    if step.context is None:
        return structured
    error = None if parts.error is None else _error(parts.error)
    results = [_claimed(each, parts.wide) for each in parts.shown]
    structured |= {"context": step.context, "interpreter_alive": step.cell.alive, "fresh_interpreter": step.fresh}
    return structured | {"claimed": {"results": results, "error": error}}


def _error(error: Failure) -> Json:
    return {"name": error.name, "value": error.value, "traceback": error.traceback}


def _claimed(each: Shown, wide: bool) -> Json:
    data = {mime: form for mime, form in each.data.items() if wide or mime not in _BESIDE_TEXT}
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


def _pointers(parts: ResultParts, cut: Mapping[Stream, Captured]) -> Iterator[Json]:
    """Where to find the whole of a stream that was cut."""
    for name, stream in cut.items():
        path = parts.whole.get(name)
        if path is not None:
            yield text(f"[all of {name}, {stream.total} bytes, is in {path}; read parts of it with read_file]")
        elif parts.step is None:
            yield text(f"[{name} had {stream.total} bytes, and the rest is not kept; in a session all of it is]")
        else:
            yield text(f"[{name} had {stream.total} bytes; write so much into a file, and read parts of it]")


def _links(session: str, files: list[Json]) -> Iterator[Json]:
    for file in files[:MAX_LINKS]:
        path = str(file["path"])
        name = path.rpartition("/")[2]
        yield {"type": "resource_link", "uri": resources.address(session, path), "name": name, "size": file["bytes"]}


def explain(result: Json, facts: Mapping[str, Any]) -> None:
    """Say in a result of ours that is an error how it came to it; the facts themselves are beside the result."""
    if result.get("isError"):
        said = [block for block in result["content"] if block != text("")]  # models' APIs refuse an empty text
        result["content"] = [*said, text(f"[{facts['explanation']}]")]
