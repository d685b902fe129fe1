"""All connections: whose each is, when it is opened, shared, given up and closed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import anyio
import pytest

from ringfence.core.box import Mount
from ringfence.core.errors import OutcomeUnknown, Refused, RingfenceError, Unavailable
from ringfence.core.model import Definition, Json, Principal, ServerSpec, ServerVolume, Status
from ringfence.core.ports import UpstreamRequest
from ringfence.upstream import breaker, pool
from ringfence.upstream.connection import Connection
from ringfence.upstream.link import RpcError
from ringfence.upstream.pool import ConnectionPool, ServerAccess
from tests import tooling
from tests.faking import OK, Client, Wire, definition, far_end

pytestmark = pytest.mark.anyio

DESK = ServerSpec("desk", command=("x",), start_timeout_seconds=60)
ELICITS: Json = {"elicitation": {}}


class Yard:
    """A pool whose connections lead to fake servers."""

    def __init__(self, *servers: ServerSpec) -> None:
        self.answer: Any = far_end()
        self.wires: list[Wire] = []
        self.events: list[tuple[str, str, str]] = []
        self.changes: list[list[Definition]] = []
        known = {spec.name: spec for spec in servers}
        self.pool = ConnectionPool(known, ServerAccess(), self.consent, self.event, changed=self.changed)

    def connect(self, spec: ServerSpec, environment: Any, consent: Any) -> Connection:
        self.wires.append(Wire(self.answer))
        return Connection(spec, self.wires[-1], consent)

    async def consent(self, request: UpstreamRequest, method: str, params: Json) -> bool:
        return False

    async def event(self, server: str, principal: Principal, method: str, params: Json) -> None:
        self.events.append((server, principal.key, method))

    async def changed(self, server: str, definitions: list[Definition]) -> None:
        self.changes.append(definitions)

    async def call(self, agent: str = "a", *, timeout: float = 60.0, **more: Any) -> Json:
        channel = Client(more.pop("capabilities", {}))
        params = {"name": "echo", "arguments": {}}
        return await self.pool.request(
            UpstreamRequest("desk", Principal(agent), "tools/call", params, channel, timeout, **more)
        )


@asynccontextmanager
async def yard(monkeypatch: pytest.MonkeyPatch, *servers: ServerSpec) -> AsyncIterator[Yard]:
    made = Yard(*(servers or (DESK,)))
    monkeypatch.setattr(pool, "connect", made.connect)
    async with made.pool.running():
        yield made


async def test_what_a_server_sent_since_its_last_call_is_told_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str, Json]] = []

    async def unasked(spec: ServerSpec, principal: Principal, network: Json) -> None:
        told.append((spec.name, principal.key, network))

    async with yard(monkeypatch) as made:
        made.pool._on_idle_network = unasked
        await made.call("a")
        await made.call("b")
        sent = {"allowed": [{"host": "a.example", "port": 443, "count": 1}]}
        for held in made.pool._held.values():
            if held.principal.agent == "b":
                held.connection._idle_network = lambda: sent
    assert told == [("desk", "local/b", sent)]


# ── whose ──


async def test_a_connection_belongs_to_one_principal(monkeypatch: pytest.MonkeyPatch) -> None:
    async with yard(monkeypatch) as made:
        for agent in ("a", "a", "b", "a"):
            assert await made.call(agent) == OK
        assert [wire.methods.count("tools/call") for wire in made.wires] == [3, 1]


async def test_a_client_that_can_be_asked_has_a_connection_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async with yard(monkeypatch) as made:
        await made.call(session="1")
        await made.call(session="2")
        assert len(made.wires) == 1, "who cannot be asked shares"
        await made.call(session="1", capabilities=ELICITS)
        await made.call(session="2", capabilities=ELICITS)
        await made.call(session="2", capabilities=ELICITS)
        assert len(made.wires) == 3
        told = {method: params for method, params, _ in made.wires[2].requests}
        assert told["initialize"]["capabilities"] == ELICITS


async def test_what_the_server_may_not_use_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    async with yard(monkeypatch, replace(DESK, elicitation="deny")) as made:
        await made.call(session="1", capabilities={**ELICITS, "sampling": {}})
        await made.call(session="2")
        assert len(made.wires) == 1


async def test_calls_at_once_open_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with yard(monkeypatch) as made:
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(made.call)
        assert len(made.wires) == 1
        assert made.wires[0].methods.count("initialize") == 1


async def test_an_unknown_server_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    async with yard(monkeypatch) as made:
        with pytest.raises(Unavailable, match="other"):
            await made.pool.definitions("other", Principal("a"))
    assert made.pool.isolation("desk") == {}  # nothing can be started here
    bare = replace(DESK, placement="unsafe_host")
    made.pool.replace_servers({"desk": bare})
    assert made.pool.isolation("desk") == {"backend": "host", "level": "none", "protections": {}}


async def test_without_boxes_a_server_is_not_started_in_none(monkeypatch: pytest.MonkeyPatch) -> None:
    bare, boxed = replace(DESK, command=("true",), placement="unsafe_host"), replace(DESK, command=("true",))
    for spec, reason in ((boxed, "no_backend"), (bare, "server_start")):
        made = Yard(spec)
        async with made.pool.running():
            with pytest.raises(Unavailable) as refused:
                await made.call()
        assert refused.value.reason_code == reason


# ── starting ──


@pytest.mark.parametrize(("command", "raised"), [(("true",), OutcomeUnknown), (("no-such-program",), Unavailable)])
async def test_whether_a_program_ran_is_known_of_a_start_that_failed(
    command: tuple[str, ...], raised: type[Exception]
) -> None:
    seen: list[Exception] = []

    async def starting(spec: ServerSpec, principal: Principal, start: Callable[[], Awaitable[None]]) -> None:
        try:
            await start()
        except Exception as exc:
            seen.append(exc)
            raise

    made = Yard()
    spec = replace(DESK, command=command, placement="unsafe_host")
    made.pool = ConnectionPool({"desk": spec}, ServerAccess(), made.consent, made.event, starting=starting)
    async with made.pool.running():
        with pytest.raises(Unavailable, match="desk"):
            await made.call()
    assert [type(each) for each in seen] == [raised]


async def test_a_server_that_does_not_start_is_left_alone_for_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_BACKOFF_SECONDS", (0.0, 600.0, 600.0))
    async with yard(monkeypatch) as made:
        made.answer = far_end(initialize=RpcError(-1, "no token"))
        reasons = []
        for _ in range(3):
            with pytest.raises(Unavailable) as refused:
                await made.call()
            reasons.append(refused.value.reason_code)
        assert reasons == ["server_start", "server_start", "server_down"]
        assert "no token" in refused.value.message
        assert len(made.wires) == 2
        made.pool._health["desk"].not_before = anyio.current_time()  # as when that time has passed
        made.answer = far_end()
        assert await made.call() == OK
        assert made.pool._health["desk"].failures == 0


LODGER = ServerSpec("desk", command=("x",), placement="session")


async def failing(made: Yard, agent: str, box: str | None) -> str:
    with pytest.raises(Unavailable) as refused:
        await made.call(agent, box=box)
    return refused.value.reason_code


async def test_what_fails_in_one_session_keeps_the_server_from_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_BACKOFF_SECONDS", (600.0,))
    async with yard(monkeypatch, LODGER) as made:
        made.answer = far_end(initialize=RpcError(-1, "broken by its agent"))
        assert [await failing(made, "a", "ses_a") for _ in range(2)] == ["server_start", "server_down"]
        made.answer = far_end()
        assert await made.call("b", box="ses_b") == OK
        assert await made.call("a", box="ses_2") == OK


async def test_a_name_that_no_session_has_is_no_failure_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_BACKOFF_SECONDS", (600.0,))

    async def none(*given: object) -> None:
        raise Unavailable("unknown_session", "there is no such session")

    async with yard(monkeypatch, LODGER) as made:
        with monkeypatch.context() as bogus:
            bogus.setattr(Wire, "run", none)
            assert [await failing(made, "a", "ses_none") for _ in range(3)] == ["unknown_session"] * 3
        assert made.pool._in_sessions == {}
        assert await made.call("a", box="ses_none") == OK, "once there is one"


async def test_the_isolation_of_one_session_is_no_fact_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async with yard(monkeypatch, LODGER) as made:
        for agent, box in (("a", "ses_a"), ("b", "ses_b")):
            await made.call(agent, box=box)
            made.wires[-1].isolation = {"session": box}
        for agent, box in (("a", "ses_a"), ("b", "ses_b")):
            assert made.pool.isolation("desk", box=(Principal(agent), box)) == {"session": box}
        assert made.pool.isolation("desk", box=(Principal("a"), "ses_b")) == {}
        assert made.pool.isolation("desk") == {}


async def test_a_call_without_a_session_never_reaches_the_instance_for_listings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with yard(monkeypatch, LODGER) as made:
        await made.pool.definitions("desk", Principal("a"))
        for box in ("", None):
            assert await failing(made, "a", box) == "no_session"
        assert "tools/call" not in made.wires[0].methods


async def test_a_slow_start_goes_on_without_the_one_who_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    async with yard(monkeypatch) as made:
        go = anyio.Event()

        async def slowly(params: Json, exchange: Any) -> Json:
            await go.wait()
            return {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}}

        made.answer = far_end(initialize=slowly)
        with pytest.raises(Unavailable) as refused:
            await made.call(timeout=0.1)
        assert refused.value.reason_code == "server_starting"
        go.set()
        assert await made.call() == OK
        assert len(made.wires) == 1


async def test_a_server_that_hangs_while_it_starts_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(params: Json, exchange: Any) -> Json:
        await anyio.sleep_forever()
        return {}

    async with yard(monkeypatch, replace(DESK, start_timeout_seconds=0.1)) as made:
        made.answer = far_end(initialize=never)
        with pytest.raises(Unavailable, match="did not start in time"):
            await made.call()
        assert made.pool._held == {}


async def test_a_fault_in_a_connection_ends_that_connection_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Wire):
        async def run(self, ready: Any, tell: Any) -> None:
            raise RuntimeError("boom")

    async with yard(monkeypatch) as made:
        good = made.connect
        monkeypatch.setattr(pool, "connect", lambda spec, env, consent: Connection(spec, Broken(made.answer), consent))
        with pytest.raises(Unavailable):
            await made.call()
        monkeypatch.setattr(pool, "connect", good)
        assert await made.call() == OK


async def test_every_start_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, str]] = []

    async def starting(spec: ServerSpec, principal: Principal, start: Any) -> None:
        started.append((spec.name, principal.key))
        await start()

    async with yard(monkeypatch) as made:
        made.pool._starting = starting
        for agent in ("a", "a", "b"):
            await made.call(agent)
    assert started == [("desk", "local/a"), ("desk", "local/b")]


# ── ending ──


@pytest.mark.parametrize(
    ("problem", "kept"),
    [
        (OutcomeUnknown("server_died", "x"), False),
        (OutcomeUnknown("session_lost", "x"), False),
        (OutcomeUnknown("answer_lost", "x"), True),
        (RpcError(-1, "no"), True),
    ],
    ids=str,
)
async def test_a_connection_of_no_further_use_is_opened_anew(
    monkeypatch: pytest.MonkeyPatch, problem: Exception, kept: bool
) -> None:
    async with yard(monkeypatch) as made:
        made.answer = far_end(tools_call=problem)
        with pytest.raises(Exception, match=r"x|no"):
            await made.call()
        made.answer = far_end()
        if kept:
            with pytest.raises(Exception, match=r"x|no"):
                await made.call()
        else:
            assert await made.call() == OK
        assert len(made.wires) == (1 if kept else 2)


async def test_a_connection_that_ended_by_itself_is_opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with yard(monkeypatch) as made:
        await made.call()
        made.wires[0].end.set()
        await tooling.until(lambda: made.pool._held == {})
        await made.call()
        assert len(made.wires) == 2


async def test_what_nobody_uses_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(pool, "_SWEEP_SECONDS", 0.02)
    async with yard(monkeypatch) as made:
        hold = anyio.Event()

        async def wait(params: Json, exchange: Any) -> Json:
            await hold.wait()
            return OK

        await made.call("idle")
        made.answer = far_end(tools_call=wait)
        async with anyio.create_task_group() as group:
            group.start_soon(made.call, "busy")
            await tooling.until(lambda: [key[1] for key in made.pool._held] == ["local/busy"])
            await anyio.sleep(0.1)
            assert [key[1] for key in made.pool._held] == ["local/busy"]
            hold.set()


async def test_there_are_never_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_PER_SERVER", 3)
    async with yard(monkeypatch) as made:
        for number in range(6):
            await made.call(f"agent {number}")
        assert [key[1] for key in made.pool._held] == ["local/agent 3", "local/agent 4", "local/agent 5"]

        hold, most, refused = anyio.Event(), 0, []

        async def wait(params: Json, exchange: Any) -> Json:
            nonlocal most
            most = max(most, len(made.pool._held))
            await hold.wait()
            return OK

        async def call(agent: str) -> None:
            try:
                await made.call(agent)
            except Unavailable as exc:
                refused.append(exc.reason_code)

        made.answer = far_end(tools_call=wait)
        async with anyio.create_task_group() as group:
            for number in range(10):
                group.start_soon(call, f"new {number}")
            await tooling.until(lambda: len(refused) == 7)
            assert len(made.pool._held) + len(made.pool._openings) <= 3
            hold.set()
        assert most <= 3
        assert set(refused) == {"server_busy"}


async def test_after_the_end_nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    async with yard(monkeypatch) as made:
        await made.call()
    with pytest.raises(Unavailable):
        await made.call("b")


# ── reload ──


async def test_a_reload_closes_what_changed_and_keeps_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ServerSpec("other", command=("y",))
    async with yard(monkeypatch, DESK, other) as made:
        await made.call()
        await made.pool.definitions("other", Principal("a"))
        made.pool.replace_servers({"desk": replace(DESK, command=("z",)), "other": other})
        assert [key[0] for key in made.pool._held] == ["other"]
        await made.call()
        assert len(made.wires) == 3
        made.pool.replace_servers({"other": other})
        with pytest.raises(Unavailable) as refused:
            await made.call()
        assert refused.value.reason_code == "no_server"


async def test_a_connection_that_was_opening_during_a_reload_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async with yard(monkeypatch) as made:
        go = anyio.Event()

        async def slowly(params: Json, exchange: Any) -> Json:
            await go.wait()
            return {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}}

        made.answer = far_end(initialize=slowly)
        async with anyio.create_task_group() as group:

            async def call() -> None:
                with pytest.raises(Unavailable):
                    await made.call()

            group.start_soon(call)
            await tooling.until(lambda: made.wires and "initialize" in made.wires[0].methods)
            made.pool.replace_servers({"desk": replace(DESK, command=("z",))})
            made.answer = far_end()
            go.set()
        assert await made.call() == OK
        assert len(made.wires) == 2
        assert [one.connection.spec.command for one in made.pool._held.values()] == [("z",)]


# ── what servers offer and say ──


async def test_a_pin_is_held_against_what_the_server_shows_now(monkeypatch: pytest.MonkeyPatch) -> None:
    async with yard(monkeypatch) as made:
        assert await made.call(definition=definition("echo")) == OK
        for pinned, reason in (
            (definition("echo", description="another"), "pin_changed"),
            (definition("gone"), "tool_gone"),
        ):
            with pytest.raises(Unavailable) as refused:
                await made.call(definition=pinned)
            assert refused.value.reason_code == reason
        assert made.wires[0].methods.count("tools/call") == 1


async def test_changed_lists_are_read_anew_and_other_words_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with yard(monkeypatch) as made:
        await made.call()
        (wire,) = made.wires
        assert wire.tell is not None
        wire.answer = far_end(tools=[{"name": "new", "inputSchema": {}}])
        await wire.tell("notifications/tools/list_changed", {})
        assert [[one.name for one in change] for change in made.changes] == [["new"]]
        await wire.tell("notifications/message", {"level": "info"})
        assert made.events == [("desk", "local/a", "notifications/message")]


async def test_what_is_said_in_a_call_and_is_no_part_of_it_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    async def call(params: Json, exchange: Any) -> Json:
        made.wires[0].answer = far_end(tools=[{"name": "new", "inputSchema": {}}])
        for method in ("tools/list_changed", "resources/updated", "progress"):
            await exchange.notify(f"notifications/{method}", {})
        return OK

    async with yard(monkeypatch) as made:
        made.answer = far_end(tools_call=call)
        channel = Client({})
        request = UpstreamRequest("desk", Principal("a"), "tools/call", {"name": "echo"}, channel, 60.0)
        assert await made.pool.request(request) == OK
        assert channel.told == [("notifications/progress", {})]
        await tooling.until(lambda: made.changes)
        assert [[one.name for one in change] for change in made.changes] == [["new"]]
        assert made.events == [("desk", "local/a", "notifications/resources/updated")]


async def test_resources_are_listed_only_where_the_server_has_any(monkeypatch: pytest.MonkeyPatch) -> None:
    async with yard(monkeypatch) as made:
        request = UpstreamRequest("desk", Principal("a"), "resources/list", {}, Client(), 5.0)
        assert await made.pool.request(request) == {"resources": []}
        assert "resources/list" not in made.wires[0].methods


async def test_what_is_in_a_box_alone_is_not_ended_for_being_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(pool, "_SWEEP_SECONDS", 0.02)
    async with yard(monkeypatch) as made:
        await made.call("reads")
        await made.call("writes", changes=True)
        await tooling.until(lambda: [key[1] for key in made.pool._held] == ["local/writes"])
        await anyio.sleep(0.2)
        assert [key[1] for key in made.pool._held] == ["local/writes"], "its box has the only copy"


@pytest.mark.parametrize(
    "more",
    [
        {"volumes": (ServerVolume("v", "/data"),)},
        {"mounts": (Mount("/srv", "/srv", "rw"),)},
        {"network": "out"},
    ],
)
async def test_what_is_kept_elsewhere_does_not_hold_a_box(monkeypatch: pytest.MonkeyPatch, more: Any) -> None:
    monkeypatch.setattr(pool, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(pool, "_SWEEP_SECONDS", 0.02)
    async with yard(monkeypatch, replace(DESK, **more)) as made:
        await made.call("writes", changes=True)
        await tooling.until(lambda: made.pool._held == {})


SECRET = "s3cr3t-Value-0123456789abcdef"


async def test_a_server_that_dies_leaves_its_last_words_to_the_operator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with yard(monkeypatch) as made:
        await made.call()
        made.wires[0].ending = "it ended with status 3"
        made.pool._clean = lambda text: text.replace(SECRET, "[redacted]")
        made.wires[0].last_words = ("Traceback", "KeyError: \x1b[2J", "x" * 390 + SECRET)
        made.wires[0].hint = "it wanted to see /srv/\x1b"
        made.wires[0].end.set()
        await tooling.until(lambda: made.pool._held == {})
        await tooling.until(lambda: "KeyError" in caplog.text)
    assert "server desk ended (it ended with status 3); its last lines on stderr:" in caplog.text
    assert "    | KeyError: \\x1b[2J" in caplog.text
    assert SECRET[:6] not in caplog.text and "x[redacted]\n" in caplog.text, "it is cut once it is clean"
    assert "it wanted to see /srv/\\x1b" in caplog.text


async def test_a_server_that_we_end_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(pool, "_SWEEP_SECONDS", 0.02)
    async with yard(monkeypatch) as made:
        await made.call()
        made.wires[0].last_words = ("bye",)
        await tooling.until(lambda: made.pool._held == {})
    assert "bye" not in caplog.text


# ── servers that fail again and again ──


class Failing:
    """A server that fails in the way that it is told to; None: it answers."""

    def __init__(self) -> None:
        self.how: Exception | None = None

    async def __call__(self, params: Json, exchange: Any) -> Json:
        if self.how is not None:
            raise self.how
        return OK


@asynccontextmanager
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Yard, Failing, list[Json]]]:
    told: list[Json] = []

    async def circuit(server: str, principal: Principal, change: Json) -> None:
        told.append({"server": server, "for": principal.key, **change})

    async with yard(monkeypatch) as made:
        made.pool._breakers = breaker.Breakers(circuit, clock=lambda: 0.0)  # it stands still
        failing = Failing()
        made.answer = far_end(tools_call=failing)
        yield made, failing, told


async def fail(made: Yard, times: int, agent: str = "a") -> None:
    for _ in range(times):
        with pytest.raises(RingfenceError) as failed:
            await made.call(agent)
        assert getattr(failed.value, "reason_code", None) != "circuit_open"


async def is_left_alone(made: Yard, agent: str = "a") -> bool:
    try:
        await made.call(agent)
    except Unavailable as exc:
        return exc.reason_code == "circuit_open"
    except RingfenceError:
        return False
    return False


OWN_FAILURES = {
    "no answer in time": Refused(Status.TIMEOUT, "timeout", "no answer"),
    "a lost answer": OutcomeUnknown("answer_lost", "lost"),
    "an answer that cannot be read": OutcomeUnknown("answer_unusable", "what?"),
    "HTTP 500": OutcomeUnknown("server_error", "HTTP 500", answered=500),
    "HTTP 503": OutcomeUnknown("server_refused", "HTTP 503", answered=503),
    "HTTP 429": OutcomeUnknown("server_refused", "HTTP 429", answered=429),
}
NO_FAILURES = {
    "an error of the tool": RpcError(-32603, "boom"),
    "HTTP 404": OutcomeUnknown("server_refused", "HTTP 404", answered=404),
    "a definition that changed": Unavailable("definition_changed", "changed"),
    "other rules": Refused(Status.DENIED, "rules_changed", "changed"),
    "room for others": OutcomeUnknown("gave_way", "gave way"),
}


@pytest.mark.parametrize("how", OWN_FAILURES)
async def test_a_server_that_fails_again_and_again_is_left_alone_and_tried_once(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(monkeypatch) as (made, failing, told):
        failing.how = OWN_FAILURES[how]
        await fail(made, breaker.FAILURES)
        sent = sum(wire.methods.count("tools/call") for wire in made.wires)
        with pytest.raises(Unavailable, match=r"failed 5 times in a row .* next try in") as refused:
            await made.call()
        assert refused.value.reason_code == "circuit_open"
        assert sum(wire.methods.count("tools/call") for wire in made.wires) == sent, "nothing was sent"
        assert [(each["state"], each["pause_seconds"]) for each in told] == [("open", 10.0)]
        failing.how = None
        assert await made.call("b") == OK, "another agent has its own count"
        (circuit,) = made.pool._breakers._circuits.values()
        circuit.not_before = 0.0
        failing.how = OWN_FAILURES[how]
        await fail(made, 1)
        assert await is_left_alone(made), "the trial failed"
        assert [each.get("pause_seconds") for each in told] == [10.0, 30.0]
        circuit.not_before = 0.0
        failing.how = None
        assert await made.call() == OK and not made.pool._breakers._circuits
        assert [each["state"] for each in told] == ["open", "open", "closed"]
        assert {each["for"] for each in told} == {"local/a"}


@pytest.mark.parametrize("how", NO_FAILURES)
async def test_what_a_call_is_refused_for_is_no_failure_of_its_server(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(monkeypatch) as (made, failing, told):
        failing.how = NO_FAILURES[how]
        await fail(made, breaker.FAILURES * 2)
        assert not await is_left_alone(made) and told == []


async def test_an_answer_in_between_begins_the_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch) as (made, failing, told):
        for answer in (None, RpcError(-32000, "no")):
            failing.how = OWN_FAILURES["HTTP 503"]
            await fail(made, breaker.FAILURES - 1)
            failing.how = answer
            with suppress(RingfenceError):
                await made.call()
        assert told == [] and not made.pool._breakers._circuits


async def test_one_call_at_a_time_tries_a_server_that_was_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch) as (made, failing, _):
        failing.how = OWN_FAILURES["HTTP 503"]
        await fail(made, breaker.FAILURES)
        (circuit,) = made.pool._breakers._circuits.values()
        circuit.not_before = 0.0
        asked, answer = anyio.Event(), anyio.Event()

        async def slow(params: Json, exchange: Any) -> Json:
            asked.set()
            await answer.wait()
            return OK

        for wire in made.wires:
            wire.answer = far_end(tools_call=slow)
        async with anyio.create_task_group() as group:
            group.start_soon(made.call)
            await asked.wait()
            assert await is_left_alone(made)
            group.cancel_scope.cancel()
        assert not circuit.trying, "a trial that its caller took back is none"
        answer.set()
        assert await made.call() == OK


async def test_calls_that_began_before_it_was_left_alone_are_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch) as (made, failing, told):
        failing.how = OWN_FAILURES["HTTP 503"]
        await fail(made, 1)
        began, fails = anyio.Event(), anyio.Event()

        async def late(params: Json, exchange: Any) -> Json:
            began.set()
            await fails.wait()
            raise OWN_FAILURES["HTTP 503"]

        async def early() -> None:
            with suppress(RingfenceError):
                await made.call()

        made.answer = far_end(tools_call=failing)
        for wire in made.wires:
            wire.answer = far_end(tools_call=late)
        async with anyio.create_task_group() as group:
            group.start_soon(early)
            await began.wait()
            for wire in made.wires:
                wire.answer = far_end(tools_call=failing)
            await fail(made, breaker.FAILURES - 1)
            (circuit,) = made.pool._breakers._circuits.values()
            circuit.not_before, circuit.trying = 0.0, True  # its pause is over, and a trial is under way
            fails.set()
        assert circuit.trying, "the trial is another call's"
        assert [each["pause_seconds"] for each in told] == [10.0], "and did not fail"


async def test_a_reload_that_changes_a_server_tries_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch) as (made, failing, _):
        failing.how = OWN_FAILURES["HTTP 503"]
        await fail(made, breaker.FAILURES)
        made.pool.replace_servers({"desk": DESK})
        assert await is_left_alone(made), "of this one nothing changed"
        failing.how = None
        made.pool.replace_servers({"desk": replace(DESK, command=("y",))})
        assert await made.call() == OK
