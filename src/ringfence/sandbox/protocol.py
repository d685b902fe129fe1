"""What a keeper and its clients say to each other: the verbs as messages, errors, and which protocol it is.

The messages follow from the verbs' signatures. A keeper and a client that do not have the same ones do not talk.

    client                                            keeper
    {"ringfence": "client", "protocol", "terms"}  →
                                                  ←   {"ringfence": "keeper", "pid"} or {"refused": {…}}
    {"id", "do": verb, "with": {…}}               →   with "deaf": nobody listens before the end
    {"id", "end"}, chunks: a stream of the client's
    {"id", "room"}: so much of a stream was taken      {"id", "room"}
    {"id", "cancel"}                              →
                                                  ←   chunks, {"id", "item"}: output, values, pieces, changes
                                                  ←   {"id", "done"} or {"id", "error"}
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from ringfence.errors import OutcomeUnknown, Refused, RingfenceError, SetUpFailed, StoreError, Unavailable
from ringfence.model import Json, Status
from ringfence.sandbox.codec import Attachments, CodecError, pack, shape_digest, unpack
from ringfence.sandbox.verbs import Keeping, OnShown
from ringfence.sessions import Failure, Owner, Shown, Tell

_GENERATION = 3
"""Of the messages themselves; what is in them is in the digest."""
_NOT_SENT = ("self",)
_HERE = frozenset(("close",))
"""What concerns the way to a keeper, and never goes over it."""
_READING = {
    *("info", "list", "past", "state_of", "processes", "logs", "follow", "wait"),
    *("read", "entries", "stat", "pack", "watch", "snapshots", "volumes"),
    *("wishes", "lend", "settle"),  # they change nothing that outlives a keeper
}


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb, as its signature says."""

    name: str
    takes: Mapping[str, Any]
    """Types of the arguments that are sent."""
    gives: Any
    needs: frozenset[str]
    """Those that cannot be left out."""
    tell: str | None = None
    """The argument that gets output as it comes."""
    shown: str | None = None
    """The argument that gets values as they come."""
    stream: str | None = None
    """The argument that is a stream of bytes."""
    pours: Any = None
    """Where it gives a stream, what that is made of."""

    @property
    def only_reads(self) -> bool:
        """Where an answer is lost, nothing was done."""
        return self.name in _READING

    @property
    def can_be_repeated(self) -> bool:
        """Nobody has heard anything of the answer before it is there."""
        return self.only_reads and self.tell is None

    def pack_arguments(self, given: Mapping[str, Any], attachments: Attachments) -> Json:
        return {name: pack(self.takes[name], value, attachments) for name, value in given.items()}

    def unpack_arguments(self, sent: Any, attachments: Sequence[bytes]) -> Json:
        """Raises CodecError."""
        if type(sent) is not dict or not self.needs <= sent.keys() <= self.takes.keys():
            raise CodecError(f"{self.name}: not the arguments that it takes")
        return {name: unpack(self.takes[name], value, attachments) for name, value in sent.items()}


def _verb(name: str, method: Any) -> Verb:
    hints = get_type_hints(method)
    gives = hints.pop("return")
    takes: dict[str, Any] = {}
    needs: set[str] = set()
    places: dict[str, str] = {}
    for parameter in inspect.signature(method).parameters.values():
        if parameter.name in _NOT_SENT:
            continue
        kind = hints[parameter.name]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            takes |= get_type_hints(get_args(kind)[0])
        elif kind == Tell:
            places["tell"] = parameter.name
        elif kind == OnShown:
            places["shown"] = parameter.name
        elif get_origin(kind) is AsyncIterator:
            places["stream"] = parameter.name
        else:
            takes[parameter.name] = kind
            needs |= {parameter.name} if parameter.default is parameter.empty else set()
    if get_origin(gives) is AsyncIterator:
        return Verb(name, takes, type(None), frozenset(needs), pours=get_args(gives)[0], **places)
    return Verb(name, takes, gives, frozenset(needs), **places)


VERBS: Mapping[str, Verb] = {
    name: _verb(name, method)
    for name, method in vars(Keeping).items()
    if inspect.isfunction(method) and not name.startswith("_") and name not in _HERE
}
VALUE = Shown | Failure


def _protocol() -> str:
    every = (each for verb in VERBS.values() for each in (*verb.takes.values(), verb.gives, verb.pours))
    signatures = sorted(f"{verb.name}({sorted(verb.takes)})" for verb in VERBS.values())
    return f"{_GENERATION}-{shape_digest([*signatures, *every, VALUE, Owner])}"


PROTOCOL = _protocol()


# ── Errors ────────────────────────────────────────────────────────────────────────────────────────


def error_as_json(problem: Exception) -> Json:
    if isinstance(problem, Refused):
        about = {"status": problem.status.value, "reason_code": problem.reason_code}
        return {"kind": "refused", **about, "message": problem.message}
    if isinstance(problem, Unavailable | OutcomeUnknown):
        kind = "unavailable" if isinstance(problem, Unavailable) else "unknown"
        return {"kind": kind, "reason_code": problem.reason_code, "message": problem.message}
    kind = "store" if isinstance(problem, StoreError) else "value"
    return {"kind": kind, "message": str(problem)}


def error_from_json(said: Any) -> RingfenceError | ValueError:
    """What `error_as_json` was given. Raises CodecError."""
    try:
        kind, message = said["kind"], str(said["message"])
        if kind == "refused" and said["reason_code"] == SetUpFailed.REASON:
            return SetUpFailed(message)
        if kind == "refused":
            return Refused(Status(said["status"]), str(said["reason_code"]), message)
        if kind == "unavailable":
            return Unavailable(str(said["reason_code"]), message)
        if kind == "unknown":
            return OutcomeUnknown(str(said["reason_code"]), message)
        return StoreError(message) if kind == "store" else ValueError(message)
    except (TypeError, KeyError, ValueError):
        raise CodecError(f"{str(said)[:80]!r} is no error") from None
