"""What `/metrics` has: every metric of a gateway, with its labels.

The page of this is docs/telemetry.md, and a test compares. Labels are words of ours or names of the configuration,
never what a caller chose: a tool, a server or a reason that is not known is `other`.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ringfence import __version__
from ringfence.core import reasons
from ringfence.core.model import Json, Status
from ringfence.core.record import dataclass
from ringfence.telemetry.registry import OTHER, Counter, Family, Histogram, Read, Reading, render

_BUDGET = frozenset({"throttled", "quota", "loop"})


@dataclass(slots=True)
class EndedCall:
    """How a call ended, in words of ours and of the configuration alone."""

    kind: str
    tool: str
    """The capability; none for other kinds than `tool`, `other` for a name that its caller made up."""
    server: str | None
    agent: str
    status: Status
    reason: str
    seconds: float
    waited: float
    """Of these, for a person."""
    worked: float | None
    """Of these, at its server or in its box; None: it did not get there."""
    box_ended: str | None = None
    """How the box ended that it had for itself."""


class GatewayMetrics:
    """All metrics of one gateway process. For its event loop."""

    def __init__(self) -> None:
        about: Reading = {(__version__, platform.python_version()): 1.0}
        self._families: list[Family] = []
        self._read("gauge", "build_info", "The version that runs.", "version", "python", read=lambda: about)
        self.calls = self._counter(
            "calls_total",
            "Calls that ended, refused ones included.",
            *("kind", "tool", "agent", "status", "reason"),
            whose="agent",
        )
        self.call_seconds = self._histogram("call_seconds", "How long calls took, from end to end.", "kind", "tool")
        self.own_seconds = self._histogram(
            "gateway_seconds", "Of calls, what the gateway itself took: neither people, servers nor boxes.", "kind"
        )
        self.server_seconds = self._histogram("server_seconds", "How long servers took to answer calls.", "server")
        self.approval_seconds = self._histogram("approval_wait_seconds", "How long calls waited for a person.")
        self.running = 0
        self._read("gauge", "calls_running", "Calls under way.", read=lambda: float(self.running))
        self.box_seconds = self._histogram("box_seconds", "How long calls took in boxes of their own.", "ended")
        self.boxes_started = self._counter("boxes_started_total", "Calls for which a box of their own was begun.")
        self.boxes_ended = self._counter("boxes_ended_total", "Boxes that ended with their call, by how.", "ended")
        self.boxes_running = 0
        self._read("gauge", "boxes_running", "Calls in boxes of their own now.", read=lambda: float(self.boxes_running))
        self.budget = self._counter("budget_refusals_total", "Calls refused by rate, quota or loop guard.", "reason")
        self.refused = self._counter("requests_refused_total", "Requests refused before they were calls.", "reason")
        self.egress = self._counter(
            "egress_requests_total", "What boxes asked of the network, by what became of it.", "verdict"
        )
        self.egress_bytes = self._counter("egress_bytes_total", "Bytes through the proxy of boxes.", "direction")
        self.redactions = self._counter("redactions_total", "Values removed from results and records.")
        spent = "Processor time of this process."
        self._read("counter", "process_cpu_seconds_total", spent, read=time.process_time, own=False)
        self._read("gauge", "process_resident_memory_bytes", "Memory of this process.", read=_resident, own=False)
        began = time.time()
        self._read("gauge", "process_start_time_seconds", "When this process began.", read=lambda: began, own=False)

    def text(self) -> str:
        return render(self._families)

    def read(self, kind: Any, name: str, meaning: str, *labels: str, read: Callable[[], Reading]) -> None:
        """A metric that another part of the gateway knows the value of."""
        self._read(kind, name, meaning, *labels, read=read)

    # ── what happens ──

    def began(self, *, boxed: bool) -> None:
        """A call goes to its server or box."""
        if boxed:
            self.boxes_started.add()
            self.boxes_running += 1

    def ended(self, call: EndedCall, *, boxed: bool, network: Json | None, late: Json | None, removed: int) -> None:
        reason = call.reason if call.reason in reasons.REASONS or call.reason == "ok" else OTHER
        self.calls.add(call.kind, call.tool, call.agent, str(call.status), reason)
        self.call_seconds.observe(call.seconds, call.kind, call.tool)
        self.own_seconds.observe(max(0.0, call.seconds - call.waited - (call.worked or 0.0)), call.kind)
        if call.waited:
            self.approval_seconds.observe(call.waited)
        if call.worked is not None and call.server is not None:
            self.server_seconds.observe(call.worked, call.server)
        if boxed:
            how = call.box_ended or "not_begun"
            self.boxes_running -= 1
            self.boxes_ended.add(how)
            if call.worked is not None:
                self.box_seconds.observe(call.worked, how)
        if call.status is Status.DENIED and reason in _BUDGET:
            self.budget.add(reason)
        if removed:
            self.redactions.add(by=removed)
        for each in (network, late):
            if each is not None:
                self.sent(each)

    def sent(self, network: Mapping[str, Any]) -> None:
        """What a box asked of the network, by its `network` fact."""
        for verdict in ("allowed", "denied", "failed"):
            count = sum(entry["count"] for entry in network.get(verdict) or ())
            if count:
                self.egress.add(verdict, by=count)
        for direction in ("in", "out"):
            if size := network.get(f"bytes_{direction}"):
                self.egress_bytes.add(direction, by=size)

    def refused_request(self, reason: str) -> None:
        """A request that became no call."""
        self.refused.add(reason if reason in reasons.REASONS else OTHER)

    # ── how they are made ──

    def _counter(self, name: str, meaning: str, *labels: str, whose: str | None = None) -> Counter:
        made = Counter(f"ringfence_{name}", meaning, *labels, whose=whose)
        self._families.append(made)
        return made

    def _histogram(self, name: str, meaning: str, *labels: str) -> Histogram:
        made = Histogram(f"ringfence_{name}", meaning, *labels)
        self._families.append(made)
        return made

    def _read(
        self, kind: Any, name: str, meaning: str, *labels: str, read: Callable[[], Reading], own: bool = True
    ) -> None:
        """`own`: the name begins with ours; the others are names that Prometheus has for every process."""
        self._families.append(Read(kind, f"ringfence_{name}" if own else name, meaning, *labels, read=read))


def _resident() -> float | None:
    if sys.platform != "linux":
        return None
    return float(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
