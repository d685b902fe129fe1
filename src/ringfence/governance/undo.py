"""Going back: which calls can be undone, by which capability, and with which arguments. Nothing is done here.

A contract names the capability that undoes its calls. That one gets what its own schema asks for: from the result of
the call, which says what is now there, and otherwise from its arguments. Both have to be on record, whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ringfence.core import canonical
from ringfence.core.model import Contract, Json
from ringfence.core.record import dataclass

if TYPE_CHECKING:
    from ringfence.store import Reader

Schema = Callable[[str], Json | None]
"""The schema of a capability's arguments, as it is accepted; None where it is not known."""


@dataclass(frozen=True, slots=True)
class UndoStep:
    """One call that is to be undone."""

    call_id: str
    tool: str
    began: float
    compensate: str | None = None
    """The capability that undoes it; None where that cannot be done."""
    arguments: Json | None = None
    why_not: str = ""
    nothing: bool = False
    """It changed nothing, so that there is nothing to undo."""


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
    about = (ended or {}).get("call") or {}
    tool = str(about.get("tool") or "")

    def cannot(why: str, *, nothing: bool = False) -> UndoStep:
        return UndoStep(call_id, tool, began, why_not=why, nothing=nothing)

    if ended is None:
        return cannot("it is not on record, or has not ended")
    if ended.get("effect") == "none":
        return cannot("it changed nothing", nothing=True)
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
    return UndoStep(call_id, tool, began, name, given)


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
