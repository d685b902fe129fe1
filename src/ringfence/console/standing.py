"""Approvals that stand: what people approved beforehand, how much of it is left, and the way to make and end one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from starlette.responses import Response

from ringfence.console import approvals
from ringfence.console.page import tenant_seen
from ringfence.core import invisible
from ringfence.core.aio import in_thread
from ringfence.core.errors import Refused
from ringfence.core.model import Json
from ringfence.governance.approvals import allow as give
from ringfence.governance.approvals import revoke as withdraw
from ringfence.governance.standing import Wish, offered, words
from ringfence.store import Conflict, RowNotFound, StandingApproval

if TYPE_CHECKING:
    from ringfence.console.app import Visit

_MAX_LISTED = 200
_SHORT = 300
"""Characters of an argument that a list shows."""


async def every(visit: Visit) -> Response:
    """Those that are good still, that which ends first on top."""
    return await _shown(visit, "")


async def _shown(visit: Visit, problem: str, status: int = 200) -> Response:
    found = await visit.in_thread(partial(_listed, visit))
    may = visit.person.may_answer(())
    return visit.page("standing.html", {"here": "approvals", **found, "may_revoke": may, "problem": problem}, status)


def _listed(visit: Visit) -> Json:
    found = sorted(visit.gateway.store.reader().standing(tenant_seen(visit.person)), key=lambda each: each.expires_at)
    rows = [{"standing": each, "arguments": _arguments(each)} for each in found[:_MAX_LISTED]]
    return {"rows": rows, "more": len(found) - len(rows)}


def _arguments(found: StandingApproval) -> list[tuple[str, str]]:
    return list(words(found.shape, lambda value: _cut(invisible.json_text(value, indent=None))))


def _cut(text: str) -> str:
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}…"


async def revoke(visit: Visit) -> Response:
    """From now on it answers nothing; on record, with who and how they had logged in."""
    if not visit.person.may_answer(()):
        visit.gateway.refused("not_entitled", None)
        return await _shown(visit, "You read here, and answer nothing.", 403)
    end = partial(withdraw, visit.gateway.store, visit.named, visit.person, login=visit.visitor.login)
    try:
        ended = await in_thread(end)
    except RowNotFound:
        return visit.page("missing.html", {"here": "approvals", "what": "standing approval"}, 404)
    except Conflict as exc:
        return await _shown(visit, f"Nothing was revoked: {exc}", 409)
    return visit.back("standing", f"Revoked: {ended.tool}. What it answered and no call has used is void. ({ended.id})")


async def allow(visit: Visit) -> Response:
    """Approve the question that a person has seen, and others like it."""
    found, stamp = await visit.in_thread(partial(approvals.stamped, visit))
    if found is None:
        return visit.page("missing.html", {"here": "approvals", "what": "approval"}, 404)
    if visit.given.get("stamp") != stamp:
        return await approvals.shown(visit, approvals.CHANGED, 409)
    given = visit.given
    open_ = tuple(name.removeprefix("any:") for name in given if name.startswith("any:"))
    like = {name.removeprefix("like:"): text for name, text in given.items() if name.startswith("like:") and text}
    try:
        wish = Wish(int(given.get("times", "")), float(given.get("minutes", "")) * 60, open_, like)
        offer = offered(found, wish)
        make = partial(give, visit.gateway.store, found, visit.person, offer, login=visit.visitor.login)
        made = await in_thread(partial(make, reason=visit.reason()))
    except ValueError:
        return await approvals.shown(visit, "Say how many calls, and for how many minutes; nothing was approved.", 400)
    except Refused as exc:
        visit.gateway.refused(exc.reason_code, None)
        return await approvals.shown(visit, f"Nothing was approved: {exc.message}", 403)
    except (Conflict, RowNotFound) as exc:
        return await approvals.shown(visit, f"Nothing was approved: {exc}", 409)
    return visit.back("standing", f"{made.tool}: approved, and {made.times} more calls like it. ({made.id})")
