"""Bad input over HTTP: the gateway stays up, and every bad call gets a readable result and a record."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests import tooling
from tests.mcp import gateway
from tests.mcp.bad_calls import ARGUMENTS, NAMES, with_arguments, with_name
from tests.mcp.gateway import ACCEPT, JSON, MODERN, Gateway, RawHttp, about, text_of

INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, PARSE_ERROR, MISMATCH = -32600, -32601, -32602, -32700, -32020


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, hostile_command: list[str]) -> Iterator[Gateway]:
    contracts = gateway.tools("hostile", "echo", "slow", timeout_seconds=120)
    config = gateway.configuration({"hostile": {"command": hostile_command, "pins": "first_use"}}, contracts)
    with gateway.serve(tmp_path_factory.mktemp("bad"), config) as running:
        yield running


@pytest.fixture(autouse=True)
def well_afterwards(served: Gateway) -> Iterator[None]:
    """After every test of this file the gateway is up and works in both revisions."""
    yield
    assert served.healthy()
    with RawHttp(served) as raw:
        assert text_of(raw.modern(gateway.call("echo", {"text": "well"})).json()["result"]) == "well"
        assert text_of(raw.open().result(gateway.call("echo", {"text": "well"}))) == "well"
    assert "Traceback" not in served.log()


@pytest.fixture
def raw(served: Gateway) -> Iterator[RawHttp]:
    with RawHttp(served) as client:
        yield client.open()


def check_refused(served: Gateway, answer: JSON, status: str = "validation_failure") -> JSON:
    """A result that says what is wrong, and the record of the same call."""
    result = answer["result"]
    told = about(result)
    assert result["isError"] is True and told["status"] == status
    assert told["reason_code"] and told["call_id"] in text_of(result)
    finished = served.finished(told["call_id"])
    assert (finished["status"], finished["reason_code"]) == (told["status"], told["reason_code"])
    assert finished["effect"] == "none"
    return told


def bad_headers(body: bytes) -> dict[str, str]:
    """Those of 2026-07-28 for a body that is no good JSON."""
    headers = {**ACCEPT, "mcp-protocol-version": MODERN, "mcp-method": "tools/call"}
    return {**headers, "mcp-name": "echo"} if b'"name": "echo"' in body else headers


# ── bad calls ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_bad_arguments(served: Gateway, raw: RawHttp, kind: str) -> None:
    told = check_refused(served, gateway.read_answer(raw.post(with_arguments(kind))))
    assert told["reason_code"] == ("bad_arguments" if kind == "not what the schema says" else "bad_request")
    body = with_arguments(kind, {"_meta": gateway.envelope()})
    answer = raw.http.post(served.url, content=body, headers=bad_headers(body))
    assert answer.status_code == 200, answer.text
    check_refused(served, answer.json())


@pytest.mark.parametrize("kind", NAMES)
def test_bad_names(served: Gateway, raw: RawHttp, kind: str) -> None:
    answer = raw.post(with_name(kind))
    told = check_refused(served, gateway.read_answer(answer))
    assert told["reason_code"] in ("bad_request", "unknown_tool")
    assert len(answer.content) < 10_000 and "\x1b" not in answer.text
    assert len(json.dumps(served.finished(told["call_id"]))) < 10_000


def test_missing_name_and_missing_arguments(served: Gateway, raw: RawHttp) -> None:
    check_refused(served, gateway.read_answer(raw.post(gateway.request("tools/call", {}))))
    check_refused(served, gateway.read_answer(raw.post(gateway.request("tools/call"))))
    assert about(raw.result(gateway.request("tools/call", {"name": "echo"})))["status"] == "success"


@pytest.mark.parametrize("key", ["", 12345, True, {}, ["k"]])
def test_an_idempotency_key_that_cannot_be_kept_is_not_left_out(served: Gateway, raw: RawHttp, key: Any) -> None:
    params = {"name": "echo", "arguments": {}, "_meta": {"ringfence/idempotency_key": key}}
    told = check_refused(served, gateway.read_answer(raw.post(gateway.request("tools/call", params))))
    assert told["reason_code"] == "bad_request"


@pytest.mark.parametrize("wait", [10**400, -1, "5", True])
def test_a_wait_that_is_no_number_of_seconds_is_refused_as_a_call(served: Gateway, raw: RawHttp, wait: Any) -> None:
    params = {"name": "echo", "arguments": {}, "_meta": {"ringfence/wait_seconds": wait}}
    told = check_refused(served, gateway.read_answer(raw.post(gateway.request("tools/call", params))))
    assert told["reason_code"] == "bad_request"


@pytest.mark.parametrize("params", [[], "echo", 5, None])
def test_params_that_are_no_object(served: Gateway, raw: RawHttp, params: Any) -> None:
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    check_refused(served, gateway.read_answer(raw.post(message)))


def test_id_that_is_in_use(served: Gateway, raw: RawHttp) -> None:
    first: list[JSON] = []

    def slow(seconds: float) -> None:
        with httpx2.Client(timeout=120) as http:
            message = gateway.call("slow", {"seconds": seconds}, ident=7)
            answer = http.post(served.url, json=message, headers={**ACCEPT, **raw.session})
            first.append(gateway.read_answer(answer))

    def begun() -> int:
        return sum(record.body["call"]["tool"] == "slow" for record in served.records(kind="started"))

    for seconds in (1, 10, 60):
        before, thread = begun(), threading.Thread(target=slow, args=(seconds,))
        thread.start()
        tooling.wait_until(lambda before=before: begun() > before)  # type: ignore[misc]
        second = gateway.read_answer(raw.post(gateway.call("echo", {"text": "x"}, ident=7)))
        third = raw.post(gateway.request("tools/list", ident=7)).json()
        in_use = thread.is_alive()
        thread.join()
        if in_use:  # otherwise we were so slow that the id was free again
            break
    assert check_refused(served, second)["reason_code"] == "bad_request"
    assert third["error"]["code"] == INVALID_REQUEST
    assert text_of(first[0]["result"]) == "at last", "the first one with this id is not disturbed"
    assert text_of(raw.result(gateway.call("echo", {"text": "again"}, ident=7))) == "again"


@pytest.mark.parametrize("ident", [999, "nobody", None, [], {"a": 1}, 1.5, True])
def test_cancelling_what_is_not_there(raw: RawHttp, ident: Any) -> None:
    note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": ident}}
    assert raw.post(note).status_code == 202
    assert raw.post({"jsonrpc": "2.0", "method": "notifications/cancelled"}).status_code == 202


# ── no calls at all ───────────────────────────────────────────────────────────────────────────────

NO_MESSAGE = {
    "not JSON": b"hello",
    "half of JSON": b'{"jsonrpc": "2.0", "id": 1, "method": "tools/',
    "nothing": b"",
    "invalid UTF-8": b"\xff\xfe\x00",
    "NaN": b"NaN",
    "nested beyond reading": b"[" * 200_000,
    "batch": b'[{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "echo"}}]',
    "string": b'"tools/call"',
    "null": b"null",
    "other version": b'{"jsonrpc": "1.0", "id": 1, "method": "tools/call"}',
    "id null": b'{"jsonrpc": "2.0", "id": null, "method": "tools/call"}',
    "id true": b'{"jsonrpc": "2.0", "id": true, "method": "tools/call"}',
    "id object": b'{"jsonrpc": "2.0", "id": {}, "method": "tools/call"}',
    "method number": b'{"jsonrpc": "2.0", "id": 1, "method": 5}',
    "NaN outside a call": b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"n": NaN}}',
    "duplicate method": b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list", "method": "ping"}',
}


@pytest.mark.parametrize("kind", NO_MESSAGE)
@pytest.mark.parametrize("revision", [gateway.HANDSHAKE, MODERN])
def test_what_is_no_message(served: Gateway, raw: RawHttp, kind: str, revision: str) -> None:
    headers = {**ACCEPT, **raw.session} if revision == gateway.HANDSHAKE else bad_headers(b"")
    answer = raw.http.post(served.url, content=NO_MESSAGE[kind], headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in (PARSE_ERROR, INVALID_REQUEST, INVALID_PARAMS)
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("method", ["tools/destroy", "tasks/list", "", "\u0000", "../etc/passwd", "x" * 5000])
def test_unknown_method(raw: RawHttp, method: str) -> None:
    answer = gateway.read_answer(raw.post(gateway.request(method)))
    assert answer["error"]["code"] == METHOD_NOT_FOUND


def test_unknown_method_of_the_newer_revision(raw: RawHttp) -> None:
    answer = raw.modern(gateway.request("tools/destroy", {}))
    assert answer.status_code == 404 and answer.json()["error"]["code"] == METHOD_NOT_FOUND


@pytest.mark.parametrize("params", [{}, {"uri": 5}, {"uri": None}, {"uri": "x" * 100_000}, {"uri": "\u0000"}])
def test_bad_resource(raw: RawHttp, params: JSON) -> None:
    assert "error" in gateway.read_answer(raw.post(gateway.request("resources/read", params)))
    assert "error" in gateway.read_answer(raw.post(gateway.request("resources/subscribe", params)))


@pytest.mark.parametrize("answer", [{"result": 5}, {"error": "no"}, {"error": {"code": "x"}}, {}])
def test_answers_that_nobody_waits_for(raw: RawHttp, answer: JSON) -> None:
    assert raw.post({"jsonrpc": "2.0", "id": "rf-unknown", **answer}).status_code == 202


def test_oversized_body(served: Gateway, raw: RawHttp) -> None:
    body = json.dumps(gateway.call("echo", {"text": "x" * 5_000_000})).encode()
    answer = raw.post(body)
    assert answer.status_code == 413 and "larger" in answer.json()["error"]["message"]

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 100_000):
            yield body[start : start + 100_000]

    headers = {**ACCEPT, **raw.session}
    with suppress(httpx2.WriteError):  # it may be refused before all of it was sent
        assert raw.http.post(served.url, content=pieces(), headers=headers).status_code == 413


# ── sessions and headers ──────────────────────────────────────────────────────────────────────────


def test_session_id_missing_or_wrong(served: Gateway, raw: RawHttp) -> None:
    message = gateway.call("echo")
    assert raw.http.post(served.url, json=message, headers=ACCEPT).status_code == 400
    for wrong in ("nobody", "", "x" * 5000, raw.session["mcp-session-id"].upper() + "0"):
        answer = raw.post(message, **{"mcp-session-id": wrong})
        assert answer.status_code == 404, wrong
    assert raw.http.delete(served.url, headers={**ACCEPT, **raw.session}).status_code == 200
    assert raw.post(message).status_code == 404, "a session that was ended is gone"
    assert raw.http.put(served.url, headers=ACCEPT).status_code == 405


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "localhost.evil:{port}", "[::2]:{port}", ""]
)
def test_foreign_host(served: Gateway, raw: RawHttp, host: str) -> None:
    answer = raw.post(gateway.call("echo"), host=host.format(port=served.port))
    assert answer.status_code in (400, 421) if host == "" else answer.status_code == 421


def test_host_and_origin_are_checked_on_ipv6_too(tmp_path: Path, hostile_command: list[str]) -> None:
    contracts = gateway.tools("hostile", "echo")
    config = gateway.configuration({"hostile": {"command": hostile_command, "pins": "first_use"}}, contracts)
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with gateway.serve(tmp_path, config, "--host", "::1") as six, RawHttp(six) as raw:
        assert six.url == f"http://[::1]:{six.port}/mcp"
        assert text_of(raw.open().result(gateway.call("echo", {"text": "six"}))) == "six"
        assert raw.post(gateway.call("echo"), host=f"localhost:{six.port}").status_code == 200
        assert raw.post(gateway.call("echo"), host=f"[::2]:{six.port}").status_code == 421
        assert raw.post(gateway.call("echo"), origin="http://evil.example").status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "LocalHost:{port}", "[::1]:{port}"])
def test_own_host_by_every_name(served: Gateway, raw: RawHttp, host: str) -> None:
    name = host.format(port=served.port)
    answer = raw.post(gateway.call("echo", {"text": "x"}), host=name, origin=f"http://{name}")
    assert answer.status_code == 200


ORIGINS = [
    *("http://evil.example", "https://127.0.0.1:{port}", "http://127.0.0.1", "http://localhost:1", "null", ""),
    *("http://[::1]", "http://[::1]:{port}.evil.example", "http://localhost:{port}@evil.example", "file://"),
]


@pytest.mark.parametrize("origin", ORIGINS)
def test_foreign_origin(served: Gateway, raw: RawHttp, origin: str) -> None:
    assert raw.post(gateway.call("echo"), origin=origin.format(port=served.port)).status_code == 403
    headers = {
        **gateway.modern_headers(gateway.modern(gateway.call("echo"))),
        "origin": origin.format(port=served.port),
    }
    assert raw.http.post(served.url, json=gateway.modern(gateway.call("echo")), headers=headers).status_code == 403


def test_a_foreign_origin_beside_our_own(served: Gateway, raw: RawHttp) -> None:
    ours, theirs = ("origin", f"http://127.0.0.1:{served.port}"), ("origin", "http://evil.example")
    rest = [(name, value) for name, value in {**ACCEPT, **raw.session}.items()]
    for both in ([theirs, ours], [ours, theirs]):
        assert raw.http.post(served.url, json=gateway.call("echo"), headers=[*rest, *both]).status_code == 403


def test_wrong_content_type_and_accept(raw: RawHttp) -> None:
    message = gateway.call("echo", {"text": "x"})
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/jsonp",
        "",
    ):
        assert raw.post(message, **{"content-type": kind}).status_code == 415, kind
    for kind in ("text/html", "application/json", "text/event-stream", ""):
        assert raw.post(message, accept=kind).status_code == 406, kind
    assert raw.post(message, **{"content-type": "application/json; charset=utf-8"}).status_code == 200


@pytest.mark.parametrize(
    "wrong", [{"mcp-method": "tools/list"}, {"mcp-name": "slow"}, {"mcp-method": ""}, {"mcp-name": "=?base64?!!?="}]
)
def test_headers_that_contradict_the_body(served: Gateway, raw: RawHttp, wrong: dict[str, str]) -> None:
    whole = gateway.modern(gateway.call("echo", {"text": "x"}))
    answer = raw.http.post(served.url, json=whole, headers={**gateway.modern_headers(whole), **wrong})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == MISMATCH


def test_unknown_revision(served: Gateway, raw: RawHttp) -> None:
    whole = gateway.modern(gateway.call("echo"))
    whole["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"] = "2099-01-01"
    headers = {**gateway.modern_headers(whole), "mcp-protocol-version": "2099-01-01"}
    assert raw.http.post(served.url, json=whole, headers=headers).status_code == 400


# ── below HTTP ────────────────────────────────────────────────────────────────────────────────────


def connect(served: Gateway) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=60)


def head(served: Gateway, length: int = 100) -> bytes:
    return f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nContent-Length: {length}\r\n".encode()


@pytest.mark.parametrize("hosts", [("evil.example", "{own}"), ("{own}", "evil.example"), ("{own}", "{own}")])
def test_two_hosts(served: Gateway, hosts: tuple[str, str]) -> None:
    lines = "".join(f"Host: {host.format(own=f'127.0.0.1:{served.port}')}\r\n" for host in hosts)
    with connect(served) as one:
        one.sendall(f"GET /mcp HTTP/1.1\r\n{lines}\r\n".encode())
        assert one.recv(1000).startswith(b"HTTP/1.1 421")


def test_half_open_connections(served: Gateway) -> None:
    kind = b"Content-Type: application/json\r\nAccept: */*\r\n\r\n"
    beginnings = [b"", b"POST", head(served), head(served) + kind, head(served) + kind + b'{"jsonrpc"', b"\x16\x03\x01"]
    open_ones = [connect(served) for _ in range(5) for _ in beginnings]
    try:
        for number, one in enumerate(open_ones):
            one.sendall(beginnings[number % len(beginnings)])
        with RawHttp(served) as raw:
            assert text_of(raw.open().result(gateway.call("echo", {"text": "beside"}))) == "beside"
    finally:
        for one in open_ones:
            one.close()


def test_body_cut_off(served: Gateway) -> None:
    for cut in (b"", b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call"'):
        with connect(served) as one:
            one.sendall(head(served, 5000) + b"Content-Type: application/json\r\nAccept: */*\r\n\r\n" + cut)
            one.shutdown(socket.SHUT_WR)
            one.settimeout(60)
            assert b" 200 " not in one.recv(1000)[:20]


def test_ten_thousand_headers(served: Gateway) -> None:
    junk = b"".join(b"X-Junk-%d: %s\r\n" % (n, b"j" * 50) for n in range(10_000))
    with connect(served) as one:
        try:
            one.sendall(b"GET /mcp HTTP/1.1\r\nHost: evil.example\r\n" + junk + b"\r\n")
            status = one.recv(100)
        except ConnectionError:
            status = b""  # it was cut off, which is as good
    assert not status or status.split(b" ")[1] in (b"400", b"421", b"431")


def test_request_that_is_no_http(served: Gateway) -> None:
    for junk in (
        b"\x00" * 1000,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /mcp HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ):
        with connect(served) as one:
            one.sendall(junk)
            one.shutdown(socket.SHUT_WR)
            assert b"200 OK" not in one.recv(1000)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_is_refused(served: Gateway) -> None:
    code = (
        "import encodings.idna, os, sys, urllib.request, urllib.error\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "request = urllib.request.Request(sys.argv[1], data=sys.argv[2].encode(), headers={'Content-Type':"
        " 'application/json', 'Accept': '*/*'})\n"
        "try: print(urllib.request.urlopen(request, timeout=60).status)\n"
        "except urllib.error.HTTPError as error: print(error.code, error.read().decode())\n"
    )
    words = [sys.executable, "-I", "-c", code, served.url, json.dumps(gateway.initialize())]
    told = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert told.stdout.startswith("403 "), told.stdout + told.stderr
    assert "its own user" in told.stdout
