"""What is known of how a call ended. Facts come from our own observation; what we cannot see is null.

A call to an upstream server runs outside of any box of ours, so its use of processor, memory and network is unknown,
never zero. Of a box the supervisor saw everything; nothing here is what the program said of itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from ringfence.core import canonical
from ringfence.core.box import BoxReport, Captured, Ran
from ringfence.core.model import Effect, Json, Mode, Outcome, Status
from ringfence.core.record import dataclass
from ringfence.core.sessions import Within
from ringfence.governance import flow
from ringfence.governance.effects import PossibleEffects
from ringfence.governance.journal import CallState
from ringfence.packages.index_address import INDEX_HOST
from ringfence.sandbox.tools.limits import limit_words, signal_words, span

_WITHHELD = frozenset({"result_too_large", "bad_output", "invalid_result"})
_MAX_FILES = 1000
_MAX_SHOWN = 5
_SUMS = ("count", "bytes_in", "bytes_out")
_UNSEEN_NETWORK: Json = {"allowed": None, "denied": None, "bytes_in": None, "bytes_out": None}
_NO_NETWORK: Json = {"allowed": [], "denied": [], "bytes_in": 0, "bytes_out": 0}
_ENDED = {
    Status.SUCCESS: "exited",
    Status.FAILED: "exited",
    Status.VALIDATION_FAILURE: None,  # it is not that anything forbade it: there was nothing that could begin
    Status.DENIED: "policy",
    Status.APPROVAL_REQUIRED: "policy",
    Status.TIMEOUT: "timeout",
    Status.KILLED: "policy",
    Status.UNAVAILABLE: "infra",
    Status.UNKNOWN: "infra",
}


# Not frozen, which would triple what it costs: one is made for every call, and read once.
@dataclass(slots=True)
class FinishedCall:
    """A call as the pipeline left it, how it ended, and when."""

    state: CallState
    outcome: Outcome
    wall_ms: float

    @property
    def took_ms(self) -> float:
        """How long it ran: of a box its own time, without the way to it."""
        ran = self.state.ran
        return self.wall_ms if ran is None else ran.report.wall_ms


def _ended(finished: FinishedCall) -> str | None:
    given_up = finished.outcome.reason_code == "cancelled" or (
        finished.outcome.status is Status.KILLED and finished.outcome.reason_code == "stopping"
    )
    return "cancelled" if given_up else _ENDED[finished.outcome.status]


def build(finished: FinishedCall) -> Json:
    """The facts object of a call."""
    contract = finished.state.contract
    decision = finished.state.decision
    changed = _effect(finished)
    found: Json = {
        "call_id": finished.state.call.id,
        "decision_id": decision.id if decision is not None else None,
        "rules": list(decision.rules) if decision is not None else [],
        "contract_digest": contract.digest if contract is not None else None,
        "started_at": _zulu(finished.state.began_at),
        "wall_ms": round(finished.took_ms, 3),
        "ended": None,  # this and whatever else is None here is filled in below; the order is for readers
        "exit_status": None,
        "signal": None,
        "timed_out": None,
        "limit": None,
        "effect": changed.value,
        "usage": None,
        "isolation": dict(finished.state.isolation) if finished.state.dispatched or finished.state.isolation else None,
        "network": None,
        "inputs": None,
        "files": None,
        "output": None,
        "redactions": dict(finished.state.redactions),
        "denials": None,
        "explanation": explanation(finished, changed),
    }
    found.update(_of_server(finished) if finished.state.ran is None else _of_box(finished.state.ran.report))
    if finished.state.within is not None:
        found.update(_of_session(finished.state.within))
    if decision is not None and decision.shadow is not None:
        found["shadow"] = {"rules": list(decision.shadow.rules), "verdict": decision.shadow.verdict}
    if finished.state.flow is not None and (labels := flow.as_fact(finished.state.flow)) is not None:
        found["labels"] = labels
    if finished.state.lasts is not None and changed is Effect.CONFIRMED:
        found["lasts"] = finished.state.lasts
    if finished.state.possible.declared_read and finished.state.dispatched:
        found["effect_basis"] = "declared"
    return found


def _of_session(within: Within) -> Json:
    session = {"id": within.session, "step": within.step, "context": within.context, "state": within.state}
    given: Json = {"inputs": [fact.as_json() for fact in within.given]} if within.given else {}
    step = within.report
    if step is not None and step.context is not None and step.cell.report.ended == "exited":
        given["claimed"] = ["exit_status"]  # of a cell, its interpreter says whether it failed
    if within.packages:
        given["packages"] = [dict(package) for package in within.packages]
    if within.planted:
        given["planted"] = list(within.planted)
    if within.not_kept:
        given["not_kept"] = list(within.not_kept)
    return {"session": session, **given}


def _of_server(finished: FinishedCall) -> Json:
    ran = finished.state.dispatched
    timed_out = finished.outcome.status is Status.TIMEOUT
    return {
        "ended": _ended(finished),
        "timed_out": timed_out,
        "limit": "wall" if timed_out else None,
        "usage": {"cpu_ms": None, "peak_memory_bytes": None, "io_bytes": None, "processes": None},
        # A call that did not reach its server's program has none of its own; what its box did meanwhile is told.
        "network": (finished.state.network or _UNSEEN_NETWORK)
        if ran or any((finished.state.network or {}).values())
        else None,
        "inputs": [],
        "files": [],
        "output": {
            "stdout_bytes": None,
            "stderr_bytes": None,
            "sha256": _sha256(finished) if finished.outcome.result is not None else None,
            "truncated": finished.state.shortened,
        },
        "denials": None if ran else {},
    }


def _of_box(report: BoxReport) -> Json:
    usage = report.usage
    seen: Json = {
        "ended": report.ended,
        "exit_status": report.exit_status,
        "signal": report.signal,
        "timed_out": report.ended == "timeout",
        "limit": report.limit,
        "usage": {
            "cpu_ms": None if usage.cpu_ms is None else round(usage.cpu_ms, 3),
            "peak_memory_bytes": usage.peak_memory_bytes,
            "io_bytes": usage.io_bytes,
            "processes": usage.processes,
        },
        "network": _NO_NETWORK if report.network is None else {**report.network},
        "inputs": [fact.as_json() for fact in report.inputs],
        "files": [fact.as_json() for fact in report.files[:_MAX_FILES]],
        "output": {
            "stdout_bytes": report.stdout.total,
            "stderr_bytes": report.stderr.total,
            "sha256": _of_both(report.stdout, report.stderr),
            "truncated": report.stdout.truncated or report.stderr.truncated,
            "stdout_sha256": report.stdout.sha256,
            "stderr_sha256": report.stderr.sha256,
        },
        "denials": dict(report.denials),
    }
    inside = seen["network"].pop("packages", ()) if report.network is not None else ()
    if report.commands is not None:
        seen["commands"] = report.commands
    if report.planted:
        seen["planted"] = list(report.planted)
    if report.forged:
        seen["forged"] = True
    if report.late is not None:
        seen["late"] = {**report.late}
    if report.left:
        seen["left"] = True
    if report.packages or inside:
        seen["packages"] = [_uncounted(package) for package in (*report.packages, *inside)]
    if len(report.files) > _MAX_FILES:
        seen["files_left_out"] = len(report.files) - _MAX_FILES
    if report.skipped:
        seen["skipped"] = dict(islice(report.skipped.items(), _MAX_FILES))
    if report.trouble:
        seen["trouble"] = list(report.trouble)
    return seen


def _uncounted(package: Mapping[str, Any]) -> Json:
    return {name: value for name, value in package.items() if name != "count"}


def _of_both(stdout: Captured, stderr: Captured) -> str:
    """The digest of all output: that of the only stream with any, else the digest of both digests, stdout first."""
    if stderr.total == 0:
        return stdout.sha256
    if stdout.total == 0:
        return stderr.sha256
    return hashlib.sha256(bytes.fromhex(stdout.sha256) + bytes.fromhex(stderr.sha256)).hexdigest()


def _sha256(finished: FinishedCall) -> str:
    encoded = (
        finished.state.encoded_result
        if finished.state.encoded_result is not None
        else canonical.dumps(finished.outcome.result)
    )
    return hashlib.sha256(encoded).hexdigest()


def _zulu(moment: datetime) -> str:
    moment = moment if moment.tzinfo is UTC else moment.astimezone(UTC)
    return moment.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


_DECLARED = (
    "it is declared a read, which changes nothing; whether its server, which has the means, did more is not known"
)


def effect(
    status: Status,
    possible: PossibleEffects,
    dispatched: bool,
    sent: bool | None = None,
    copied: bool | None = None,
) -> Effect:
    """Whether something outside may have changed, of what could; `sent` is whether its box sent anything out, and
    `copied` whether we copied any of its files out, where that was seen."""
    changed = (
        possible.acts
        or possible.writes
        or (possible.sends and sent is not False)
        or (possible.copies and copied is not False)
    )
    if not changed or possible.declared_read:  # that it is only declared is another fact, `effect_basis`
        return Effect.NONE
    # Without a dispatch these are of an earlier attempt under the same key; of `unknown` the answer was lost.
    if not dispatched and status not in (Status.SUCCESS, Status.UNKNOWN):
        return Effect.NONE
    return Effect.CONFIRMED if status is Status.SUCCESS else Effect.UNKNOWN


def _effect(finished: FinishedCall) -> Effect:
    dispatched = finished.state.dispatched or finished.state.replayed_from is not None
    changed = effect(finished.outcome.status, finished.state.possible, dispatched, _sent(finished), _copied(finished))
    if changed is Effect.NONE and finished.state.ran is not None and finished.state.possible.sends:
        # What earlier steps left there has sent something, or what this one left may still do so.
        report = finished.state.ran.report
        late = (report.late or {}).get("network")
        if report.left or (late is not None and went_out(late)):
            return Effect.UNKNOWN
    return changed


def _sent(finished: FinishedCall) -> bool | None:
    """Whether anything that its box asked for went out, however that ended; None where its box was not seen to the
    end, or its caller gave it up."""
    if finished.state.ran is None or _is_given_up(finished):
        return None
    network = finished.state.ran.report.network
    return network is not None and went_out(network)


def _copied(finished: FinishedCall) -> bool | None:
    """Whether any file was copied out; None where its box was not seen to the end, in which that is done."""
    if finished.state.ran is None or finished.state.ran.report.ended == "infra" or _is_given_up(finished):
        return None
    return bool(finished.state.ran.report.files)


def _is_given_up(finished: FinishedCall) -> bool:
    """Whether it had a box of its own that was killed under it: nobody is to rely on what was seen by then."""
    return (
        finished.state.within is None
        and finished.state.ran is not None
        and finished.state.ran.report.ended == "cancelled"
    )


def both_networks(one: Json | None, other: Json | None) -> Json | None:
    """The `network` fact of two attempts."""
    if one is None or other is None:
        return other if one is None else one
    out: Json = {}
    for name in {**one, **other}:
        values = (one.get(name) or (), other.get(name) or ())
        if any(isinstance(value, int) for value in values):
            out[name] = sum(value or 0 for value in values)
            continue
        places: dict[tuple[Any, ...], Json] = {}
        for entry in (*values[0], *values[1]):
            key = tuple(value for what, value in entry.items() if what not in _SUMS)
            known = places.setdefault(key, {**entry, **{what: 0 for what in _SUMS if what in entry}})
            known.update({what: known.get(what, 0) + entry[what] for what in _SUMS if what in entry})
        out[name] = list(places.values())
    return out


def went_out(network: Mapping[str, Any]) -> bool:
    """Whether anything of what was asked for left us, by a `network` fact."""
    asked = [entry for which in ("allowed", "failed") for entry in network.get(which, ())]
    if denied := network.get("denied", ()):
        from ringfence.egress.ledger import looked_up  # noqa: PLC0415 - most boxes ask for nothing

        asked += [entry for entry in denied if looked_up(entry["host"], entry.get("reason"))]
    # Bytes are those of hosts outside alone: our own index answers here. An answer that comes in later is no request.
    return network.get("bytes_out", 0) > 0 or any(entry["host"] != INDEX_HOST and entry["count"] > 0 for entry in asked)


def explanation(finished: FinishedCall, changed: Effect | None = None) -> str:
    """How it ended in one sentence, for a model and for a person; `changed` where its effect is known already."""
    changed = changed or _effect(finished)
    parts = (
        _what_happened(finished),
        _raising(finished),
        _programs(finished),
        _refused_calls(finished),
        _network(finished),
        _late(finished),
        _what_changed(finished, changed),
    )
    said = "; ".join([part for part in parts if part])
    within = finished.state.within
    if within is None or within.step is None:
        return said
    return f"{f'step {within.step} of ' if within.step else ''}session {within.session}: {said}"


def _what_happened(finished: FinishedCall) -> str:
    if finished.state.ran is not None and finished.outcome.status is not Status.UNKNOWN:
        return _in_a_box(finished, finished.state.ran)
    status = finished.outcome.status
    code = finished.outcome.reason_code
    took = span(finished.took_ms)
    match status:
        case Status.SUCCESS:
            return (
                f"the tool answered after {took}"
                if finished.state.dispatched
                else "answered with an earlier call's result"
            )
        case Status.FAILED:
            if finished.state.call.method == "server/start":
                return f"the server's program ran for {took}, and the server did not come up ({code})"
            if finished.state.replayed_from is not None:
                return f"answered with an earlier call's failure ({code})"
            if code in _WITHHELD:
                return f"the tool answered after {took}, but its answer was withheld ({code})"
            return f"the tool failed after {took}" + ("" if code == "tool_error" else f" ({code})")
        case Status.VALIDATION_FAILURE:
            return f"the request was refused as invalid ({code})"
        case Status.DENIED:
            return _denied(finished)
        case Status.APPROVAL_REQUIRED:
            return "a person must approve it before it can run"
        case Status.TIMEOUT:
            return f"terminated by timeout after {took}"
        case Status.KILLED:
            return f"cancelled after {took}" if code == "cancelled" else f"stopped after {took} ({code})"
        case Status.UNAVAILABLE:
            return f"something it needs was not available ({code})"
        case Status.UNKNOWN if finished.state.answered is not None:
            return f"the server answered HTTP {finished.state.answered} after {took} ({code})"
        case Status.UNKNOWN:
            lost = "the answer was lost" if finished.state.ran is None else "the box itself failed"
            return f"{lost} after {took} ({code})"


def _in_a_box(finished: FinishedCall, ran: Ran) -> str:
    report = ran.report
    took = span(finished.took_ms)
    withheld = (
        ""
        if finished.outcome.reason_code not in _WITHHELD
        else f", but its output was withheld ({finished.outcome.reason_code})"
    )
    match report.ended:
        case "exited":
            met = (
                f", having met its limit of {limit_words(report.limit, ran.limits)}" if report.limit is not None else ""
            )
            return f"exited with status {report.exit_status} after {took}{met}{withheld}"
        case "signalled":
            return f"ended by {signal_words(report.signal)} after {took}{withheld}"
        case "timeout" if report.limit == "cpu":
            return f"terminated after {took} for using more than {limit_words('cpu', ran.limits)}"
        case "timeout":
            return f"terminated by timeout after {took}"
        case "cancelled":
            return f"cancelled after {took}"
        case "policy" if report.forged:
            return f"killed after {took}: its interpreter said that it was done and went on (forged)"
        case "policy":
            return f"killed for breaking the rules of its box after {took}"
        case "oom":
            return f"killed for using more than {limit_words('memory', ran.limits)} after {took}"
        case "pids" | "disk" | "output":
            return f"killed for using more than {limit_words(report.limit or report.ended, ran.limits)} after {took}"
        case "infra":
            return f"the box itself failed after {took}"


_MORE = {
    "memory": "`--memory`, `limits=` or `max_memory_mb`",
    "pids": "`--pids`, `limits=` or `max_processes`",
    "disk": "`--disk`, `limits=` or `max_disk_mb`",
}
"""What raises a limit: on the command line, in Python, in a configuration."""


def _raising(finished: FinishedCall) -> str:
    """The error of a library that cannot have a thread or some memory names no limit."""
    how = _MORE.get(finished.state.ran.report.limit or "") if finished.state.ran is not None else None
    return f"more is given by {how}" if how else ""


def _programs(finished: FinishedCall) -> str:
    match finished.state.ran.report.commands if finished.state.ran is not None else None:
        case "enforced":
            return "only the programs that its contract names could be run"
        case "advisory":
            return "only the programs that its contract names were there, and one of them runs code of its own"
    return ""


def _refused_calls(finished: FinishedCall) -> str:
    denials = finished.state.ran.report.denials if finished.state.ran is not None else {}
    if not denials:
        return ""
    shown = [f"{name} ({count})" for name, count in islice(denials.items(), _MAX_SHOWN)]
    if len(denials) > _MAX_SHOWN:
        shown.append(f"{len(denials) - _MAX_SHOWN} more")
    return f"refused system calls: {', '.join(shown)}"


def _network(finished: FinishedCall) -> str:
    network = finished.state.ran.report.network if finished.state.ran is not None else None
    if network is None:
        return ""
    said = []
    for which, word in (("allowed", "reached"), ("denied", "denied"), ("failed", "failed to reach")):
        places = [f"{entry['host']}:{entry['port']} ({entry['count']})" for entry in network.get(which, ())]
        if len(places) > _MAX_SHOWN:
            places = [*places[:_MAX_SHOWN], f"{len(places) - _MAX_SHOWN} more"]
        if places:
            said.append(f"{word} {', '.join(places)}")
    return f"network: {'; '.join(said)}" if said else ""


def _late(finished: FinishedCall) -> str:
    late = finished.state.ran.report.late if finished.state.ran is not None else None
    if late is None:
        return ""
    parts = [f"{span(late['cpu_ms'])} of processor time"] if late.get("cpu_ms") else []
    parts += [f"{sum(late['denials'].values())} refused system calls"] if late.get("denials") else []
    parts += [f"{len(late['files'])} files"] if late.get("files") else []
    parts += ["requests to the network"] if late.get("network") else []
    written = sum(late.get(f"{stream}_bytes", 0) for stream in ("stdout", "stderr"))
    parts += [f"{written} bytes of output"] if written else []
    parts += [f"a limit that was met ({late['limit']})"] if late.get("limit") else []
    tasks = late.get("tasks")
    if tasks:
        parts.append("1 thread or process beside it" if tasks == 1 else f"{tasks} threads and processes beside it")
    said = [f"left by earlier steps or set-up code and charged to none: {', '.join(parts)}"] if parts else []
    if refused := late.get("refused_connections"):
        said.append(f"{refused} connections of other users to its ports were refused")
    return "; ".join(said)


def _denied(finished: FinishedCall) -> str:
    decision = finished.state.decision
    if decision is not None and not decision.allowed:
        return f"refused by policy ({decision.reason})"
    return f"refused ({finished.outcome.reason_code})"


def _what_changed(finished: FinishedCall, changed: Effect) -> str:
    contract = finished.state.contract
    match changed:
        case Effect.CONFIRMED if finished.state.lasts == "call":
            return "what it changed was in a box for this call alone, and is gone with it"
        case Effect.CONFIRMED if finished.state.lasts == "server":
            return "what it changed is in the server's box alone, and lasts until that ends"
        case Effect.CONFIRMED:
            return "its effect is confirmed"
        case Effect.UNKNOWN:
            return "whether it took effect is unknown"
        case Effect.NONE:
            if not finished.state.dispatched:
                return "nothing was run" if finished.outcome.status is not Status.SUCCESS else "nothing was run again"
            if finished.state.possible.declared_read:
                return _DECLARED
            if contract is not None and contract.mode is Mode.READ and not finished.state.possible:
                if _sent(finished) or (finished.state.ran is not None and finished.state.ran.report.planted):
                    return "this call only waited; what the command did is the effect of the call that started it"
                return "it only reads, so nothing was changed"
            had = finished.state.possible.sends or (
                finished.state.ran is not None and finished.state.ran.report.network is not None
            )
            network = "nothing was sent to the network" if had else "network was denied"
            if finished.state.within is not None and finished.state.ran is None and not finished.state.possible:
                return "nothing outside of the session was changed"
            if finished.state.within is not None:
                return f"{network}; nothing outside of the session was changed"
            if finished.state.possible.copies:
                return f"{network}; no file was copied out, and no other side effect was possible"
            return f"{network}; no side effect was possible"
