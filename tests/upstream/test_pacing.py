"""A server that floods is held back, whatever it is reached by and whatever it floods with; its answers are not."""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest

from ringfence.core import canonical
from ringfence.core.model import Json, Principal, ServerSpec
from ringfence.upstream import pacing
from ringfence.upstream.host_process import HostLauncher
from ringfence.upstream.http import HttpLink, _Place
from ringfence.upstream.link import InFlight, ServerLink
from ringfence.upstream.pacing import MAX_ANSWERS, MAX_QUESTIONS, MAX_TOLD, Floods, Intake, LinkBudget, Rereads
from ringfence.upstream.stdio import StdioLink
from tests import tooling

pytestmark = pytest.mark.anyio
OLD = {"mcp-protocol-version": "2025-11-25"}


@pytest.fixture
def for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has spent its burst waits longer than any test lasts."""
    monkeypatch.setattr(pacing, "_UNITS_PER_SECOND", 1e-6)


class Heard:
    """One call's client."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Json]] = []
        self.exchange = InFlight(ask=self.ask, tell=self.tell, headers=OLD)

    async def tell(self, method: str, params: Json) -> None:
        self.told.append((method, params))

    async def ask(self, method: str, params: Json) -> Json:
        return {}


async def nothing(method: str, params: Json) -> Any:
    return None


@asynccontextmanager
async def linked(link: ServerLink) -> AsyncIterator[None]:
    ready = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(link.run, ready.set, nothing)
        await ready.wait()
        yield
        group.cancel_scope.cancel()


async def held_back(floods: Floods, count: int = 1) -> None:
    with anyio.fail_after(60):
        while floods.count < count:
            await anyio.sleep(0.01)


# ── The pace ──


def test_links_that_flood_together_share_one_allowance() -> None:
    floods = Floods()
    pace = LinkBudget(floods)
    alone = pace.owed(10_000)
    floods.count = 9
    assert LinkBudget(floods).owed(10_000) == 10 * alone > 0


def test_what_is_spent_within_the_burst_waits_for_nothing() -> None:
    pace = LinkBudget(Floods())
    assert [pace.owed(1) for _ in range(pacing._BURST - 1)] == [0.0] * (pacing._BURST - 1)


def test_more_questions_than_can_be_thought_about_are_not_taken() -> None:
    intake = Intake()
    assert [intake.admit_request(number) for number in range(MAX_ANSWERS + 5)] == [True] * MAX_ANSWERS + [False] * 5
    assert not intake.admit_request(0), "nor one of an id that is still owed an answer"
    intake.answered(0)
    assert intake.admit_request("another")


async def test_questions_that_wait_for_people_are_bounded() -> None:
    intake, answers = Intake(), []
    done = anyio.Event()

    async def think(method: str, params: Json) -> Json:
        await done.wait()
        return {"yes": 1}

    async def ask() -> None:
        answers.append(await intake.answer_to(think, "elicitation/create", {}))
        if len(answers) == 3:
            done.set()

    async with anyio.create_task_group() as group:
        for _ in range(MAX_QUESTIONS + 3):
            group.start_soon(ask)
    assert answers == [None] * 3 + [{"yes": 1}] * MAX_QUESTIONS


async def test_a_client_that_takes_nothing_is_told_no_more() -> None:
    taken, open_door = [], anyio.Event()

    async def slow(method: str, params: Json) -> None:
        await open_door.wait()
        taken.append(params)

    exchange = InFlight(ask=nothing, tell=slow)
    async with anyio.create_task_group() as group:
        for number in range(MAX_TOLD + 20):
            group.start_soon(exchange.notify, "notifications/progress", {"progress": number})
        await anyio.wait_all_tasks_blocked()
        open_door.set()
    assert len(taken) == MAX_TOLD


async def test_a_message_is_priced_by_its_values_not_by_its_bytes_alone(for_ever: None) -> None:
    floods = Floods()
    intake = Intake(floods)
    await intake.notification(b'"' + b"x" * 100_000 + b'"')
    async with anyio.create_task_group() as group:
        group.start_soon(intake.notification, b"[" + b"[]," * 30_000 + b"[]]")
        await held_back(floods)
        group.cancel_scope.cancel()


# ── Over HTTP ──


@pytest.fixture(scope="module")
def flooding_url() -> Iterator[str]:
    port = tooling.free_port()
    script = tooling.FIXTURES / "flooding_server.py"
    with tooling.start_process([sys.executable, str(script), str(port)]):
        tooling.wait_for_port(port)
        yield f"http://127.0.0.1:{port}/mcp"


@pytest.mark.parametrize("kind", ["messages", "progress", "pings", "comments", "crumbs", "hints"])
async def test_a_flood_over_http_is_held_back_and_nothing_else_is(flooding_url: str, kind: str, for_ever: None) -> None:
    link, heard, other = HttpLink("far", flooding_url), Heard(), Heard()
    async with linked(link), anyio.create_task_group() as group:
        params = {"name": "flood", "arguments": {"kind": kind}}
        group.start_soon(link.request, "tools/call", params, heard.exchange)
        await held_back(link._intake.floods)
        for number in range(20):
            asked = {"name": "echo", "arguments": {"text": str(number)}}
            result = await link.request("tools/call", asked, other.exchange)
            assert result["content"][0]["text"] == str(number)
        assert link._intake.floods.count == 1, "it is held back still"
        assert len(heard.told) <= pacing._BURST / pacing._NOTIFICATION
        assert len(link._intake._unanswered) <= MAX_ANSWERS
        group.cancel_scope.cancel()  # as a deadline does


class Raw:
    """A server of plain sockets: what it answers to each request in turn."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.asked: list[bytes] = []

    async def __call__(self, stream: anyio.abc.SocketStream) -> None:
        async with stream:
            self.asked.append(await stream.receive())
            await stream.send(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        async with listener, anyio.create_task_group() as group:
            group.start_soon(listener.serve, self)
            yield f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}/mcp"
            group.cancel_scope.cancel()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"
ANSWER = b'data: {"jsonrpc": "2.0", "id": 1, "result": {"done": true}}\n\n'


def in_crumbs(data: bytes) -> bytes:
    chunks = b"".join(b"1\r\n" + data[n : n + 1] + b"\r\n" for n in range(len(data)))
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


async def test_an_answer_in_many_small_chunks_is_heard_though_its_server_has_gone() -> None:
    said = b'data: {"jsonrpc": "2.0", "method": "notifications/message", "params": {}}\n\n' * 30
    heard = Heard()
    async with Raw(in_crumbs(said + ANSWER)).serving() as url:
        link = HttpLink("far", url)
        async with linked(link):
            assert await link.request("tools/call", {}, heard.exchange) == {"done": True}
    assert len(heard.told) == 30


async def test_a_socket_that_is_held_back_is_not_read_though_its_chunks_are_taken(for_ever: None) -> None:
    crumbs = in_crumbs(b": \n" * 20_000)
    async with Raw(crumbs).serving() as url:
        link = HttpLink("far", url)
        async with linked(link), anyio.create_task_group() as group:
            group.start_soon(link.request, "tools/call", {}, Heard().exchange)
            await held_back(link._intake.floods)
            assert link._client is not None and link._client.connector is not None
            (protocol,) = link._client.connector._acquired
            await anyio.wait_all_tasks_blocked()
            assert protocol._payload is not None and not protocol._payload._buffer, "all that was handed on was taken"
            assert protocol.transport is not None and not protocol.transport.is_reading()
            group.cancel_scope.cancel()


async def test_a_stream_that_wants_to_be_reopened_at_once_is_reopened_ever_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    real = anyio.sleep

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await real(0)

    monkeypatch.setattr(anyio, "sleep", sleep)
    again = HEAD + b"\r\nid: 7\nretry: 0\n\n"
    server = Raw(*[again] * 12, HEAD + b"\r\nid: 8\n" + ANSWER)
    async with server.serving() as url:
        link = HttpLink("far", url)
        async with linked(link):
            assert await link.request("tools/call", {}, Heard().exchange) == {"done": True}
    assert len(server.asked) == 13
    assert waits[:4] == [0.1, 0.2, 0.4, 0.8] and max(waits) <= 30.0


@pytest.mark.parametrize(
    ("line", "seconds"),
    [(b"retry: 0", 0.1), (b"retry: 250", 0.25), (b"retry: 99999", 30.0), (b"retry: " + b"9" * 6000, 30.0),
     (b"retry: -1", 1.0), (b"retry: x", 1.0)],
)  # fmt: skip
def test_how_long_a_server_may_have_us_wait(line: bytes, seconds: float) -> None:
    place = _Place()
    place.note(b"id: 1")
    place.note(line)
    assert place.pause() == seconds


@pytest.mark.parametrize("value", [b"a\rb", b"a\0b", b"\x7f", b""])
def test_an_event_id_that_no_header_can_carry_is_none(value: bytes) -> None:
    place = _Place()
    place.note(b"id: " + value)
    assert place.last is None


# ── Over pipes ──

FLOOD = {
    "messages": b'{"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info"}}\n',
    "progress": b'{"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": 1, "progress": 1}}'
    b"\n",
    "pings": b'{"jsonrpc": "2.0", "id": "p%d", "method": "ping"}\n',
    "answers": b'{"jsonrpc": "2.0", "id": 99999, "result": {}}\n',
    "garbage": b"{{{\n",
    "empty lines": b"\n",
    "one line": b"x" * 100_000,
    "small values": b'{"jsonrpc": "2.0", "method": "notifications/message", "params": {"a": ['
    + b"{}," * pacing._BURST * 20
    + b"{}]}}\n",
}


@pytest.mark.parametrize("kind", FLOOD)
async def test_a_flood_over_pipes_is_held_back(kind: str, tmp_path: Path, for_ever: None) -> None:
    script = tmp_path / "server.py"
    script.write_text(f"""import os, sys
line = {FLOOD[kind]!r}
number = 0
sys.stdin.readline()
while True:
    number += 1
    os.write(1, line.replace(b"%d", b"%d" % number) * (1 if b"%d" in line or len(line) > 1000 else 500))
""")
    spec = ServerSpec("flooding", command=(sys.executable, str(script)))
    floods, heard = Floods(), Heard()
    link = StdioLink(spec, partial(HostLauncher({"PATH": "/bin"}).launch, spec, Principal("agent")), floods)
    async with linked(link), anyio.create_task_group() as group:
        group.start_soon(link.request, "tools/call", {}, heard.exchange)
        await held_back(floods)
        assert len(heard.told) <= pacing._BURST / pacing._NOTIFICATION
        assert len(link._intake._unanswered) <= MAX_ANSWERS
        group.cancel_scope.cancel()


async def test_what_we_asked_a_server_for_is_not_paced(tmp_path: Path, for_ever: None) -> None:
    script = tmp_path / "server.py"
    script.write_text("""import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": {"x": "x" * 100_000}}), flush=True)
""")
    spec = ServerSpec("busy", command=(sys.executable, str(script)))
    link = StdioLink(spec, partial(HostLauncher({"PATH": "/bin"}).launch, spec, Principal("agent")))
    async with linked(link):
        for _ in range(30):
            assert len((await link.request("tools/call", {}, Heard().exchange))["x"]) == 100_000


async def test_a_server_that_pings_and_reads_nothing_holds_no_more_than_a_few_answers(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text("""import sys, time
for number in range(600):
    sys.stdout.write('{"jsonrpc": "2.0", "id": "%d%s", "method": "ping"}\\n' % (number, "x" * 900))
sys.stdout.write('{"jsonrpc": "2.0", "method": "notifications/done"}\\n')
sys.stdout.flush()
time.sleep(1000)
""")
    spec = ServerSpec("deaf", command=(sys.executable, str(script)))
    link = StdioLink(spec, partial(HostLauncher({"PATH": "/bin"}).launch, spec, Principal("agent")))
    said = anyio.Event()

    async def tell(method: str, params: Json) -> None:
        said.set()

    ready = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(link.run, ready.set, tell)
        with anyio.fail_after(120):
            await said.wait()
        assert len(link._intake._unanswered) == MAX_ANSWERS
        group.cancel_scope.cancel()


# ── Lists that changed ──


def read_again(size: int, seconds: float) -> int:
    """How often a list of `size` bytes is read by one who always wants to."""
    paced = Rereads()
    now = 1000.0
    count = 0
    while (now := now + paced.wait(now)) < 1000.0 + seconds:
        paced.spend(size, now)
        count += 1
    return count


def test_changed_lists_are_read_soon_a_few_times_and_then_at_a_pace() -> None:
    assert read_again(1000, 0.5) == 1
    assert 10 <= read_again(1000, 15.0) <= 16, "a server that is just setting itself up is followed"
    assert read_again(1000, 3600.0) < 400


def test_long_lists_are_read_again_more_rarely_than_short_ones() -> None:
    counts = [read_again(size, 3600.0) for size in (1000, 100_000, 1_000_000, 100_000_000)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] <= 7
    assert counts[-2] < counts[0] / 10


def test_who_is_quiet_for_a_while_is_followed_again() -> None:
    paced = Rereads()
    now = 0.0
    while paced.wait(now) <= 1.0:
        now += paced.wait(now)
        paced.spend(1000, now)
    assert paced.wait(now + 300.0) == 0.0


# ── Long messages ──


async def test_what_is_long_is_parsed_beside_the_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    where: dict[bool, set[int]] = {True: set(), False: set()}
    loads = canonical.loads

    def note(data: bytes, **more: Any) -> Any:
        where[len(data) >= pacing.LONG_BYTES].add(threading.get_ident())
        return loads(data, **more)

    monkeypatch.setattr(canonical, "loads", note)
    code = (
        "import json, sys\nfor line in sys.stdin:\n"
        " asked = json.loads(line)\n result = {'x': 'y' * asked['params']['size']}\n"
        " print(json.dumps({'jsonrpc': '2.0', 'id': asked['id'], 'result': result}), flush=True)"
    )
    spec = ServerSpec("long", command=(sys.executable, "-c", code))
    link = StdioLink(spec, partial(HostLauncher({}).launch, spec, Principal("agent")))
    async with linked(link):
        for size in (10, 1_000_000):
            got = await link.request("x", {"size": size}, Heard().exchange)
            assert len(got["x"]) == size
    assert where[False] == {threading.get_ident()}
    assert where[True] and threading.get_ident() not in where[True]
