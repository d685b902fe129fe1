"""What people are told of a call that waits for their answer, whatever they read it on: label and text, line by line.

The texts are as their callers wrote them; whoever shows them escapes what the reader would not see, or what the place
would act upon.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from ringfence.core.model import Contract, Json
from ringfence.governance.effects import PossibleEffects
from ringfence.governance.guard import UNSEEN
from ringfence.governance.standing import words
from ringfence.secrets.redaction import KNOWN
from ringfence.store import Approval, StandingApproval

Line = tuple[str, str]

_BESIDE = {"meta": "_meta", "asked": "asked", "inputs": "answers"}
"""What a call carries beside its arguments, and its label here."""
LONG = ("arguments", *_BESIDE)
"""The parts of what people are shown that callers decide the length of."""
_REQUESTS = {
    "resources/read": "to read it once (",
    "resources/subscribe": "to be told of each change of it from now on (",
    "prompts/get": "to get a prompt (",
    "completion/complete": "to get values that complete an argument (",
}
"""What a call that is none of a tool is for."""
_EFFECTS = {
    "acts": "whatever its server does when it is asked for this",
    "sends": "what its box sends over the network",
    "writes": "files in folders of the host",
    "copies": "files that are copied out of its box",
}


def of_contract(contract: Contract) -> Json:
    """What the contract of a call lets it do."""
    return {
        "transport": str(contract.transport),
        "network": contract.network,
        "secrets": list(contract.secrets),
        "mounts": [f"{mount.at} ({mount.mode})" for mount in contract.mounts],
        "timeout_seconds": contract.timeout_seconds,
        "digest": contract.digest,
    }


def of_effects(possible: PossibleEffects) -> list[str]:
    """What may be changed outside, by the names of `PossibleEffects`."""
    return [name for name in _EFFECTS if getattr(possible, name)]


def as_it_is(name: str) -> str:
    return name


def subject(approval: Approval, name: Callable[[str], str] = as_it_is) -> str:
    """What is called. `name` is how a name that others chose stands on a line of ours."""
    server = approval.summary.get("server")
    mode = approval.summary.get("mode")
    on = f" on server {server}" if server else ""
    return f"{name(approval.tool)}{on}{f' ({mode})' if mode else ''}"


def caller(approval: Approval) -> Iterator[Line]:
    """Who asks, and by which request."""
    agent = approval.principal.removeprefix("local/")
    whose = f" for {approval.person}" if approval.person else ""
    origin = approval.summary.get("origin")
    yield "agent", f"{agent}{whose}{f' over {origin}' if origin else ''}"
    method = approval.summary.get("method")
    if method is not None:
        yield "request", f"{_REQUESTS.get(method, '')}{method}{')' if method in _REQUESTS else ''}"


def terms(approval: Approval, name: Callable[[str], str] = as_it_is) -> Iterator[Line]:
    """Who may answer, what the answer is bound to, and who has answered."""
    roles = " and ".join(role.replace("|", " or ") for role in approval.roles) or "any person"
    many = f", {approval.people} people" if approval.people > 1 else ""
    own = "" if approval.self_approval or not approval.person else f", but not {approval.person}"
    yield "rule", f"{approval.rule}; may answer: {roles}{own}{many}"
    session = approval.summary.get("session")
    if isinstance(session, dict):
        yield "session", _session(session, name)
        if session.get("runs_on"):
            yield "", str(session["runs_on"])
    if snapshot := approval.summary.get("snapshot"):
        yield "snapshot", name(str(snapshot))
    if approval.terms.get("reason"):
        yield "reason", "an answer must say why"
    for instead_of, after, who in approval.terms.get("escalate", ()):
        others, first = who.replace("|", " or "), instead_of.replace("|", " or ")
        yield "escalates", f"{after:g} s after it was asked, {others} may answer in place of {first}"
    if approval.terms.get("in_client"):
        yield "in client", "the agent's own person may answer where the call was made"
    limits = approval.terms.get("standing")
    if isinstance(limits, dict) and approval.shape is not None:
        yield "may stand", f"for calls like it, {limits['times']} times within {limits['seconds']:g} s at most"
    for given in approval.answers:
        why = f" ({given.reason})" if given.reason else ""
        yield "answered", f"{given.person}: {'yes' if given.approve else 'no'}{why}"


def escalated(approval: Approval) -> list[str]:
    """Whose time to answer, too, has come."""
    waited = time.time() - approval.asked_at
    return [who.replace("|", " or ") for _, after, who in approval.terms.get("escalate", ()) if waited >= after]


def standing(found: StandingApproval, value: Callable[[Any], str]) -> Iterator[Line]:
    """What was approved beforehand: whose calls of what, with which arguments, how often and until when. `value` is how
    one is written on a line."""
    yield "agent", found.principal.removeprefix("local/")
    yield "by", f"{found.person}, under {found.rule}"
    for name, text in words(found.shape, value):
        yield "argument", f"{name}: {text}"
    yield "used", f"{found.used} of {found.times} times"


def consequences(approval: Approval) -> Iterator[Line]:
    """What it is allowed by and to do, and what it may change."""
    shown = approval.summary
    rules = shown.get("rules")
    if isinstance(rules, list):
        yield "policy", ", ".join(map(str, rules)) or "no rule matched"
    contract = shown.get("contract")
    if isinstance(contract, dict):
        yield "contract", _contract(contract)
    programs = shown.get("programs")
    if isinstance(programs, list):
        yield "programs", f"{', '.join(map(str, programs))}, which only an approved command has"
    effects = shown.get("effects")
    if isinstance(effects, list) and shown.get("mode") != "read":
        said = ", ".join(_EFFECTS.get(str(name), str(name)) for name in effects)
        yield "effect", f"can change {said}" if said else "can change nothing outside its box"
    if back := shown.get("compensate"):
        yield "effect", f"can be undone with {back} (ringfence undo)"
    elif shown.get("reversible") is False and shown.get("mode") != "read":
        yield "effect", "cannot be undone, by its contract"
    yield from _labels(shown.get("labels"))


def _labels(shown: Any) -> Iterator[Line]:
    """Which labels the call has, and by which calls others came to be in force."""
    if not isinstance(shown, dict):
        return
    if own := shown.get("call"):
        yield "labels", f"this call: {', '.join(map(str, own))}"
    since = shown.get("since")
    for name, by in since.items() if isinstance(since, dict) else ():
        yield "labels", f"in force: {name}, since {by.get('tool')} ({by.get('call')})"


def sent(approval: Approval) -> Iterator[tuple[str, Any]]:
    """What others wrote, by label: the arguments of the call, what goes beside them, and what a preview said of it."""
    yield "arguments", approval.summary.get("arguments")
    for name, word in _BESIDE.items():
        if approval.summary.get(name):
            yield word, approval.summary[name]
    if isinstance(seen := approval.summary.get("preview"), dict):
        yield f"preview by {seen.get('by')}", seen.get("text") or seen.get("problem")


def unshown(approval: Approval) -> Iterator[Line]:
    """What the caller sends and is not shown: redacted values, and characters meant to deceive the reader."""
    removed = approval.summary.get("removed")
    if not isinstance(removed, dict):
        return
    found = ", ".join(f"{count} × {name}" for name, count in removed.items() if name not in UNSEEN)
    if found:
        yield "NOT SHOWN", f"the arguments hold more than this; removed for display: {found}"
    if any(name not in (*UNSEEN, KNOWN) and not name.startswith("redact[") for name in removed):
        yield "CARE", "what only looks like a secret may be anything, also code: approve it only if you know it"
    if any(name in removed for name in UNSEEN):
        yield "HIDDEN", r"the arguments hold characters that cannot be seen; they are written as \u{…}"


def _session(shown: Json, name: Callable[[str], str]) -> str:
    which, step = shown.get("id"), shown.get("after_step")
    if step is None:
        return name(str(which))
    after = f"after its step {step}; void where the session goes on before the answer is used"
    return f"{name(str(which))}, {after}" if which else after


def _contract(shown: Json) -> str:
    words = [f"transport {shown.get('transport')}", f"network {shown.get('network')}"]
    for name in ("secrets", "mounts"):
        held = shown.get(name)
        if isinstance(held, list) and held:
            words.append(f"{name} {', '.join(map(str, held))}")
    seconds = shown.get("timeout_seconds")
    if isinstance(seconds, int | float):
        words.append(f"{seconds:g} s at most")
    return ", ".join(words)
