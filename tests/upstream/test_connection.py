"""One connection: the revision agreed on, what is offered, what a server may ask, and when it is given up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import anyio
import pytest

from ringfence.core import canonical
from ringfence.core.errors import OutcomeUnknown, Refused, Unavailable, UpstreamFailed
from ringfence.core.model import Json, Principal, ServerSpec, Status
from ringfence.core.ports import UpstreamRequest
from ringfence.upstream import connection
from ringfence.upstream.connection import ROOTS_CHANGED, Connection, Roots, first_roots, relayed_capabilities
from ringfence.upstream.link import AnswerUnusable, RpcError
from tests.faking import OK, Client, Wire, definition, far_end

pytestmark = pytest.mark.anyio

META = "io.modelcontextprotocol/"
MODERN = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}}
FORM: Json = {"message": "Well?", "requestedSchema": {"type": "object"}}
EVERYTHING: Json = {"elicitation": {}, "sampling": {}, "roots": {}, "tasks": {}}


async def nowhere(method: str, params: Json) -> None:
    return None


async def opened(answer: Any, spec: ServerSpec | None = None, **more: Any) -> tuple[Connection, Wire]:
    wire = Wire(answer)

    async def consent(request: UpstreamRequest, method: str, params: Json) -> bool:
        return bool(more.get("consents", False))

    made = Connection(spec or ServerSpec("desk", url="http://x/"), wire, consent)
    await made.open(more.get("capabilities", {}), more.get("known"), nowhere)
    return made, wire


def asking(client: Client | None = None, timeout: float = 60.0, **more: Any) -> UpstreamRequest:
    params = {"name": "echo", "arguments": more.pop("arguments", {})}
    params |= more.pop("params", {})
    return UpstreamRequest("desk", Principal("a"), "tools/call", params, client or Client(), timeout, **more)


# ── What a server's box asks of the network ──


class Box:
    """Stands for the box of a server: how many requests it has sent."""

    def __init__(self) -> None:
        self.sent = 0

    def meter(self) -> Callable[[], Json]:
        before = self.sent
        return lambda: {"allowed": ["x"] * (self.sent - before), "denied": [], "bytes_in": 0, "bytes_out": 0}


async def test_what_a_servers_box_sends_between_calls_is_told_once_with_the_next_call_or_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    box = Box()
    monkeypatch.setattr(Wire, "network_meter", lambda wire: box.meter())
    monkeypatch.setattr(Wire, "network_since_start", lambda wire: {"allowed": ["x"] * box.sent})

    async def send(params: Json, exchange: Any) -> Json:
        box.sent += 1
        return OK

    between: list[int] = []
    within: list[int] = []

    async def unasked(network: Json) -> None:
        between.append(len(network["allowed"]))

    def asked(network: Json | None) -> None:
        within.append(len((network or {})["allowed"]))

    made, _ = await opened(far_end(tools_call=send))
    made.on_idle_network = unasked
    box.sent = 4  # while it started
    await made.request(asking(asked=asked))
    assert (between, within) == ([4], [1])
    await made.request(asking(asked=asked))
    assert (between, within) == ([4], [1, 1]), "nothing was sent meanwhile"
    box.sent += 2
    await made.request(asking(asked=asked))
    assert (between, within) == ([4, 2], [1, 1, 1])
    box.sent += 3
    await made.ended()
    assert between == [4, 2, 3]


# ── Agreeing ──


async def test_a_modern_server_needs_no_handshake() -> None:
    made, wire = await opened(far_end(server_discover=MODERN))
    assert (made.version, made.modern) == ("2026-07-28", True)
    assert wire.methods == ["server/discover", "tools/list"]
    _, params, headers = wire.requests[1]
    assert params["_meta"][f"{META}protocolVersion"] == "2026-07-28"
    assert (headers["mcp-protocol-version"], headers["mcp-method"]) == ("2026-07-28", "tools/list")
    assert list(made.definitions) == [("tool", "echo")]


@pytest.mark.parametrize(
    "probe",
    [
        RpcError(-32601, "no such method"),
        OutcomeUnknown("server_refused", "HTTP 400", answered=400),
        {"supportedVersions": ["2099-01-01"]},
        {"supportedVersions": "2026-07-28"},
        {},
    ],
    ids=str,
)
async def test_whoever_does_not_know_the_probe_gets_the_handshake(probe: Any) -> None:
    made, wire = await opened(far_end(server_discover=probe), capabilities={"roots": {}})
    assert made.version == "2025-11-25"
    assert wire.methods == ["server/discover", "initialize", "tools/list"]
    assert wire.requests[1][1]["capabilities"] == {"roots": {}}
    assert wire.notes == [("notifications/initialized", None)]
    assert wire.requests[2][2] == {"mcp-protocol-version": "2025-11-25"}


async def test_a_known_revision_is_not_probed_for() -> None:
    _, wire = await opened(far_end(), known="2025-06-18")
    assert wire.methods == ["initialize", "tools/list"]


async def test_a_server_that_ignores_the_probe_is_greeted_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silence(params: Json, exchange: Any) -> Json:
        await anyio.sleep_forever()
        return {}

    monkeypatch.setattr(connection, "_PROBE_SECONDS", 0.05)
    made, _ = await opened(far_end(server_discover=silence))
    assert made.version == "2025-11-25"


@pytest.mark.parametrize("version", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"])
async def test_every_handshake_revision_is_taken(version: str) -> None:
    made, _ = await opened(far_end(initialize={"protocolVersion": version, "capabilities": {}}))
    assert made.version == version
    assert made.definitions == {}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"protocolVersion": "1999-01-01"}, "server_version"),
        ({}, "server_version"),
        (RpcError(-1, "no token"), "server_start"),
        (Unavailable("server_unreachable", "x"), "server_unreachable"),
    ],
    ids=str,
)
async def test_who_cannot_be_agreed_with_is_unavailable(answer: Any, reason: str) -> None:
    with pytest.raises(Unavailable) as refused:
        await opened(far_end(initialize=answer))
    assert refused.value.reason_code == reason


# ── Listing ──


async def test_every_page_is_read() -> None:
    async def pages(params: Json, exchange: Any) -> Json:
        number = int(params.get("cursor", "0"))
        tools = [{"name": f"t{number}"}, "garbage", {"no": "name"}, {"name": 5}]
        return {"tools": tools, "nextCursor": str(number + 1)} if number < 3 else {"tools": tools}

    made, _ = await opened(far_end(tools_list=pages))
    assert [name for _, name in made.definitions] == ["t0", "t1", "t2", "t3"]


async def test_a_listing_that_never_ends_is_given_up() -> None:
    with pytest.raises(Unavailable, match="has more than 100 pages"):
        await opened(far_end(tools_list={"tools": [], "nextCursor": "again"}))


async def test_a_listing_of_long_pages_is_given_up_before_it_fills_the_memory() -> None:
    pages: list[Json] = []

    async def page(params: Json, exchange: Any) -> Json:
        pages.append(params)
        return {"tools": [{"name": "t", "description": "x" * 5_000_000}], "nextCursor": "again"}

    with pytest.raises(Unavailable, match="lists more than 16,000,000 bytes of tools"):
        await opened(far_end(tools_list=page))
    assert len(pages) == 4


@pytest.mark.parametrize("pages", [1, 10])
async def test_a_listing_of_too_many_tools_is_refused_and_as_many_as_may_be_are_read(pages: int) -> None:
    most = connection.MAX_DEFINITIONS

    def listing(count: int) -> Any:
        async def page(params: Json, exchange: Any) -> Json:
            number = int(params.get("cursor", "0"))
            tools = [{"name": f"{number}-{each}"} for each in range(count // pages)]
            return {"tools": tools, "nextCursor": str(number + 1)} if number + 1 < pages else {"tools": tools}

        return far_end(tools_list=page)

    made, _ = await opened(listing(most))
    assert len(made.definitions) == most
    with pytest.raises(Unavailable, match="tools/list lists more than 1,000 tools") as refused:
        await opened(listing(most + pages))
    assert refused.value.reason_code == "server_listing"


@pytest.mark.parametrize(
    ("method", "key"), [("resources/list", "resources"), ("resources/templates/list", "resourceTemplates")]
)
async def test_every_list_of_a_server_has_a_bound(method: str, key: str) -> None:
    async def page(params: Json, exchange: Any) -> Json:
        return {key: [{"uri": "x:1"}] * 6_000, "nextCursor": "1"}

    answers: dict[str, Any] = {method.replace("/", "_"): page}
    made, _ = await opened(far_end(**answers))
    with pytest.raises(Unavailable, match=f"{method} lists more than 10,000 {key}") as refused:
        await made.list_all(method, key)
    assert refused.value.reason_code == "server_listing"


async def test_definitions_are_digested_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[int] = []

    def digest(body: Any) -> str:
        where.append(threading.get_ident())
        return "sha256:x"

    monkeypatch.setattr(canonical, "definition_digest", digest)
    await opened(far_end())
    assert where and threading.get_ident() not in where


@pytest.mark.parametrize("listed", [{"tools": None}, {"tools": {"a": 1}}, {}, RpcError(-32601, "x")], ids=str)
async def test_a_bad_listing_offers_nothing(listed: Any) -> None:
    made, _ = await opened(far_end(tools_list=listed))
    assert made.definitions == {}


async def test_prompts_are_offered_under_their_own_kind() -> None:
    answer = far_end(
        initialize={"protocolVersion": "2025-11-25", "capabilities": {"tools": {}, "prompts": {}}},
        prompts_list={"prompts": [{"name": "echo"}]},
    )
    made, _ = await opened(answer)
    assert set(made.definitions) == {("tool", "echo"), ("prompt", "echo")}
    assert made.definitions["prompt", "echo"].kind == "prompt"


# ── Requests ──


async def test_a_result_passes_as_it_is() -> None:
    odd = {"content": [{"type": "hologram"}], "x": [None, 2**70], "isError": True}
    made, _ = await opened(far_end(tools_call=odd))
    assert await made.request(asking()) == odd


async def test_arguments_that_a_tool_wants_as_headers_are_repeated() -> None:
    schema = {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}
    pinned = definition("echo", inputSchema=schema)
    made, wire = await opened(far_end(server_discover=MODERN))
    for arguments in ({"region": "eu"}, {"region": "eu"}, {}):
        await made.request(asking(arguments=arguments, definition=pinned))
    sent = [{name.lower(): value for name, value in headers.items()} for _, _, headers in wire.requests[2:]]
    assert [headers.get("mcp-param-region") for headers in sent] == ["eu", "eu", None]
    assert wire.requests[2][2]["mcp-name"] == "echo"


@pytest.mark.parametrize(("era", "kept"), [({}, False), ({"server_discover": MODERN}, True)])
async def test_the_log_level_is_said_only_where_it_is_understood(era: Any, kept: bool) -> None:
    made, wire = await opened(far_end(**era))
    await made.request(asking(params={"_meta": {"vendor/x": 1}}, log_level="info"))
    meta = wire.requests[-1][1]["_meta"]
    assert (f"{META}logLevel" in meta, meta["vendor/x"]) == (kept, 1)


async def test_no_answer_in_time_is_a_timeout() -> None:
    async def never(params: Json, exchange: Any) -> Json:
        await anyio.sleep_forever()
        return {}

    made, _ = await opened(far_end(tools_call=never))
    with pytest.raises(Refused) as refused:
        await made.request(asking(timeout=0.05))
    assert (refused.value.status, refused.value.reason_code) == (Status.TIMEOUT, "timeout")


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (RpcError(-32602, "no", {"a": 1}), "upstream_error"),
        (RpcError(AnswerUnusable("x").code, "that code, sent by the server"), "upstream_error"),
        (AnswerUnusable("x"), "answer_unusable"),
    ],
    ids=str,
)
async def test_an_error_of_the_server_is_its_own_words(problem: RpcError, reason: str) -> None:
    made, _ = await opened(far_end(tools_call=problem))
    with pytest.raises(UpstreamFailed) as failed:
        await made.request(asking())
    assert (failed.value.reason_code, failed.value.code, failed.value.data) == (reason, problem.code, problem.data)


@pytest.mark.parametrize("problem", [OutcomeUnknown("answer_lost", "x"), Unavailable("server_down", "x")], ids=str)
async def test_what_the_link_says_is_passed_on(problem: Exception) -> None:
    made, _ = await opened(far_end(tools_call=problem))
    with pytest.raises(type(problem)):
        await made.request(asking())


# ── Questions ──


def questions(*methods: str) -> Any:
    """A server of the handshake era that asks in the course of a call, and returns what it was told."""

    async def call(params: Json, exchange: Any) -> Json:
        told = []
        for method in methods:
            try:
                told.append(await exchange.ask(method, dict(FORM)))
            except RpcError as exc:
                told.append({"code": exc.code})
        return {"told": told}

    return far_end(tools_call=call)


async def test_a_question_is_labelled_with_its_server() -> None:
    client = Client(EVERYTHING, {"question": {"action": "accept"}})
    made, _ = await opened(questions("elicitation/create", "roots/list"))
    assert await made.request(asking(client)) == {"told": [{"action": "accept"}] * 2}
    asked = client.asked[0]["question"]
    assert (asked["method"], asked["params"]["message"]) == ("elicitation/create", "[desk] Well?")
    assert asked["params"]["_meta"] == {"ringfence/server": "desk"}


@pytest.mark.parametrize(
    ("settings", "capabilities", "consents", "method", "code"),
    [
        ({}, {}, False, "elicitation/create", -32601),
        ({"elicitation": "deny"}, EVERYTHING, False, "elicitation/create", -32600),
        ({}, EVERYTHING, False, "sampling/createMessage", -32600),
        ({"sampling": "ask"}, EVERYTHING, False, "sampling/createMessage", -32600),
        ({"sampling": "allow"}, {}, True, "sampling/createMessage", -32601),
        ({}, EVERYTHING, True, "tools/call", -32601),
        ({}, EVERYTHING, True, "roots/delete", -32601),
    ],
)
async def test_what_a_server_may_not_ask_is_refused(
    settings: Any, capabilities: Json, consents: bool, method: str, code: int
) -> None:
    client = Client(capabilities, {"question": {}})
    made, _ = await opened(questions(method), ServerSpec("desk", url="http://x/", **settings), consents=consents)
    assert await made.request(asking(client)) == {"told": [{"code": code}]}
    assert client.asked == []


@pytest.mark.parametrize(
    ("declared", "form", "url"), [({}, True, False), ({"form": {}}, True, False), ({"url": {}}, False, True),
                                  ({"form": {}, "url": {}}, True, True), (True, True, False)],
)  # fmt: skip
async def test_a_question_has_a_form_that_the_client_can_show_and_nothing_that_the_protocol_does_not_have(
    declared: Any, form: bool, url: bool
) -> None:
    visit = {"mode": "url", "url": "https://example.org/", "elicitationId": "1", "message": "Well?"}

    async def call(params: Json, exchange: Any) -> Json:
        told: list[Any] = []
        for question in (FORM, visit, {**FORM, "mode": "form"}, {**FORM, "mode": "x"}):
            try:
                told.append(await exchange.ask("elicitation/create", {**question, "task": {"ttl": 5}, "x": 1}))
            except RpcError as exc:
                told.append(exc.code)
        return {"told": told}

    client = Client({"elicitation": declared}, {"question": {"action": "accept"}})
    made, _ = await opened(far_end(tools_call=call))
    could = [{"action": "accept"} if can else -32602 for can in (form, url, form, False)]
    assert await made.request(asking(client)) == {"told": could}
    shown = [set(asked["question"]["params"]) - {"_meta"} for asked in client.asked]
    assert all(keys <= {*FORM, *visit} for keys in shown)


async def test_a_server_that_asks_without_end_gets_no_more_answers() -> None:
    client = Client(EVERYTHING, {"question": {"action": "accept"}})
    made, _ = await opened(questions(*["elicitation/create"] * (connection._MAX_QUESTIONS + 2)))
    told = (await made.request(asking(client)))["told"]
    assert len(client.asked) == connection._MAX_QUESTIONS
    assert told[-2:] == [{"code": -32600}] * 2


@pytest.mark.parametrize(("setting", "consents"), [("allow", False), ("ask", True)])
async def test_sampling_that_is_allowed_reaches_the_client(setting: Any, consents: bool) -> None:
    client = Client(EVERYTHING, {"question": {"role": "assistant"}})
    spec = ServerSpec("desk", url="http://x/", sampling=setting)
    made, _ = await opened(questions("sampling/createMessage"), spec, consents=consents)
    assert await made.request(asking(client)) == {"told": [{"role": "assistant"}]}


async def test_a_server_that_samples_gets_nothing_of_the_others() -> None:
    async def call(params: Json, exchange: Any) -> Json:
        return await exchange.ask("sampling/createMessage", {"messages": [], "includeContext": "allServers"})

    client = Client({"sampling": {"context": {}, "tools": {}}}, {"question": {"role": "assistant"}})
    spec = ServerSpec("desk", url="http://x/", sampling="allow")
    made, _ = await opened(far_end(tools_call=call), spec)
    await made.request(asking(client))
    assert client.asked[0]["question"]["params"].keys() == {"messages", "_meta"}
    assert relayed_capabilities(spec, client.capabilities) == {"sampling": {"tools": {}}}


async def test_while_a_person_thinks_the_servers_time_stands_still() -> None:
    class Slow(Client):
        async def ask(self, questions: Mapping[str, Json]) -> Mapping[str, Json]:
            await anyio.sleep(2 * seconds)
            return {"question": {"action": "accept"}}

    for seconds in (0.1, 1.0, 10.0):
        made, _ = await opened(questions("elicitation/create"))
        with suppress(Refused):  # where the rest alone took too long
            assert (await made.request(asking(Slow(EVERYTHING), timeout=seconds)))["told"] == [{"action": "accept"}]
            return
    pytest.fail("it did not stand still")


async def test_questions_at_once_are_put_one_after_the_other() -> None:
    class Slow(Client):
        under_way = 0

        async def ask(self, questions: Mapping[str, Json]) -> Mapping[str, Json]:
            Slow.under_way += 1
            assert Slow.under_way == 1
            await anyio.sleep(0.1)
            Slow.under_way -= 1
            return {"question": {"action": "accept"}}

    async def call(params: Json, exchange: Any) -> Json:
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(exchange.ask, "elicitation/create", dict(FORM))
        await anyio.sleep_forever()
        return OK

    made, _ = await opened(far_end(tools_call=call))
    with anyio.fail_after(60), pytest.raises(Refused) as refused:
        await made.request(asking(Slow(EVERYTHING), timeout=0.2))
    assert refused.value.status is Status.TIMEOUT, "and the server's own time runs on afterwards"


def rounds(*wanted: Json) -> Any:
    """A server of 2026-07-28 that answers `input_required` so often before it is content."""
    seen: list[Json] = []

    async def call(params: Json, exchange: Any) -> Json:
        seen.append(params)
        if len(seen) <= len(wanted):
            return {"resultType": "input_required", "requestState": f"s{len(seen)}", **wanted[len(seen) - 1]}
        return {**OK, "seen": [{k: v for k, v in one.items() if k != "_meta"} for one in seen]}

    return far_end(server_discover=MODERN, tools_call=call)


async def test_a_modern_server_is_asked_again_with_the_answers() -> None:
    client = Client(EVERYTHING, {"q": {"action": "accept"}})
    made, _ = await opened(rounds({"inputRequests": {"q": {"method": "elicitation/create", "params": FORM}}}, {}))
    seen = (await made.request(asking(client)))["seen"]
    assert "requestState" not in seen[0]
    assert (seen[1]["requestState"], seen[1]["inputResponses"]) == ("s1", {"q": {"action": "accept"}})
    assert (seen[2]["requestState"], seen[2]["inputResponses"]) == ("s2", {})
    assert client.asked[0]["q"]["params"]["message"] == "[desk] Well?"


async def test_a_modern_server_gets_a_no_for_a_form_and_an_end_for_anything_else() -> None:
    form, sample = {"method": "elicitation/create", "params": FORM}, {"method": "sampling/createMessage", "params": {}}
    made, _ = await opened(rounds({"inputRequests": {"q": form}}))
    seen = (await made.request(asking()))["seen"]
    assert seen[1]["inputResponses"] == {"q": {"action": "decline"}}
    for odd in (sample, {"method": "tools/call"}, {}, "text"):
        made, _ = await opened(rounds({"inputRequests": {"q": odd}}))
        with pytest.raises(Refused) as refused:
            await made.request(asking(Client(EVERYTHING)))
        # It has the request, so that this is no call that never ran.
        assert (refused.value.status, refused.value.reason_code) == (Status.FAILED, "server_question")


@pytest.mark.parametrize(
    "problem", [Unavailable("server_unreachable", "x"), Refused(Status.DENIED, "no", "x")], ids=str
)
async def test_a_later_round_that_is_not_sent_leaves_what_the_first_one_did(problem: Exception) -> None:
    async def call(params: Json, exchange: Any) -> Json:
        if "inputResponses" in params:
            raise problem
        return {
            "resultType": "input_required",
            "inputRequests": {"q": {"method": "elicitation/create", "params": FORM}},
        }

    made, _ = await opened(far_end(server_discover=MODERN, tools_call=call))
    with pytest.raises(OutcomeUnknown):
        await made.request(asking(Client(EVERYTHING, {"q": {"action": "accept"}})))


async def test_a_server_that_never_has_enough_is_given_up() -> None:
    made, _ = await opened(rounds(*[{}] * 50))
    with pytest.raises(Refused) as refused:
        await made.request(asking())
    assert refused.value.reason_code == "too_many_rounds"


@pytest.mark.parametrize(
    ("each", "turns", "asked"), [(connection._MAX_QUESTIONS + 1, 1, 0), (60, 19, 60)], ids=["at once", "by and by"]
)
async def test_a_modern_server_asks_no_more_in_one_call_than_another(each: int, turns: int, asked: int) -> None:
    wanted = {str(number): {"method": "elicitation/create", "params": FORM} for number in range(each)}
    client = Client(EVERYTHING, {str(number): {"action": "accept"} for number in range(each)})
    made, _ = await opened(rounds(*[{"inputRequests": wanted}] * turns))
    with pytest.raises(Refused) as refused:
        await made.request(asking(client))
    assert refused.value.reason_code == "too_many_rounds"
    assert sum(map(len, client.asked)) == asked


def test_only_what_the_server_may_use_is_relayed() -> None:
    assert relayed_capabilities(ServerSpec("a"), EVERYTHING) == {"elicitation": {}, "roots": {}}
    assert relayed_capabilities(ServerSpec("a", sampling="ask", elicitation="deny"), EVERYTHING) == {
        "sampling": {},
        "roots": {},
    }
    assert relayed_capabilities(ServerSpec("a"), {}) == {}


# ── roots: what a client tells of its folders, for servers that ask for it outside of any call


FIRST: Json = {"roots": [{"uri": "file:///a"}]}
SECOND: Json = {"roots": [{"uri": "file:///b"}]}


class RootsClient:
    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.capabilities: Json = {"roots": {}}

    async def ask(self, questions: Any) -> Any:
        assert questions["roots"]["method"] == "roots/list"
        answer = self.answers.pop(0)
        if answer is None:
            raise Refused(Status.FAILED, "client_refused", "no")
        return {"roots": answer}

    async def notify(self, method: str, params: Json) -> None:
        return None


def call(client: RootsClient, session: str | None = "mine") -> UpstreamRequest:
    return UpstreamRequest("desk", Principal("ann", "local"), "tools/call", {}, client, 5.0, session=session)


@pytest.mark.parametrize(
    ("client", "session", "capabilities", "told"),
    [
        (RootsClient(FIRST), "mine", {"roots": {}}, FIRST),
        (RootsClient(), None, {"roots": {}}, None),
        (RootsClient(), "mine", {}, None),
        (RootsClient(None), "mine", {"roots": {}}, None),
        (RootsClient("nonsense"), "mine", {"roots": {}}, None),
    ],
)
async def test_only_a_client_of_its_own_is_asked(
    client: RootsClient, session: str | None, capabilities: Json, told: Json | None
) -> None:
    roots = await first_roots(call(client, session), capabilities)
    if told is None:
        with pytest.raises(RpcError, match="no call in progress"):
            roots.answer()
    else:
        assert roots.answer() == told


async def test_a_change_is_passed_on_with_the_next_call_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_HEAR_SECONDS", 60.0)  # however slow the server is
    roots = Roots(FIRST)
    told: list[Any] = []
    assert roots.answer() == FIRST

    async def notify(method: str, params: Json | None) -> None:
        told.append(method)
        group.start_soon(server)

    async def server() -> None:
        await anyio.sleep(0.01)
        told.append(roots.answer())

    async with anyio.create_task_group() as group:
        await roots.settle(call(RootsClient()), notify)
        assert told == []
        roots.change()
        began = anyio.current_time()
        await roots.settle(call(RootsClient(SECOND)), notify)
        # A timer may go off as much too early as the clock is coarse.
        assert told == [ROOTS_CHANGED, SECOND] and anyio.current_time() - began >= 0.049
        # A client that does not tell leaves what it told before.
        roots.change()
        await roots.settle(call(RootsClient(None)), notify)
        assert told[2:] == [ROOTS_CHANGED, SECOND]


async def test_a_server_that_never_asked_is_told_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_HEAR_SECONDS", 600.0)
    roots = Roots(FIRST)
    told: list[Any] = []

    async def notify(method: str, params: Json | None) -> None:
        told.append(method)

    roots.change()
    with anyio.fail_after(60):
        await roots.settle(call(RootsClient(SECOND)), notify)
    assert told == [ROOTS_CHANGED]
