"""One call as those who operate the gateway see it: what its time was spent on, and how it ended.

The pipeline tells a watch of the few moments that matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ringfence.core.model import Call, Contract, Outcome
from ringfence.telemetry.metrics import EndedCall, GatewayMetrics
from ringfence.telemetry.registry import OTHER


class CallWatcher:
    """Watches every call of a gateway."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self.metrics = metrics
        self.is_tool: Callable[[str], bool] = _none
        """Whether the configuration in force has a capability of this name. No other name is told to anybody."""

    def begin(self, call: Call) -> CallWatch:
        self.metrics.running += 1
        return CallWatch(self, call)


class CallWatch:
    """From when the pipeline has a call to when it is closed."""

    def __init__(self, watcher: CallWatcher, call: Call) -> None:
        self._watcher = watcher
        self._call = call
        self._began = time.monotonic()
        self._waited = 0.0
        self._worked: float | None = None
        self._boxed = False
        self._over = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While a person is asked."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - began

    @contextmanager
    def working(self, call: Call, *, boxed: bool) -> Iterator[Call]:
        """While its server or box has it. Gives the call as it is sent."""
        self._boxed = boxed
        self._watcher.metrics.began(boxed=boxed)
        began = time.monotonic()
        try:
            yield call
        finally:
            self._worked = (self._worked or 0.0) + time.monotonic() - began

    def ended(self, contract: Contract | None, outcome: Outcome, *, removed: int) -> None:
        """The call is closed; only the first time counts."""
        if self._over:
            return
        self._over = True
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


def _none(name: str) -> bool:
    return False
