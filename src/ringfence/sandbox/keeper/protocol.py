"""The protocol between a keeper and its clients: the verbs as messages, errors, and the protocol's version.

The messages are derived from the signatures of the verbs. A keeper serves no client whose verbs differ from its own.

    client                                            keeper
    {"ringfence": "client", "protocol", "terms"}  →
                                                  ←   {"ringfence": "keeper", "pid"} or {"refused": {…}}
    {"id", "do": verb, "with": {…}}               →   with "deaf": only the final answer is wanted;
                                                      with "granted": to be asked before it begins late
    {"id", "end"}, chunks: a stream from the client
    {"id", "room"}: this much was consumed         ↔   {"id", "room"}
    {"id", "cancel"}                              →
    {"id", "go"}                                  →   the answer to "turn"; else the client cancels
                                                  ←   {"id", "turn"}: it had to wait; may it begin still?
                                                  ←   chunks, {"id", "item"}: output, values, pieces, changes
                                                  ←   {"id", "done"} or {"id", "error"}
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints

from ringfence.core.box import BoxReport, Shown
from ringfence.core.errors import OutcomeUnknown, Refused, RingfenceError, SetUpFailed, StoreError, Unavailable
from ringfence.core.model import Json, Recheck, Status
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass
from ringfence.core.sessions import CellReport, Failure, OnShown, Owner, StepReport, Tell
from ringfence.sandbox.keeper.codec import Attachments, CodecError, pack, place, shape_digest, unpack
from ringfence.sandbox.keeper.wire import WireError
from ringfence.sandbox.sessions.service import CONDUCT, Conduct, SessionService

_GENERATION = 4
"""Of the message format; the digest covers the types inside."""
_NOT_SENT = frozenset(("close", "granted"))
"""Concerns the client's own connection, or one call of the client's."""
MAX_AT_ONCE = 768
"""Requests of one client that work at the same time; its others wait in line, at the client."""
MAX_IN_SESSION = 16
"""Of these, in one session: its steps wait for each other anyway, and those of other sessions wait for none of them."""


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb, as its signature declares it."""

    name: str
    signature: inspect.Signature
    """Without `self`."""
    sends: Mapping[str, Any]
    """Types of the arguments that are sent."""
    returns: Any
    required: frozenset[str]
    """Those of the sent arguments that have no default."""
    conduct: Conduct
    tell: str | None = None
    """The parameter that receives output as it arrives."""
    shown: str | None = None
    """The parameter that receives shown values as they arrive."""
    stream: str | None = None
    """The parameter that is a stream of bytes."""
    recheck: str | None = None
    """The parameter that says whether it may still begin."""
    yields: Any = None
    """The item type, if the verb returns a stream."""

    @property
    def only_reads(self) -> bool:
        """Whether nothing was done if the answer is lost."""
        return not self.conduct.changes

    @property
    def can_be_repeated(self) -> bool:
        """Whether the caller sees nothing of the answer before it is complete."""
        return self.only_reads and self.tell is None

    @property
    def takes_turns(self) -> bool:
        """Whether it waits in line while many others of its client work."""
        return self.conduct.in_line

    def pack_arguments(self, given: Mapping[str, Any], attachments: Attachments) -> Json:
        return {name: pack(kind, given[name], attachments) for name, kind in self.sends.items() if name in given}

    def unpack_arguments(self, sent: Any, attachments: Sequence[bytes]) -> Json:
        """Raises CodecError."""
        if type(sent) is not dict or not self.required <= sent.keys() <= self.sends.keys():
            raise CodecError(f"{self.name}: not the arguments that it takes")
        return {name: unpack(self.sends[name], value, attachments) for name, value in sent.items()}


def derived(name: str, method: Any) -> Verb:
    """The verb that a method declares."""
    conduct = getattr(method, CONDUCT, None)
    if conduct is None:
        raise TypeError(f"{name}: a verb says by `@verb` what it changes, and whether it waits in line")
    hints = get_type_hints(method)
    returns = hints.pop("return")
    sends: dict[str, Any] = {}
    required: set[str] = set()
    special: dict[str, Any] = {}
    _, *parameters = inspect.signature(method).parameters.values()
    for parameter in parameters:
        kind = hints[parameter.name]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            sends |= get_type_hints(get_args(kind)[0])
        elif kind == Tell:
            special["tell"] = parameter.name
        elif kind == Recheck:
            special["recheck"] = parameter.name
        elif kind == OnShown:
            special["shown"] = parameter.name
        elif get_origin(kind) is AsyncIterator:
            special["stream"] = parameter.name
        else:
            sends[parameter.name] = kind
            required |= {parameter.name} if parameter.default is parameter.empty else set()
    if get_origin(returns) is AsyncIterator:
        special["yields"] = get_args(returns)[0]
        returns = type(None)
    return Verb(name, inspect.Signature(parameters), sends, returns, frozenset(required), conduct, **special)


VERBS: Mapping[str, Verb] = {
    name: derived(name, method)
    for name, method in vars(SessionService).items()
    if inspect.isfunction(method) and not name.startswith("_") and name not in _NOT_SENT
}
VALUE = Shown | Failure


def _protocol() -> str:
    every = (each for verb in VERBS.values() for each in (*verb.sends.values(), verb.returns, verb.yields))
    signatures = sorted(f"{verb.name}({sorted(verb.sends)})" for verb in VERBS.values())
    return f"{_GENERATION}-{shape_digest([*signatures, *every, VALUE, Owner])}"


PROTOCOL = _protocol()


# ── Errors ────────────────────────────────────────────────────────────────────────────────────────


def error_to_json(problem: Exception) -> Json:
    stated = {"nothing_begun": True} if isinstance(problem, RingfenceError) and problem.nothing_begun else {}
    if isinstance(problem, Refused):
        about = {"status": problem.status.value, "reason_code": problem.reason_code}
        return {"kind": "refused", **about, "message": problem.message, **stated}
    if isinstance(problem, Unavailable | OutcomeUnknown):
        kind = "unavailable" if isinstance(problem, Unavailable) else "unknown"
        return {"kind": kind, "reason_code": problem.reason_code, "message": problem.message, **stated}
    kind = "store" if isinstance(problem, StoreError) else "value"
    return {"kind": kind, "message": str(problem)}


def error_from_json(encoded: Any) -> RingfenceError | ValueError:
    """The inverse of `error_to_json`. Raises CodecError."""
    found = _error(encoded)
    if isinstance(found, RingfenceError):
        found.nothing_begun = encoded.get("nothing_begun") is True
    return found


def _error(encoded: Any) -> RingfenceError | ValueError:
    try:
        kind = encoded["kind"]
        message = str(encoded["message"])
        if kind == "refused" and encoded["reason_code"] == SetUpFailed.REASON:
            return SetUpFailed(message)
        if kind == "refused":
            return Refused(Status(encoded["status"]), str(encoded["reason_code"]), message)
        if kind == "unavailable":
            return Unavailable(str(encoded["reason_code"]), message)
        if kind == "unknown":
            return OutcomeUnknown(str(encoded["reason_code"]), message)
        return StoreError(message) if kind == "store" else ValueError(message)
    except (TypeError, KeyError, ValueError):
        raise CodecError(f"{quoted(encoded)} is no error") from None


# ── What is sent once ─────────────────────────────────────────────────────────────────────────────
#
# The isolation of a session is large and its steps are short, so a connection carries it once. Both ends follow the
# same rule: a client that gets "as before" remembers what that was.


AS_BEFORE = "as before"
"""In place of the isolation, if the session's last step had the same."""
MAX_REMEMBERED = 256
"""The keeper relies on its client to remember this many sessions."""
_SESSION = place(StepReport, "session")
_CELL = place(StepReport, "cell")
_REPORT = place(CellReport, "report")
_ISOLATION = place(BoxReport, "isolation")


class IsolationSent:
    """The keeper's side: what it has sent to one client."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}

    def shorten(self, done: Any, step: StepReport) -> None:
        """Shorten the message of a step before it is sent."""
        isolation = step.cell.report.isolation
        if self._last.get(step.session) is isolation:
            done[_CELL][_REPORT][_ISOLATION] = AS_BEFORE
            return
        if len(self._last) >= MAX_REMEMBERED:
            self._last.clear()
        self._last[step.session] = isolation


class IsolationReceived:
    """The client's side: what it has received from its keeper."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}

    def lengthen(self, done: Any) -> None:
        """Restore the message of a step to its full form. Raises WireError."""
        try:
            session = done[_SESSION]
            report = done[_CELL][_REPORT]
            if report[_ISOLATION] == AS_BEFORE:
                report[_ISOLATION] = self._last[session]
                return
            self._last.pop(session, None)
            self._last[session] = report[_ISOLATION]
        except (TypeError, LookupError):
            raise WireError("the answer to a step is malformed") from None
        if len(self._last) > 2 * MAX_REMEMBERED:
            del self._last[next(iter(self._last))]  # the keeper forgot it long ago
