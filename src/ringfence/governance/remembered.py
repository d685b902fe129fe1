"""What is kept of a run so that it can be run again: its program, its limits and environment, and its output.

It is kept where a contract says `record: full`, sealed, and apart from the log. Arguments that contain a secret, or
text that looks like one, are not kept at all: to run a redacted program again would prove nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ringfence.core import canonical
from ringfence.core.box import BoxReport, Captured
from ringfence.core.model import Json
from ringfence.governance.guard import CONTROL, INVISIBLE

if TYPE_CHECKING:
    from ringfence.governance.journal import CallState

_MAX_TEXT = 20_000
_HIDDEN = frozenset({CONTROL, INVISIBLE})
"""Rules by which the guard removes characters, and no secrets."""


def run_to_keep(state: CallState, removed: Mapping[str, int], environment: Json) -> Json | None:
    """What is kept of a run in a fresh box; None for any other call. `removed` counts what redaction found in its
    arguments, by rule."""
    ran = state.ran
    call = state.call
    if not state.is_own or ran is None or state.within is not None or state.contract is None:
        return None
    if "code" not in call.arguments and "command" not in call.arguments:
        return None
    attached = call.attached is not None and bool(call.attached.inputs or call.attached.stdin)
    hidden = sum(count for rule, count in removed.items() if rule not in _HIDDEN)
    contract = state.contract
    limits = {
        name: value
        for name in ("wall_seconds", "cpu_seconds", "cpu_cores", "memory_bytes", "disk_bytes", "processes")
        if (value := getattr(ran.limits, name)) is not None
    }
    return {
        "tool": contract.tool,
        "arguments": None if hidden or attached else call.arguments,
        "withheld": "secret" if hidden else "inputs" if attached else None,
        "shows": call.origin != "cli",  # at a command line, a last expression is not shown
        "began": state.began_at.timestamp(),
        "limits": limits,
        "layout": str(ran.report.isolation.get("memory_layout")),
        "mounts": [{"host": each.host, "at": each.at, "mode": each.mode} for each in contract.mounts],
        "programs": contract.commands is not None,
        "environment": environment,
        "seen": seen_of(ran.report),
    }


def seen_of(report: BoxReport) -> Json:
    """What came of a run, as far as two runs can be compared."""
    network = report.network or {}
    shown = [[dict(each.data), each.main] for each in report.shown]
    value = "\n".join(each.data.get("text/plain", "") for each in report.shown)
    return {
        "ending": f"{report.ended}, status {report.exit_status}, signal {report.signal}",
        "stdout": _text(report.stdout),
        "stderr": _text(report.stderr),
        "value": {"sha256": canonical.digest(shown), "text": _cut(value)},
        "files": {fact.path: fact.sha256 for fact in report.files},
        "network": {
            verdict: sum(entry["count"] for entry in network.get(verdict) or ())
            for verdict in ("allowed", "denied", "failed")
        },
    }


def _text(captured: Captured) -> Json:
    whole = captured.head + captured.tail
    digest = captured.sha256 or hashlib.sha256(whole).hexdigest()
    return {"sha256": digest, "bytes": captured.total, "text": _cut(whole.decode("utf-8", "replace"))}


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT]
