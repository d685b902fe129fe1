"""A server as a child process: bounded reading of whatever it writes, and an orderly end."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp_types import JSONRPCError, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from ringfence.core.box import Limits
from ringfence.core.errors import OutcomeUnknown, Unavailable
from ringfence.core.model import Json, Principal, ServerSpec
from ringfence.core.ports import Launcher
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.servers.launcher import BoxLauncher, LaunchSettings
from ringfence.upstream import stdio
from ringfence.upstream.host_process import HostLauncher
from ringfence.upstream.link import MAX_MESSAGE_VALUES, AnswerUnusable, InFlight, RpcError
from ringfence.upstream.stdio import Lines, StdioLink, TooLong, UnusableAnswer, _parse, to_message
from tests import tooling
from tests.faking import chunked

pytestmark = pytest.mark.anyio


def test_two_requests_that_look_the_same_are_two() -> None:
    async def ask(method: str, params: Json) -> Json:
        return {}

    async def tell(method: str, params: Json) -> None:
        return None

    first, second = InFlight(ask, tell), InFlight(ask, tell)
    under_way = [first, second]
    under_way.remove(second)  # as a link does when a request has ended
    assert under_way[0] is first


# ── Lines ──

lines_of_bytes = st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"")), max_size=8)


@given(lines_of_bytes, st.lists(st.integers(0, 250), max_size=12), st.integers(1, 40))
def test_lines_are_the_same_however_they_arrive(lines: list[bytes], cuts: list[int], limit: int) -> None:
    splitter = Lines(limit)
    data = b"".join(line + b"\n" for line in lines)
    out = [line for chunk in chunked(data, cuts) for line in splitter.feed(chunk)]
    assert [one for one in out if isinstance(one, bytes)] == [
        line for line in lines if line.strip() and len(line) <= limit
    ]
    assert sum(isinstance(one, TooLong) for one in out) == sum(len(line) > limit for line in lines)


@given(st.lists(st.binary(min_size=1, max_size=2000), max_size=40))
def test_no_more_than_a_line_is_ever_held(chunks: list[bytes]) -> None:
    splitter = Lines(5000)
    for chunk in chunks:
        splitter.feed(chunk.replace(b"\n", b" "))
        assert len(splitter._buffer) <= 5000 + 2000


def test_the_end_of_the_stream_may_lack_its_newline() -> None:
    splitter = Lines(10)
    assert splitter.feed(b"abc") == []
    assert splitter.feed(b"def\ngh") == [b"abcdef"]


@pytest.mark.parametrize(
    ("line", "ident"),
    [
        ('{"jsonrpc": "2.0", "id": 17, "result": {"x": "@"}}', 17),
        ('{"jsonrpc": "2.0", "result": {"id": 5, "x": "@"}, "id": 17}', 17),
        ('{"result": {"x": "@"}, "id": 17, "jsonrpc": "2.0"}', 17),
        ('{"jsonrpc": "2.0", "result": {"x": "@"}}', None),
        ('{"jsonrpc": "2.0", "id": "text", "result": {"x": "@"}}', None),
    ],
)
def test_an_answer_that_is_too_long_fails_its_own_request(line: str, ident: int | None) -> None:
    data = line.replace("@", "y" * 100_000).encode() + b'\n{"next": 1}\n'
    splitter = Lines(20_000)
    out = [one for chunk in chunked(data, list(range(0, len(data), 7000))) for one in splitter.feed(chunk)]
    assert isinstance(out[0], TooLong)
    assert out[0].request_id == ident
    assert out[1:] == [b'{"next": 1}'], "and nothing else"


# ── Messages ──

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
)
members = ("jsonrpc", "id", "method", "params", "result", "error")
envelopes = st.fixed_dictionaries({}, optional={name: json_values | st.just("2.0") for name in members})


@given(envelopes | json_values)
def test_any_json_is_a_message_or_nothing(value: Any) -> None:
    message = to_message(value)
    assert message is None or isinstance(message, JSONRPCRequest | JSONRPCNotification | JSONRPCResponse | JSONRPCError)


@given(st.binary(max_size=80) | envelopes.map(lambda value: json.dumps(value).encode()))
def test_any_line_is_a_message_or_nothing(line: bytes) -> None:
    message = _parse(line)
    assert message is None or message.jsonrpc == "2.0"


def test_messages_of_every_kind() -> None:
    head = {"jsonrpc": "2.0"}
    result = {"content": [{"type": "new", "x": 2**70}], "unknown": None}
    answer = to_message({**head, "id": 1, "result": result})
    assert isinstance(answer, JSONRPCResponse)
    assert answer.result is result, "passed on as it came"
    failed = to_message({**head, "id": "a", "error": {"code": -1, "message": "no", "data": [1]}})
    assert isinstance(failed, JSONRPCError)
    assert (failed.id, failed.error.code, failed.error.data) == ("a", -1, [1])
    assert isinstance(to_message({**head, "id": 1, "method": "ping"}), JSONRPCRequest)
    assert isinstance(to_message({**head, "method": "notifications/x", "params": {"a": 1}}), JSONRPCNotification)
    assert isinstance(to_message({**head, "id": 1, "result": {}, "error": None}), JSONRPCResponse)
    both = to_message({**head, "id": 1, "result": {}, "error": {"code": -1, "message": "no"}})
    assert isinstance(both, UnusableAnswer)
    nothings: list[Any] = [
        {},
        [],
        None,
        {**head, "id": True, "result": {}},
        {**head, "method": "x", "params": [1]},
        head,
    ]
    assert [to_message(nothing) for nothing in nothings] == [None] * len(nothings)


@pytest.mark.parametrize(
    "line",
    [b'{"jsonrpc": "2.0", "id": 3, "result": {"a": 1, "a": 2}}', b'{"jsonrpc": "2.0", "id": 3, "result": [NaN]}',
     b'{"jsonrpc": "2.0", "id": 3, "result": "text"}', b'{"jsonrpc": "2.0", "id": 3, "error": "text"}'],
)  # fmt: skip
def test_an_answer_that_cannot_be_used_fails_the_request_it_answers(line: bytes) -> None:
    message = _parse(line)
    assert isinstance(message, UnusableAnswer)
    assert message.id == 3


@pytest.mark.parametrize(
    "result",
    [b"[" * 100_000, b"[" + b"{}," * MAX_MESSAGE_VALUES + b"{}]", b"[" + b'"",' * MAX_MESSAGE_VALUES + b'""]',
     b"[" + b"0," * MAX_MESSAGE_VALUES + b"0]", b"[" + b"1" * 5_000 + b"]"],
    ids=["nested", "objects", "texts", "numbers", "digits"],
)  # fmt: skip
def test_an_answer_that_would_take_long_to_read_fails_its_request_at_once(result: bytes) -> None:
    message = _parse(b'{"jsonrpc": "2.0", "id": 3, "result": {"a": ' + result + b"}}")
    assert isinstance(message, UnusableAnswer)
    assert message.id == 3


def test_a_long_text_is_one_value_whatever_stands_in_it() -> None:
    text = '{"a": [1, 2, "\\\\"], ' * (MAX_MESSAGE_VALUES // 2)
    message = _parse(json.dumps({"jsonrpc": "2.0", "id": 3, "result": {"text": text, "more": [text[:100]]}}).encode())
    assert isinstance(message, JSONRPCResponse)
    assert message.result["text"] == text


@pytest.mark.parametrize("line", [b"NaN", b"1e999", b'"\\ud800"', b"[NaN]", b'{"method": "x", "a": NaN}', b"\xff"])
def test_garbage_is_nothing(line: bytes) -> None:
    assert _parse(line) is None


# ── A real process ──


def talk(ask: Any = None, told: list[tuple[str, Json]] | None = None, client: object = "s") -> InFlight:
    async def tell(method: str, params: Json) -> None:
        if told is not None:
            told.append((method, params))

    return InFlight(ask=ask, tell=tell, client=client)


@asynccontextmanager
async def launchers(where: str) -> AsyncIterator[Launcher]:
    """Those of a gateway: in a box, and in none."""
    if where == "bare":
        yield HostLauncher({"PATH": "/bin"})
        return
    backend = ProcessBackend()
    try:
        yield BoxLauncher(backend, LaunchSettings(Limits(), {"PATH": "/bin"}, lambda path: None))
    finally:
        await backend.close()


@pytest.fixture(params=["bare", "boxed"])
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def running(command: list[str], where: str) -> AsyncIterator[StdioLink]:
    spec = ServerSpec("hostile", command=tuple(command), env={"OWN": "1"})
    ready = anyio.Event()

    async def nobody(method: str, params: Json) -> None:
        return None

    async with launchers(where) as launcher, anyio.create_task_group() as group:
        link = StdioLink(spec, partial(launcher.launch, spec, Principal("agent")))
        group.start_soon(link.run, ready.set, nobody)
        with anyio.fail_after(tooling.PATIENCE):
            await ready.wait()
        yield link
        group.cancel_scope.cancel()


async def called(link: StdioLink, tool: str, exchange: InFlight | None = None, **arguments: Any) -> str:
    result = await link.request("tools/call", {"name": tool, "arguments": arguments}, exchange or talk())
    return str(result["content"][0]["text"])


async def test_a_server_gets_its_own_environment_and_ends_with_the_link(hostile_command: list[str], where: str) -> None:
    boxed = {"HOME", "LANG", "LOGNAME", "NODE_OPTIONS", "TERM", "TMPDIR", "USER"} if where == "boxed" else set()
    async with running(hostile_command, where) as link:
        assert link.isolation is not None and link.isolation["level"] == ("process" if boxed else "none")
        assert await called(link, "echo", text="hi") == "hi"
        seen = json.loads(await called(link, "environ"))
        assert set(seen["names"]) - {"LC_CTYPE"} == {"OWN", "PATH", *boxed}
        assert await called(link, "echo", text="x" * 3_000_000) == "x" * 3_000_000
        with anyio.move_on_after(0.1):
            await called(link, "hang")
        with anyio.fail_after(tooling.PATIENCE):
            while not (cancelled := json.loads(await called(link, "cancellations"))):
                await anyio.sleep(0.01)
        assert len(cancelled) == 1
    assert boxed or not tooling.alive(seen["pid"])  # in a box it has another number, and goes with the box


async def test_questions_and_words_reach_the_one_whose_call_caused_them(hostile_command: list[str], where: str) -> None:
    async def ask(method: str, params: Json) -> Json:
        return {"action": "accept", "content": {"answer": params["message"]}}

    async def refuse(method: str, params: Json) -> Json:
        raise RpcError(-32600, "denied")

    told: list[tuple[str, Json]] = []
    async with running(hostile_command, where) as link:
        assert json.loads(await called(link, "ask", talk(ask), message="Well?"))["content"] == {"answer": "Well?"}
        assert json.loads(await called(link, "ask", talk(refuse)))["code"] == -32600
        await called(link, "log", talk(told=told), line="a line")
        assert told == [("notifications/message", {"level": "info", "data": "a line"})]

        # With calls of two clients under way, nobody can tell whose a question is.
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: called(link, "hang", talk(client="other")))
            await anyio.sleep(0.1)
            assert json.loads(await called(link, "ask", talk(ask, client="mine")))["code"] == -32601
            group.cancel_scope.cancel()


async def test_a_server_that_dies_leaves_an_unknown_outcome(hostile_command: list[str], where: str) -> None:
    for tool in ("die", "die_before"):
        async with running(hostile_command, where) as link:
            with pytest.raises(OutcomeUnknown) as lost:
                await called(link, tool)
            assert lost.value.reason_code == "server_died"


ANSWERING = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        for answer in asked["params"]["answers"]:
            ident = answer.pop("id", "@").replace("@", str(asked["id"]))
            print(json.dumps({"jsonrpc": "2.0", "id": ident, **answer}), flush=True)
    if asked["method"] == "end":
        sys.exit()
"""


@pytest.mark.parametrize("code", [-32000, -32001, -32600, -32800, 5])
async def test_an_error_is_the_servers_answer_whatever_its_code(code: int) -> None:
    """The dispatcher has codes of its own, for a link that closed and for a deadline: a server may send them, too."""
    error = {"code": code, "message": "Connection closed", "data": {"ticket": 17}}
    async with running([sys.executable, "-c", ANSWERING], "bare") as link, anyio.create_task_group() as others:
        others.start_soon(link.request, "slow", {"answers": []}, talk())
        for _ in range(2):
            with pytest.raises(RpcError) as raised:
                await link.request("x", {"answers": [{"error": error}]}, talk())
            assert type(raised.value) is RpcError
            assert (raised.value.code, raised.value.message, raised.value.data) == tuple(error.values())
        assert await link.request("x", {"answers": [{"result": {"still": "there"}}]}, talk()) == {"still": "there"}
        others.cancel_scope.cancel()


async def test_what_is_no_answer_stands_for_none() -> None:
    error = {"code": -32000, "message": "Connection closed"}
    async with running([sys.executable, "-c", ANSWERING], "bare") as link:
        for ident in ("0@", " @", "+@", "@0"):
            answers = [{"id": ident, "error": error}, {"result": {"answer": 1}}, {"error": error}]
            assert await link.request("x", {"answers": answers}, talk()) == {"answer": 1}, ident
        with pytest.raises(OutcomeUnknown) as lost:
            await link.request("end", {"answers": [{"id": "0@", "error": error}]}, talk())
        assert lost.value.reason_code == "server_died"


TELLING = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    for note in asked["params"]["told"]:
        note = {"progressToken": asked["id"], **note}
        print(json.dumps({"jsonrpc": "2.0", "method": "notifications/progress", "params": note}), flush=True)
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": {"done": True}}), flush=True)
"""


async def test_progress_that_is_beyond_all_measure_is_dropped_alone() -> None:
    told: list[tuple[str, Json]] = []
    notes = [{"progress": 10**400}, {"progress": 1, "total": -(10**400)}, {"progress": 2, "total": 10**300}]
    async with running([sys.executable, "-c", TELLING], "bare") as link:
        assert await link.request("x", {"told": notes}, talk(told=told)) == {"done": True}
        assert await link.request("x", {"told": []}, talk()) == {"done": True}
        await tooling.until(lambda: told == [("notifications/progress", {"progress": 2, "total": 1e300})])


MUTTERING = """
import sys
say = sys.stderr.buffer
long = b"s3cr3t\\n" + b"y" * 400 + b"s3\\nlast s3cr"
split = (b"one s3cr3t", b"-Value\\ncaf\\xc3", b"\\xa9\\n", b"x" * 20_000, long, b"3t")
for piece in split:
    sys.stdin.readline()
    say.write(piece)
    say.flush()
sys.stdin.readline()
"""


async def test_stderr_is_told_by_whole_lines_however_it_is_written(caplog: pytest.LogCaptureFixture) -> None:
    """Secrets are looked for in one record at a time."""
    caplog.set_level("INFO", "ringfence.upstream")

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == "INFO"]

    async with running([sys.executable, "-c", MUTTERING], "bare") as link:
        for _ in range(6):
            await link.notify("notifications/next", None)
        whole = [f"server hostile: {line}" for line in ("one s3cr3t-Value", "caf\u00e9", "y" * 400 + "s3")]
        await tooling.until(lambda: told() == whole)
        with pytest.raises(OutcomeUnknown):
            await link.request("x", {}, talk())
        await tooling.until(lambda: link.last_words)
    assert link.last_words == ("y" * 400 + "s3", "last s3cr3t"), "what came before was cut"
    assert told()[3:] in ([], ["server hostile: last s3cr3t"])


async def test_bad_lines_harm_nothing(hostile_command: list[str], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdio, "MAX_MESSAGE_BYTES", 100_000)
    async with running(hostile_command, where) as link:
        assert await called(link, "garbage") == "after the garbage"
        with pytest.raises(AnswerUnusable):
            await called(link, "huge_line", bytes=1_000_000)
        assert await called(link, "echo", text="still here") == "still here"


@pytest.mark.parametrize("command", [["/no/such/program"], [sys.executable + "\0"], ["/"]])
async def test_a_server_that_cannot_be_started_is_unavailable(command: list[str], where: str) -> None:
    spec = ServerSpec("x", command=tuple(command))

    async def nobody(method: str, params: Json) -> None:
        return None

    async with launchers(where) as launcher:
        link = StdioLink(spec, partial(launcher.launch, spec, Principal("agent")))
        with pytest.raises(Unavailable) as refused:
            await link.run(lambda: None, nobody)
        assert refused.value.reason_code == "server_start"
        with pytest.raises(Unavailable):
            await link.request("ping", {}, talk())


CLOSING = """
import os, sys, time
sys.stdin.readline()
os.close(1)
time.sleep(600)
"""


async def test_a_server_that_closes_its_output_and_lives_on_has_ended(where: str) -> None:
    spec = ServerSpec("closing", command=(sys.executable, "-c", CLOSING))

    async def nobody(method: str, params: Json) -> None:
        return None

    async with launchers(where) as launcher, anyio.create_task_group() as group:
        link = StdioLink(spec, partial(launcher.launch, spec, Principal("agent")))
        ready, over = anyio.Event(), anyio.Event()

        async def live() -> None:
            await link.run(ready.set, nobody)
            over.set()

        group.start_soon(live)
        with anyio.fail_after(tooling.PATIENCE):
            await ready.wait()
            with pytest.raises(OutcomeUnknown, match="ended without an answer"):
                await link.request("tools/call", {"name": "x"}, talk())
            await over.wait()
        with pytest.raises(Unavailable):
            await link.request("tools/call", {"name": "x"}, talk())
