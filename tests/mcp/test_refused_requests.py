"""Requests that never become calls: what strangers send has no effect, and every refusal is on record."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from ringfence.audit.export import verify_live
from ringfence.front.refusals import KIND
from ringfence.store import Reader
from tests import gateways
from tests.mcp import gateway
from tests.mcp.gateway import ACCEPT, JSON, Gateway, RawHttp, text_of

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")


def hostile(command: list[str]) -> JSON:
    contracts = gateway.tools("hostile", "echo", "counter", timeout_seconds=10)
    return gateway.configuration({"hostile": {"command": command, "pins": "first_use"}}, contracts)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, hostile_command: list[str]) -> Iterator[Gateway]:
    with gateway.serve(tmp_path_factory.mktemp("refused"), hostile(hostile_command)) as running:
        yield running


@pytest.fixture
def raw(served: Gateway) -> Iterator[RawHttp]:
    with RawHttp(served) as client:
        yield client.open()


def refused(served: Gateway) -> list[JSON]:
    return [record.body for record in served.records(kind=KIND)]


# ── of a known caller ─────────────────────────────────────────────────────────────────────────────


def mismatched(raw: RawHttp, **wrong: str) -> httpx2.Response:
    whole = gateway.modern(gateway.call("echo", {"text": "x"}))
    return raw.http.post(raw.url, json=whole, headers={**gateway.modern_headers(whole), **wrong})


def before_initialize(raw: RawHttp) -> httpx2.Response:
    return raw.http.post(raw.url, json=gateway.call("echo"), headers=ACCEPT)


BIG = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": "' + b"x" * 5_000_000 + b'"}'
TALKATIVE = gateway.initialize({"experimental": {f"k{number}": {} for number in range(1000)}})
WAYS: dict[str, tuple[Any, str, str | None]] = {
    "headers that contradict the body": (
        lambda raw: mismatched(raw, **{"mcp-name": "slow"}),
        "header_mismatch",
        "call",
    ),
    "a revision that nobody knows": (
        lambda raw: mismatched(raw, **{"mcp-protocol-version": "2099-01-01"}),
        "header_mismatch",
        "call",
    ),
    "a call before initialize": (before_initialize, "not_initialized", None),
    "a session that is gone": (
        lambda raw: raw.post(gateway.call("echo"), **{"mcp-session-id": "x"}),
        "unknown_session",
        None,
    ),
    "no JSON": (lambda raw: raw.post(b"hello"), "not_json", None),
    "no message": (lambda raw: raw.post(b"[]"), "invalid_request", None),
    "an id that is none": (lambda raw: raw.post(gateway.call("echo", ident=None)), "invalid_request", None),
    "a body that is too large": (lambda raw: raw.post(BIG), "too_large", None),
    "another kind of content": (lambda raw: raw.post(b"x", **{"content-type": "text/plain"}), "content_type", None),
    "answers that the client does not take": (lambda raw: raw.post(b"x", accept="text/html"), "not_acceptable", None),
    "a method of nobody's": (lambda raw: raw.post(gateway.request("tools/destroy")), "unknown_method", None),
    "a resource without a name": (
        lambda raw: raw.post(gateway.request("resources/read", {})),
        "invalid_params",
        "read",
    ),
    "a state that nobody waits in": (
        lambda raw: raw.modern(
            gateway.request("tools/call", {"name": "echo", "requestState": "rfs_x", "inputResponses": {}}),
            {"elicitation": {}},
        ),
        "invalid_params",
        "call",
    ),
    "a client that says too much of itself": (lambda raw: raw.post(TALKATIVE), "invalid_params", "initialize"),
    "one that says it with each request": (
        lambda raw: raw.modern(gateway.call("echo"), TALKATIVE["params"]["capabilities"]),
        "invalid_params",
        "call",
    ),
    "a foreign host": (lambda raw: raw.post(gateway.call("echo"), host="evil.example"), "foreign_host", None),
    "a foreign origin": (
        lambda raw: raw.post(gateway.call("echo"), origin="http://evil.example"),
        "foreign_origin",
        None,
    ),
    "another verb": (lambda raw: raw.http.put(raw.url, headers=ACCEPT), "bad_method", None),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_refused_before_it_is_a_call_is_on_record_when_it_is_answered(
    served: Gateway, raw: RawHttp, way: str
) -> None:
    send, reason, method = WAYS[way]
    before = len(refused(served))
    assert send(raw).status_code != 202
    (body,) = refused(served)[before:]
    assert (body["reason_code"], body["count"], body["peer_uid"]) == (reason, 1, os.getuid())
    assert body["principal"]["agent"] == "local" and body["origin"] == "mcp-http"
    assert body.get("method", "").rpartition("/")[2] == (method or "")


def test_what_a_client_may_say_of_itself_is_bounded_and_pictures_are_left_out(raw: RawHttp) -> None:
    error = raw.post(TALKATIVE).json()["error"]
    assert "clientInfo and capabilities" in error["message"] and "16384" in error["message"]
    hello = gateway.initialize()
    hello["params"]["clientInfo"] |= {"icons": [{"src": "data:image/png;base64," + "A" * 100_000}]}
    assert raw.post(hello).status_code == 200


def test_a_call_that_is_refused_has_its_own_record_and_no_other(served: Gateway, raw: RawHttp) -> None:
    before = len(refused(served))
    told = gateway.about(raw.result(gateway.call("ecko")))
    assert served.finished(told["call_id"])["reason_code"] == "unknown_tool"
    gateway.read_answer(raw.post(gateway.request("resources/read", {"uri": "file:///nowhere"})))
    assert text_of(raw.result(gateway.call("echo", {"text": "x"}))) == "x"
    assert len(refused(served)) == before


def test_what_a_caller_sends_does_not_get_into_the_record(served: Gateway, raw: RawHttp) -> None:
    word = "ghp_" + "Zq7" * 12
    raw.post(json.dumps({"jsonrpc": "2.0", "id": 1, "method": word}).encode())
    raw.post(f'{{"{word}": 1, "{word}": 2}}'.encode())
    mismatched(raw, **{"mcp-name": word})
    assert word not in json.dumps(refused(served))


def test_a_caller_who_floods_is_counted_and_never_forgotten(tmp_path: Path, hostile_command: list[str]) -> None:
    with gateway.serve(tmp_path, hostile(hostile_command)) as running, RawHttp(running) as raw:
        raw.open()
        for _ in range(300):
            assert raw.post(b"hello").status_code == 400
    bodies = refused(running)
    assert sum(body["count"] for body in bodies) == 300 and len(bodies) < 300
    reader = Reader.open(running.state)
    try:
        assert verify_live(*reader.evidence(), gateways.keys().public).ok
    finally:
        reader.close()


# ── of strangers ──────────────────────────────────────────────────────────────────────────────────


BECOME = f"""
import encodings.idna, os, resource, socket, sys, urllib.request
os.setgid({NOBODY}); os.setuid({NOBODY})
"""


def another_user(code: str, *arguments: str) -> str:
    """What a program of another user prints."""
    words = [sys.executable, "-I", "-c", BECOME + code, *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout


SEND_AND_LEAVE = """
for _ in range(200):
    with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=30) as one:
        one.sendall(sys.argv[2].encode())
"""
MANY = """
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
here = []
for _ in range(2100):
    here.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=60))
print(len(here), flush=True)
sys.stdin.read()
"""


@needs_root
def test_a_stranger_who_sends_a_whole_request_and_leaves_is_nobody(tmp_path: Path, hostile_command: list[str]) -> None:
    with gateway.serve(tmp_path, hostile(hostile_command)) as running, RawHttp(running) as raw:
        whole = gateway.modern(gateway.call("counter"))
        body = json.dumps(whole)
        fields = {**gateway.modern_headers(whole), "host": f"127.0.0.1:{running.port}", "content-length": len(body)}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        another_user(SEND_AND_LEAVE, str(running.port), f"POST /mcp HTTP/1.1\r\n{head}\r\n{body}")
        assert text_of(raw.modern(gateway.call("counter")).json()["result"]) == "1", "nobody has counted before us"
    told = [body for body in refused(running) if body["principal"] is None]
    assert {body["peer_uid"] for body in told} <= {None, NOBODY} and len(told) < 50
    assert sum(body["count"] for body in told) == 200


@needs_root
def test_idle_connections_of_a_stranger_take_no_place_from_the_owner(
    tmp_path: Path, hostile_command: list[str]
) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096:
        pytest.skip("a process may not have so many connections here")
    with gateway.serve(tmp_path, hostile(hostile_command)) as running:
        words = [sys.executable, "-I", "-c", BECOME + MANY, str(running.port)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stranger:
            assert stranger.stdin is not None and stranger.stdout is not None
            assert stranger.stdout.readline() == b"2100\n"
            with RawHttp(running) as raw:
                assert text_of(raw.open().result(gateway.call("echo", {"text": "mine"}))) == "mine"
            stranger.stdin.close()
    crowd = [body for body in refused(running) if body["reason_code"] == "too_many_connections"]
    assert crowd and {body["peer_uid"] for body in crowd} == {NOBODY}


@needs_root
def test_a_stranger_may_see_that_the_gateway_lives_and_nothing_else(served: Gateway) -> None:
    ask = "print(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())"
    assert json.loads(another_user(ask, served.url.replace("/mcp", "/healthz"))) == {"status": "ok"}


# ── a unix socket ─────────────────────────────────────────────────────────────────────────────────


def test_a_gateway_at_a_unix_socket(tmp_path: Path, hostile_command: list[str]) -> None:
    path = tmp_path / "run" / "gateway.sock"
    config = hostile(hostile_command)
    config["gateway"]["listen"] = "unix:run/gateway.sock"
    files = gateway.write(tmp_path, config)
    with gateways.serve_as_configured(files.config) as started:
        assert f" tools at unix:{path}: " in started.output()
        assert path.stat().st_mode & 0o777 == 0o600
        shown = gateways.run("call", "echo", "--args", '{"text": "hello"}', "--url", f"unix:{path}")
        assert (shown.returncode, shown.stdout) == (0, "hello\n"), shown.stderr
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), timeout=60) as http:
            whole = gateway.modern(gateway.call("echo", {"text": "again"}))
            headers = gateway.modern_headers(whole)
            answer = http.post("http://localhost/mcp", json=whole, headers=headers)
            assert text_of(answer.json()["result"]) == "again"
            assert http.post("http://evil.example/mcp", json=whole, headers=headers).status_code == 421
        second = gateways.run("serve", "--config", files.config)
        assert second.returncode == 1 and "something listens on unix:" in second.stderr
    assert not path.exists()
    gone = gateways.run("call", "echo", "--url", f"unix:{path}", "--json")
    assert gone.returncode == 125 and json.loads(gone.stdout)["reason_code"] == "unreachable"


@needs_root
def test_a_socket_of_somebody_else_is_not_spoken_to(tmp_path: Path) -> None:
    path = tmp_path / "theirs.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        os.chown(path, NOBODY, NOBODY)
        shown = gateways.run("call", "echo", "--args", '{"secret": "x"}', "--url", f"unix:{path}")
        assert shown.returncode == 125 and "not a socket of" in shown.stdout + shown.stderr
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
