"""Who is logged in: people alone, by a one-time link or by a token of their own, for as long as that is good."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections import Counter
from contextlib import suppress

from ringfence.console.gateway import ConsoleGateway
from ringfence.core.model import IssuedToken, Json, Login, Person
from ringfence.core.record import dataclass
from ringfence.identity import NotAdmitted, new_token, person_of
from ringfence.store import Conflict, Transaction

LASTS_SECONDS = 12 * 3600.0
_MAX_LOGINS = 1000
_LONGEST_CREDENTIAL = 200


@dataclass(slots=True)
class Visitor:
    """One person in one browser."""

    name: str
    login: Login
    token: str
    """Looked at again with each request: theirs, by which they logged in, or the one of this login alone. A link is
    good once, so a login by one has a token of its own, which is never shown, and which the operator can revoke."""
    uid: int | None
    """The account of the connection: to another one the cookie is worth nothing."""
    began: float
    csrf: str
    notice: str = ""
    """To be shown on the next page."""


class Logins:
    """All of them, in memory: when the gateway ends, all are over."""

    def __init__(self, gateway: ConsoleGateway) -> None:
        self._gateway = gateway
        self._visitors: dict[str, Visitor] = {}

    async def begin(self, credential: str, uid: int | None, before: Visitor | None = None) -> tuple[str, Visitor]:
        """Log in the person of this link or token, on record; returns the value of the cookie. `before` is the
        login that the same browser has already, which ends with this one. Raises NotAdmitted."""
        credential = credential.strip()
        if len(credential) > _LONGEST_CREDENTIAL:
            raise NotAdmitted(401, "bad_token", "this is no token of this gateway", "invalid_token")
        token = self._gateway.tokens(credential)
        if token.kind == "login":
            raise NotAdmitted(401, "bad_token", "this token stands for another login", "invalid_token")
        person = self._person(token)
        login = Login("link" if token.kind == "link" else "token", token.id)
        if token.kind == "link" and uid is not None and uid != os.geteuid():
            # It says no more than that whoever has it is this account, and the kernel knows who is not.
            text = "this link is for the account that the gateway runs under; log in with a token of your own"
            raise NotAdmitted(403, "not_this_account", text)
        if before is not None and before.name != person.name:
            # A page of a colleague may have opened their own link here: this person would then answer as them.
            text = f"{before.name} is logged in here; log out first (at /console), to log in as {person.name}"
            raise NotAdmitted(409, "logged_in", text)
        body: Json = {"person": person.name, "login": login.as_fact(), "peer_uid": uid}
        own, kept = _token_of_login(person) if token.kind == "link" else (None, credential)

        def work(tx: Transaction) -> None:
            if own is not None:
                tx.revoke_token(token.id, "console", time.time())
                tx.put_token(own)
            tx.append("console_login", None, body if own is None else {**body, "token": own.id})

        try:
            await self._gateway.store.write(work, durable=True)
        except Conflict:
            text = "this link was used already; `ringfence console` gives another"
            raise NotAdmitted(401, "link_used", text, "invalid_token") from None
        if before is not None:
            await self.end(before)
        cookie = secrets.token_urlsafe(32)
        visitor = Visitor(person.name, login, kept, uid, time.monotonic(), secrets.token_urlsafe(24))
        self._forget_old()
        self._visitors[_digest(cookie)] = visitor
        return cookie, visitor

    def find(self, cookie: str | None, uid: int | None) -> tuple[Visitor, Person] | None:
        """The person of this cookie, by the configuration in force; None without a login, or where that has ended."""
        visitor = None if cookie is None else self._visitors.get(_digest(cookie))
        if visitor is None or visitor.uid != uid:
            return None
        person = self.still(visitor)
        return None if person is None else (visitor, person)

    def still(self, visitor: Visitor) -> Person | None:
        """The person that this visitor is, as long as they are."""
        if time.monotonic() - visitor.began > LASTS_SECONDS or all(v is not visitor for v in self._visitors.values()):
            return None
        try:
            person = self._person(self._gateway.tokens(visitor.token))
        except NotAdmitted:
            return None
        return person if person.name == visitor.name else None

    async def end(self, visitor: Visitor) -> None:
        """Log out, on record. It is over even where that cannot be written. Raises StoreError."""
        self._visitors = {key: each for key, each in self._visitors.items() if each is not visitor}
        try:
            token = self._gateway.tokens(visitor.token)
        except NotAdmitted:
            token = None

        def work(tx: Transaction) -> None:
            if token is not None and token.kind == "login":
                with suppress(Conflict):
                    tx.revoke_token(token.id, visitor.name, time.time())
            tx.append("console_logout", None, {"person": visitor.name, "login": visitor.login.as_fact()})

        await self._gateway.store.write(work, durable=True)

    def _person(self, token: IssuedToken) -> Person:
        people = self._gateway.people()
        if token.kind == "agent":
            text = "this token is an agent's; people log in, with a link or a token of their own"
            raise NotAdmitted(403, "agent_token", text)
        if token.kind == "link":
            found = person_of(people, self._gateway.account) if token.name == self._gateway.account else None
        elif token.kind == "login":
            found = person_of(people, self._gateway.account)
            found = found if found is not None and found.name == token.name else None
        else:
            found = people.get(token.name)
            found = found if found is not None and found.tenant == token.tenant else None
        if found is None:
            text = f"{token.name} is none of the people that the configuration declares"
            raise NotAdmitted(403, "unknown_person", text)
        return found

    def _forget_old(self) -> None:
        now = time.monotonic()
        lasting = {key: each for key, each in self._visitors.items() if now - each.began <= LASTS_SECONDS}
        while len(lasting) >= _MAX_LOGINS:
            # Of the person who has the most, the oldest: nobody logs another out by logging in again and again.
            (most, _), *_others = Counter(each.name for each in lasting.values()).most_common(1)
            del lasting[next(key for key, each in lasting.items() if each.name == most)]
        self._visitors = lasting


def _token_of_login(person: Person) -> tuple[IssuedToken, str]:
    """A token that stands for one login: what is kept of it, and its text, which does not leave this process."""
    ident, text, digest = new_token()
    now = time.time()
    made = IssuedToken(ident, digest, "login", person.name, person.tenant, "console", now, now + LASTS_SECONDS)
    return made, text


def _digest(cookie: str) -> str:
    return hashlib.sha256(cookie.encode()).hexdigest()
