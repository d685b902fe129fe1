"""The console: which page a request gets, and that only people get any.

No page changes anything; forms do. A form is taken only from a page of ours: by its origin, and by a token of the
login that no other page knows.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from ringfence.console import approvals, calls, forms, isolation, overview, servers, sessions, standing
from ringfence.console.gateway import ConsoleGateway
from ringfence.console.live import Live
from ringfence.console.logins import LASTS_SECONDS, Logins, Visitor
from ringfence.console.page import HEADERS, Unmade, page, static
from ringfence.core.errors import RingfenceError
from ringfence.core.model import ADMIN, GuardedText, Json, Person
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass
from ringfence.governance.approvals import MAX_REASON
from ringfence.identity import NotAdmitted
from ringfence.identity.peers import PEER

log = logging.getLogger("ringfence.console")
T = TypeVar("T")

_NAV = (
    ("approvals", "Approvals"),
    ("live", "Live"),
    ("history", "History"),
    ("charts", "Charts"),
    ("sessions", "Sessions"),
    ("servers", "Servers"),
    ("isolation", "Isolation"),
)

_REFRESH = "ringfence-refresh"
"""The header of a request by which an open page brings itself up to date."""
_OF_THE_GATEWAY = ("servers", "isolation")
"""Not of one tenant of several."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One request of a person who is logged in."""

    gateway: ConsoleGateway
    request: Request
    visitor: Visitor
    person: Person
    given: Mapping[str, str]
    """Of the address, or of the form."""
    named: str = ""
    """What of the path names one thing."""

    def page(self, template: str, values: Mapping[str, Any], status: int = 200) -> Response:
        notice = ""
        if _REFRESH not in self.request.headers:  # a page that is about to be left must not take it from the next one
            notice, self.visitor.notice = self.visitor.notice, ""
        about = {
            "nav": [each for each in _NAV if each[0] not in _OF_THE_GATEWAY or self.person.is_of_all],
            "person": self.person,
            "csrf": self.visitor.csrf,
            "waiting": approvals.count(self.gateway, self.person),
            "now": time.time(),
            "notice": notice,
        }
        return Unmade(template, {**about, **values}, status)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do work that may take long in a thread, for each person one piece at a time."""
        return await self.gateway.threads.do(self.person.name, work)

    async def note(self, kind: str, body: Json) -> None:
        """Put on record what this person does here, before it is done."""
        who = {"person": self.person.name, "login": self.visitor.login.as_fact()}
        await self.gateway.store.write(lambda tx: tx.append(kind, None, {**who, **body}), durable=True)

    def reason(self) -> GuardedText:
        """What they say of it, as it may go on record."""
        return self.gateway.clean(self.given.get("reason", "").strip(), MAX_REASON)

    def not_entitled(self, what: str) -> Response:
        self.gateway.refused("not_entitled", self.request.scope.get(PEER))
        text = f"Only people with the role {ADMIN} {what}. The configuration says who has it, under people."
        return self.page("error.html", {"title": "Not yours to do", "text": text, "known": True}, 403)

    def back(self, path: str, notice: str = "") -> Response:
        """To a page, after a form."""
        self.visitor.notice = notice
        return RedirectResponse(f"/console/{path}", 303, HEADERS)


Page = Callable[[Visit], Awaitable[Response]]
_ID = r"([A-Za-z0-9_.-]{1,80})"
_PAGES: tuple[tuple[re.Pattern[str], Page], ...] = (
    (re.compile(r"approvals"), approvals.waiting),
    (re.compile(rf"approvals/{_ID}"), approvals.one),
    (re.compile(r"standing"), standing.every),
    (re.compile(r"live"), calls.live),
    (re.compile(r"history"), calls.history),
    (re.compile(rf"calls/{_ID}"), calls.one),
    (re.compile(r"charts"), overview.charts),
    (re.compile(r"isolation"), isolation.shown),
    (re.compile(r"servers"), servers.every),
    (re.compile(rf"servers/{_ID}"), servers.one),
    (re.compile(r"sessions"), sessions.every),
    (re.compile(rf"sessions/{_ID}"), sessions.one),
    (re.compile(rf"sessions/{_ID}/file"), sessions.file),
)
_FORMS: tuple[tuple[re.Pattern[str], Page], ...] = (
    (re.compile(rf"approvals/{_ID}"), approvals.answered),
    (re.compile(rf"approvals/{_ID}/allow"), standing.allow),
    (re.compile(rf"standing/{_ID}/revoke"), standing.revoke),
    (re.compile(rf"calls/{_ID}/settle"), calls.settle),
    (re.compile(rf"servers/{_ID}/accept"), servers.accept),
    (re.compile(rf"sessions/{_ID}/stop"), sessions.stop),
)


class Console:
    """An ASGI application for the paths below `/console`."""

    def __init__(self, gateway: ConsoleGateway) -> None:
        self._gateway = gateway
        self._logins = Logins(gateway)
        self._live = Live(gateway.store.reader)

    def close(self) -> None:
        """End the event streams of open pages, before the store is closed."""
        self._live.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        path = scope["path"].removeprefix("/console").strip("/")
        found = self._logins.find(request.cookies.get(_cookie(scope)), scope.get(PEER))
        if path == "events" and found is not None and request.method == "GET":
            still, count = partial(self._logins.still, found[0]), partial(approvals.count, self._gateway)
            await self._live.stream(receive, send, still, count)
            return
        try:
            answer = await self._answer(request, path, found)
        except ClientDisconnect:
            return
        except forms.FormRefused as exc:
            self._gateway.refused(exc.reason, scope.get(PEER))
            answer = Response(str(exc), exc.status, {**HEADERS, "connection": "close"}, "text/plain")
        except RingfenceError as exc:
            answer = self._error(found, {"title": "That did not work", "text": str(exc)}, 500)
        except Exception:  # the edge: a fault of ours in one page, which its reader is told of, and the operator
            log.exception("the page %s could not be made", quoted(path))
            text = "A fault of the gateway's own. Its log says more."
            answer = self._error(found, {"title": "That did not work", "text": text}, 500)
        await answer(scope, receive, send)

    async def _answer(self, request: Request, path: str, found: tuple[Visitor, Person] | None) -> Response:
        if request.method == "POST":
            return await self._form(request, path, found)
        if request.method not in ("GET", "HEAD"):
            return Response("method not allowed", 405, {**HEADERS, "allow": "GET, HEAD, POST"}, "text/plain")
        if path.startswith("static/"):
            file = static(path.removeprefix("static/"))
            return self._error(found, _NOT_THERE, 404) if file is None else file
        if path == "login":
            return page("login.html", {"problem": "", "next": ""})
        if found is None:
            if path == "events":
                return Response("not logged in", 401, HEADERS, "text/plain")
            return RedirectResponse("/console/login", 303, HEADERS)
        if path == "":
            return RedirectResponse("/console/approvals", 303, HEADERS)
        return await self._served(_PAGES, Visit(self._gateway, request, *found, forms.fields(request.url.query)), path)

    async def _form(self, request: Request, path: str, found: tuple[Visitor, Person] | None) -> Response:
        origin = request.headers.get("origin", "").encode("latin-1")
        if not origin or not self._gateway.is_ours(origin):
            return self._refused(request, found, "this form was not sent by a page of this console")
        form = await forms.read(request)
        if path == "login":
            return await self._log_in(request, form, found)
        if found is None:
            return RedirectResponse("/console/login", 303, HEADERS)
        visitor, person = found
        if form.get("csrf") != visitor.csrf:
            return self._refused(request, found, "this page is out of date: load it again, and answer there")
        if path == "logout":
            await self._logins.end(visitor)
            answer = RedirectResponse("/console/login", 303, HEADERS)
            answer.delete_cookie(_cookie(request.scope), "/console")
            return answer
        return await self._served(_FORMS, Visit(self._gateway, request, visitor, person, form), path)

    async def _served(self, pages: tuple[tuple[re.Pattern[str], Page], ...], visit: Visit, path: str) -> Response:
        for pattern, make in pages:
            if match := pattern.fullmatch(path):
                named = match[1] if match.groups() else ""
                whole = Visit(visit.gateway, visit.request, visit.visitor, visit.person, visit.given, named)
                answer = await make(whole)
                return await whole.in_thread(answer.make) if isinstance(answer, Unmade) else answer
        return self._error((visit.visitor, visit.person), _NOT_THERE, 404)

    async def _log_in(
        self, request: Request, form: Mapping[str, str], found: tuple[Visitor, Person] | None
    ) -> Response:
        uid = request.scope.get(PEER)
        try:
            cookie, _ = await self._logins.begin(form.get("credential", ""), uid, found[0] if found else None)
        except NotAdmitted as exc:
            self._gateway.refused(exc.reason_code, uid)
            return page("login.html", {"problem": exc.message}, exc.status)
        answer = RedirectResponse("/console/approvals", 303, HEADERS)
        answer.set_cookie(
            _cookie(request.scope),
            cookie,
            max_age=int(LASTS_SECONDS),
            path="/console",
            secure=request.url.scheme == "https" or request.headers["origin"].startswith("https:"),
            httponly=True,
            samesite="strict",
        )
        return answer

    def _refused(self, request: Request, found: tuple[Visitor, Person] | None, text: str) -> Response:
        self._gateway.refused("cross_site", request.scope.get(PEER))
        return self._error(found, {"title": "Refused", "text": text}, 403)

    def _error(self, found: tuple[Visitor, Person] | None, values: Json, status: int) -> Response:
        return page("error.html", {**values, "known": found is not None}, status)


_NOT_THERE: Json = {"title": "Not here", "text": "There is no such page, or your account may not see it."}


def _cookie(scope: Scope) -> str:
    """Cookies are for all ports of a host; gateways on several have one each."""
    server = scope.get("server")
    return f"ringfence_{server[1] if server else ''}"
