"""Questions for people: what waits, exactly what each is about, and the answers."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from ringfence.console.gateway import ConsoleGateway
from ringfence.console.page import tenant_seen
from ringfence.core import canonical, invisible
from ringfence.core.aio import in_thread
from ringfence.core.errors import Refused
from ringfence.core.model import Json, Person
from ringfence.governance import question
from ringfence.governance.approvals import MAX_REASON, answer, objection, tenant_of
from ringfence.store import Approval, Conflict, Outline, RowNotFound

if TYPE_CHECKING:
    from ringfence.console.app import Visit

_AT_A_GLANCE = 6_000
"""Characters of what a call carries that the list shows. What is longer is answered on a page of its own, in full."""
_SHORT = 4 * _AT_A_GLANCE
"""Of a question that is longer than this, a list reads the beginning alone."""
_MAX_LISTED = 50
_MAX_SETTLED = 15
CHANGED = "It is not what you have seen any more. Read it again; nothing was answered."
_MAX_OPENED = 12
"""Arguments of a call that a form lets a person leave open; of more, the terminal does."""
_RISK = {"read": "low", "write": "medium", "high_risk": "high"}


def count(gateway: ConsoleGateway, person: Person) -> int:
    """How many questions wait that concern this person."""
    return len(gateway.store.reader().pending(tenant_seen(person)))


async def waiting(visit: Visit) -> Response:
    """The questions that wait, the oldest first, and the last that were answered."""
    return visit.page("approvals.html", await visit.in_thread(partial(_listed, visit.gateway, visit.person)))


def _listed(gateway: ConsoleGateway, person: Person) -> Json:
    reader = gateway.store.reader()
    open_ = reader.pending(tenant_seen(person))
    outlines = [reader.outline(each, question.LONG, _SHORT, _AT_A_GLANCE) for each in open_[:_MAX_LISTED]]
    settled = reader.settled_approvals(tenant_seen(person), _MAX_SETTLED)
    return {
        "here": "approvals",
        "cards": [_glance(each, person) for each in outlines if each is not None],
        "more": max(0, len(open_) - _MAX_LISTED),
        "settled": [{"approval": each, "subject": question.subject(each)} for each in settled],
    }


async def one(visit: Visit) -> Response:
    """One question in full, answered or not."""
    return await shown(visit, "")


async def shown(visit: Visit, problem: str, status: int = 200) -> Response:
    card = await visit.in_thread(partial(_whole, visit))
    if card is None:
        return visit.page("missing.html", {"here": "approvals", "what": "approval"}, 404)
    return visit.page("approval.html", {"here": "approvals", "card": card, "problem": problem}, status)


def _find(visit: Visit) -> Approval | None:
    found = visit.gateway.store.reader().approval(visit.named)
    return found if found is not None and visit.person.answers_for(tenant_of(found.principal)) else None


def _whole(visit: Visit) -> Json | None:
    found = _find(visit)
    return None if found is None else {**_card(found, visit.person, _sent(found)), "stands": _stands(found)}


def _stands(approval: Approval) -> Json | None:
    """How far an answer may stand for calls like it, and which arguments can be left open; None where none may."""
    limits = approval.terms.get("standing")
    if not isinstance(limits, dict) or approval.shape is None or approval.state != "pending":
        return None
    arguments = sorted(approval.shape.get("arguments") or {})
    return {**limits, "arguments": arguments} if len(arguments) <= _MAX_OPENED else None


def _glance(outline: Outline, person: Person) -> Json:
    """A card of the list: with all that is sent where that is short, else with its beginning and no way to answer."""
    approval, beginning = outline.approval, outline.beginning
    if beginning is not None:
        cut = invisible.quotable(beginning, lambda character: json.dumps(character)[1:-1])
        return _card(approval, person, [(question.LONG[0], cut[:_AT_A_GLANCE])], outline.size)
    sent = _sent(approval)
    size = sum(len(text) for _, text in sent)
    if size <= _AT_A_GLANCE:
        return _card(approval, person, sent)
    return _card(approval, person, [(label, text[:_AT_A_GLANCE]) for label, text in sent[:1]], size)


def _sent(approval: Approval) -> list[tuple[str, str]]:
    return [(label, invisible.json_text(value)) for label, value in question.sent(approval)]


def _card(approval: Approval, person: Person, sent: list[tuple[str, str]], cut_from: int = 0) -> Json:
    return {
        "approval": approval,
        "subject": question.subject(approval),
        "risk": _RISK.get(str(approval.summary.get("mode")), "unknown"),
        "lines": [*question.caller(approval), *question.terms(approval), *question.consequences(approval)],
        "sent": sent,
        "whole": not cut_from,
        "size": cut_from,
        "unshown": list(question.unshown(approval)),
        "objection": objection(approval, person),
        "escalated": question.escalated(approval),
        "open": approval.state == "pending",
        # Of the whole alone: only that can be answered.
        "stamp": "" if cut_from else _stamp(approval),
    }


def _stamp(approval: Approval) -> str:
    """What of a question its reader has seen: all but how it stands."""
    seen: list[Any] = [approval.id, approval.digest, approval.principal, approval.tool, approval.summary]
    return canonical.digest([*seen, approval.rule, list(approval.roles), approval.people, approval.expires_at])


def stamped(visit: Visit) -> tuple[Approval | None, str]:
    found = _find(visit)
    return found, "" if found is None else _stamp(found)


async def answered(visit: Visit) -> Response:
    """A person answers. What they have seen must be what is asked."""
    verdict = visit.given.get("answer")
    found, stamp = await visit.in_thread(partial(stamped, visit))
    if found is None or verdict not in ("approve", "deny"):
        return visit.page("missing.html", {"here": "approvals", "what": "approval"}, 404)
    if visit.given.get("stamp") != stamp:
        return await shown(visit, CHANGED, 409)
    reason = visit.gateway.clean(visit.given.get("reason", "").strip(), MAX_REASON)
    give = partial(
        answer,
        *(visit.gateway.store, found.id, visit.person),
        approve=verdict == "approve",
        seen=found,
        login=visit.visitor.login,
        reason=reason,
    )
    try:
        settled = await in_thread(give)
    except Refused as exc:
        visit.gateway.refused(exc.reason_code, None)
        return await shown(visit, f"Nothing was answered: {exc.message}", 403)
    except (Conflict, RowNotFound) as exc:
        return await shown(visit, f"Nothing was answered: {exc}", 409)
    return visit.back("approvals", _said(settled))


def _said(settled: Approval) -> str:
    if settled.state != "pending":
        return f"{settled.tool}: {settled.state}. ({settled.id})"
    agreed = sum(each.approve for each in settled.answers)
    return f"{settled.tool}: {agreed} of {settled.people} people approved it; it still waits. ({settled.id})"
