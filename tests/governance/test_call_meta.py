"""What a call carries to a server beside its arguments: matched by rules, shown, bound and recorded, or left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringfence.core import canonical
from ringfence.core.model import Json, Outcome, Person, Status
from ringfence.governance import approvals
from ringfence.governance.call_meta import TRACE, split, trace_problem
from tests.faking import Said, Way, contract, definition, governed
from tests.making import rule

pytestmark = pytest.mark.anyio

PEM = "-----BEGIN PRIVATE KEY-----\nMIIEvQ"
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
CALLER = "vendor.example/caller"
OPEN = contract("echo", meta=[CALLER])
SINK = contract("echo", meta=[CALLER], labels=["external_sink"])


def sent(way: Way) -> Json:
    return way.servers.requests[-1].params


async def test_meta_that_no_contract_names_reaches_no_server(tmp_path: Path) -> None:
    async with governed(tmp_path) as way:
        outcome = await way.call("echo", {}, meta={CALLER: PEM, "x": {"deep": [1]}})
        assert outcome.ok
        assert "_meta" not in sent(way)
        assert way.finished()[0]["carried"] == {"stripped": 2}


async def test_meta_that_the_contract_names_reaches_the_server_and_the_record(tmp_path: Path) -> None:
    async with governed(tmp_path, Said(contracts=(OPEN,))) as way:
        assert (await way.call("echo", {}, meta={CALLER: {"id": 1}, "other": 2})).ok
        assert sent(way)["_meta"] == {CALLER: {"id": 1}}
        told = way.finished()[0]["carried"]
        assert (told["stripped"], set(told["meta"])) == (1, {"digest", "bytes"})


@pytest.mark.parametrize(
    "given", [{"meta": {CALLER: [PEM]}}, {"inputs": {"q": {"action": "accept", "content": {"k": PEM}}}}]
)
async def test_rules_match_what_a_call_carries(given: dict[str, Any], tmp_path: Path) -> None:
    said = Said(contracts=(SINK,), preset="owasp-asi")
    async with governed(tmp_path, said) as way:
        outcome = await way.call("echo", {"text": "x"}, **given)
        assert (outcome.status, outcome.reason_code) == (Status.DENIED, "policy")
        assert "asi-private-key" in outcome.facts["rules"]
        assert way.servers.requests == []


async def test_conditions_see_what_a_call_carries(tmp_path: Path) -> None:
    strict = rule("deny", when=f'"{CALLER}" in call.meta && call.meta["{CALLER}"] == "x"')
    async with governed(tmp_path, Said(contracts=(OPEN,), rules=(strict,))) as way:
        assert (await way.call("echo", meta={CALLER: "y"})).ok
        assert (await way.call("echo", meta={CALLER: "x"})).status is Status.DENIED
        assert (await way.call("echo")).ok


def approve(way: Way, outcome: Outcome) -> None:
    assert outcome.status is Status.APPROVAL_REQUIRED and outcome.approval_id is not None, outcome
    approvals.answer(way.store, outcome.approval_id, Person("bob"), approve=True)


async def test_an_approval_is_for_the_meta_that_was_shown(tmp_path: Path) -> None:
    asked = contract("echo", meta=[CALLER], approval="always")
    async with governed(tmp_path, Said(contracts=(asked,))) as way:
        first = await way.call("echo", {"n": 1}, meta={CALLER: "alpha"})
        approve(way, first)
        shown = way.store.reader().approval(str(first.approval_id))
        assert shown is not None and shown.summary["meta"] == {CALLER: "alpha"}
        other = await way.call("echo", {"n": 1}, meta={CALLER: "beta"})
        assert other.status is Status.APPROVAL_REQUIRED and other.approval_id != first.approval_id
        none = await way.call("echo", {"n": 1})
        assert none.status is Status.APPROVAL_REQUIRED and none.approval_id != first.approval_id
        assert way.servers.requests == []
        assert (await way.call("echo", {"n": 1}, meta={CALLER: "alpha", "not-sent": 1})).ok


async def test_an_approval_is_for_the_answers_that_were_shown(tmp_path: Path) -> None:
    asked = contract("echo", approval="always")
    said = Said(contracts=(asked,))
    async with governed(tmp_path, said) as way:
        yes = {"sure": {"action": "accept", "content": {"all": False}}}
        first = await way.call("echo", {"n": 1}, inputs=yes)
        approve(way, first)
        shown = way.store.reader().approval(str(first.approval_id))
        assert shown is not None and shown.summary["inputs"] == yes
        other = await way.call("echo", {"n": 1}, inputs={"sure": {"action": "accept", "content": {"all": True}}})
        assert other.status is Status.APPROVAL_REQUIRED and other.approval_id != first.approval_id
        assert (await way.call("echo", {"n": 1}, inputs=yes)).ok


async def test_a_trace_goes_on_and_leaves_the_digest_alone(tmp_path: Path) -> None:
    asked = contract("echo", approval="always")
    async with governed(tmp_path, Said(contracts=(asked,))) as way:
        first = await way.call("echo", {"n": 1}, meta={"traceparent": PARENT, "tracestate": "a=1", "baggage": "k=v"})
        approve(way, first)
        later = PARENT.replace("00f067", "11f067")
        assert (await way.call("echo", {"n": 1}, meta={"traceparent": later, "tracestate": "a=2", "baggage": "k=w"})).ok
        # Baggage is free text that nobody was shown.
        assert sent(way)["_meta"] == {"traceparent": later, "tracestate": "a=2"}
        told = way.finished()[-1]
        assert told["call"]["trace"] == later
        assert set(told["carried"]["trace"]) == {"traceparent", "tracestate"}
        assert told["carried"]["refused"] == {"baggage": "approval"}


@pytest.mark.parametrize("by", ["contract", "rule"])
async def test_what_runs_on_an_approval_carries_no_baggage(tmp_path: Path, by: str) -> None:
    said = Said(rules=(rule("ask"),)) if by == "rule" else Said(contracts=(contract("echo", approval="always"),))
    async with governed(tmp_path, said) as way:
        approve(way, await way.call("echo", {"n": 1}, meta={"not-sent": 1}))
        assert (await way.call("echo", {"n": 1}, meta={"baggage": "to=mallory", "tracestate": "?"}, id="call_2")).ok
        assert "_meta" not in sent(way)
        left = {"refused": {"tracestate": "syntax", "baggage": "approval"}}
        kept = [record.body for record in way.store.reader().records(call_id="call_2")]
        assert [body["carried"] for body in kept if body["kind"] in ("started", "finished")] == [left, left]


async def test_what_nobody_is_asked_for_carries_its_baggage(tmp_path: Path) -> None:
    async with governed(tmp_path) as way:
        assert (await way.call("echo", meta={"traceparent": PARENT, "baggage": "k=v"})).ok
        assert sent(way)["_meta"] == {"traceparent": PARENT, "baggage": "k=v"}
        assert set(way.finished()[0]["carried"]["trace"]) == {"traceparent", "baggage"}


class Known:
    """A redactor that knows one value."""

    basis = None

    def __init__(self, value: str = "hunter2") -> None:
        self.value = value

    def matches(self, data: bytes) -> bool:
        return self.value.encode() in data

    knows = matches

    def marked(self, text: str) -> tuple[str, dict[str, int]]:
        return self.redact(text)

    def redact(self, text: str, most: int | None = None) -> tuple[str, dict[str, int]]:
        clean = text.replace(self.value, "[redacted]")
        return clean, {"secret": 1} if clean != text else {}

    def secrets(self, text: str) -> dict[str, int]:
        return {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("baggage", text) for text in ("k=hunter2", "k=%68unter2", "hunter2=v", "k=v;p=hunter2")),
        *(("tracestate", text) for text in ("k=hunter2", "hunter2=v", "a=1,k=xhunter2x")),
    ],
)
async def test_a_trace_that_holds_a_secret_stays_behind(name: str, text: str, tmp_path: Path) -> None:
    async with governed(tmp_path) as way:
        way.pipeline._guard.redactor = Known()
        assert (await way.call("echo", meta={"traceparent": PARENT, name: text})).ok
        assert sent(way)["_meta"] == {"traceparent": PARENT}
        assert way.finished()[0]["carried"]["refused"] == {name: "secret"}


async def test_a_trace_whose_id_is_a_secret_stays_behind(tmp_path: Path) -> None:
    """Its id is 32 digits that the caller chose."""
    async with governed(tmp_path) as way:
        way.pipeline._guard.redactor = Known("4bf92f3577b34da6a3ce929d0e0e4736")
        assert (await way.call("echo", meta={"traceparent": PARENT, "tracestate": "a=1"})).ok
        assert sent(way)["_meta"] == {"tracestate": "a=1"}
        told = way.finished()[0]
        assert told["carried"]["refused"] == {"traceparent": "secret"} and told["call"].get("trace") is None


async def test_rules_see_baggage(tmp_path: Path) -> None:
    strict = rule("deny", argument_patterns={"*": "customer-[0-9]+"})
    async with governed(tmp_path, Said(rules=(strict,))) as way:
        assert (await way.call("echo", meta={"baggage": "who=customer%2D12"})).status is Status.DENIED


BAD_TRACES: dict[str, list[Any]] = {
    "traceparent": [
        "x", PARENT.upper(), PARENT + "-x", PARENT.replace("00-4", "ff-4"), "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        f"{PARENT}\n", 7, None, [PARENT],
    ],
    "tracestate": [
        "", "a", "A=1", "a=1,a=2", "a=b=c", "a=é", "a=1\n", "a=" + "x" * 600, {},
        ",".join(f"k{n}=1" for n in range(33)),
    ],
    "baggage": [
        "", "k", "k=a b", 'k="v"', "k=v,", "k=\\", "k=é", "k=%zz", "k=" + "x" * 9000, 1,
        ",".join(f"k{n}=1" for n in range(65)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", TRACE)
def test_what_is_no_trace_stays_behind(name: str) -> None:
    for value in BAD_TRACES[name]:
        assert trace_problem(name, value) is not None, value
        assert split({name: value}, ()).trace == {}


GOOD_TRACES = {
    "traceparent": [PARENT, PARENT[:-2] + "00"],
    "tracestate": ["rojo=00f067aa0ba902b7,congo=t61rcWkgMzE", "a=1, b=2", "tenant@vendor=x y"],
    "baggage": ["userId=alice,serverNode=DF%2028,isProduction=false", "k=v;prop;p2=1 , k2 = v2", "k="],
}


@pytest.mark.parametrize("name", TRACE)
def test_what_is_a_trace_goes_on(name: str) -> None:
    for value in GOOD_TRACES[name]:
        assert trace_problem(name, value) is None, value
        assert split({name: value}, ()).trace == {name: value}


async def test_what_is_kept_of_a_call_tells_its_arguments_from_what_goes_beside_them(tmp_path: Path) -> None:
    kept = contract("echo", meta=[CALLER], record="full")
    arguments = {"a": 1, "_meta": {"evil": 1}, "inputResponses": "EVIL", "arguments": 2, "meta": 3, "inputs": 4}
    answers = {"q": {"action": "decline"}}
    beside: dict[str, Json] = {
        "meta": {"meta": {CALLER: "nice"}},
        "inputs": {"inputs": answers},
        "both": {"meta": {CALLER: "nice"}, "inputs": answers},
    }
    async with governed(tmp_path, Said(contracts=(kept,))) as way:
        for id, more in beside.items():
            assert (await way.call("echo", arguments, id=id, **more)).ok
            payload = way.store.reader().payload(id, "arguments")
            assert payload is not None
            assert canonical.loads(payload.body) == {"arguments": arguments, **more}
        assert (await way.call("echo", arguments, id="alone")).ok
        alone = way.store.reader().payload("alone", "arguments")
        assert alone is not None and canonical.loads(alone.body) == arguments


async def test_meta_is_bounded(tmp_path: Path) -> None:
    async with governed(tmp_path, Said(contracts=(OPEN,))) as way:
        large = await way.call("echo", meta={CALLER: "x" * 70_000})
        assert (large.status, large.reason_code) == (Status.VALIDATION_FAILURE, "bad_meta")
        deep: Any = 1
        for _ in range(100):
            deep = [deep]
        nested = await way.call("echo", meta={CALLER: deep})
        assert (nested.status, nested.reason_code) == (Status.VALIDATION_FAILURE, "bad_meta")
        assert way.servers.requests == []


async def test_an_idempotency_key_is_for_the_meta_too(tmp_path: Path) -> None:
    async with governed(tmp_path, Said(contracts=(OPEN,))) as way:
        assert (await way.call("echo", idempotency_key="k", meta={CALLER: 1})).ok
        other = await way.call("echo", idempotency_key="k", meta={CALLER: 2})
        assert other.reason_code == "key_conflict"


async def test_resources_and_prompts_carry_no_meta(tmp_path: Path) -> None:
    said = Said(prompts=(definition("greet"),))
    async with governed(tmp_path, said, [{"contents": []}]) as way:
        given = {"kind": "resource", "server": "desk", "method": "resources/read", "meta": {CALLER: 1}}
        assert (await way.call("doc:1", {"uri": "doc:1"}, **given)).ok
        assert sent(way) == {"uri": "doc:1"}
