"""Spans of calls, as a real collector gets them: one trace from the client to the server, and no value in it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from ringfence import config
from ringfence.compose import telemetry
from ringfence.compose.telemetry import tracing_of
from ringfence.config.settings import TelemetrySettings
from ringfence.core.errors import ConfigError, Unavailable
from ringfence.core.model import ApprovalRule, Status
from ringfence.telemetry.metrics import GatewayMetrics
from ringfence.telemetry.watch import CallWatcher
from tests import boxing, gateways, tooling
from tests.faking import OK, Said, contract, governed

pytestmark = pytest.mark.anyio
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
FAILED = {"content": [{"type": "text", "text": "canary-no"}], "isError": True}


class Collector:
    """An OTLP receiver: what it was sent, decoded by the official package."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []

    @property
    def spans(self) -> list[Any]:
        found = []
        for _, body in self.requests:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                found += [span for scope in resource.scope_spans for span in scope.spans]
        return found

    def named(self, name: str) -> Any:
        (found,) = [span for span in self.spans if span.name == name]
        return found


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            found.requests.append(({k.lower(): v for k, v in self.headers.items()}, body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield found, f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        finally:
            server.shutdown()
            thread.join()


def attributes(span: Any) -> dict[str, Any]:
    return {
        each.key: each.value.string_value or [v.string_value for v in each.value.array_value.values]
        for each in span.attributes
    }


async def test_client_gateway_approval_and_server_are_in_one_trace(tmp_path: Path) -> None:
    always = ApprovalRule("always")
    said = Said(contracts=(contract("echo"), contract("asks", approval="always")), approvals={"always": always})
    with collecting() as (collector, url):
        tracing = tracing_of(TelemetrySettings(url, service="edge"))
        async with governed(tmp_path, said, [OK, FAILED]) as way:
            way.pipeline._watcher = CallWatcher(GatewayMetrics(), tracing)
            way.pipeline._watcher.is_tool = lambda name: name in way.pipeline.rules.catalog
            meta = {"traceparent": PARENT, "tracestate": "v=1"}
            await way.call("echo", {"text": "canary-1"}, meta=meta, trace=PARENT)
            sent = way.servers.requests[-1].params["_meta"]
            await way.call("echo", {"text": "canary-2"})
            asked = await way.call("asks", {"text": "canary-3"})
            await way.call("canary-4", {})
            assert asked.status is Status.APPROVAL_REQUIRED
        assert tracing is not None
        tracing.close()
        spans = collector.spans
    joined = [span for span in spans if span.trace_id.hex() == PARENT.split("-")[1]]
    server, client = sorted(joined, key=lambda span: span.kind)
    assert (server.name, client.name) == ("tools/call echo", "tools/call echo")
    assert server.parent_span_id.hex() == PARENT.split("-")[2] and client.parent_span_id == server.span_id
    assert sent == {"traceparent": f"00-{PARENT.split('-')[1]}-{client.span_id.hex()}-01", "tracestate": "v=1"}
    assert server.start_time_unix_nano <= client.start_time_unix_nano <= client.end_time_unix_nano
    about = attributes(server)
    assert (about["mcp.method.name"], about["gen_ai.tool.name"]) == ("tools/call", "echo")
    assert (about["gen_ai.operation.name"], about["ringfence.agent"]) == ("execute_tool", "analyst")
    assert "error.type" not in about and server.status.code == 0
    failed = [span for span in spans if attributes(span).get("error.type") == "tool_error"]
    assert len(failed) == 2 and all(span.status.code == 2 for span in failed)
    assert collector.named("approval").parent_span_id == collector.named("tools/call asks").span_id
    assert attributes(collector.named("tools/call other"))["error.type"] == "unknown_tool"
    assert not any(b"canary" in body for _, body in collector.requests)
    assert any(b"edge" in body for _, body in collector.requests)


async def test_a_collector_that_is_gone_loses_no_call(tmp_path: Path) -> None:
    tracing = tracing_of(TelemetrySettings(f"http://127.0.0.1:{tooling.free_port()}/v1/traces"))
    async with governed(tmp_path, Said(), [OK]) as way:
        way.pipeline._watcher = CallWatcher(GatewayMetrics(), tracing)
        assert (await way.call("echo", {"text": "x"})).status is Status.SUCCESS
        assert [record["status"] for record in way.finished()] == ["success"]
    assert tracing is not None
    tracing.close()


async def test_without_a_collector_a_server_gets_the_trace_of_its_client(tmp_path: Path) -> None:
    async with governed(tmp_path, Said(), [OK]) as way:
        way.pipeline._watcher = CallWatcher(GatewayMetrics(), tracing_of(TelemetrySettings()))
        await way.call("echo", {"text": "x"}, meta={"traceparent": PARENT}, trace=PARENT)
        assert way.servers.requests[-1].params["_meta"] == {"traceparent": PARENT}


def test_what_is_not_installed_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_NEEDED", ("opentelemetry.nothing_of_the_kind",))
    assert tracing_of(TelemetrySettings()) is None
    with pytest.raises(Unavailable, match="pip install opentelemetry-sdk"):
        tracing_of(TelemetrySettings("http://127.0.0.1:4318/v1/traces"))


def loaded(text: str) -> TelemetrySettings:
    return config.loads(text, file="ringfence.yaml", base=Path("/")).telemetry


def test_where_spans_go_is_in_the_file_or_left_to_the_usual_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318/")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    assert loaded("{}") == TelemetrySettings(None, 1.0, "mine"), "a variable alone sends nothing anywhere"
    assert loaded("telemetry: {otlp: env, sample: 0.5}") == TelemetrySettings(
        "http://collector:4318/v1/traces", 0.5, "mine"
    )
    given = loaded("telemetry: {otlp: 'https://a.example', service: edge}")
    assert given == TelemetrySettings("https://a.example/v1/traces", 1.0, "edge")
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT"):
        loaded("telemetry: {otlp: env}")
    with pytest.raises(ConfigError, match="password"):
        loaded("telemetry: {otlp: 'https://u:p@a.example'}")


def test_spans_that_leave_this_machine_in_clear_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(text: str) -> list[str]:
        loaded = config.loads(f"telemetry: {{otlp: '{text}'}}", file="ringfence.yaml", base=Path("/"))
        return [each.text for each in loaded.warnings]

    assert (
        warned("https://collector.example") == warned("http://127.0.0.1:4318") == warned("http://localhost:4318") == []
    )
    (spans,) = warned("http://collector.example:4318")
    assert "in clear" in spans and "https://" in spans and "headers" not in spans
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=x")
    (headers,) = warned("http://collector.example:4318")
    assert "headers" in headers
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318/")
    assert len(warned("env")) == 1


def test_a_served_gateway_sends_spans_and_writes_json(tmp_path: Path) -> None:
    with collecting() as (collector, url):
        command = gateways.server("hostile_server.py")
        text = (
            "gateway: {state: ./state, log: json}\n"
            f"telemetry: {{otlp: '{url}'}}\n"
            f"servers: {{desk: {{command: {command}, placement: unsafe_host, pins: first_use}}}}\n"
            "capabilities: {echo: {mode: read, server: desk}}\n"
        )
        with gateways.serve(gateways.write(tmp_path, text)) as served:
            for tool in ("echo", "canary-5"):
                gateways.run("call", tool, "--args", '{"text": "canary-6"}', "--url", served.url)
            written = served.started.wait_for('"unknown_tool"')
            tooling.wait_until(lambda: {"tools/call echo", "tools/call other"} <= {s.name for s in collector.spans})
            trace_ids = {span.trace_id.hex() for span in collector.spans}
        lines = [json.loads(line) for line in written.splitlines() if line.startswith('{"at"')]
        calls = [line for line in lines if line["logger"] == "ringfence.calls"]
        assert {(line["tool"], line["status"]) for line in calls} >= {
            ("echo", "success"),
            ("other", "validation_failure"),
        }
        told = {line["trace_id"] for line in calls if line["kind"] == "tool"}
        assert told <= trace_ids and all(line["call_id"].startswith("call_") for line in calls)
        assert "canary" not in "".join(json.dumps(line) for line in lines)
        assert not any(b"canary" in body for _, body in collector.requests)


def test_a_box_is_in_the_trace_of_its_call(tmp_path: Path) -> None:
    boxing.need_boxes()
    with collecting() as (collector, url):
        text = f"gateway: {{state: ./state}}\ntelemetry: {{otlp: '{url}'}}\npolicy: {{preset: permissive}}\n"
        with gateways.serve(gateways.write(tmp_path, text)) as served:
            arguments = '{"code": "print(\'canary-7\')"}'
            assert gateways.run("call", "execute_python", "--args", arguments, "--url", served.url).returncode == 0
            tooling.wait_until(lambda: {"tools/call execute_python", "box"} <= {s.name for s in collector.spans})
    call, box = collector.named("tools/call execute_python"), collector.named("box")
    assert (box.trace_id, box.parent_span_id) == (call.trace_id, call.span_id)
    assert attributes(box)["ringfence.box.ended"] == "exited"
    assert call.start_time_unix_nano <= box.start_time_unix_nano <= box.end_time_unix_nano <= call.end_time_unix_nano
    assert not any(b"canary" in body for _, body in collector.requests)
