"""A person's leave for one exact call: asked once, answered by somebody entitled, consumed once.

What is approved is a digest over everything that matters of the call. Any change makes another digest and so
another question. The state lives in the store, so an answer may come from another process, or after a restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import anyio

from ringfence.errors import Refused
from ringfence.expression import Expression, ExpressionError
from ringfence.model import ApprovalRule, Call, Contract, Decision, Json, Person, Status
from ringfence.ports import Channel
from ringfence.store import Approval, ApprovalQuestion, NotFound, Store

ALWAYS = ApprovalRule(name="always")
_POLL_SECONDS = 0.1
_PROGRESS_SECONDS = 2.0
_MOST_WAITING = 200


@dataclass(frozen=True, slots=True)
class Requirement:
    """All approval rules that apply to one call, as one question: each must be satisfied."""

    names: tuple[str, ...]
    roles: tuple[str, ...]
    """Each entry must be held; alternatives within an entry are joined by `|`."""
    expires_seconds: float
    self_approval: bool
    people: int


class Approvals:
    """Asks, waits, and tells whether a call may go on. Consuming is part of the grant."""

    def __init__(
        self, store: Store, rules: Mapping[str, ApprovalRule], *, wait_seconds: float, single_user: bool
    ) -> None:
        self._store = store
        self._rules = {**rules, "always": ALWAYS}
        self._conditions = {n: Expression(r.when) for n, r in rules.items() if r.when is not None}
        self._wait = wait_seconds
        self._single_user = single_user

    def requirement(self, contract: Contract, decision: Decision, variables: Callable[[], Json]) -> Requirement | None:
        """What must be asked for this call, if anything. A condition that fails to evaluate asks."""
        names = list(decision.asks)
        if contract.approval != "none" and self._applies(contract.approval, variables):
            names.append(contract.approval)
        if not names:
            return None
        rules = [self._rules[n] for n in dict.fromkeys(names)]
        return Requirement(
            names=tuple(r.name for r in rules),
            roles=tuple("|".join(sorted(r.roles)) for r in rules if r.roles),
            expires_seconds=min(r.expires_seconds for r in rules),
            # Where only one person exists, nobody else could answer.
            self_approval=self._single_user or all(r.self_approval for r in rules),
            people=max(r.people for r in rules),
        )

    def _applies(self, name: str, variables: Callable[[], Json]) -> bool:
        condition = self._conditions.get(name)
        if condition is None:
            return True
        try:
            return condition.test(variables())
        except ExpressionError:
            return True

    async def obtain(self, call: Call, digest: str, requirement: Requirement, summary: Json, channel: Channel) -> None:
        """Return when an approval for `digest` is there to be consumed; raise Refused otherwise."""
        approval = self._standing(digest)
        if approval is None:
            approval = await self._ask(call, digest, requirement, summary)
        approval = await self._await_answer(approval.id, channel)
        if approval.state == "expired":
            approval = await self._ask(call, digest, requirement, summary)  # nobody can answer the old one any more
        if approval.state == "denied":
            raise refused(approval)
        if approval.state not in ("approved", "consumed"):
            raise waiting(approval)

    async def ask_again(self, call: Call, digest: str, requirement: Requirement, summary: Json) -> Refused:
        """Another call consumed the answer first: a new question for this one."""
        return waiting(await self._ask(call, digest, requirement, summary))

    def _standing(self, digest: str) -> Approval | None:
        """The newest question about this digest that still counts: an open one, a usable yes, or a no of late."""
        now = time.time()
        live = [
            a
            for a in self._store.reader().find_approvals(digest)
            if a.state in ("approved", "pending") or (a.state == "denied" and now < a.expires_at)
        ]
        return max(live, key=lambda a: (a.state == "approved", a.asked_at), default=None)

    async def _ask(self, call: Call, digest: str, requirement: Requirement, summary: Json) -> Approval:
        now = time.time()
        open_questions = self._store.reader().approvals(("pending",))
        if sum(a.principal == call.principal.key for a in open_questions) >= _MOST_WAITING:
            # Whoever answers must be able to read what is asked.
            raise Refused(Status.DENIED, "throttled", f"{_MOST_WAITING} calls of this agent wait for a person already")
        question = ApprovalQuestion(
            digest=digest,
            call_id=call.id,
            principal=call.principal.key,
            person=call.principal.person,
            tool=call.tool,
            summary=summary,
            rule="+".join(requirement.names),
            roles=requirement.roles,
            self_approval=requirement.self_approval,
            people=requirement.people,
            asked_at=now,
            expires_at=now + requirement.expires_seconds,
        )
        return await self._store.write(lambda tx: tx.ask_approval(question), durable=True)

    async def _await_answer(self, approval_id: str, channel: Channel) -> Approval:
        started = anyio.current_time()
        told = started - _PROGRESS_SECONDS
        while True:
            approval = find(self._store, approval_id)
            now = anyio.current_time()
            if approval.state != "pending" or now - started >= self._wait:
                return approval
            if now - told >= _PROGRESS_SECONDS:
                told = now
                note = {"progress": now - started, "message": f"waiting for a person to answer {approval_id}"}
                await channel.notify("notifications/progress", note)
            await anyio.sleep(_POLL_SECONDS)


def find(store: Store, approval_id: str) -> Approval:
    approval = store.reader().approval(approval_id)
    if approval is None:
        raise NotFound(f"there is no approval {approval_id!r}")
    return approval


def waiting(approval: Approval) -> Refused:
    return Refused(
        Status.APPROVAL_REQUIRED,
        "approval_required",
        f"This call waits for a person. Ask them to run: ringfence approvals approve {approval.id} "
        f"— then make the same call again.",
        approval_id=approval.id,
    )


def refused(approval: Approval) -> Refused:
    by = ", ".join(a.person for a in approval.answers if not a.approve)
    return Refused(
        Status.DENIED,
        "approval_refused",
        f"{by or 'A person'} refused this call ({approval.id}).",
        approval_id=approval.id,
    )


def objection(approval: Approval, person: Person) -> str | None:
    """Why this person may not answer this question; None if they may."""
    if approval.person == person.name and not approval.self_approval:
        return f"{person.name}'s own agent asked; another person must answer"
    if not person.holds(approval.roles):
        wanted = " and ".join(r.replace("|", " or ") for r in approval.roles)
        return f"{person.name} has not the role that is asked for: {wanted}"
    return None


def answer(store: Store, approval_id: str, person: Person, *, approve: bool) -> Approval:
    """Record a person's answer. Raises Refused when they may not give it."""
    approval = find(store, approval_id)
    problem = objection(approval, person)
    if problem is not None:
        raise Refused(Status.DENIED, "not_entitled", problem)
    return store.write_sync(lambda tx: tx.answer_approval(approval_id, person.name, approve, time.time()), durable=True)
