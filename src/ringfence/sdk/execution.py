"""What a call of one of our own tools came to, for a program that reads it: a value, or an error with its type."""

from __future__ import annotations

import re
from dataclasses import field

from ringfence.errors import (
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
from ringfence.model import Json, Outcome, Status
from ringfence.plain import plain

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program that runs once shows no values, and need not load what they are made of
    from ringfence.sdk.result import Result

_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?", re.DOTALL)
_RAN = (Status.SUCCESS, Status.FAILED, Status.TIMEOUT, Status.KILLED)
_USED_UP = frozenset({"capacity", "busy", "quota"})
_NOT_THERE: dict[str, type[Refused]] = {
    "unknown_session": SandboxNotFound,
    "session_stopped": SandboxStopped,
    **dict.fromkeys(("not_found", "unknown_process", "unknown_snapshot", "unknown_volume"), NotFound),
}


@plain
class Logs:
    """What the program wrote, in pieces; joined they are all of it that was kept."""

    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)


@plain
class ExecutionError:
    """Why a run did not end well.

    For an exception this is what the interpreter in the box said, or wrote to stderr: a claim of code that is not
    trusted, which can tell of something that never happened. How the run ended is in `Execution.facts`.
    """

    name: str
    value: str
    traceback: str = ""


@plain
class Execution:
    """A Python program that ran, however it ended. A program that fails is no exception of ours."""

    logs: Logs
    error: ExecutionError | None
    facts: Json
    """What the supervisor of the box saw; nothing in it comes from the program."""
    status: str
    """`success`, `failed`, `timeout` or `killed`."""
    results: list[Result] = field(default_factory=list)
    """Values that it showed, claimed by it; none for a program that ran once, by itself."""
    context: str | None = None
    step: int | None = None
    """Which step of its sandbox it was."""
    alive: bool = True
    """Whether its interpreter, with all variables, is still there; else the next run has a fresh one."""

    @property
    def text(self) -> str:
        """The text of the last expression's value, or else all that was written to stdout."""
        main = next((shown.text for shown in self.results if shown.is_main_result), None)
        return "".join(self.logs.stdout) if main is None else main


@plain
class CommandResult:
    """A command that ran, however it ended."""

    stdout: str
    stderr: str
    exit_code: int
    """The command's own; 128+n for one that died of signal n, 124 for a timeout, 137 for a limit."""
    facts: Json
    status: str


def execution(outcome: Outcome) -> Execution:
    """Raises what says that nothing ran, or that nobody knows."""
    stdout, stderr = streams(outcome)
    logs = Logs([stdout] if stdout else [], [stderr] if stderr else [])
    return Execution(logs, _error(outcome, stderr), outcome.facts, str(outcome.status))


def command_result(outcome: Outcome) -> CommandResult:
    """Raises what says that nothing ran, or that nobody knows."""
    stdout, stderr = streams(outcome)
    return CommandResult(stdout, stderr, _exit_code(outcome), outcome.facts, str(outcome.status))


def streams(outcome: Outcome) -> tuple[str, str]:
    """Stdout and stderr of what ran. Raises Unavailable: nothing ran; OutcomeUnknown; Refused: it may not run."""
    if outcome.status not in _RAN or outcome.result is None:
        raise problem(outcome)
    if outcome.ran is not None:
        return outcome.ran.report.stdout.text, outcome.ran.report.stderr.text
    shown = outcome.structured if isinstance(outcome.structured, dict) else {}
    return str(shown.get("stdout", "")), str(shown.get("stderr", ""))


def value(outcome: Outcome) -> Json:
    """What a tool that runs nothing gave back. Raises whatever says why it gave nothing."""
    if outcome.status is not Status.SUCCESS:
        raise problem(outcome)
    return outcome.structured if isinstance(outcome.structured, dict) else {}


def problem(outcome: Outcome) -> RingfenceError:
    """An outcome that is no result, as an error with its type."""
    text = outcome.message or str(outcome.facts.get("explanation") or outcome.status)
    return error(outcome.status, outcome.reason_code, text, outcome.approval_id)


def error(status: Status, code: str, text: str, approval_id: str | None = None) -> RingfenceError:
    """Why there is no result, as an error with its type."""
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
    status, number = outcome.facts.get("exit_status"), outcome.facts.get("signal")
    if outcome.status is Status.TIMEOUT:
        return 124
    if outcome.status is Status.KILLED:
        return 137
    return int(status) if status is not None else 128 + int(number or 0)


def _error(outcome: Outcome, stderr: str) -> ExecutionError | None:
    if outcome.status is Status.SUCCESS:
        return None
    if (stopped := stopped_by(outcome)) is not None:
        return stopped
    status = outcome.facts.get("exit_status")
    return (raised(stderr) if status == 1 else None) or ExecutionError("SystemExit", str(status))


def stopped_by(outcome: Outcome) -> ExecutionError | None:
    """What ended a run that did not end by itself; all of it is the supervisor's word."""
    if outcome.status is not Status.FAILED:
        return ExecutionError(outcome.reason_code, str(outcome.facts.get("explanation")))
    number = outcome.facts.get("signal")
    return None if number is None else ExecutionError("signalled", str(number))


def raised(stderr: str) -> ExecutionError | None:
    """The exception that Python's last words tell of; None where they tell of none."""
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
