"""Questions to people beyond this machine: how one is put to an address, and that its time to escalate has come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial

import anyio

from ringfence.core import canonical, invisible
from ringfence.core.aio import in_thread
from ringfence.core.errors import StoreError
from ringfence.core.model import Json, Person
from ringfence.governance import question
from ringfence.governance.approvals import objection, tenant_of
from ringfence.store import Approval, Conflict, RowNotFound, Store, Transaction

log = logging.getLogger("ringfence.approvals")

_MAX_CHARACTERS = 262_144
"""Characters of what is sent with a question. Who is shown less answers elsewhere."""
_LOOK_SECONDS = 0.5


def put(people: Callable[[], Mapping[str, Person]], asked: Approval, stage: str, record: str) -> Json:
    """A question with all that its answerer must see, escaped as everywhere; and, if that is all, what to name in an
    answer (`asked`)."""
    sent = [[label, invisible.json_text(value)] for label, value in question.sent(asked)]
    whole = sum(len(text) for _, text in sent) <= _MAX_CHARACTERS
    about = [*question.caller(asked), *question.terms(asked, invisible.name), *question.consequences(asked)]
    lines = [*about, *question.unshown(asked)]
    return {
        "type": f"ringfence.approval_{stage}",
        "approval": asked.id,
        **({"asked": record} if whole else {}),
        "subject": question.subject(asked, invisible.name),
        "lines": [[label, invisible.visible(text)] for label, text in lines],
        "sent": sent if whole else [],
        "whole": whole,
        "call": asked.call_id,
        "tool": asked.tool,
        "tenant": tenant_of(asked.principal),
        "asked_at": asked.asked_at,
        "expires_at": asked.expires_at,
        "needs_reason": bool(asked.terms.get("reason")),
        "people": asked.people,
        "may_answer": sorted(name for name, person in people().items() if objection(asked, person) is None),
    }


class Escalations:
    """Puts on record when questions have waited so long that others may answer them: open pages show it, and who is
    told of questions is told of it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._due: dict[tuple[str, str, float], float] = {}
        """When, by question, roles and how long that is after it was asked."""
        self._known: set[str] = set()

    async def run(self) -> None:
        """Until cancelled."""
        version: int | None = None
        while True:
            try:
                now = self._store.reader().version()
                if now != version:
                    await in_thread(self._look)
                    version = now
                for each in [each for each, at in self._due.items() if at <= time.time()]:
                    await self._escalate(*each)
                    del self._due[each]
            except StoreError as exc:
                log.error("whose time it is to answer cannot be read or recorded: %s", exc)
            await anyio.sleep(_LOOK_SECONDS)

    def _look(self) -> None:
        reader = self._store.reader()
        waiting = reader.pending()
        self._known &= set(waiting)
        self._due = {each: at for each, at in self._due.items() if each[0] in self._known}
        for ident in waiting:
            if ident in self._known:
                continue
            self._known.add(ident)
            asked = reader.approval(ident, brief=True)
            for _, after, roles in () if asked is None else asked.terms.get("escalate", ()):
                assert asked is not None
                self._due[ident, str(roles), float(after)] = asked.asked_at + float(after)

    async def _escalate(self, ident: str, roles: str, after: float) -> None:
        try:
            await self._store.write(
                partial(Transaction.escalate_approval, identity=ident, roles=roles, after_seconds=after), durable=True
            )
        except (RowNotFound, Conflict, canonical.NotCanonical) as exc:
            log.warning("%s is not escalated: %s", ident, exc)
