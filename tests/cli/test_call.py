"""`ringfence call`: what is printed where, and an exit code that tells how the call ended."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ringfence.cli.call import _wanted
from ringfence.cli.common import EXIT_CODES
from ringfence.core.model import Status
from tests import gateways, tooling

CONFIG = """version: 1
gateway: {{state: ./state, approval_wait_seconds: 0.2}}
servers: {{hostile: {{command: {command}, pins: first_use}}}}
capabilities:
  echo: {{mode: read}}
  error: {{mode: read}}
  exotic: {{mode: read}}
  counter: {{mode: write, idempotent: true}}
  slow: {{mode: read, timeout_seconds: 20}}
  hang: {{mode: read, timeout_seconds: 0.5}}
  die_before: {{mode: write}}
  append: {{mode: write, approval: always}}
  forbidden: {{mode: read, tool: echo}}
policy: {{preset: standard, rules: [{{id: never, action: deny, tool_patterns: [forbidden]}}]}}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("call")
    return gateways.write(folder, CONFIG.format(command=gateways.server("hostile_server.py")))


@pytest.fixture(scope="module")
def served(path: Path) -> Iterator[gateways.Served]:
    with gateways.serve(path) as served:
        yield served


def called(*words: str | Path) -> tuple[int, Any]:
    """The exit code of a call and what `--json` says of it."""
    ended = gateways.run("call", *words, "--json")
    assert "Traceback" not in ended.stderr
    return ended.returncode, json.loads(ended.stdout)


def test_every_status_has_an_exit_code() -> None:
    assert set(EXIT_CODES) == set(Status)
    assert [EXIT_CODES[s] for s in (Status.SUCCESS, Status.FAILED, Status.KILLED)] == [0, 1, 137]


@pytest.mark.parametrize(
    ("tool", "arguments", "code", "status", "reason"),
    [
        ("echo", {"text": "hi"}, 0, "success", "ok"),
        ("error", {}, 1, "failed", "tool_error"),
        ("ecko", {"text": "hi"}, 2, "validation_failure", "unknown_tool"),
        ("echo", {"text": 5}, 2, "validation_failure", "bad_arguments"),
        ("hang", {}, 124, "timeout", "timeout"),
        ("die_before", {}, 125, "unknown", "server_died"),
        ("forbidden", {}, 126, "denied", "policy"),
        ("append", {"path": "/x", "text": "y"}, 126, "approval_required", "approval_required"),
    ],
)
def test_the_exit_code_tells_how_it_ended(
    served: gateways.Served, tool: str, arguments: object, code: int, status: str, reason: str
) -> None:
    exit_code, told = called(tool, "--args", json.dumps(arguments), "--url", served.url)
    assert (exit_code, told["status"], told["reason_code"]) == (code, status, reason)
    assert list(told)[:5] == ["status", "reason_code", "content", "structured", "facts"]
    assert told["facts"]["call_id"] == told["call_id"] and told["receipt"]["seq"] > 0
    assert ("approval_id" in told) == (status == "approval_required")
    assert gateways.finished(served.state)[-1]["call"]["id"] == told["call_id"]


def test_content_passes_unchanged(served: gateways.Served) -> None:
    _, told = called("exotic", "--url", served.url)
    assert told["content"][0] == {
        "type": "hologram",
        "data": {"deep": [None, 2**70, -0.5, "\u2028"]},
        "annotations": None,
    }
    assert told["structured"] == {}


def test_text_goes_out_and_the_rest_beside_it(served: gateways.Served) -> None:
    shown = gateways.run("call", "echo", "--args", '{"text": "one\\ntwo"}', "--url", served.url)
    assert shown.stdout == "one\ntwo\n"
    call_id = gateways.finished(served.state)[-1]["call"]["id"]
    assert shown.stderr.startswith(f"success (ok), call {call_id}: the tool answered after ")
    assert shown.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"text": "a", "text": "b"}', "url"),
        ('{"text": NaN}', "url"),
        ("[1]", "url"),
        ('{"text": "\udcff"}', "url"),
        ('{"text": "a", "text": "b"}', "config"),
    ],
)
def test_what_two_readers_could_read_differently_is_refused_on_record(
    served: gateways.Served, path: Path, text: str, where: str
) -> None:
    place = ("--url", served.url) if where == "url" else ("--config", path)
    code, told = called("echo", "--args", text, *place)
    assert (code, told["status"], told["reason_code"]) == (2, "validation_failure", "bad_request")
    assert gateways.finished(served.state)[-1]["call"]["id"] == told["call_id"]


@pytest.mark.parametrize("text", ["{text: 1}", "", '{"text": "a"} {}'])
def test_what_is_no_json_is_a_usage_error(served: gateways.Served, text: str) -> None:
    before = len(gateways.records(served.state))
    shown = gateways.run("call", "echo", "--args", text, "--url", served.url)
    assert shown.returncode == 2
    assert shown.stderr.startswith("--args: ") and shown.stderr.count("\n") == 1
    assert len(gateways.records(served.state)) == before


def test_one_place_to_call_is_named(path: Path) -> None:
    shown = gateways.run("call", "echo", "--url", "http://127.0.0.1:1/mcp", "--config", path)
    assert shown.returncode == 2 and "--url" in shown.stderr


def test_in_this_process(path: Path) -> None:
    code, told = called("echo", "--args", '{"text": "hi"}', "--config", path)
    assert (code, told["content"]) == (0, [{"type": "text", "text": "hi"}])
    last = gateways.finished(path.parent / "state")[-1]
    assert last["call"]["id"] == told["call_id"] and last["call"]["origin"] == "cli"
    # And where the file lies here, it need not be named.
    assert gateways.run("call", "forbidden", cwd=path.parent).returncode == 126


def test_the_same_key_gives_the_same_outcome(served: gateways.Served) -> None:
    first, second, other = (
        called("counter", "--url", served.url, "--idempotency-key", key)[1] for key in ("k1", "k1", "k2")
    )
    assert first["content"] == second["content"] != other["content"]
    assert "earlier" in second["facts"]["explanation"]


@pytest.mark.parametrize("where", ["url", "config"])
def test_the_callers_own_timeout(served: gateways.Served, path: Path, where: str) -> None:
    place = ("--url", served.url) if where == "url" else ("--config", path)
    before = len(gateways.records(served.state, kind="started"))
    for seconds in ("0.3", "3", "15"):
        code, told = called("slow", "--args", '{"seconds": 19}', "--timeout", seconds, *place)
        assert (code, told["status"]) == (124, "timeout")
        if len(gateways.records(served.state, kind="started")) > before:  # otherwise it did not come there in time
            break
    call = gateways.records(served.state, kind="started")[-1]["call"]["id"]
    # Cancelled there, which takes a moment; its own clock here.
    wanted = "killed" if where == "url" else "timeout"
    ended = partial(gateways.records, served.state, call_id=call, kind="finished")
    tooling.wait_until(ended)
    assert [record["status"] for record in ended()] == [wanted]


def test_waiting_for_a_person_counts_for_the_caller(tmp_path: Path) -> None:
    text = CONFIG.format(command=gateways.server("hostile_server.py")).replace("0.2}", "60}")
    path = gateways.write(tmp_path, text)
    for seconds in ("0.1", "5", "50"):
        words = ("call", "append", "--args", '{"path": "/x", "text": "y"}', "--config", path, "--timeout", seconds)
        shown = gateways.run(*words)
        assert shown.returncode == 124
        if "approve apr_" in shown.stderr:  # otherwise nobody was asked in time
            break
    assert "approve apr_" in shown.stderr and f"--config {path}" in shown.stderr
    assert gateways.finished(tmp_path / "state")[-1]["reason_code"] == "cancelled"


# ── What is no gateway ────────────────────────────────────────────────────────────────────────────


def test_nobody_there() -> None:
    port = tooling.free_port()
    code, told = called("echo", "--url", f"http://127.0.0.1:{port}/mcp")
    assert (code, told["status"], told["reason_code"]) == (125, "unavailable", "unreachable")
    code, told = called("echo", "--url", "not a url")
    assert (code, told["status"]) == (125, "unavailable")


class Odd(BaseHTTPRequestHandler):
    """Answers every POST with what the test wants."""

    replies: ClassVar[list[tuple[int, str, bytes]]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        status, kind, body = self.replies.pop(0) if self.replies else (202, "application/json", b"")
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_DELETE = do_POST

    def log_message(self, *args: object) -> None:
        return None


@pytest.fixture
def odd() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Odd) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/mcp"
        server.shutdown()
        thread.join()


HELLO = (200, "application/json", b'{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-11-25"}}')
TAKEN = (202, "application/json", b"")


def error(code: int) -> tuple[int, str, bytes]:
    return 200, "application/json", json.dumps({"id": 2, "error": {"code": code, "message": "m"}}).encode()


@pytest.mark.parametrize(
    ("replies", "code", "status", "reason"),
    [
        ([(403, "text/plain", b"no")], 125, "unavailable", "http"),
        ([(200, "text/html", b"<h1>hello</h1>")], 125, "unavailable", "no_gateway"),
        ([HELLO, TAKEN, (200, "application/json", b'{"id":2,"result":{"content":[]}}')], 0, "success", "ok"),
        ([HELLO, TAKEN, error(-32602)], 2, "validation_failure", "rpc_error"),
        ([HELLO, TAKEN, error(-32042)], 1, "failed", "rpc_error"),
        ([HELLO, TAKEN, (200, "text/event-stream", b"data: {}\n\n")], 125, "unknown", "answer_lost"),
        ([HELLO, TAKEN, (200, "application/json", b'{"id":2,')], 125, "unknown", "answer_unusable"),
        ([HELLO, TAKEN, (413, "text/plain", b"")], 2, "validation_failure", "too_large"),
    ],
)  # fmt: skip
def test_odd_answers(odd: str, replies: list[Any], code: int, status: str, reason: str) -> None:
    Odd.replies = list(replies)
    exit_code, told = called("echo", "--url", odd)
    assert (exit_code, told["status"], told["reason_code"]) == (code, status, reason)


def test_an_interrupted_caller_leaves_a_cancelled_call(served: gateways.Served) -> None:
    command = gateways.ringfence("call", "slow", "--args", '{"seconds": 19}', "--url", served.url)
    before = len(gateways.records(served.state, kind="started"))
    with tooling.start_process(command) as started:
        while len(gateways.records(served.state, kind="started")) == before:
            assert started.process.poll() is None, started.output()
            time.sleep(0.02)
        started.process.send_signal(2)
        assert started.process.wait(60) == 130
    call = gateways.records(served.state, kind="started")[-1]["call"]["id"]
    ended = partial(gateways.records, served.state, call_id=call, kind="finished")
    tooling.wait_until(ended)
    assert [record["reason_code"] for record in ended()] == ["cancelled"]


def test_a_server_that_dies_says_why_at_once(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text("import sys\nsys.exit('no settings in \\x1b[2Jhere')\n")
    text = f"servers: {{bad: {{command: [{sys.executable}, server.py]}}}}\ncapabilities: {{look: {{mode: read}}}}\n"
    (tmp_path / "ringfence.yaml").write_text(f"version: 1\ngateway: {{state: ./state}}\n{text}")
    done = gateways.run("call", "look", cwd=tmp_path)
    assert done.returncode == 125
    assert "    | no settings in \\u{1b}[2Jhere" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("query=x", '{"query": "x"}'),
        ("query=x limit=3", '{"query": "x", "limit": "3"}'),
        ("query", '{"query": "refunds"}'),
        ("x=" + "y" * 500, '{"query": "refunds"}'),
    ],
)
def test_arguments_that_are_no_json_are_told_with_an_example(
    given: str, right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _wanted("search_docs", given, None, None)
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told.endswith(f"; write a JSON object: --args '{right}'\n")
