"""Whether a new configuration permits anything that the old one did not.

A reload that only tightens may happen by itself; one that loosens waits for a person. So everything here that is
not provably tighter, or of no consequence, counts as looser.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from ringfence.config.settings import Config
from ringfence.core.box import CommandRules, Listening, Mount
from ringfence.core.model import (
    Action,
    AgentSpec,
    ApprovalRule,
    Contract,
    CostBudget,
    HookSpec,
    Mode,
    NetworkSpec,
    Person,
    Rate,
    ResultPolicy,
    Retry,
    Rule,
    SecretSpec,
    ServerSpec,
    StandingTerms,
    Transport,
)
from ringfence.governance.policy import PRESETS, SHADOW

Holds = Callable[[Any, Any], bool]
"""Whether going from the old value to the new one permits nothing more."""


def loosens(old: Config, new: Config) -> list[str]:
    """Every way in which `new` permits more than `old`, as sentences."""
    return [
        *_settings(old, new),
        *_people(old.people, new.people),
        *_agents(old.agents, new.agents),
        *_budgets(old.budgets, new.budgets),
        *_servers(old, new),
        *_contracts(old, new),
        *_networks(old.networks, new.networks),
        *_secrets(old.secrets, new.secrets),
        *(["secrets are read from another vault"] if new.vault not in (None, old.vault) else []),
        *(["traces are sent to another place"] if new.telemetry.otlp not in (None, old.telemetry.otlp) else []),
        *_hooks(old.hooks, new.hooks),
        *(["audit: what vouches for the log is no longer the same"] if new.audit != old.audit else []),
        *_approvals(old.approvals, new.approvals),
        *_rules(old, new),
    ]


# ── Orders ────────────────────────────────────────────────────────────────────────────────────────


def _any(_old: Any, _new: Any) -> bool:
    return True


def _no_more(old: float | None, new: float | None) -> bool:
    """Whether a limit was not raised; None is no limit."""
    return old is None or (new is not None and new <= old)


def _no_shorter(old: float | None, new: float | None) -> bool:
    """Whether a time did not get shorter; None is for ever."""
    return new is None or (old is not None and old <= new)


def _within(old: tuple[Any, ...] | None, new: tuple[Any, ...] | None) -> bool:
    """Whether nothing was added; None is everything."""
    return old is None or (new is not None and set(new) <= set(old))


def _covers(old: tuple[Any, ...], new: tuple[Any, ...]) -> bool:
    return set(old) <= set(new)


def _along(*order: str) -> Holds:
    """A test that a word did not get looser; `order` goes from the loosest to the tightest."""
    return lambda old, new: order.index(new) >= order.index(old)


def _equal(old: Any, new: Any) -> bool:
    return bool(old == new)


def _mounts(old: tuple[Mount, ...], new: tuple[Mount, ...]) -> bool:
    return all(mount in old or replace(mount, mode="rw") in old for mount in new)


def _narrowed(old: tuple[Mount, ...], new: tuple[Mount, ...]) -> bool:
    """What a tool of a server has: one that names none has all that its server has."""
    return not old or (bool(new) and _mounts(old, new))


def _listening(old: Listening, new: Listening) -> bool:
    return not new.allowed or (old.allowed and _within(old.ports, new.ports))


def _commands(old: CommandRules | None, new: CommandRules | None) -> bool:
    """Whether no program is there, or there without being asked for, that was not."""
    before = old or CommandRules()
    after = new or CommandRules()
    every = {name for each in (before, after) for name in (*(each.allow or ()), *each.ask, *each.deny)}
    # The empty name stands for everything that is not named.
    return all(_standing(after, name) <= _standing(before, name) for name in (*every, ""))


def _standing(commands: CommandRules, name: str) -> int:
    """0: it is absent, 1: it is asked for, 2: it is there."""
    if name in commands.deny:
        return 0
    if name in commands.ask:
        return 1
    return 2 if commands.allow is None or name in commands.allow else 0


def _retry(old: Retry, new: Retry) -> bool:
    return new.attempts <= old.attempts and _within(old.on, new.on)


def _rate(old: Rate, new: Rate) -> bool:
    def burst(rate: Rate) -> int | None:
        return rate.per_minute if rate.burst is None else rate.burst

    return (
        _no_more(old.per_minute, new.per_minute)
        and _no_more(burst(old), burst(new))
        and _no_more(old.concurrent, new.concurrent)
        and _no_more(old.per_day, new.per_day)
    )


def _result(old: ResultPolicy, new: ResultPolicy) -> bool:
    trust = _along("trusted", "partial", "untrusted")
    smaller = new.max_bytes <= old.max_bytes and _no_more(old.max_chars, new.max_chars)
    return smaller and _within(old.fields, new.fields) and trust(old.trust, new.trust)


def _approval_rule(old: ApprovalRule, new: ApprovalRule) -> bool:
    """Whether a call that had to ask must still ask, and no person may answer who could not before."""
    return (
        new.when in (None, old.when)
        and (not old.roles or (bool(new.roles) and _within(old.roles, new.roles)))
        and new.expires_seconds <= old.expires_seconds
        and (old.self_approval or not new.self_approval)
        and new.people >= old.people
        and (new.needs_reason or not old.needs_reason)
        and (old.in_client or not new.in_client)
        and new.escalation in (None, old.escalation)
        and (new.standing is None or (old.standing is not None and _stands_no_further(old.standing, new.standing)))
    )


def _stands_no_further(old: StandingTerms, new: StandingTerms) -> bool:
    return new.times <= old.times and new.seconds <= old.seconds


# ── Sections ──────────────────────────────────────────────────────────────────────────────────────


def _changes(what: str, old: Any, new: Any, holds: Mapping[str, Holds]) -> Iterator[str]:
    """A sentence for each field that is looser; fields without an order of their own may not change at all."""
    for each in fields(old):
        before = getattr(old, each.name)
        after = getattr(new, each.name)
        if before != after and not holds.get(each.name, _equal)(before, after):
            yield f"{what}: {each.name} changes from {_shown(before)} to {_shown(after)}"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"[{', '.join(sorted(value))}]"  # values may be secret
    if isinstance(value, tuple | frozenset):
        return f"[{', '.join(sorted(str(item) for item in value))}]"
    return "nothing" if value is None else str(value)


_SANDBOX: Mapping[str, Holds] = {
    **dict.fromkeys(("default_timeout_seconds", "max_cpu_cores", "max_memory_mb", "max_disk_mb"), _no_more),
    **dict.fromkeys(("max_processes", "max_output_mb", "capture_bytes", "network_enabled"), _no_more),
    "accept_missing": _within,
    **dict.fromkeys(("max_sessions", "max_sessions_memory_mb", "max_sessions_cpu_cores"), _no_more),
    **dict.fromkeys(("session_lifetime_seconds", "max_session_lifetime_seconds", "session_retain_seconds"), _no_more),
    **dict.fromkeys(("session_idle_seconds", "max_session_idle_seconds", "session_queue_seconds"), _no_more),
    **dict.fromkeys(("session_paused_seconds", "session_retain_mb"), _no_more),
    "allow_packages": _within,
    **dict.fromkeys(("install_inside", "build_packages"), _no_more),
    "packages": _along("any", "pinned", "hashed"),
}


def _settings(old: Config, new: Config) -> Iterator[str]:
    if old.environment != new.environment:
        yield f"the environment changes from {old.environment} to {new.environment}"
    kept: Mapping[str, Holds] = {"approval_wait_seconds": _no_more, "retention_seconds": _no_shorter, "log": _any}
    yield from _changes("gateway", old.gateway, new.gateway, kept)
    yield from _changes("sandbox", old.sandbox, new.sandbox, _SANDBOX)
    if new.policy.label_seconds < old.policy.label_seconds:
        yield "policy: what was read counts for a shorter time (label_seconds)"
    if old.policy.default != new.policy.default and new.policy.default != "deny":
        yield f"policy: what no rule matches changes from {old.policy.default} to {new.policy.default}"


def _people(old: Mapping[str, Person], new: Mapping[str, Person]) -> Iterator[str]:
    if bool(old) != bool(new):
        yield "people: who may answer is no longer the same" if new else "people: the local user now has every role"
        return
    for name, person in new.items():
        if name not in old:
            yield f"person {name!r} is new and may answer"
            continue
        before = old[name]
        if person.roles - before.roles:
            yield f"person {name!r} gains the roles {', '.join(sorted(person.roles - before.roles))}"
        if person.os_user not in (None, before.os_user):
            yield f"person {name!r} is another account: {person.os_user}"
        if person.oidc_subject not in (None, before.oidc_subject):
            yield f"person {name!r} is another user of the identity provider"
        if person.answer_key not in (None, before.answer_key):
            yield f"person {name!r} signs answers with another key"
        if person.tenant != before.tenant:
            yield f"person {name!r} is of another tenant: {person.tenant}"


_AGENT: Mapping[str, Holds] = {
    **dict.fromkeys(("capabilities", "resources", "prompts", "environments"), _within),
    "quota": lambda old, new: _rate(old, new),
    "budget": lambda old, new: _spends_no_more(old, new),
    **dict.fromkeys(("os_user", "oidc_client"), lambda _old, new: new is None),
    "metrics": _no_more,
}


def _spends_no_more(old: CostBudget | None, new: CostBudget | None) -> bool:
    """Another window is another budget, which is neither more nor less."""
    return old is None or (new is not None and new.units <= old.units and new.seconds == old.seconds)


def _budgets(old: Mapping[str, CostBudget], new: Mapping[str, CostBudget]) -> Iterator[str]:
    for name, budget in old.items():
        if not _spends_no_more(budget, new.get(name)):
            yield f"tenant {name!r}: its agents may spend more than {budget.units} units in {budget.seconds:g} s"


def _agents(old: Mapping[str, AgentSpec], new: Mapping[str, AgentSpec]) -> Iterator[str]:
    if old and not new:
        yield "agents: the local user's programs may now call everything"
    for name, agent in new.items():
        if name not in old:
            yield f"agent {name!r} is new and may call"
        else:
            yield from _changes(f"agent {name!r}", old[name], agent, _AGENT)


_SERVER: Mapping[str, Holds] = {
    "resources": _within,
    "prompts": _within,
    "sampling": _along("allow", "ask", "deny"),
    "elicitation": _along("ask", "deny"),
    "pins": _along("first_use", "accepted"),
    "start_timeout_seconds": _no_more,
    "mounts": _mounts,
    "volumes": _within,
    "network": lambda _old, new: new == "denied",
    "secrets": _within,
    "labels": lambda old, new: _within(new, old),
}


def _servers(old: Config, new: Config) -> Iterator[str]:
    for name, server in new.servers.items():
        if name not in old.servers:
            yield f"server {name!r} is new"
        else:
            before: ServerSpec = old.servers[name]
            yield from _changes(f"server {name!r}", before, server, _SERVER)
    # A tool that two servers had belongs to neither; with one of them gone it belongs to the other.
    open_ended = [name for name, contract in new.contracts.items() if contract.server is None]
    if open_ended and set(old.servers) - set(new.servers):
        yield f"a server is gone, and {', '.join(open_ended)} may now find its tool on another"
    yield from _inherited(old, new)


def _inherited(old: Config, new: Config) -> Iterator[str]:
    """What a server offered that has it no more, another one may now offer in its place."""
    for name, before in old.servers.items():
        after = new.servers.get(name)
        for what in ("resources", "prompts"):
            given_up = set(getattr(before, what)) - set(getattr(after, what, ()))
            heirs = [
                heir
                for heir, server in new.servers.items()
                if heir != name and any(_overlap(one, other) for one in given_up for other in getattr(server, what))
            ]
            if heirs:
                yield f"server {name!r} gives up {what}, and {', '.join(heirs)} may now offer them in its place"


def _overlap(one: str, other: str) -> bool:
    """Whether a name may match both patterns; of what follows the first wildcard nothing is known."""
    first, second = (re.split(r"[*?[]", pattern.casefold(), maxsplit=1) for pattern in (one, other))
    if len(first) == len(second) == 1:
        return first == second
    longer, shorter = (first, second) if len(first[0]) >= len(second[0]) else (second, first)
    return longer[0].startswith(shorter[0]) and (len(shorter) == 2 or longer[0] == shorter[0])


_CONTRACT: Mapping[str, Holds] = {
    "description": _any,
    "mode": _along(Mode.READ, Mode.WRITE, Mode.HIGH_RISK),
    "network": lambda _old, new: new == "denied",
    "mounts": _mounts,
    "secrets": _within,
    "environments": _within,
    "isolation": _along("none", "process", "gvisor", "microvm"),
    "memory_layout": _along("shared", "fresh"),
    "listen": _listening,
    "commands": _commands,
    "timeout_seconds": _no_more,
    "retry": _retry,
    "rate": _rate,
    "cost": lambda old, new: new >= old,
    "approval": _any,  # below: a name says nothing by itself
    "redact": _covers,
    "meta": _within,
    "result": _result,
    "digest": _any,
}


_SERVED: Mapping[str, Holds] = {**_CONTRACT, "mounts": _narrowed}


def _contracts(old: Config, new: Config) -> Iterator[str]:
    looked_at = any("contract" in condition for condition in _conditions(new))
    for name in old.contracts.keys() - new.contracts.keys():
        if old.contracts[name].transport is Transport.SANDBOXED_EXEC:
            yield f"capability {name!r} is gone, and its tool has its built-in contract again"
    for name, contract in new.contracts.items():
        what = f"capability {name!r}"
        if name not in old.contracts:
            yield f"{what} is new"
            continue
        before: Contract = old.contracts[name]
        holds = _SERVED if contract.is_served else _CONTRACT
        found = [*_changes(what, before, contract, holds), *_approval_of(what, before, contract, old, new)]
        yield from found
        if (
            not found
            and looked_at
            and replace(before, description=None, digest="") != replace(contract, description=None, digest="")
        ):
            yield f"{what} changes, and a condition looks at contracts"


def _conditions(config: Config) -> Iterator[str]:
    yield from (rule.when for rule in config.policy.rules if rule.when is not None and rule.mode != SHADOW)
    yield from (rule.when for rule in config.approvals.values() if rule.when is not None)


def _approval_of(what: str, before: Contract, after: Contract, old: Config, new: Config) -> Iterator[str]:
    if before.approval in ("none", after.approval):
        return
    always = {"always": ApprovalRule("always")}
    had = {**old.approvals, **always}[before.approval]
    has = {**new.approvals, **always}.get(after.approval)
    if has is None or not _approval_rule(had, has):
        yield f"{what}: approval changes from {before.approval} to {after.approval}"


def _hooks(old: Mapping[str, HookSpec], new: Mapping[str, HookSpec]) -> Iterator[str]:
    """One that is gone no longer sees what is done, so that waits for a person, too."""
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            what = "is new" if name not in old else "is gone" if name not in new else "changes"
            yield f"hook {name!r} {what}: others are told of calls than before"


_NETWORK: Mapping[str, Holds] = {
    **dict.fromkeys(("allow", "methods", "paths", "addresses"), _within),
    **dict.fromkeys(("max_bytes_out", "max_bytes_in", "per_minute"), _no_more),
    "inspect": lambda old, new: new or not old,
}


def _networks(old: Mapping[str, NetworkSpec], new: Mapping[str, NetworkSpec]) -> Iterator[str]:
    for name in old.keys() & new.keys():
        yield from _changes(f"network {name!r}", old[name], new[name], _NETWORK)


_SECRET: Mapping[str, Holds] = {
    **dict.fromkeys(("hosts", "methods", "tenants", "environments", "capabilities", "servers", "agents"), _within),
    "lifetime_seconds": _no_more,
}


def _secrets(old: Mapping[str, SecretSpec], new: Mapping[str, SecretSpec]) -> Iterator[str]:
    for name in old.keys() & new.keys():
        yield from _changes(f"secret {name!r}", old[name], new[name], _SECRET)


def _approvals(old: Mapping[str, ApprovalRule], new: Mapping[str, ApprovalRule]) -> Iterator[str]:
    for name in sorted(old.keys() & new.keys()):
        if not _approval_rule(old[name], new[name]):
            yield f"approval {name!r} is relaxed or asks others"


# ── Rules ─────────────────────────────────────────────────────────────────────────────────────────

_RESTRICTING = (Action.DENY, Action.ASK, Action.SANDBOX)


def _rules(old: Config, new: Config) -> Iterator[str]:
    before = _in_force(old)
    after = _in_force(new)
    meant = [_meaning(rule) for rule in after]
    shadows = {rule.id for rule in new.policy.rules if rule.mode == SHADOW}
    for rule in before:
        if _meaning(rule) in meant or _meaning(replace(rule, action=Action.DENY, approval=None)) in meant:
            continue
        how = "is in shadow mode now, where it decides nothing" if rule.id in shadows else "is gone or changed"
        if rule.action in _RESTRICTING:
            yield f"rule {rule.id!r} ({rule.action}) {how}"
        elif rule.when is not None or rule.argument_patterns:
            # A condition that fails on a call denies it; without the rule nothing fails.
            yield f"rule {rule.id!r} ({rule.action}) {how}, and its condition could have denied"
    if all(any(_matches_all(rule, mode) for rule in before) for mode in Mode):
        return  # nothing was left to the default: another rule can only restrict
    had = [_meaning(rule) for rule in before]
    for rule in after:
        if rule.action is not Action.DENY and _meaning(rule) not in had:
            yield f"rule {rule.id!r} ({rule.action}) is new or changed, and calls that no rule matched were denied"


def _in_force(config: Config) -> list[Rule]:
    every = [*config.policy.rules, *PRESETS.get(config.policy.preset, ())]
    here = config.environment
    every = [rule for rule in every if rule.mode != SHADOW]  # those may come, go and change: they decide nothing
    return [rule for rule in every if rule.enabled and (not rule.environments or here in rule.environments)]


def _meaning(rule: Rule) -> Rule:
    """The rule without what only people read; `priority` orders reports, not decisions."""
    plain = replace(rule, id="", name="", description="", owasp_asi_id=None, priority=0, environments=())
    return plain if rule.argument_patterns else replace(plain, normalize=True)


def _matches_all(rule: Rule, mode: Mode) -> bool:
    bare = Rule(id="", action=rule.action, approval=rule.approval, modes=rule.modes)
    return _meaning(rule) == _meaning(bare) and (not rule.modes or mode in rule.modes)
