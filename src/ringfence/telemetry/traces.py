"""Calls as OpenTelemetry spans, by the semantic conventions of MCP, sent over OTLP.

    client's span ─► tools/call NAME ─┬─► approval        while a person is asked
                                      └─► server | box    while it runs; a server gets this one as its parent

Names follow `open-telemetry/semantic-conventions-genai` (docs/gen-ai/mcp.md), which is in development: they are all
here. No value is among them. A span is queued when its call ends, and sent from a thread of the SDK: where the
collector is slow or gone, spans are dropped, and no call waits.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from requests import Session

from ringfence import __version__
from ringfence.core.model import Call, Contract, Json, Status, Transport
from ringfence.core.record import dataclass
from ringfence.telemetry.metrics import EndedCall

METHOD, TOOL, OPERATION, ERROR = "mcp.method.name", "gen_ai.tool.name", "gen_ai.operation.name", "error.type"
NETWORK = "network.transport"
_TRANSPORTS = {"mcp-http": "tcp", "mcp-stdio": "pipe"}
_W3C = TraceContextTextMapPropagator()
_QUEUED = 4096
"""Spans that wait to be sent; more are dropped."""
_BATCH = 512
_EVERY_MS = 2000.0
_SEND_SECONDS = 5.0
_CLOSE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class TraceTarget:
    """Where spans go."""

    url: str
    """With its path."""
    service: str
    sample: float
    """The share of traces that begin here; those of clients are as the client has it."""
    headers: tuple[tuple[str, str], ...] = ()


class Tracing:
    """Makes the spans of calls."""

    def __init__(self, target: TraceTarget) -> None:
        session = Session()
        session.trust_env = False  # neither a proxy nor a password of the environment is meant for this
        exporter = OTLPSpanExporter(
            target.url,
            headers=dict(target.headers),
            timeout=_SEND_SECONDS,
            compression=Compression.NoCompression,
            session=session,
        )
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(target.sample)),
            resource=Resource({"service.name": target.service, "service.version": __version__}),
            shutdown_on_exit=False,
            span_limits=SpanLimits(),
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=_QUEUED,
                schedule_delay_millis=_EVERY_MS,
                max_export_batch_size=_BATCH,
                export_timeout_millis=_SEND_SECONDS * 1000,
            )
        )
        self._tracer = self._provider.get_tracer("ringfence", __version__)

    def begin(self, call: Call, began_at: int) -> CallTrace:
        """The span of a call, as a child of its client's where that has one. Times are nanoseconds since the epoch."""
        carried = {} if call.trace is None else {"traceparent": call.trace}
        if carried and "tracestate" in call.traced:
            carried["tracestate"] = call.traced["tracestate"]
        context = _W3C.extract(carried)
        span = self._tracer.start_span(call.method, context, SpanKind.SERVER, start_time=began_at)
        return CallTrace(self, span)

    def child(self, parent: Span, name: str, kind: SpanKind, began_at: int | None = None) -> Span:
        return self._tracer.start_span(name, set_span_in_context(parent), kind, start_time=began_at)

    def close(self) -> None:
        """Send what is queued, for a few seconds at most. For a thread."""
        last = threading.Thread(target=self._provider.shutdown, name="ringfence-traces", daemon=True)
        last.start()
        last.join(_CLOSE_SECONDS)


class CallTrace:
    """The spans of one call."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span
        self._work: Span | None = None

    @property
    def trace_id(self) -> str:
        return format_trace_id(self._span.get_span_context().trace_id)

    def waited(self, began_at: int, ended_at: int) -> None:
        """A person was asked meanwhile."""
        self._tracing.child(self._span, "approval", SpanKind.INTERNAL, began_at).end(ended_at)

    def sent(self, call: Call, contract: Contract) -> Call:
        """Its server or box gets it now. Gives the call with the trace context for its server."""
        if contract.transport is Transport.SANDBOXED_EXEC:
            self._work = self._tracing.child(self._span, "box", SpanKind.INTERNAL)
            return call
        self._work = work = self._tracing.child(self._span, call.method, SpanKind.CLIENT)
        work.set_attribute(METHOD, call.method)
        if contract.server is not None:
            work.set_attribute("ringfence.server", contract.server)
        if call.kind == "tool":
            work.update_name(f"{call.method} {contract.tool}")
            work.set_attribute(TOOL, contract.tool)
        carried: dict[str, str] = {}
        _W3C.inject(carried, set_span_in_context(work))
        return replace(call, traced={**call.traced, **carried})

    def ended(self, call: Call, ended: EndedCall, facts: Json, worked_until: int | None) -> None:
        span = self._span
        error = _error(ended)
        if self._work is not None:
            if error is not None:
                self._work.set_attribute(ERROR, error)
                self._work.set_status(StatusCode.ERROR)
            elif (how := ended.box_ended) is not None:
                self._work.set_attribute("ringfence.box.ended", how)
            self._work.end(worked_until)
        if not span.is_recording():
            span.end()
            return
        about: dict[str, str | float | list[str] | None] = {
            METHOD: call.method,
            NETWORK: _TRANSPORTS.get(call.origin),
            ERROR: error,
            "ringfence.call.id": call.id,
            "ringfence.decision.id": facts.get("decision_id"),
            "ringfence.rules": list(facts.get("rules") or ()),
            "ringfence.agent": ended.agent,
            "ringfence.tenant": call.principal.tenant,
            "ringfence.status": str(ended.status),
            "ringfence.reason_code": ended.reason,
            "ringfence.effect": facts.get("effect"),
        }
        if call.kind == "tool":
            span.update_name(f"{call.method} {ended.tool}")
            about |= {TOOL: ended.tool, OPERATION: "execute_tool"}
        span.set_attributes({name: value for name, value in about.items() if value is not None})
        if error is not None:
            span.set_status(StatusCode.ERROR)
        span.end()


def _error(ended: EndedCall) -> str | None:
    """`tool_error` where the tool itself says so, as the conventions have it, else our reason."""
    return None if ended.status is Status.SUCCESS else ended.reason
