"""The way of a call, written once.

    contract → policy → once → budget → approval → grant → dispatch → guard → fact → audit

Whatever happens on it, the call closes with exactly one *finished* record, and an answer goes out only after that
record is safe: no record, no result.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from urllib.parse import unquote

import anyio

from ringfence import asking, budget, canonical, carried, effects, facts, journal, once
from ringfence.approval import Requirement, unproven
from ringfence.budget import Budget
from ringfence.dispatch import Dispatcher
from ringfence.errors import OutcomeUnknown, Refused, StoreError, Unavailable, UpstreamFailed
from ringfence.expression import variables
from ringfence.guard import Guard, GuardedChannel, without_forged
from ringfence.journal import Trip
from ringfence.model import (
    SYSTEM,
    Call,
    Contract,
    Grant,
    Json,
    Outcome,
    Principal,
    Receipt,
    ResultPolicy,
    ServerSpec,
    Status,
    own_words,
)
from ringfence.once import Key, Once
from ringfence.ports import Channel
from ringfence.rounds import Rounds
from ringfence.rulebook import Rulebook, completion_problem, implicit_contract, is_listed, settled
from ringfence.sandbox.tools import SERVER, complete
from ringfence.store import Approval, Store, Transaction, Unproven

log = logging.getLogger("ringfence.pipeline")

_GRANT_SECONDS = 10.0
_LISTING = ResultPolicy(max_bytes=8_000_000)
"""All pages of what a server lists come as one result."""
ASIDE = ("listing", "logging")
"""Kinds of calls that clients make by themselves, and for which no person is bothered."""


class Pipeline:
    """`handle(call) -> Outcome`: nothing reaches a server by another way."""

    def __init__(self, store: Store, rules: Rulebook, dispatcher: Dispatcher, guard: Guard, limits: Budget) -> None:
        self.rules = rules
        self._store = store
        self._dispatcher = dispatcher
        self._guard = guard
        self._budget = limits
        self._once = Once(store)
        self._under_way = 0
        """Calls; several share a commit, made beside the loop, and one that is alone waits for no others."""

    async def handle(self, call: Call, channel: Channel) -> Outcome:
        self._under_way += 1
        try:
            return await self._handle(call, channel)
        finally:
            self._under_way -= 1

    async def _handle(self, call: Call, channel: Channel) -> Outcome:
        rules = self.rules
        trip = Trip(call, rules.environment, clean=self._guard.message)
        ticket: budget.Ticket | None = None
        key: Key | None = None
        try:
            contract = self._contract(rules, trip)
            self._policy(rules, trip, contract)
            call = trip.call  # as it goes on
            self._dispatcher.check(call, contract, trip.decision)  # type: ignore[arg-type]
            trip.possible = effects.possible(call, contract, await self._dispatcher.outside(call, contract))
            key, replayed = await self._earlier(rules, trip, contract)
            if replayed is not None:
                outcome = replayed
            else:
                ticket = self._budget.admit(call, contract, trip.arguments_digest)
                grant = await self._grant_or_join(rules, trip, contract, key, channel)
                outcome = grant if isinstance(grant, Outcome) else await self._carry_out(rules, trip, grant, channel)
        except Refused as exc:
            outcome = self._refusal(trip, exc)
        except Unavailable as exc:
            outcome = self._problem(trip, Status.UNAVAILABLE, exc.reason_code, exc.message)
        except OutcomeUnknown as exc:
            trip.answered = exc.answered
            outcome = self._problem(trip, Status.UNKNOWN, exc.reason_code, exc.message)
        except StoreError as exc:
            # Once it was dispatched it is the state of sessions that failed, and what was asked may be done.
            log.error("the store failed %s the call ran: %s", "while" if trip.dispatched else "before", exc)
            text = own_words("the call could not be recorded, so it was not made")
            outcome = Outcome(Status.UNAVAILABLE, "store", text)
            if trip.dispatched:
                text = own_words("what became of the call could not be recorded")
                outcome = Outcome(Status.UNKNOWN, "store", text)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                stopped = Outcome(Status.KILLED, "cancelled", own_words("the caller cancelled the call"))
                await self._close(trip, key, ticket, stopped)
            raise
        except Exception:  # the edge of the way: a fault of ours must still close the call on record
            log.exception("call %s failed inside the gateway", call.id)
            outcome = Outcome(
                Status.UNKNOWN if trip.dispatched else Status.UNAVAILABLE,
                "internal",
                own_words("the gateway itself failed"),
            )
        return await self._close(trip, key, ticket, outcome)

    def listed(self, item: Json) -> Json:
        """What a server says of what it has, as a client may see it."""
        return self._guard.listed(without_forged(item)[0])

    async def server_start(self, spec: ServerSpec, principal: Principal, start: Callable[[], Awaitable[None]]) -> None:
        """The start of a server is a call by `system`: on record before it happens, and closed with how it went."""
        how: Json = {"url": spec.url} if spec.url is not None else {"command": list(spec.command)}
        call = Call(canonical.new_id("call"), SYSTEM, spec.name, {**how, "for": principal.key}, "server", "system")
        call = replace(call, server=spec.name, method="server/start")
        trip = Trip(call, self.rules.environment, clean=self._guard.message)
        trip.contract = implicit_contract(spec)
        trip.isolation = self._dispatcher.isolation(trip.contract)
        trip.possible = effects.of_start(spec)
        try:
            # What it may do outside, it may do at once: that it was started is on disk before it is.
            work: Callable[[Transaction], Receipt] = lambda tx: tx.append("started", call.id, journal.started(trip))  # noqa: E731
            trip.started = await self._store.write(work, durable=trip.effect_possible)
        except StoreError:
            raise Unavailable("store", f"the start of server {spec.name} could not be recorded") from None
        trip.dispatched = True
        outcome = Outcome(Status.SUCCESS, "ok")
        try:
            await start()
        except Unavailable as exc:
            outcome = Outcome(Status.UNAVAILABLE, exc.reason_code, self._guard.message(exc.message))
            raise
        except BaseException:
            outcome = Outcome(Status.KILLED, "cancelled", own_words("the start was given up"))
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await self._close(trip, None, None, outcome)

    # ── 1 contract, 2 policy ──────────────────────────────────────────────────────────────────────

    def _contract(self, rules: Rulebook, trip: Trip) -> Contract:
        call = trip.call
        if call.fault is None:
            trip.arguments_digest = _digest(replace(call, meta={}) if call.meta else call)
            self._budget.check_loop(call, trip.arguments_digest)
        if call.kind == "tool":
            capability = rules.catalog.resolve(call, rules.environment)
            trip.contract, trip.definition = capability.contract, capability.definition
        else:
            trip.contract = self._listed(rules, trip)
        if call.meta:
            self._carry(trip, trip.contract)
        return trip.contract

    def _carry(self, trip: Trip, contract: Contract) -> None:
        """From here on the call carries what may go on, and nothing else; what a contract lets go on counts as an
        argument does."""
        found = carried.split(trip.call.meta, contract.meta)
        for name, text in list(found.trace.items()):
            if self._guard.shown(contract, [text, unquote(text)])[1]:
                del found.trace[name]
                found.refused[name] = "secret"
        problem = carried.meta_problem(found.meta) if found.meta else None
        meta = found.meta if problem is None else {}
        trip.call = replace(trip.call, meta=meta, traced=found.trace, trace=found.trace.get("traceparent"))
        trip.left_behind = {
            **({"stripped": found.stripped} if found.stripped else {}),
            **({"refused": found.refused} if found.refused else {}),
        }
        if problem is not None:
            raise Refused(Status.VALIDATION_FAILURE, "bad_meta", f"The call cannot be made: {problem}.")
        if meta:
            trip.arguments_digest = _digest(trip.call)

    def _listed(self, rules: Rulebook, trip: Trip) -> Contract:
        """A resource, prompt or completion: allowed by the server's own list or not at all."""
        call = trip.call
        if call.fault is not None:
            raise Refused(Status.VALIDATION_FAILURE, "bad_request", call.fault)
        if call.kind == "completion" and (problem := completion_problem(call.arguments)) is not None:
            raise Refused(Status.VALIDATION_FAILURE, "bad_request", f"The completion cannot be made: {problem}.")
        if call.kind == "resource" and call.server == SERVER and SERVER in rules.implicit:
            return rules.implicit[SERVER]
        if call.kind in ASIDE and call.server is not None and call.server in rules.servers:
            return replace(rules.implicit[call.server], result=_LISTING)
        spec, known = rules.servers.get(call.server or ""), settled(call)
        if spec is None or known is None or not is_listed(spec, known):
            raise Refused(Status.VALIDATION_FAILURE, f"unknown_{call.kind}", f"no {call.kind} {call.tool!r} is offered")
        if known is not call:
            trip.call = call = known
            trip.arguments_digest = _digest(replace(call, meta={}))
        if call.kind == "prompt":
            trip.definition = rules.prompts.get((spec.name, str(call.arguments.get("name"))))
            if trip.definition is None:
                raise Refused(Status.UNAVAILABLE, "not_pinned", f"the prompt {call.tool!r} was not accepted yet")
        return rules.implicit[spec.name]

    def _policy(self, rules: Rulebook, trip: Trip, contract: Contract) -> None:
        decision = trip.decision = rules.policy.decide(trip.call, contract)
        if contract.commands is not None and decision.allowed:
            trip.decision = asking.for_programs(decision, trip.call, contract)
        if not decision.allowed:
            code = "policy_error" if decision.error is not None else "policy"
            raise Refused(Status.DENIED, code, f"Refused by policy: {decision.reason}")
        if decision.asks and trip.call.kind in ASIDE:
            text = f"Refused by policy: {decision.reason}, and nobody is asked for {trip.call.method}"
            raise Refused(Status.DENIED, "policy", text)

    # ── 3 once ────────────────────────────────────────────────────────────────────────────────────

    async def _earlier(self, rules: Rulebook, trip: Trip, contract: Contract) -> tuple[Key | None, Outcome | None]:
        if trip.call.idempotency_key is None and contract.idempotent_key is None:
            return None, None
        digest = canonical.digest([trip.arguments_digest, contract.name])
        see = lambda: variables(trip.call, contract, rules.environment)  # noqa: E731
        key = self._once.key(trip.call, contract, digest, see)
        if key is None:
            return None, None
        earlier = await self._once.earlier(key, contract.timeout_seconds)
        return key, None if earlier is None else self._replay(trip, *earlier)

    def _replay(self, trip: Trip, call_id: str, kept: Json) -> Outcome:
        """What was kept, as it may go on now: more may be secret, and the contract may say less, than at that time."""
        trip.replayed_from = call_id
        outcome, contract = once.unpack(kept, self._guard.message), trip.contract
        assert contract is not None
        if outcome.error is not None:
            outcome = replace(outcome, error=self._guard.redacted(contract, outcome.error))
        if outcome.result is None:
            return outcome
        guarded = self._guard.inspect(contract, None, outcome.result)
        trip.strike(guarded.redactions, guarded.secrets)
        if guarded.problem is not None:
            code, text = guarded.problem
            return Outcome(Status.FAILED, code, text, trust=guarded.trust)
        return replace(outcome, result=guarded.result, trust=guarded.trust)

    # ── 5 approval, 6 grant ───────────────────────────────────────────────────────────────────────

    async def _grant_or_join(
        self, rules: Rulebook, trip: Trip, contract: Contract, key: Key | None, channel: Channel
    ) -> Grant | Outcome:
        """The grant; or, where another call took the key since we looked, what that one comes to."""
        while True:
            try:
                return await self._grant(rules, trip, contract, key, channel)
            except _KeyTaken:
                assert key is not None
                earlier = await self._once.earlier(key, contract.timeout_seconds)
                if earlier is not None:
                    return self._replay(trip, *earlier)

    async def _grant(self, rules: Rulebook, trip: Trip, contract: Contract, key: Key | None, channel: Channel) -> Grant:
        """Consume the approval, take the key and write *started*, in one transaction."""
        assert trip.decision is not None
        see = lambda: variables(trip.call, contract, rules.environment)  # noqa: E731
        requirement = rules.approvals.requirement(contract, trip.decision, see)
        if requirement is not None and carried.FREE_TEXT in trip.call.traced:
            trip.leave(carried.FREE_TEXT, "approval")
        digest = await self._leave(rules, trip, requirement, channel) if requirement is not None else ""
        trip.isolation = self._dispatcher.isolation(contract)

        def work(tx: Transaction) -> tuple[Receipt, Approval | None]:
            approval: Approval | None = None
            # The key first: whoever has it may also have used the approval, and is then to be joined.
            if key is not None and tx.take_key(key.scope, key.name, key.request_digest, trip.call.id) is not None:
                raise _KeyTaken
            if requirement is not None:
                approval = trip.approval = self._use(rules, tx, digest, trip.call.id)
            if contract.rate.per_day is not None:
                scope = budget.day_scope(trip.call, contract)
                if not tx.spend(scope, trip.began_at.date().isoformat(), contract.rate.per_day):
                    raise Refused(Status.DENIED, "quota", f"the day's quota of {contract.name} is used up")
            kept = self._kept(contract, _whole(trip.call), contract.log.arguments)
            if kept is not None:
                trip.kept["arguments"] = canonical.salted_bytes(kept, trip.salt)
                tx.put_payload(trip.call.id, "arguments", trip.salt, kept)
            return tx.append("started", trip.call.id, journal.started(trip), salt=trip.salt), approval

        alone = self._under_way == 1
        plain = key is None and requirement is None and contract.rate.per_day is None
        keeps = contract.log.arguments == "redacted" or contract.record == "full"
        try:
            if plain and not keeps and not trip.effect_possible:
                trip.started = await self._store.begin(trip.call.id, journal.started(trip), trip.salt, alone=alone)
            else:
                trip.started, trip.approval = await self._store.write(
                    work,
                    durable=trip.effect_possible,
                    alone=alone,
                    covered=trip.effect_possible,  # by the end's, where nothing can happen before that
                )
        except _AlreadyUsed:
            trip.approval = None
            assert requirement is not None
            shown = lambda: asking.summary(self._guard, trip)  # noqa: E731
            raise await rules.approvals.ask_again(asking.named(trip), digest, requirement, shown) from None
        except Unproven as exc:
            trip.approval = trip.about = None
            log.error("call %s is refused: %s", trip.call.id, exc)
            raise unproven(exc) from None
        except (Refused, StoreError):
            trip.approval = trip.about = None  # rolled back: the approval was not used
            raise
        return Grant(
            call=trip.call,
            contract=contract,
            decision=trip.decision,
            definition=trip.definition,
            arguments_digest=trip.arguments_digest,
            approval_id=trip.approval.id if trip.approval is not None else None,
            expires_at=time.monotonic() + _GRANT_SECONDS,
            after_step=trip.state[0] if trip.state is not None else None,
        )

    @staticmethod
    def _use(rules: Rulebook, tx: Transaction, digest: str, call_id: str) -> Approval:
        """The leave that this call runs on, from now on used. Raises Unproven, or _AlreadyUsed where there is none."""
        approval = asking.use(rules, tx, digest, call_id)
        if approval is None:
            raise _AlreadyUsed
        return approval

    async def _leave(self, rules: Rulebook, trip: Trip, requirement: Requirement, channel: Channel) -> str:
        """A person's leave for the call as it is now; where its session went on meanwhile, they are asked anew."""
        contract = trip.contract
        assert contract is not None
        trip.state = await self._dispatcher.state(trip.call, contract)
        while True:
            digest = asking.binding(rules, trip, contract, requirement)
            shown = lambda: asking.summary(self._guard, trip)  # noqa: E731
            await rules.approvals.obtain(asking.named(trip), digest, requirement, shown, channel)
            if self.rules is not rules and self._changed(rules, trip, requirement):
                text = "The rules were changed while this call waited for a person; make it again to have them asked."
                raise Refused(Status.DENIED, "rules_changed", text)
            seen, trip.state = trip.state, await self._dispatcher.state(trip.call, contract)
            if trip.state == seen:
                return digest

    def _changed(self, rules: Rulebook, trip: Trip, requirement: Requirement) -> bool:
        """Whether people were asked by rules, or about a contract, that are no longer in force."""
        now = self.rules
        assert trip.contract is not None
        fresh = replace(trip)
        try:
            if trip.call.kind == "tool":
                found = now.catalog.resolve(trip.call, now.environment)
                fresh.contract, fresh.definition = found.contract, found.definition
            else:
                fresh.contract = self._listed(now, fresh)
        except Refused:
            return True
        return asking.binding(now, fresh, fresh.contract, requirement) != asking.binding(
            rules, trip, trip.contract, requirement
        )

    # ── 7 dispatch, 8 guard ───────────────────────────────────────────────────────────────────────

    async def _carry_out(self, rules: Rulebook, trip: Trip, grant: Grant, channel: Channel) -> Outcome:
        trip.dispatched = True
        clean = GuardedChannel(self._guard, grant.contract, channel)
        try:
            answer = await self._dispatcher.run(grant, Rounds(clean, channel, rules, trip, self._guard, self._store))
        except (Unavailable, Refused) as exc:
            if isinstance(exc, Unavailable) or exc.status is Status.VALIDATION_FAILURE:
                trip.dispatched = False  # provably never started
            raise
        trip.attempts, trip.isolation, trip.ran = answer.attempts, answer.isolation, answer.ran
        trip.within, trip.network = answer.within, answer.network
        trip.redactions, trip.secrets = dict(answer.redactions), dict(answer.secrets)
        if answer.result is None:
            return Outcome(answer.status, answer.reason_code, self._guard.message(answer.message))
        guarded = self._guard.inspect(grant.contract, grant.definition, answer.result)
        trip.strike(guarded.redactions, guarded.secrets)
        trip.encoded_result = guarded.encoded
        if guarded.problem is not None:
            code, text = guarded.problem
            return Outcome(Status.FAILED, code, text, trust=guarded.trust)
        # Output as it came is for nobody where the contract has something removed from it.
        whole = not grant.contract.redact and grant.contract.result.fields is None
        ran, within = (answer.ran, answer.within) if whole else (None, None)
        return Outcome(
            answer.status, answer.reason_code, result=guarded.result, trust=guarded.trust, ran=ran, within=within
        )

    def _refusal(self, trip: Trip, exc: Refused) -> Outcome:
        error: Json | None = None
        message = self._guard.message(exc.message, trip.contract)
        if isinstance(exc, UpstreamFailed):
            error = {"code": exc.code, "message": message}
            if exc.data is not None and trip.contract is not None:
                with contextlib.suppress(Refused):
                    error["data"] = self._guard.redacted(trip.contract, exc.data)
        trust = _trust(trip, exc.reason_code)
        return Outcome(exc.status, exc.reason_code, message, trust=trust, approval_id=exc.approval_id, error=error)

    def _problem(self, trip: Trip, status: Status, code: str, text: str) -> Outcome:
        return Outcome(status, code, self._guard.message(text), trust=_trust(trip, code))

    # ── 9 fact, 10 audit ──────────────────────────────────────────────────────────────────────────

    async def _close(self, trip: Trip, key: Key | None, ticket: budget.Ticket | None, outcome: Outcome) -> Outcome:
        """Write *finished*; without it there is no result to give."""
        if ticket is not None:
            ticket.release(outcome.status)
        elif trip.arguments_digest:
            self._budget.note(trip.call, trip.arguments_digest, outcome.status)
        told = self._facts(trip, outcome)
        if trip.ran is not None:
            told = self._guard.facts(told)
        if outcome.result is not None and trip.dispatched and trip.is_own:
            complete(outcome.result, told)

        def work(tx: Transaction) -> Receipt:
            contract = trip.contract
            if contract is not None and outcome.result is not None:
                kept = self._kept(contract, outcome.result, contract.log.result)
                if kept is not None:
                    trip.kept["result"] = canonical.salted_bytes(kept, trip.salt)
                    tx.put_payload(trip.call.id, "result", trip.salt, kept)
            if key is not None:
                once.settle(tx, key, trip.call.id, outcome if trip.dispatched else None)
            return tx.append("finished", trip.call.id, journal.finished(trip, outcome, told))

        try:
            durable = trip.effect_possible and trip.started is not None
            receipt = await self._store.write(work, durable=durable, alone=self._under_way == 1)
        except StoreError as exc:
            log.error("call %s could not be closed on record: %s", trip.call.id, exc)
            status = Status.UNKNOWN if trip.dispatched else Status.UNAVAILABLE
            lost = Outcome(status, "store", own_words("the outcome could not be recorded, so it is withheld"))
            return _completed(lost, self._facts(trip, lost))
        return _completed(outcome, told, receipt)

    def _facts(self, trip: Trip, outcome: Outcome) -> Json:
        return facts.build(
            facts.Ending(
                call=trip.call,
                contract=trip.contract,
                decision=trip.decision,
                status=outcome.status,
                reason_code=outcome.reason_code,
                started_at=trip.began_at,
                wall_ms=trip.wall_ms,
                dispatched=trip.dispatched,
                isolation=trip.isolation,
                result=outcome.result,
                encoded=trip.encoded_result if outcome.result is not None else None,
                redactions=trip.redactions,
                ran=trip.ran,
                within=trip.within,
                possible=trip.possible,
                network=trip.network,
                answered=trip.answered,
            )
        )

    def _kept(self, contract: Contract, value: Json, level: str) -> bytes | None:
        """The text of a payload that the contract lets us keep, redacted; it lies apart from the chain."""
        if level != "redacted" and contract.record != "full":
            return None
        return canonical.dumps(self._guard.redacted(contract, value))


def _completed(outcome: Outcome, facts: Json, receipt: Receipt | None = None) -> Outcome:
    """Spelled out, because `dataclasses.replace` costs five times as much and every call passes here."""
    return Outcome(
        outcome.status,
        outcome.reason_code,
        outcome.message,
        outcome.result,
        outcome.trust,
        facts,
        outcome.approval_id,
        receipt,
        outcome.error,
        outcome.ran,
        outcome.within,
    )


def _trust(trip: Trip, reason_code: str) -> str:
    """Of the text of a refusal: our own words, or such as a server had a hand in."""
    if reason_code not in journal.SAID_BY_OTHERS:
        return "trusted"
    return trip.contract.result.trust if trip.contract is not None else "untrusted"


def _whole(call: Call) -> Json:
    """The arguments, with what goes to the server beside them."""
    beside = {"_meta": call.meta, "inputResponses": call.inputs}
    return {**call.arguments, **{name: value for name, value in beside.items() if value}}


def _digest(call: Call) -> str:
    try:
        whole = [call.method, call.tool, call.arguments, call.inputs]
        return canonical.digest([*whole, call.meta] if call.meta else whole)
    except (ValueError, TypeError, RecursionError):
        raise Refused(Status.VALIDATION_FAILURE, "bad_request", "The arguments are not JSON.") from None


class _AlreadyUsed(Exception):
    """Another call consumed the approval first."""


class _KeyTaken(Exception):
    """Another call took the key first."""
