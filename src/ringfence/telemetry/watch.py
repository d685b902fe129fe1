"""One call as those who operate the gateway see it: what its time was spent on, and how it ended.

The pipeline tells a watch of the few moments that matter. Metrics, traces and the log of calls are made of these.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING

from ringfence.core.model import Call, Contract, GuardedText, Json, Outcome
from ringfence.telemetry.metrics import EndedCall, GatewayMetrics
from ringfence.telemetry.registry import OTHER

if TYPE_CHECKING:
    from ringfence.telemetry.traces import CallTrace, Tracing

log = logging.getLogger("ringfence.calls")
"""One line for each call that ended, where they are wanted."""
current: ContextVar[CallWatch | None] = ContextVar("ringfence_call", default=None)
"""The call that is under way here, for the log."""


def under_way() -> CallWatch | None:
    """The call that is under way here. What a call began, such as a connection to a server, may outlive it, and keeps
    its context; what is logged there then is about no call."""
    watch = current.get()
    while watch is not None and watch.is_over:
        watch = watch.outer
    return watch


class CallWatcher:
    """Watches every call of a gateway."""

    def __init__(self, metrics: GatewayMetrics, tracing: Tracing | None = None) -> None:
        self.metrics = metrics
        self.tracing = tracing
        self.is_tool: Callable[[str], bool] = _none
        """Whether the configuration in force has a capability of this name. No other name is told to anybody."""

    def begin(self, call: Call, clean: Callable[[str], GuardedText]) -> CallWatch:
        """`clean` removes secrets from a text."""
        self.metrics.running += 1
        return CallWatch(self, call, clean)


class CallWatch:
    """From when the pipeline has a call to when it is closed."""

    def __init__(self, watcher: CallWatcher, call: Call, clean: Callable[[str], GuardedText]) -> None:
        self._watcher = watcher
        self._call = call
        self._clean = clean
        self._began = time.monotonic()
        self._began_at = time.time_ns()
        self._waited = 0.0
        self._worked: float | None = None
        self._worked_until: int | None = None
        self._boxed = False
        self.is_over = False
        self._trace: CallTrace | None = None
        self.outer = current.get()
        """The call in which this one was made: that for which a server starts, say."""
        current.set(self)

    @property
    def call_id(self) -> str:
        return self._call.id

    @property
    def trace_id(self) -> str | None:
        return None if (trace := self._traced()) is None else trace.trace_id

    def _traced(self) -> CallTrace | None:
        if self._trace is None and self._watcher.tracing is not None:
            call = self._call
            if call.trace is not None and self._clean(call.trace) != call.trace:  # it may look like one of our secrets
                call = replace(call, trace=None)
            self._trace = self._watcher.tracing.begin(call, self._began_at)
        return self._trace

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While a person is asked."""
        began, at = time.monotonic(), time.time_ns()
        try:
            yield
        finally:
            self._waited += time.monotonic() - began
            if (trace := self._traced()) is not None:
                trace.waited(at, time.time_ns())

    @contextmanager
    def working(self, call: Call, contract: Contract, *, boxed: bool) -> Iterator[Call]:
        """While its server or box has it. Gives the call as it is sent: in our trace, where there is one."""
        self._boxed = boxed
        self._watcher.metrics.began(boxed=boxed)
        trace = self._traced()
        began = time.monotonic()
        try:
            yield call if trace is None else trace.sent(call, contract)
        finally:
            self._worked = (self._worked or 0.0) + time.monotonic() - began
            self._worked_until = time.time_ns()

    def ended(self, contract: Contract | None, outcome: Outcome, *, removed: int) -> None:
        """The call is closed; only the first time counts."""
        if self.is_over:
            return
        self.is_over = True
        if current.get() is self:
            current.set(self.outer)
        self._watcher.metrics.running -= 1
        call, facts = self._call, outcome.facts
        tool = ""
        if call.kind == "tool":
            known = contract is not None or self._watcher.is_tool(call.tool)
            tool = call.tool if known else OTHER
        ended = EndedCall(
            kind=call.kind,
            tool=tool,
            server=None if contract is None else contract.server,
            agent=call.principal.agent,
            status=outcome.status,
            reason=outcome.reason_code,
            seconds=time.monotonic() - self._began,
            waited=self._waited,
            worked=self._worked,
            box_ended=facts.get("ended") if self._boxed else None,
        )
        late = facts.get("late")
        self._watcher.metrics.ended(
            ended,
            boxed=self._boxed,
            network=facts.get("network"),
            late=late.get("network") if late else None,
            removed=removed,
        )
        if (trace := self._traced()) is not None:
            trace.ended(call, ended, facts, self._worked_until)
        if log.isEnabledFor(logging.INFO):
            text = "a call ended: %s (%s)"
            log.info(text, ended.status, ended.reason, extra={"watch": self, "told": self._told(ended, facts)})

    def _told(self, ended: EndedCall, facts: Json) -> Json:
        return {
            "kind": ended.kind,
            "tool": ended.tool,
            "server": ended.server,
            "agent": ended.agent,
            "tenant": self._call.principal.tenant,
            "status": str(ended.status),
            "reason_code": ended.reason,
            "effect": facts.get("effect"),
            "decision_id": facts.get("decision_id"),
            "wall_ms": round(ended.seconds * 1000, 3),
            "waited_ms": round(ended.waited * 1000, 3),
        }


def _none(name: str) -> bool:
    return False
