"""The official conformance suite, through the gateway, in front of servers of either revision."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests import tooling
from tests.mcp import gateway
from tests.mcp.gateway import HANDSHAKE, MODERN

pytestmark = pytest.mark.slow

REQUIRED = {HANDSHAKE: 30, MODERN: 37}
"""How many server scenarios each revision requires; the suite's own list must have as many."""

NO_KEYS = "a question of a 2025 server is a request: it has no key of the server's choice, and comes one at a time"
DIFFERENCES = {
    "input-required-result-basic-elicitation": NO_KEYS,
    "input-required-result-multiple-input-requests": NO_KEYS,
}
"""Required of 2026-07-28, and impossible where the server itself speaks only 2025-11-25."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the suite printed: every scenario with its failures, and those that do not count."""

    scenarios: dict[str, int]
    unscored: frozenset[str]
    code: int
    text: str

    @property
    def scored(self) -> set[str]:
        return set(self.scenarios) - self.unscored

    def failing(self) -> set[str]:
        return {name for name in self.scored if self.scenarios[name]}


@cache
def required(revision: str) -> set[str]:
    """The names of the server scenarios that the suite says a revision requires."""
    told = subprocess.run(
        tooling.conformance_command("list", "--requirements", revision), capture_output=True, text=True, check=True
    ).stdout
    section = re.search(r"Server scenarios[^\n]*\n((?:\s+- \S+\n)+)", told)
    assert section, told
    return set(re.findall(r"- (\S+)", section[1]))


@contextmanager
def everything(folder: Path, era: str, transport: str) -> Iterator[gateway.Gateway]:
    """The gateway in front of the everything server."""
    text = (tooling.FIXTURES / "everything.yaml").read_text()
    if transport == "stdio":
        words = json.dumps(tooling.fixture_command("everything_server.py", "--stdio", "--era", era))
        config = re.sub(r"url: .*", lambda found: f"command: {words}", text)
        with gateway.serve(folder, config) as served:
            yield served
        return
    with tooling.serve_fixture("everything_server.py", "--era", era) as url:
        port = url.removesuffix("/mcp").rpartition(":")[2]
        with gateway.serve(folder, text.replace("@PORT@", port)) as served:
            yield served


def run_suite(served: gateway.Gateway, revision: str, folder: Path) -> Report:
    options = ("--requirements", revision, "--output-dir", str(folder / "out"))
    command = tooling.conformance_command("server", "--url", served.url, *options)
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=180)
    summary = ended.stdout.partition("=== SUMMARY ===")[2]
    scenarios = {
        name: int(failed) for name, failed in re.findall(r"^[✓✗] (\S+): \d+ passed, (\d+) failed", summary, re.M)
    }
    unscored = frozenset(re.findall(r"^  [✓✗] (\S+) \(", summary, re.M))
    return Report(scenarios, unscored, ended.returncode, summary + ended.stderr)


def warm_up(served: gateway.Gateway) -> None:
    """Have the server started for a client that can be asked: the suite gives one such call 600 ms in all."""
    with gateway.RawHttp(served) as raw:
        answer = raw.modern(gateway.call("test_simple_text"), {"elicitation": {}})
    assert answer.status_code == 200, answer.text


def explained(folder: Path, scenarios: set[str]) -> str:
    """What went wrong in these, as the suite wrote it down."""
    lines = []
    for name in sorted(scenarios):
        for file in (folder / "out").glob(f"server-{name}-20*/checks.json"):
            for check in json.loads(file.read_text()):
                if check["status"] == "FAILURE":
                    lines.append(f"{name}: {check['description']}: {check.get('errorMessage')}")
    return "\n".join(lines)


CASES = [
    ("both", "http", HANDSHAKE),
    ("both", "http", MODERN),
    ("handshake", "http", MODERN),
    ("modern", "http", HANDSHAKE),
    ("handshake", "stdio", MODERN),
    ("modern", "stdio", HANDSHAKE),
]


@pytest.mark.parametrize(("era", "transport", "revision"), CASES)
def test_every_required_scenario_passes(era: str, transport: str, revision: str, tmp_path: Path) -> None:
    tooling.need("conformance")
    wanted = required(revision)
    with everything(tmp_path, era, transport) as served:
        warm_up(served)
        report = run_suite(served, revision, tmp_path)
        expected = set(DIFFERENCES) if (era, revision) == ("handshake", MODERN) else set()
        why = explained(tmp_path, report.failing() - expected)
        assert report.failing() == expected, f"{why}\n{report.text}\n{served.log()}"
        assert served.healthy()
    assert report.scored == wanted, "every required scenario ran"
    assert len(wanted) == REQUIRED[revision]
    assert report.code == (1 if expected else 0), report.text
