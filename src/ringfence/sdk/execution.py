"""What a call of one of our own tools came to, for the program that made it: a value, or an error with its type.

The values that a program showed were made by code in the box: they are claims of that code. A notebook shows them
without obeying them: HTML is put into a frame in which no script runs, an SVG is an image, and scripts are never shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from ringfence.core.errors import (
    Denied,
    NotFound,
    OutcomeUnknown,
    QuotaExceeded,
    Refused,
    RingfenceError,
    SandboxNotFound,
    SandboxStopped,
    SetUpFailed,
    Unavailable,
)
from ringfence.core.model import Json, Outcome, Status
from ringfence.core.record import plain

if TYPE_CHECKING:
    from ringfence.sdk.charts import Chart

CHART = "application/vnd.ringfence.chart+json"
_TYPES = {
    "text": "text/plain",
    "html": "text/html",
    "markdown": "text/markdown",
    "svg": "image/svg+xml",
    "png": "image/png",
    "jpeg": "image/jpeg",
    "pdf": "application/pdf",
    "latex": "text/latex",
    "json": "application/json",
    "javascript": "application/javascript",
    "chart": CHART,
}
_FRAME = '<iframe sandbox="" style="width:100%;height:24em;border:0" srcdoc="{}"></iframe>'
_LOADS_NOTHING = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; font-src data:; '
    "style-src 'unsafe-inline'\">"
)
"""Before what a box shows: a picture or a style sheet from elsewhere would carry data out of a box without network."""


_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?", re.DOTALL)
_THROWN = re.compile(r"(?:Uncaught )?([A-Z]\w*Error)(?: \[\w+\])?(?:: (.*))?")
_RAN = (Status.SUCCESS, Status.FAILED, Status.TIMEOUT, Status.KILLED)
_USED_UP = frozenset({"capacity", "busy", "quota"})
_NOT_THERE: dict[str, type[Refused]] = {
    "unknown_session": SandboxNotFound,
    "session_stopped": SandboxStopped,
    **dict.fromkeys(("not_found", "unknown_process", "unknown_snapshot", "unknown_volume"), NotFound),
}


# ── What a caller gets ────────────────────────────────────────────────────────────────────────────


@plain
class Result:
    """One value, by MIME type in `data`. Images are in base64, as they come."""

    data: Mapping[str, str]
    is_main_result: bool = False
    """The value of the cell's last expression."""
    cut: Mapping[str, int] = field(default_factory=dict)
    """Forms that were left out as too long, and their lengths."""

    @classmethod
    def of(cls, claim: Json) -> Result:
        return cls(dict(claim.get("data") or {}), bool(claim.get("main")), dict(claim.get("cut") or {}))

    @property
    def text(self) -> str | None:
        return self.data.get(_TYPES["text"])

    @property
    def html(self) -> str | None:
        return self.data.get(_TYPES["html"])

    @property
    def markdown(self) -> str | None:
        return self.data.get(_TYPES["markdown"])

    @property
    def svg(self) -> str | None:
        return self.data.get(_TYPES["svg"])

    @property
    def png(self) -> str | None:
        return self.data.get(_TYPES["png"])

    @property
    def jpeg(self) -> str | None:
        return self.data.get(_TYPES["jpeg"])

    @property
    def pdf(self) -> str | None:
        return self.data.get(_TYPES["pdf"])

    @property
    def latex(self) -> str | None:
        return self.data.get(_TYPES["latex"])

    @property
    def javascript(self) -> str | None:
        return self.data.get(_TYPES["javascript"])

    @property
    def json(self) -> Any:
        """The value of its JSON; None if there is none, or it cannot be parsed."""
        try:
            return json.loads(self.data[_TYPES["json"]])
        except (KeyError, ValueError, RecursionError):
            return None

    @property
    def chart(self) -> Chart | None:
        """A chart of matplotlib as data, in E2B's form; None if this is none."""
        from ringfence.sdk.charts import chart_of  # noqa: PLC0415 - few results are charts

        return chart_of(self.data.get(CHART))

    def formats(self) -> list[str]:
        """The short names of its forms; for other forms, the MIME type."""
        short = {kind: name for name, kind in _TYPES.items()}
        return [short.get(kind, kind) for kind in self.data]

    def __str__(self) -> str:
        return self.text if self.text is not None else f"Result({', '.join(self.formats())})"

    # ── For notebooks ──

    def _repr_html_(self) -> str | None:
        import base64  # noqa: PLC0415 - only notebooks ask for it
        import html  # noqa: PLC0415 - only notebooks ask for it

        if self.html is not None:
            return _FRAME.format(html.escape(_LOADS_NOTHING + self.html, quote=True))
        if self.svg is not None:
            return f'<img src="data:image/svg+xml;base64,{base64.b64encode(self.svg.encode()).decode()}">'
        return None

    def _repr_png_(self) -> str | None:
        return self.png

    def _repr_jpeg_(self) -> str | None:
        return self.jpeg

    def _repr_latex_(self) -> str | None:
        return self.latex

    def _repr_json_(self) -> Any:
        return self.json


@plain
class Logs:
    """The output of the program, in pieces; joined, they are everything that was kept."""

    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)
    truncated: bool = False
    """More was written than is kept (`Limits.capture_bytes`): these are the beginning and the end."""


@plain
class ExecutionError:
    """Why a run failed.

    An exception is reported by the interpreter in the box: it is a claim of untrusted code, and may describe something
    that never happened. How the run really ended is in `Execution.facts`.
    """

    name: str
    value: str
    traceback: str = ""


@plain
class Execution:
    """A Python program that ran, however it ended. A program that fails raises no exception here."""

    logs: Logs
    error: ExecutionError | None
    facts: Json
    """What the supervisor of the box observed. Nothing in it comes from the program."""
    status: str
    """`success`, `failed`, `timeout` or `killed`; in a batch also that of a program which was refused or never ran."""
    results: list[Result] = field(default_factory=list)
    """Values that it showed, as it claims them."""
    context: str | None = None
    step: int | None = None
    """The number of this step in its sandbox."""
    alive: bool = True
    """Whether its interpreter still lives, with all variables; if not, the next run gets a fresh one."""
    late: Logs = field(default_factory=Logs)
    """What threads, processes and tasks that earlier steps left wrote since the previous step."""

    @property
    def text(self) -> str:
        """The text of the last expression's value, or else all that was written to stdout; for a program that ran once
        the other way round, since what it is for it prints."""
        main = next((shown.text for shown in self.results if shown.is_main_result), None)
        printed = "".join(self.logs.stdout)
        return printed if main is None or (printed and self.step is None) else main


@plain
class CommandResult:
    """A command that ran, however it ended."""

    stdout: str
    stderr: str
    exit_code: int
    """The command's own; 128+n for one that died of signal n, 124 for a timeout, 137 for a limit."""
    facts: Json
    status: str
    late: Logs = field(default_factory=Logs)
    """As for `Execution`."""
    truncated: bool = False
    """More was written than is kept (`Limits.capture_bytes`): these are the beginning and the end."""


@plain
class CommandBytes:
    """A command that ran, with its output as it was written. Of what is `truncated`, the two ends are joined."""

    stdout: bytes
    stderr: bytes
    exit_code: int
    facts: Json
    status: str
    late: Logs = field(default_factory=Logs)
    truncated: bool = False


# ── From outcomes ─────────────────────────────────────────────────────────────────────────────────


def execution(outcome: Outcome, language: str | None = None) -> Execution:
    """Raises an error if nothing ran, or the outcome is not known."""
    stdout, stderr = streams(outcome)
    logs = Logs([stdout] if stdout else [], [stderr] if stderr else [], is_truncated(outcome))
    made = Execution(logs, _program_error(outcome, stderr, language), outcome.facts, str(outcome.status))
    reply = outcome.structured if isinstance(outcome.structured, dict) else {}
    return replace(made, results=_results(reply)) if reply.get("claimed") else made


def ended(outcome: Outcome, language: str | None = None) -> Execution:
    """As `execution`, but it raises nothing: if nothing ran, or the outcome is not known, the error says so."""
    if _ran(outcome):
        return execution(outcome, language)
    return without_result(problem(outcome), outcome.status, outcome.facts)


def without_result(problem: RingfenceError, status: Status | None = None, facts: Json | None = None) -> Execution:
    """A program that was refused, or could not be run, or of which nobody knows whether it ran."""
    if status is None:
        unknown = Status.UNKNOWN if isinstance(problem, OutcomeUnknown) else Status.UNAVAILABLE
        status = problem.status if isinstance(problem, Refused) else unknown
    name = problem.reason_code or type(problem).__name__
    return Execution(Logs(), ExecutionError(name, str(problem)), facts or {}, str(status))


def command_result(outcome: Outcome) -> CommandResult:
    """Raises an error if nothing ran, or the outcome is not known."""
    stdout, stderr = streams(outcome)
    about = (outcome.facts, str(outcome.status), _late(outcome), is_truncated(outcome))
    return CommandResult(stdout, stderr, _exit_code(outcome), *about)


def command_bytes(outcome: Outcome) -> CommandBytes:
    """As `command_result`, with output undecoded."""
    texts = streams(outcome)
    about = (outcome.facts, str(outcome.status), _late(outcome), is_truncated(outcome))
    if outcome.ran is None:
        return CommandBytes(texts[0].encode(), texts[1].encode(), _exit_code(outcome), *about)
    out, err = outcome.ran.report.stdout, outcome.ran.report.stderr
    return CommandBytes(out.head + out.tail, err.head + err.tail, _exit_code(outcome), *about)


def is_truncated(outcome: Outcome) -> bool:
    """Whether there was more output than the caller gets."""
    if outcome.ran is not None:
        return outcome.ran.report.stdout.truncated or outcome.ran.report.stderr.truncated
    return isinstance(outcome.structured, dict) and bool(outcome.structured.get("truncated"))


def streams(outcome: Outcome) -> tuple[str, str]:
    """Stdout and stderr. Raises Unavailable if nothing ran, Refused if it may not run, OutcomeUnknown."""
    if not _ran(outcome):
        raise problem(outcome)
    if outcome.ran is not None:
        return outcome.ran.report.stdout.text, outcome.ran.report.stderr.text
    shown = outcome.structured if isinstance(outcome.structured, dict) else {}
    return str(shown.get("stdout", "")), str(shown.get("stderr", ""))


def _ran(outcome: Outcome) -> bool:
    return outcome.status in _RAN and outcome.result is not None


def value(outcome: Outcome) -> Json:
    """What a tool that runs nothing gave back. Raises its error."""
    if outcome.status is not Status.SUCCESS:
        raise problem(outcome)
    return outcome.structured if isinstance(outcome.structured, dict) else {}


def problem(outcome: Outcome) -> RingfenceError:
    """The typed error for an outcome without a result."""
    text = outcome.message or str(outcome.facts.get("explanation") or outcome.status)
    return error(outcome.status, outcome.reason_code, text, outcome.approval_id)


def error(status: Status, code: str, text: str, approval_id: str | None = None) -> RingfenceError:
    """The typed error for a status and reason code."""
    if code in _USED_UP and status in (Status.UNAVAILABLE, Status.VALIDATION_FAILURE):
        return QuotaExceeded(code, text)
    if status is Status.UNAVAILABLE:
        return Unavailable(code, text)
    if status is Status.UNKNOWN:
        return OutcomeUnknown(code, text)
    if code == SetUpFailed.REASON and status is Status.FAILED:
        return SetUpFailed(text)
    denied = status in (Status.DENIED, Status.APPROVAL_REQUIRED)
    kind = Denied if denied else _NOT_THERE.get(code, Refused)
    return kind(status, code, text, approval_id=approval_id)


def _exit_code(outcome: Outcome) -> int:
    status = outcome.facts.get("exit_status")
    number = outcome.facts.get("signal")
    if outcome.status is Status.TIMEOUT:
        return 124
    if outcome.status is Status.KILLED:
        return 137
    return int(status) if status is not None else 128 + int(number or 0)


def _program_error(outcome: Outcome, stderr: str, language: str | None) -> ExecutionError | None:
    if outcome.status is Status.SUCCESS:
        return None
    if (stopped := stopped_by(outcome)) is not None:
        return stopped
    status = outcome.facts.get("exit_status")
    if not _is_python(language):
        return _command_error(status, stderr)
    return (raised(stderr) if status == 1 else None) or ExecutionError("SystemExit", str(status))


def _is_python(language: str | None) -> bool:
    return language in (None, "python")


def _command_error(status: object, stderr: str) -> ExecutionError:
    """Why a cell in another language failed: an error that JavaScript names, or else its exit status."""
    named = [found for line in stderr.splitlines() if (found := _THROWN.fullmatch(line))]
    if named:
        return ExecutionError(named[-1][1], named[-1][2] or "", stderr)
    return ExecutionError("ExitStatus", str(status), stderr)


def stopped_by(outcome: Outcome) -> ExecutionError | None:
    """What ended a run that did not end by itself, as the supervisor observed it."""
    if outcome.status is not Status.FAILED:
        return ExecutionError(outcome.reason_code, str(outcome.facts.get("explanation")))
    number = outcome.facts.get("signal")
    return None if number is None else ExecutionError("signalled", str(number))


def raised(stderr: str) -> ExecutionError | None:
    """The exception at the end of Python's stderr; None if there is none."""
    lines = stderr.rstrip("\n").split("\n")
    start = max((n for n, line in enumerate(lines) if line == _TRACEBACK), default=None)
    if start is None:
        # A program that could not even be compiled has no traceback, but a place.
        start = max((n for n, line in enumerate(lines) if line.startswith('  File "')), default=None)
    if start is None:
        return None
    body = range(start + 1, len(lines))
    at = next((n for n in body if lines[n] and not lines[n][0].isspace()), None)
    found = _RAISED.fullmatch("\n".join(lines[at:])) if at is not None else None
    if found is None:
        return None
    return ExecutionError(found[1].rpartition(".")[2], found[2] or "", "\n".join(lines[start:]) + "\n")


def cell(outcome: Outcome, language: str | None = None) -> Execution:
    """Raises an error if nothing ran, or the outcome is not known."""
    stdout, stderr = streams(outcome)
    reply = outcome.structured if isinstance(outcome.structured, dict) else {}
    claimed = reply.get("claimed") or {}
    return Execution(
        logs=Logs([stdout] if stdout else [], [stderr] if stderr else [], is_truncated(outcome)),
        error=_cell_error(outcome, reply, claimed)
        if _is_python(language)
        else _program_error(outcome, stderr, language),
        facts=outcome.facts,
        status=str(outcome.status),
        results=_results(reply),
        context=reply.get("context"),
        step=reply.get("step"),
        alive=bool(reply.get("interpreter_alive", True)),
        late=_late(outcome),
    )


def _results(reply: Json) -> list[Result]:
    return [Result.of(each) for each in (reply.get("claimed") or {}).get("results") or ()]


def _late(outcome: Outcome) -> Logs:
    if outcome.ran is None:
        return Logs()
    out, err = outcome.ran.report.late_stdout, outcome.ran.report.late_stderr
    texts = [[each.text] if each.total else [] for each in (out, err)]
    return Logs(texts[0], texts[1], out.truncated or err.truncated)


def _cell_error(outcome: Outcome, reply: Json, claimed: Json) -> ExecutionError | None:
    if outcome.status is Status.SUCCESS:
        return None
    said = claimed.get("error")
    if outcome.status is Status.FAILED and said:
        return ExecutionError(str(said["name"]), str(said["value"]), str(said.get("traceback") or ""))
    if (stopped := stopped_by(outcome)) is not None:
        return stopped
    if reply.get("interpreter_alive", True):
        return ExecutionError("SystemExit", str(outcome.facts.get("exit_status")))
    how = f"the interpreter ended with status {outcome.facts.get('exit_status')}"
    return ExecutionError("InterpreterEnded", f"{how}; its variables are gone, and the next run has a fresh one")
