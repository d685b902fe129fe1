"""Every example does what it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringfence.doctor import CLASSES
from tests import boxing, gateways
from tests.tooling import ROOT, free_port, serve, wait_until

EXAMPLES = ROOT / "examples"
_PROBE = """
import asyncio
from unshare_engine import UnshareEngine, Unavailable
try:
    asyncio.run(UnshareEngine().open())
except Unavailable as exc:
    print(exc)
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, check=False)


def lines(example: str) -> list[str]:
    """What an example that makes boxes says."""
    boxing.need_boxes()
    done = run(str(EXAMPLES / example))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_boxes_example_tells_what_became_of_each_program() -> None:
    said = lines("boxes.py")
    told = [line.split(":")[:2] for line in said]
    assert [told[index] for index in (0, 1, 2, 4)] == [
        ["works", " success, -"],
        ["fails", " failed, KeyError"],
        ["hangs", " timeout, timeout"],
        ["phones home", " failed, URLError"],
    ]
    # Where there are no control groups the kernel refuses the memory, and nobody has to be killed.
    assert told[3] in (["eats", " killed, memory"], ["eats", " failed, MemoryError"])
    assert said[5] == "['/workspace/output/sorted']"


def test_the_batch_example_tells_right_answers_from_wrong_ones() -> None:
    assert lines("batch.py") == [
        "recursive: passed 4 of 4",
        "off by one: passed 2 of 4; AssertionError",
        "endless: passed 2 of 4; timeout",
        "misspelt: passed 0 of 4; NameError",
    ]


@pytest.mark.slow
def test_the_backend_example_keeps_what_the_page_says_of_it() -> None:
    """On this host, by the conformance suite that is in the package."""
    if "unshare makes no namespaces" in (why := _lacks_namespaces()):
        pytest.skip(why)
    first, *told = lines("unshare_engine.py")
    assert first == "1000 ['output', 'tmp']"
    counts = [line for line in told if not line.startswith("  ")]
    assert [line.split(":")[0] for line in counts] == [CLASSES["F"], CLASSES["A"]]
    assert all(int(line.split(": ")[1].split()[0]) >= 15 for line in counts), counts
    broken = {line.split(":")[0].strip() for line in told if line.startswith("  ")}
    page = (ROOT / "docs/writing-a-backend.md").read_text()
    assert broken <= set(re.findall(r"`([A-Z][0-9]{2})`", page)), told


def _lacks_namespaces() -> str:
    """Whether the host forbids them, by the example's own probe."""
    said = run("-c", f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\n{_PROBE}")
    return said.stdout


@pytest.mark.slow
def test_the_image_example_runs_in_what_it_built() -> None:
    python, top, same = lines("image.py")
    assert python.startswith("python: /usr/")
    assert {"dev", "etc", "proc", "tmp", "usr", "workspace"} <= set(top.split())
    assert same == "the image that it ran in: True"


def test_the_sessions_example_goes_step_by_step() -> None:
    assert lines("sessions.py") == [
        "step 1: 4",
        "step 2: {'2026-01': [10, 30], '2026-02': [20, 40]}",
        "step 3: {'2026-01': 20.0, '2026-02': 30.0}",
        "step 4: failed, KeyError; the variables are still there",
        "['month,average', '2026-01,20.0', '2026-02,30.0']",
    ]


def test_the_boxed_server_sees_what_it_was_given() -> None:
    assert lines("boxed_server.py") == ["today.txt: Water the plants.", "diary.txt: there is no such file"]


def test_the_forks_example_tries_them_all() -> None:
    assert lines("forks.py") == [
        "sum(numbers): 42",
        "max(numbers): 39",
        "while True: pass: timeout",
        "numbers / 2: TypeError",
    ]


def test_the_networks_example_reaches_one_host_and_no_other() -> None:
    assert lines("networks.py") == [
        "you asked for /prices",
        "reached [('caller:allow', 1)]",
        "403 host; 400 target; 403 host; 403 host",
        "effect: none",
        "you asked for /stock",
        "this step asked 0 times",
    ]


def test_the_gateway_example_reads_asks_and_refuses() -> None:
    done = run("-W", "ignore", str(EXAMPLES / "gateway.py"))
    assert done.returncode == 0, done.stderr
    assert "offered: forecast, subscribe" in done.stdout
    assert "success - Oslo: sunny" in done.stdout
    assert "approval_required - " in done.stdout
    assert "Did you mean 'forecast'?" in done.stdout


def test_the_configuration_example_is_right() -> None:
    done = run("-m", "ringfence.cli.main", "check", str(EXAMPLES / "ringfence.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_client_example_says_why() -> None:
    port = free_port()
    command = [sys.executable, "-m", "ringfence.cli.main", "serve", "--demo", "--port", str(port)]
    with serve(command, port):
        url = f"http://127.0.0.1:{port}/mcp"
        allowed = run(str(EXAMPLES / "client.py"), url, "search_docs", '{"query": "refunds"}')
        refused = run(str(EXAMPLES / "client.py"), url, "delete_all_tickets")
    assert allowed.stdout.startswith("success ok"), allowed.stderr
    assert refused.stdout.startswith("denied policy"), refused.stderr
    assert "no-bulk-delete" in refused.stdout


def test_every_example_is_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    assert all(path.name in listed for path in EXAMPLES.iterdir() if path.suffix in {".py", ".yaml"})
    assert Path(ROOT / "examples").is_dir()


def test_the_hook_tells_of_calls_that_were_refused(tmp_path: Path) -> None:
    hook = json.dumps(f"{EXAMPLES / 'hook.py'}:record")
    rules = "policy: {rules: [{id: no-weather, action: deny, tool_patterns: [echo]}]}\n"
    command = gateways.server("hostile_server.py")
    desk = f"servers: {{desk: {{command: {command}, placement: unsafe_host, pins: first_use}}}}\n"
    hooks = f"hooks: {{it: {{python: {hook}}}}}\n"
    text = f"gateway: {{state: ./state}}\n{desk}capabilities: {{echo: {{mode: read}}}}\n{rules}{hooks}"
    refused = tmp_path / "refused.jsonl"
    with gateways.serve(gateways.write(tmp_path, text)) as served:
        gateways.run("call", "echo", "--args", '{"text": "x"}', "--url", served.url)
        wait_until(refused.exists)
        wait_until(lambda: refused.read_text().endswith("\n"))
    (line,) = map(json.loads, refused.read_text().splitlines())
    assert (line["tool"], line["agent"], line["why"]) == ("echo", "local", "policy")


def test_the_replay_tells_why_programs_differ() -> None:
    assert lines("replay.py") == [
        "a sum: the same",
        "the time: stdout differs by clock",
        "a draw: stdout differs by randomness",
    ]
