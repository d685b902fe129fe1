"""What a run in a box came to, for a program that reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ringfence.errors import OutcomeUnknown, Refused, Unavailable
from ringfence.model import Json, Outcome, Status

_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?", re.DOTALL)
_RAN = (Status.SUCCESS, Status.FAILED, Status.TIMEOUT, Status.KILLED)


@dataclass(frozen=True, slots=True)
class Logs:
    """What the program wrote, in pieces; joined they are all of it that was kept."""

    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ExecutionError:
    """Why a run did not end well.

    For an exception this is what the program itself wrote to stderr: a claim of code that is not trusted, which can
    write a traceback of something that never happened. How the run ended is in `Execution.facts`.
    """

    name: str
    value: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Execution:
    """A Python program that ran, however it ended. A program that fails is no exception of ours."""

    logs: Logs
    error: ExecutionError | None
    facts: Json
    """What the supervisor of the box saw; nothing in it comes from the program."""
    status: str
    """`success`, `failed`, `timeout` or `killed`."""
    results: list[str] = field(default_factory=list)
    """Values that the program gave back besides its output; none for a program that ran by itself."""

    @property
    def text(self) -> str:
        """The last result, or else all that was written to stdout."""
        return self.results[-1] if self.results else "".join(self.logs.stdout)


@dataclass(frozen=True, slots=True)
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
    if outcome.status is Status.UNAVAILABLE:
        raise Unavailable(outcome.reason_code, outcome.message)
    if outcome.status is Status.UNKNOWN:
        raise OutcomeUnknown(outcome.reason_code, outcome.message)
    if outcome.status not in _RAN or outcome.result is None:
        raise Refused(outcome.status, outcome.reason_code, outcome.message, approval_id=outcome.approval_id)
    if outcome.ran is not None:
        return outcome.ran.report.stdout.text, outcome.ran.report.stderr.text
    shown = outcome.structured if isinstance(outcome.structured, dict) else {}
    return str(shown.get("stdout", "")), str(shown.get("stderr", ""))


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
    if outcome.status is not Status.FAILED:
        return ExecutionError(outcome.reason_code, str(outcome.facts.get("explanation")))
    number = outcome.facts.get("signal")
    if number is not None:
        return ExecutionError("signalled", str(number))
    status = outcome.facts.get("exit_status")
    return (raised(stderr) if status == 1 else None) or ExecutionError("SystemExit", str(status))


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
