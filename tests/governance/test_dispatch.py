"""Dispatch: only a grant runs, once; again only where that is safe; and what cannot be given as asked is refused."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from ringfence.core.box import Mount
from ringfence.core.errors import OutcomeUnknown, Refused, Unavailable, UpstreamFailed
from ringfence.core.model import (
    Contract,
    Decision,
    Grant,
    Json,
    NetworkSpec,
    PackageSpec,
    Principal,
    ServerSpec,
    Status,
)
from ringfence.core.ports import UpstreamRequest
from ringfence.governance import dispatch
from ringfence.governance.contract import build
from ringfence.governance.dispatch import Dispatcher, DispatchTargets, network_allows
from ringfence.governance.facts import both_networks
from tests.boxing import fake, report
from tests.faking import OK, Client, Reply, Servers, contract, definition, governed, make_call

pytestmark = pytest.mark.anyio

ALLOWED = Decision("dec_1", True, "allowed")
BOXED = Decision("dec_1", True, "allowed", sandbox=True)
DOWN, LOST = Unavailable("server_down", "down"), OutcomeUnknown("server_died", "died")
AWAY, FORGOTTEN = OutcomeUnknown("server_refused", "HTTP 503"), OutcomeUnknown("session_lost", "HTTP 404")
GAVE_WAY = OutcomeUnknown("gave_way", "others needed the server")
NO_SECRET = Refused(Status.DENIED, "secret_scope", "not for this")
INVALID = Refused(Status.VALIDATION_FAILURE, "session_stopped", "it is stopped")
HERE, THERE = ServerSpec("desk", command=("x",)), ServerSpec("desk", url="https://desk.corp.example/mcp")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_RETRY_SECONDS", 0.001)


def dispatcher(*replies: Reply, server: ServerSpec = THERE, **networks: NetworkSpec) -> tuple[Dispatcher, Servers]:
    servers = Servers(list(replies) or [OK])
    return Dispatcher(servers, DispatchTargets({"desk": server}, networks)), servers


def grant(one: Contract | None = None, *, left: float = 600.0, **call: Any) -> Grant:
    return Grant(
        make_call("echo", {"text": "x"}, **call), one or contract("echo"), ALLOWED, definition("echo"), "d", None,
        time.monotonic() + left,
    )  # fmt: skip


# ── running ──


async def test_a_grant_runs_once_with_what_it_names() -> None:
    desk, servers = dispatcher()
    channel = Client()
    given = grant(contract("talk", tool="echo", timeout_seconds=7), principal=Principal("a"), session="s")
    answer = await desk.run(given, channel)
    assert (answer.result, answer.status, answer.attempts) == (OK, Status.SUCCESS, 1)
    assert answer.isolation == {"backend": "host", "level": "none", "protections": {}}
    (sent,) = servers.requests
    assert (sent.server, sent.principal, sent.session, sent.timeout) == ("desk", Principal("a"), "s", 7)
    assert sent.params == {"name": "echo", "arguments": {"text": "x"}}
    assert sent.definition == definition("echo")
    assert sent.channel is channel


async def test_an_expired_grant_runs_nothing() -> None:
    desk, servers = dispatcher()
    with pytest.raises(Unavailable) as refused:
        await desk.run(grant(left=-0.001), Client())
    assert (refused.value.reason_code, servers.requests) == ("grant_expired", [])


async def test_the_callers_deadline_shortens_the_contracts() -> None:
    desk, servers = dispatcher()
    began = time.monotonic()
    await desk.run(grant(contract("echo", timeout_seconds=300), deadline=began + 200), Client())
    assert 200 - (time.monotonic() - began) <= servers.requests[0].timeout <= 200
    await desk.run(grant(contract("echo", timeout_seconds=1), deadline=time.monotonic() + 200), Client())
    assert servers.requests[1].timeout == 1


async def test_an_error_of_the_tool_is_kept() -> None:
    desk, _ = dispatcher({"content": [], "isError": True, "x": 1})
    answer = await desk.run(grant(), Client())
    assert (answer.status, answer.reason_code) == (Status.FAILED, "tool_error")
    assert answer.result is not None and answer.result["x"] == 1


async def test_what_is_no_tool_goes_on_as_it_came() -> None:
    desk, servers = dispatcher({"contents": []})
    given = grant(method="resources/read", kind="resource", meta={"vendor/x": 1})
    await desk.run(given, Client())
    assert servers.requests[0].params == {"text": "x", "_meta": {"vendor/x": 1}}


# ── trying again ──

TRIES: dict[str, tuple[dict[str, Any], list[Reply], int, type[Exception] | None]] = {
    "a read that never ran": ({}, [DOWN, DOWN, OK], 3, None),
    "as often as the contract says": ({"retry": {"attempts": 1}}, [DOWN, DOWN, OK], 2, Unavailable),
    "never, if so said": ({"retry": {"attempts": 0}}, [DOWN, OK], 1, Unavailable),
    "a read that may have run": ({}, [LOST, OK], 1, OutcomeUnknown),
    "a write that never ran": ({"mode": "write"}, [DOWN, OK], 1, Unavailable),
    "an idempotent write that never ran": ({"mode": "write", "idempotent": True}, [DOWN, OK], 2, None),
    "an idempotent write that may have run": ({"mode": "write", "idempotent": True}, [LOST, OK], 2, None),
    "one with a key that may have run": ({"mode": "write", "idempotent": {"key": "args.text"}}, [LOST, OK], 2, None),
    "one that gave way to others": ({"mode": "write", "idempotent": True}, [GAVE_WAY, OK], 1, OutcomeUnknown),
    "a read that was turned away": ({}, [AWAY, AWAY, OK], 3, None),
    "a write that was turned away": ({"mode": "write"}, [AWAY, OK], 1, OutcomeUnknown),
    "a write in a session that is lost": ({"mode": "write"}, [FORGOTTEN, OK], 1, OutcomeUnknown),
    "an idempotent write that was turned away": ({"mode": "write", "idempotent": True}, [AWAY, OK], 2, None),
    "turned away, then out of reach": ({"mode": "write", "idempotent": True}, [AWAY, DOWN], 3, OutcomeUnknown),
    "turned away, then no secret": ({"mode": "write", "idempotent": True}, [AWAY, NO_SECRET], 2, OutcomeUnknown),
    "turned away, then refused": ({"mode": "write", "idempotent": True}, [AWAY, INVALID], 2, OutcomeUnknown),
    "high risk": ({"mode": "high_risk"}, [DOWN, OK], 1, Unavailable),
    "an attempt may have run, the last did not": ({"idempotent": True}, [LOST, DOWN, DOWN], 3, OutcomeUnknown),
}


@pytest.mark.parametrize("case", TRIES)
async def test_a_call_is_tried_again_only_where_that_is_safe(case: str) -> None:
    given, replies, attempts, ends = TRIES[case]
    desk, servers = dispatcher(*replies)
    if ends is None:
        assert (await desk.run(grant(contract("echo", **given)), Client())).attempts == attempts
    else:
        with pytest.raises(ends):
            await desk.run(grant(contract("echo", **given)), Client())
    assert len(servers.requests) == attempts


async def test_a_refusal_is_never_tried_again() -> None:
    refusal = Refused("failed", "upstream_error", "no")  # type: ignore[arg-type]
    desk, servers = dispatcher(refusal, OK)
    with pytest.raises(Refused):
        await desk.run(grant(contract("echo", idempotent=True)), Client())
    assert len(servers.requests) == 1


async def test_no_attempt_begins_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_RETRY_SECONDS", 600.0)
    desk, servers = dispatcher(DOWN, OK)
    with anyio.fail_after(60), pytest.raises(Unavailable):
        await desk.run(grant(contract("echo", timeout_seconds=30), deadline=time.monotonic() + 30), Client())
    assert len(servers.requests) == 1


# ── what cannot be given ──

REFUSED: dict[str, tuple[dict[str, Any], Decision, ServerSpec, str]] = {
    "a sandboxed transport": ({"transport": "sandboxed_exec"}, ALLOWED, HERE, "no_backend"),
    "a direct one": ({"transport": "direct"}, ALLOWED, HERE, "no_transport"),
    "another server": ({"server": "other"}, ALLOWED, HERE, "no_server"),
    "a secret": ({"secrets": ["a", "b"]}, ALLOWED, THERE, "no_secret"),
    "a sandbox elsewhere": ({}, BOXED, THERE, "sandbox_impossible"),
    "a sandbox here": ({}, BOXED, HERE, "no_backend"),
    "mounts elsewhere": (
        {"filesystem": {"mounts": [{"host": "/a", "at": "/a"}]}},
        ALLOWED,
        THERE,
        "sandbox_impossible",
    ),
    "a network in no box": (
        {"network": "inside"},
        ALLOWED,
        replace(HERE, placement="unsafe_host"),
        "no_network_control",
    ),
    "another network than the box has": ({"network": "inside"}, ALLOWED, HERE, "network"),
    "a write in an agent's box": ({"mode": "write"}, ALLOWED, replace(HERE, placement="session"), "session_placement"),
    "no session for an agent's box": ({"mode": "read"}, ALLOWED, replace(HERE, placement="session"), "no_session"),
    "a sandbox in an agent's box": ({"mode": "read"}, BOXED, replace(HERE, placement="session"), "no_session"),
    "a network without the server": ({"network": "outside"}, ALLOWED, THERE, "network"),
    "a network that nobody defined": ({"network": "unknown"}, ALLOWED, THERE, "network"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_given_is_refused(case: str) -> None:
    given, decision, server, code = REFUSED[case]
    inside, outside = NetworkSpec("inside", ("*.corp.example",)), NetworkSpec("outside", ("example.org:443",))
    desk, _ = dispatcher(server=server, inside=inside, outside=outside)
    with pytest.raises((Unavailable, Refused)) as refused:
        desk.check(make_call(), contract("echo", **given), decision)
    assert isinstance(refused.value, Unavailable | Refused)
    assert refused.value.reason_code == code


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://desk.corp.example/mcp", True),
        ("https://desk.corp.example:8443/mcp", False),
        ("http://desk.corp.example/mcp", False),
        ("https://corp.example/mcp", False),
        ("https://corp.example.org/mcp", False),
    ],
)
def test_a_network_is_held_against_the_servers_address(url: str, allowed: bool) -> None:
    desk, _ = dispatcher(server=ServerSpec("desk", url=url), inside=NetworkSpec("inside", ("*.corp.example:443",)))
    if allowed:
        desk.check(make_call(), contract("echo", network="inside"), ALLOWED)
    else:
        with pytest.raises(Refused):
            desk.check(make_call(), contract("echo", network="inside"), ALLOWED)


# ── boxes ──

BOX, _ = build("execute_python", {"transport": "sandboxed_exec", "mode": "high_risk"})


@pytest.mark.parametrize("decision", [ALLOWED, BOXED], ids=["allowed", "only in a sandbox"])
async def test_what_runs_in_a_box_needs_no_server_and_is_sandboxed_as_it_is(decision: Decision) -> None:
    executor, backend = fake(report(exit_status=3))
    desk = Dispatcher(Servers(), DispatchTargets({}, {}), executor)
    call = make_call("execute_python", {"code": "1"})
    desk.check(call, BOX, decision)
    assert desk.isolation(call, BOX) == {"backend": "process", "level": "process"}
    named = make_call("execute_python", {"code": "1", "backend": "gvisor"})
    assert desk.isolation(named, BOX) == {"backend": "gvisor", "level": "gvisor"}
    answer = await desk.run(Grant(call, BOX, decision, None, "d", None, time.monotonic() + 600), Client())
    assert (answer.status, answer.reason_code, answer.attempts) == (Status.FAILED, "exit_status", 1)
    assert backend.specs[0].program.source == b"1"


async def test_a_box_that_could_not_be_made_is_tried_again_where_the_contract_says_so() -> None:
    executor, backend = fake(Unavailable("no_box", "gone"), report())
    contract, _ = build("execute_python", {"transport": "sandboxed_exec", "mode": "read"})
    desk = Dispatcher(Servers(), DispatchTargets({}, {}), executor)
    call = make_call("execute_python", {"code": "1"})
    answer = await desk.run(Grant(call, contract, ALLOWED, None, "d", None, time.monotonic() + 600), Client())
    assert (answer.attempts, len(backend.specs)) == (2, 2)
    executor, backend = fake(Unavailable("no_box", "gone"), report())
    desk.executor = executor
    with pytest.raises(Unavailable):
        await desk.run(Grant(call, BOX, ALLOWED, None, "d", None, time.monotonic() + 600), Client())
    assert len(backend.specs) == 1, "high_risk is never tried again"


# ── networks ──


GONE = {"host": "a.example", "port": 443, "rule": "out", "count": 2, "bytes_in": 1, "bytes_out": 3}
SENT = {"allowed": [GONE], "denied": [], "bytes_in": 1, "bytes_out": 3}
ENDINGS = {
    "an error": UpstreamFailed("upstream_error", -32000, "no"),
    "its end": OutcomeUnknown("server_died", "gone"),
    "a timeout": Refused(Status.TIMEOUT, "timeout", "no answer"),
    "nothing to be had": Unavailable("pin_changed", "another"),
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=list(ENDINGS))
async def test_what_a_servers_box_asked_for_is_told_however_its_call_ended(ending: Exception, tmp_path: Path) -> None:
    attempts: list[Json | None] = []

    async def answer(request: UpstreamRequest) -> Json:
        assert request.asked is not None
        request.asked(SENT)
        attempts.append(SENT)
        raise ending

    async with governed(tmp_path, replies=[answer]) as way:
        outcome = await way.call()
        assert not outcome.ok
        sent: Json | None = None
        for each in attempts:
            sent = both_networks(sent, each)
        assert outcome.facts["network"] == sent and sent is not None and sent["bytes_out"] == 3 * len(attempts)
        assert way.finished()[0]["facts"]["network"] == sent


def test_what_was_asked_for_in_two_attempts_is_added_up() -> None:
    other = {**GONE, "host": "b.example"}
    both = both_networks(SENT, {"allowed": [other, GONE], "denied": [], "failed": [], "bytes_in": 2, "bytes_out": 6})
    twice = {**GONE, "count": 4, "bytes_in": 2, "bytes_out": 6}
    assert both == {"allowed": [twice, other], "denied": [], "failed": [], "bytes_in": 3, "bytes_out": 9}
    assert both_networks(None, SENT) == both_networks(SENT, None) == SENT


@pytest.mark.parametrize(
    ("entry", "host", "port", "allowed"),
    [
        ("api.example", "api.example", 443, True),
        ("api.example", "API.Example.", 80, True),
        ("API.example.", "api.example", 80, True),
        ("api.example", "x.api.example", 443, False),
        ("api.example:443", "api.example", 443, True),
        ("api.example:443", "api.example", 80, False),
        ("*.corp.example", "a.corp.example", 1, True),
        ("*.corp.example", "a.b.corp.example", 1, True),
        ("*.corp.example", "corp.example", 1, False),
        ("*.corp.example", ".corp.example", 1, False),
        ("*.corp.example", "evilcorp.example", 1, False),
        ("*.corp.example:443", "a.corp.example", 443, True),
        ("*.corp.example:443", "a.corp.example", 444, False),
        ("127.0.0.1:9101", "127.0.0.1", 9101, True),
        ("[::1]:80", "::1", 80, True),
        ("[::1]", "[::1]", 80, True),
        ("::1", "::1", 80, True),
        ("::1", "::2", 80, False),
        ("*", "a", 1, True),
        ("*", "127.0.0.1", 1, False),
        ("10.0.0.0/8:443", "10.1.2.3", 443, True),
        ("10.0.0.0/8", "0x0a010203", 443, True),
        ("a", "", 1, False),
        ("a", "a%00", 1, False),
    ],
)
def test_a_network_allows_what_it_lists(entry: str, host: str, port: int, allowed: bool) -> None:
    assert network_allows(NetworkSpec("n", (entry,)), host, port) is allowed


def test_a_network_without_a_list_allows_nothing() -> None:
    assert not network_allows(NetworkSpec("n"), "a", 1)
    assert network_allows(NetworkSpec("n", ("b", "a")), "a", 1)


SEEN = (Mount("/a", "/a", "rw"), Mount("/b", "/b"))
CODE = Mount("/state/tree", "/opt/packages")


@pytest.mark.parametrize(
    ("wanted", "packages", "given"),
    [
        ((), None, None),
        (SEEN, None, None),
        (SEEN[:1], None, SEEN[:1]),
        ((Mount("/a", "/a"), SEEN[1]), None, (Mount("/a", "/a"), SEEN[1])),
        (SEEN, PackageSpec("npm", ("x",), "sha256:x", "/x"), None),
        (SEEN[1:], PackageSpec("npm", ("x",), "sha256:x", "/x"), (SEEN[1], CODE)),
    ],
)
async def test_a_contract_that_sees_less_than_its_server_has_an_instance_of_its_own(
    wanted: tuple[Mount, ...], packages: PackageSpec | None, given: tuple[Mount, ...] | None
) -> None:
    server = replace(HERE, mounts=SEEN if packages is None else (*SEEN, CODE), packages=packages)
    desk, servers = dispatcher(server=server)
    desk.executor = fake()[0]
    mounts = [{"host": each.host, "at": each.at, "mode": each.mode} for each in wanted]
    one = contract("echo", filesystem={"mounts": mounts}) if wanted else contract("echo")
    desk.check(make_call("echo"), one, ALLOWED)
    await desk.run(grant(one), Client())
    assert (servers.requests[0].fresh, servers.requests[0].mounts) == (given is not None, given)


@pytest.mark.parametrize("more", [{"mode": "rw"}, {"at": "/elsewhere"}, {"host": "/elsewhere"}])
def test_what_its_server_does_not_see_no_call_of_it_does(more: dict[str, str]) -> None:
    desk, _ = dispatcher(server=replace(HERE, mounts=SEEN))
    desk.executor = fake()[0]
    one = contract("echo", filesystem={"mounts": [{"host": "/b", "at": "/b", "mode": "ro", **more}]})
    with pytest.raises(Refused) as refused:
        desk.check(make_call("echo"), one, ALLOWED)
    assert refused.value.reason_code == "mounts"
