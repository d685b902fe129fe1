"""Explains one call from its records alone, as a short list with a line for each stop of the call.

Records come from the log and may be of any age, or damaged: what is missing is left out, never guessed, and nothing
here raises for it. A person is said to have approved the call only where the record of their answer is found; what the
call's own record says about its approval is a claim.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringfence.audit.chain import has_signature
from ringfence.core import invisible
from ringfence.core.canonical import object_at
from ringfence.core.model import Json
from ringfence.core.reasons import REASONS

_MAX_LISTED = 6
_MAX_HOSTS = 10
_LABEL_WIDTH = 11
_DIGEST_DIGITS = 12
"""Digits of a digest that are printed; `audit show` prints all of them."""
_NAME = re.compile(r"|The call|[^\W][\w.:/@#?=&%+~*{}()<>|$!,;\[\]-]*…?")
"""A name that needs no quotes: it has no blank."""
_BUDGET = frozenset({"throttled", "quota", "loop"})
"""Reason codes of calls that the budget refused."""
_NEVER_RAN = "it never ran"

Stop = tuple[str, list[str]]
"""The label of a stop, and its lines."""


def explain(records: list[Json], public: Ed25519PublicKey | None = None) -> str:
    """Explain the call that these are the record bodies of, with those of its approvals.

    With the public key, an approval counts only if its record has a valid signature.
    """
    title, stops = stops_of_call(records, public)
    return "\n".join([_printable(title), *(line for stop in stops for line in _lines_of(stop))])


def stops_of_call(records: list[Json], public: Ed25519PublicKey | None = None) -> tuple[str, list[Stop]]:
    """The title and the stops of the explanation. Texts are as the records have them: the caller must escape them."""
    ordered = sorted(records, key=_order)
    started = _last(ordered, "started")
    finished = _last(ordered, "finished")
    if started is None and finished is None and not any(_kind(r).startswith("approval_") for r in ordered):
        return "There is no record of this call.", []
    # The finished record has every key of the started one.
    story = finished or started or {}
    stops: list[Stop] = [
        ("called", _called(story, _arrived(started, finished)) if story else []),
        ("contract", _contract(story)),
        ("policy", _policy(story)),
        ("labels", _labels(story)),
        ("approval", _approval(story, ordered, public)),
        ("budget", _budget(story)),
        ("started", _started(started, finished)),
        ("ran", _ran(story, started)),
        ("session", _session(story)),
        ("client", _answers(ordered)),
        ("secrets", _secrets(ordered)),
        ("network", _network(story)),
        ("result", _result(started, finished)),
        ("settled", _settled(ordered)),
        ("undone", _undone(ordered)),
        ("what to do", _what_to_do(finished)),
        ("on record", _on_record(story, started, finished)),
    ]
    name = _text(object_at(story, "call").get("id"))
    title = f"{_subject(story)}{f', {name}' if name else ''}" if story else "A call that is not on record itself"
    return title, [(label, [text for text in lines if text]) for label, lines in stops]


def summary(records: list[Json]) -> str:
    """One line on the call: what was called, by whom, what policy decided, and how it ended."""
    ordered = sorted(records, key=_order)
    started = _last(ordered, "started")
    finished = _last(ordered, "finished")
    story = finished or started
    if story is None:
        return "There is no record of this call."
    called = [f"{_subject(story)} {_caller(story)}".strip()]
    policy = [f"policy {_verdict(story)}"] if object_at(story, "decision") else []
    return _printable("; ".join([*called, *policy, *_result(started, finished)[:1]]))


def _lines_of(stop: Stop) -> Iterator[str]:
    # Each line is escaped by itself, so that no value of a record can begin a line of its own.
    for number, text in enumerate(text for text in stop[1] if text):
        yield _printable(f"  {'' if number else stop[0]:<{_LABEL_WIDTH}}{text}")


# ── Reading values that may be missing ────────────────────────────────────────────────────────────


def _order(record: Json) -> tuple[float, int]:
    at = record.get("at")
    seq = record.get("seq")
    return (at if isinstance(at, int | float) else 0.0, seq if isinstance(seq, int) else 0)


def _kind(record: Json) -> str:
    return _text(record.get("kind"))


def _last(records: Iterable[Json], kind: str) -> Json | None:
    return next((r for r in reversed(list(records)) if r.get("kind") == kind), None)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _text(value: Any) -> str:
    return "" if value is None or isinstance(value, dict | list) else str(value)


def _texts(value: Any) -> list[str]:
    return [text for text in map(_text, _list(value)) if text]


def _printable(text: str) -> str:
    """The text without control and invisible characters: a record may quote a hostile server, which must not steer the
    reader's terminal or hide anything from them."""
    return invisible.visible(text)


def _name(value: Any) -> str:
    """A name, in quotes unless it has no blank: one that a caller chose must not read like a sentence of ours."""
    text = _text(value)
    return text if _NAME.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _time(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _text(value)
    try:
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return _text(value)


def _at(value: Any) -> str:
    return f" at {_time(value)}" if _time(value) else ""


def _short(digest: Any) -> str:
    return _text(digest).rpartition(":")[2][:_DIGEST_DIGITS]


def _join(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


# ── Before it ran ─────────────────────────────────────────────────────────────────────────────────


def _arrived(started: Json | None, finished: Json | None) -> Any:
    """When the call arrived, by its facts: a call that waits for a person is recorded as started only after that."""
    with contextlib.suppress(ValueError, OverflowError, OSError):
        at = datetime.fromisoformat(_text(object_at(finished or {}, "facts").get("started_at")))
        if at.tzinfo is not None:
            return at.timestamp()
    return (started or finished or {}).get("at")


def _subject(story: Json) -> str:
    call = object_at(story, "call")
    tool = _name(call.get("tool") or "The call")
    server = _name(call.get("server") or "")
    return {
        "resource": f"Resource {tool}",
        "prompt": f"Prompt {tool}",
        "completion": f"A completion for {tool}",
        "listing": f"A listing ({tool}) of server {server}",
        "logging": f"A log level for server {server}",
        "server": f"The start of server {server or tool}",
    }.get(_text(call.get("kind")), tool)


def _caller(story: Json) -> str:
    principal = object_at(story, "call", "principal")
    agent = _text(principal.get("agent"))
    who = "by the gateway itself" if principal.get("kind") == "system" else f"by agent {agent}" if agent else ""
    if _text(principal.get("person")):
        who += f" for {_text(principal.get('person'))}"
    tenant = _text(principal.get("tenant"))
    return who if tenant in ("", "local") else f"{who} of tenant {tenant}"


def _called(story: Json, at: Any) -> list[str]:
    call = object_at(story, "call")
    origin = _text(call.get("origin"))
    words = [
        _caller(story),
        f"over {origin}" if origin not in ("", "system") else "",
        f"from within call {_text(call.get('parent'))}" if _text(call.get("parent")) else "",
        f"in MCP session {_name(call.get('session'))}" if _text(call.get("session")) else "",
        f"in {_text(call.get('environment'))}" if _text(call.get("environment")) else "",
    ]
    return [f"{' '.join(word for word in words if word)}{_at(at)}".strip()]


def _contract(story: Json) -> list[str]:
    contract = object_at(story, "contract")
    if not contract:
        # A call whose arguments do not fit the tool's schema is refused before its contract goes on record.
        code = _text(story.get("reason_code"))
        tool = _text(object_at(story, "call").get("tool"))
        if code == "bad_arguments" and tool:
            return [f"{tool}: the arguments do not fit its schema"]
        absent = "none applied" if code.startswith("unknown_") else "not looked up: the call was refused before that"
        return [absent] if "contract" in story else []
    mode = _text(contract.get("mode"))
    return [f"{_text(contract.get('name')) or 'without a name'}{f', mode {mode}' if mode else ''}"]


def _verdict(story: Json) -> str:
    decision = object_at(story, "decision")
    marks = _texts(decision.get("marks"))
    asks = _texts(decision.get("asks"))
    every = _texts(decision.get("rules"))
    # Rules that only mark a call did not decide on it, unless no other rule matched.
    rules = [rule for rule in every if rule not in marks] or every
    verdict = "refused"
    if decision.get("allowed") is True:
        verdict = "allowed"
        if asks:
            verdict, rules = "approval required", [rule for rule in rules if rule in asks] or rules
    return (
        f"{verdict} by rule{'' if len(rules) == 1 else 's'} {_join(rules)}" if rules else f"{verdict}, no rule matched"
    )


def _policy(story: Json) -> list[str]:
    decision = object_at(story, "decision")
    if not decision:
        if _text(object_at(story, "call").get("kind")) == "server":
            return ["not asked: the gateway itself started the server"]
        return ["not asked: the call did not get that far"] if "decision" in story else []
    reason = _text(decision.get("reason"))
    repeated = reason in _text(story.get("message"))  # as part of the result
    out = [_verdict(story) if repeated else f"{_verdict(story)}: {reason}"]
    if error := _text(decision.get("error")):
        out.append(f"a rule could not be evaluated, so the call is refused: {error}")
    marks = [] if "marked by" in reason else _texts(decision.get("marks"))
    asks = _texts(decision.get("asks"))
    demands = [
        f"marked by {_join(marks)}" if marks else "",
        "a sandbox is required" if decision.get("sandbox") is True else "",
        f"approval is required ({_join(asks)})" if asks else "",
    ]
    return [*out, "; ".join(text for text in demands if text), _in_shadow(decision)]


def _in_shadow(decision: Json) -> str:
    """What rules in shadow mode would have decided."""
    shadow = object_at(decision, "shadow")
    if not shadow:
        return ""
    rules = _texts(shadow.get("rules"))
    who = f"rule{'' if len(rules) == 1 else 's'} {_join(rules)}" if rules else "a rule"
    why = f": {_text(shadow.get('reason'))}" if _text(shadow.get("reason")) else ""
    return f"in shadow mode, and without effect: with {who} it would be {_text(shadow.get('verdict'))}{why}"


def _labels(story: Json) -> list[str]:
    labels = object_at(story, "facts", "labels")
    named = {key: ", ".join(map(_text, _list(labels.get(key)))) for key in ("call", "in_force", "result")}
    titles = {"call": "of the call", "in_force": "in force", "result": "of its result"}
    return [f"{titles[key]}: {text}" for key, text in named.items() if text]


def _approval(story: Json, records: list[Json], public: Ed25519PublicKey | None) -> list[str]:
    used = object_at(story, "approval")
    identity = _text(used.get("id"))
    out: list[str] = []
    listed: set[tuple[str, str]] = set()
    for record in records:
        name = _text(record.get("person"))
        approval = _text(record.get("approval"))
        if _kind(record) == "approval_asked":
            rule = _text(record.get("rule"))
            people = record.get("people")
            many = f" of {people} people" if isinstance(people, int) and people > 1 else ""
            by = f" under {rule}" if rule else ""
            out.insert(0, f"requested{many}{by}{_at(record.get('at'))} ({approval})")
        elif _kind(record) == "approval_answered" and (approval, name) not in listed:
            listed.add((approval, name))
            agreed = record.get("approve") is True
            if agreed and public is not None and not has_signature(public, record):
                out.append(
                    f"an answer of {name or 'a person without a name'} ({approval}) is not signed and proves nothing"
                )
                continue
            shown = f", shown {_short(record.get('shown'))}" if _text(record.get("shown")) else ""
            verb = "approved" if agreed else "refused"
            way = _text(object_at(record, "login").get("way"))
            stood = _text(object_at(record, "standing").get("id"))
            by = f" in the console, logged in by {way}" if way else ""
            by = " in the client that made the call" if way == "client" else by
            by = " by webhook, signed with a key of their own," if way == "webhook" else by
            by = f" beforehand, by {stood}," if stood else by
            why = f": {_text(record.get('reason'))}" if _text(record.get("reason")) else ""
            answer = f"{name or 'a person without a name'} {verb} it{by}{_at(record.get('at'))}"
            out.append(f"{answer} ({approval}{shown}){why}")
        elif _kind(record) == "approval_escalated":
            who = _text(record.get("roles")).replace("|", " or ")
            out.append(f"escalated{_at(record.get('at'))}: {who} may answer it, too ({approval})")
        elif _kind(record) == "approval_answer_refused" and name:
            why = _text(record.get("why")).replace("_", " ")
            out.append(f"a signed answer of {name} was refused{_at(record.get('at'))} ({approval}): {why}")
        elif _kind(record) == "approval_void":
            why = _text(record.get("why")).replace("_", " ")
            out.append(f"{approval} became void{_at(record.get('at'))}{f' ({why})' if why else ''}")
    if identity and not _proven(identity, records, public):
        out.append(f"{identity} was used, but the log does not prove that a person gave it")
    return out


def _proven(identity: str, records: list[Json], public: Ed25519PublicKey | None) -> bool:
    """Whether the records have the approval of enough people, and no refusal."""
    about = [record for record in records if _text(record.get("approval")) == identity]
    answers = [record for record in about if _kind(record) == "approval_answered"]
    agreed = {_text(r.get("person")) for r in answers if public is None or has_signature(public, r)}
    asked = _last(about, "approval_asked") or {}
    people = asked.get("people")
    enough = len(agreed) >= (people if isinstance(people, int) else 1) > 0
    return enough and all(record.get("approve") is True for record in answers)


def _budget(story: Json) -> list[str]:
    """Whether the budget refused the call. Records do not say what was left of it."""
    code = _text(story.get("reason_code"))
    return [f"refused ({code})"] if code in _BUDGET else []


# ── How it ran ────────────────────────────────────────────────────────────────────────────────────


def _started(started: Json | None, finished: Json | None) -> list[str]:
    if started is None:
        return ["no"] if finished is not None else []
    synced = ", and synced to disk" if started.get("durable") is True else ""
    effect = started.get("effect_possible")
    could = {True: "; an effect outside was possible", False: "; no effect outside was possible"}
    tail = could[effect] if isinstance(effect, bool) else ""
    return [f"on record before anything was sent{synced}{tail}"]


def _ran(story: Json, started: Json | None) -> list[str]:
    isolation = object_at(story, "facts", "isolation")
    if started is None or not isolation or _text(story.get("status")) in ("unavailable", "validation_failure"):
        return []
    level = _text(isolation.get("level")) or _text(isolation.get("backend")) or "unknown"
    backend = _text(isolation.get("backend"))
    server = _text(object_at(story, "call").get("server"))
    attempts = story.get("attempts")
    times = f"{attempts} times" if isinstance(attempts, int) and attempts > 1 else "once"
    on_by = [k for k, v in object_at(isolation, "protections").items() if isinstance(v, dict) and v.get("on") is True]
    few = len(on_by) <= _MAX_LISTED
    words = [
        f"{times}{f' on server {server}' if server else ''}",
        f"isolation {level}{f' (backend {backend})' if backend and backend != level else ''}",
        f"with {_join(sorted(map(str, on_by))) if few else f'{len(on_by)} protections'}" if on_by else "",
        _limits(isolation),
    ]
    return [", ".join(word for word in words if word)]


def _limits(isolation: Json) -> str:
    """The limits in force, grouped by what enforced them."""
    by: dict[str, list[str]] = {}
    for name, limit in object_at(isolation, "limits").items():
        if isinstance(limit, dict) and _text(limit.get("by")):
            by.setdefault(_text(limit.get("by")), []).append(str(name))
    enforced = [f"{_join(sorted(names))} by {enforcer}" for enforcer, names in sorted(by.items())]
    return f"limits: {_join(enforced)}" if enforced else ""


def _session(story: Json) -> list[str]:
    session = object_at(story, "facts", "session")
    name, step, context, state = (_text(session.get(key)) for key in ("id", "step", "context", "state"))
    if not name or _text(story.get("status")) in ("unavailable", "validation_failure"):
        return []
    words = [name, f"step {step}" if step else "", f"context {context}" if step and context else "", state]
    return [", ".join(word for word in words if word)]


def _answers(records: list[Json]) -> list[str]:
    """The client's answers to the server's questions, round by round."""
    out = []
    for record in records:
        if _kind(record) != "answered":
            continue
        decision = object_at(record, "decision")
        approval = object_at(record, "approval")
        which = f"of round {_text(record.get('round'))}"
        sent = "was sent on" if decision.get("allowed") is True else "was not sent on, by policy"
        why = _text(decision.get("reason"))
        agreed = "".join(
            f"; {_text(one.get('person'))} approved it" for one in _list(approval.get("by")) if isinstance(one, dict)
        )
        named = f" ({_text(approval.get('id'))})" if approval else ""
        out.append(f"the answer {which} {sent}{f' ({why})' if why else ''}{agreed}{named}")
        if isinstance(unfit := record.get("unfit"), int) and unfit > 0:
            out.append(f"{unfit} of the answers {which} did not fit the questions and were left out")
    if (left := len(out) - 2 * _MAX_LISTED) > 0:
        out[2 * _MAX_LISTED :] = [f"{left} more lines; `audit show` prints all records"]
    return out


def _secrets(records: list[Json]) -> list[str]:
    """How each request of the box was answered that wanted a secret."""
    uses: dict[tuple[str, ...], int] = {}
    for record in records:
        if _kind(record) == "brokered":
            why = "" if record.get("allowed") is True else _text(record.get("reason_code")) or "unknown"
            use = (*(_text(record.get(name)) for name in ("secret", "method", "host", "port")), why)
            uses[use] = uses.get(use, 0) + 1
    out = []
    for (secret, method, host, port, why), count in list(uses.items())[:_MAX_LISTED]:
        times = "once" if count == 1 else f"{count} times"
        how = f"refused {times} ({why}) for" if why else f"put {times} into"
        out.append(f"{secret} {how} {method} to {host}:{port}")
    if len(uses) > _MAX_LISTED:
        out.append(f"{len(uses) - _MAX_LISTED} more kinds of requests wanted secrets")
    return out


def _network(story: Json) -> list[str]:
    refused = [d for d in _list(object_at(story, "facts", "network").get("denied")) if isinstance(d, dict)]
    hosts = [f"{_text(d.get('host'))}:{_text(d.get('port'))}" for d in refused]
    more = [f"{len(hosts) - _MAX_HOSTS} more"] if len(hosts) > _MAX_HOSTS else []
    return [f"denied to {_join([*hosts[:_MAX_HOSTS], *more])}"] if hosts else []


# ── How it ended ──────────────────────────────────────────────────────────────────────────────────


def _result(started: Json | None, finished: Json | None) -> list[str]:
    if finished is None:
        return ["not on record yet: it is still running, or a crash cut it short"] if started else []
    status = _text(finished.get("status")) or "not on record"
    facts = object_at(finished, "facts")
    exit_status = facts.get("exit_status")
    limit = _text(facts.get("limit"))
    identity = _text(object_at(finished, "approval").get("id")) or _text(finished.get("approval_id"))
    more = {
        "failed": f", exit status {exit_status}" if isinstance(exit_status, int) else "",
        "killed": f" at its {limit} limit" if limit else "",
        "approval_required": f", {identity}" if identity else "",
    }.get(status, "")
    words = [f"{status.replace('_', ' ')}{more}{_reason(finished) if status != 'success' else ''}", _effect(finished)]
    wall = facts.get("wall_ms")
    if started is not None and isinstance(wall, int | float) and math.isfinite(wall):
        words.append(f"{wall:.1f} ms")
    out = ["; ".join(words)]
    if finished.get("recovered") is True:
        out.append("the gateway stopped before it recorded an outcome; a later start closed the record")
    return out


_DECLARED = "it is declared a read, which changes nothing; whether its server changed anything is not known"


def _effect(finished: Json) -> str:
    match _text(finished.get("status")):
        case "validation_failure" | "denied" | "unavailable" if _text(finished.get("effect")) != "unknown":
            return _NEVER_RAN
        case "approval_required":
            return "it has not run"
    lasts = _text(object_at(finished, "facts").get("lasts"))
    done = {
        "call": "what it changed was in a box for this call alone, and is gone with it",
        "server": "what it changed is in the server's box alone, and lasts until that ends",
    }
    declared = _text(object_at(finished, "facts").get("effect_basis")) == "declared"
    return {
        "none": _DECLARED if declared else "nothing outside was changed",
        "confirmed": done.get(lasts, "its effect is confirmed"),
        "unknown": "whether it changed anything outside is unknown",
    }.get(_text(finished.get("effect")), "its effect is not on record")


def _settled(records: list[Json]) -> list[str]:
    """What people have established about a call whose effect was unknown."""
    out = []
    for record in records:
        if _kind(record) == "outcome_settled":
            what = "it took effect" if record.get("happened") is True else "it did not take effect"
            reason = _text(record.get("reason"))
            freed = record.get("keys") and record.get("happened") is not True
            key = "; its idempotency key is free again" if freed else ""
            out.append(f"{_text(record.get('person'))} says that {what}{f' ({reason})' if reason else ''}{key}")
    return out


def _undone(records: list[Json]) -> list[str]:
    """Who wanted it undone, and how that ended."""
    found = [record for record in records if _kind(record) == "undo_tried"]
    return [
        f"{_text(each.get('person'))} undid it with {_text(each.get('by'))}"
        if each.get("status") == "success"
        else f"{_text(each.get('person'))} tried to undo it with {_text(each.get('by'))}, which ended as"
        f" {_text(each.get('status'))}"
        for each in found
    ]


def _reason(finished: Json) -> str:
    code = _text(finished.get("reason_code"))
    message = _text(finished.get("message")).strip()
    return (f" ({code})" if code else "") + (f": {message.rstrip('.')}" if message else "")


def _what_to_do(finished: Json | None) -> list[str]:
    """Who must act, and how: the entry for this reason code in the table of reasons."""
    code = _text((finished or {}).get("reason_code"))
    reason = REASONS.get(code)
    return [] if reason is None or code == "ok" else [f"{reason.actor}: {reason.remedy}"]


def _on_record(story: Json, started: Json | None, finished: Json | None) -> list[str]:
    places: dict[str, list[str]] = {}
    for record in (started, finished):
        chain, seq = (_text((record or {}).get(key)) for key in ("chain", "seq"))
        if chain and seq:
            places.setdefault(chain, []).append(seq)
    chains = [f"chain {chain}, record{'' if len(seqs) == 1 else 's'} {_join(seqs)}" for chain, seqs in places.items()]
    digests = {
        "contract": _short(object_at(story, "contract").get("digest")),
        "definition": _short(story.get("pin")),
        "policy": _short(object_at(story, "decision").get("policy_digest")),
    }
    named = [f"{name} {digest}" for name, digest in digests.items() if digest]
    return ["; ".join(chains), f"digests: {', '.join(named)}" if named else ""]
