"""The pipeline of a call, written once.

    contract → policy → idempotency → budget → approval → grant → dispatch → guard → facts → audit

The stops are numbered as in docs/life-of-a-call.md; 1 (bytes) and 2 (the call) are in `front`.
Whatever happens, the call closes with exactly one *finished* record, and an answer goes out only after that record is
safe: no record, no result.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import unquote

from ringfence.core import aio, canonical
from ringfence.core.errors import OutcomeUnknown, Refused, StoreError, Unavailable, UpstreamFailed, WorkProgress
from ringfence.core.expression import variables, while_others_are_served
from ringfence.core.labels import in_force
from ringfence.core.model import (
    SYSTEM,
    Answer,
    Call,
    Contract,
    CostBudget,
    Decision,
    Effect,
    Flow,
    Grant,
    GuardedText,
    Json,
    Mode,
    Outcome,
    Principal,
    Receipt,
    ResultPolicy,
    ServerSpec,
    Status,
    own_words,
)
from ringfence.core.ports import Channel
from ringfence.core.quoting import quoted
from ringfence.governance import approval_binding, budget, call_meta, effects, facts, flow, idempotency, journal, undo
from ringfence.governance.approvals import Requirement, unproven
from ringfence.governance.budget import Budget
from ringfence.governance.client_answers import AnswerChannel
from ringfence.governance.dispatch import Dispatcher
from ringfence.governance.guard import ONLY_FIELDS, Guard, GuardedChannel, without_forged
from ringfence.governance.idempotency import IdempotencyKey, IdempotencyKeys
from ringfence.governance.journal import CallState
from ringfence.governance.policy import joined
from ringfence.governance.rulebook import Rulebook, completion_problem, implicit_contract, is_listed, settled
from ringfence.sandbox.tools import resources
from ringfence.sandbox.tools.results import explain
from ringfence.sandbox.tools.toolkit import KIT, SERVER, carried_code, forks, needs_session
from ringfence.store import Approval, Store, Transaction, Unproven
from ringfence.store.rows import Part

if TYPE_CHECKING:
    from ringfence.telemetry.watch import CallWatcher

log = logging.getLogger("ringfence.pipeline")

_GRANT_SECONDS = 10.0
_NEVER_RAN = frozenset({Status.VALIDATION_FAILURE, Status.DENIED, Status.APPROVAL_REQUIRED})
_MAX_NAME = 1000
_LISTING = ResultPolicy(max_bytes=8_000_000)
"""All pages of a server's list come as one result."""
_MAX_PREVIEW = 4000
"""Characters of a preview that a person is shown."""
_OWN_DATA = (-32021, -32042)
"""Errors that name a capability which the client lacks, or a URL for its user to visit: we composed their data."""
SERVER_NETWORK = "server_network"
"""The kind of record of the network requests that a server's box made between calls."""
SERVER_CIRCUIT = "server_circuit"
"""The kind of record of a server that gets no calls for a while because it failed, or that works again."""
AUTOMATIC = ("listing", "logging")
"""Kinds of calls that clients make by themselves. No person is asked for approval of them."""


class _NoClient:
    """The channel of a preview, which has no client: nothing is sent, and no question can be asked."""

    capabilities: Json = {}  # noqa: RUF012 - nothing is ever put in

    async def ask(self, questions: Mapping[str, Json]) -> Mapping[str, Json]:
        raise Refused(Status.FAILED, "client_refused", "a preview of a call has no client that could be asked")

    async def notify(self, method: str, params: Json) -> None:
        return None


NO_CLIENT = _NoClient()


class Pipeline:
    """`handle(call) -> Outcome`: nothing reaches a server except through here."""

    def __init__(
        self,
        store: Store,
        rules: Rulebook,
        dispatcher: Dispatcher,
        guard: Guard,
        limits: Budget,
        watcher: CallWatcher | None = None,
    ) -> None:
        """`watcher` keeps metrics, traces and logs of calls; None: there are none."""
        self.rules = rules
        self._watcher = watcher
        self._store = store
        self._dispatcher = dispatcher
        self._guard = guard
        self._budget = limits
        self._keys = IdempotencyKeys(store)
        self.stopping = False
        """Set when the gateway begins to stop: from then on it is the gateway that cancels calls, not their callers."""
        self._under_way = 0
        """How many calls run. If only one does, its records are written at once, on the event loop's own thread: there
        is no other to share a commit with."""

    async def handle(self, call: Call, channel: Channel) -> Outcome:
        self._under_way += 1
        try:
            return await self._handle(self._state(call), channel)
        finally:
            self._under_way -= 1

    def _state(self, call: Call) -> CallState:
        state = CallState(call, self.rules.environment, clean=self._guard.message)
        if self._watcher is not None:
            state.watch = self._watcher.begin(call, state.clean)
        return state

    async def _handle(self, state: CallState, channel: Channel) -> Outcome:
        rules, call = self.rules, state.call
        try:
            outcome = await self._outcome_of(rules, state, channel)
        except asyncio.CancelledError:
            with aio.shield():
                await self._close(state, self._stopped_outcome())
            raise
        except Exception:  # the edge of the pipeline: a fault of ours must still close the call on record
            log.exception("call %s failed inside the gateway", call.id)
            outcome = _internal_failure(state)
        try:
            return await self._close(state, outcome)  # 11 facts and audit
        except Exception:  # likewise: nothing was written
            log.exception("the facts or the record of call %s could not be made", call.id)
            return await self._close_bare(state)

    async def _outcome_of(self, rules: Rulebook, state: CallState, channel: Channel) -> Outcome:
        """Run the stages, and turn every expected error into an outcome."""
        try:
            return await self._run_stages(rules, state, channel)
        except Refused as exc:
            return await self._refusal(state, exc)
        except Unavailable as exc:
            lost = state.dispatched and state.possible.intended  # without a statement that nothing was begun
            status = Status.UNKNOWN if lost else Status.UNAVAILABLE
            return self._problem(state, status, exc.reason_code, exc.message)
        except OutcomeUnknown as exc:
            state.answered = exc.answered
            return self._problem(state, Status.UNKNOWN, exc.reason_code, exc.message)
        except StoreError as exc:
            # After dispatch it is the state of sessions that failed, and the call may have taken effect.
            log.error("the store failed %s the call ran: %s", "while" if state.dispatched else "before", exc)
            if state.dispatched:
                return Outcome(Status.UNKNOWN, "store", own_words("what became of the call could not be recorded"))
            text = own_words("the call could not be recorded, so it was not made")
            return Outcome(Status.UNAVAILABLE, "store", text)

    async def _run_stages(self, rules: Rulebook, state: CallState, channel: Channel) -> Outcome:
        contract = self._find_contract(rules, state)  # 3 contract
        await self._judge(rules, state, contract)  # 4 policy
        call = state.call  # the stages above may have replaced it
        key = state.key = await self._idempotency_key(rules, state, contract)  # 5 idempotency
        patience = idempotency.KeyWait.of(contract)
        if key is not None:
            replayed = await self._earlier(rules, state, key, patience)
            if replayed is not None:
                return replayed
        quota = None if call.kind in AUTOMATIC else rules.permissions.of(call.principal).quota
        state.slot = self._budget.admit(call, contract, state.arguments_digest, quota)  # 6 budget
        if state.opening is not None:
            self._budget.charge(state.slot, call, state.opening, call.arguments["count"])
        # 7 approval, 8 grant
        grant = await self._grant_or_join(rules, state, contract, key, patience, channel)
        # 9 dispatch, 10 guard
        return grant if isinstance(grant, Outcome) else await self._dispatch(rules, state, grant, channel)

    def _stopped_outcome(self) -> Outcome:
        if self.stopping:
            return Outcome(Status.KILLED, "stopping", own_words("the gateway was stopped before the call ended"))
        return Outcome(Status.KILLED, "cancelled", own_words("the caller cancelled the call"))

    async def withdrawn(self, call: Call) -> None:
        """Record a call that its caller cancelled, or that the stop of the gateway ended, before it was handled."""
        await self._close(self._state(call), self._stopped_outcome())

    @property
    def redaction_basis(self) -> object:
        """To be compared by identity: it is another object once `listed` redacts by other secrets or patterns."""
        return None if self._guard.redactor is None else self._guard.redactor.basis

    def listed(self, item: Json) -> Json:
        """An entry of a server's list, as a client may see it."""
        return self._guard.listed(without_forged(item)[0])

    async def server_start(
        self,
        spec: ServerSpec,
        principal: Principal,
        start: Callable[[], Awaitable[None]],
        places: tuple[str, ...] = (),
    ) -> None:
        """Start a server, as a call by `system`: on record before it happens, and closed with its outcome. `places` are
        the hosts that its box may reach besides those of its network."""
        how: Json = {"url": spec.url} if spec.url is not None else {"command": list(spec.command)}
        call = Call(canonical.new_id("call"), SYSTEM, spec.name, {**how, "for": principal.key}, "server", "system")
        call = replace(call, server=spec.name, method="server/start")
        state = self._state(call)
        state.contract = implicit_contract(spec)
        state.isolation = self._dispatcher.isolation(call, state.contract)
        state.contract = replace(state.contract, secrets=spec.secrets)  # for the record: it can use them from now on
        state.possible = effects.effects_of_start(spec, self._dispatcher.targets.servers.values(), places)
        try:
            # A server may have effects as soon as it starts, so the record of its start is on disk first.
            work: Callable[[Transaction], Receipt] = lambda tx: tx.append("started", call.id, journal.started(state))  # noqa: E731
            state.started = await self._store.write(work, durable=state.durable)
        except StoreError:
            self._tell_watcher(state, Outcome(Status.UNAVAILABLE, "store"))
            raise Unavailable("store", f"the start of server {spec.name} could not be recorded") from None
        state.dispatched = True
        outcome = Outcome(Status.SUCCESS, "ok")
        try:
            with state.working(boxed=False):
                await start()
        except Unavailable as exc:
            state.dispatched = False  # `ports.Launcher` raises it only if nothing was started
            outcome = Outcome(Status.UNAVAILABLE, exc.reason_code, self._guard.message(exc.message))
            raise
        except OutcomeUnknown as exc:  # its program ran, and may have done anything that its box allows
            outcome = Outcome(Status.FAILED, exc.reason_code, self._guard.message(exc.message))
            raise
        except BaseException:
            outcome = Outcome(Status.KILLED, "cancelled", own_words("the start of the server was cancelled"))
            raise
        finally:
            with aio.shield():
                await self._close(state, outcome)

    async def server_network(self, spec: ServerSpec, principal: Principal, network: Json) -> None:
        """Record the network requests that a server's box made while no call ran whose facts would have them."""
        if self._watcher is not None:
            self._watcher.metrics.sent(network)
        effect = Effect.UNKNOWN if facts.went_out(network) else Effect.NONE
        clean = self._guard.facts({"network": network})
        body = {"server": spec.name, "for": principal.key, "effect": str(effect), **clean}
        try:
            await self._store.write(lambda tx: tx.append(SERVER_NETWORK, None, body))
        except StoreError as exc:
            log.error("what server %s sent between calls could not be recorded: %s", spec.name, exc)

    async def server_circuit(self, server: str, principal: Principal, change: Json) -> None:
        """Record that a server which failed repeatedly gets no calls for a while, or that it works again."""
        body = {"server": server, "for": principal.key, **change}
        try:
            await self._store.write(lambda tx: tx.append(SERVER_CIRCUIT, None, body))
        except StoreError as exc:
            log.error("that server %s is %s could not be recorded: %s", server, change.get("state"), exc)

    # ── 3 contract, 4 policy ──────────────────────────────────────────────────────────────────────

    def _find_contract(self, rules: Rulebook, state: CallState) -> Contract:
        call = state.call
        if call.fault is None:
            plain = replace(call, meta={}, box=None) if call.meta or call.box is not None else call
            state.arguments_digest = _call_digest(plain)
            self._budget.check_loop(call, state.arguments_digest)
        if call.kind == "tool":
            capability = rules.resolve(call)
            state.contract = capability.contract
            state.definition = capability.definition
        else:
            state.contract = self._implicit_contract(rules, state)
        if call.box is not None:
            self._bind_session(rules, state, state.contract)
        if call.meta:
            self._filter_meta(state, state.contract)
        return state.contract

    @staticmethod
    def _bind_session(rules: Rulebook, state: CallState, contract: Contract) -> None:
        """If the server runs in sessions, the session that the call names counts as an argument from here on. For any
        other server it means nothing, and is dropped."""
        if not _runs_in_sessions(rules, contract):
            state.call = replace(state.call, box=None)
        state.arguments_digest = _call_digest(replace(state.call, meta={}))

    def _filter_meta(self, state: CallState, contract: Contract) -> None:
        """Reduce `_meta` to what may be sent on. What the contract lets through counts as an argument from here on."""
        found = call_meta.split(state.call.meta, contract.meta)
        for name, text in list(found.trace.items()):
            if self._guard.redact_with_counts(contract, [text, unquote(text)])[1]:
                del found.trace[name]
                found.refused[name] = "secret"
        problem = call_meta.meta_problem(found.meta) if found.meta else None
        meta = found.meta if problem is None else {}
        state.call = replace(state.call, meta=meta, traced=found.trace, trace=found.trace.get("traceparent"))
        state.dropped_meta = {
            **({"stripped": found.stripped} if found.stripped else {}),
            **({"refused": found.refused} if found.refused else {}),
        }
        if problem is not None:
            raise Refused(Status.VALIDATION_FAILURE, "bad_meta", f"The call cannot be made: {problem}.")
        if meta:
            state.arguments_digest = _call_digest(state.call)

    def _implicit_contract(self, rules: Rulebook, state: CallState) -> Contract:
        """The contract of a resource, prompt or completion. Raises Refused for one that its server does not list."""
        call = state.call
        if call.fault is not None:
            raise Refused(Status.VALIDATION_FAILURE, "bad_request", call.fault)
        if call.kind == "completion" and (problem := completion_problem(call.arguments)) is not None:
            raise Refused(Status.VALIDATION_FAILURE, "bad_request", f"The completion cannot be made: {problem}.")
        permission = rules.permissions.of(call.principal)
        permission.require_any(call)
        if call.kind == "resource" and call.server == SERVER and SERVER in rules.implicit:
            if (uri := resources.normal_address(call.tool)) is None:
                raise Refused(
                    Status.VALIDATION_FAILURE,
                    "unknown_resource",
                    f"no resource {quoted(call.tool, _MAX_NAME)} is offered",
                )
            if uri != call.tool:
                state.call = replace(call, tool=uri, arguments={**call.arguments, "uri": uri})
                state.arguments_digest = _call_digest(replace(state.call, meta={}))
            return rules.implicit[SERVER]
        if call.kind == "listing" and call.server == SERVER and SERVER in rules.implicit:
            return replace(rules.implicit[SERVER], result=_LISTING)
        if call.kind in AUTOMATIC and call.server is not None and call.server in rules.servers:
            permission.require_list(call, call.server)
            return replace(rules.implicit[call.server], result=_LISTING)
        spec = rules.servers.get(call.server or "")
        known = settled(call)
        if spec is None or known is None or not is_listed(spec, known):
            text = f"no {call.kind} {quoted(call.tool, _MAX_NAME)} is offered"
            raise Refused(Status.VALIDATION_FAILURE, f"unknown_{call.kind}", text)
        permission.require_item(known, spec.name)
        if known is not call:
            state.call = call = known
            state.arguments_digest = _call_digest(replace(call, meta={}))
        if call.kind == "prompt":
            state.definition = rules.prompts.get((spec.name, str(call.arguments.get("name"))))
            if state.definition is None:
                raise Refused(Status.UNAVAILABLE, "not_pinned", f"the prompt {quoted(call.tool)} was not accepted yet")
        return rules.implicit[spec.name]

    async def _judge(self, rules: Rulebook, state: CallState, contract: Contract) -> None:
        """The decision on a call, and what it may change. Raises Refused, Unavailable."""
        await self._decide(rules, state, contract)
        call = state.call
        self._dispatcher.check(call, contract, state.decision)  # type: ignore[arg-type]
        outside = await self._dispatcher.outside(call, contract)
        state.possible = self._dispatcher.possible_effects(call, contract, state.decision, outside)
        state.lasts = self._dispatcher.lasts(contract, state.decision)
        code = carried_code(call, contract, outside)
        if code is not None:
            await self._judge_program(rules, state, *code)
        if forks(contract) and outside.opened_by is not None:
            await self._judge_opening(rules, state, outside.opened_by)

    async def _decide(self, rules: Rulebook, state: CallState, contract: Contract) -> None:
        self._set_labels(rules, state, contract)
        decision = state.decision = await rules.policy.decided(state.call, contract)
        if contract.commands is not None and decision.allowed:
            state.decision = approval_binding.for_programs(decision, state.call, contract)
        _require_allowed(decision)
        if decision.asks and state.call.method == "resources/unsubscribe":
            # To end a subscription gives the agent nothing, and the end of its MCP session would wait for the person.
            state.decision = replace(decision, asks=(), reason=f"{decision.reason}; to end it no person is asked")
        elif decision.asks and state.call.kind in AUTOMATIC:
            text = f"Refused by policy: {decision.reason}, and no person can be asked for {state.call.method}"
            raise Refused(Status.DENIED, "policy", text)

    def _set_labels(self, rules: Rulebook, state: CallState, contract: Contract) -> None:
        """Set the labels of the call, and those in force. Raises StoreError."""
        if state.call.kind in AUTOMATIC:
            return
        kept = flow.begun(rules, self._store, state.call, contract, time.time())
        if kept is not None:
            state.flow = None if state.is_preview else kept
            state.call = replace(state.call, flow=kept.flow)

    @staticmethod
    def _with_labels_of(rules: Rulebook, call: Call, contract: Contract) -> Call:
        """The call with the labels of another capability besides its own."""
        if call.flow is None:
            return call
        own = tuple(dict.fromkeys((*call.flow.own, *flow.own_labels(call, contract, rules.environment))))
        return replace(call, flow=Flow(own, in_force(own, call.flow.labels)))

    async def _judge_program(self, rules: Rulebook, state: CallState, tool: str, arguments: Json) -> None:
        """Judge a call that carries code also as a call of `tool`, which runs such code: policy, contracts and people
        must allow both. Raises Refused, Unavailable."""
        assert state.decision is not None
        state.programs = tuple(rules.catalog.serving(tool, rules.environment))
        if not state.programs:
            text = f"{state.call.tool} would run code as {tool} does, and that is not offered here"
            raise Refused(Status.DENIED, "policy", f"Refused by policy: {text}")
        permission = rules.permissions.of(state.call.principal)
        if not any(permission.calls(each.name) for each in state.programs):
            text = f"{state.call.tool} would run code as {tool} does, which the agent may not call"
            raise Refused(Status.DENIED, "not_for_agent", f"{text}: the operator did not declare it for this agent.")
        for each in state.programs:
            if permission.calls(each.name):
                rules.permissions.require_scope(state.call.principal, each.name)
            call = self._with_labels_of(rules, replace(state.call, tool=each.name, arguments=arguments), each)
            decision = await rules.policy.decided(call, each)
            asks = await self._rules_that_ask(rules, call, each)
            state.decision = joined(state.decision, decision, each.name, asks)
            _require_allowed(state.decision)
            # The tool would run in a session, and take the code in any of the ways that it offers.
            inside = {"session": "", **dict.fromkeys(KIT[tool].one_of[:1], "")}
            self._dispatcher.check(replace(call, arguments=inside), each, decision)

    @staticmethod
    async def _rules_that_ask(rules: Rulebook, call: Call, contract: Contract) -> tuple[str, ...]:
        see = partial(variables, call, contract, rules.environment)
        return await while_others_are_served(call, partial(rules.approvals.asked_by, contract, see))

    async def _judge_opening(self, rules: Rulebook, state: CallState, name: str) -> None:
        """Judge a fork also as a call of the capability that opened the session: each fork is a session like it, so
        policy, the contract and people must allow that, too. Raises Refused."""
        assert state.decision is not None
        opening = state.opening = rules.catalog.named(name, rules.environment)
        if opening is None and state.call.attached is not None:
            return  # a program of the user's, whose configuration need not be the one of the session's agent
        if opening is None:
            text = f"{name}, by which this session was opened, is not offered here any more"
            raise Refused(Status.DENIED, "policy", f"Refused by policy: {text}")
        call = self._with_labels_of(rules, replace(state.call, tool=opening.name), opening)
        rules.permissions.of(call.principal).require_tool(call, ())
        rules.permissions.require_scope(call.principal, opening.name)
        decision = await rules.policy.decided(call, opening)
        asks = await self._rules_that_ask(rules, call, opening)
        state.decision = joined(state.decision, decision, opening.name, asks)
        _require_allowed(state.decision)

    # ── 5 idempotency ─────────────────────────────────────────────────────────────────────────────

    async def _idempotency_key(self, rules: Rulebook, state: CallState, contract: Contract) -> IdempotencyKey | None:
        if state.call.idempotency_key is None and contract.idempotent_key is None:
            return None
        digest = canonical.digest([state.arguments_digest, contract.name])
        see = partial(variables, state.call, contract, rules.environment)
        spec = rules.servers.get(contract.server or "")
        server = None if spec is None else [spec.name, spec.url, list(spec.command), spec.cwd]
        place = canonical.digest([rules.environment, contract.tool, server])
        make = partial(self._keys.key, state.call, contract, place, digest, see)
        return make() if contract.idempotent_key is None else await while_others_are_served(state.call, make)

    async def _earlier(
        self, rules: Rulebook, state: CallState, key: IdempotencyKey, patience: idempotency.KeyWait
    ) -> Outcome | None:
        """The outcome of an earlier call under this key, which may still run; None if there was none."""
        found = await self._keys.earlier(key, state.call, patience)
        await self._recheck_rules(rules, state)
        return None if found is None else self._replay(state, *found)

    def _replay(self, state: CallState, call_id: str, kept: Json) -> Outcome:
        """The kept outcome of an earlier call, guarded again: by now there may be further secrets, and the contract may
        allow less."""
        state.replayed_from = call_id
        outcome = idempotency.unpack(kept, self._guard.message)
        contract = state.contract
        assert contract is not None
        if outcome.error is not None:
            outcome = replace(outcome, error=self._guard.redacted(contract, outcome.error))
        if outcome.result is None:
            return outcome
        guarded = self._guard.inspect(contract, None, outcome.result)
        state.add_redactions(guarded.redactions, guarded.secrets)
        if guarded.problem is not None:
            code, text = guarded.problem
            return Outcome(Status.FAILED, code, text, trust=guarded.trust)
        return replace(outcome, result=guarded.result, trust=guarded.trust)

    # ── 7 approval, 8 grant ───────────────────────────────────────────────────────────────────────

    async def _grant_or_join(
        self,
        rules: Rulebook,
        state: CallState,
        contract: Contract,
        key: IdempotencyKey | None,
        patience: idempotency.KeyWait,
        channel: Channel,
    ) -> Grant | Outcome:
        """The grant; or, where another call took the key meanwhile, the outcome of that call."""
        while True:
            try:
                return await self._grant(rules, state, contract, key, channel)
            except _KeyTaken:
                assert key is not None
                earlier = await self._earlier(rules, state, key, patience)
                if earlier is not None:
                    return earlier

    async def _grant(
        self, rules: Rulebook, state: CallState, contract: Contract, key: IdempotencyKey | None, channel: Channel
    ) -> Grant:
        """Consume the approval, take the key and write *started*, in one transaction."""
        assert state.decision is not None
        requirement = await rules.approvals.required(state.call, contract, state.decision, rules.environment)
        if requirement is not None and call_meta.FREE_TEXT in state.call.traced:
            state.drop_trace(call_meta.FREE_TEXT, "approval")
        digest = await self._approval(rules, state, requirement, channel) if requirement is not None else ""
        await self._recheck_rules(rules, state)
        state.isolation = self._dispatcher.isolation(state.call, contract)
        forked = [] if state.opening is None else [state.opening] * state.call.arguments["count"]
        with_quota = [each for each in (contract, *forked) if each.rate.per_day is not None]
        cost = contract.cost + sum(each.cost for each in forked)
        charged = _cost_budgets(rules, state) if cost else []
        notes = state.flow if state.flow is not None and flow.unsaid(state.flow) else None

        def work(tx: Transaction) -> tuple[Receipt, Approval | None]:
            approval: Approval | None = None
            if notes is not None:
                flow.note(tx, notes)
            # The key first: the call that has taken it may have used the approval, too, and this one joins that call.
            if key is not None and tx.take_key(key.scope, key.name, key.request_digest, state.call.id) is not None:
                raise _KeyTaken
            if requirement is not None:
                approval = state.approval = self._consume(rules, tx, digest, state.call.id)
            self._spend_quotas(rules, tx, state, with_quota)
            for use in minutes:
                use.spend(tx)
            _spend_budgets(tx, state, charged, cost)
            payload = self._payload_to_keep(contract, journal.as_sent(state.call), contract.log.arguments)
            if payload is not None:
                state.kept["arguments"] = canonical.salted_bytes(payload, state.salt)
                tx.put_payload(state.call.id, "arguments", state.salt, self._at_rest(state, "arguments", payload))
            return tx.append("started", state.call.id, journal.started(state), salt=state.salt), approval

        def on_written(done: tuple[Receipt, Approval | None]) -> None:
            """Called for a cancelled call, too: it must be closed as one that had this grant."""
            state.started, state.approval = done

        alone = self._under_way == 1
        if notes is None and state.flow is not None:
            state.flow.noted = True
        minutes = [] if state.slot is None else state.slot.minutes
        counted = with_quota or charged or minutes or _agent_quota(rules, state) is not None
        plain = key is None and requirement is None and not counted and notes is None
        keeps = contract.log.arguments == "redacted" or contract.record == "full"
        try:
            if plain and not keeps and not state.durable:
                state.started = await self._store.begin(
                    state.call.id,
                    journal.started(state),
                    state.salt,
                    alone=alone,
                    on_commit=lambda done: on_written((done, None)),
                )
            else:
                await self._store.write(
                    work,
                    durable=state.durable or notes is not None,
                    alone=alone,
                    # Without an effect outside, the checkpoint of the call's end is soon enough.
                    covered=state.durable,
                    on_commit=on_written,
                )
        except _AlreadyUsed:
            state.approval = None
            assert requirement is not None
            shown = lambda: approval_binding.summary(self._guard, state)  # noqa: E731
            raise await rules.approvals.ask_again(approval_binding.named(state), digest, requirement, shown) from None
        except Unproven as exc:
            state.approval = state.common = None
            log.error("call %s is refused: %s", state.call.id, exc)
            raise unproven(exc) from None
        except (Refused, StoreError):
            state.approval = state.common = None  # rolled back: the approval was not used
            raise
        return Grant(
            call=state.call,
            contract=contract,
            decision=state.decision,
            definition=state.definition,
            arguments_digest=state.arguments_digest,
            approval_id=state.approval.id if state.approval is not None else None,
            expires_at=time.monotonic() + _GRANT_SECONDS,
            after_step=state.session_state[0] if state.session_state is not None else None,
            snapshot=state.snapshot,
            recheck=partial(self._recheck_rules, rules, state),
        )

    @staticmethod
    def _spend_quotas(rules: Rulebook, tx: Transaction, state: CallState, with_quota: list[Contract]) -> None:
        """Count the call against the day's quotas of these contracts and of its agent. Raises Refused where one is used
        up."""
        day = state.began_at.date().isoformat()
        for each in with_quota:
            if not tx.spend(budget.day_scope(state.call, each), day, each.rate.per_day or 0):
                raise Refused(Status.DENIED, "quota", f"the day's quota of {each.name} is used up")
        of_agent = _agent_quota(rules, state)
        if of_agent is not None and not tx.spend(budget.agent_scope(state.call), day, of_agent):
            text = f"the day's quota of the agent {state.call.principal.agent} is used up"
            raise Refused(Status.DENIED, "quota", text)

    @staticmethod
    def _consume(rules: Rulebook, tx: Transaction, digest: str, call_id: str) -> Approval:
        """Consume the approval that this call runs on. Raises Unproven, or _AlreadyUsed where there is none."""
        approval = approval_binding.use(rules, tx, digest, call_id)
        if approval is None:
            raise _AlreadyUsed
        return approval

    async def _approval(self, rules: Rulebook, state: CallState, requirement: Requirement, channel: Channel) -> str:
        """Wait for a person's approval of the call as it is now, and return the digest that it is bound to. If another
        step ran in its session meanwhile, ask again."""
        contract = state.contract
        assert contract is not None
        state.session_state = await self._dispatcher.state(state.call, contract)
        state.snapshot = await self._dispatcher.snapshot(state.call, contract)
        while True:
            digest = approval_binding.binding(rules, state, contract, requirement)
            shown = lambda: approval_binding.summary(self._guard, state)  # noqa: E731
            asking = approval_binding.named(state)
            if contract.effects.preview is not None and not rules.approvals.is_asked(digest):
                state.preview = await self._preview(rules, state, contract.effects.preview)
            aside = state.slot.set_aside(contract) if state.slot is not None else contextlib.nullcontext()
            waiting = state.watch.waiting() if state.watch is not None else contextlib.nullcontext()
            with aside, waiting:
                shape = approval_binding.shape(rules, state, contract, requirement)
                patience = state.call.wait_seconds
                await rules.approvals.obtain(asking, digest, requirement, shown, channel, patience, shape)
            if self.rules is not rules and self._approval_terms_changed(rules, state, requirement):
                text = "The rules were changed while this call waited for a person; make it again to have them asked."
                raise Refused(Status.DENIED, "rules_changed", text)
            approved = (state.session_state, state.snapshot)
            state.session_state = await self._dispatcher.state(state.call, contract)
            state.snapshot = await self._dispatcher.snapshot(state.call, contract)
            if (state.session_state, state.snapshot) == approved:
                return digest

    async def _preview(self, rules: Rulebook, state: CallState, name: str) -> Json:
        """Preview the call by the capability `name`, for the person who is asked to approve it. The preview is a
        governed call itself."""
        call = state.call
        capability = next((e for e in rules.catalog.offered(rules.environment) if e.contract.name == name), None)
        if state.is_preview or capability is None or capability.contract.mode is not Mode.READ:
            return {"by": name, "problem": "it could not be shown: no such read is offered"}
        schema = None if capability.definition is None else capability.definition.body.get("inputSchema")
        arguments = undo.fitting(schema if isinstance(schema, dict) else {}, call.arguments)
        read = Call(canonical.new_id("call"), call.principal, name, arguments, "tool", call.origin, parent=call.id)
        preview = self._state(replace(read, session=call.session))
        preview.is_preview = True
        outcome = await self._handle(preview, NO_CLIENT)
        named = {"by": name, "call": read.id}
        if not outcome.ok:
            return {**named, "problem": f"it could not be shown ({outcome.status}/{outcome.reason_code})"}
        text = outcome.text
        return {**named, "text": text if len(text) <= _MAX_PREVIEW else f"{text[:_MAX_PREVIEW]}…"}

    async def _recheck_rules(self, rules: Rulebook, state: CallState) -> None:
        """Called after every wait, before the call begins: if the rules were tightened meanwhile, it does not begin. A
        reload that does not concern this call does not stop it. Raises Refused, Unavailable."""
        if self.rules is rules:
            return
        with WorkProgress():
            now, fresh = self.rules, self._under_current_rules(state)
            known = now.permissions.same(rules.permissions, state.call.principal)
            if not known or fresh is None or not await self._same_judgement(now, rules, fresh, state):
                text = "The rules were changed while this call waited, so it was not begun; make it again."
                raise Refused(Status.DENIED, "rules_changed", text)
        if state.started is None:
            state.decision = fresh.decision  # *started* records the decision that the call begins under

    async def _same_judgement(self, now: Rulebook, rules: Rulebook, fresh: CallState, state: CallState) -> bool:
        """Whether a call is the same under the current rules as when it arrived. Raises Unavailable."""
        if fresh.contract is None:
            return False
        try:
            await self._judge(now, fresh, fresh.contract)
        except Refused:
            return False
        return await approval_binding.judged(now, fresh) == await approval_binding.judged(rules, state)

    def _rules_in_force(self, rules: Rulebook, state: CallState) -> Rulebook:
        """The current rules, for a call that runs already. Raises Refused where its contract is another one by now."""
        now = self.rules
        if now is not rules:
            fresh = self._under_current_rules(state)
            assert state.contract is not None
            if fresh is None or fresh.contract is None or fresh.contract.digest != state.contract.digest:
                text = "The rules were changed while this call waited for its client, so no answer is sent on."
                raise Refused(Status.DENIED, "rules_changed", text)
        return now

    def _under_current_rules(self, state: CallState) -> CallState | None:
        """The call as it would be under the current rules; None where it would be refused. Raises Refused (unavailable)
        where something that it needs is gone."""
        now, fresh = self.rules, replace(state)
        try:
            if state.call.kind == "tool":
                found = now.resolve(state.call)
                fresh.contract = found.contract
                fresh.definition = found.definition
                fresh.programs = tuple(
                    each
                    for tool in {p.tool for p in state.programs}
                    for each in now.catalog.serving(tool, now.environment)
                )
                if state.opening is not None:
                    fresh.opening = now.catalog.named(state.opening.name, now.environment)
                    if fresh.opening is None:
                        return None
            else:
                fresh.contract = self._implicit_contract(now, fresh)
        except Refused as exc:
            if exc.status is Status.UNAVAILABLE:
                raise  # it is not forbidden: the error says what is gone
            return None
        if state.call.box is not None and not _runs_in_sessions(now, fresh.contract):
            return None  # it would run elsewhere
        return fresh

    def _approval_terms_changed(self, rules: Rulebook, state: CallState, requirement: Requirement) -> bool:
        """Whether people were asked by rules, or about a contract, that are no longer in force."""
        now, fresh = self.rules, self._under_current_rules(state)
        assert state.contract is not None
        if fresh is None or fresh.contract is None:
            return True
        return approval_binding.binding(now, fresh, fresh.contract, requirement) != approval_binding.binding(
            rules, state, state.contract, requirement
        )

    # ── 9 dispatch, 10 guard ──────────────────────────────────────────────────────────────────────

    async def _dispatch(self, rules: Rulebook, state: CallState, grant: Grant, channel: Channel) -> Outcome:
        state.dispatched = True
        clean = GuardedChannel(self._guard, grant.contract, channel)
        answering = AnswerChannel(
            clean, channel, lambda: self._rules_in_force(rules, state), state, self._guard, self._store
        )

        def asked(network: Json | None) -> None:
            state.network = facts.both_networks(state.network, network)

        try:
            boxed = state.is_own and not needs_session(grant.call, grant.contract)
            with state.working(boxed=boxed) as call:
                sent = grant if call is grant.call else replace(grant, call=call)
                answer = await self._dispatcher.run(sent, answering, asked)
        except (Unavailable, Refused) as exc:
            refused = isinstance(exc, Unavailable) or exc.status is Status.VALIDATION_FAILURE
            # A call that can change nothing outside has begun nothing there, whatever stopped it.
            state.dispatched = not (exc.nothing_begun or (refused and not state.effect_possible))
            raise
        except asyncio.CancelledError as exc:
            if (seen := aio.left(exc, Answer)) is not None:
                state.answered_by(seen)
            raise
        state.answered_by(answer)
        if answer.result is None:
            return Outcome(answer.status, answer.reason_code, self._set_message(state, answer.message))
        guarded = await self._guard.inspect_async(
            grant.contract, grant.definition, answer.result, state.call.principal.key
        )
        state.add_redactions(guarded.redactions, guarded.secrets)
        state.encoded_result = guarded.encoded
        state.shortened = guarded.shortened
        if guarded.problem is not None:
            code, text = guarded.problem
            return Outcome(Status.FAILED, code, text, trust=guarded.trust)
        # If the contract removes anything from the result, no caller gets the raw output of the box either.
        whole = not grant.contract.redact and grant.contract.result.fields is None
        ran, within = (answer.ran, answer.within) if whole else (None, None)
        return Outcome(
            answer.status, answer.reason_code, result=guarded.result, trust=guarded.trust, ran=ran, within=within
        )

    async def _refusal(self, state: CallState, exc: Refused) -> Outcome:
        error: Json | None = None
        message = self._set_message(state, exc.message)
        if isinstance(exc, UpstreamFailed):
            whole = state.contract is None or state.contract.result.fields is None
            if not whole:
                message = self._set_message(state, ONLY_FIELDS)
            error = {"code": exc.code, "message": message}
            if exc.data is not None and state.contract is not None and (whole or exc.code in _OWN_DATA):
                with contextlib.suppress(Refused):  # the error is then sent without data
                    error["data"] = await self._guard.error_data(state.contract, exc.data)
        trust = _trust_label(state, exc.reason_code)
        # A refusal after the call may have begun is a failure.
        status = Status.FAILED if state.dispatched and exc.status in _NEVER_RAN else exc.status
        return Outcome(status, exc.reason_code, message, trust=trust, approval_id=exc.approval_id, error=error)

    def _problem(self, state: CallState, status: Status, code: str, text: str) -> Outcome:
        return Outcome(status, code, self._set_message(state, text), trust=_trust_label(state, code))

    def _set_message(self, state: CallState, text: str) -> GuardedText:
        """Set the message that goes on record, and return the one for the caller; both are guarded. Argument values are
        removed from the first before that: in a text that was redacted, escaped or cut they are not found."""
        state.recorded_message = self._guard.message(journal.without_values(text, state.call), state.contract)
        return self._guard.message(text, state.contract)

    # ── 11 facts and audit ────────────────────────────────────────────────────────────────────────

    async def _close(self, state: CallState, outcome: Outcome) -> Outcome:
        """Write *finished*; without it there is no result to give."""
        key = state.key
        if state.slot is not None:
            state.slot.release(outcome.status)
        elif state.arguments_digest:
            self._budget.note(state.call, state.arguments_digest, outcome.status)
        if not state.dispatched and outcome.status in (Status.KILLED, Status.DENIED):
            state.isolation = {}  # planned, but no box or server got the call
        call_facts = self._guard.facts(facts.build(facts.FinishedCall(state, outcome, state.wall_ms)))
        if outcome.result is not None and state.dispatched and state.is_own:
            explain(outcome.result, call_facts)

        run = self._run_to_keep(state)

        def work(tx: Transaction) -> Receipt:
            contract = state.contract
            if contract is not None and outcome.result is not None:
                try:
                    kept = self._payload_to_keep(contract, outcome.result, contract.log.result)
                except Refused as exc:
                    log.warning("the result of call %s is not kept: %s", state.call.id, exc.message)
                    kept = None
                if kept is not None:
                    state.kept["result"] = canonical.salted_bytes(kept, state.salt)
                    tx.put_payload(state.call.id, "result", state.salt, self._at_rest(state, "result", kept))
            if run is not None:
                state.kept["run"] = canonical.salted_bytes(run, state.salt)
                tx.put_payload(state.call.id, "run", state.salt, self._at_rest(state, "run", run))
            if state.flow is not None and (state.dispatched or state.replayed_from is not None):
                flow.close(tx, state.flow)
            if key is not None:
                ran = state.dispatched and outcome.status is not Status.UNAVAILABLE
                light = len(state.encoded_result or b"") <= idempotency.MAX_KEPT
                room = light and not tx.has_kept(state.call.principal.key, idempotency.MAX_RESULTS)
                worth_keeping = ran and (state.durable or room)
                kept_bytes = idempotency.settle(tx, key, state.call.id, outcome if worth_keeping else None)
                self._keys.bound(tx, state.call.principal.key, kept_bytes)
            return tx.append("finished", state.call.id, journal.finished(state, outcome, call_facts))

        try:
            durable = state.durable and state.started is not None
            receipt = await self._store.write(work, durable=durable, alone=self._under_way == 1)
            if key is not None:
                self._keys.ended()
        except StoreError as exc:
            log.error("call %s could not be closed on record: %s", state.call.id, exc)
            self._store.owe(state.call.id)
            status = Status.UNKNOWN if state.dispatched else Status.UNAVAILABLE
            lost = Outcome(status, "store", own_words("the outcome could not be recorded, so it is withheld"))
            return self._tell_watcher(
                state, _with_facts(lost, facts.build(facts.FinishedCall(state, lost, state.wall_ms)))
            )
        return self._tell_watcher(state, _with_facts(outcome, call_facts, receipt))

    @staticmethod
    def _tell_watcher(state: CallState, outcome: Outcome) -> Outcome:
        """Tell the watcher of the end of a call, once it is on record."""
        if state.watch is not None:
            state.watch.ended(state.contract, outcome, removed=sum(state.redactions.values()))
        return outcome

    async def _close_bare(self, state: CallState) -> Outcome:
        """Close a call whose facts or record could not be made, without its arguments and its result: one of them may
        be what the gateway failed at."""
        with aio.shield():
            return await self._close(state.bare(), _internal_failure(state))

    def _run_to_keep(self, state: CallState) -> bytes | None:
        """What is kept to run the program again; None unless the contract says `record: full`."""
        contract = state.contract
        if contract is None or contract.record != "full" or state.ran is None:
            return None
        from ringfence.governance.remembered import run_to_keep  # noqa: PLC0415 - few contracts keep anything in full

        try:
            _, removed = self._guard.redact_with_counts(contract, state.call.arguments)
            run = run_to_keep(state, removed, self._dispatcher.environment(state.call, contract))
        except Refused as exc:
            log.warning("call %s cannot be replayed: %s", state.call.id, exc.message)
            return None
        return None if run is None else canonical.dumps(run)

    def _at_rest(self, state: CallState, part: Part, payload: bytes) -> bytes:
        """The payload as it is stored: sealed where the contract says `record: full`, else as it is."""
        full = state.contract is not None and state.contract.record == "full"
        return self._store.seal(state.call.id, part, payload) if full else payload

    def _payload_to_keep(self, contract: Contract, value: Json, level: str) -> bytes | None:
        """The redacted payload, where the contract has it kept. It is stored apart from the chain."""
        if level != "redacted" and contract.record != "full":
            return None
        return canonical.dumps(self._guard.redacted(contract, value))


def _with_facts(outcome: Outcome, facts: Json, receipt: Receipt | None = None) -> Outcome:
    """The outcome with its facts and receipt. Spelled out, since `dataclasses.replace` costs five times as much and
    every call passes here."""
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


def _internal_failure(state: CallState) -> Outcome:
    status = Status.UNKNOWN if state.dispatched else Status.UNAVAILABLE
    return Outcome(status, "internal", own_words("the gateway itself failed"))


def _require_allowed(decision: Decision) -> None:
    if not decision.allowed:
        code = "policy_error" if decision.error is not None else "policy"
        raise Refused(Status.DENIED, code, f"Refused by policy: {decision.reason}")


def _trust_label(state: CallState, reason_code: str) -> str:
    """The trust label of an error text: `trusted` if it is in our own words alone."""
    if reason_code not in journal.SAID_BY_OTHERS:
        return "trusted"
    return state.contract.result.trust if state.contract is not None else "untrusted"


def _cost_budgets(rules: Rulebook, state: CallState) -> list[tuple[str, str, CostBudget]]:
    """The budgets that the cost of a call is taken from."""
    return [] if state.call.kind in AUTOMATIC else rules.permissions.budgets(state.call.principal)


def _spend_budgets(tx: Transaction, state: CallState, charged: list[tuple[str, str, CostBudget]], cost: int) -> None:
    """Take the cost of the call from each budget. Raises Refused where one has too little left."""
    for scope, whose, units in charged:
        name, again = budget.window(units, state.began_at.timestamp())
        if not tx.spend(scope, name, units.units, cost):
            text = f"The {whose} may spend {units.units} units in {units.seconds:g} s, and this call costs {cost}"
            raise Refused(Status.DENIED, "quota", f"{text}; it has them again at {again}.")


def _agent_quota(rules: Rulebook, state: CallState) -> int | None:
    """How many calls the agent may make on a day; None: any number."""
    return None if state.call.kind in AUTOMATIC else rules.permissions.of(state.call.principal).quota.per_day


def _runs_in_sessions(rules: Rulebook, contract: Contract) -> bool:
    """Whether the contract's server runs in sessions, so that each call names its session."""
    spec = rules.servers.get(contract.server or "")
    return spec is not None and spec.placement == "session"


def _call_digest(call: Call) -> str:
    try:
        whole = [call.method, call.tool, call.arguments, call.inputs]
        if call.box is not None:
            whole += [call.meta, call.box]
        elif call.meta:
            whole += [call.meta]
        return canonical.digest(whole)
    except (ValueError, TypeError, RecursionError):
        raise Refused(Status.VALIDATION_FAILURE, "bad_request", "The arguments are not JSON.") from None


class _AlreadyUsed(Exception):
    """Another call consumed the approval first."""


class _KeyTaken(Exception):
    """Another call took the key first."""
