"""Going back: which calls can be undone, by which capability, and with which arguments. Nothing is done here.

A contract names the capability that undoes its calls. That one gets what its own schema asks for: from the result of
the call, which says what is now there, and otherwise from its arguments. Both have to be on record, whole.

Each try is on record, too, beside the call that it was to undo: so what was undone is known, whoever did it and through
whichever gateway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ringfence.core import canonical
from ringfence.core.canonical import object_at
from ringfence.core.model import Contract, Json, Status
from ringfence.core.record import dataclass
from ringfence.store.rows import SETTLED

if TYPE_CHECKING:
    from ringfence.store import Reader

Schema = Callable[[str], Json | None]
"""The schema of a capability's arguments, as it is accepted; None where it is not known."""
TRIED = "undo_tried"
"""The record of a try. It belongs to the call that was to be undone."""
_MADE = frozenset({Status.SUCCESS, Status.FAILED, Status.TIMEOUT, Status.KILLED, Status.UNKNOWN})
"""How a try ends that may have reached a server. What was refused before is no try."""


@dataclass(frozen=True, slots=True)
class UndoGroup:
    """Calls that have all of this in common. What is left out matches."""

    session: str | None = None
    """Of a client."""
    agent: str | None = None
    since: float | None = None
    """When they ended."""
    until: float | None = None

    def has(self, body: Json) -> bool:
        """Whether a call is one of them, but for its time. The gateway's own calls are nobody's to undo."""
        call = object_at(body, "call")
        principal = object_at(call, "principal")
        return (
            principal.get("kind") != "system"
            and (self.session is None or call.get("session") == self.session)
            and (self.agent is None or principal.get("agent") == self.agent)
        )


@dataclass(frozen=True, slots=True)
class UndoStep:
    """One call that is to be undone."""

    call_id: str
    tool: str
    agent: str
    began: float
    compensate: str | None = None
    """The capability that undoes it; None where that cannot be done."""
    arguments: Json | None = None
    why_not: str = ""
    nothing: bool = False
    """There is nothing to undo: it changed nothing, or was undone."""
    failures: int = 0
    """How often undoing it was tried, and failed."""

    @property
    def key(self) -> str:
        """The idempotency key of the next try: no two go on at once, and one that failed is not repeated as it was."""
        return f"undo:{self.call_id}" + (f":{self.failures}" if self.failures else "")


def calls_of(reader: Reader, group: UndoGroup) -> Iterator[str]:
    """The calls of a group that changed something or may have, but for those that undid others."""
    for call_id in reader.running():
        started = next(reader.records(call_id=call_id, kind="started", since=group.since, until=group.until), None)
        if started is not None and started.body.get("effect_possible") and group.has(started.body):
            yield call_id
    undoing = {str(record.body.get("by")) for record in reader.records(kind=TRIED, since=group.since)}
    for record in reader.records(kind="finished", since=group.since, until=group.until, newest_first=True):
        changed = record.body.get("effect") != "none" and record.body.get("replayed_from") is None
        if changed and record.call_id not in undoing and group.has(record.body):
            yield str(record.call_id)


def tried(by: object, status: Status, person: str) -> Json | None:
    """What goes on record of a try: the call that was made for it, if it is known, how that ended, and who wanted
    it."""
    return {"by": by, "status": str(status), "person": person} if isinstance(by, str) and status in _MADE else None


def plan(reader: Reader, contracts: Mapping[str, Contract], schema: Schema, call_ids: Iterable[str]) -> list[UndoStep]:
    """What undoes these calls, the last first."""
    steps = [_step(reader, contracts, schema, each) for each in dict.fromkeys(call_ids)]
    return sorted(steps, key=lambda step: step.began, reverse=True)


def fitting(schema: Json, *sources: Mapping[str, Any]) -> Json:
    """Of these values, those that a schema has a place for; the first source that has one wins."""
    known = schema.get("properties")
    out: Json = {}
    for name in known if isinstance(known, dict) else ():
        found = next((source for source in sources if name in source), None)
        if found is not None:
            out[name] = found[name]
    return out


def _step(reader: Reader, contracts: Mapping[str, Contract], schema: Schema, call_id: str) -> UndoStep:
    story = list(reader.records(call_id=call_id))
    began = min((record.at for record in story), default=0.0)
    ended = next((record.body for record in story if record.kind == "finished"), None)
    about = object_at(ended or (story[0].body if story else {}), "call")
    tool = str(about.get("tool") or "")
    agent = str(object_at(about, "principal").get("agent") or "")
    tries = [record.body for record in story if record.kind == TRIED]

    def cannot(why: str, *, nothing: bool = False) -> UndoStep:
        return UndoStep(call_id, tool, agent, began, why_not=why, nothing=nothing)

    if ended is None:
        return cannot("it is not on record, or has not ended")
    if ended.get("effect") == "none":
        return cannot("it changed nothing", nothing=True)
    if ended.get("replayed_from") is not None:
        return cannot(f"it did nothing itself; its answer is that of {ended['replayed_from']}", nothing=True)
    if (by := next((str(each.get("by")) for each in tries if _took_effect(reader, each)), None)) is not None:
        return cannot(f"it was undone by {by}", nothing=True)
    if ended.get("status") != "success":
        return cannot(
            f"it ended as {ended.get('status')}, and what it changed is not known; look, and settle it by hand"
        )
    contract = contracts.get(tool)
    name = None if contract is None else contract.effects.compensate
    if name is None:
        return cannot("its contract names nothing that undoes it (effects.compensate)")
    wanted = schema(name)
    if wanted is None:
        return cannot(f"no definition of {name} is accepted: ringfence check --accept")
    kept = [_kept(reader, ended, part) for part in ("result", "arguments")]
    if None in kept:
        return cannot("what it was called with, or gave back, is not on record whole (record: full), or was erased")
    result, arguments = kept
    arguments = (arguments or {}).get("arguments", arguments) if ended.get("carried") else arguments
    structured = (result or {}).get("structuredContent")
    given = fitting(wanted, structured if isinstance(structured, dict) else {}, arguments or {})
    missing = [str(each) for each in wanted.get("required") or () if each not in given]
    if missing:
        return cannot(f"{name} needs {', '.join(missing)}, which neither its result nor its arguments have")
    failures = sum(each.get("status") == Status.FAILED for each in tries)
    return UndoStep(call_id, tool, agent, began, name, given, failures=failures)


def _took_effect(reader: Reader, attempt: Json) -> bool:
    """Whether a try undid the call: by how it ended or, where that is not known, by what a person found out."""
    if attempt.get("status") == Status.SUCCESS:
        return True
    found = reader.records(call_id=str(attempt.get("by")), kind=SETTLED)
    return any(record.body.get("happened") is True for record in found)


def _kept(reader: Reader, ended: Json, part: Any) -> Json | None:
    """A payload, where the record proves that it is whole and unchanged."""
    told = ended.get(part)
    found = reader.payload(str(ended["call"]["id"]), part)
    if found is None or not isinstance(told, dict) or told.get("kept") is None:
        return None
    if canonical.salted_bytes(found.body, found.salt) != told["kept"]:
        return None
    if part == "result" and told.get("digest") != told["kept"]:
        return None  # something was redacted
    if part == "arguments" and not ended.get("carried") and told.get("digest") != told["kept"]:
        return None
    value = canonical.loads(found.body)
    return value if isinstance(value, dict) else None
