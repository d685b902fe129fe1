"""Every error that crosses one of our module borders, classified by who must act.

RingfenceError
├── ConfigError      the operator: the file is wrong; carries every problem with its place
├── Refused          the caller: this call may not run as it stands; becomes an Outcome
│   ├── UpstreamFailed   the server answered with an error of its own
│   ├── Denied           the operator or a person: policy or an approval stands against it
│   ├── NotFound         the caller: nothing of theirs has that name
│   │   └── SandboxNotFound  the caller: no sandbox of theirs has that id, and there may never have been one
│   ├── SandboxStopped   the caller: the sandbox has ended; make another
│   └── SetUpFailed      the caller: their set-up code failed in the sandbox, so there is none
├── Unavailable      the operator or time: something needed is not there; it never ran, where that is stated
│   └── QuotaExceeded    time, or the operator: a limit is used up; it never ran, and may run later
├── OutcomeUnknown   a person: it may have run; the answer was lost, or proves nothing
│   └── TimedOut         the caller: they waited no longer; what they waited for may go on
├── StoreError       the operator: the record could not be written, so nothing ran on it
└── TamperError      the auditor: the log does not verify
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from ringfence.core.model import Status
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass

_LONGEST = 3900
"""The most characters that are quoted of the output of a caller's code."""


class RingfenceError(Exception):
    """The base of all errors of Ringfence."""

    reason_code: str = ""
    """One of `reasons.REASONS`; empty where the kind of error says it all."""
    nothing_begun: bool = False
    """True only where the raiser can prove that nothing was begun; False means unknown."""

    @property
    def remedy(self) -> str | None:
        """What to do about it, and who must, by its reason code; the message says what happened."""
        from ringfence.core.reasons import REASONS  # noqa: PLC0415 - few errors are ever asked

        found = REASONS.get(self.reason_code)
        return None if found is None else f"{found.actor}: {found.remedy}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a file."""

    file: str
    line: int
    column: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.text}"

    def __lt__(self, other: Problem) -> bool:
        return (self.file, self.line, self.column, self.text) < (other.file, other.line, other.column, other.text)


class ConfigError(RingfenceError):
    """The configuration cannot be used. Lists all problems at once."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(p) for p in problems))
        self.problems = problems


class Refused(RingfenceError):
    """A step of the pipeline refuses the call; the pipeline turns it into the Outcome it names."""

    def __init__(self, status: Status, reason_code: str, message: str, *, approval_id: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason_code = reason_code
        self.message = message
        self.approval_id = approval_id


class UpstreamFailed(Refused):
    """The server answered the request with a JSON-RPC error."""

    def __init__(self, reason_code: str, code: int, message: str, data: Any = None) -> None:
        super().__init__(Status.FAILED, reason_code, message)
        self.code = code
        self.data = data


class Denied(Refused):
    """Policy or a person refused the call, or a person has not answered yet."""


class NotFound(Refused):
    """A file, process, snapshot or volume that is not there, or not the caller's."""


class SandboxNotFound(NotFound):
    """No sandbox of the caller's has this id."""


class SandboxStopped(Refused):
    """The sandbox has ended: its message says when and why."""


class SetUpFailed(Refused):
    """Set-up code failed in an interpreter of a sandbox: nothing else ran there. The message ends with its output."""

    REASON = "setup_failed"
    _BEGINNING = "the set-up code failed, and nothing of it is left:\n"

    def __init__(self, traceback: str) -> None:
        self.traceback = traceback.removeprefix(self._BEGINNING)
        super().__init__(Status.FAILED, self.REASON, self._BEGINNING + self.traceback[-_LONGEST:])


class Unavailable(RingfenceError):
    """Something needed is missing or down. Whether that was before anything was begun, `nothing_begun` says."""

    def __init__(self, reason_code: str, message: str) -> None:
        super().__init__(message)
        self.reason_code = reason_code
        self.message = message


class QuotaExceeded(Unavailable):
    """Boxes, memory, disk or places in a queue are used up; nothing was started. Its message names which."""


class OutcomeUnknown(RingfenceError):
    """The request was sent, and no answer came back that proves its outcome."""

    def __init__(self, reason_code: str, message: str, *, answered: int | None = None) -> None:
        """`answered` is the HTTP status, where that is all that the server said."""
        super().__init__(message)
        self.reason_code = reason_code
        self.message = message
        self.answered = answered


class TimedOut(OutcomeUnknown, TimeoutError):
    """The caller's own clock ran out before an answer came."""


class WorkProgress:
    """Of work that may have an effect: our errors that stop it before `begin` state that nothing was begun, and those
    that stop it afterwards state nothing, whatever the part of it that failed said of itself.

        with WorkProgress() as progress:
            check(…)
            progress.begin()
            change(…)
    """

    def __init__(self, *, begun: bool = False) -> None:
        self.begun = begun

    def begin(self) -> None:
        """From now on something may have changed."""
        self.begun = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> None:
        if isinstance(problem, RingfenceError):
            problem.nothing_begun = not self.begun


@contextmanager
def beginning(what: str, begun: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """An unforeseen error in here (no descriptors left, for example) becomes Unavailable, because nothing has run;
    once it has `begun`, OutcomeUnknown. A ValueError speaks of what was asked for, so it passes until then."""
    try:
        yield
    except RingfenceError as exc:
        exc.nothing_begun = not begun()
        raise
    except Exception as exc:
        if begun():
            raise OutcomeUnknown("box_failed", f"{what} failed after it had begun: {exc!r}") from exc
        if isinstance(exc, ValueError):
            raise
        problem = Unavailable("no_box", f"{what} could not be begun: {exc}")
        problem.nothing_begun = True
        raise problem from exc


class StoreError(RingfenceError):
    """The state could not be read or written."""


class TamperError(RingfenceError):
    """An audit log or export is not what was written."""


def unknown_session(id_: str) -> Refused:
    """The answer for a session that does not exist, and for one that the caller has no access to."""
    text = f"there is no session {quoted(id_)}; list_sessions, or `ringfence box list`, shows which there are"
    return Refused(Status.VALIDATION_FAILURE, "unknown_session", text)
