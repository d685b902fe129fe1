"""Recorded calls decided again under other rules.

The log has no arguments, only digests of them, unless a contract keeps their text. So there are three values: a rule
matches, does not match, or that depends on arguments that are not on record. A rule that was in force already, with the
same conditions, did or did not match then, and the record says which: most calls can be decided again all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ringfence.core import canonical
from ringfence.core.canonical import object_at
from ringfence.core.errors import Refused
from ringfence.core.labels import in_force
from ringfence.core.model import Action, Call, Contract, Flow, Json, Principal, Rule
from ringfence.core.record import dataclass
from ringfence.governance import journal
from ringfence.governance.foresight import Foresight
from ringfence.governance.policy import AS_SENT, FAILS, MISSES, OTHER_NAME, SHADOW, of_flow, widened
from ringfence.governance.rulebook import implicit_contract
from ringfence.sandbox.tools.toolkit import SERVER

_NOT_OFFERED = ("unknown_tool", "wrong_environment", "unknown_resource", "unknown_prompt")
_JUDGED = ("tool", "resource", "prompt", "listing", "logging")
_MAX_NAMES = 200
"""So many names of arguments a record has at most."""
_EMPTY = 2
"""The bytes of `{}`."""
_AS = "; as "
"""In a reason: the call ran code, and was decided as what runs it, too."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of a call's payload, and the salt of its digests."""

    salt: bytes
    whole: Json


@dataclass(frozen=True, slots=True)
class Again:
    """A recorded call, decided again."""

    tool: str
    old: str
    old_rules: tuple[str, ...]
    new: frozenset[str]
    """Every verdict that is possible: one, unless it depends on what is not on record."""
    new_rules: tuple[str, ...]
    """Those of which it is known that they match."""
    depends: tuple[str, ...] = ()
    why: str = ""
    """The reason code, where it would be refused before policy is asked."""

    @property
    def decided(self) -> bool:
        """Whether it is known if it would end differently."""
        return len({_ending(each) for each in self.new}) == 1

    @property
    def changed(self) -> bool:
        return self.decided and _ending(next(iter(self.new))) != _ending(self.old)


def _ending(verdict: str) -> str:
    return "deny" if verdict == "error" else verdict


class Redecision:
    """What recorded calls would come to under `new`; `old` is what was in force, as far as it still is known."""

    def __init__(self, old: Foresight, new: Foresight, principal: Callable[[str], Principal]) -> None:
        self._old = old
        self._new = new
        self._principal = principal
        in_force = [
            (_condition(rule), rule)
            for rule in old.policy.rules
            if rule.enabled and (not rule.environments or old.environment in rule.environments)
        ]
        self._before: dict[str, list[Rule]] = {
            rule.id: [before for condition, before in in_force if condition == _condition(rule)]
            for rule in new.policy.rules
        }
        """The rules of then with the conditions of a rule of now, by its id."""

    def again(self, body: Json, kept: Kept | None = None) -> Again | str:
        """The call of this *finished* record; or why it is not decided again."""
        about, decision = object_at(body, "call"), object_at(body, "decision")
        kind, code = str(about.get("kind")), str(body.get("reason_code"))
        if kind not in _JUDGED or (about.get("server") == SERVER and kind != "tool"):
            return f"a {kind} of the gateway's own" if about.get("server") == SERVER else f"a {kind}"
        if not decision and code not in _NOT_OFFERED:
            return f"it did not get to policy ({code})"
        old = _verdict_of(body, decision)
        tool, rules = str(about.get("tool")), _texts(decision.get("rules"))
        call = self._call(body, about, kind, tool)
        try:
            call, contract = self._contract(call)
        except Refused as exc:
            return Again(tool, old, rules, frozenset({"deny"}), (), why=exc.reason_code)
        exact = _exact(body, kept) if kind == "tool" else None
        if exact is not None:
            got = self._new.judge(replace(call, arguments=exact[0], meta=exact[1], inputs=exact[2]), contract)
            return Again(tool, old, rules, frozenset({got.verdict}), got.decision.rules)
        if _AS in str(decision.get("reason")):
            return Again(tool, old, rules, frozenset({old, "deny", "allow"}), (), ("the code that it ran",))
        held = () if call.flow is None else call.flow.labels
        call = replace(call, flow=Flow(contract.labels, in_force(contract.labels, held)))
        weighed = self._new.policy.weigh(call, contract, lambda rule: self._known(rule, body, contract))
        verdicts, depends = weighed.verdicts, weighed.depends
        asks = self._contract_asks(call, contract, body) if kind == "tool" else False
        if asks is not False:
            wide = widened(verdicts)
            if asks:
                wide = frozenset(each for each in wide if "ask" in each or each in ("deny", "error"))
            elif wide != verdicts:
                named = f"approval {contract.approval}"
                depends = (*depends, named if contract.approval != "none" else "programs that people are asked for")
            verdicts = wide
        return Again(tool, old, rules, verdicts, weighed.decision.rules, depends if len(verdicts) > 1 else ())

    def _call(self, body: Json, about: Json, kind: str, tool: str) -> Call:
        principal = object_at(about, "principal")
        agent = replace(self._principal(str(principal.get("agent"))), tenant=str(principal.get("tenant")))
        server = about.get("server")
        call = Call(
            id=str(about.get("id") or "call"),
            principal=replace(agent, person=principal.get("person")),
            tool=tool,
            arguments={"uri": tool} if kind == "resource" else {},
            kind=kind,  # type: ignore[arg-type]  # one of _JUDGED
            origin=about.get("origin") or "mcp-http",
            server=server,
            session=about.get("session"),
            box=about.get("box"),
            flow=Flow((), _texts(object_at(body, "facts", "labels").get("in_force"))),
        )
        return replace(call, arguments={"name": tool.removeprefix(f"{server}.")}) if kind == "prompt" else call

    def _contract(self, call: Call) -> tuple[Call, Contract]:
        if call.kind in ("listing", "logging") and (spec := self._new.servers.get(call.server or "")) is not None:
            return call, implicit_contract(spec)
        return self._new.contract(call)

    # ── What the record says of a rule ────────────────────────────────────────────────────────────

    def _known(self, rule: Rule, body: Json, contract: Contract) -> str | None:
        """Whether a rule that looks at arguments matches, as far as the record tells."""
        names = _names(body)
        if names is not None and any(name != "*" and name not in names for name in rule.argument_patterns):
            return MISSES
        if not self._is_comparable(rule, body, contract):
            return None
        found = {self._then(before, rule, body) for before in self._before[rule.id]}
        found.discard(None)
        return found.pop() if len(found) == 1 else None

    def _is_comparable(self, rule: Rule, body: Json, contract: Contract) -> bool:
        """Whether a rule of then and this one were asked the same of this call."""
        decision, under, about = object_at(body, "decision"), object_at(body, "contract"), object_at(body, "call")
        if decision.get("policy_digest") != self._old.policy.digest:
            return False
        if about.get("kind") == "tool" and (
            under.get("mode") != str(contract.mode) or about.get("server") != contract.server
        ):
            return False
        same = under.get("digest") == contract.digest
        of_contract = rule.when is not None and "contract" in rule.when
        return same or not (of_contract or of_flow(rule) or rule.conditions or body.get("carried"))

    @staticmethod
    def _then(before: Rule, rule: Rule, body: Json) -> str | None:
        decision = object_at(body, "decision")
        told = object_at(decision, "shadow") if before.mode == SHADOW else decision
        if f"rule {before.id!r} could not be evaluated" in str(told.get("error") or ""):
            loose = rule.action is Action.ALLOW and before.action is not Action.ALLOW and rule.argument_patterns
            return None if loose else FAILS
        if before.id not in _texts(told.get("rules")):
            # A rule that allows is tried on the arguments as they were sent alone, any other on all their forms.
            narrow = before.action is Action.ALLOW and rule.action is not Action.ALLOW and rule.argument_patterns
            return None if narrow else MISSES
        form = AS_SENT
        if rule.argument_patterns and rule.action not in (Action.DENY, Action.ASK):
            if before.mode == SHADOW:
                return None  # in which form is not on record
            form = str(object_at(decision, "forms").get(before.id, AS_SENT))
        if rule.action is not Action.ALLOW:
            return form
        return None if form == OTHER_NAME else AS_SENT if form == AS_SENT else MISSES

    def _contract_asks(self, call: Call, contract: Contract, body: Json) -> bool | None:
        asks = self._new.contract_asks(call, contract)
        name = contract.approval
        if asks is not None or object_at(body, "contract").get("digest") != contract.digest:
            return asks
        if name not in ("none", "always") and self._old.approvals.condition(name) != self._new.approvals.condition(
            name
        ):
            return None
        if _texts(object_at(body, "decision").get("asks")):
            return None  # asked for a rule: whether the contract would have, is not on record
        if _was_asked(body):
            return True
        return False if body.get("started_seq") is not None else None


def _condition(rule: Rule) -> Rule:
    """A rule by what it looks at alone."""
    bare = replace(rule, id="", name="", description="", action=Action.ALLOW, priority=0, approval=None)
    return replace(bare, owasp_asi_id=None, environments=(), enabled=True, mode="enforce")


def _exact(body: Json, kept: Kept | None) -> tuple[Json, Json, Json | None] | None:
    """The arguments, `_meta` and answers of a call, where the record proves that these are all, and unchanged."""
    carried = object_at(body, "carried")
    if carried.get("trace") or (kept is None and (carried.get("meta") or carried.get("inputs"))):
        return None
    if kept is None:
        return ({}, {}, None) if object_at(body, "arguments").get("bytes") == _EMPTY else None
    recorded = (body.get("arguments"), carried.get("meta"), carried.get("inputs"))

    def is_recorded(value: Any, told: Any) -> bool:
        digest = told.get("digest") if isinstance(told, Mapping) else None
        return told is None or canonical.salted_bytes(canonical.dumps(value), kept.salt) == digest

    for parts in journal.kept_parts(kept.whole, carried):
        if all(map(is_recorded, parts, recorded)):
            return parts
    return None  # something was redacted


def _names(body: Json) -> frozenset[str] | None:
    """All names of arguments at the top, where the record has them."""
    found = object_at(body, "arguments").get("names")
    known = object_at(body, "call").get("kind") == "tool" and not body.get("carried")
    if not known or not isinstance(found, list) or len(found) >= _MAX_NAMES:
        return None
    return frozenset(map(str, found))


def _was_asked(body: Json) -> bool:
    return bool(body.get("approval")) or str(body.get("reason_code")).startswith("approval")


def _verdict_of(body: Json, decision: Json) -> str:
    """What was decided, as the record has it; a person who was asked for the contract counts."""
    if not decision:
        return "deny"
    if decision.get("allowed") is not True:
        return "error" if decision.get("error") else "deny"
    asked = bool(decision.get("asks")) or _was_asked(body)
    boxed = decision.get("sandbox") is True
    return "+".join(word for word, holds in (("ask", asked), ("sandbox", boxed)) if holds) or "allow"


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()
