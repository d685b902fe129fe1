"""A person's approval of one exact call: asked once, answered by a person who may, consumed once.

What is approved is a digest over everything that matters of the call. Any change makes another digest and so
another question. The state lives in the store, so an answer may come from another process, or after a restart; what it
is worth, the signed log alone says.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from ringfence.audit import approvals as evidence
from ringfence.core import canonical, system
from ringfence.core.aio import in_thread
from ringfence.core.errors import Refused
from ringfence.core.expression import Expression, ExpressionError, variables, while_others_are_served
from ringfence.core.model import (
    EVERY_ROLE,
    ApprovalRule,
    Call,
    Contract,
    Decision,
    GuardedText,
    Json,
    Login,
    Person,
    StandingTerms,
    Status,
)
from ringfence.core.ports import Channel
from ringfence.core.record import dataclass
from ringfence.governance import in_client, standing
from ringfence.identity import answers as signed_answers
from ringfence.store import (
    Approval,
    ApprovalQuestion,
    Conflict,
    Offer,
    RowNotFound,
    StandingApproval,
    Store,
    Transaction,
    Unproven,
)

if TYPE_CHECKING:
    from ringfence.audit.approvals import ProvenApproval

log = logging.getLogger("ringfence.approvals")

ALWAYS = ApprovalRule(name="always")
_PROGRESS_SECONDS = 2.0
_MAX_WAITING = 200
_MAX_WEIGHT = 64_000_000
"""Of all calls that wait for people, as `canonical.weight` counts it: about a quarter of the bytes in memory."""
_MIN_WEIGHT = 20_000
"""Of each of them, whatever it carries: it has a task, a place in line and a record to write."""
MAX_REASON = 500
"""Characters of what a person says of their answer."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """All approval rules that apply to one call, as one question: each must be satisfied."""

    names: tuple[str, ...]
    roles: tuple[str, ...]
    """Each entry must be held; alternatives within an entry are joined by `|`."""
    expires_seconds: float
    self_approval: bool
    people: int
    needs_reason: bool = False
    escalations: tuple[tuple[str, float, str], ...] = ()
    """An entry of `roles`, after how many seconds others may answer in its place, and their roles, joined as above."""
    standing: StandingTerms | None = None
    in_client: bool = False

    @property
    def terms(self) -> Json:
        """What a question says of its answer besides roles and people."""
        stands = self.standing
        return {
            **({"reason": True} if self.needs_reason else {}),
            **({"escalate": [list(each) for each in self.escalations]} if self.escalations else {}),
            **({"in_client": True} if self.in_client else {}),
            **({} if stands is None else {"standing": {"times": stands.times, "seconds": stands.seconds}}),
        }


class QuestionPlaces:
    """The places for questions that wait. An agent has so many, since the people who answer must be able to read them
    all; each of its clients may have as many as are left for the others, so that none can take them all."""

    def __init__(self) -> None:
        self._askers: dict[str, dict[str, str]] = {}
        """By principal: who asked which question, of those that were asked through this process."""
        self._taken: Counter[tuple[str, str]] = Counter()
        """Places of questions that are being written."""
        self._weights: Counter[tuple[str, str]] = Counter()
        """What the calls of each client keep in memory while they wait for an answer."""

    def take(self, call: Call, waiting: set[str]) -> None:
        """A place for one more question; `waiting` are those of its agent. Raises Refused."""
        principal = call.principal.key
        askers = self._askers[principal] = {
            ident: asker for ident, asker in self._askers.get(principal, {}).items() if ident in waiting
        }
        coming = sum(count for (whose, _), count in self._taken.items() if whose == principal)
        free = _MAX_WAITING - len(waiting) - coming
        own = list(askers.values()).count(client_of(call)) + self._taken[principal, client_of(call)]
        if free <= 0:
            text = f"{_MAX_WAITING} calls of this agent wait for a person already"
            raise Refused(Status.DENIED, "throttled", text)
        if own >= free:
            text = f"{own} calls of this client wait for a person already; the {free} places left are for other clients"
            raise Refused(Status.DENIED, "throttled", text)
        self._taken[principal, client_of(call)] += 1

    def filled(self, call: Call, ident: str | None) -> None:
        """The question of a place that was taken is written, under this id; or, None, it is not."""
        place = (call.principal.key, client_of(call))
        self._taken[place] -= 1
        if not self._taken[place]:
            del self._taken[place]
        if ident is not None:
            self._askers.setdefault(call.principal.key, {})[ident] = client_of(call)

    @contextmanager
    def waits(self, call: Call) -> Iterator[bool]:
        """While a call waits for an answer: whether there is room for what it keeps meanwhile. Each client may have as
        much as is left for the others; a call without room need not fail, since it finds the answer when it is made
        again."""
        client = (call.principal.key, client_of(call))
        weight = _MIN_WEIGHT + canonical.weight((call.arguments, call.meta, call.inputs), _MAX_WEIGHT)
        room = self._weights[client] + weight <= _MAX_WEIGHT - self._weights.total()
        if room:
            self._weights[client] += weight
        try:
            yield room
        finally:
            if room:
                self._weights -= Counter({client: weight})


def client_of(call: Call) -> str:
    """Who of an agent's clients asks, as far as that can be told: a session, or the way that a call came by."""
    return call.session or call.origin


class ApprovalTerms:
    """Which calls need a person's approval, and who may give it: what the configuration says, and nothing else."""

    def __init__(self, rules: Mapping[str, ApprovalRule], people: Mapping[str, Person]) -> None:
        """Without `people` there is one person, who has every role."""
        self._rules = {**rules, "always": ALWAYS}
        self._people = people
        self._conditions = {n: Expression(r.when) for n, r in rules.items() if r.when is not None}

    def requirement(self, contract: Contract, decision: Decision, variables: Callable[[], Json]) -> Requirement | None:
        """What must be asked for this call, if anything. A condition that fails to evaluate asks."""
        names = [*decision.asks, *self.asked_by(contract, variables)]
        if not names:
            return None
        rules = [self._rules[n] for n in dict.fromkeys(names)]
        return Requirement(
            names=tuple(r.name for r in rules),
            roles=tuple("|".join(sorted(r.roles)) for r in rules if r.roles),
            expires_seconds=min(r.expires_seconds for r in rules),
            # Where only one person exists, no other could answer.
            self_approval=not self._people or all(r.self_approval for r in rules),
            people=max(r.people for r in rules),
            needs_reason=any(r.needs_reason for r in rules),
            escalations=tuple(
                ("|".join(sorted(r.roles)), float(r.escalation.after_seconds), "|".join(sorted(r.escalation.roles)))
                for r in rules
                if r.escalation is not None
            ),
            standing=_stands(rules),
            in_client=all(r.in_client and r.self_approval for r in rules),
        )

    async def required(
        self, call: Call, contract: Contract, decision: Decision, environment: str
    ) -> Requirement | None:
        """The same, while others are served."""
        judge = partial(self.requirement, contract, decision, partial(variables, call, contract, environment))
        return (
            judge() if self._conditions.get(contract.approval) is None else await while_others_are_served(call, judge)
        )

    def asked_by(self, contract: Contract, variables: Callable[[], Json]) -> tuple[str, ...]:
        """The approval rule that the contract names, where its condition applies."""
        name = contract.approval
        return (name,) if name != "none" and self._applies(name, variables) else ()

    def terms(self, requirement: Requirement) -> Json:
        """What an answer is bound to besides its call: the rules that ask for it, and who may give it."""
        rules = [self._rules.get(name, ApprovalRule(name)) for name in requirement.names]
        able = [
            person
            for person in self._people.values()
            if _entitled(person, requirement.roles, requirement.escalations, float("inf"))
        ]
        return {
            "rules": [
                [r.name, r.when, sorted(r.roles), float(r.expires_seconds), r.self_approval, r.people] for r in rules
            ],
            **({"more": requirement.terms} if requirement.terms else {}),
            "people": [
                [p.name, sorted(p.roles), p.os_user, p.tenant, *([p.answer_key] if p.answer_key else [])]
                for p in sorted(able, key=lambda p: p.name)
            ],
            "asked": [list(requirement.roles), requirement.self_approval, requirement.people],
        }

    def condition(self, name: str) -> str | None:
        """When the approval rule of this name applies; None: always."""
        return self._rules[name].when

    def able(self, requirement: Requirement) -> list[str] | None:
        """The people who may answer, by name; None where there is only the local user."""
        if not self._people:
            return None
        return [person.name for person in self._people.values() if person.may_answer(requirement.roles)]

    def doubt(self, proof: ProvenApproval) -> str | None:
        """Why the answers in the log are not those of people who may give them; None if they are.

        The command that answers may read another configuration, which says whatever its author likes of who an account
        is. So a name is worth nothing here before the account that gave the answer is that person's by ours.
        """
        asked_for = proof.question.get("asked_for")
        roles = tuple(proof.question.get("roles") or ())
        own = proof.question.get("self_approval") is True
        tenant = tenant_of(str(proof.question.get("principal")))
        for yes in proof.agreed if self._people else ():
            person = self._people.get(yes.person)
            waited = yes.at - float(proof.question["at"])
            entitled = person is not None and _entitled(person, roles, _later(proof.question.get("terms")), waited)
            able = entitled and person is not None and person.answers_for(tenant)
            if person is None or not able or (yes.person == asked_for and not own):
                return f"{yes.person} may not answer it by the configuration in force"
            if yes.login is not None and yes.login.get("way") == "client":
                terms = proof.question.get("terms")
                if not isinstance(terms, dict) or terms.get("in_client") is not True or yes.person != asked_for:
                    return f"{yes.person} may not answer it in a client"
            elif yes.login is not None and yes.login.get("way") == "webhook":
                signed, key = yes.login.get("signed"), person.answer_key
                mine = key is not None and signed_answers.is_signed(signed, key)
                if not mine or not signed_answers.states(signed, proof.id, proof.place.hash, yes.person):
                    return f"it is not signed as an answer of {yes.person} with the key of the configuration in force"
            elif yes.login is not None and yes.login.get("way") != "link":
                if not _is_login_of(person, yes.login):
                    return f"{yes.person} logged in as somebody else than the configuration in force says"
            elif not _is_account_of(person, yes.account):
                name = "not on record" if yes.account is None else yes.account.get("name")
                return f"account {name} answered as {yes.person}, whose account it is not by the configuration in force"
        return None

    def _applies(self, name: str, variables: Callable[[], Json]) -> bool:
        condition = self._conditions.get(name)
        if condition is None:
            return True
        try:
            return condition.test(variables())
        except ExpressionError:
            return True


def _stands(rules: Sequence[ApprovalRule]) -> StandingTerms | None:
    """How far an answer may stand for calls like the one that is asked about: as far as every rule lets it."""
    terms = [rule.standing for rule in rules if rule.standing is not None]
    if len(terms) < len(rules) or any(rule.people > 1 for rule in rules):
        return None
    return StandingTerms(min(each.times for each in terms), min(each.seconds for each in terms))


def _later(terms: object) -> Sequence[Sequence[Any]]:
    """Who may answer a question later, as it says itself."""
    found = terms.get("escalate") if isinstance(terms, dict) else None
    return found if isinstance(found, list) else ()


def _entitled(person: Person, roles: Sequence[str], later: Sequence[Sequence[Any]], waited: float) -> bool:
    """Whether a person has every role, or that of those who are asked in its place after so long a wait."""
    return person.may_answer(()) and all(
        person.holds((entry,))
        or any(entry == instead_of and waited >= after and person.holds((who,)) for instead_of, after, who in later)
        for entry in roles
    )


class Approvals(ApprovalTerms):
    """Asks people, waits, and decides whether a call may go on. The grant consumes the approval."""

    def __init__(
        self,
        store: Store,
        rules: Mapping[str, ApprovalRule],
        people: Mapping[str, Person],
        *,
        wait_seconds: float,
        places: QuestionPlaces | None = None,
    ) -> None:
        """`places` outlive a change of the rules."""
        super().__init__(rules, people)
        self._store = store
        self._places = places or QuestionPlaces()
        self._wait = wait_seconds
        self._making = asyncio.Lock()
        """Summaries are made one at a time: more threads would take the interpreter from the loop."""
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """By client: of each, one summary at most waits to be made, so that one who asks much holds up itself."""

    async def obtain(
        self,
        call: Call,
        digest: str,
        requirement: Requirement,
        summary: Callable[[], Json],
        channel: Channel,
        patience: float | None = None,
        shape: Json | None = None,
    ) -> None:
        """Return when an approval for `digest` is there to be consumed; raise Refused otherwise.

        `patience` is how long the caller waits, at most as long as the configuration allows; None: as long as that.
        `summary` makes what a person is shown. That may be large, so it is made only when a person is to be asked, and
        not on the loop. `shape`, if the answer may stand for others, is what a call must have to be like this one.
        """
        approval = self._live(digest)
        if approval is None:
            approval = await self._ask(call, digest, requirement, summary, shape)
        if approval.state == "pending" and shape is not None:
            approval = await self._by_standing(approval, call, shape)
        if approval.state == "pending" and requirement.in_client:
            approval = await self._in_client(approval, call, channel)
        wait = self._wait if patience is None else min(patience, self._wait)
        if approval.state == "pending" and wait > 0:
            with self._places.waits(call) as room:
                approval = await self._await_answer(approval, channel, wait if room else 0.0)
        else:
            approval = await self._await_answer(approval, channel, 0.0)
        if approval.state == "expired":
            # The old one can no longer be answered.
            approval = await self._ask(call, digest, requirement, summary, shape)
        if approval.state == "denied":
            raise refused(approval)
        if approval.state not in ("approved", "consumed"):
            raise waiting(approval)

    async def ask_again(
        self, call: Call, digest: str, requirement: Requirement, summary: Callable[[], Json]
    ) -> Refused:
        """Another call consumed the answer first: a new question for this one."""
        return waiting(await self._ask(call, digest, requirement, summary))

    async def _by_standing(self, approval: Approval, call: Call, shape: Json) -> Approval:
        """The question as it is answered by what a person approved beforehand, if anybody did."""
        for chosen in self._store.reader().find_standing(shape["digest"]):
            if chosen.principal != call.principal.key or not standing.covers(chosen.shape, call.arguments):
                continue
            answer_it = partial(Transaction.answer_by_standing, identity=approval.id, chosen=chosen)
            try:
                answered = await self._store.write(answer_it, durable=True)
            except Unproven as exc:
                log.error("a standing approval answers nothing: %s", exc)
                continue
            if answered is not None:
                return answered
        return approval

    async def _in_client(self, approval: Approval, call: Call, channel: Channel) -> Approval:
        """The question as the person at the client answers it; as it stands, where they leave it to others."""
        name = call.principal.person
        person = self._people.get(name or "") if self._people else Person(name or "", EVERY_ROLE)
        if not name or person is None or not in_client.can_be_asked(channel.capabilities):
            return approval
        asked = await in_thread(partial(find, self._store, approval.id))
        put = None if objection(asked, person) is not None else await in_thread(partial(in_client.put, asked))
        if put is None:
            return approval
        try:
            async with asyncio.timeout(max(0.0, asked.expires_at - time.time())):
                answers = await channel.ask({in_client.KEY: {**put, in_client.ABOUT: asked.id}})
        except (Refused, TimeoutError):
            return find(self._store, approval.id, brief=True)  # nobody answered there; others may
        verdict = in_client.said(answers)
        if verdict is None:
            body = {"approval": approval.id, "principal": call.principal.key, "why": "unfit"}
            await self._store.write(lambda tx: tx.append(evidence.UNFIT, call.id, body))
        elif verdict != "open":
            login = Login("client", call.id)
            give = partial(answer, self._store, asked.id, person, approve=verdict == "approve", seen=asked, login=login)
            with suppress(Conflict):  # somebody else was faster, or it has expired meanwhile
                await in_thread(give)
        return find(self._store, approval.id, brief=True)

    def is_asked(self, digest: str) -> bool:
        """Whether people have been asked about this already."""
        return self._live(digest) is not None

    def _live(self, digest: str) -> Approval | None:
        """The newest question about this digest that still counts: open, approved and unused, or refused recently."""
        now = time.time()
        live = [
            a
            for a in self._store.reader().find_approvals(digest)
            if a.state in ("approved", "pending") or (a.state == "denied" and now < a.expires_at)
        ]
        return max(live, key=lambda a: (a.state == "approved", a.asked_at), default=None)

    async def _ask(
        self,
        call: Call,
        digest: str,
        requirement: Requirement,
        summary: Callable[[], Json],
        shape: Json | None = None,
    ) -> Approval:
        def question() -> ApprovalQuestion:
            now = time.time()
            return ApprovalQuestion(
                digest=digest,
                call_id=call.id,
                principal=call.principal.key,
                person=call.principal.person,
                tool=call.tool,
                summary=summary(),
                rule="+".join(requirement.names),
                roles=requirement.roles,
                self_approval=requirement.self_approval,
                people=requirement.people,
                asked_at=now,
                expires_at=now + requirement.expires_seconds,
                terms=requirement.terms,
                shape=shape,
            )

        # Before it is made: what a client asks in vain costs others nothing.
        self._places.take(call, self._store.reader().open_questions(call.principal.key))
        written: list[Approval] = []  # also where the call is cancelled meanwhile
        try:
            turn = self._turns.setdefault((call.principal.key, client_of(call)), asyncio.Lock())
            async with turn, self._making:
                asked = await in_thread(question)
            ask: Callable[[Transaction], Approval] = lambda tx: tx.ask_approval(asked)  # noqa: E731
            return await self._store.write(ask, durable=True, on_commit=written.append)
        finally:
            self._places.filled(call, written[0].id if written else None)

    async def _await_answer(self, approval: Approval, channel: Channel, wait: float) -> Approval:
        """The question once it has an answer, or as it stands when there is no more time for one."""
        started = asyncio.get_running_loop().time()
        left = approval.expires_at - time.time()
        until = started + min(wait, left)
        if approval.state == "pending" and until > started:
            with self._store.answers.wait_for(approval) as answered:
                while not answered.is_set() and (now := asyncio.get_running_loop().time()) < until:
                    note = {"progress": now - started, "message": f"waiting for a person to answer {approval.id}"}
                    await channel.notify("notifications/progress", note)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(min(until - now, _PROGRESS_SECONDS)):
                            await answered.wait()
        found = find(self._store, approval.id, brief=True)
        late = left <= wait and asyncio.get_running_loop().time() >= until
        return replace(found, state="expired") if late and found.state == "pending" else found


def find(store: Store, approval_id: str, *, brief: bool = False) -> Approval:
    approval = store.reader().approval(approval_id, brief=brief)
    if approval is None:
        raise RowNotFound(f"there is no approval {approval_id!r}")
    return approval


def _is_account_of(person: Person, account: Json | None) -> bool:
    if account is None or person.os_user is None or account.get("name") != person.os_user:
        return False
    uid = system.user_id(person.os_user)
    return uid is None or uid == account.get("uid")


def _is_login_of(person: Person, login: Json) -> bool:
    """Whether a person proved who they are by a credential of their own. A token names its person, and the gateway that
    signed the answer had looked; whom an identity provider means by a subject, the configuration says."""
    by_subject = person.oidc_subject is not None and login.get("credential") == person.oidc_subject
    return login.get("way") == "token" or by_subject


def tenant_of(principal: str) -> str:
    """The tenant in a principal's key."""
    return principal.partition("/")[0]


def waiting(approval: Approval) -> Refused:
    return Refused(
        Status.APPROVAL_REQUIRED,
        "approval_required",
        f"A person must approve this call first ({approval.id}); it has not run. "
        "Once they have answered, make the same call again.",
        approval_id=approval.id,
    )


def unproven(exc: Unproven) -> Refused:
    return Refused(Status.DENIED, "approval_unproven", str(exc), approval_id=exc.identity)


def refused(approval: Approval) -> Refused:
    noes = [each for each in approval.answers if not each.approve]
    by = ", ".join(each.person for each in noes)
    why = "; ".join(each.reason for each in noes if each.reason)
    return Refused(
        Status.DENIED,
        "approval_refused",
        f"{by or 'A person'} refused this call ({approval.id}){f': {why}' if why else '.'}",
        approval_id=approval.id,
    )


def objection(approval: Approval, person: Person) -> str | None:
    """Why this person may not answer this question; None if they may."""
    if not person.answers_for(tenant_of(approval.principal)):
        return f"the agent that asks is of the tenant {tenant_of(approval.principal)}, and {person.name} is not"
    if approval.person == person.name and not approval.self_approval:
        return f"{person.name}'s own agent asked; another person must answer"
    if not person.may_answer(()):
        return f"{person.name} is an auditor, who reads and answers nothing"
    later = _later(approval.terms)
    if not _entitled(person, approval.roles, later, time.time() - approval.asked_at):
        wanted = " and ".join(r.replace("|", " or ") for r in approval.roles)
        wait = ""
        if _entitled(person, approval.roles, later, float("inf")):
            after = max(each[1] for each in later)
            wait = f"; {person.name} may answer if nobody has {after:g} s after it was asked"
        return f"{person.name} does not have the role that is required: {wanted}{wait}"
    return None


def answer(
    store: Store,
    approval_id: str,
    person: Person,
    *,
    approve: bool,
    seen: Approval | None = None,
    login: Login | None = None,
    reason: GuardedText | None = None,
) -> Approval:
    """Record a person's answer to the question as they have `seen` it, and `reason`, which its caller is told, too.
    `login` is how they proved who they are, where this process is not theirs. Raises Refused when they may not give it.
    """
    asked = find(store, approval_id) if seen is None else seen
    problem = objection(asked, person)
    if problem is not None:
        raise Refused(Status.DENIED, "not_entitled", problem)
    given = store.write_sync(
        lambda tx: tx.answer_approval(
            approval_id, person.name, approve, time.time(), asked, login=login, reason=reason or None
        ),
        durable=True,
    )
    store.answers.wake()
    return given


def allow(
    store: Store,
    asked: Approval,
    person: Person,
    offer: Offer,
    *,
    login: Login | None = None,
    reason: GuardedText | None = None,
) -> StandingApproval:
    """Record what a person approves beforehand from a question as they have seen it, and, if that still waits, their
    answer to it. Raises Refused when they may not answer it."""
    problem = objection(asked, person)
    if problem is not None:
        raise Refused(Status.DENIED, "not_entitled", problem)

    def work(tx: Transaction) -> StandingApproval:
        made = tx.make_standing(asked, person.name, offer, login, reason or None)
        if asked.state == "pending":
            now = time.time()
            tx.answer_approval(asked.id, person.name, True, now, asked, login=login, reason=reason or None)
        return made

    made = store.write_sync(work, durable=True)
    store.answers.wake()
    return made


def revoke(store: Store, identity: str, person: Person, *, login: Login | None = None) -> StandingApproval:
    """From now on an approval answers nothing beforehand. Everybody may who answers for its agent's tenant. `login` is
    how they proved who they are, where this process is not theirs."""
    found = next((each for each in store.reader().standing_by_id(identity) if each.id == identity), None)
    if found is None or not person.answers_for(tenant_of(found.principal)):
        raise RowNotFound(f"there is no standing approval {identity!r}")
    return store.write_sync(lambda tx: tx.revoke_standing(identity, person.name, login), durable=True)
