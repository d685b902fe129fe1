"""Why one call was allowed or refused, in sentences, from its records alone.

Records come from the log and may be of any age or damaged: whatever is missing is left out, never guessed, and
nothing here raises for it. That somebody approved a call is told only where the record of their answer is there; what
the call's own record says of it is a claim.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringfence import invisible
from ringfence.audit.chain import has_signature
from ringfence.model import Json

_FEW = 6
_NAME = re.compile(r"|The call|[^\W][\w.:/@#?=&%+~*{}()<>|$!,;\[\]-]*…?")
"""What is taken for a name: nothing with a blank in it."""


def explain(records: list[Json], public: Ed25519PublicKey | None = None) -> str:
    """Tell the story of the one call whose record bodies, and those of its approvals, are given.

    With the public key, an answer counts only by its signature, where calls of its time name their answers.
    """
    ordered = sorted(records, key=_order)
    started = _last(ordered, "started")
    finished = _last(ordered, "finished")
    if started is None and finished is None and not any(_kind(r).startswith("approval_") for r in ordered):
        return "There is no record of this call."
    # The finished record has every key of the started one; where it is missing, the started one speaks.
    story = finished or started or {}
    parts: list[str] = []
    if story:
        parts += _asked(story, _arrived(started, finished))
        parts += _contract(story)
        parts += _policy(story)
    parts += _approval(story, ordered, public)
    parts += _grant(started, finished)
    parts += _isolation(story, started)
    parts += _answers(ordered)
    parts += _secrets(ordered)
    parts += _outcome(started, finished)
    return _printable(" ".join(part for part in parts if part))


# ── Reading what may not be there ─────────────────────────────────────────────────────────────────


def _order(record: Json) -> tuple[float, int]:
    at, seq = record.get("at"), record.get("seq")
    return (at if isinstance(at, int | float) else 0.0, seq if isinstance(seq, int) else 0)


def _kind(record: Json) -> str:
    return _text(record.get("kind"))


def _last(records: Iterable[Json], kind: str) -> Json | None:
    return next((r for r in reversed(list(records)) if r.get("kind") == kind), None)


def _part(record: Json, *path: str) -> Json:
    value: Any = record
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _text(value: Any) -> str:
    return "" if value is None or isinstance(value, dict | list) else str(value)


def _texts(value: Any) -> list[str]:
    return [text for text in map(_text, _list(value)) if text]


def _printable(text: str) -> str:
    """A record may quote a hostile server; a terminal must not obey it, and its reader must see all of it."""
    return invisible.visible(text)


def _named(value: Any) -> str:
    """A name as it may stand in a sentence: one that a caller made up could be a sentence itself, so it is quoted."""
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
    name, _, value = _text(digest).rpartition(":")
    cut = value[:8] + "…" if len(value) > 12 else value
    return f"{name}:{cut}" if name else cut


def _join(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def _stop(text: str) -> str:
    text = text.strip()
    return text if not text or text.endswith((".", "!", "?", "…")) else f"{text}."


# ── The steps of the way ──────────────────────────────────────────────────────────────────────────


def _arrived(started: Json | None, finished: Json | None) -> Any:
    """When the call came: by its facts, since one that waited for a person is recorded as started after the answer."""
    with contextlib.suppress(ValueError, OverflowError, OSError):
        at = datetime.fromisoformat(_text(_part(finished or {}, "facts").get("started_at")))
        if at.tzinfo is not None:
            return at.timestamp()
    return (started or finished or {}).get("at")


def _asked(story: Json, at: Any) -> list[str]:
    call, principal = _part(story, "call"), _part(story, "call", "principal")
    tool, server = _named(call.get("tool") or "The call"), _named(call.get("server") or "")
    what = {
        "resource": f"Resource {tool}",
        "prompt": f"Prompt {tool}",
        "completion": f"A completion for {tool}",
        "listing": f"A listing ({tool}) of server {server}",
        "logging": f"A log level for server {server}",
        "server": f"The start of server {server or tool}",
    }.get(_text(call.get("kind")), tool)
    agent = _text(principal.get("agent"))
    who = "by the gateway itself" if principal.get("kind") == "system" else f"by agent {agent}" if agent else ""
    if _text(principal.get("person")):
        who += f" for {_text(principal.get('person'))}"
    tenant = _text(principal.get("tenant"))
    if tenant not in ("", "local"):
        who += f" of tenant {tenant}"
    origin = _text(call.get("origin"))
    over = f"over {origin}" if origin not in ("", "system") else ""
    within = f"from within call {_text(call.get('parent'))}" if _text(call.get("parent")) else ""
    session = f"in session {_named(call.get('session'))}" if _text(call.get("session")) else ""
    environment = f"in {_text(call.get('environment'))}" if _text(call.get("environment")) else ""
    words = [what, "was asked", who, over, within, session, environment]
    return [_stop(" ".join(word for word in words if word) + _at(at))]


def _contract(story: Json) -> list[str]:
    contract = _part(story, "contract")
    if not contract:
        return ["No contract applied."] if "contract" in story else []
    inside = ", ".join(text for text in (_text(contract.get("mode")), _short(contract.get("digest"))) if text)
    out = [f"Contract {_text(contract.get('name')) or 'without a name'}{f' ({inside})' if inside else ''} applied."]
    if _text(story.get("pin")):
        out.append(f"The definition accepted for it is {_short(story.get('pin'))}.")
    return out


def _policy(story: Json) -> list[str]:
    decision = _part(story, "decision")
    if not decision:
        return ["Policy was not asked, as the call did not get that far."] if "decision" in story else []
    rules, reason, error = _texts(decision.get("rules")), _text(decision.get("reason")), _text(decision.get("error"))
    matched = "no rule matched"
    if rules:
        matched = f"rule{'' if len(rules) == 1 else 's'} {_join(rules)} matched"
    verdict = "allowed" if decision.get("allowed") is True else "refused"
    inside = "; ".join(
        text
        for text in (
            reason,
            f"decision {_text(decision.get('id'))}" if decision.get("id") else "",
            f"policy {_short(decision.get('policy_digest'))}" if decision.get("policy_digest") else "",
        )
        if text
    )
    out = [f"Policy {verdict} it: {matched}{f' ({inside})' if inside else ''}."]
    if error:
        out.append(_stop(f"A rule could not be evaluated, which refuses: {error}"))
    if marks := _texts(decision.get("marks")):
        out.append(f"It was marked by {_join(marks)}.")
    if decision.get("sandbox") is True:
        out.append("Policy demanded a sandbox for it.")
    if asks := _texts(decision.get("asks")):
        out.append(f"Policy demanded an approval ({_join(asks)}).")
    return out


def _approval(story: Json, records: list[Json], public: Ed25519PublicKey | None) -> list[str]:
    used = _part(story, "approval")
    identity = _text(used.get("id"))
    out: list[str] = []
    told: set[tuple[str, str]] = set()
    for record in records:
        name, approval = _text(record.get("person")), _text(record.get("approval"))
        if _kind(record) == "approval_asked":
            rule = _text(record.get("rule"))
            people = record.get("people")
            many = f" by {people} people" if isinstance(people, int) and people > 1 else ""
            by = f" by rule {rule}" if rule else ""
            text = f"An approval{many} was asked for{by}{_at(record.get('at'))} (approval {approval})."
            out.insert(0, text)
        elif _kind(record) == "approval_answered" and (approval, name) not in told:
            told.add((approval, name))
            agreed = record.get("approve") is True
            if agreed and "asked" in used and public is not None and not has_signature(public, record):
                out.append(f"An answer of {name or 'somebody'} (approval {approval}) is not signed and proves nothing.")
                continue
            shown = f", shown {_short(record.get('shown'))}" if _text(record.get("shown")) else ""
            verb = "approved" if agreed else "refused"
            out.append(f"{name or 'Somebody'} {verb} it{_at(record.get('at'))} (approval {approval}{shown}).")
        elif _kind(record) == "approval_void":
            why = _text(record.get("why")).replace("_", " ")
            out.append(f"Approval {approval} became void{_at(record.get('at'))}{f' ({why})' if why else ''}.")
    if identity and not _proven(identity, records, public if "asked" in used else None):
        out.append(f"Approval {identity} was used for it, and the log does not prove that anybody gave it.")
    return out


def _proven(identity: str, records: list[Json], public: Ed25519PublicKey | None) -> bool:
    """Whether the answers of enough people are among the records, and no refusal."""
    about = [record for record in records if _text(record.get("approval")) == identity]
    answers = [record for record in about if _kind(record) == "approval_answered"]
    agreed = {_text(r.get("person")) for r in answers if public is None or has_signature(public, r)}
    asked = _last(about, "approval_asked") or {}
    people = asked.get("people")
    enough = len(agreed) >= (people if isinstance(people, int) else 1) > 0
    return enough and all(record.get("approve") is True for record in answers)


def _grant(started: Json | None, finished: Json | None) -> list[str]:
    if started is None:
        return ["No leave to run was given."] if finished is not None else []
    chain, seq = _text(started.get("chain")), _text(started.get("seq"))
    place = f" (chain {chain}, record {seq})" if chain and seq else ""
    synced = " and synced to disk" if started.get("durable") is True else ""
    effect = started.get("effect_possible")
    could = {True: ", as an effect outside was possible", False: "; no effect outside was possible"}
    tail = could[effect] if isinstance(effect, bool) else ""
    return [f"Leave to run it once was recorded{synced} before anything was sent{tail}{place}."]


def _answers(records: list[Json]) -> list[str]:
    """What the client answered to questions of the server, round by round."""
    out = []
    for record in records:
        if _kind(record) != "answered":
            continue
        decision, approval = _part(record, "decision"), _part(record, "approval")
        sent = "was sent on" if decision.get("allowed") is True else "was not sent on, by policy"
        why = _text(decision.get("reason"))
        agreed = "".join(
            f"; {_text(one.get('person'))} approved it" for one in _list(approval.get("by")) if isinstance(one, dict)
        )
        named = f" (approval {_text(approval.get('id'))})" if approval else ""
        inside = f" ({why})" if why else ""
        which = f"in round {_text(record.get('round'))}"
        out.append(f"What the client answered to the server {which} {sent}{inside}{agreed}{named}.")
        if isinstance(unfit := record.get("unfit"), int) and unfit > 0:
            out.append(f"Of its answers {unfit} did not fit what was asked and stayed behind.")
    return out[: 2 * _FEW]


def _secrets(records: list[Json]) -> list[str]:
    """What became of each request of its box that a secret was for."""
    uses: dict[tuple[str, ...], int] = {}
    for record in records:
        if _kind(record) == "brokered":
            why = "" if record.get("allowed") is True else _text(record.get("reason_code")) or "unknown"
            use = (*(_text(record.get(name)) for name in ("secret", "method", "host", "port")), why)
            uses[use] = uses.get(use, 0) + 1
    out = []
    for (secret, method, host, port, why), count in list(uses.items())[:_FEW]:
        times = "once" if count == 1 else f"{count} times"
        how = f"was refused {times} ({why}) for" if why else f"was put {times} into"
        out.append(f"Secret {secret} {how} {method} to {host}:{port}.")
    if len(uses) > _FEW:
        out.append(f"{len(uses) - _FEW} more kinds of requests were for secrets.")
    return out


def _isolation(story: Json, started: Json | None) -> list[str]:
    facts, isolation = _part(story, "facts"), _part(story, "facts", "isolation")
    out: list[str] = []
    if started is not None and isolation and _text(story.get("status")) not in ("unavailable", "validation_failure"):
        level = _text(isolation.get("level")) or _text(isolation.get("backend")) or "unknown"
        backend = _text(isolation.get("backend"))
        server = _text(_part(story, "call").get("server"))
        by = f" (backend {backend})" if backend and backend != level else ""
        on = f" on server {server}" if server else ""
        attempts = facts.get("attempts")
        times = f"{attempts} times" if isinstance(attempts, int) and attempts > 1 else "once"
        on_by = [k for k, v in _part(isolation, "protections").items() if isinstance(v, dict) and v.get("on") is True]
        kept = ""
        if on_by:
            kept = f", with {_join(sorted(map(str, on_by))) if len(on_by) <= _FEW else f'{len(on_by)} protections'}"
        out.append(f"It ran {times} at isolation {level}{by}{on}{kept}{_session(facts)}.")
    refused = [d for d in _list(_part(facts, "network").get("denied")) if isinstance(d, dict)]
    hosts = [f"{_text(d.get('host'))}:{_text(d.get('port'))}" for d in refused]
    if hosts:
        out.append(f"The network was denied to {_join(hosts[:10])}.")
    return out


def _session(facts: Json) -> str:
    session = _part(facts, "session")
    name, step, context = (_text(session.get(key)) for key in ("id", "step", "context"))
    if not name:
        return ""
    state = _text(session.get("state"))
    as_step = f", as step {step}" + (f" in context {context}" if context else "") if step else ""
    return f", in session {name}{as_step}" + (f"; the session was {state} then" if state else "")


# ── How it ended ──────────────────────────────────────────────────────────────────────────────────


def _outcome(started: Json | None, finished: Json | None) -> list[str]:
    if finished is None:
        return ["No outcome is recorded yet: it is still running, or a crash cut it short."] if started else []
    tell = _ENDINGS.get(_text(finished.get("status")))
    ending = tell(finished) if tell else f"It ended as {_text(finished.get('status')) or 'nothing that was recorded'}"
    out = [_stop(ending)]
    wall = _part(finished, "facts").get("wall_ms")
    if started is not None and isinstance(wall, int | float) and math.isfinite(wall):
        out.append(f"It took {wall:.1f} ms.")
    if finished.get("recovered") is True:
        out.append("The gateway stopped before it recorded an outcome; a later start closed the record.")
    return out


def _effect(finished: Json) -> str:
    return {
        "none": "nothing outside was changed",
        "confirmed": "its effect is confirmed",
        "unknown": "whether it changed anything outside is unknown",
    }.get(_text(finished.get("effect")), "its effect is not recorded")


def _why(finished: Json) -> str:
    code, message = _text(finished.get("reason_code")), _text(finished.get("message")).strip()
    return (f" ({code})" if code else "") + (f": {message.rstrip('.')}" if message else "")


def _success(finished: Json) -> str:
    return f"It succeeded; {_effect(finished)}"


def _failed(finished: Json) -> str:
    status = _part(finished, "facts").get("exit_status")
    code = f" with exit status {status}" if isinstance(status, int) else ""
    return f"It ran and failed{code}{_why(finished)}; {_effect(finished)}"


def _invalid(finished: Json) -> str:
    return f"It was refused as invalid{_why(finished)}. It never ran"


def _denied(finished: Json) -> str:
    return f"It was denied{_why(finished)}. It never ran"


def _waits(finished: Json) -> str:
    identity = _text(_part(finished, "approval").get("id")) or _text(finished.get("approval_id"))
    named = f", approval {identity}" if identity else ""
    return f"It needs the approval of a person{named}{_why(finished)}. It has not run"


def _timeout(finished: Json) -> str:
    return f"It was stopped because its time was up{_why(finished)}; {_effect(finished)}"


def _killed(finished: Json) -> str:
    limit = _text(_part(finished, "facts").get("limit"))
    by = f" at its {limit} limit" if limit else ""
    return f"It was stopped by us{by}{_why(finished)}; {_effect(finished)}"


def _unavailable(finished: Json) -> str:
    return f"Something that it needs was not there{_why(finished)}. It never ran"


def _unknown(finished: Json) -> str:
    return f"Its outcome is unknown{_why(finished)}; {_effect(finished)}"


_ENDINGS: dict[str, Callable[[Json], str]] = {
    "success": _success,
    "failed": _failed,
    "validation_failure": _invalid,
    "denied": _denied,
    "approval_required": _waits,
    "timeout": _timeout,
    "killed": _killed,
    "unavailable": _unavailable,
    "unknown": _unknown,
}
