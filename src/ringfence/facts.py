"""What is known of how a call ended. Facts come from the gateway's own observation; what it cannot see is null.

A call to an upstream server runs outside of any box of ours, so its use of processor, memory and network is unknown,
never zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from ringfence import canonical
from ringfence.model import Call, Contract, Decision, Effect, Json, Mode, Status, Transport

_NEVER_RAN = frozenset({Status.VALIDATION_FAILURE, Status.DENIED, Status.APPROVAL_REQUIRED, Status.UNAVAILABLE})
_WITHHELD = frozenset({"result_too_large", "bad_output"})
_ENDED = {
    Status.SUCCESS: "exited",
    Status.FAILED: "exited",
    Status.VALIDATION_FAILURE: "policy",
    Status.DENIED: "policy",
    Status.APPROVAL_REQUIRED: "policy",
    Status.TIMEOUT: "timeout",
    Status.KILLED: "policy",
    Status.UNAVAILABLE: "infra",
    Status.UNKNOWN: "infra",
}


@dataclass(frozen=True, slots=True)
class Ending:
    """What the way of a call left behind when it ended."""

    call: Call
    status: Status
    reason_code: str
    started_at: datetime
    wall_ms: float
    contract: Contract | None = None
    decision: Decision | None = None
    dispatched: bool = False
    """Whether a byte of it may have left us."""
    isolation: Json = field(default_factory=dict)
    result: Json | None = None
    encoded: bytes | None = None
    """The result's canonical form, where somebody had to make it already."""
    redactions: Mapping[str, int] = field(default_factory=dict)


def build(ending: Ending) -> Json:
    """The facts object of a call."""
    contract, decision = ending.contract, ending.decision
    ran = ending.dispatched
    timed_out = ending.status is Status.TIMEOUT
    return {
        "call_id": ending.call.id,
        "decision_id": decision.id if decision is not None else None,
        "rules": list(decision.rules) if decision is not None else [],
        "contract_digest": contract.digest if contract is not None else None,
        "started_at": _zulu(ending.started_at),
        "wall_ms": round(ending.wall_ms, 3),
        "ended": "cancelled" if ending.reason_code == "cancelled" else _ENDED[ending.status],
        "exit_status": None,
        "signal": None,
        "timed_out": timed_out,
        "limit": "wall" if timed_out else None,
        "effect": effect(ending.status, contract, ran).value,
        "usage": {"cpu_ms": None, "peak_memory_bytes": None, "io_bytes": None, "processes": None},
        "isolation": dict(ending.isolation) if ran or ending.isolation else None,
        "network": {"allowed": None, "denied": None, "bytes_in": None, "bytes_out": None} if ran else None,
        "inputs": [],
        "files": [],
        "output": {
            "stdout_bytes": None,
            "stderr_bytes": None,
            "sha256": _sha256(ending) if ending.result is not None else None,
            "truncated": False,
        },
        "redactions": dict(ending.redactions),
        "denials": None if ran else {},
        "explanation": explanation(ending),
    }


def _sha256(ending: Ending) -> str:
    encoded = ending.encoded if ending.encoded is not None else canonical.dumps(ending.result)
    return hashlib.sha256(encoded).hexdigest()


def _zulu(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def effect(status: Status, contract: Contract | None, dispatched: bool) -> Effect:
    """Whether something outside may have changed."""
    if contract is None or status in _NEVER_RAN or not could_act(contract):
        return Effect.NONE
    if status is Status.SUCCESS:
        return Effect.CONFIRMED
    # `unknown` without a dispatch is an earlier attempt under the same key, whose answer was lost.
    return Effect.UNKNOWN if dispatched or status is Status.UNKNOWN else Effect.NONE


def could_act(contract: Contract) -> bool:
    """Whether the capability can change anything outside; a box that is shut off cannot, whatever runs in it."""
    if contract.mode is Mode.READ:
        return False
    shut = (
        contract.transport is Transport.SANDBOXED_EXEC
        and contract.network == "denied"
        and not contract.secrets
        and not any(mount.mode == "rw" for mount in contract.mounts)
    )
    return not shut


def explanation(ending: Ending) -> str:
    """The ending in one sentence, for a model and for a person."""
    return f"{_what_happened(ending)}; {_what_changed(ending)}"


def _what_happened(ending: Ending) -> str:
    status, code, took = ending.status, ending.reason_code, _span(ending.wall_ms)
    match status:
        case Status.SUCCESS:
            return f"the tool answered after {took}" if ending.dispatched else "answered with an earlier call's result"
        case Status.FAILED:
            if code in _WITHHELD:
                return f"the tool answered after {took}, but its answer was withheld ({code})"
            return f"the tool failed after {took}" + ("" if code == "tool_error" else f" ({code})")
        case Status.VALIDATION_FAILURE:
            return f"the request was refused as invalid ({code})"
        case Status.DENIED:
            return _denied(ending)
        case Status.APPROVAL_REQUIRED:
            return "a person must agree before it can run"
        case Status.TIMEOUT:
            return f"terminated by timeout after {took}"
        case Status.KILLED:
            return f"cancelled after {took}" if code == "cancelled" else f"stopped after {took} ({code})"
        case Status.UNAVAILABLE:
            return f"something it needs was not available ({code})"
        case Status.UNKNOWN:
            return f"the answer was lost after {took} ({code})"


def _denied(ending: Ending) -> str:
    decision = ending.decision
    if decision is not None and not decision.allowed:
        return f"refused by policy ({decision.reason})"
    return f"refused ({ending.reason_code})"


def _what_changed(ending: Ending) -> str:
    contract = ending.contract
    match effect(ending.status, contract, ending.dispatched):
        case Effect.CONFIRMED:
            return "its effect is confirmed"
        case Effect.UNKNOWN:
            return "whether it took effect is unknown"
        case Effect.NONE:
            if not ending.dispatched or ending.status in _NEVER_RAN:
                return "nothing was run" if ending.status is not Status.SUCCESS else "nothing was run again"
            if contract is not None and contract.mode is Mode.READ:
                return "it only reads, so nothing was changed"
            return "network was denied; no side effect was possible"


def _span(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"
