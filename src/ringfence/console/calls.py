"""Calls: those that run, those on record, and the life of one."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import urlencode

from starlette.responses import Response

from ringfence.audit.explain import stops_of_call
from ringfence.console.gateway import ConsoleGateway
from ringfence.console.page import tenant_seen
from ringfence.core import canonical
from ringfence.core.aio import in_thread
from ringfence.core.canonical import object_at
from ringfence.core.model import Json, Person
from ringfence.governance import question
from ringfence.governance.approvals import tenant_of
from ringfence.store import Conflict, Reader, Record
from ringfence.store.history import effect_of
from ringfence.store.rows import SETTLED, Part
from ringfence.store.searching import CallSearch

if TYPE_CHECKING:
    from ringfence.console.app import Visit

_A_PAGE = 50
_JUST_ENDED = 20
_MAX_RUNNING = 200
_READING_SECONDS = 1.0
_FIELDS = ("tool", "agent", "status", "effect", "since", "until", "q")
_EFFECTS = ["confirmed", "none", "settled", "unknown"]
_PLACE = ("v", "chain", "seq", "prev", "at", "kind", "call_id")
_LONGEST_RECORD = 100_000
_LONGEST_STORY = 1_000_000
"""Characters of all records of a call that its page shows."""
_TOO_LONG: Json = {"…": "too long for a page: ringfence audit show"}


# ── Those that run ────────────────────────────────────────────────────────────────────────────────


async def live(visit: Visit) -> Response:
    return visit.page("live.html", {"here": "live", **await in_thread(partial(_live, visit.gateway, visit.person))})


def _live(gateway: ConsoleGateway, person: Person) -> Json:
    reader = gateway.store.reader()
    started = (_started(reader, call_id, person) for call_id in reversed(reader.running()))
    running = list(islice(filter(None, started), _MAX_RUNNING))
    ready = gateway.history.catch_up(_READING_SECONDS)
    asked = (reader.approval(ident, brief=True) for ident in reader.pending(tenant_seen(person))[:_MAX_RUNNING])
    return {
        "running": running,
        "asked": [{"approval": each, "escalated": question.escalated(each)} for each in asked if each is not None],
        "ended": gateway.history.find(CallSearch(tenant=tenant_seen(person)), _JUST_ENDED) if ready else [],
    }


def _started(reader: Reader, call_id: str, person: Person) -> Json | None:
    record = next(reader.records(call_id=call_id, kind="started", limit=1), None)
    if record is None:
        return None
    call = object_at(record.body, "call")
    principal = object_at(call, "principal")
    if not person.answers_for(str(principal.get("tenant"))):
        return None
    return {"call_id": call_id, "at": record.at, "tool": call.get("tool"), "agent": principal.get("agent")}


# ── Those on record ───────────────────────────────────────────────────────────────────────────────


async def history(visit: Visit) -> Response:
    """Calls that ended, the newest first, by what a person looks for."""
    given = {name: visit.given.get(name, "").strip()[:200] for name in _FIELDS}
    found = await in_thread(partial(_found, visit.gateway, visit.person, given, visit.given))
    return visit.page("history.html", {"here": "history", "given": given, **found})


def _found(gateway: ConsoleGateway, person: Person, given: Mapping[str, str], address: Mapping[str, str]) -> Json:
    whole = gateway.history.catch_up(_READING_SECONDS)
    after = _place(address.get("after"))
    search = CallSearch(
        tenant=tenant_seen(person),
        tool=given["tool"] or None,
        agent=given["agent"] or None,
        status=given["status"] or None,
        effect=given["effect"] or None,
        since=_time(given["since"]),
        until=_time(given["until"]),
        words=given["q"],
        before=_place(address.get("before")),
        after=after,
    )
    rows = gateway.history.find(search, _A_PAGE + 1)
    more = len(rows) > _A_PAGE
    # Of the newer ones, the one too many is the newest.
    rows = (rows[1:] if after is not None else rows[:_A_PAGE]) if more else rows
    kept = {name: value for name, value in given.items() if value}
    older = rows and (more if after is None else True)
    newer = rows and (more if after is not None else search.before is not None)
    return {
        "rows": rows,
        "reading": not whole,
        "choices": {**gateway.history.choices(tenant_seen(person)), "effect": _EFFECTS},
        "unsettled": gateway.history.unsettled(tenant_seen(person)),
        "filtered": bool(kept),
        "older": urlencode({**kept, "before": rows[-1].id}) if older else None,
        "newer": urlencode({**kept, "after": rows[0].id}) if newer else None,
    }


def _place(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else None


def _time(text: str) -> float | None:
    """A moment as a browser's field gives it, in UTC."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() if text else None
    except (ValueError, OverflowError):
        return None


# ── One ───────────────────────────────────────────────────────────────────────────────────────────


async def one(visit: Visit) -> Response:
    """The life of a call: how it went, step by step, and every record of it."""
    return await _told(visit, "")


async def _told(visit: Visit, problem: str, status: int = 200) -> Response:
    found = await visit.in_thread(partial(_life, visit.gateway, visit.person, visit.named))
    if found is None:
        return visit.page("missing.html", {"here": "history", "what": "call"}, 404)
    more = {"may_settle": visit.person.is_admin, "problem": problem}
    return visit.page("call.html", {"here": "history", **found, **more}, status)


async def settle(visit: Visit) -> Response:
    """A person settles a call of unknown effect: it took effect, or it did not."""
    found = await visit.in_thread(partial(_life, visit.gateway, visit.person, visit.named))
    happened = {"yes": True, "no": False}.get(visit.given.get("happened", ""))
    if found is None or happened is None:
        return visit.page("missing.html", {"here": "history", "what": "call"}, 404)
    if not visit.person.is_admin:
        return visit.not_entitled("settle calls whose outcome is unknown")
    if not found["unsettled"]:
        return await _told(visit, "It is known already what became of it; nothing was recorded.", 409)
    reason = visit.reason()
    if not reason:
        return await _told(visit, "Say how you know; nothing was recorded.", 400)
    said = {"person": visit.person.name, "login": visit.visitor.login.as_fact(), "reason": reason}
    try:
        freed = await visit.gateway.store.write(lambda tx: tx.settle_unknown(visit.named, happened, said), durable=True)
    except Conflict as exc:
        return await _told(visit, f"Nothing was recorded: {exc}.", 409)
    key = "" if not freed else " Its key stays taken." if happened else " Its key is free: the call can be made again."
    return visit.back(f"calls/{visit.named}", f"Settled: it {'took' if happened else 'did not take'} effect.{key}")


def _life(gateway: ConsoleGateway, person: Person, call_id: str) -> Json | None:
    reader = gateway.store.reader()
    story = [(record, body) for record in reader.story(call_id) if (body := _body(record)) is not None]
    story.sort(key=lambda each: each[0].at)
    if not any(record.call_id == call_id and _concerns(body, person) for record, body in story):
        return None
    title, stops = stops_of_call([body for _, body in story], gateway.public_key())
    ended = next((body for record, body in story if record.kind == "finished" and record.call_id == call_id), {})
    facts = object_at(ended, "facts")
    return {
        "call_id": call_id,
        "title": title,
        "stops": [(label, lines) for label, lines in stops if lines],
        "status": ended.get("status", "running"),
        "reason": ended.get("reason_code", ""),
        "records": _fitting(story),
        "facts": facts,
        "unsettled": effect_of(ended) == "unknown" and not any(each.kind == SETTLED for each, _ in story),
        "isolation": object_at(facts, "isolation", "protections"),
        "rules": object_at(ended or story[-1][1], "decision").get("rules") or [],
        "kept": _kept(reader, call_id),
    }


def _body(record: Record) -> Json | None:
    try:
        return record.body
    except canonical.NotCanonical:
        return None


def _concerns(body: Json, person: Person) -> bool:
    """Whether a record is of a call of this person's tenant."""
    principal = object_at(body, "call").get("principal")
    if isinstance(principal, dict):
        return person.answers_for(str(principal.get("tenant")))
    asked = body.get("principal")  # of a question: by its key
    return isinstance(asked, str) and person.answers_for(tenant_of(asked))


def _fitting(story: list[tuple[Record, Json]]) -> list[Json]:
    """All its records, and the bodies of as many as a page holds."""
    shown, left = [], _LONGEST_STORY
    for record, body in story:
        fits = len(record.text) <= min(_LONGEST_RECORD, left)
        left -= len(record.text) if fits else 0
        shown.append(_shown(record, body if fits else _TOO_LONG, story[0][0].at))
    return shown


def _shown(record: Record, body: Json, began: float) -> Json:
    return {
        "kind": record.kind.replace("_", " "),
        "at": record.at,
        "after_ms": (record.at - began) * 1000.0,
        "chain": record.chain,
        "seq": record.seq,
        "hash": record.hash,
        "body": {name: value for name, value in body.items() if name not in _PLACE},
    }


def _kept(reader: Reader, call_id: str) -> list[tuple[str, Any, bool | None]]:
    """What is kept of its payloads, and whether that is what was recorded."""
    out = []
    for part in get_args(Part):
        payload, right = reader.kept(call_id, part)
        if payload is not None and isinstance(payload.body, bytes) and len(payload.body) <= _LONGEST_RECORD:
            try:
                out.append((part, canonical.loads(payload.body), right))
            except canonical.NotCanonical:
                out.append((part, "it cannot be read", False))
    return out
