"""Charts: calls, refusals, latency and what programs used, over a span of time."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from starlette.responses import Response

from ringfence.console.charts import Line, bar_chart, line_chart
from ringfence.console.gateway import ConsoleGateway
from ringfence.console.page import ms, tenant_seen
from ringfence.core.aio import in_thread
from ringfence.core.model import Json, Person
from ringfence.core.sizes import short_size

if TYPE_CHECKING:
    from ringfence.console.app import Visit

_SPANS = {"hour": (60, 60), "day": (1800, 48), "week": (7200, 84), "month": (43_200, 60)}
"""The width of a bar in seconds, and how many there are."""
_READING_SECONDS = 1.0
_MAX_TOOLS = 25


async def charts(visit: Visit) -> Response:
    span = visit.given.get("span", "day")
    span = span if span in _SPANS else "day"
    values = await in_thread(partial(_drawn, visit.gateway, visit.person, span))
    return visit.page("charts.html", {"here": "charts", "span": span, "spans": list(_SPANS), **values})


def _drawn(gateway: ConsoleGateway, person: Person, span: str) -> Json:
    width, count = _SPANS[span]
    tenant = tenant_seen(person)
    whole = gateway.history.catch_up(_READING_SECONDS)
    # Bars begin at round times, and the last one is not over yet.
    first = int(time.time() // width) + 1 - count
    buckets = gateway.history.buckets(tenant, first, width, count)
    tools = gateway.history.tools(tenant, first, width, _MAX_TOOLS)
    times = [each.begins for each in buckets]
    ends = [each + width / 2 for each in times]
    by = [
        Line("other", [float(each.calls - each.refused - each.failed) for each in buckets]),
        Line("refused", [float(each.refused) for each in buckets]),
        Line("failed", [float(each.failed) for each in buckets]),
    ]
    took = [Line("mean", [each.wall_ms for each in buckets]), Line("slowest", [each.slowest_ms for each in buckets])]
    cpu = [Line("seconds", [each.cpu_ms / 1000.0 for each in buckets])]
    memory = [Line("peak", [float(each.memory) or None for each in buckets])]
    return {
        "reading": not whole,
        "calls": sum(each.calls for each in buckets),
        "refused": sum(each.refused for each in buckets),
        "failed": sum(each.failed for each in buckets),
        "tools": tools,
        "charts": [
            bar_chart("Calls", times, by, lambda value: f"{value:,.0f}", width),
            line_chart("Time that calls took", ends, took, ms),
            bar_chart("Processor time of boxes", times, cpu, lambda value: f"{value:,.1f} s", width),
            line_chart("Peak memory of boxes", ends, memory, lambda value: short_size(int(value))),
        ],
    }
