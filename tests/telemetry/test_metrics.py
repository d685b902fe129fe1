"""`/metrics` of a gateway that people use: what it counts, who may read it, and that no value is in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ringfence.core.errors import Unavailable
from ringfence.core.model import ApprovalRule, Principal, ServerSpec, Status
from ringfence.telemetry.metrics import GatewayMetrics
from ringfence.telemetry.watch import CallWatcher
from tests import gateways
from tests.faking import OK, Said, broken, contract, governed
from tests.tooling import ROOT

anyio = pytest.mark.anyio
Sample = tuple[str, frozenset[tuple[str, str]]]


def parsed(text: str) -> dict[Sample, float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: dict[Sample, float], name: str, **labels: str) -> float:
    """The sum of all series that have these labels."""
    wanted = set(labels.items())
    return sum(each for (named, has), each in found.items() if named == f"ringfence_{name}" and wanted <= has)


@anyio
async def test_every_ending_of_a_call_is_counted_under_names_of_the_configuration(tmp_path: Path) -> None:
    metrics = GatewayMetrics()
    said = Said(contracts=(contract("echo"), contract("slow", rate={"concurrent": 1, "per_minute": 1})))
    async with governed(tmp_path, said, [OK]) as way:
        way.pipeline._watcher = CallWatcher(metrics)
        way.pipeline._watcher.is_tool = lambda name: name in way.pipeline.rules.catalog
        await way.call("echo", {"text": "canary-1"})
        await way.call("canary-2", {})
        await way.call("slow", {"text": "x"})
        refused = await way.call("slow", {"text": "x"})
        assert (refused.status, refused.reason_code) == (Status.DENIED, "throttled")
    text = metrics.text()
    found = parsed(text)
    assert value(found, "calls_total", tool="echo", status="success", reason="ok", agent="analyst") == 1
    assert value(found, "calls_total", tool="other", reason="unknown_tool") == 1
    assert value(found, "calls_total", tool="slow", reason="throttled") == 1
    assert value(found, "budget_refusals_total", reason="throttled") == 1
    assert value(found, "call_seconds_count", kind="tool") == value(found, "calls_total") == 4
    assert value(found, "server_seconds_count", server="desk") >= 2
    assert value(found, "calls_running") == 0
    assert "canary" not in text


@anyio
async def test_the_time_that_a_person_takes_is_apart_from_ours(tmp_path: Path) -> None:
    metrics = GatewayMetrics()
    always = ApprovalRule("always")
    said = Said(contracts=(contract("echo", approval="always"),), approvals={"always": always})
    async with governed(tmp_path, said, [OK]) as way:
        way.pipeline._watcher = CallWatcher(metrics)
        asked = await way.call("echo", {"text": "x"})
        assert asked.status is Status.APPROVAL_REQUIRED
    found = parsed(metrics.text())
    assert value(found, "approval_wait_seconds_count") == 1
    assert value(found, "calls_total", status="approval_required") == 1


@anyio
async def test_a_start_that_could_not_be_recorded_runs_no_more(tmp_path: Path) -> None:
    metrics = GatewayMetrics()
    async with governed(tmp_path) as way:
        way.pipeline._watcher = CallWatcher(metrics)
        await broken(way, "started")
        with pytest.raises(Unavailable):
            await way.pipeline.server_start(ServerSpec("desk", command=("python",)), Principal("analyst"), never)
    assert value(parsed(metrics.text()), "calls_running") == 0


async def never() -> None:
    raise AssertionError("nothing starts that is not on record")


def test_what_boxes_send_is_counted_by_what_became_of_it() -> None:
    metrics = GatewayMetrics()
    entry = {"host": "canary.example", "port": 443, "count": 3}
    metrics.sent({"allowed": [entry], "denied": [entry, entry], "failed": [], "bytes_in": 10, "bytes_out": 4})
    metrics.sent({"allowed": None, "denied": None, "bytes_in": None, "bytes_out": None})
    found = parsed(metrics.text())
    assert value(found, "egress_requests_total", verdict="allowed") == 3
    assert value(found, "egress_requests_total", verdict="denied") == 6
    assert value(found, "egress_bytes_total", direction="out") == 4
    assert "canary" not in metrics.text()


# ── over HTTP ─────────────────────────────────────────────────────────────────────────────────────


def fetch(url: str, **headers: str) -> tuple[int, str, str]:
    request = urllib.request.Request(url, headers={name.replace("_", "-"): text for name, text in headers.items()})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.headers["content-type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get("www-authenticate", ""), error.read().decode()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gateways.Served]:
    folder = tmp_path_factory.mktemp("metrics")
    command = gateways.server("hostile_server.py")
    text = (
        "gateway: {state: ./state}\n"
        f"servers: {{desk: {{command: {command}, placement: unsafe_host, pins: first_use}}}}\n"
        "capabilities: {echo: {mode: read, server: desk}}\n"
        "agents: {analyst: {capabilities: [echo]}, prometheus: {metrics: true}}\n"
    )
    with gateways.serve(gateways.write(folder, text)) as found:
        yield found


def token(served: gateways.Served, agent: str) -> str:
    made = gateways.run("token", "create", "--agent", agent, "--config", served.config)
    return made.stdout.strip()


def metrics_of(served: gateways.Served, **headers: str) -> tuple[int, str, str]:
    return fetch(served.url.removesuffix("/mcp") + "/metrics", **headers)


def test_its_own_account_and_agents_that_may_read_metrics(served: gateways.Served, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(token(served, "analyst"))
    for tool in ("echo", "canary-3"):
        words = ("call", tool, "--args", '{"text": "canary-4"}', "--url", served.url, "--token-file", file)
        called = gateways.run(*words)
        assert tool != "echo" or called.returncode == 0, called.stderr + called.stdout
    status, kind, text = metrics_of(served)
    assert status == 200 and kind.startswith("text/plain; version=0.0.4")
    found = parsed(text)
    assert value(found, "calls_total", kind="tool", tool="echo", agent="analyst", status="success") == 1
    assert value(found, "calls_total", tool="other", agent="analyst") == 1
    assert value(found, "calls_total", kind="server", agent="system") >= 1
    assert value(found, "audit_records_total") > 0 and value(found, "build_info") == 1
    assert "canary" not in text
    assert metrics_of(served, authorization=f"Bearer {token(served, 'prometheus')}")[0] == 200


def test_nobody_else_reads_them(served: gateways.Served) -> None:
    for shown in ("Bearer rft_no", "Basic x"):
        status, told, _ = metrics_of(served, authorization=shown)
        assert status == 401 and "resource_metadata" in told, "one that is wrong is refused, not ignored"
    status, _, text = metrics_of(served, authorization=f"Bearer {token(served, 'analyst')}")
    assert status == 403 and "metrics: true" in text
    assert metrics_of(served, host="evil.example")[0] == 421
    assert metrics_of(served, origin="https://evil.example")[0] == 403
    if os.getuid() != 0:
        pytest.skip("only root can ask as another user")
    port = served.url.split(":")[2].split("/")[0]
    head = f"GET /metrics HTTP/1.1\\r\\nHost: 127.0.0.1:{port}\\r\\n\\r\\n"
    ask = f"exec 3<>/dev/tcp/127.0.0.1/{port}; printf '{head}' >&3; head -n1 <&3"
    other = subprocess.run(["bash", "-c", ask], user=65534, group=65534, capture_output=True, text=True, cwd="/")
    assert "401" in other.stdout


def test_the_page_lists_every_metric(served: gateways.Served) -> None:
    page = (ROOT / "docs/telemetry.md").read_text()
    listed = set(re.findall(r"`((?:ringfence|process)_\w+)`", page))
    given = re.findall(r"# TYPE (\w+) ", metrics_of(served)[2])
    assert sorted(listed) == sorted(given)


def test_the_dashboard_asks_for_what_there_is(served: gateways.Served) -> None:
    board = json.loads((ROOT / "examples/grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    queries += [each["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    page = (ROOT / "docs/telemetry.md").read_text()
    rows = dict(re.findall(r"\| `(ringfence_\w+)` \| ([^|]*) \|", page))
    kinds = dict(re.findall(r"# TYPE (\w+) (\w+)", metrics_of(served)[2]))
    asked = set()
    for query in queries:
        (name,) = re.findall(r"\b((?:ringfence|process)_\w+?)(?:_bucket)?\b(?=[{,])", query)
        asked.add(name)
        assert ("_bucket" in query) is (kinds[name] == "histogram"), query
        assert ("rate(" in query) is (kinds[name] != "gauge"), query
        used = re.findall(r"by \((.*?)\)", query) + re.findall(r"(\w+)!?=~?\"", query)
        labels = {label.strip() for each in used for label in each.split(",")} - {"le", "instance", "job"}
        assert labels <= set(re.findall(r"`(\w+)`", rows.get(name, ""))), query
    assert asked == kinds.keys(), "nothing that is counted goes unseen"
