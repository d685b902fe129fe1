"""Bad input over stdin: the gateway stays up, and every bad call gets a readable result and a record."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tooling
from tests.mcp import gateway
from tests.mcp.bad_calls import ARGUMENTS, NAMES, with_arguments, with_name
from tests.mcp.gateway import JSON, Gateway, about, text_of

INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR = -32600, -32601, -32700


class Pipe:
    """A gateway on two pipes: lines in, messages out."""

    def __init__(self, files: Gateway) -> None:
        self.gateway = files
        words = gateway.command("serve", "--stdio", "--config", files.config)
        self.errors = (files.config.parent / "stderr").open("wb")
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, start_new_session=True
        )
        self.received: queue.Queue[JSON] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._next = 1000

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.received.put(json.loads(line))

    def write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def answer(self, ident: Any, timeout: float = 120.0) -> JSON:
        """The next message with this id; others are passed over."""
        deadline = time.monotonic() + timeout
        while True:
            message = self.received.get(timeout=deadline - time.monotonic())
            if message.get("id", "none") == ident and ("result" in message or "error" in message):
                return message

    def ask(self, message: JSON) -> JSON:
        self._next += 1
        self.write(json.dumps({**message, "id": self._next}).encode())
        return self.answer(self._next)

    def close(self) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            code = self.process.wait(60)
        finally:
            self.process.kill()
            self._reader.join(60)
            self.process.stdout.close()
            self.errors.close()
        return code


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory, hostile_command: list[str]) -> Iterator[Pipe]:
    contracts = gateway.tools("hostile", "echo", "slow", timeout_seconds=120)
    config = gateway.configuration({"hostile": {"command": hostile_command, "pins": "first_use"}}, contracts)
    opened = Pipe(gateway.write(tmp_path_factory.mktemp("pipe"), config))
    assert opened.ask(gateway.initialize())["result"]["protocolVersion"] == gateway.HANDSHAKE
    opened.write(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}')
    yield opened
    assert opened.close() == 0
    assert "Traceback" not in (opened.gateway.config.parent / "stderr").read_text()


@pytest.fixture(autouse=True)
def well_afterwards(pipe: Pipe) -> Iterator[None]:
    yield
    assert text_of(pipe.ask(gateway.call("echo", {"text": "well"}))["result"]) == "well"
    modern = gateway.modern(gateway.call("echo", {"text": "well"}))
    assert text_of(pipe.ask(modern)["result"]) == "well"


def check_refused(pipe: Pipe, answer: JSON) -> JSON:
    result = answer["result"]
    told = about(result)
    assert result["isError"] is True and told["status"] == "validation_failure"
    assert told["call_id"] in text_of(result)
    finished = pipe.gateway.finished(told["call_id"])
    assert (finished["reason_code"], finished["effect"]) == (told["reason_code"], "none")
    assert finished["call"]["origin"] == "mcp-stdio"
    return told


@pytest.mark.parametrize("kind", ARGUMENTS)
@pytest.mark.parametrize("revision", [gateway.HANDSHAKE, gateway.MODERN])
def test_bad_arguments(pipe: Pipe, kind: str, revision: str) -> None:
    params = {"_meta": gateway.envelope()} if revision == gateway.MODERN else None
    pipe.write(with_arguments(kind, params, ident="bad"))
    told = check_refused(pipe, pipe.answer("bad"))
    assert told["reason_code"] == ("bad_arguments" if kind == "not what the schema says" else "bad_request")


@pytest.mark.parametrize("kind", NAMES)
def test_bad_names(pipe: Pipe, kind: str) -> None:
    pipe.write(with_name(kind, ident="name"))
    check_refused(pipe, pipe.answer("name"))


@pytest.mark.parametrize("params", [[], "echo", 5, None])
def test_params_that_are_no_object(pipe: Pipe, params: Any) -> None:
    check_refused(pipe, pipe.ask({"jsonrpc": "2.0", "method": "tools/call", "params": params}))


@pytest.mark.parametrize("method", ["ping", "tools/call"])
def test_an_id_that_utf8_has_not_ends_nothing(pipe: Pipe, method: str) -> None:
    params = {"name": "echo", "arguments": {"text": "a"}} if method == "tools/call" else {}
    pipe.write(json.dumps({"jsonrpc": "2.0", "id": "\ud800", "method": method, "params": params}).encode())
    answer = pipe.answer("\ud800")
    if method == "tools/call":
        check_refused(pipe, answer)
    else:
        assert answer["error"]["code"] == PARSE_ERROR


NO_MESSAGE = {
    "not JSON": b"hello",
    "half of JSON": b'{"jsonrpc": "2.0", "id": 1, "method": "tools/',
    "invalid UTF-8": b"\xff\xfe\x00",
    "NaN": b"NaN",
    "nested beyond reading": b"[" * 200_000,
    "batch": b'[{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "echo"}}]',
    "string": b'"tools/call"',
    "null": b"null",
    "other version": b'{"jsonrpc": "1.0", "id": null, "method": "tools/call"}',
    "id true": b'{"jsonrpc": "2.0", "id": true, "method": "tools/call"}',
    "id null": b'{"jsonrpc": "2.0", "id": null, "method": "tools/call", "params": {"name": "echo"}}',
    "no id": b'{"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "echo"}}',
    "id object": b'{"jsonrpc": "2.0", "id": {}, "method": "tools/call"}',
    "a line of 5 MB": b'{"jsonrpc": "2.0", "id": "big", "method": "tools/call", "params": "' + b"x" * 5_000_000 + b'"}',
}


def refused(files: Gateway) -> list[JSON]:
    return [record.body for record in files.records(kind="request_refused")]


@pytest.mark.parametrize("kind", NO_MESSAGE)
def test_what_is_no_message(pipe: Pipe, kind: str) -> None:
    before = len(refused(pipe.gateway))
    pipe.write(NO_MESSAGE[kind])
    error = pipe.answer(None)["error"]
    assert error["code"] in (PARSE_ERROR, INVALID_REQUEST) and error["message"]
    (body,) = refused(pipe.gateway)[before:]
    assert body["reason_code"] in ("line_too_long", "not_json", "invalid_request")
    assert (body["reason_code"] == "line_too_long") == ("5 MB" in kind)
    assert (body["origin"], body["principal"]["agent"], body["count"]) == ("mcp-stdio", "local", 1)


def test_empty_lines_and_stray_answers_are_passed_over(pipe: Pipe) -> None:
    for line in (b"", b"   ", b"\r", b'{"jsonrpc": "2.0", "id": "nobody", "result": {}}'):
        pipe.write(line)


@pytest.mark.parametrize("method", ["tools/destroy", "tasks/list", "x" * 5000])
def test_unknown_method(pipe: Pipe, method: str) -> None:
    assert pipe.ask(gateway.request(method))["error"]["code"] == METHOD_NOT_FOUND
    body = refused(pipe.gateway)[-1]
    assert body["reason_code"] == "unknown_method" and "method" not in body


def test_id_that_is_in_use(pipe: Pipe) -> None:
    pipe.write(json.dumps(gateway.call("slow", {"seconds": 1}, ident="twice")).encode())
    pipe.write(json.dumps(gateway.call("echo", {"text": "x"}, ident="twice")).encode())
    first, second = pipe.answer("twice"), pipe.answer("twice")
    assert check_refused(pipe, first)["reason_code"] == "bad_request"
    assert text_of(second["result"]) == "at last", "the first one with this id is not disturbed"


@pytest.mark.parametrize(("ident", "second"), [("mine", "mine"), (7, 7), (7, "7")])
def test_a_second_request_with_an_id_in_use_does_not_take_the_firsts_cancellation(
    pipe: Pipe, ident: Any, second: Any
) -> None:
    before = len(pipe.gateway.records(kind="started"))
    pipe.write(json.dumps(gateway.call("slow", {"seconds": 600}, ident=ident)).encode())
    tooling.wait_until(lambda: len(pipe.gateway.records(kind="started")) > before)
    pipe.write(json.dumps(gateway.call("echo", {"text": "x"}, ident=second)).encode())
    assert check_refused(pipe, pipe.answer(second))["reason_code"] == "bad_request"
    pipe.write(json.dumps(gateway.request("tools/list", ident=second)).encode())
    assert pipe.answer(second)["error"]["code"] == INVALID_REQUEST
    note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": ident}}
    pipe.write(json.dumps(note).encode())
    call_id = pipe.gateway.records(kind="started")[before].call_id
    assert call_id is not None
    tooling.wait_until(lambda: pipe.gateway.records(call_id=call_id, kind="finished"))
    assert pipe.gateway.finished(call_id)["reason_code"] == "cancelled"


@pytest.mark.parametrize("ident", [999, "nobody", None, [], {"a": 1}, True])
def test_cancelling_what_is_not_there(pipe: Pipe, ident: Any) -> None:
    note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": ident}}
    pipe.write(json.dumps(note).encode())


def test_nothing_before_the_handshake_and_in_it_a_client_says_little_of_itself(
    tmp_path: Path, hostile_command: list[str]
) -> None:
    config = gateway.configuration(
        {"hostile": {"command": hostile_command, "pins": "first_use"}}, gateway.tools("hostile", "echo")
    )
    pipe = Pipe(gateway.write(tmp_path, config))
    try:
        assert "error" in pipe.ask(gateway.call("echo", {"text": "early"}))
        (body,) = refused(pipe.gateway)
        assert (body["reason_code"], body["method"]) == ("not_initialized", "tools/call")
        talkative: JSON = {"experimental": {f"k{number}": {} for number in range(1000)}}
        assert "clientInfo and capabilities" in pipe.ask(gateway.initialize(talkative))["error"]["message"]
        modern = pipe.ask(gateway.modern(gateway.call("echo"), talkative))
        assert "clientInfo and capabilities" in modern["error"]["message"]
        assert [body["reason_code"] for body in refused(pipe.gateway)[1:]] == ["invalid_params"] * 2
        assert "result" in pipe.ask(gateway.initialize())
    finally:
        assert pipe.close() == 0
