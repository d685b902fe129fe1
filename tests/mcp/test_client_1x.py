"""A client on the 1.x SDK works with the gateway over HTTP and stdio."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tooling
from tests.gateways import own_tools
from tests.mcp import gateway
from tests.mcp.gateway import JSON, Gateway, about, text_of

pytestmark = pytest.mark.slow

NAMES = (
    "test_simple_text",
    "test_tool_with_progress",
    "test_elicitation",
    "test_error_handling",
    "test_tool_with_logging",
)
SCRIPT = Path(__file__).with_name("client_1x.py")


@pytest.fixture(scope="module", params=["http", "stdio"])
def seen(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, everything_url: str
) -> Iterator[JSON]:
    """What the client saw, and the gateway that it used."""
    config = gateway.configuration(
        {
            "fixture": {"url": everything_url, "pins": "first_use"},
            "demo": {"command": tooling.npm_command("mcp-server-everything", "stdio"), "pins": "first_use"},
        },
        {**gateway.tools("fixture", *NAMES), **gateway.tools("demo", "get-structured-content")},
    )
    folder = tmp_path_factory.mktemp("client1x")
    if request.param == "http":
        with gateway.serve(folder, config) as served:
            yield run(served, "http", served.url)
    else:
        files = gateway.write(folder, config)
        yield run(files, "stdio", *gateway.command("serve", "--stdio", "--config", files.config))


def run(served: Gateway, *words: str) -> JSON:
    ended = subprocess.run([tooling.client1x(), SCRIPT, *words], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return {**json.loads(ended.stdout), "gateway": served, "way": words[0]}


def test_it_is_the_old_line_on_the_old_revision(seen: JSON) -> None:
    assert seen["sdk"].startswith("1.") and seen["revision"] == gateway.HANDSHAKE


def test_lists_and_calls(seen: JSON) -> None:
    assert seen["tools"] == [*NAMES, "get-structured-content", *own_tools()]
    assert text_of(seen["call"]) == "This is a simple text response for testing."
    told = about(seen["call"])
    assert seen["gateway"].finished(told["call_id"])["call"]["origin"] == f"mcp-{seen['way']}"


def test_progress_arrives(seen: JSON) -> None:
    assert about(seen["progress_call"])["status"] == "success"
    assert seen["progress"] and set(seen["progress"]) <= {0, 50, 100}


def test_log_lines_arrive(seen: JSON) -> None:
    assert "Tool execution started" in seen["logged"]


def test_elicitation_reaches_the_callback_with_the_server_named(seen: JSON) -> None:
    assert seen["asked"] == ["[fixture] Who are you?"]
    assert "action=accept" in text_of(seen["elicitation"]) and "ann@example.org" in text_of(seen["elicitation"])


def test_structured_content_arrives(seen: JSON) -> None:
    assert set(seen["structured"]["structuredContent"]) == {"temperature", "conditions", "humidity"}


def test_errors_of_the_tool_and_refusals_are_results(seen: JSON) -> None:
    assert seen["error"]["isError"] is True and about(seen["error"])["status"] == "failed"
    assert seen["unknown"]["isError"] is True and about(seen["unknown"])["reason_code"] == "unknown_tool"
    assert "test_simple_text" in text_of(seen["unknown"])
    assert seen["gateway"].finished(about(seen["unknown"])["call_id"])["status"] == "validation_failure"
